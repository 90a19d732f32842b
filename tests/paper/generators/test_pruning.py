"""Pruning, against exact radii: nothing that reaches the limit is dropped, and most of the rest is."""

import numpy as np
import pytest

from jpmhc.paper.generators import representations, symmetric_group
from jpmhc.paper.generators.pruning import BACKWARD_ERROR, BlockPruner
from jpmhc.paper.generators.question import Question, find_classes
from jpmhc.paper.generators.random_walk import spectral_gap


def classes(n, size):
    question = find_classes(Question(n, size))
    return np.concatenate([sets for unit in question.units() for sets, _ in question.list_sets(unit)])


@pytest.mark.parametrize(("n", "size"), [(3, 3), (4, 2), (4, 5)])
def test_survivors_include_every_set_within_the_limit(n, size):
    # Five permutations of four streams at the limit 1/5 are the hard case: defective blocks, exact ties.
    sets, group = classes(n, size)[::2], symmetric_group.elements(n)
    radii = np.array([1 - spectral_gap(group[s]) for s in sets])
    for limit in (radii.min() + 1e-9, 0.5):
        pruned: dict = {}
        kept = BlockPruner(n, size).select_survivors(sets, limit, pruned)
        must = {tuple(s) for s, r in zip(sets.tolist(), radii) if r <= limit}
        assert must <= set(map(tuple, kept.tolist()))
        assert len(kept) + sum(pruned.values()) == len(sets)
        # Blocks of at most 3 × 3: what lies above the limit by more than the allowance is dropped.
        allowed = {tuple(s) for s, r in zip(sets.tolist(), radii) if r <= limit + 1e-4}
        assert set(map(tuple, kept.tolist())) <= allowed


def test_large_blocks_are_pruned_unless_they_are_defective():
    random = np.random.default_rng(0)
    pruner = BlockPruner(6, 4)
    sets = np.array([random.choice(720, 4, replace=False) for _ in range(60)])
    for shape in [(4, 2), (3, 2, 1)]:
        radii = np.abs(np.linalg.eigvals(pruner.blocks(shape, sets))).max(axis=1)
        limit = 0.5
        kept = pruner._select_within(pruner.blocks(shape, sets), limit)
        assert set(np.flatnonzero(radii <= limit)) <= set(kept.tolist())
        condition = np.linalg.cond(np.linalg.eig(pruner.blocks(shape, sets[kept]))[1])
        assert (radii[kept][condition < 1e4] < limit + 1e-3).all()
        assert len(kept) < len(sets)


def test_a_large_defective_block_is_not_dropped_for_rounding():
    # A Jordan block of size 9 with eigenvalue 1/2: floating point finds moduli up to 0.52 or so.
    pruner, jordan = BlockPruner(6, 4), 0.5 * np.eye(9) + 0.4 * np.eye(9, k=1)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((9, 9)))[0]
    block = rotation @ jordan @ rotation.T
    assert np.abs(np.linalg.eigvals(block)).max() > 0.505
    assert len(pruner._select_within(block[None], 0.5 + 1e-9)) == 1
    assert len(pruner._select_within(block[None], 0.4)) == 0


def test_blocks_are_averages_of_representations():
    sets = np.array([[0, 5, 7], [23, 1, 2]])
    for shape in representations.nontrivial_partitions(4):
        expected = representations.represent(shape, symmetric_group.elements(4)[sets]).mean(axis=1)
        np.testing.assert_allclose(BlockPruner(4, 3).blocks(shape, sets), expected, atol=1e-15)


def test_the_allowed_backward_error_exceeds_what_the_solver_makes():
    # The eigenvalues found are exact for a matrix within the backward error: det(M − λ) is as small as that.
    random, pruner = np.random.default_rng(0), BlockPruner(6, 4)
    sets = np.array([random.choice(720, 4, replace=False) for _ in range(300)])
    blocks = pruner.blocks((5, 1), sets)
    eigenvalues = np.linalg.eigvals(blocks)
    shifted = blocks[:, None] - eigenvalues[..., None, None] * np.eye(5)
    smallest = np.linalg.svd(shifted, compute_uv=False)[..., -1]
    assert smallest.max() < BACKWARD_ERROR
