r"""Residual mixers: what turns logits into the matrix $H_{res}$ that carries the streams past a sublayer.

A mixer says how many logits it needs, which logits it starts from, and how logits become H. Every start maps equal
streams to themselves (H has row sums 1) and stays away from the corners of its set, where gradients die.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.manifolds import birkhoff, grassmann, orthogonal, permutation
from jpmhc.mixers.settings import Settled

START_MASS = 0.01  # off-diagonal mass at the start of bistochastic mixers: at zero the gradient is zero too


class Mixer(Settled, ABC):
    """A set of n × n matrices, parametrised by logits.

    Attributes:
        streams: n.
        logits: How many numbers name a matrix.
    """

    settings = ("streams", "logits", "iterations", "tolerance", "gradient", "scale", "rank")
    grassmann_frames: tuple[str, ...] = ()  # names of parameters that live on a Stiefel manifold

    def __init__(self, streams: int, logits: int) -> None:
        super().__init__()
        checks.at_least_one(streams, "streams")
        self.streams = streams
        self.logits = logits

    @classmethod
    def named(cls, streams: int, dynamic: bool) -> "Mixer":
        """The mixer that its name stands for, when coefficients depend on the token (dynamic) or not."""
        return cls(streams)  # type: ignore[call-arg]

    @abstractmethod
    def start(self) -> Tensor:
        """Logits to start from. [logits]"""

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor:
        """Matrices from logits. [..., logits] → [..., n, n]"""

    @abstractmethod
    def violation(self, matrix: Tensor) -> Tensor:
        """How far each matrix is from the set; zero on it. [..., n, n] → [...]"""

    def fused(self) -> dict[str, Any] | str:
        """How the fused kernels are told of this mixer, or why they cannot be."""
        return f"the kernels do not know the mixer {type(self).__name__}"

    def extra_repr(self) -> str:
        return f"streams={self.streams}, logits={self.logits}"


class Identity(Mixer):
    """H = I: streams that never mix on the skip path; with one stream, the plain residual connection."""

    def __init__(self, streams: int) -> None:
        super().__init__(streams, 0)

    def start(self) -> Tensor:
        return torch.empty(0)

    def forward(self, logits: Tensor) -> Tensor:
        dtype = checks.working(logits).dtype
        return torch.eye(self.streams, dtype=dtype, device=logits.device).expand(*logits.shape[:-1], -1, -1)

    def violation(self, matrix: Tensor) -> Tensor:
        eye = torch.eye(self.streams, dtype=matrix.dtype, device=matrix.device)
        return (matrix - eye).abs().amax((-2, -1))

    def fused(self) -> dict[str, Any] | str:
        return {"mixer": "identity"}


class Unconstrained(Mixer):
    """Hyper-connections (HC): the logits are the matrix."""

    def __init__(self, streams: int) -> None:
        super().__init__(streams, streams**2)

    def start(self) -> Tensor:
        return torch.eye(self.streams).flatten()

    def forward(self, logits: Tensor) -> Tensor:
        return checks.working(checks.finite(logits)).unflatten(-1, (self.streams, self.streams))

    def violation(self, matrix: Tensor) -> Tensor:
        return torch.zeros_like(matrix[..., 0, 0])

    def fused(self) -> dict[str, Any] | str:
        return {"mixer": "unconstrained"}


class Sinkhorn(Mixer):
    """Manifold-constrained hyper-connections (mHC): doubly stochastic, by Sinkhorn–Knopp."""

    def __init__(
        self, streams: int, *, iterations: int = 20, tolerance: float | None = None, gradient: str = "direct"
    ) -> None:
        super().__init__(streams, streams**2)
        checks.at_least_one(iterations, "iterations")
        checks.positive(tolerance, "tolerance")
        if gradient not in birkhoff.GRADIENTS:
            raise ValueError(f"gradient must be one of {', '.join(birkhoff.GRADIENTS)}, got {gradient!r}")
        self.iterations, self.tolerance, self.gradient = iterations, tolerance, gradient

    def start(self) -> Tensor:
        if self.streams == 1:
            return torch.zeros(1)
        diagonal = math.log((1 - START_MASS) * (self.streams - 1) / START_MASS)
        return (diagonal * torch.eye(self.streams, dtype=torch.float64)).flatten()

    def forward(self, logits: Tensor) -> Tensor:
        matrix = logits.unflatten(-1, (self.streams, self.streams))
        return birkhoff.project(matrix, self.iterations, self.tolerance, self.gradient)

    def violation(self, matrix: Tensor) -> Tensor:
        return birkhoff.violation(matrix)

    def fused(self) -> dict[str, Any] | str:
        if self.tolerance is not None or self.gradient != "direct":
            return "the kernels run Sinkhorn without a tolerance and with the direct gradient"
        return {"mixer": "sinkhorn", "iterations": self.iterations}


class Cayley(Mixer):
    """Orthogonal, by the Cayley transform of the skew matrix whose upper triangle is the logits."""

    def __init__(self, streams: int, *, scale: float = 0.1, iterations: int | None = None) -> None:
        super().__init__(streams, streams * (streams - 1) // 2)
        checks.at_least_one(iterations, "iterations")
        checks.number(scale, "scale")
        self.scale, self.iterations = scale, iterations

    def start(self) -> Tensor:
        return torch.zeros(self.logits)

    def forward(self, logits: Tensor) -> Tensor:
        n = self.streams
        if n == 1:
            return torch.ones_like(checks.working(logits).sum(-1))[..., None, None]
        entries = iter(logits.unbind(-1))
        zero = torch.zeros_like(logits[..., 0])
        upper = torch.stack([next(entries) if j > i else zero for i in range(n) for j in range(n)], -1)
        return orthogonal.project(upper.unflatten(-1, (n, n)), self.scale, self.iterations)

    def violation(self, matrix: Tensor) -> Tensor:
        return orthogonal.violation(matrix)

    def fused(self) -> dict[str, Any] | str:
        return {"mixer": "cayley", "scale": self.scale, "iterations": self.iterations}


class Grassmann(Mixer):
    r"""A rank-p projector $UU^\top$.

    Per token (the default), the logits are an n × p frame that is orthonormalised. Static, U is a parameter on the
    Stiefel manifold for `jpmhc.optim.GrassmannianOptimizer` to move; it is orthonormalised too, so that H is a
    projector whatever moves it, and its gradient is horizontal.
    """

    def __init__(self, streams: int, rank: int | None = None, *, static: bool = False) -> None:
        rank = grassmann.default_rank(streams) if rank is None else rank
        if not isinstance(rank, int) or not 1 <= rank <= streams:
            raise ValueError(f"rank must be between 1 and the number of streams, {streams}, got {rank}")
        super().__init__(streams, 0 if static else streams * rank)
        self.rank = rank
        if static:
            self.frame = nn.Parameter(self._start_frame().to(torch.get_default_dtype()))
            self.grassmann_frames = ("frame",)

    @classmethod
    def named(cls, streams: int, dynamic: bool) -> "Grassmann":
        return cls(streams, static=not dynamic)

    def _start_frame(self) -> Tensor:
        # Equal streams pass unchanged if 1/√n lies in the span; cosines are orthogonal to it and to each other.
        n = self.streams
        angle = math.pi * (torch.arange(n, dtype=torch.float64) + 0.5) / n
        frame = torch.cos(angle[:, None] * torch.arange(self.rank))
        return frame / frame.norm(dim=0)

    def start(self) -> Tensor:
        return self._start_frame().flatten() if self.logits else torch.empty(0)

    def forward(self, logits: Tensor) -> Tensor:
        if self.logits:
            return grassmann.project(logits.unflatten(-1, (self.streams, self.rank)))
        return grassmann.project(self.frame).expand(*logits.shape[:-1], -1, -1)

    def violation(self, matrix: Tensor) -> Tensor:
        return grassmann.violation(matrix)

    def fused(self) -> dict[str, Any] | str:
        return {"mixer": "grassmann", "rank": self.rank}


class Permutation(Mixer):
    """A softmax mixture of K permutations, given as `basis` [K, n] or the paper's (K = n + 2, at most n!)."""

    basis: Tensor

    def __init__(self, streams: int, size: int | None = None, *, basis: Tensor | None = None) -> None:
        if basis is None:
            basis = permutation.basis(streams, min(streams + 2, math.factorial(streams)) if size is None else size)
        elif basis.ndim != 2 or basis.shape[-1] != streams:
            raise ValueError(f"the basis must have shape [K, {streams}], got {list(basis.shape)}")
        permutation.validate_rows(basis)
        super().__init__(streams, len(basis))
        self.perms = tuple(map(tuple, basis.tolist()))
        if len(set(self.perms)) < len(self.perms):
            raise ValueError("the basis must hold each permutation once")
        self.register_buffer("basis", basis)

    def start(self) -> Tensor:
        """Most of the mass on the identity; a basis without it starts from the plain average."""
        identity = tuple(range(self.streams))
        if self.logits == 1 or identity not in self.perms:
            return torch.zeros(self.logits)
        mass = math.log((1 - START_MASS) * (self.logits - 1) / START_MASS)
        return torch.tensor([mass if perm == identity else 0.0 for perm in self.perms], dtype=torch.float64)

    def forward(self, logits: Tensor) -> Tensor:
        return permutation.mix(logits, permutation.indicator(self.basis))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        loaded = state_dict.get(prefix + "basis")
        if loaded is not None and tuple(map(tuple, loaded.tolist())) != self.perms:
            raise ValueError("the checkpoint has another permutation basis; build the mixer with that one")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def violation(self, matrix: Tensor) -> Tensor:
        return permutation.violation(matrix)

    def fused(self) -> dict[str, Any] | str:
        return {"mixer": "permutation", "permutations": self.perms}


