"""A model's Jacobian, measured and compared with the theory; `watch` during training; `recommend` a mixer."""

from jpmhc.diagnose.diagnosis import Diagnosis
from jpmhc.diagnose.measure import diagnose
from jpmhc.diagnose.recommend import Candidate, Recommendation, recommend
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.diagnose.watch import watch

__all__ = ["Candidate", "Diagnosis", "Recommendation", "Spectrum", "diagnose", "recommend", "watch"]

# `jpmhc.diagnose` is the function, so that `watch` has to be an attribute of the function.
diagnose.watch = watch  # type: ignore[attr-defined]
