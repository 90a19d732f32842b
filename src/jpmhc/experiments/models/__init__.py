"""The models of the experiments: the recursive transformer, the language decoder and the ARC decoder."""

from jpmhc.experiments.models.recursive import (
    Carry,
    Prediction,
    RecursiveConfig,
    RecursiveCore,
    RecursiveModel,
    Step,
    refill_rows,
)

__all__ = ["Carry", "Prediction", "RecursiveConfig", "RecursiveCore", "RecursiveModel", "Step", "refill_rows"]
