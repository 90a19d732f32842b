"""Laws over every mixer, and what is particular to one."""

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc import mixers
from jpmhc.optim import GrassmannianOptimizer
from tests import laws

NAMES = list(jpmhc.MIXERS)
STREAMS = 4


def converged(name: str) -> mixers.Mixer:
    """The mixer as users get it, but for Sinkhorn run to convergence: T = 20 is a few 1e-3 away."""
    return mixers.Sinkhorn(STREAMS, iterations=400) if name == "sinkhorn" else mixers.make_mixer(name, STREAMS)


@pytest.fixture(
    params=[*NAMES, "grassmann static", "cayley n=6", "sinkhorn unrolled", "sinkhorn transposed", "two blocks"]
)
def mixer(request) -> mixers.Mixer:
    special = {
        "grassmann static": lambda: mixers.Grassmann(STREAMS, static=True),
        "cayley n=6": lambda: mixers.Cayley(6),
        "two blocks": lambda: mixers.Orthostochastic(STREAMS, 2),
        "sinkhorn transposed": lambda: mixers.Sinkhorn(STREAMS, iterations=400, first="columns", transposed=True),
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
    laws.compiled_equals_eager(
        mixers.Grassmann(4, static=True) if name == "grassmann static" else mixers.make_mixer(name, 4)
    )


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
        if mixers.MIXERS[name].why_not(n) is None:
            laws.start_is_a_member_that_keeps_equal_streams(mixers.make_mixer(name, n))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "identity"])
def test_nan_spoils_its_own_matrix_alone(name):
    mixer = mixers.make_mixer(name, STREAMS)
    logits = mixer.start().float().repeat(3, 1)
    logits[1, 0] = float("nan")
    assert mixer(logits).isfinite().all((-2, -1)).tolist() == [True, False, True]


