"""What a fused hyper-connection computes: one record that selects and specialises the kernels."""

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

STREAMS = (2, 4, 8)
MAX_DIM = 8192  # the write kernels keep one stream's row in the registers of one program


@dataclass(frozen=True, eq=False, repr=False)
class Spec:
    """The shape and the constraints of one connection: everything the kernels are compiled for.

    Make it with `make_spec`, which returns the same record for the same settings.

    Attributes:
        mixer: How H comes from its logits: the mixer's `TritonForm`. The kernels call its functions, whatever they do.
        d: Width of a stream, a multiple of 8, at most 8192.
        norm: Weightless norm before the projection, over all n·d numbers of a token: `"layer"`, `"rms"`, or
            `"rms_outside"`, which divides by the root mean square plus eps.
        eps: Added to the variance (or mean square) inside the norm, or to its root.
        read: How the read logits become n weights: `"softmax_matrix"` (n² logits), `"softmax"` or `"sigmoid"` (n).
        write: The same for the write weights.
        temperature: Divides the read and write logits.
        post_norm: A weightless RMS norm of every stream after the write, with the same eps.
        scale: Multiplies the weight.
        read_eps: Added to the read weights.
        write_peak: The largest write weight of the sigmoid.
        write_eps: Added to the write weights.
        n: Streams: 2, 4 or 8.
        key: The record as a short text, the form in which it passes through `torch.library`; `find_spec` reads it.
    """

    mixer: Any
    d: int
    norm: str
    eps: float
    read: str
    write: str
    temperature: float
    post_norm: bool
    scale: float
    read_eps: float
    write_peak: float
    write_eps: float
    n: int = field(init=False)
    key: str = field(init=False)
    cache_key: str = field(init=False)  # Triton asks for it: which functions, with which source, stand behind `mixer`

    def __post_init__(self) -> None:
        form = self.mixer
        settings = (self.d, self.norm, self.eps, self.read, self.write, self.temperature, self.post_norm, self.scale)
        gates = (self.read_eps, self.write_peak, self.write_eps)
        shape = (form.streams, form.logits, form.rows, form.columns, form.constants)
        functions = (form.entries, form.mix, form.derivative)
        sources = [getattr(f, "cache_key", f"{f.fn.__module__}.{f.fn.__qualname__}") for f in functions]
        text = repr((settings, gates, shape, [f"{f.fn.__module__}.{f.fn.__qualname__}" for f in functions]))
        object.__setattr__(self, "n", form.streams)
        object.__setattr__(self, "key", hashlib.sha256(text.encode()).hexdigest()[:16])
        object.__setattr__(self, "cache_key", repr((text, sources)))
        _SPECS[self.key] = self

    def __repr__(self) -> str:
        return f"Spec_{self.key}"  # short: Triton puts it into the names of compiled functions

    @property
    def read_logits(self) -> int:
        return self.n**2 if self.read == "softmax_matrix" else self.n

    @property
    def write_logits(self) -> int:
        return self.n**2 if self.write == "softmax_matrix" else self.n

    @property
    def gate_logits(self) -> int:
        """How many logits come before the mixer's."""
        return self.read_logits + self.write_logits

    @functools.cached_property
    def logits(self) -> int:
        """K: the read logits, then the write logits, then the mixer's."""
        return self.gate_logits + self.mixer.logits

    @functools.cached_property
    def coefficients(self) -> int:
        """How many numbers a token's logits give: n read weights, n write weights, then H by rows."""
        return self.n * (2 + self.n)


_SPECS: dict[str, Spec] = {}


@functools.cache
def make_spec(
    mixer: Any,
    d: int,
    norm: str = "layer",
    eps: float = 1e-6,
    read: str = "softmax",
    write: str = "softmax",
    temperature: float = 1.0,
    post_norm: bool = False,
    scale: float = 1.0,
    read_eps: float = 0.0,
    write_peak: float = 2.0,
    write_eps: float = 0.0,
) -> Spec | str:
    """Make the record of a connection, or say in one sentence why the kernels do not cover it."""
    if mixer.streams not in STREAMS:
        return f"the kernels take {', '.join(map(str, STREAMS))} streams, not {mixer.streams}"
    if d % 8 or not 8 <= d <= MAX_DIM:
        return f"the kernels take a dim that is a multiple of 8 between 8 and {MAX_DIM}, not {d}"
    numbers = (float(scale), float(read_eps), float(write_peak), float(write_eps))
    return Spec(mixer, d, norm, float(eps), read, write, float(temperature), bool(post_norm), *numbers)


def find_spec(key: str) -> Spec:
    """Find the record that a `Spec.key` stands for."""
    return _SPECS[key]
