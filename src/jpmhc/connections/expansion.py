"""StreamExpansion: how one hidden state becomes n streams at the beginning of a model."""

import torch
from torch import Tensor, nn

from jpmhc import checks, dtensors
from jpmhc.connections import dtensor


class StreamExpansion(nn.Module):
    """Makes n streams of a hidden state, each multiplied by a learned number of its own; it starts as plain copies.

    Args:
        streams: n.
        device: Where the numbers are made.
        dtype: Their type; float32 if a half type is asked for.

    Shapes:
        x: [..., d] → [..., n, d]
    """

    tokens_apart = False  # as of a `CoefficientMap`

    def __init__(
        self, streams: int = 4, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        checks.whole_number(streams, "streams")
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.scale = nn.Parameter(torch.ones(streams, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        scale = dtensors.leave(self.scale, self.tokens_apart).unsqueeze(-1)
        own = dtensor.find_own(x, 1, self.tokens_apart) if dtensors.is_dtensor(x) else x
        streams = (own.unsqueeze(-2) * scale).to(x.dtype)
        return dtensor.spread(streams, x, 1) if dtensors.is_dtensor(x) else streams

    def extra_repr(self) -> str:
        return f"streams={len(self.scale)}"
