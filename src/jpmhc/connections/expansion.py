"""StreamExpansion: how one hidden state becomes n streams at the beginning of a model."""

import torch
from torch import Tensor, nn

from jpmhc import checks


class StreamExpansion(nn.Module):
    """Makes n streams of a hidden state, each multiplied by a learned number of its own; it starts as plain copies.

    Args:
        streams: n.
        device: Where the numbers are made.
        dtype: Their type; float32 if a half type is asked for.

    Shapes:
        x: [..., d] → [..., n, d]
    """

    def __init__(
        self, streams: int = 4, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        checks.at_least_one(streams, "streams")
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.scale = nn.Parameter(torch.ones(streams, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.scale.unsqueeze(-1)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"streams={len(self.scale)}"
