r"""The interface of a connection: its four steps, and the state that the read passes to the write.

A connection reads its sublayer's input $h = \sum_j r_j x_j$ from n streams x, and writes the sublayer's output y back
beside the mixed streams: $x_i \leftarrow \sum_j H_{ij} x_j + w_i y$, with read weights r, write weights w and skip
matrix H. The four steps are the methods read, write, write_mean and write_read of `HyperConnection`. Stacks, wrapped
models and dialects call these methods, and pass the `State` from the read to the write without looking inside.

A form is one implementation of these steps: a function that reads (`Form`) and returns a `State`, whose methods write.
`HyperConnection` uses the first form that applies among `dtensor.py`, `fused.py`, `eager.py` and `reference.py`. Inside
`HyperConnection.computed_by` another form comes first, such as the recorder in `diagnose/record.py`.

Shapes: x is [..., n, d], or [..., 1, d] where one stream stands for n equal ones; h and y are [..., d].
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from jpmhc.connections.hyper import HyperConnection


class State(Protocol):
    """The object that a connection's read returns for the connection's write; `block` is the connection."""

    @property
    def x(self) -> Tensor:
        """The streams that were passed to the read."""

    def fits(self, block: "HyperConnection") -> bool:
        """Return whether the streams that were read have the number and the width of `block`'s streams."""

    def gather(self, x: Tensor) -> Tensor:
        """Return Σ_j r_j x_j for the streams x [..., n, d], with the read weights r that the read used. [..., d]"""

    def write(self, block: "HyperConnection", x: Tensor, y: Tensor, mean: bool) -> Tensor:
        """Write y to the streams x. Return the new streams, or their mean if `mean` is true."""

    def join(
        self, block: "HyperConnection", x: Tensor, following: "HyperConnection", delayed: bool = False
    ) -> "Callable[[Tensor], tuple[Tensor, Tensor, State]] | None":
        """Return a function of y that computes `HyperConnection.write_read` in one pass; None if no pass does this."""

    def make_rewrite(
        self, block: "HyperConnection", y: Tensor, following: "HyperConnection | None"
    ) -> Callable[[Tensor], Tensor]:
        """Return a function of streams x that repeats the write of y to x, bit for bit and without gradients.

        The function uses the present settings and weights, even if they change later. `following` is the connection
        whose read was fused with the write, or None.
        """


Form = Callable[["HyperConnection", Tensor], tuple[Tensor, State] | None]  # None: the form does not apply
