"""Measure a model's Jacobian and compare it with the theory; watch a training run; recommend a mixer."""

from jpmhc.diagnose.diagnosis import Diagnosis
from jpmhc.diagnose.lens import Lens, lens
from jpmhc.diagnose.measure import diagnose
from jpmhc.diagnose.recommend import Candidate, Recommendation, recommend
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.diagnose.watch import watch

__all__ = ["Candidate", "Diagnosis", "Lens", "Recommendation", "Spectrum", "diagnose", "lens", "recommend", "watch"]

# `jpmhc.diagnose` is the function and not this package, so `watch` and `lens` become attributes of the function.
diagnose.watch = watch  # type: ignore[attr-defined]
diagnose.lens = lens  # type: ignore[attr-defined]