class Kronecker(Mixer):
    """KromHC: the Kronecker product of k bistochastic 2 × 2 matrices, for n = 2^k streams."""

    def __init__(self, streams: int) -> None:
        if streams < 2 or streams & (streams - 1):
            raise ValueError(
                f"the kronecker mixer needs a power of two, at least 2, as number of streams, got {streams}"
            )
        super().__init__(streams, streams.bit_length() - 1)

    def start(self) -> Tensor:
        stay = torch.tensor((1 - START_MASS) ** (1 / self.logits), dtype=torch.float64)
        return stay.logit().repeat(self.logits)

    def forward(self, logits: Tensor) -> Tensor:
        logits = checks.working(checks.finite(logits))
        # NaN rather than a silent one or zero where the check above may not look
        stay = torch.where(logits.isfinite(), logits, math.nan).sigmoid()
        pair = torch.stack([stay, 1 - stay], -1)
        factors = torch.stack([pair, pair.flip(-1)], -2)  # [..., k, 2, 2]
        product = factors[..., 0, :, :]
        for k in range(1, self.logits):
            right = factors[..., k, :, :]
            product = (product[..., :, None, :, None] * right[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
        return product

    def violation(self, matrix: Tensor) -> Tensor:
        return birkhoff.violation(matrix)

    def fused(self) -> dict[str, Any] | str:
        return {"mixer": "kronecker"}


MIXERS: dict[str, type[Mixer]] = {
    "identity": Identity,
    "unconstrained": Unconstrained,
    "sinkhorn": Sinkhorn,
    "cayley": Cayley,
    "grassmann": Grassmann,
    "permutation": Permutation,
    "kronecker": Kronecker,
}


def make(mixer: str | Mixer, streams: int, dynamic: bool = True) -> Mixer:
    """A mixer from its name, or the object itself after a check that it fits."""
    if isinstance(mixer, str):
        if mixer not in MIXERS:
            raise ValueError(f"unknown mixer {mixer!r}; the known ones are {', '.join(MIXERS)}")
        return MIXERS[mixer].named(streams, dynamic)
    if not isinstance(mixer, Mixer):
        raise ValueError(f"mixer must be a name ({', '.join(MIXERS)}) or a Mixer, got {mixer!r}")
    if mixer.streams != streams:
        raise ValueError(f"the mixer is for {mixer.streams} streams, the connection has {streams}")
    return mixer
