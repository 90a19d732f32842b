"""Causal attention among sequences that lie side by side in one row: no token sees another sequence.

On CUDA it is flex attention, which skips the blocks of keys that no query of a block may see; it has to run inside a
compiled function. Elsewhere it is ordinary attention with a mask of all pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from jpmhc.experiments.models.arc_decoder import ArcDecoder
from jpmhc.experiments.tasks.arc.sequences import BLOCK, Pack


def make_mask(pack: Pack) -> Tensor | BlockMask:
    """Return who sees whom in a pack, in the form that its device takes."""
    owners = pack.owners
    if owners.device.type != "cuda":
        return (owners[:, None] == owners[None, :]).tril()
    return make_block_mask(pack)


def make_block_mask(pack: Pack) -> BlockMask:
    """Describe the visible pairs of a pack by blocks."""
    owners, count = pack.owners, pack.spans.shape[1]
    first = pack.spans[0]
    own = torch.arange(count, dtype=torch.int32, device=owners.device)
    seen = own - first + 1  # each block of queries sees the blocks from `first` to itself
    columns = torch.minimum(first[:, None] + own[None, :], own[-1])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (owners[query] == owners[key]) & (query >= key)

    length = len(owners)
    return BlockMask.from_kv_blocks(
        seen[None, None], columns[None, None], BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def packed_loss(model: ArcDecoder, pack: Pack, vectors: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Compute the loss of a pack; the function to compile."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, T, head_dim]
        if isinstance(mask, Tensor):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = flex_attention(q, k, v, block_mask=mask)
        return y[0].transpose(0, 1)

    return model(pack, vectors, attend)
