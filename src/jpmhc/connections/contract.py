r"""The contract of a connection: its four steps, and the state that the read leaves for the write.

A connection reads its sublayer's input $h = \sum_j r_j x_j$ from n streams x, and writes the sublayer's output y back
beside the mixed streams: $x_i \leftarrow \sum_j H_{ij} x_j + w_i y$. Stacks, recomputing, wrapped models and dialects
use a `Connection`. They carry its `State` from the read to the write, and only the state knows what it holds.

A form is one way to compute these steps: a function that reads (`Form`), and the `State` that it returns, which writes.
`HyperConnection` reads by the first one that applies, of `dtensor.py`, `fused.py`, `eager.py` and `reference.py`. Under
`HyperConnection.computed_by` another form comes before them, such as the recorder in `diagnose/record.py`.

Shapes: x is [..., n, d], or [..., 1, d] where one stream stands for n equal ones; h and y are [..., d].
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self

from torch import Tensor

if TYPE_CHECKING:
    from jpmhc.connections.hyper import HyperConnection


class Connection(Protocol):
    """What every user of a connection may call."""

    streams: int
    dim: int

    def read(self, x: Tensor) -> tuple[Tensor, "State"]:
        """Return the sublayer's input h, and the state for the write."""

    def write(self, x: Tensor, y: Tensor, state: "State") -> Tensor:
        """Write the sublayer's output y to the streams x. Return the new streams."""

    def write_mean(self, x: Tensor, y: Tensor, state: "State") -> Tensor:
        """Write, and return the mean of the new streams [..., d]."""

    def write_read(self, x: Tensor, y: Tensor, state: "State", following: Self) -> tuple[Tensor, Tensor, "State"]:
        """Write, and read for the next connection. Return the new streams, the next h and the next state."""


class State(Protocol):
    """What the read of the connection `block` leaves for its write."""

    @property
    def x(self) -> Tensor:
        """The streams that were read, as they were given."""

    def fits(self, block: "HyperConnection") -> bool:
        """Say whether a connection with the streams and the width of `block` made this state."""

    def write(self, block: "HyperConnection", x: Tensor, y: Tensor, mean: bool) -> Tensor:
        """Return the new streams, or their mean."""

    def join(
        self, block: "HyperConnection", x: Tensor, following: "HyperConnection"
    ) -> "Callable[[Tensor], tuple[Tensor, Tensor, State]] | None":
        """Return `Connection.write_read` as a function of y, if it is one pass over the streams; else None."""

    def make_rewrite(
        self, block: "HyperConnection", y: Tensor, following: "HyperConnection | None"
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that repeats the write on given streams, bit for bit and without gradients.

        It uses the settings and weights of now, even if they change later. `following` is the connection whose read was
        joined to the write, if there was one.
        """


Form = Callable[["HyperConnection", Tensor], tuple[Tensor, State] | None]  # None: the form does not apply
