r"""The base class of residual mixers, which turn logits into the n × n matrix H that carries n streams past a layer.

A mixer says how many logits it needs, which logits it starts from, and how logits become H. At the start H has row
sums 1, so equal streams stay equal, and lies away from the corners of the mixer's set, where gradients vanish.
"""

import functools
import importlib
import math
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jpmhc import checks, precision

MOST_STREAMS = 1024
START_MASS = 0.01  # off-diagonal mass at the start of bistochastic mixers: at zero the gradient is zero too


@dataclass(frozen=True, eq=False)
class TritonForm:
    """A mixer's sizes, constants and three Triton functions, which the fused kernels call.

    Kernels are compiled once per `TritonForm` object, so equal settings must share one object.

    A kernel loads the logits of a block of tokens as matrices M [tokens, rows, columns] and calls the three functions,
    which get this form as `F`, a compile-time constant.

    Attributes:
        streams: n.
        logits: Number of logits per matrix.
        rows: Rows of M, a power of two.
        columns: Columns of M, a power of two.
        entries: `entries(F)` returns, for every entry of M, the index of its logit and a sign: +1 if the entry is the
            logit, -1 if it is the negative of a logit that another entry has with +1, 0 if the entry is padding.
        mix: `mix(m, F)` returns H. [tokens, rows, columns] → [tokens, n, n]
        derivative: `derivative(m, h, grad, F)` turns the gradient of h = H into the gradient of the logits, written to
            the entries of M with sign +1; the other entries are ignored. A logit with two entries, as in a skew matrix,
            needs the sum of both entries' gradients. [tokens, rows, columns]
        constants: Settings of the mixer that the functions read as `F.constants`; hashable, and printed in full.
    """

    streams: int
    logits: int
    rows: int
    columns: int
    entries: Callable[..., object]
    mix: Callable[..., object]
    derivative: Callable[..., object]
    constants: Hashable = None


@functools.cache
def make_form(name: str, streams: int, logits: int, rows: int, columns: int, **constants: Hashable) -> TritonForm:
    """Return the `TritonForm` with the functions of `jpmhc.mixers.NAME_triton`, where NAME is `name`.

    Equal arguments return the same object. The number of columns is rounded up to a power of two. The functions get the
    form as their argument `F`, and read `constants` as `F.constants`.
    """
    columns = 1 << (columns - 1).bit_length()
    functions = importlib.import_module(f"jpmhc.mixers.{name}_triton")
    names = namedtuple("Constants", constants)  # type: ignore[misc]
    triton_functions = (functions.entries, functions.mix, functions.derivative)
    return TritonForm(streams, logits, rows, columns, *triton_functions, names(**constants))


class SettingsModule(nn.Module):
    """A module that keeps its plain settings as one text, `settings_text`.

    Kernels and compiled graphs are cached under this text, so a module with changed settings never uses an old kernel.
    """

    settings_text: str

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, _PLAIN) and not name.startswith("_"):
            settings = {
                k: v for k, v in vars(self).items() if isinstance(v, _PLAIN) and k not in _STATE and k[0] != "_"
            }
            object.__setattr__(self, "settings_text", f"{type(self).__module__}.{type(self).__qualname__}{settings}")


_PLAIN = (bool, int, float, str, tuple, type(None))
_STATE = ("training", "settings_text")


class Mixer(SettingsModule, ABC):
    """A set of n × n matrices, parametrised by logits.

    Attributes:
        name: The word that selects the mixer.
        ensemble: The theory's word for the mixer's random matrices, if there is one.
        mixes: False for the identity, whose product with the streams need not be computed.
        streams: n.
        logits: Number of logits per matrix.
    """

    name: ClassVar[str]
    ensemble: ClassVar[str | None] = None
    mixes: ClassVar[bool] = True
    grassmann_frames: tuple[str, ...] = ()  # names of the parameters that are orthonormal frames on a manifold

    def __init__(self, streams: int, logits: int) -> None:
        super().__init__()
        check_stream_count(type(self), streams)
        self.streams = streams
        self.logits = logits

    @classmethod
    def why_not(cls, streams: int) -> str | None:
        """Return one sentence that says why the mixer cannot mix this number of streams, or None if it can."""
        return None

    @classmethod
    def by_default(cls, streams: int, dynamic: bool) -> "Mixer":
        """Return the mixer with default settings, for coefficients that depend on the token (dynamic) or not."""
        return cls(streams)  # type: ignore[call-arg]

    @abstractmethod
    def start(self) -> Tensor:
        """Return the initial logits. [logits]"""

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor:
        """Turn logits into matrices H. [..., logits] → [..., n, n]"""

    def widen(self, logits: Tensor) -> Tensor:
        """Return the logits in float32 or float64. Raise a ValueError unless each matrix has `self.logits` of them."""
        if logits.shape[-1:] != (self.logits,):
            kind, given = type(self).__name__, list(logits.shape)
            raise ValueError(f"{kind} for {self.streams} streams takes logits [..., {self.logits}], got {given}")
        return precision.single_or_double(logits)

    @abstractmethod
    def violation(self, matrix: Tensor) -> Tensor:
        """Return each matrix's distance from the mixer's set, zero for members of the set. [..., n, n] → [...]"""

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw random matrices H in float64, for the theory of spectra. [*shape, n, n]

        The logits are standard normal, unless a mixer overrides this with a more natural law.
        """
        mixer = cls.by_default(streams, dynamic=True).double()
        with torch.no_grad():
            logits = torch.randn(*checks.sizes(shape, "shape"), mixer.logits, dtype=torch.float64, generator=generator)
            return mixer(logits)

    def triton_form(self) -> TritonForm | str:
        """Return the `TritonForm` for the fused kernels, or one sentence on why they cannot compute the mixer."""
        return f"the kernels do not know the mixer {type(self).__name__}"

    def reset_parameters(self) -> None:
        """Set the mixer's own parameters and buffers, if it has any, to their initial values."""
        return

    def extra_repr(self) -> str:
        return f"streams={self.streams}, logits={self.logits}"


def start_logit(choices: int) -> float:
    """Return the logit whose softmax weight is 1 - `START_MASS` if the other `choices - 1` logits are zero."""
    return math.log((1 - START_MASS) * (choices - 1) / START_MASS) if choices > 1 else 0.0


def check_stream_count(mixer: type[Mixer], streams: int) -> None:
    """Raise a ValueError if the mixer cannot take this number of streams."""
    checks.whole_number(streams, "streams")
    if streams > MOST_STREAMS:
        raise ValueError(
            f"streams must be at most {MOST_STREAMS}, got {streams}: each token has a streams × streams skip"
        )
    reason = mixer.why_not(streams)
    if reason is not None:
        raise ValueError(reason)
