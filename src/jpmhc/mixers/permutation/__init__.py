from jpmhc.mixers.permutation.pytorch_form import Permutation

__all__ = ["Permutation"]
