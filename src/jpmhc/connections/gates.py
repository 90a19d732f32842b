r"""Gates: functions from logits to read weights or to write weights.

The read weights mix the streams to the sublayer's input. The write weights multiply the sublayer's output for each
stream. The paper has n × n matrices in place of both, but only the column means of the read matrix and the row sums of
the write matrix have an effect, so a gate returns these n numbers. Reads and writes are chosen independently of the
residual mixer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """A function from logits to n constrained weights.

    Attributes:
        constrain: The function of the logits [..., size] and of n, which returns the weights [..., n].
        start: The inverse: a function of the weights [n] that returns logits [size].
        matrix: Whether the logits are an n × n matrix by rows, and not n numbers.
    """

    constrain: Callable[[Tensor, int], Tensor]
    start: Callable[[Tensor], Tensor]
    matrix: bool = False

    def size(self, n: int) -> int:
        """Return the number of logits for n streams."""
        return n * n if self.matrix else n

    def __call__(self, logits: Tensor, n: int) -> Tensor:
        return self.constrain(logits, n)


READS = {
    # weights that sum to one
    "softmax": Gate(lambda z, n: z.softmax(-1), torch.log),
    # the column means of a row-stochastic matrix (eq. cayley-constraints)
    "softmax_matrix": Gate(
        lambda z, n: z.unflatten(-1, (n, n)).softmax(-1).mean(-2), lambda w: w.log().repeat(len(w)), matrix=True
    ),
    # as in mHC; the weights need not sum to one
    "sigmoid": Gate(lambda z, n: z.sigmoid(), torch.logit),
}
WRITES = {
    # weights that sum to n
    "softmax": Gate(lambda z, n: n * z.softmax(-1), lambda w: (w / len(w)).log()),
    # the row sums of a column-stochastic matrix (eq. cayley-constraints)
    "softmax_matrix": Gate(
        lambda z, n: z.unflatten(-1, (n, n)).softmax(-2).sum(-1),
        lambda w: (w / len(w)).log().repeat_interleave(len(w)),
        matrix=True,
    ),
    # as in mHC; zero logits give weights of one
    "sigmoid": Gate(lambda z, n: 2 * z.sigmoid(), lambda w: (w / 2).logit()),
}
FAVOUR = 2.0  # added at the start to one stream's read logit: equal reads would keep equal streams equal for ever


def favouring(stream: int | None, n: int) -> Tensor:
    """Return read weights that sum to one and are largest for stream number `stream` mod n; None: equal weights. [n]"""
    logits = torch.zeros(n, dtype=torch.float64)
    if stream is not None:
        logits[stream % n] = FAVOUR
    return logits.softmax(-1)
