r"""What the scalar theories share: they know each layer's singular values and noise, but not their directions.

The methods `z1`, `subordination` and `stransform` all compute the free product of the layers' laws. That is the law of
$J^\top J$ only where the directions do not matter. Derivations: docs/derivations/scalar_composition.md.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc.paper.one_layer import gram_spectrum, require_isotropic
from jpmhc.spectra.fixed_point import FixedPoints
from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution

# A skip counts as a multiple of an orthogonal matrix when its squared singular values agree to this.
_FLAT = 1e-9
# The largest product of points, layers and singular values in memory at a time.
_CHUNK = 2**22


@dataclass(frozen=True, eq=False)
class ScalarLayers:
    r"""The layers' laws, each rescaled to mean one so that a product of a thousand neither overflows nor vanishes.

    Attributes:
        spectrum: Squared singular values of the skips over the layer's mean. [L, n]
        variance: Noise variance over the layer's mean. [L]
        log_mean: Sum over layers of the logarithm of the means: $\log z$ falls by it. A number.
    """

    spectrum: Tensor
    variance: Tensor
    log_mean: Tensor

    @classmethod
    def of(cls, network: Network, method: str) -> ScalarLayers:
        """Return the laws of a network's layers, if the scalar theory is defined for it."""
        require_isotropic(network, method)
        spectrum = gram_spectrum(network.skips)  # [L, n]
        mean = spectrum.mean(-1) + network.variance
        if bool((mean == 0).any()):
            layer = int((mean == 0).nonzero()[0]) + 1
            raise ValueError(f"layer {layer} is zero, and zero has no S-transform; use 'chain'")
        return cls(spectrum / mean.unsqueeze(-1), network.variance / mean, mean.log().sum())

    @property
    def depth(self) -> int:
        """How many layers."""
        return len(self.spectrum)

    @property
    def identical(self) -> bool:
        """Whether all layers have the same law (their skips may still differ by rotations)."""
        flat = torch.cat([self.spectrum, self.variance.unsqueeze(-1)], -1)
        return bool(((flat - flat[:1]).abs() <= _FLAT).all())

    @property
    def top(self) -> float:
        """A height, after rescaling, from which on the solution is a perturbation of that at infinity."""
        norm = (self.spectrum.amax(-1).sqrt() + self.variance.sqrt()).square()
        return 10 * float(norm.max() + norm.sum())

    def rescale(self, z: Tensor) -> Tensor:
        """Return the points that belong to z after the layers are rescaled."""
        return z * torch.exp(-self.log_mean)

    def chunks(self, z: Tensor) -> tuple[Tensor, ...]:
        """Split the points so that the arrays of points, layers and singular values fit in memory."""
        return z.split(max(1, _CHUNK // self.spectrum.numel()))


def why_not_exact(network: Network) -> str:
    r"""Name the case in which the free product of the layers' laws is not the law of $J^\top J$; empty where it is.

    It is for one layer, and where at most one skip is not a multiple of an orthogonal matrix: then the noise and the
    rotations leave no direction that two skips could share. Nor can they where a layer without a skip, which is pure
    noise, lies between them.
    """
    spectrum = gram_spectrum(network.skips)
    largest = spectrum.amax(-1)
    exceptional = largest - spectrum.amin(-1) > _FLAT * largest
    stretches = (largest == 0).cumsum(0)  # layers between two that have no skip share a number
    twisted = int(exceptional.sum())
    if network.depth == 1 or not twisted or int(stretches[exceptional].bincount().max()) <= 1:
        return ""
    return (
        f"{twisted} of {network.depth} skips are not multiples of orthogonal matrices, and the scalar theory ignores "
        "how their singular vectors align: its answer is not the Jacobian's spectrum; 'chain' is exact"
    )


def scalar_solution(network: Network, method: str, green: Tensor, points: FixedPoints, note: str = "") -> Solution:
    """Return the result of a scalar method, and warn where the method is not exact."""
    reason = why_not_exact(network)
    if reason:
        warnings.warn(f"method '{method}': {reason}", stacklevel=3)
    note = "; ".join(part for part in (note, reason) if part)
    return Solution(green, points.converged, points.residual, points.iterations, method, exact=not reason, note=note)
