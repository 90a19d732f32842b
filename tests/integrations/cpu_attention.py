"""An override for torchtitan: an attention that has a backward pass on the CPU."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention


class DenseAttention(FlexAttention):
    """The same attention, from PyTorch's function and a whole mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: BlockMask, **options: Any
    ) -> Tensor:
        mask = create_mask(attention_masks.mask_mod, len(q_BLNH), None, q_BLNH.shape[1], k_BLNH.shape[1], device="cpu")
        heads = (part.transpose(1, 2) for part in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(
            *heads, mask, scale=options.get("scale"), enable_gqa=options.get("enable_gqa", False)
        ).transpose(1, 2)


@override(target=FlexAttention.Config, description="Attention that has a backward pass on the CPU.")
def dense_attention(config: FlexAttention.Config) -> FlexAttention.Config:
    return derive(config, DenseAttention.Config)
