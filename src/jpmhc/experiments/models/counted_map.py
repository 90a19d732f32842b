"""A connection's coefficients with exactly the parameters that the paper counts (Table param-counts).

The table's totals for n = 4 streams of d = 512 features contain constants that the paper does not explain: 36, 28 and
22. They are the numbers of outputs (one static logit each) plus the numbers of learned scales (one per stream for the
read, the write and the rows of the skip): Sinkhorn 24 + 3 · 4, Grassmann 16 + 3 · 4, and Perm Mix 14 + 2 · 4, because
its K skip logits belong to no stream. Cayley has neither, but a layer norm with weights and biases (2 · n d) and three
full n × n matrices.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jpmhc.connections.coefficients import CoefficientMap

_SPREAD = 0.1  # standard deviation of initial weights if no static logits distinguish the streams


class CountedParameters(NamedTuple):
    """The parameters that one of the paper's variants has besides the projection to logits."""

    static: bool = True  # one static logit per output
    scales: tuple[str, ...] = ("read", "write", "skip")  # coefficients with one learned scale per stream
    norm_weights: bool = False  # weights and biases of the norm
    full_skew: bool = False  # the skip has n × n logits, and only the skew part of their matrix is used


class CountedMap(CoefficientMap):
    """A coefficient map with the logits scale · (W (g · norm(x) + b)) + bias of streams x, with a matrix W.

    The norm's weights g and biases b, and the scales, are combined with W and bias into one matrix and one bias, so
    kernels see a `CoefficientMap`.
    """

    def __init__(self, counted: CountedParameters, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.weight is not None
        self.counted = counted
        n, like = self.mixer.streams, self.bias.detach()
        if counted.full_skew:
            self.weight = nn.Parameter(like.new_empty(sum(self.sizes[:2]) + n * n, self.weight.shape[1]))
        if not counted.static:
            del self.bias
            self.register_buffer("bias", torch.zeros_like(like), persistent=False)
        self.scales = nn.ParameterDict({name: nn.Parameter(like.new_empty(n)) for name in counted.scales})
        self.norm_weight, self.norm_bias = (
            nn.Parameter(like.new_empty(self.weight.shape[1])) if counted.norm_weights else None for _ in range(2)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise like `CoefficientMap`; without static logits, start from small random weights instead."""
        super().reset_parameters()
        if not hasattr(self, "scales"):
            return  # called by the base class's constructor, before the other parameters exist
        with torch.no_grad():
            if not self.counted.static:
                self.bias.zero_()
                assert self.weight is not None
                self.weight.normal_(std=_SPREAD)
            for scale in self.scales.values():
                scale.fill_(1.0)
            if self.norm_weight is not None and self.norm_bias is not None:
                self.norm_weight.fill_(1.0)
                self.norm_bias.zero_()

    def parameters_in_use(self) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        weight: Tensor = self._skew_rows(self.weight) if self.counted.full_skew else self.weight
        bias: Tensor = self.bias
        if self.scales:
            weight = weight * self._logit_scales()[:, None]
        if self.norm_weight is not None and self.norm_bias is not None:
            bias = bias + self.scale * (weight @ self.norm_bias)
            weight = weight * self.norm_weight
        return weight, bias

    def _logit_scales(self) -> Tensor:
        """Return the factor of each logit: its stream's scale, or one if there are no scales. [K]"""
        parts = []
        for name, size in zip(("read", "write", "skip"), self.sizes):
            scale = self.scales[name] if name in self.scales else self.bias.new_ones(1)
            parts.append(scale.repeat_interleave(size // len(scale)))
        return torch.cat(parts)

    def _skew_rows(self, weight: Tensor) -> Tensor:
        """Return the weight with the upper triangle of M - Mᵀ instead of the n² rows M of the skip (eq. skew-sym)."""
        n = self.mixer.streams
        gates, matrix = weight.split([sum(self.sizes[:2]), n * n])
        rows = matrix.unflatten(0, (n, n))
        upper = torch.triu_indices(n, n, 1, device=weight.device)
        return torch.cat([gates, rows[upper[0], upper[1]] - rows[upper[1], upper[0]]])
