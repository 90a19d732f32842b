r"""Dykema's twisted S-transform: the free product of matrix-valued layers (appendices "Dykema", "OV pipeline").

Over the $n \times n$ matrices $B = M_n$ the layers' $x_l = Y_l^\top Y_l$ are free with amalgamation (the matrix-valued
form of independence for large random matrices), and their S-transforms, functions of a matrix W, compose by $S_{xy}(W)
= S_y(W)\, S_x(S_y(W)^{-1} W S_y(W))$ (eq. twisted_product). This composition gives the law of the product $x_L \cdots
x_1$. For two layers, with $x_1 = Y_1 Y_1^\top$, it is the law of $J^\top J$. For more layers it is not in general,
because $B$-valued laws are not cyclic: the laws of $xy$ and $yx$ differ. Derivations and measured deviations:
docs/derivations/paper_methods.md.

Note:
    The paper takes $x_1 = Y_1^\top Y_1$, which is wrong for a non-normal skip already at two layers; this form is the
    method "twisted-paper". The paper has n² unknowns per point and an inner Newton iteration per layer. Here there are
    two unknowns per layer, because a layer's S-transform is an explicit function of its self-energies and the twisted
    arguments are rotations of one product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jpmhc.paper.one_layer import mean_diagonal, require_paper_noise, to_solution
from jpmhc.paper.scalar import why_not_exact as why_not_scalar
from jpmhc.spectra.fixed_point import ContinuedEquation, FixedPoints, Options, lead_down
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Newton
from jpmhc.spectra.solution import Solution, method

# If the condition number of the Newton matrix is above CONDITION, TIKHONOV times its norm is added to its diagonal
# (appendix "Numerical Stability").
CONDITION = 1e10
TIKHONOV = 1e-8
# Step lengths of the appendix "Operator-Valued Multi-Layer Pipeline".
_SCHEME = Newton(lengths=(1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01))
# The largest number of complex numbers, points × layers² × n², in memory at the same time.
_CHUNK = 2**22


class Factors(NamedTuple):
    r"""The layers' factors $x = Y^\top Y$ with $Y = A + \sigma X$ and noise X: A, $\sigma^2$, and the matrices P and Q
    that describe the noise.

    The self-energies are $\Sigma_y = \sigma^2 \alpha P_y$ with $\alpha = \langle Q_x, M \rangle$, and $\Sigma_x =
    \sigma^2 \beta P_x$ with $\beta = \langle Q_y, M_y \rangle$, where $\langle Q, M \rangle = \mathrm{Tr}\, Q M$. M is
    the resolvent of x, and $M_y$ is the block of Y's output in the inverse of the linearisation (the block matrix of
    $z$, $Y$ and $Y^\top$). For isotropic noise, every P is $I$ and every Q is $I/n$. For a network with read vectors r
    and write vectors w, $P_x = Q_x = r r^\top$ and $P_y = Q_y = w w^\top$. All fields are complex.
    """

    skip: Tensor  # A. [L, n, n]
    variance: Tensor  # σ². [L, 1, 1]
    source_x: Tensor  # Q_x. [L, n, n]
    source_y: Tensor  # Q_y. [L, n, n]
    target_x: Tensor  # P_x. [L, n, n]
    target_y: Tensor  # P_y. [L, n, n]

    @classmethod
    def of(cls, network: Network, first: str) -> Factors:
        r"""Return a network's factors, first layer first; raise ValueError if the method is not defined for them.

        The first factor is $Y_1 Y_1^\top$ if `first` is "outer" (x and y are then exchanged in its matrices), and
        $Y_1^\top Y_1$ if `first` is "gram".
        """
        require_paper_noise(network, "twisted", isotropic=False)
        if network.covariance is not None:
            raise ValueError(
                "method 'twisted' needs isotropic noise or read and write vectors, not a general covariance"
            )
        skips, variance = network.skips.to(torch.complex128), network.variance.view(-1, 1, 1) + 0j
        if network.read is not None and network.write is not None:
            vectors = (v.to(torch.complex128).unsqueeze(-1) for v in (network.read, network.write))
            target_x, target_y = source_x, source_y = [v @ v.mT for v in vectors]
        else:
            target_x = target_y = torch.eye(network.streams, dtype=skips.dtype, device=skips.device).expand_as(skips)
            source_x = source_y = target_x / network.streams
        factors = cls(skips, variance, source_x, source_y, target_x, target_y)
        if first == "outer":
            flipped = cls(skips.mT, variance, source_y, source_x, target_y, target_x)
            factors = cls(*(torch.cat([a[:1], b[1:]]) for a, b in zip(flipped, factors)))
        spread = torch.linalg.cond(factors.mean())
        if bool((spread > CONDITION).any()):
            layer = int((spread > CONDITION).nonzero()[0]) + 1
            raise ValueError(f"layer {layer} has a singular mean E[YᵀY] and so no S-transform; use 'chain'")
        return factors

    def rescaled(self) -> tuple[Factors, float]:
        """Return factors whose means have normalised trace one, and the number that divided the factors' product."""
        gain = mean_diagonal(self.mean()).real.view(-1, 1, 1)
        rescaled = self._replace(skip=self.skip / gain.sqrt(), variance=self.variance / gain)
        return rescaled, float(gain.log().sum().exp())

    def mean(self) -> Tensor:
        """Return the mean E[x] of each factor, the inverse of the factor's S-transform at zero. [L, n, n]"""
        beta = self.source_y.diagonal(dim1=-1, dim2=-2).sum(-1)
        return self.inverse_s(torch.zeros_like(beta), beta)[0]

    def inverse_s(self, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $S^{-1} = \sigma^2 \beta P_x + A^\top U^{-1} A$ and $U^{-1}$, for $U = 1 - \sigma^2 \alpha P_y$.

        S is the layer's S-transform by $\Psi$-inversion (eq. ov_s_transform, in Dykema's order). $\alpha$ and $\beta$
        are [..., L]; both results are [..., L, n, n].
        """
        eye = torch.eye(self.skip.shape[-1], dtype=self.skip.dtype, device=self.skip.device)
        u, _ = torch.linalg.inv_ex(eye - self.variance * alpha[..., None, None] * self.target_y)
        return self.variance * beta[..., None, None] * self.target_x + self.skip.mT @ u @ self.skip, u

    def orders(self, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $\alpha$ and $\beta$ from the resolvent M = `m` and $U^{-1}$ = `u`. [..., L] each

        The block of Y's output is $M_y = U^{-1} + U^{-1} A M A^\top U^{-1}$.
        """
        reach = u @ self.skip
        return _pair(self.source_x, m), _pair(self.source_y, u + reach @ m @ self.skip.mT @ u)