@pytest.mark.parametrize("name", [*NAMES, *mixers.ENSEMBLES])
def test_random_skips_are_members_and_follow_the_seed(name):
    draws = [mixers.sample_skips(name, STREAMS, (50,), generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert draws[0].shape == (50, STREAMS, STREAMS)
    assert draws[0].dtype == torch.float64
    mixer = mixers.make_mixer(name if name in NAMES else mixers.ENSEMBLES[name].name, STREAMS)
    assert mixer.violation(draws[0]).max() <= (1e-9 if name in ("sinkhorn", "bistochastic") else 1e-12)
    assert torch.equal(draws[0], draws[1])
    assert name == "identity" or not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixers.make_mixer("cayly", 4), "no mixer is called 'cayly'; choose one of identity, unconstrained"),
        (lambda: mixers.make_mixer("kronecker", 6), "power of two"),
        (lambda: mixers.make_mixer("mhc_lite", 8), "at most 5 streams, got 8"),
        (lambda: mixers.make_mixer("permutation", 1), "at least two streams, got 1"),
        (lambda: mixers.sample_skips("haar", 4), "no random skip is called 'haar'"),
        (lambda: mixers.Grassmann(4, 5), "rank must be between 1 and the number of streams, 4, got 5"),
        (lambda: mixers.Sinkhorn(4, iterations=0), "iterations must be a whole number, at least 1"),
        (lambda: mixers.make_mixer(mixers.Cayley(3), 4), "the mixer is for 3 streams, the connection has 4"),
        (lambda: mixers.Permutation(3, basis=torch.tensor([[0, 1]])), r"shape \[K, 3\]"),
        (lambda: mixers.Permutation(3, 7), "between 1 and 3! = 6"),
        (lambda: mixers.Permutation(3, basis=torch.tensor([[0, 1, 2], [0, 1, 2]])), "each permutation once"),
        (lambda: mixers.Permutation(3, basis=torch.empty(0, 3, dtype=torch.long)), "K >= 1"),
        (lambda: mixers.Sinkhorn(4, gradient="exact"), "no gradient is called 'exact'"),
        (lambda: mixers.Sinkhorn(4, tolerance=float("nan")), "tolerance must be positive and finite"),
        (lambda: mixers.Cayley(4, scale=float("nan")), "scale must be positive and finite"),
        (lambda: mixers.Rotation(4, scale=0.0), "scale must be positive and finite, got 0.0"),
        (lambda: mixers.Orthostochastic(4, scale=-1.0), "scale must be positive and finite, got -1.0"),
        (lambda: mixers.Grassmann(4, 1.5), "rank must be between"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_wrong_number_of_logits_is_refused(mixer):
    for logits in (torch.ones(3, mixer.logits + 1), torch.ones(())):
        with pytest.raises(ValueError, match=rf"takes logits \[\.\.\., {mixer.logits}\], got"):
            mixer(logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_takes_its_shape_as_a_tuple(name):
    assert jpmhc.MIXERS[name].sample(4, [2, 0]).shape == (2, 0, 4, 4)
    for shape in (10, (2, -1), (2.0,)):
        with pytest.raises(ValueError, match=r"shape must be a (tuple of )?whole number"):
            jpmhc.MIXERS[name].sample(4, shape)


def test_rotation_turns_the_differences_and_keeps_the_mean():
    """Against its definition: 11ᵀ/n + U O Uᵀ with O the Cayley transform in the complement of 1."""
    logits = torch.randn(7, 3, dtype=torch.float64)
    matrix = mixers.Rotation(4, scale=2.0)(logits)
    basis = torch.linalg.qr(torch.cat([torch.ones(4, 1), torch.eye(4)[:, :3]], 1).double())[0][:, 1:]
    inside = basis.T @ matrix @ basis  # whatever the basis, an orthogonal matrix with determinant one
    assert torch.allclose(inside @ inside.mT, torch.eye(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(torch.linalg.det(inside), torch.ones(7, dtype=torch.float64))
    assert torch.allclose(matrix, 0.25 + basis @ inside @ basis.T, atol=1e-12)
    skew = torch.linalg.solve(matrix + torch.eye(4), matrix - torch.eye(4))  # the inverse transform
    assert torch.allclose(skew.square().sum((-2, -1)), 2 * logits.square().sum(-1), atol=1e-9)  # scale/2 = 1


@pytest.mark.parametrize("blocks", [1, 2])
def test_orthostochastic_is_the_mean_of_squares_over_blocks(blocks):
    logits = torch.randn(6 if blocks == 1 else 28, dtype=torch.float64)
    order = STREAMS * blocks
    k = torch.zeros(order, order, dtype=torch.float64)
    k[*torch.triu_indices(order, order, 1)] = logits / 2
    q = torch.linalg.solve(torch.eye(order) - (k - k.T), torch.eye(order) + (k - k.T))
    found = mixers.Orthostochastic(STREAMS, blocks)(logits)
    for i in range(STREAMS):
        for j in range(STREAMS):
            block = q[blocks * i : blocks * (i + 1), blocks * j : blocks * (j + 1)]
            assert torch.isclose(found[i, j], block.square().sum() / blocks)


def test_orthostochastic_starts_with_a_gradient():
    mixer = mixers.Orthostochastic(STREAMS)
    logits = mixer.start().requires_grad_()
    matrix = mixer(logits)
    off_diagonal = 1 - matrix.diagonal().mean()
    assert 0.008 < off_diagonal < 0.012
    (gradient,) = torch.autograd.grad(matrix.diagonal().sum(), logits)
    assert gradient.abs().min() > 1e-3


def test_circulant_is_a_mixture_of_powers_of_the_shift():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.5], dtype=torch.float64)
    shift = torch.eye(5, dtype=torch.float64).roll(1, 0)
    powers = torch.stack([torch.linalg.matrix_power(shift, k) for k in range(5)])
    assert torch.allclose(mixers.Circulant(5)(logits), torch.einsum("k,kij->ij", logits.softmax(0), powers))


def test_mhc_lite_reaches_any_doubly_stochastic_matrix():
    """Birkhoff's theorem with n = 3: the weights of one decomposition, as logits."""
    mixer = mixers.MHCLite(3)
    assert mixer.logits == 6
    weights = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for weight, images in zip(weights, mixer.perms):
        for j, i in enumerate(images):
            expected[i, j] += weight
    assert torch.allclose(mixer(weights.log()), expected)
