from jpmhc.mixers.unconstrained.pytorch_form import Unconstrained

__all__ = ["Unconstrained"]
