r"""How logits become the read weights (which mixture of streams the sublayer sees) and the write weights (how its
output fans back out).

The paper's pre and post mixers are n × n matrices that enter only through a column mean and row sums, so they are
computed as n-vectors. Reads and writes are chosen independently of the residual mixer.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Gate(ABC):
    """One constraint on n weights: how many logits it needs, which logits give chosen weights, logits → weights."""

    def size(self, n: int) -> int:
        """Logits for n streams."""
        return n

    @abstractmethod
    def start(self, weights: Tensor) -> Tensor:
        """Logits that give these weights. [n] → [size]"""

    @abstractmethod
    def __call__(self, logits: Tensor, n: int) -> Tensor:
        """Weights from logits. [..., size] → [..., n]"""


class SoftmaxRead(Gate):
    """n logits, a convex combination of the streams."""

    def start(self, weights: Tensor) -> Tensor:
        return weights.log()

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return logits.softmax(-1)


class SoftmaxMatrixRead(Gate):
    """eq. cayley-constraints: a row-stochastic n × n matrix, of which the stream mean leaves the column means."""

    def size(self, n: int) -> int:
        return n * n

    def start(self, weights: Tensor) -> Tensor:
        return weights.log().repeat(len(weights))

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return logits.unflatten(-1, (n, n)).softmax(-1).mean(-2)


class SigmoidRead(Gate):
    """mHC's form: σ of n logits, weights that need not sum to one."""

    def start(self, weights: Tensor) -> Tensor:
        return weights.logit()

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return logits.sigmoid()


class SoftmaxWrite(SoftmaxRead):
    """n logits, weights that sum to n."""

    def start(self, weights: Tensor) -> Tensor:
        return (weights / len(weights)).log()

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return n * logits.softmax(-1)


class SoftmaxMatrixWrite(SoftmaxMatrixRead):
    """eq. cayley-constraints: a column-stochastic n × n matrix, of which equal inputs leave the row sums."""

    def start(self, weights: Tensor) -> Tensor:
        return (weights / len(weights)).log().repeat_interleave(len(weights))

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return logits.unflatten(-1, (n, n)).softmax(-2).sum(-1)


class SigmoidWrite(Gate):
    """mHC's form: 2σ of n logits, so that zero logits write with weight one."""

    def start(self, weights: Tensor) -> Tensor:
        return (weights / 2).logit()

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return 2 * logits.sigmoid()


READS: dict[str, Gate] = {"softmax": SoftmaxRead(), "softmax_matrix": SoftmaxMatrixRead(), "sigmoid": SigmoidRead()}
WRITES: dict[str, Gate] = {
    "softmax": SoftmaxWrite(),
    "softmax_matrix": SoftmaxMatrixWrite(),
    "sigmoid": SigmoidWrite(),
}
FAVOUR = 2.0  # by how much the start prefers one stream's logit: equal reads would keep equal streams equal for ever


def favouring(stream: int, n: int) -> Tensor:
    """Read weights that sum to one and favour one stream. [n]"""
    logits = torch.zeros(n, dtype=torch.float64)
    logits[stream % n] = FAVOUR
    return logits.softmax(-1)
