"""A real model's Jacobian, measured beside the theory: `jpmhc.diagnose(model, inputs)`, and `watch` during training."""

from jpmhc.diagnose.diagnosis import Diagnosis
from jpmhc.diagnose.measure import diagnose
from jpmhc.diagnose.recommend import Candidate, Recommendation, recommend
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.diagnose.watch import watch

__all__ = ["Candidate", "Diagnosis", "Recommendation", "Spectrum", "diagnose", "recommend", "watch"]

# `jpmhc.diagnose` is the function, so that what else it offers is found on the function.
diagnose.watch = watch  # type: ignore[attr-defined]
