"""The eager passes with hand-written backward, against autograd through the plain ones."""

import pytest
import torch

from jpmhc.connections import steps

T, N, D, K = 5, 3, 6, 7


def chain(project, gather, scatter, x, weight, out_weight, centred, skipped):
    """All three passes, with coefficients that depend on the logits so that every gradient is exercised."""
    logits, x = project(x, weight, centred, 1e-6)
    read, write = logits[:, :N].softmax(-1), logits[:, N : 2 * N].sigmoid()
    skip = None if skipped else torch.einsum("tk,kij->tij", logits, out_weight[:K, :N, :N])
    h, x = gather(x, read)
    return scatter(x, h.tanh(), write, skip)


def plain(project=steps._project, gather=steps._gather):
    return (lambda x, *a: (project(x, *a), x)), (lambda x, r: (gather(x, r), x)), steps._scatter


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("skipped", [True, False])
def test_eager_gradients_equal_autograds(centred, skipped):
    generator = torch.Generator().manual_seed(0)
    x, weight, out_weight, upstream = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((T, N, D), (K, N * D), (K, N, N), (T, N, D))
    )
    x = x + 0.5  # a mean that centring has to take away
    leaves = [t.requires_grad_() for t in (x, weight, out_weight)]
    results = []
    for passes in ((steps.project, steps.gather, steps.scatter), plain()):
        out = chain(*passes, *leaves, centred, skipped)
        results.append((out, *torch.autograd.grad(out, leaves, upstream, allow_unused=True)))
    for eager, truth in zip(*results):
        if truth is not None:
            assert torch.allclose(eager, truth, atol=1e-13)


def test_eager_passes_have_second_derivatives():
    leaves = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, N, D), (K, N * D), (K, N, N))]
    function = lambda *a: chain(steps.project, steps.gather, steps.scatter, *a, True, False)  # noqa: E731
    assert torch.autograd.gradgradcheck(function, leaves)


def test_gradient_of_the_caller_is_not_written_to():
    # the passes add to gradients in place, which must be their own
    x = torch.randn(T, N, D, requires_grad=True)
    weight = torch.randn(K, N * D, requires_grad=True)
    upstream = torch.randn(T, N, D)
    kept = upstream.clone()
    for skipped in (True, False):
        out = chain(steps.project, steps.gather, steps.scatter, x, weight, torch.randn(K, N, N), False, skipped)
        torch.autograd.grad(out, (x, weight), upstream)
        assert torch.equal(upstream, kept)


def test_norm_is_applied_after_the_product():
    x, weight = torch.randn(T, N, D, dtype=torch.float64), torch.randn(K, N * D, dtype=torch.float64)
    flat = x.flatten(1)
    layer = torch.nn.functional.layer_norm(flat, (N * D,), eps=1e-6)
    rms = torch.nn.functional.rms_norm(flat, (N * D,), eps=1e-6)
    assert torch.allclose(steps.project(x, weight, True, 1e-6)[0], layer @ weight.T)
    assert torch.allclose(steps.project(x, weight, False, 1e-6)[0], rms @ weight.T)


def test_half_precision_streams_keep_full_precision_coefficients():
    x, y = torch.randn(T, N, D).bfloat16(), torch.randn(T, D).bfloat16()
    read, write, skip = torch.rand(T, N), torch.rand(T, N), torch.randn(T, N, N)
    h, _ = steps.gather(x, read)
    out = steps.scatter(x, y, write, skip)
    assert h.dtype == out.dtype == torch.bfloat16
    exact = skip @ x.float() + write.unsqueeze(-1) * y.float().unsqueeze(1)
    assert torch.allclose(out.float(), exact, rtol=2**-7, atol=1e-6)  # one rounding to bfloat16, no more
