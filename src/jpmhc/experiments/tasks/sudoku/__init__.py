"""Sudoku: puzzles generated on the spot, for runs of minutes on a laptop."""

from jpmhc.experiments.tasks.sudoku.dataset import Sudoku, SudokuConfig

__all__ = ["Sudoku", "SudokuConfig"]
