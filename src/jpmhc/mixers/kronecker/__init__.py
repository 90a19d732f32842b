from jpmhc.mixers.kronecker.pytorch_form import Kronecker

__all__ = ["Kronecker"]
