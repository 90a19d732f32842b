"""The recursive transformer, its layers and its losses."""

from jpmhc.experiments.models.config import RecursiveConfig
from jpmhc.experiments.models.recursive import Carry, Prediction, RecursiveCore, RecursiveModel, Step, refill_rows

__all__ = ["Carry", "Prediction", "RecursiveConfig", "RecursiveCore", "RecursiveModel", "Step", "refill_rows"]
