"""Comparisons of mixers under equal conditions: arms (mixers with options) × learning rates × seeds on one task."""

from jpmhc.experiments.comparison.comparison import Comparison, collect, compare
from jpmhc.experiments.comparison.language import LanguageExperiment
from jpmhc.experiments.comparison.recursive import RecursiveExperiment

__all__ = ["Comparison", "LanguageExperiment", "RecursiveExperiment", "collect", "compare"]
