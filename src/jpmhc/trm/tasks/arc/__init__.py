"""ARC-AGI: puzzles, their variants, votes on their answers."""

from jpmhc.trm.tasks.arc.dataset import Arc, ArcConfig

__all__ = ["Arc", "ArcConfig"]
