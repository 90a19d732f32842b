r"""How noise enters the chain's Dyson equation: blocks of the resolvent cause self-energies.

Side 0 stands for the blocks $M_{x_{l-1}}$, which cause $\Sigma_{y_l}$; side 1 for $M_{y_l}$, which cause
$\Sigma_{x_{l-1}}$. Each structure of noise needs only some numbers of a block, its order parameters: those are the
equation's unknowns.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from jpmhc.spectra.network import Network


class SelfEnergy(Protocol):
    """A structure of noise.

    Attributes:
        count: How many order parameters a block has.
        positive: Whether they are scalars of the lower half-plane (else: entries of a matrix).
    """

    count: int
    positive: bool

    def energy(self, order: Tensor, side: int) -> Tensor:
        """Compute self-energies: [L, B, count] -> [L, B, n, n], or [L, B, 1, 1] for multiples of I."""

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        """Compute order parameters [L, B, count] of blocks that are given as products left @ right of [L, B, n, n]."""


class Isotropic:
    r"""$\Sigma_{y_l} = \sigma_l^2\,\mathrm{tr}(M_{x_{l-1}})\,I$ and, mirrored, $\sigma_l^2\,\mathrm{tr}(M_{y_l}) I$."""

    count = 1
    positive = True

    def __init__(self, network: Network) -> None:
        self.variance = network.variance.view(-1, 1, 1, 1)

    def energy(self, order: Tensor, side: int) -> Tensor:
        return self.variance * order.unsqueeze(-1)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        return (left * right.mT).sum((-2, -1)).unsqueeze(-1) / left.shape[-1]


class IsotropicInBases:
    r"""The same in bases $T_l$: with $K_l = T_l T_l^\top$, I becomes $K_l$ for the y blocks, $K_{l-1}^{-1}$ for x.

    The traces become $\mathrm{tr}(K_{l-1}^{-1} M_{x_{l-1}})$ and $\mathrm{tr}(K_l M_{y_l})$.
    """

    count = 1
    positive = True

    def __init__(self, network: Network, bases: Tensor) -> None:
        variance = network.variance.view(-1, 1, 1, 1)
        metric = (bases @ bases.mT).to(torch.complex128).unsqueeze(1)  # [L + 1, 1, n, n]
        inverse = torch.linalg.inv(metric)
        self.caused = [variance * metric[1:], variance * inverse[:-1]]
        self.traced = [inverse[:-1], metric[1:]]

    def energy(self, order: Tensor, side: int) -> Tensor:
        return self.caused[side] * order.unsqueeze(-1)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        return ((self.traced[side] @ left) * right.mT).sum((-2, -1)).unsqueeze(-1) / left.shape[-1]


class Block:
    r"""The hyper-connection block: $\Sigma_{y_l} = \sigma_l^2 (r^\top M_{x_{l-1}} r)\, w w^\top$, and mirrored."""

    count = 1
    positive = True

    def __init__(self, network: Network) -> None:
        assert network.read is not None
        assert network.write is not None
        self.vectors = [vector.to(torch.complex128)[:, None, :, None] for vector in (network.read, network.write)]
        variance = network.variance.view(-1, 1, 1, 1)
        self.outer = [variance * (vector @ vector.mT) for vector in reversed(self.vectors)]

    def energy(self, order: Tensor, side: int) -> Tensor:
        return self.outer[side] * order.unsqueeze(-1)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        vector = self.vectors[side]
        return ((vector.mT @ left) @ (right @ vector)).squeeze(-1)


class General:
    r"""$\Sigma_{y_l} = \sum_k B_{lk} M_{x_{l-1}} B_{lk}^\top$ and, mirrored, $\sum_k B_{lk}^\top M_{y_l} B_{lk}$."""

    positive = False

    def __init__(self, network: Network) -> None:
        factors = network.noise_factors().to(torch.complex128)  # [L, K, n, n]
        self.factors = [factors.unsqueeze(1), factors.mT.unsqueeze(1)]  # [L, 1, K, n, n]
        self.streams = network.streams
        self.count = self.streams**2

    def energy(self, order: Tensor, side: int) -> Tensor:
        factors = self.factors[side]
        block = order.unflatten(-1, (1, self.streams, self.streams))
        return (factors @ block @ factors.mT).sum(2)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        return (left @ right).flatten(-2)


def self_energy(network: Network, bases: Tensor | None = None) -> SelfEnergy:
    """Return the self-energies of a network's noise, in bases [L + 1, n, n] of its layers' ends if given."""
    if network.isotropic:
        return Isotropic(network) if bases is None else IsotropicInBases(network, bases)
    if bases is not None:
        before = torch.linalg.inv(bases[:-1])
        if network.covariance is not None:
            moved = bases[1:].unsqueeze(1) @ network.covariance @ before.unsqueeze(1)
            network = replace(network, covariance=moved)
        else:
            assert network.read is not None
            assert network.write is not None
            read = (before.mT @ network.read.unsqueeze(-1)).squeeze(-1)
            write = (bases[1:] @ network.write.unsqueeze(-1)).squeeze(-1)
            network = replace(network, read=read, write=write)
    return General(network) if network.covariance is not None else Block(network)
