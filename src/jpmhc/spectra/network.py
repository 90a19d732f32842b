r"""What is asked: a stack of twisted skips with Gaussian noise, $Y_l = A_l \otimes I_p + \sigma_l W_l$."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Network:
    r"""The layers of a Jacobian $J = Y_L \cdots Y_1$ in the limit of infinitely many features per stream.

    Three structures of noise, $X$ being a real Gaussian $p \times p$ matrix of entry variance $1/p$:

    - isotropic (neither `read` and `write` nor `covariance`): every entry of the $np \times np$ matrix $W_l$ is
      independent with variance $1/(np)$ (eq. jacobian-kronecker);
    - the hyper-connection block (`read` and `write`): $W_l = h_\text{write} h_\text{read}^\top \otimes X$;
    - general (`covariance`): $W_l = \sum_k B_{lk} \otimes X_k$ with independent $X_k$. Its self-energies are the
      completely positive maps $\sigma_l^2 \sum_k B_{lk} M B_{lk}^\top$ and $\sigma_l^2 \sum_k B_{lk}^\top M B_{lk}$ of
      $M$; every completely positive covariance is of this form with at most $n^2$ terms.

    Attributes:
        skips: The mixing matrices $A_l$, first layer first. [L, n, n]
        variance: The noise variance $\sigma_l^2$; a number stands for all layers. [L]
        read: What each stream contributes to the sublayer's input. [L, n]
        write: What each stream receives of the sublayer's output. [L, n]
        covariance: The matrices $B_{lk}$ of the general noise. [L, K, n, n]
    """

    skips: Tensor
    variance: Tensor
    read: Tensor | None = None
    write: Tensor | None = None
    covariance: Tensor | None = None

    def __init__(
        self,
        skips: Tensor | Sequence,
        variance: Tensor | Sequence[float] | float,
        read: Tensor | Sequence | None = None,
        write: Tensor | Sequence | None = None,
        covariance: Tensor | Sequence | None = None,
    ) -> None:
        skips = _real(skips, "skips")
        if skips.ndim != 3 or skips.shape[-1] != skips.shape[-2]:
            raise ValueError(
                f"skips must be square matrices, one per layer [L, n, n], not of shape {list(skips.shape)}"
            )
        depth, n, _ = skips.shape
        if depth == 0 or n == 0:
            raise ValueError("a network needs at least one layer and one stream (skips [L, n, n] with L, n >= 1)")
        variance = _real(variance, "variance").to(skips.device)
        if variance.ndim == 0:
            variance = variance.expand(depth).clone()
        if variance.shape != (depth,):
            raise ValueError(
                f"variance must be one number or one per layer [{depth}], not of shape {list(variance.shape)}"
            )
        if (variance < 0).any():
            raise ValueError(f"the noise variance must not be negative, and {variance.min().item():g} is")
        if (read is None) != (write is None):
            raise ValueError(
                "give both read and write vectors (the hyper-connection block) or neither (isotropic noise)"
            )
        if read is not None and covariance is not None:
            raise ValueError(
                "give either read and write vectors or a covariance: each of them is the whole noise structure"
            )
        vectors = {}
        for name, vector in (("read", read), ("write", write)):
            if vector is not None:
                vector = _real(vector, name).to(skips.device)
                if vector.ndim == 1:
                    vector = vector.expand(depth, -1)
                if vector.shape != (depth, n):
                    raise ValueError(f"{name} must be [L, n] = [{depth}, {n}], not {list(vector.shape)}")
            vectors[name] = vector
        if covariance is not None:
            covariance = _real(covariance, "covariance").to(skips.device)
            if covariance.ndim != 4 or covariance.shape[0] != depth or covariance.shape[-2:] != (n, n):
                raise ValueError(
                    f"covariance must be [L, K, n, n] = [{depth}, K, {n}, {n}], not {list(covariance.shape)}"
                )
        for name, value in {"skips": skips, "variance": variance, **vectors, "covariance": covariance}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def repeated(
        cls,
        skip: Tensor | Sequence,
        variance: float,
        depth: int,
        read: Tensor | Sequence | None = None,
        write: Tensor | Sequence | None = None,
        covariance: Tensor | Sequence | None = None,
    ) -> Network:
        """The same layer `depth` times: skip [n, n], read and write [n], covariance [K, n, n]."""
        if depth < 1:
            raise ValueError(f"a network needs at least one layer, not depth {depth}")
        skip = _real(skip, "skip")
        if skip.ndim != 2:
            raise ValueError(f"skip must be one square matrix [n, n], not of shape {list(skip.shape)}")
        if covariance is not None:
            covariance = _real(covariance, "covariance").expand(depth, -1, -1, -1)
        return cls(skip.expand(depth, -1, -1), variance, read, write, covariance)

    @property
    def depth(self) -> int:
        """How many layers, L."""
        return self.skips.shape[0]

    @property
    def streams(self) -> int:
        """How many streams, n (the paper's q)."""
        return self.skips.shape[-1]

    @property
    def isotropic(self) -> bool:
        """Whether the noise is the same in every direction."""
        return self.read is None and self.covariance is None

    @property
    def identical(self) -> bool:
        """Whether all layers are the same."""
        fields = (self.skips, self.variance, self.read, self.write, self.covariance)
        return all(bool((field == field[:1]).all()) for field in fields if field is not None)

    def to(self, device: torch.device | str) -> Network:
        """The same network with its tensors on a device."""
        moved = {
            name: value.to(device)
            for name in ("skips", "variance", "read", "write", "covariance")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def noise_factors(self) -> Tensor:
        r"""The matrices $\sigma_l B_{lk}$ in $\sigma_l W_l = \sum_k \sigma_l B_{lk} \otimes X_k$, for any structure.

        Isotropic noise is the sum over all $n^2$ matrices $e_i e_j^\top / \sqrt n$.
        """
        n = self.streams
        if self.covariance is not None:
            factors = self.covariance
        elif self.read is not None and self.write is not None:
            factors = (self.write.unsqueeze(-1) * self.read.unsqueeze(-2)).unsqueeze(1)  # [L, 1, n, n]
        else:
            units = torch.eye(n * n, dtype=torch.float64, device=self.skips.device).view(n * n, n, n)
            factors = (units / n**0.5).expand(self.depth, -1, -1, -1)
        return self.variance.sqrt().view(-1, 1, 1, 1) * factors  # [L, K, n, n]


def _real(value: Tensor | Sequence | float, name: str) -> Tensor:
    """The value as a finite float64 tensor, or one sentence that says why it is none."""
    try:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            value = torch.stack(value)
        tensor = torch.as_tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of equal rows: {error}") from None
    if tensor.is_complex():
        raise ValueError(f"{name} must be real, not {tensor.dtype}")
    tensor = tensor.detach().to(torch.float64)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must be finite, and holds NaN or infinity")
    return tensor
