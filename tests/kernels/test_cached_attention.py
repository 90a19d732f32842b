"""Attention to a cache, against the softmax in float64 and with poisoned caches."""

import pytest
import torch

from jpmhc.kernels.cached_attention import attend_to_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("lengths", "width"), [((0, 1, 63, 64, 65, 129), 64), ((5, 0), 16)])
def test_every_row_sees_its_own_tokens_and_the_new_one(lengths, width):
    generator = torch.Generator().manual_seed(0)
    rows, heads, capacity = len(lengths), 3, 130

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    q, k, v = (draw(rows, heads, width) for _ in range(3))
    keys, values = (draw(rows, heads, capacity, width) for _ in range(2))
    for row, length in enumerate(lengths):  # nothing beyond a row's length may count
        keys[row, :, length:] = values[row, :, length:] = torch.nan
    before = keys.clone()
    found = attend_to_cache(q, k, v, keys, values, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    for row, length in enumerate(lengths):
        assert torch.equal(keys[row, :, length], k[row])
        assert torch.equal(values[row, :, length], v[row])
        assert torch.equal(keys[row, :, :length], before[row, :, :length])
        seen_keys, seen_values = (t[row, :, : length + 1].double() for t in (keys, values))
        scores = torch.einsum("hd,hnd->hn", q[row].double(), seen_keys) / width**0.5
        truth = torch.einsum("hn,hnd->hd", scores.softmax(-1), seen_values)
        assert (found[row].double() - truth).norm() <= 1e-5 * truth.norm()
