"""ARC-AGI: reading puzzles, varying them, and counting the votes on their answers."""

from jpmhc.experiments.tasks.arc.dataset import Arc, ArcConfig

__all__ = ["Arc", "ArcConfig"]
