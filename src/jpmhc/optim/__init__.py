"""Optimisers: AdamAtan2 for weights, SignSGD for embedding tables, a Riemannian one for Grassmann frames."""

from jpmhc.optim.adam_atan2 import AdamAtan2
from jpmhc.optim.grassmannian import GrassmannianOptimizer, grassmann_frames
from jpmhc.optim.sign_sgd import SignSGD

__all__ = ["AdamAtan2", "GrassmannianOptimizer", "SignSGD", "grassmann_frames"]
