r"""HyperConnection: n parallel residual streams around any sublayer.

A block reads one mixture of the streams, runs the sublayer on this mixture, mixes the streams, and adds the sublayer's
output: $x \leftarrow H_{res} x + h_{post} \otimes F(h_{pre}^\top x)$ for the sublayer F (eq. hc-general, with vectors).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc import checks, dtensors, modes
from jpmhc.connections import dtensor, eager, fused, reference
from jpmhc.connections.coefficients import CoefficientMap, Coefficients
from jpmhc.connections.contract import Form, State
from jpmhc.connections.streams import check_streams, flatten_streams, notice_tokens
from jpmhc.connections.sublayer import check_sublayer_output, check_write, find_accepted, first_of, warn_of_own_residual
from jpmhc.kernels.spec import Spec, find_spec
from jpmhc.mixers import Mixer, SettingsModule, make_mixer

KERNELS = ("auto", "fused", "reference")
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class HyperConnection(SettingsModule):
    r"""A sublayer wrapped in n residual streams.

    With every mixer, a new block with the sublayer F computes the plain residual $x + F(x)$ on n equal streams.

    Args:
        sublayer: Any module or function on [..., dim] that does not add its own input; it may contain norms. None makes
            a connection with `read` and `write` only.
        dim: Width of one stream.
        streams: The number n of streams.
        mixer: The skip's constraint: a name from `MIXERS` or a `Mixer`.
        index: The layer's number. At the start the read favours stream `index` mod n, so that equal streams become
            different. None draws a stream from torch's generator.
        norm: The norm over all streams of a token before the projection to logits, without weights: `"rms"`, `"layer"`
            or `"rms_outside"`, which adds eps to the root instead of under it.
        read: `"softmax"`, `"sigmoid"`, or `"softmax_matrix"` (the paper's Cayley variant).
        write: `"softmax"`, `"sigmoid"`, or `"softmax_matrix"` (the paper's Cayley variant).
        temperature: τ of eq. cayley-constraints, which divides the read and write logits.
        dynamic: Whether the coefficients depend on the token (by a projection of the streams), or are parameters.
        post_norm: The norm of each stream after the write: `"rms"` without weights, `"layer"` with weights
            (fig. jpmhc-block), or None.
        write_scale: The output scale s of eq. cayley-fwd4, which multiplies the write weights; a fresh block is
            $x + s F(x)$.
        kernels: `"fused"` Triton kernels, the PyTorch `"reference"`, or `"auto"`: fused on CUDA where the kernels cover
            the case (otherwise a warning says why not), reference elsewhere and under `torch.func` transforms.
        eps: The norms' eps.
        read_eps: Added to the read weights, as in DeepSeek-V4.
        device: The device of the coefficients' parameters.
        dtype: The type of the coefficients' parameters; float16 and bfloat16 become float32.

    Shapes:
        x: [..., streams, dim] → [..., streams, dim]. For n equal streams x may be [..., 1, dim]: the fused kernels then
            move one stream instead of n.
    """

    form: Form | None = None  # replaces the form that the connection would choose: see `computed_by`
    _begins = False  # whether the next streams may be a model's first ones, which are checked once

    def __init__(
        self,
        sublayer: Any,
        dim: int,
        streams: int = 4,
        mixer: str | Mixer = "cayley",
        *,
        index: int | None = None,
        norm: str = "rms",
        read: str = "softmax",
        write: str = "sigmoid",
        temperature: float = 1.0,
        dynamic: bool = True,
        post_norm: str | None = None,
        write_scale: float = 1.0,
        kernels: str = "auto",
        eps: float = reference.EPS,
        read_eps: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.whole_number(dim, "dim")
        checks.whole_number(streams, "streams")
        checks.switch(dynamic, "dynamic")
        if sublayer is not None and not callable(sublayer):
            raise ValueError(f"the sublayer must be a module, a function or None, got {sublayer!r}")
        if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
            raise ValueError(f"index must be a whole number or None, got {index!r}")
        checks.choice(post_norm, (None, "rms", "layer"), "post_norm")
        checks.finite_number(write_scale, "write_scale")
        if dtype not in (None, *TYPES):
            raise ValueError(f"the coefficients' dtype must be one of {', '.join(map(str, TYPES))}, got {dtype!r}")
        warn_of_own_residual(sublayer)
        self.sublayer = sublayer
        self.dim, self.streams, self.post_norm, self.kernels = dim, streams, post_norm, kernels
        self.write_scale = write_scale
        self._begins = index == 0
        self.layer_norm = nn.LayerNorm(dim, eps, device=device, dtype=dtype) if post_norm == "layer" else None
        with modes.with_real_numbers():
            favoured = int(torch.randint(streams, (), device="cpu")) if index is None else index
        mixer = make_mixer(mixer, streams, dynamic)
        settings = {"norm": norm, "read": read, "write": write, "temperature": temperature}
        settings |= {"eps": eps, "read_eps": read_eps}
        self.map = CoefficientMap(dim, mixer, dynamic, favoured, device, dtype, **settings)
        if kernels == "fused" and isinstance(reason := fused.describe(self), str):
            raise ValueError(f'kernels="fused" is not possible: {reason}')

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "kernels":
            checks.choice(value, KERNELS, "kind of kernels")
        now = vars(self).get("post_norm", value)  # a layer norm has weights, which are made at the start or never
        if name == "post_norm" and value != now and not (value in (None, "rms") and now != "layer"):
            raise ValueError(
                f'post_norm can be changed between None and "rms", not from {now!r} to {value!r}: make another '
                "connection"
            )
        super().__setattr__(name, value)
        if name == "sublayer":  # now, because compilers cannot trace `find_accepted`
            super().__setattr__("_accepted", find_accepted(value))

    @property
    def mixer(self) -> Mixer:
        """The mixer, which makes the skip matrix."""
        return self.map.mixer

    def reset_parameters(self) -> None:
        """Reset all parameters except the sublayer's, so that the block is the plain residual block again."""
        self.map.reset_parameters()
        if self.layer_norm is not None:
            self.layer_norm.reset_parameters()

    def coefficients(self, x: Tensor) -> Coefficients:
        """Return the read weights, write weights and skip matrix of each token of x, in float32 or float64."""
        check_streams(x, self.streams, self.dim)
        if dtensors.is_dtensor(x):
            own = self.coefficients(dtensor.find_own(x, 2, self.map.tokens_apart))
            return Coefficients(*(dtensor.spread(part, x) for part in own))
        (read, write, skip), _ = self.map(flatten_streams(x, self.streams, self.dim))
        parts = (read, write * self.write_scale, skip)
        return Coefficients(*(c.reshape(*x.shape[:-2], *c.shape[1:]) for c in parts))

    def read(self, x: Tensor) -> tuple[Tensor, State]:
        """Read the streams. Return the sublayer's input [..., dim] and the state that `write` needs."""
        check_streams(x, self.streams, self.dim)
        read = None if self.form is None else self.form(self, x)
        return read or self.read_in_best_form(x)

    def read_in_best_form(self, x: Tensor) -> tuple[Tensor, State]:
        """Read the streams x by the first form that applies (see contract.py). Return the same as `read`."""
        return dtensor.read(self, x) or fused.read(self, x) or eager.read(self, x) or reference.read(self, x)

    def write(self, x: Tensor, y: Tensor, state: State) -> Tensor:
        """Write the sublayer's output y [..., dim] back to the streams, and return the new streams."""
        check_write(self, x, y, state)
        return state.write(self, x, y, False)

    def write_mean(self, x: Tensor, y: Tensor, state: State) -> Tensor:
        """Write y to the streams, and return only the mean of the new streams. [..., dim]"""
        check_write(self, x, y, state)
        return state.write(self, x, y, True)

    def write_read(
        self, x: Tensor, y: Tensor, state: State, following: "HyperConnection", delayed: bool = False
    ) -> tuple[Tensor, Tensor, State]:
        """Write y to the streams and read the new streams for the connection `following`.

        The fused kernels do both in one pass. With `delayed`, the read uses the read weights of this connection.

        Returns:
            The new streams [..., n, dim], the input of `following`'s sublayer [..., dim], and the state of `following`.
        """
        check_sublayer_output(y, x)
        joined = state.join(self, x, following, delayed)
        if joined is not None:
            return joined(y)
        x = self.write(x, y, state)
        h, following_state = following.read(x)
        return x, state.gather(x) if delayed else h, following_state

    @contextlib.contextmanager
    def computed_by(self, form: Form) -> Iterator[None]:
        """Use `form` for this connection's reads inside the context, instead of the first form that applies."""
        self.__dict__["form"] = form
        try:
            yield
        finally:
            del self.__dict__["form"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Read the streams, run the sublayer with the extra arguments, and write the sublayer's output.

        If the sublayer returns a tuple, its first item is written, and the others are returned as they are.
        """
        if self.sublayer is None:
            raise ValueError("this connection was made without a sublayer: call its read and write")
        self.look_at_first_streams(x)
        h, state = self.read(x)
        y = self.sublayer(h, *args, **kwargs)
        out = self.write(x, first_of(y), state)
        return (out, *y[1:]) if isinstance(y, tuple) else out

    def look_at_first_streams(self, x: Tensor) -> None:
        """Warn if x, the first streams of a model, may be tokens of a hidden state. A compiled call is not checked."""
        if not torch.compiler.is_compiling() and self._begins:
            check_streams(x, self.streams, self.dim)
            self._begins = not notice_tokens(x, self.streams)

    def find_spec(self, x: Tensor) -> Spec | None:
        """Return the settings of this connection as a `Spec` if the kernels run on streams like x, else None."""
        device = x.device.type
        if not fused.are_wanted(self.kernels, device):
            return None
        if not torch.compiler.is_compiling():
            return fused.choose_spec(self, device, x.dtype)
        parts = self.map
        texts = self.settings_text, parts.settings_text, parts.mixer.settings_text
        key = self._choose_key(device, x.dtype, *texts)
        return find_spec(key) if key else None

    def _choose_key(self, device: str, dtype: torch.dtype, *texts: str) -> str:
        """Return the key of the kernels' record, or "" if there is none. A trace takes the key as a constant.

        torch.compile watches the texts, so that a changed setting causes a new trace.
        """
        fused.prepare_compiler()
        spec = fused.choose_spec(self, device, dtype)
        return "" if spec is None else spec.key

    # `torch.compiler.assume_constant_result` sets this attribute; calling it here would import the whole compiler.
    _choose_key._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        m = self.map
        return f"dim={self.dim}, streams={self.streams}, norm={m.norm}, read={m.read}, write={m.write}"
