"""ARC-AGI: puzzles, their variants, and the tasks that models train on."""

from jpmhc.experiments.tasks.arc.dataset import Arc, ArcConfig

__all__ = ["Arc", "ArcConfig"]
