r"""Layers of the scalar theories, which use each layer's singular values and noise, but not the singular vectors.

The methods `z1`, `subordination` and `stransform` compute the free product of the layers' laws (distributions of
squared singular values): the law of the layers' product if random rotations separated the layers. It is the law of
$J^\top J$ only if the singular vectors do not matter. Derivations: docs/derivations/paper_methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc.paper.one_layer import gram_spectrum, require_paper_noise
from jpmhc.spectra.network import Network

# A skip counts as a multiple of an orthogonal matrix if its squared singular values differ by at most this fraction.
_FLAT = 1e-9
# The largest number of points times layers times singular values in memory at the same time.
_CHUNK = 2**22


@dataclass(frozen=True, eq=False)
class ScalarLayers:
    """The layers' laws, rescaled to mean one, so that products of a thousand layers neither overflow nor vanish."""

    spectrum: Tensor  # squared singular values of the skips, divided by the layer's mean. [L, n]
    variance: Tensor  # noise variance divided by the layer's mean. [L]
    log_mean: Tensor  # sum over layers of the means' logarithms, which is subtracted from log z

    @classmethod
    def of(cls, network: Network, method: str) -> ScalarLayers:
        """Return the laws of a network's layers.

        Raise ValueError, naming `method`, if the noise is not isotropic and Gaussian, or if a layer is zero.
        """
        require_paper_noise(network, method)
        spectrum = gram_spectrum(network.skips)  # [L, n]
        mean = spectrum.mean(-1) + network.variance
        if bool((mean == 0).any()):
            layer = int((mean == 0).nonzero()[0]) + 1
            raise ValueError(f"layer {layer} is zero, and zero has no S-transform; use 'chain'")
        return cls(spectrum / mean.unsqueeze(-1), network.variance / mean, mean.log().sum())

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.spectrum)

    @property
    def identical(self) -> bool:
        """Whether all layers have the same law (their skips may still differ by rotations)."""
        flat = torch.cat([self.spectrum, self.variance.unsqueeze(-1)], -1)
        return bool(((flat - flat[:1]).abs() <= _FLAT).all())

    @property
    def top(self) -> float:
        """A height above the real axis above which the rescaled layers' solution is close to its form at infinity."""
        norm = (self.spectrum.amax(-1).sqrt() + self.variance.sqrt()).square()
        return 10 * float(norm.max() + norm.sum())

    def rescale(self, z: Tensor) -> Tensor:
        """Return the points of the rescaled layers' product that correspond to the network's points z."""
        return z * torch.exp(-self.log_mean)

    def chunks(self, z: Tensor) -> tuple[Tensor, ...]:
        """Split the points so that the arrays of points, layers and singular values fit in memory."""
        return z.split(max(1, _CHUNK // self.spectrum.numel()))


def why_not_exact(network: Network) -> str:
    r"""Return why the free product of the layers' laws is not the law of $J^\top J$; an empty string if it is.

    The free product is the law if no two skips can align their singular vectors: for one layer; if at most one skip is
    not a multiple of an orthogonal matrix; or if a layer of pure noise, without a skip, separates any two such skips.
    """
    spectrum = gram_spectrum(network.skips)
    largest = spectrum.amax(-1)
    exceptional = largest - spectrum.amin(-1) > _FLAT * largest
    stretches = (largest == 0).cumsum(0)  # layers without a layer of pure noise between them share a number
    twisted = int(exceptional.sum())
    if network.depth == 1 or not twisted or int(stretches[exceptional].bincount().max()) <= 1:
        return ""
    return (
        f"{twisted} of {network.depth} skips are not multiples of orthogonal matrices, and the scalar theory ignores "
        "how their singular vectors align: its answer is not the Jacobian's spectrum; 'chain' is exact"
    )
