from jpmhc.mixers.sinkhorn.pytorch_form import Sinkhorn

__all__ = ["Sinkhorn"]
