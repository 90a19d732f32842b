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
    """Describe the visible pairs of a pack by blocks: each block of queries sees the blocks from its first to itself.

    The device is never waited for, and the constructor is used as `BlockMask.from_kv_blocks` would find out the blocks
    of queries, which the pack knows, at a great cost on the host.
    """
    owners, (first, last) = pack.owners, pack.spans
    own = torch.arange(len(first), dtype=torch.int32, device=owners.device)
    keys = torch.minimum(first[:, None] + own, own[-1])  # of each block of queries, as many as `own - first + 1` count
    queries = torch.minimum(own[:, None] + own, own[-1])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (owners[query] == owners[key]) & (query >= key)

    return BlockMask(
        seq_lengths=(len(owners), len(owners)),
        kv_num_blocks=(own - first + 1)[None, None],
        kv_indices=keys[None, None],
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=(last - own + 1)[None, None],
        q_indices=queries[None, None],
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
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
