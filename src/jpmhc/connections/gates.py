r"""Gates: functions from logits to read weights or to write weights.

The read weights mix the streams to the sublayer's input. The write weights multiply the sublayer's output for each
stream. In the paper these are n × n matrices, of which only column means (reads) and row sums (writes) matter, so that
gates compute n-vectors. Reads and writes are chosen independently of the residual mixer.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Gate(ABC):
    """A function from logits to n constrained weights, with its number of logits and its inverse."""

    def size(self, n: int) -> int:
        """Return the number of logits for n streams."""
        return n

    @abstractmethod
    def start(self, weights: Tensor) -> Tensor:
        """Return logits from which the gate computes these weights. [n] → [size]"""

    @abstractmethod
    def __call__(self, logits: Tensor, n: int) -> Tensor:
        """Compute the weights from logits. [..., size] → [..., n]"""


class SoftmaxRead(Gate):
    """Read weights softmax(logits), which sum to one."""

    def start(self, weights: Tensor) -> Tensor:
        return weights.log()

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return logits.softmax(-1)


class SoftmaxMatrixRead(Gate):
    """Read weights that are the column means of a row-stochastic n × n matrix (eq. cayley-constraints)."""

    def size(self, n: int) -> int:
        return n * n

    def start(self, weights: Tensor) -> Tensor:
        return weights.log().repeat(len(weights))

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return logits.unflatten(-1, (n, n)).softmax(-1).mean(-2)


class SigmoidRead(Gate):
    """Read weights σ(logits), as in mHC; they need not sum to one."""

    def start(self, weights: Tensor) -> Tensor:
        return weights.logit()

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return logits.sigmoid()


class SoftmaxWrite(SoftmaxRead):
    """Write weights n · softmax(logits), which sum to n."""

    def start(self, weights: Tensor) -> Tensor:
        return (weights / len(weights)).log()

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return n * logits.softmax(-1)


class SoftmaxMatrixWrite(SoftmaxMatrixRead):
    """Write weights that are the row sums of a column-stochastic n × n matrix (eq. cayley-constraints)."""

    def start(self, weights: Tensor) -> Tensor:
        return (weights / len(weights)).log().repeat_interleave(len(weights))

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return logits.unflatten(-1, (n, n)).softmax(-2).sum(-1)


class SigmoidWrite(Gate):
    """Write weights 2σ(logits), as in mHC; zero logits give weights of one."""

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
FAVOUR = 2.0  # added at the start to one stream's read logit: equal reads would keep equal streams equal for ever


def favouring(stream: int, n: int) -> Tensor:
    """Return read weights that sum to one and are largest for stream number `stream` mod n. [n]"""
    logits = torch.zeros(n, dtype=torch.float64)
    logits[stream % n] = FAVOUR
    return logits.softmax(-1)
