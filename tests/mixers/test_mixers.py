"""Laws over every mixer, and what is particular to one."""

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc import checks, mixers
from jpmhc.optim import GrassmannianOptimizer
from tests import laws

NAMES = list(jpmhc.MIXERS)
STREAMS = 4


def converged(name: str) -> mixers.Mixer:
    """The mixer as users get it, but for Sinkhorn run to convergence: T = 20 is a few 1e-3 away."""
    return mixers.Sinkhorn(STREAMS, iterations=400) if name == "sinkhorn" else mixers.make(name, STREAMS)


@pytest.fixture(params=[*NAMES, "grassmann static", "cayley n=6", "sinkhorn unrolled"])
def mixer(request) -> mixers.Mixer:
    special = {
        "grassmann static": lambda: mixers.Grassmann(STREAMS, static=True),
        "cayley n=6": lambda: mixers.Cayley(6),
        "sinkhorn unrolled": lambda: mixers.Sinkhorn(STREAMS, iterations=400, gradient="unrolled"),
    }
    return special[request.param]() if request.param in special else converged(request.param)


def test_start(mixer):
    laws.start_is_a_member_that_keeps_equal_streams(mixer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_membership(mixer, dtype):
    laws.any_logits_give_a_member(mixer, dtype)


def test_half_precision(mixer):
    laws.half_precision_is_computed_in_float32(mixer)


def test_autocast(mixer):
    laws.autocast_changes_nothing(mixer)


def test_batch(mixer):
    laws.batch_equals_loop(mixer)


def test_transforms(mixer):
    laws.transforms_agree(mixer)


def test_gradcheck(mixer):
    laws.derivative_is_exact(mixer)


@pytest.mark.parametrize("name", [*NAMES, "grassmann static"])
def test_compile(name):
    laws.compiled_equals_eager(mixers.Grassmann(4, static=True) if name == "grassmann static" else mixers.make(name, 4))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dynamic", [True, False])
def test_save_and_load(name, dynamic):
    x = torch.randn(3, STREAMS, 8)
    laws.survives_saving(
        lambda: jpmhc.HyperConnection(nn.Linear(8, 8), 8, STREAMS, name, index=0, dynamic=dynamic, norm="layer"), x
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_membership_after_optimiser_steps(name, kind):
    torch.manual_seed(0)
    block = jpmhc.HyperConnection(nn.Linear(8, 8), 8, STREAMS, converged(name), index=0)
    optimizer = kind(jpmhc.parameter_groups(block, 0.1), lr=0.01)
    laws.stays_a_member_while_training(block, torch.randn(16, STREAMS, 8), optimizer)


def test_static_frame_stays_on_its_manifold_under_the_riemannian_optimiser():
    torch.manual_seed(0)
    block = jpmhc.HyperConnection(nn.Linear(8, 8), 8, STREAMS, "grassmann", index=0, dynamic=False)
    before = block.mixer.frame.detach().clone()
    optimizer = GrassmannianOptimizer(block, torch.optim.AdamW(block.parameters(), lr=0.05), lr=0.5)
    laws.stays_a_member_while_training(block, torch.randn(16, STREAMS, 8), optimizer)
    assert (block.mixer.frame - before).norm() > 1e-3


def test_kronecker_is_the_kronecker_product():
    logits = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)
    factors = [torch.tensor([[a, 1 - a], [1 - a, a]], dtype=torch.float64) for a in logits.sigmoid().tolist()]
    expected = torch.kron(torch.kron(factors[0], factors[1]), factors[2])
    assert torch.allclose(mixers.Kronecker(8)(logits), expected)


def test_permutation_takes_a_basis_without_the_identity():
    basis = torch.tensor([[1, 0, 2], [1, 2, 0]])
    mixer = mixers.Permutation(3, basis=basis)
    assert torch.allclose(mixer(mixer.start().float()).sum(-1), torch.ones(3))
    laws.any_logits_give_a_member(mixer, torch.float64)


def test_a_checkpoint_with_another_basis_is_refused():
    other = mixers.Permutation(4, basis=torch.tensor([[1, 0, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0]]))
    with pytest.raises(ValueError, match="another permutation basis"):
        mixers.Permutation(4, 3).load_state_dict(other.state_dict())


def test_grassmann_has_the_rank_it_was_given():
    for rank in (1, 3):
        matrix = mixers.Grassmann(STREAMS, rank)(torch.randn(5, STREAMS * rank, dtype=torch.float64))
        assert torch.linalg.matrix_rank(matrix).tolist() == [rank] * 5


@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_mixer_takes_the_common_stream_counts(n):
    for name in NAMES:
        laws.start_is_a_member_that_keeps_equal_streams(mixers.make(name, n))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "identity"])
def test_bad_logits_raise_or_where_the_caller_checks_spoil_their_own_matrix_alone(name, bad):
    mixer = mixers.make(name, STREAMS)
    logits = mixer.start().float().repeat(3, 1)
    logits[1, 0] = bad
    with checks.unchecked():
        matrix = mixer(logits)
    assert matrix.isfinite().all((-2, -1)).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="must be finite, got 1 NaN or infinite entries"):
        mixer(logits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixers.make("cayly", 4), "unknown mixer 'cayly'; the known ones are identity, unconstrained"),
        (lambda: mixers.make("kronecker", 6), "power of two"),
        (lambda: mixers.Grassmann(4, 5), "rank must be between 1 and the number of streams, 4, got 5"),
        (lambda: mixers.Sinkhorn(4, iterations=0), "iterations must be a whole number and at least 1"),
        (lambda: mixers.make(mixers.Cayley(3), 4), "the mixer is for 3 streams, the connection has 4"),
        (lambda: mixers.Permutation(3, basis=torch.tensor([[0, 1]])), r"shape \[K, 3\]"),
        (lambda: mixers.Permutation(3, 7), "between 1 and 3! = 6"),
        (lambda: mixers.Permutation(3, basis=torch.tensor([[0, 1, 2], [0, 1, 2]])), "each permutation once"),
        (lambda: mixers.Permutation(3, basis=torch.empty(0, 3, dtype=torch.long)), "K >= 1"),
        (lambda: mixers.Sinkhorn(4, gradient="exact"), "gradient must be one of"),
        (lambda: mixers.Sinkhorn(4, tolerance=float("nan")), "tolerance must be positive and finite"),
        (lambda: mixers.Cayley(4, scale=float("nan")), "scale must be a finite number"),
        (lambda: mixers.Grassmann(4, 1.5), "rank must be between"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
