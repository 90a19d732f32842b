from jpmhc.mixers.identity.pytorch_form import Identity

__all__ = ["Identity"]
