"""Sequences of ARC pairs: tokens against grids written the slow way, packs, and what training may see."""

import numpy as np
import pytest
import torch

from jpmhc.experiments.models.arc_decoder import make_block_mask, make_mask
from jpmhc.experiments.tasks.arc import Arc, ArcConfig
from jpmhc.experiments.tasks.arc.puzzles import Pair, Puzzle
from jpmhc.experiments.tasks.arc.sequences import (
    BLOCK,
    END,
    IN_INPUT,
    IN_OUTPUT,
    IN_SEPARATOR,
    IN_START,
    LONGEST,
    LONGEST_GRID,
    NO_LABEL,
    ROW_END,
    SEPARATOR,
    START,
    PackedPairs,
    measure_pairs,
    read_answers,
    write_sequences,
)
from jpmhc.experiments.tasks.arc.tokens import FIRST_COLOUR, GRID_END


def transformed(grid: np.ndarray, symmetry: int, colours: np.ndarray) -> np.ndarray:
    """A variant's grid the slow way."""
    grid = np.flipud(grid) if symmetry & 2 else grid
    grid = np.fliplr(grid) if symmetry & 1 else grid
    return colours[grid.T if symmetry & 4 else grid]


def spell(grid: np.ndarray) -> list[int]:
    """A grid's tokens the slow way."""
    return [token for row in grid.tolist() for token in [*row, ROW_END]]


def pairs_of(arc: Arc) -> list[Pair]:
    return [pair for puzzle in arc.puzzles for pair in puzzle.demonstrations + puzzle.tests]


def test_a_sequence_is_the_pair_row_by_row(arc: Arc) -> None:
    rng = np.random.default_rng(0)
    variant = rng.integers(0, len(arc.variants.symmetry), 200)
    puzzle = arc.variants.puzzle_of(variant)
    first = np.cumsum([0, *(len(p.demonstrations) + len(p.tests) for p in arc.puzzles)])
    pair = first[puzzle] + rng.integers(0, 2, 200)
    sequences = write_sequences(arc, variant, pair)
    everything = write_sequences(arc, variant, pair, predict_inputs=True)
    pairs = pairs_of(arc)
    assert np.array_equal(sequences.lengths, measure_pairs(arc, variant, pair))
    for k in range(200):
        here = slice(sequences.starts[k], sequences.starts[k + 1])
        how = int(arc.variants.symmetry[variant[k]]), arc.variants.colours[variant[k]]
        shown, answer = (transformed(grid, *how) for grid in (pairs[pair[k]].input, pairs[pair[k]].output))
        whole = [START, *spell(shown), SEPARATOR, *spell(answer), END]
        assert sequences.tokens[here].tolist() == whole[:-1]
        assert everything.labels[here].tolist() == whole[1:]
        known = len(spell(answer)) + 1
        assert sequences.labels[here].tolist() == [NO_LABEL] * (len(whole) - 1 - known) + whole[-known:]
        places = [(IN_START, 0, 0), *places_of(IN_INPUT, shown), (IN_SEPARATOR, 0, 0), *places_of(IN_OUTPUT, answer)]
        assert sequences.coordinates[here].tolist() == [list(place) for place in places]
        assert (sequences.puzzles[k], sequences.symmetries[k]) == (puzzle[k], how[0])


def places_of(part: int, grid: np.ndarray) -> list[tuple[int, int, int]]:
    height, width = grid.shape
    return [(part, row, column) for row in range(height) for column in range(width + 1)]


def test_a_prompt_is_the_sequence_up_to_its_separator(arc: Arc) -> None:
    pair, variant = np.arange(6), arc.variants.starts[[0] * 3 + [1] * 3]
    prompts = write_sequences(arc, variant, pair, outputs=False)
    whole = write_sequences(arc, variant, pair)
    for k in range(6):
        here = prompts.tokens[prompts.starts[k] : prompts.starts[k + 1]].tolist()
        there = whole.tokens[whole.starts[k] : whole.starts[k + 1]].tolist()
        assert here == there[: there.index(SEPARATOR)]
    assert (prompts.labels == NO_LABEL).all()


def test_packs_hold_every_training_pair_once_per_epoch_and_hardly_any_space_is_left(arc: Arc) -> None:
    packs = PackedPairs(arc, 4096, seed=3)
    assert len(packs.pair) == arc.epoch_length - 1  # a public training puzzle has a test of an evaluation puzzle
    count, used, labels = packs.count_packs(5), 0, 0
    for index in range(count):
        pack = packs.pack(5, index)
        used += int((pack.owners < packs.most - 1).sum())
        labels += int((pack.labels != NO_LABEL).sum())
    pair = np.concatenate([part for _, part in packs._plan(5)])
    variant = np.concatenate([part for part, _ in packs._plan(5)])
    assert np.array_equal(np.sort(pair), np.sort(packs.pair))
    assert used == measure_pairs(arc, variant, pair).sum()
    assert used > 0.95 * count * 4096
    assert labels == (write_sequences(arc, variant, pair).labels != NO_LABEL).sum()
    again, other = PackedPairs(arc, 4096, seed=3).pack(5, 2), packs.pack(6, 2)
    assert all(torch.equal(a, b) for a, b in zip(vars(again).values(), vars(packs.pack(5, 2)).values()))
    assert not torch.equal(again.tokens, other.tokens)


