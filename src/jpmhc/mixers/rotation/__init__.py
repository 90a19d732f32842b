from jpmhc.mixers.rotation.pytorch_form import Rotation

__all__ = ["Rotation"]
