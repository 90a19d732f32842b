"""The recursive transformer, its layers and its losses."""

from jpmhc.trm.model.config import RecursiveConfig
from jpmhc.trm.model.recursive import Carry, Prediction, RecursiveCore, RecursiveModel, Step, refill_rows

__all__ = ["Carry", "Prediction", "RecursiveConfig", "RecursiveCore", "RecursiveModel", "Step", "refill_rows"]
