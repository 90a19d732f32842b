"""The record of a fused hyper-connection's settings, for which the kernels are compiled."""

import functools
import hashlib
from dataclasses import dataclass, field, fields
from typing import Any

STREAMS = (2, 4, 8)
MAX_DIM = 8192  # the write kernels keep one stream's row in the registers of one program


@dataclass(frozen=True, eq=False, repr=False)
class Spec:
    """The sizes and settings of one connection for which the kernels are compiled.

    Make it with `make_spec`, which returns the same record for the same settings.

    Attributes:
        mixer: The mixer's `TritonForm`, whose functions compute H from the logits.
        d: Width of a stream, a multiple of 8, at most 8192.
        norm: Weightless norm before the projection, over all n·d numbers of a token: `"layer"`, `"rms"`, or
            `"rms_outside"`, which divides by the root mean square plus eps.
        eps: Added to the variance (or mean square) inside the norm, or to its root.
        read: The gate of the read: `"softmax_matrix"` (n² logits), `"softmax"` or `"sigmoid"` (n logits).
        write: The gate of the write, with the same names.
        temperature: Divides the read and write logits.
        post_norm: Whether a weightless RMS norm of every stream, with the same eps, follows the write.
        scale: The factor of the projection's weight.
        read_eps: Added to the read weights.
        write_peak: The largest write weight of the sigmoid.
        write_eps: Added to the write weights.
        n: The number of streams: 2, 4 or 8.
        key: A short text that stands for the record in operators; `find_spec` returns the record.
    """

    mixer: Any
    d: int
    norm: str = "layer"
    eps: float = 1e-6
    read: str = "softmax"
    write: str = "softmax"
    temperature: float = 1.0
    post_norm: bool = False
    scale: float = 1.0
    read_eps: float = 0.0
    write_peak: float = 2.0
    write_eps: float = 0.0
    n: int = field(init=False)
    key: str = field(init=False)
    cache_key: str = field(init=False)  # read by Triton; it changes with the source of the mixer's functions

    def __post_init__(self) -> None:
        form = self.mixer
        settings = [getattr(self, one.name) for one in fields(self) if one.init and one.name != "mixer"]
        shape = (form.streams, form.logits, form.rows, form.columns, form.constants)
        functions = (form.entries, form.mix, form.derivative)
        sources = [getattr(f, "cache_key", f"{f.fn.__module__}.{f.fn.__qualname__}") for f in functions]
        text = repr((settings, shape, [f"{f.fn.__module__}.{f.fn.__qualname__}" for f in functions]))
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
        """The number of read and write logits, which come before the mixer's logits."""
        return self.read_logits + self.write_logits

    @functools.cached_property
    def logits(self) -> int:
        """The number K of logits: first the read's, then the write's, then the mixer's."""
        return self.gate_logits + self.mixer.logits

    @functools.cached_property
    def coefficients(self) -> int:
        """The number of coefficients per token: n read weights, n write weights, and H by rows."""
        return self.n * (2 + self.n)


_SPECS: dict[str, Spec] = {}


@functools.cache
def make_spec(mixer: Any, d: int, *settings: str | float, **named: str | float) -> Spec | str:
    """Return the `Spec` with these fields, or one sentence that says why the kernels cannot run such a connection."""
    if mixer.streams not in STREAMS:
        return f"the kernels take {', '.join(map(str, STREAMS))} streams, not {mixer.streams}"
    if d % 8 or not 8 <= d <= MAX_DIM:
        return f"the kernels take a dim that is a multiple of 8 between 8 and {MAX_DIM}, not {d}"
    # Equal arguments give one record, and 1 equals 1.0: the kernels get every number as a float.
    given = [float(value) if type(value) is int else value for value in settings]
    given_by_name = {name: float(value) if type(value) is int else value for name, value in named.items()}
    return Spec(mixer, d, *given, **given_by_name)  # type: ignore[arg-type]


def find_spec(key: str) -> Spec:
    """Return the record with this `Spec.key`."""
    return _SPECS[key]
