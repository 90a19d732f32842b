from jpmhc.mixers.grassmann.pytorch_form import Grassmann

__all__ = ["Grassmann"]
