"""The reference against the formulas written out token by token."""

import torch

from jpmhc.connections import reference

T, N, D, K = 5, 3, 6, 7


def test_logits_are_a_product_with_the_normalised_streams():
    x, weight = torch.randn(T, N, D, dtype=torch.float64) + 0.5, torch.randn(K, N * D, dtype=torch.float64)
    for token, rms, layer in zip(
        x, reference.compute_logits(x, weight, "rms"), reference.compute_logits(x, weight, "layer")
    ):
        flat = token.flatten()
        assert torch.allclose(rms, weight @ flat / (flat.square().mean() + 1e-6).sqrt())
        centred = flat - flat.mean()
        assert torch.allclose(layer, weight @ centred / (centred.square().mean() + 1e-6).sqrt())


def test_streams_are_mixed_and_written_to():
    x, y = torch.randn(T, N, D, dtype=torch.float64), torch.randn(T, D, dtype=torch.float64)
    read, write, skip = (torch.randn(*shape, dtype=torch.float64) for shape in ((T, N), (T, N), (T, N, N)))
    h, out = reference.gather(x, read), reference.scatter(x, y, write, skip)
    for t in range(T):
        assert torch.allclose(h[t], sum(read[t, j] * x[t, j] for j in range(N)))
        for i in range(N):
            assert torch.allclose(out[t, i], sum(skip[t, i, j] * x[t, j] for j in range(N)) + write[t, i] * y[t])
    rows = reference.normalise_streams(out).square().mean(-1)
    assert torch.allclose(rows, torch.ones_like(rows), atol=1e-4)


def test_half_precision_streams_keep_full_precision_coefficients():
    x, y = torch.randn(T, N, D).bfloat16(), torch.randn(T, D).bfloat16()
    read, write, skip = torch.rand(T, N), torch.rand(T, N), torch.randn(T, N, N)
    h, out = reference.gather(x, read), reference.scatter(x, y, write, skip)
    assert h.dtype == out.dtype == torch.bfloat16
    exact = skip @ x.float() + write.unsqueeze(-1) * y.float().unsqueeze(1)
    assert torch.allclose(out.float(), exact, rtol=2**-7, atol=1e-6)  # one rounding to bfloat16, no more
