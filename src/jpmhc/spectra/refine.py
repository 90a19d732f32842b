"""Refinements of a density: Richardson extrapolation in eta, and a rational fit of the Cauchy transform."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# The number of values of G from which the fit is made ("typically 20-50" in the paper; deep networks need more).
AAA_POINTS = 120
# The number of points at which the fit is checked, and the largest error of z G there; z G is of the order of one.
_CHECKED, _MISS = 40, 0.05


def richardson(values: Tensor, base: int = 2) -> Tensor:
    r"""Extrapolate values [levels, P] at $\eta, 2\eta, 4\eta, \ldots$ to $\eta = 0$ (eq. richardson). [P]

    Column j of the extrapolation tableau removes the error term of order $\eta^j$ with base 2, and of order $\eta^{2j}$
    with base 4.

    Note:
        The paper's tableau has base 4, although the smoothing error of a density is of order $\eta$: base 4 leaves most
        of the error, base 2 removes it. The printed tableau also runs from fine to coarse; it must run from coarse to
        fine.
    """
    column = values.flip(0)  # from coarse to fine
    for j in range(1, len(values)):
        column = (base**j * column[1:] - column[:-1]) / (base**j - 1)  # eq. richardson
    return column[0]


def aaa(transform: Callable[[Tensor], tuple[Tensor, Tensor, float]], z: Tensor) -> tuple[Tensor, float]:
    """Fit a rational function to the Cauchy transform G at nodes; return the fit on a grid [P] and a residual.

    The residual is the largest one at the nodes.

    The nodes are Chebyshev nodes in log x, with the real part x of z. The fit is checked at points of the grid that are
    not nodes. The fit may fail for narrow bands, and for singular values over many orders of magnitude, which need more
    nodes.

    Args:
        transform: A function from points to G, a mask of the unconverged points, and the largest residual.
        z: The grid, ascending in its real part. [P]

    Raises:
        ValueError: If the fit differs from G by too much at the checked points.
    """
    try:
        from scipy.interpolate import AAA
    except ImportError:
        raise ValueError("the refinement 'aaa' needs SciPy 1.15 or newer; install jpmhc[spectra]") from None

    x, eta = z.real.numpy(), z.imag.numpy()
    span = np.log(x[0]), np.log(x[-1])
    nodes = np.cos(np.pi * (np.arange(AAA_POINTS) + 0.5) / AAA_POINTS)[::-1]
    real = np.exp((span[0] + span[1]) / 2 + (span[1] - span[0]) / 2 * nodes)
    points = torch.from_numpy(real + 1j * np.interp(real, x, eta))
    green, lost, residual = transform(points)
    keep = (~lost).numpy()
    fit = AAA(points.numpy()[keep], green.numpy()[keep], rtol=1e-10)
    fitted = torch.from_numpy(fit(z.numpy()))
    checked = torch.linspace(0, len(z) - 1, min(_CHECKED, len(z))).long()
    known, lost, _ = transform(z[checked])
    miss = ((fitted[checked] - known) * z[checked])[~lost].abs()
    worst = float(miss.max()) if len(miss) else float("inf")
    if not worst < _MISS:
        raise ValueError(
            f"the rational function of the refinement 'aaa' misses z G by up to {worst:.2g} between its nodes: leave "
            "the refinement out, or ask for fewer orders of magnitude"
        )
    return fitted, residual
