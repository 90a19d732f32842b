"""Comparing mixers when nothing else differs: mixers × seeds on one task."""

from jpmhc.trm.comparison.comparison import Comparison, collect, compare
from jpmhc.trm.comparison.language import LanguageExperiment
from jpmhc.trm.comparison.recursive import RecursiveExperiment

__all__ = ["Comparison", "LanguageExperiment", "RecursiveExperiment", "collect", "compare"]