@method(scheme=_SCHEME, tolerance=1e-11, maximum=60)
def solve(network: Network, z: Tensor, options: Options) -> Solution:
    r"""Solve the equation of the twisted product with $Y_1 Y_1^\top$ as the first factor, at points z [B].

    The solution is exact for one and two layers. The noise is isotropic or has read and write vectors. The residual is
    relative to the layers' self-energies. Only Newton's method can solve the equation.
    """
    return _solve(network, z, options, "outer")


@method(scheme=_SCHEME, tolerance=1e-11, maximum=60)
def solve_as_printed(network: Network, z: Tensor, options: Options) -> Solution:
    r"""Solve the equation of the twisted product with the paper's first factor, $Y_1^\top Y_1$, at points z [B]."""
    return _solve(network, z, options, "gram")


def _solve(network: Network, z: Tensor, options: Options, first: str) -> Solution:
    factors, gain = Factors.of(network, first).rescaled()
    equation = _Product(factors, positive=network.depth <= 2)
    chunks = (z / gain).split(equation.chunk)
    parts = [lead_down(equation, chunk, options, top=equation.top) for chunk in chunks]
    green = torch.cat([equation.product(part.x, chunk) for part, chunk in zip(parts, chunks)]) / z
    method = "twisted" if first == "outer" else "twisted-paper"
    return to_solution(method, green, FixedPoints.concatenate(parts), why_not_exact(network, first))


