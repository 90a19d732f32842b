from jpmhc.mixers.circulant.pytorch_form import Circulant

__all__ = ["Circulant"]
