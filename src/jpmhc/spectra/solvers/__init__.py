"""Methods that compute the Cauchy transform, one a file behind one contract: `Solver`, registered in `METHODS`."""

from functools import partial
from typing import Protocol

from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution
from jpmhc.spectra.solvers import chain, dyson, pencil, stransform, subordination, twisted, z1
from jpmhc.spectra.solvers.fixed_point import Scheme


class Solver(Protocol):
    """A method: it raises a ValueError for a network on which it is not defined, and warns where it is not exact."""

    def __call__(
        self,
        network: Network,
        z: Tensor,
        *,
        tolerance: float = ...,
        maximum: int = ...,
        scheme: Scheme = ...,
    ) -> Solution:
        """Compute the Cauchy transform at points z [B] of the upper half plane, which are already checked.

        A method that fills `Solution.known` gets it back as `known=` when it is called for the same network again.

        Args:
            network: The network.
            z: The points, complex128 and on the network's device.
            tolerance: What a point's residual must fall below.
            maximum: The most iterations per point.
            scheme: How to iterate.
        """


METHODS: dict[str, Solver] = {
    "chain": chain.solve,
    "pencil": pencil.solve,
    "dyson": dyson.solve,
    "z1": z1.solve,
    "z1-matrix": z1.solve_matrix_power,
    "subordination": subordination.solve,
    "stransform": stransform.solve,
    "twisted": twisted.solve,
    "twisted-paper": partial(twisted.solve, first="gram"),
}
