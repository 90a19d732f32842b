r"""What a residual mixer is: a rule that turns logits into the n × n matrix H that carries streams past a sublayer.

A mixer says how many logits it needs, which logits it starts from, and how logits become H. Every start maps equal
streams to themselves (H has row sums 1) and stays away from the corners of its set, where gradients die.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jpmhc import checks

MOST_STREAMS = 1024
START_MASS = 0.01  # off-diagonal mass at the start of bistochastic mixers: at zero the gradient is zero too


@dataclass(frozen=True, eq=False)
class TritonForm:
    """How the fused kernels compute a mixer: sizes, constants, and three Triton functions.

    A mixer makes one object for the same settings: kernels are compiled for the object.

    A kernel loads the logits of a block of tokens as matrices M [tokens, rows, columns] and calls the three functions,
    which get this form as `F`, a compile-time constant.

    Attributes:
        streams: n.
        logits: How many logits make one matrix.
        rows: Rows of M, a power of two.
        columns: Columns of M, a power of two.
        entries: `entries(F)` returns which logit is entry (i, j) of M, and its sign. +1: the entry is the logit itself;
            -1: its negative, and the logit has a place of its own; 0: padding.
        mix: `mix(m, F)` returns H. [tokens, rows, columns] → [tokens, n, n]
        derivative: `derivative(m, h, grad, F)` returns the gradient of the logits from that of H, each at its place in
            M with the sign +1; other places are not looked at. A logit that stands twice, as in a skew matrix, needs
            the sum of both places' gradients there. [tokens, rows, columns]
        constants: Settings of the mixer that the functions read as `F.constants`; hashable, and printed in full.
    """

    streams: int
    logits: int
    rows: int
    columns: int
    entries: Any
    mix: Any
    derivative: Any
    constants: Any = None


class SettingsModule(nn.Module):
    """A module that keeps its plain settings as one text, `settings_text`.

    What was made for the settings (a kernel, a compiled graph) is looked up by this text, so it cannot go stale when
    one of them is changed.
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
        name: The word that selects it.
        ensemble: Another word for its random matrices in the theory, if it has one.
        mixes: False for the identity, whose product with the streams need not be computed.
        streams: n.
        logits: How many logits make one matrix.
    """

    name: ClassVar[str]
    ensemble: ClassVar[str | None] = None
    mixes: ClassVar[bool] = True
    grassmann_frames: tuple[str, ...] = ()  # names of parameters that are orthonormal frames and move on a manifold

    def __init__(self, streams: int, logits: int) -> None:
        super().__init__()
        check_stream_count(type(self), streams)
        self.streams = streams
        self.logits = logits

    @classmethod
    def why_not(cls, streams: int) -> str | None:
        """Say in one sentence why the mixer cannot take this number of streams; None if it can."""
        return None

    @classmethod
    def by_default(cls, streams: int, dynamic: bool) -> "Mixer":
        """Make the mixer that its name stands for, with coefficients that depend on the token (dynamic) or not."""
        return cls(streams)  # type: ignore[call-arg]

    @abstractmethod
    def start(self) -> Tensor:
        """Return the logits to start from. [logits]"""

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor:
        """Turn logits into matrices. [..., logits] → [..., n, n]"""

    @abstractmethod
    def violation(self, matrix: Tensor) -> Tensor:
        """Measure how far each matrix is from the set; zero on it. [..., n, n] → [...]"""

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw random matrices of the set in float64, as the theory of spectra does. [*shape, n, n]

        They are those of standard normal logits, unless a mixer has a more natural law.
        """
        mixer = cls.by_default(streams, dynamic=True).double()
        with torch.no_grad():
            return mixer(torch.randn(*shape, mixer.logits, dtype=torch.float64, generator=generator))

    def triton_form(self) -> TritonForm | str:
        """Return how the fused kernels compute this mixer, or one sentence saying why they cannot."""
        return f"the kernels do not know the mixer {type(self).__name__}"

    def reset_parameters(self) -> None:
        """Put the mixer's own parameters and buffers, if it has any, to their start."""
        return

    def extra_repr(self) -> str:
        return f"streams={self.streams}, logits={self.logits}"


def start_logit(choices: int) -> float:
    """Return the logit of one choice among so many that leaves `START_MASS` for the others, whose logits are zero."""
    return math.log((1 - START_MASS) * (choices - 1) / START_MASS) if choices > 1 else 0.0


def check_stream_count(mixer: type[Mixer], streams: int) -> None:
    """Refuse a number of streams that the mixer cannot take."""
    checks.whole_number(streams, "streams")
    if streams > MOST_STREAMS:
        raise ValueError(
            f"streams must be at most {MOST_STREAMS}, got {streams}: each token has a streams × streams skip"
        )
    reason = mixer.why_not(streams)
    if reason is not None:
        raise ValueError(reason)
