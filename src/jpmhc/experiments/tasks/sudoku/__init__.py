"""Sudoku: generated puzzles, which a small model learns in minutes on a laptop."""

from jpmhc.experiments.tasks.sudoku.dataset import Sudoku, SudokuConfig

__all__ = ["Sudoku", "SudokuConfig"]
