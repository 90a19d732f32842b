from jpmhc.mixers.orthostochastic.pytorch_form import Orthostochastic

__all__ = ["Orthostochastic"]