def why_not_exact(network: Network, first: str = "outer") -> str:
    r"""Return why the twisted product is not the law of $J^\top J$; an empty string if it is.

    `first` is as in `Factors.of`.
    """
    if network.depth == 1 or (network.isotropic and not why_not_scalar(network)):
        return ""
    if network.depth == 2:
        skip = network.skips[0]
        normal = network.isotropic and torch.allclose(skip @ skip.mT, skip.mT @ skip, rtol=1e-9, atol=1e-12)
        if first == "outer" or normal:
            return ""
        return "the first factor is Y₁ᵀY₁, and A₁ is not normal: this is not the Jacobian's spectrum; use 'twisted'"
    return (
        f"the twisted product of {network.depth} layers is the law of x_L…x_1 and not of JᵀJ, as matrix-valued laws "
        "are not cyclic; 'chain' is exact"
    )


class _Product(ContinuedEquation):
    r"""$z\, W S(W) = 1 + W$ (eq. outer_newton) in the unknowns $(\alpha_1, \dots, \alpha_L, \beta_1, \dots, \beta_L)$.

    For S-transforms $T_l$ of the layers, $W = (z T_1 \cdots T_L - 1)^{-1}$. The resolvent of layer $l$ is
    $M_l = (b_l - T_l^{-1})^{-1}$ at the rotated product $b_l = z T_{l+1} \cdots T_L T_1 \cdots T_{l-1}$. Such products
    may exceed the range of a double. Therefore the $-M_l$ are computed as the diagonal blocks of $K^{-1}$, a stable
    inverse, where $K$ has the $T_l^{-1}$ on its diagonal and $-z^{1/L}$ on the cyclic superdiagonal.
    """

    def __init__(self, factors: Factors, positive: bool) -> None:
        self.factors, self.positive = factors, positive
        self.depth, self.streams, _ = factors.skip.shape
        noise = factors.variance.flatten() * factors.source_y.diagonal(dim1=-1, dim2=-2).sum(-1)
        scale = torch.linalg.matrix_norm(torch.linalg.inv(factors.mean()), 2)
        norm = torch.linalg.matrix_norm(factors.skip, 2).square() + noise.real
        self.chunk = max(1, _CHUNK // (self.depth * factors.skip.numel()))
        self.top = 10 * float((norm * scale).sum() + norm.max())
        ring = torch.eye(self.depth, dtype=torch.complex128, device=noise.device).roll(1, 1)
        eye = torch.eye(self.streams, dtype=torch.complex128, device=noise.device)
        self.ring = torch.einsum("lk,ij->likj", ring, eye)  # [L, n, L, n]

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        x = torch.zeros(len(z), 2 * self.depth, dtype=z.dtype, device=z.device)
        x[:, self.depth :] = self.factors.source_y.diagonal(dim1=-1, dim2=-2).sum(-1)
        blocks, u = self._inverse(x, z)
        return torch.cat(self.factors.orders(_diagonal(blocks), u), -1)

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        factors = self.factors
        blocks, u = self._inverse(x, z)
        m = _diagonal(blocks)
        # The derivatives of S⁻¹ in α and β [b, L, n, n], and of β in α at fixed M [b, L].
        u_slope = factors.variance * u @ factors.target_y @ u
        by_alpha = factors.skip.mT @ u_slope @ factors.skip
        by_beta = (factors.variance * factors.target_x).expand_as(by_alpha)
        inner = factors.skip @ m @ factors.skip.mT
        direct = _pair(factors.source_y, u_slope + u_slope @ inner @ u + u @ inner @ u_slope)
        # α is Tr Q_x M, and β depends on M by Tr Q M with Q = Aᵀ U⁻¹ Q_y U⁻¹ A.
        along_m = factors.source_x.expand_as(m), factors.skip.mT @ u @ factors.source_y @ u @ factors.skip
        rows = []
        for source in along_m:  # dM_l = K⁻¹_lj d(T_j⁻¹) K⁻¹_jl
            around = torch.einsum("bjlxy,blyu,bljuv->bljxv", blocks, source, blocks)
            rows.append(torch.cat([_pair(around, by.unsqueeze(1)) for by in (by_alpha, by_beta)], -1))  # [b, L, 2L]
        jacobian = torch.cat(rows, 1)
        layers = torch.arange(self.depth, device=x.device)
        jacobian[:, self.depth + layers, layers] += direct
        residual = torch.cat(factors.orders(m, u), -1) - x  # of eq. outer_newton
        return _relative_size(residual, x, jacobian), _regularised_step(jacobian, residual)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        finite = torch.isfinite(x).all(-1)
        if not self.positive:
            return finite  # the law of three or more factors need not be a law of positive numbers
        product = self.product(x, z)
        return finite & (product.imag < 0) & ((product / z).imag < 0)

    def product(self, x: Tensor, z: Tensor) -> Tensor:
        """Return zG, which is 1 + tr W, from the unknowns x, by the normalised trace of one block of -K⁻¹. [b]"""
        blocks, _ = self._inverse(x, z)
        return self._link(z) * mean_diagonal(blocks[:, 1 % self.depth, 0])

    def _link(self, z: Tensor) -> Tensor:
        return torch.exp(z.log() / self.depth)

    def _inverse(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks of -K⁻¹ [b, L, L, n, n], and U⁻¹ of every layer [b, L, n, n]."""
        inverse, u = self.factors.inverse_s(x[:, : self.depth], x[:, self.depth :])
        matrix = -self._link(z).view(-1, 1, 1, 1, 1) * self.ring
        layers = torch.arange(self.depth, device=x.device)
        matrix[:, layers, :, layers] += inverse.transpose(0, 1)
        size = self.depth * self.streams
        # The blocks contain the resolvents of all rotations of the S-transforms' product (eqs. twisted_product and
        # twisted_fold).
        blocks = -torch.linalg.inv_ex(matrix.reshape(-1, size, size))[0]
        return blocks.view(-1, self.depth, self.streams, self.depth, self.streams).transpose(2, 3), u


def _diagonal(blocks: Tensor) -> Tensor:
    return blocks.diagonal(dim1=1, dim2=2).permute(0, 3, 1, 2)


def _relative_size(residual: Tensor, x: Tensor, jacobian: Tensor) -> Tensor:
    """Return the residual's largest relative entry; infinity where the Jacobian is not finite. [b]"""
    # A layer without noise or with a read vector of zeros has self-energies of zero: their residuals are absolute.
    relative = (residual.abs() / torch.where(x.abs() > 1e-30, x.abs(), 1.0)).amax(-1)
    return torch.where(torch.isfinite(jacobian).all(-1).all(-1), relative, torch.inf)


def _regularised_step(jacobian: Tensor, residual: Tensor) -> Tensor:
    """Return the Newton step of x = g(x), with Tikhonov regularisation of singular matrices. [b, d]

    `jacobian` [b, d, d] is the Jacobian of g, and `residual` [b, d] is g(x) - x.
    """
    eye = torch.eye(residual.shape[-1], dtype=residual.dtype, device=residual.device)
    matrix = torch.where(torch.isfinite(jacobian).all(-1).all(-1)[:, None, None], jacobian - eye, eye)
    values = torch.linalg.svdvals(matrix)
    singular = values[:, 0] > CONDITION * values[:, -1]
    shift = torch.where(singular, TIKHONOV * torch.linalg.matrix_norm(matrix), 0.0)
    return torch.linalg.solve_ex(matrix + shift[:, None, None] * eye, -residual)[0]


def _pair(source: Tensor, m: Tensor) -> Tensor:
    """Return Tr(source @ m)."""
    return (source.mT * m).sum((-1, -2))
