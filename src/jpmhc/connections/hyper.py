r"""HyperConnection: n parallel residual streams around any sublayer.

A block reads one mixture of the streams, runs the sublayer on it, and writes the result back beside the mixed streams:
$x \leftarrow H_{res} x + h_{post} \otimes F(h_{pre}^\top x)$ (eq. hc-general; pre and post as the vectors they are).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jpmhc import checks, mixers
from jpmhc.connections import fused, gates, steps
from jpmhc.connections.streams import expand_streams, flatten_streams, sublayer_output
from jpmhc.mixers.settings import Settled

NORMS = ("rms", "layer")
KERNELS = ("auto", "fused", "reference")
EPS = 1e-6


class Coefficients(NamedTuple):
    """What a connection does to each token: read weights [..., n], write weights [..., n], skip matrix [..., n, n]."""

    read: Tensor
    write: Tensor
    skip: Tensor


class ReadState(NamedTuple):
    """What the reference's `read` leaves for `write`: coefficients, and the streams as the gradient passes them."""

    source: Tensor
    streams: Tensor  # [T, n, d]
    write: Tensor  # [T, n]
    skip: Tensor | None  # [T, n, n]


class CoefficientMap(Settled):
    """Streams → logits → coefficients. Its numbers stay in float32 when the model becomes bfloat16 or float16.

    Attributes:
        weight: What of the logits depends on the token; zero at the start, absent when static. It acts divided by
            √(n · dim), so that a step moves dynamic and static logits alike whatever the width. [K, n * dim]
        logits: What does not: the logits at the start, and all of them when static. [K]
    """

    settings = ("dim", "mixer", "norm", "read", "write", "temperature")

    def __init__(self, dim: int, mixer: mixers.Mixer, norm: str, read: str, write: str, temperature: float) -> None:
        super().__init__()
        for name, value, known in (("norm", norm, NORMS), ("read", read, gates.READS), ("write", write, gates.WRITES)):
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"unknown {name} {value!r}; the known ones are {', '.join(known)}")
        checks.positive(temperature, "temperature")
        self.dim, self.mixer, self.norm, self.read, self.write = dim, mixer, norm, read, write
        self.temperature = temperature
        n = mixer.streams
        self.sizes = (gates.READS[read].size(n), gates.WRITES[write].size(n), mixer.logits)
        self.logits = nn.Parameter(torch.zeros(sum(self.sizes), dtype=_coefficient_dtype()))
        self.weight: nn.Parameter | None = None

    def reset(self, favoured: int, dynamic: bool) -> None:
        """Start as the plain residual on equal streams: reads sum to one, writes are one, the skip has row sums one."""
        n = self.mixer.streams
        read = gates.READS[self.read].start(gates.favouring(favoured, n)) * self.temperature
        write = gates.WRITES[self.write].start(torch.ones(n, dtype=torch.float64)) * self.temperature
        with torch.no_grad():
            self.logits.copy_(torch.cat([read, write, self.mixer.start().double()]))
        if dynamic:
            self.weight = nn.Parameter(torch.zeros(sum(self.sizes), n * self.dim, dtype=_coefficient_dtype()))

    def projection(self) -> Tensor:
        """The matrix that the normalised streams are multiplied with; without it Adam would tear the logits away."""
        assert self.weight is not None
        return self.weight * self.weight.shape[-1] ** -0.5

    def linear(self) -> tuple[Tensor | None, Tensor]:
        """The affine map from normalised streams to all logits, a static frame's entries included. [K, n * dim], [K]"""
        weight = None if self.weight is None else self.projection()
        frames = [getattr(self.mixer, name).flatten() for name in self.mixer.grassmann_frames]
        if not frames:
            return weight, self.logits
        logits = torch.cat([self.logits, *frames])
        if weight is not None:
            weight = torch.cat([weight, weight.new_zeros(len(logits) - len(weight), weight.shape[-1])])
        return weight, logits

    def forward(self, x: Tensor) -> tuple[Coefficients, Tensor]:
        """Coefficients of each token, and x handed on for the steps after this one. [T, n, d]"""
        if self.weight is None:
            logits = self.logits.expand(x.shape[0], -1)
        else:
            varying, x = steps.project(x, self.projection(), self.norm == "layer", EPS)
            logits = varying + self.logits
        read, write, skip = logits.split(self.sizes, -1)
        n = self.mixer.streams
        return (
            Coefficients(
                gates.READS[self.read](read / self.temperature, n),
                gates.WRITES[self.write](write / self.temperature, n),
                self.mixer(skip),
            ),
            x,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "CoefficientMap":
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            half = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if half else moved

        return super()._apply(keep_precision, recurse)


class HyperConnection(Settled):
    r"""A sublayer wrapped in n residual streams.

    A fresh block on n equal streams is the plain residual block $x + F(x)$, whatever the mixer.

    Args:
        sublayer: Any module or function on [..., dim], without a residual of its own; norms inside it are its affair.
        dim: Width of one stream.
        streams: n.
        mixer: The skip's constraint: a name from `MIXERS` or a `Mixer`.
        index: The layer's number: its read favours stream `index` mod n at the start, which is what lets equal streams
            part. None draws it from torch's generator.
        norm: `"rms"` or `"layer"`, over all streams of a token, before the projection to logits; without weights.
        read: `"softmax"`, `"sigmoid"`, or `"softmax_matrix"` (the paper's Cayley variant).
        write: Likewise.
        temperature: τ of eq. cayley-constraints, dividing the read and write logits.
        dynamic: Whether coefficients depend on the token (a projection of the streams) or are parameters only.
        post_norm: `"rms"` normalises each stream after the write, without weights; None does not.
        kernels: `"fused"` Triton kernels, the PyTorch `"reference"`, or `"auto"`: fused on CUDA where the kernels cover
            the case (otherwise a warning says why not), reference elsewhere and under `torch.func` transforms.

    Shapes:
        x: [..., streams, dim], and the same out. Streams that are all equal may be given once, as [..., 1, dim]: the
            fused kernels then move one stream instead of n.
    """

    settings = ("dim", "streams", "post_norm")

    def __init__(
        self,
        sublayer: Any,
        dim: int,
        streams: int = 4,
        mixer: str | mixers.Mixer = "cayley",
        *,
        index: int | None = None,
        norm: str = "rms",
        read: str = "softmax",
        write: str = "sigmoid",
        temperature: float = 1.0,
        dynamic: bool = True,
        post_norm: str | None = None,
        kernels: str = "auto",
    ) -> None:
        super().__init__()
        checks.at_least_one(dim, "dim")
        checks.at_least_one(streams, "streams")
        checks.switch(dynamic, "dynamic")
        if not callable(sublayer):
            raise ValueError(f"the sublayer must be a module or a function, got {sublayer!r}")
        if index is not None and not isinstance(index, int):
            raise ValueError(f"index must be a whole number or None, got {index!r}")
        if post_norm not in (None, "rms"):
            raise ValueError(f"post_norm must be None or 'rms', got {post_norm!r}")
        if kernels not in KERNELS:
            raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, got {kernels!r}")
        self.sublayer = sublayer
        self.dim, self.streams, self.post_norm, self.kernels = dim, streams, post_norm, kernels
        self.map = CoefficientMap(dim, mixers.make(mixer, streams, dynamic), norm, read, write, temperature)
        favoured = int(torch.randint(streams, (), device="cpu")) if index is None else index
        self.map.reset(favoured, dynamic)
        self.plan = fused.plan(self.map, post_norm, EPS)
        if kernels == "fused" and isinstance(self.plan, str):
            raise ValueError(f'kernels="fused" is not possible: {self.plan}')

    @property
    def mixer(self) -> mixers.Mixer:
        """The residual mixer."""
        return self.map.mixer

    def coefficients(self, x: Tensor) -> Coefficients:
        """Read weights, write weights and skip matrix for each token of x, in float32 or float64."""
        coefficients, _ = self.map(self._flat(self._all(x)))
        return Coefficients(*(c.reshape(*x.shape[:-2], *c.shape[1:]) for c in coefficients))

    def read(self, x: Tensor) -> tuple[Tensor, Any]:
        """The sublayer's input [..., dim], and what `write` needs to know."""
        flat = self._flat(x)
        if fused.chosen(self, x):
            return fused.read(self, x)
        coefficients, streams = self.map(self._all(flat))
        h, streams = steps.gather(streams, coefficients.read)
        skip = None if isinstance(self.mixer, mixers.Identity) else coefficients.skip
        return h.reshape(*x.shape[:-2], self.dim), ReadState(x, streams, coefficients.write, skip)

    def write(self, x: Tensor, y: Tensor, state: Any) -> Tensor:
        """The streams after the sublayer's output y [..., dim] has been written back."""
        flat = self._flat(x)
        y = sublayer_output(y, x)
        if not isinstance(state, ReadState):
            return fused.write(self, x, y, state)
        if state.streams.shape != (flat.shape[0], self.streams, self.dim) or x.shape[:-2] != state.source.shape[:-2]:
            raise ValueError(
                f"the state must be what this connection's read returned for these streams: it is of "
                f"{list(state.source.shape)}, the streams are {list(x.shape)}"
            )
        # The streams that read() handed on carry the shortest backward pass; other streams are as valid.
        handed = x is state.source and steps.eager(state.streams, state.write)
        streams = state.streams if handed else self._all(flat)
        out = steps.scatter(streams, y.reshape(-1, self.dim), state.write, state.skip)
        out = out.view(*x.shape[:-2], self.streams, self.dim)
        if self.post_norm is None:
            return out
        return nn.functional.rms_norm(out, (self.dim,), eps=EPS)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Read, sublayer, write. Extra arguments go to the sublayer; of a tuple it returns, the first is written."""
        h, state = self.read(x)
        y = self.sublayer(h, *args, **kwargs)
        out = self.write(x, first_of(y), state)
        return (out, *y[1:]) if isinstance(y, tuple) else out

    def _all(self, x: Tensor) -> Tensor:
        """All n streams of what may be given once."""
        return x if x.shape[-2] == self.streams else expand_streams(x.squeeze(-2), self.streams)

    def _flat(self, x: Tensor) -> Tensor:
        return flatten_streams(x, self.streams, self.dim)

    def extra_repr(self) -> str:
        m = self.map
        return f"dim={self.dim}, streams={self.streams}, norm={m.norm}, read={m.read}, write={m.write}"


def first_of(result: Any) -> Any:
    """What of a sublayer's result is written."""
    return result[0] if isinstance(result, tuple) and result else result


def _coefficient_dtype() -> torch.dtype:
    """float32 at least, whatever the default type: coefficients are not kept in half precision."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)
