r"""The exact method for layers with tied weights: a dense Dyson equation (docs/derivations/real_networks.md).

The symbols are those of equation.py. Noises of layers l and m with the correlation $\rho_{lm}$ couple the layers'
blocks: $\Sigma_{y_l y_m} = \rho_{lm}\sigma_l\sigma_m\, \mathrm{tr}(M_{x_{l-1}x_{m-1}})\, I$, and the same with x and y
exchanged. The whole pencil is therefore inverted, in O(L³ n³) per point and iteration. Sublayers of two matrices that
share both matrices also couple through their hidden layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jpmhc.spectra.fixed_point import ContinuedEquation, FixedPoints, Options, lead_down
from jpmhc.spectra.fixed_point import solve as solve_equation
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Anderson
from jpmhc.spectra.solution import KnownPoints, Solution
from jpmhc.spectra.sublayers import HiddenLayer, Sublayer

# The largest number of entries in the pencils of the points that are solved at the same time.
_CHUNK = 2**23
DEFAULTS = Options(Anderson(), tolerance=1e-9, maximum=500)


def solve_row(network: Network, z: Tensor, options: Options, known: KnownPoints | None) -> Solution:
    r"""Solve the Dyson equation of layers whose noises are correlated, at points z [B].

    The noise is isotropic or has read and write vectors. Residuals are relative to the largest unknown of each kind.

    Args:
        known: Solved points of the network. A point near a solved point starts from its solution; other points start
            far above the real axis.
    """
    if network.covariance is not None or network.slopes is not None:
        raise ValueError("tied weights need isotropic noise or read and write vectors, without covariance or slopes")
    network, gain = network.rescaled()
    equation, points = _Equation(network), z / gain
    if known is not None:
        known = replace(known, z=known.z / gain)
    parts = [
        _solve_part(equation, part, options, known) for part in points.split(max(1, _CHUNK // equation.pencil.numel()))
    ]
    row = FixedPoints.concatenate(parts)
    good = row.converged
    solved = KnownPoints(z[good], row.x[good]) if bool(good.any()) else None
    return Solution(row.x[:, 0] / gain, good, row.residual, row.iterations, method="pencil", known=solved)


def _solve_part(equation: _Equation, z: Tensor, options: Options, known: KnownPoints | None) -> FixedPoints:
    """Solve points near known points from the known solutions, and other points from far above the real axis."""
    result = FixedPoints.unsolved(equation.start(z, torch.arange(len(z), device=z.device)))
    if known is not None:
        # Points far from all known points get zeros here, and do not start from a known point.
        start = known.start_near(z, torch.zeros_like(result.x), lambda x: equation.admissible(x, z, z.real.long()))
        near = (start[:, 0] != 0).nonzero().squeeze(-1)
        result.merge_pass(near, solve_equation(equation, z[near], start[near], options, near))
    unsolved = result.unconverged()
    if len(unsolved):
        led = lead_down(equation, z[unsolved], options, top=4 * float(z[unsolved].abs().max()) + 4)
        result.merge_pass(unsolved, led)
    return result


class _Equation(ContinuedEquation):
    """The equation of the whole pencil. Each row of unknowns belongs to one point.

    The columns are G, then the couplings of all pairs of x blocks, then the couplings of all pairs of y blocks. A
    coupling is the normalised trace of a pair's block of the inverse pencil, or this block between the read vectors (x)
    or the write vectors (y). The first block of the pencil is the input: n rows for all streams, one row for the
    model's own map.
    """

    def __init__(self, network: Network) -> None:
        depth, n = network.depth, network.streams
        self.depth, self.streams, self.device = depth, n, network.skips.device
        tied = torch.eye(depth, dtype=torch.float64, device=self.device) if network.tied is None else network.tied
        scale = network.variance.sqrt()
        self.coupling = tied * torch.outer(scale, scale)  # [L, L]
        self.groups = [] if network.sublayers is None else find_groups(tied, network.sublayers)
        eye = torch.eye(n, dtype=torch.float64, device=self.device)
        expand = eye if network.ends == "streams" else torch.ones(n, 1, dtype=torch.float64, device=self.device)
        self.inputs = expand.shape[1]
        # The pencil in the order x_0, ..., x_{L-1}, y_1, ..., y_L, x_L. Its block x_0 has n rows here; `narrow` maps
        # these to the rows of the input.
        size = (2 * depth + 1) * n
        pencil = torch.zeros(size, size, dtype=torch.float64, device=self.device)
        for layer in range(depth):
            x, y = layer * n, (depth + layer) * n
            after = (layer + 1) * n if layer < depth - 1 else 2 * depth * n
            pencil[y : y + n, x : x + n] = -network.skips[layer]
            pencil[y : y + n, after : after + n] += eye
        pencil = pencil + pencil.mT
        pencil[-n:, -n:] = -network.end_moments()[1]
        narrow = torch.zeros(size, size - n + self.inputs, dtype=torch.float64, device=self.device)
        narrow[:n, : self.inputs] = expand
        narrow[n:, self.inputs :] = torch.eye(size - n, dtype=torch.float64, device=self.device)
        self.narrow, self.pencil = narrow.to(torch.complex128), pencil.to(torch.complex128)
        # The directions of the noise: the read and write vectors, or None for isotropic noise.
        if network.read is None or network.write is None:
            self.vectors = None
        else:
            self.vectors = network.read.to(torch.complex128), network.write.to(torch.complex128)

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        """Return G = 1/z, couplings 1/z of each x block with itself, and -0.001i of each y block with itself."""
        eye = torch.eye(self.depth, dtype=torch.complex128, device=z.device).flatten()
        return torch.cat([1 / z.unsqueeze(-1), torch.outer(1 / z, eye), (-1e-3j * eye).expand(len(z), -1)], 1)

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return G and the couplings of the inverse pencil, with self-energies from the couplings x. [b, columns]"""
        couplings = x[:, 1:].unflatten(1, (2, self.depth, self.depth))
        half, n = self.depth * self.streams, self.streams
        matrix = self.pencil.repeat(len(z), 1, 1)
        # M_x determines the self-energies of y, and M_y the self-energies of x
        energy_y, energy_x = self._respond(couplings[:, 0], couplings[:, 1])
        matrix[:, :half, :half] -= self._energy(energy_x, 0)
        matrix[:, half : 2 * half, half : 2 * half] -= self._energy(energy_y, 1)
        matrix = self.narrow.mT @ matrix @ self.narrow
        matrix[:, : self.inputs, : self.inputs].diagonal(dim1=-2, dim2=-1).add_(z.unsqueeze(-1))
        inverse = torch.linalg.inv_ex(matrix)[0]
        green = inverse[:, : self.inputs, : self.inputs].diagonal(dim1=-2, dim2=-1).mean(-1)
        inverse = self.narrow @ inverse @ self.narrow.mT
        orders = [
            self._order(inverse[:, part, part].unflatten(2, (self.depth, n)).unflatten(1, (self.depth, n)), side)
            for side, part in enumerate((slice(0, half), slice(half, 2 * half)))
        ]
        return torch.cat([green.unsqueeze(-1), *(order.flatten(1) for order in orders)], 1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return whether G and the couplings of each layer with itself lie in the lower half-plane. [b]"""
        own = x[:, 1:].unflatten(1, (2, self.depth, self.depth)).diagonal(dim1=-2, dim2=-1)
        return (x[:, 0].imag < 0) & (own.imag <= 0).all(-1).all(-1)

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return, for each column, the largest absolute value of its kind: G, x or y couplings. [b, columns]"""
        parts = x[:, :1], *x[:, 1:].unflatten(1, (2, -1)).unbind(1)
        return torch.cat([part.abs().amax(-1, keepdim=True).expand(-1, part.shape[1]) for part in parts], 1)

    def _respond(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the self-energies of y and of x, from the couplings a of x and b of y. [b, L, L] each

        For sublayers of two matrices the self-energies are $E\,X (1 - bX/e)^{-1}$ and $E\,K \circ (1 - bX/e)^{-1} b$
        with $X = K \circ a$ and $K = \rho\,\sigma\sigma^\top d d^\top$. E is the mean over the slopes d of a hidden
        feature, e is the number of hidden features divided by the number of features, and $\circ$ multiplies entries.
        All matrices have one row and one column per layer.
        """
        energy_y, energy_x = self.coupling * a, self.coupling * b
        for layers, slopes, weights, ratio in self.groups:
            here = (slice(None), layers.unsqueeze(-1), layers)
            share = self.coupling[here[1:]] * slopes.unsqueeze(-1) * slopes.unsqueeze(-2)  # [K, l, l]
            x, right = share * a[here].unsqueeze(1), b[here].unsqueeze(1)  # [b, K, l, l], [b, 1, l, l]
            eye = torch.eye(len(layers), dtype=x.dtype, device=x.device)
            inverse = torch.linalg.inv_ex(eye - right @ x / ratio)[0]
            energy_y[here] = torch.einsum("k,bklm->blm", weights, x @ inverse)
            energy_x[here] = torch.einsum("k,bklm->blm", weights, share * (inverse @ right))
        return energy_y, energy_x

    def _energy(self, coupling: Tensor, side: int) -> Tensor:
        """Return self-energies [b, L n, L n] of x (side 0) or y (side 1), from one number per pair of layers.

        Args:
            coupling: The numbers that multiply the identity, or the outer products of the noise's vectors. [b, L, L]
        """
        if self.vectors is None:
            eye = torch.eye(self.streams, dtype=coupling.dtype, device=coupling.device)
            blocks = torch.einsum("blm,ij->blimj", coupling, eye)
        else:
            blocks = torch.einsum("blm,li,mj->blimj", coupling, self.vectors[side], self.vectors[side])
        return blocks.flatten(3, 4).flatten(1, 2)

    def _order(self, blocks: Tensor, side: int) -> Tensor:
        """Return the couplings [b, L, L] of the blocks of pairs of layers [b, L, n, L, n]."""
        if self.vectors is None:
            return torch.einsum("blimi->blm", blocks) / self.streams
        return torch.einsum("blimj,li,mj->blm", blocks, self.vectors[side], self.vectors[side])


def find_groups(tied: Tensor, laws: Sequence[Sublayer]) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    """Return each group of layers that share both sublayer matrices.

    Args:
        tied: Correlations of the layers' noises. [L, L]
        laws: The laws of the sublayers' Jacobians, one per layer.

    Returns:
        For each group, its l layers' numbers [l], their slopes [K, l], the slopes' weights [K], and the number of
        hidden features divided by the number of features.
    """
    groups, others = [], list(range(len(laws)))
    while others:
        layers = [layer for layer in others if bool(tied[others[0], layer] != 0)]
        others = [layer for layer in others if layer not in layers]
        law = laws[layers[0]]
        if not isinstance(law, HiddenLayer) or any(laws[layer] is not law for layer in layers):
            raise ValueError("layers with tied weights need the same sublayer law: a Gaussian matrix or two matrices")
        if math.isfinite(law.ratio):
            slopes = law.squares.sqrt().to(tied).unsqueeze(-1).expand(-1, len(layers))  # [K, l]
            members = torch.tensor(layers, device=tied.device)
            groups.append((members, slopes, law.weights.to(tied.device, torch.complex128), law.ratio))
    return groups
