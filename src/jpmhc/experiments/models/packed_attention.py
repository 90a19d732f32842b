"""Causal attention within each of many sequences that are packed into one row.

On CUDA this is flex attention, which skips blocks of keys that no query of a block may see, and which must run inside a
compiled function. Elsewhere it is ordinary attention with a mask of all pairs of tokens.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from jpmhc.experiments.models.arc_decoder import ArcDecoder
from jpmhc.experiments.tasks.arc.sequences import BLOCK, Pack

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

# Tiles of the forward kernel. With PyTorch's default of 128 × 128, the kernel with a pack's mask runs out of registers:
# it takes 4.7 ms per layer on an H200, and 0.18 ms with these tiles (torch 2.11, 12,288 tokens, 12 heads of 64).
_TILES: "FlexKernelOptions" = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 2}  # type: ignore[typeddict-unknown-key]


def make_mask(pack: Pack) -> Tensor | BlockMask:
    """Return a pack's attention mask: a block mask on CUDA, elsewhere a boolean [tokens, tokens]."""
    owners = pack.owners
    if owners.device.type != "cuda":
        return (owners[:, None] == owners[None, :]).tril()
    return make_block_mask(pack)


def make_block_mask(pack: Pack) -> BlockMask:
    """Return a pack's attention mask by blocks: each block sees the blocks from its entry in `pack.spans` to itself.

    The host never waits for the device. `BlockMask.from_kv_blocks` is not used, because it would compute the blocks of
    queries, which the pack knows already, at a great cost on the host.
    """
    owners, (first, last) = pack.owners, pack.spans
    own = torch.arange(len(first), dtype=torch.int32, device=owners.device)
    keys = torch.minimum(first[:, None] + own, own[-1])  # each row's first `own - first + 1` entries count
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
    """Compute the loss of a pack; on CUDA this function must be compiled."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, T, head_dim]
        if isinstance(mask, Tensor):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = flex_attention(q, k, v, block_mask=mask, kernel_options=_TILES)
        return y[0].transpose(0, 1)

    return model(pack, vectors, attend)