def test_no_test_of_an_evaluation_puzzle_is_in_a_pack(arc: Arc) -> None:
    """Neither as it is nor in any symmetry; one puzzle shows its own test, mirrored, among its demonstrations."""
    tests = {
        (grids[0].shape, grids[0].tobytes(), grids[1].tobytes()): (puzzle.name, symmetry)
        for puzzle in arc.puzzles[400:]
        for test in puzzle.tests
        for symmetry in range(8)
        for grids in [[transformed(g, symmetry, np.arange(10, dtype=np.uint8)) for g in (test.input, test.output)]]
    }
    assert len(tests) > 8 * 400
    packs = PackedPairs(arc, 4096, seed=0)
    seen = 0
    for epoch in range(2):
        for index, (variant, _) in enumerate(packs._plan(epoch)):
            pack = packs.pack(epoch, index)
            for owner, number in enumerate(variant):
                tokens = pack.tokens[pack.owners == owner].numpy()
                split = int(np.flatnonzero(tokens == SEPARATOR)[0])
                back = np.argsort(arc.variants.colours[number]).astype(np.uint8)
                grids = []
                for part in (tokens[1:split], tokens[split + 1 :]):
                    grid = part.reshape(-1, int(np.argmax(part == ROW_END)) + 1)[:, :-1]
                    grids.append(back[grid])
                key = (grids[0].shape, grids[0].tobytes(), grids[1].tobytes())
                shown = arc.puzzles[int(arc.variants.puzzle_of(number))].name
                assert key not in tests or (shown == "992798f6" == tests[key][0] and tests[key][1] > 0)
                seen += 1
    assert seen == 2 * len(packs.pair)


def test_a_pack_says_who_sees_whom(arc: Arc) -> None:
    pack = PackedPairs(arc, 2048, seed=0).pack(0, 0)
    owners = pack.owners
    truth = (owners[:, None] == owners[None, :]) & (torch.arange(2048)[:, None] >= torch.arange(2048)[None, :])
    assert torch.equal(make_mask(pack), truth)
    blocks = truth.view(2048 // BLOCK, BLOCK, 2048 // BLOCK, BLOCK).any(3).any(1)
    mask = make_block_mask(pack)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)
    assert mask.q_num_blocks is not None
    assert torch.equal(mask.q_num_blocks[0, 0].long(), blocks.sum(0))


@pytest.mark.parametrize("spoiled", [None, "ragged", "endless", "early"])
def test_answers_are_read_back(arc: Arc, spoiled: str | None) -> None:
    grids = [np.array([[1, 2, 3], [4, 5, 6]], np.uint8), np.array([[7]], np.uint8)]
    written, counts = np.zeros((2, 20), np.uint8), np.zeros(2, np.int64)
    for row, grid in zip(range(2), grids):
        tokens = [*spell(grid), END]
        if row == 0 and spoiled is not None:
            tokens = {"ragged": [1, 2, ROW_END, 4, ROW_END, END], "endless": tokens[:-1], "early": [1, 2, END]}[spoiled]
        written[row, : len(tokens)], counts[row] = tokens, len(tokens)
    squares = read_answers(written, counts, 5).reshape(2, 5, 5)
    expected = np.zeros((2, 5, 5), np.uint8)
    if spoiled is None:
        expected[0, :2, :3] = grids[0] + FIRST_COLOUR
        expected[0, 2, :3] = expected[0, :2, 3] = GRID_END
    expected[1, 0, 0] = 7 + FIRST_COLOUR
    expected[1, 1, 0] = expected[1, 0, 1] = GRID_END
    assert np.array_equal(squares, expected)


def test_a_right_answer_is_the_label_of_its_test(arc: Arc) -> None:
    """Also where the grid fills the square, so that its end has no place."""
    rows = arc.test_selection(2, 0)
    _, variant, pair = arc.locate_rows(rows)
    sequences = write_sequences(arc, variant, pair)
    written = np.zeros((len(rows), LONGEST_GRID + 1), np.uint8)
    counts = np.zeros(len(rows), np.int64)
    for k in range(len(rows)):
        labels = sequences.labels[sequences.starts[k] : sequences.starts[k + 1]]
        answer = labels[labels != NO_LABEL]
        written[k, : len(answer)], counts[k] = answer, len(answer)
    squares = read_answers(written, counts, arc.config.side)
    assert np.array_equal(squares, arc.test_examples(rows).labels)


def test_colours_of_outputs_alone_stay() -> None:
    pair = Pair(np.array([[1, 2]], np.uint8), np.array([[3, 1]], np.uint8))
    secret = Pair(np.array([[1, 4]], np.uint8), np.array([[5, 4]], np.uint8))
    puzzles = [Puzzle("a", (pair,), (secret,))]
    arc = Arc(ArcConfig(augmentations=50, keep_answer_colours=True), [], puzzles)
    assert (arc.variants.colours[:, 3] == 3).all()
    for colour in (1, 2, 4, 5):  # 5 is in the test's output alone, which nobody may look at
        assert len(np.unique(arc.variants.colours[:, colour])) > 3
    assert (np.sort(arc.variants.colours, 1) == np.arange(10)).all()


def test_a_pair_that_is_too_long_is_refused(arc: Arc) -> None:
    with pytest.raises(ValueError, match=r"task \w+ has a pair of \d+ tokens, which does not fit into a pack of 1024"):
        PackedPairs(arc, 1024, seed=0)
    with pytest.raises(ValueError, match="multiple of 128"):
        PackedPairs(arc, 1000, seed=0)
    assert measure_pairs(arc, arc.variants.starts[:-1], np.zeros(len(arc.puzzles), int)).max() <= LONGEST
