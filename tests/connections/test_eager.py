"""The eager passes with hand-written backward, against autograd through the reference."""

import pytest
import torch

import jpmhc
from jpmhc.connections import eager, reference

T, N, D, K = 5, 3, 6, 7
EAGER = (eager.compute_logits, eager.gather, eager.scatter)


def run_passes(compute_logits, gather, scatter, x, weight, out_weight, norm, skipped):
    """All three passes, with coefficients that depend on the logits so that every gradient is exercised."""
    logits, x = compute_logits(x, weight, norm, 0.3)
    read, write = logits[:, :N].softmax(-1), logits[:, N : 2 * N].sigmoid()
    skip = None if skipped else torch.einsum("tk,kij->tij", logits, out_weight[:K, :N, :N])
    h, x = gather(x, read)
    return scatter(x, h.tanh(), write, skip)


def scatter_by_reference(x, y, write, skip):
    return reference.scatter(x, y, write, torch.eye(N, dtype=x.dtype).expand(len(x), N, N) if skip is None else skip)


REFERENCE = (
    lambda x, weight, norm, eps: (reference.compute_logits(x, weight, norm, eps), x),
    lambda x, read: (reference.gather(x, read), x),
    scatter_by_reference,
)


@pytest.mark.parametrize("norm", ["layer", "rms", "rms_outside"])
@pytest.mark.parametrize("skipped", [True, False])
def test_eager_gradients_equal_autograds(norm, skipped):
    generator = torch.Generator().manual_seed(0)
    x, weight, out_weight, upstream = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((T, N, D), (K, N * D), (K, N, N), (T, N, D))
    )
    x = x + 0.5  # a mean that centring has to take away
    leaves = [t.requires_grad_() for t in (x, weight, out_weight)]
    results = []
    for passes in (EAGER, REFERENCE):
        out = run_passes(*passes, *leaves, norm, skipped)
        results.append((out, *torch.autograd.grad(out, leaves, upstream, allow_unused=True)))
    for found, truth in zip(*results):
        if truth is not None:
            assert torch.allclose(found, truth, atol=1e-13)


def test_eager_passes_have_second_derivatives():
    leaves = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, N, D), (K, N * D), (K, N, N))]
    for norm, skipped in (("layer", False), ("rms", True)):
        function = lambda *a, n=norm, s=skipped: run_passes(*EAGER, *a, n, s)  # noqa: E731
        assert torch.autograd.gradgradcheck(function, [*leaves[:2], leaves[2].detach()] if skipped else leaves)


def test_gradient_of_the_caller_is_not_written_to():
    # the passes add to gradients in place, which must be their own
    x = torch.randn(T, N, D, requires_grad=True)
    weight = torch.randn(K, N * D, requires_grad=True)
    upstream = torch.randn(T, N, D)
    kept = upstream.clone()
    for skipped in (True, False):
        out = run_passes(*EAGER, x, weight, torch.randn(K, N, N), "rms", skipped)
        torch.autograd.grad(out, (x, weight), upstream)
        assert torch.equal(upstream, kept)


def random_block(dynamic: bool) -> jpmhc.HyperConnection:
    torch.manual_seed(0)
    block = jpmhc.HyperConnection(torch.nn.Tanh(), D, N, "cayley", index=1, dynamic=dynamic).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block


@pytest.mark.parametrize("dynamic", [True, False])
def test_first_gradients_do_not_depend_on_whether_their_graph_is_kept(dynamic):
    """A connection that is applied twice: its second streams were computed from its own weight."""
    block = random_block(dynamic)
    x = torch.randn(T, N, D, dtype=torch.float64, requires_grad=True)
    leaves = [x, *block.parameters()]
    found = [
        torch.autograd.grad(block(block(x)).square().sum(), leaves, create_graph=keep_graph)
        for keep_graph in (False, True)
    ]
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dynamic", [True, False])
def test_several_gradients_at_once(dynamic):
    block = random_block(dynamic)
    x = torch.randn(2, N, D, dtype=torch.float64)
    at_once, one_by_one = (torch.autograd.functional.jacobian(block, x, vectorize=kind) for kind in (True, False))
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-12, atol=1e-12)
