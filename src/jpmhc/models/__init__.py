"""Models: the recursive transformer, its layers and its losses."""

from jpmhc.models.recursive import Carry, Prediction, RecursiveConfig, RecursiveCore, RecursiveModel, Step, refill

__all__ = ["Carry", "Prediction", "RecursiveConfig", "RecursiveCore", "RecursiveModel", "Step", "refill"]
