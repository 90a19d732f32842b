r"""HyperConnection: n parallel residual streams around any sublayer.

A block reads one mixture of the streams, runs the sublayer on it, and writes the result back beside the mixed streams:
$x \leftarrow H_{res} x + h_{post} \otimes F(h_{pre}^\top x)$ (eq. hc-general; pre and post as the vectors they are).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jpmhc import checks, modes
from jpmhc.connections import eager, fused, reference
from jpmhc.connections.arguments import find_accepted
from jpmhc.connections.coefficients import CoefficientMap, Coefficients
from jpmhc.connections.kept import keep
from jpmhc.connections.own_residual import warn_of_own_residual
from jpmhc.connections.streams import (
    check_streams,
    check_sublayer_output,
    flatten_streams,
    notice_tokens,
)
from jpmhc.kernels.spec import find_spec
from jpmhc.mixers import Identity, Mixer, SettingsModule, make_mixer

KERNELS = ("auto", "fused", "reference")
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ReadState(NamedTuple):
    """What `read` leaves for `write` where no kernel runs: the streams that were read, and the token's coefficients."""

    source: Tensor  # as they were given
    streams: Tensor  # as the gradient passes them. [T, n, d]
    coefficients: Coefficients


class HyperConnection(SettingsModule):
    r"""A sublayer wrapped in n residual streams.

    A fresh block on n equal streams is the plain residual block $x + F(x)$, whatever the mixer.

    Args:
        sublayer: Any module or function on [..., dim], without a residual of its own; norms inside it are its affair.
            None makes a connection for `read` and `write` alone.
        dim: Width of one stream.
        streams: n.
        mixer: The skip's constraint: a name from `MIXERS` or a `Mixer`.
        index: The layer's number: its read favours stream `index` mod n at the start, which is what lets equal streams
            part. None draws it from torch's generator.
        norm: `"rms"`, `"layer"` or `"rms_outside"`, whose eps is added to the root: over all streams of a token, before
            the projection to logits, without weights.
        read: `"softmax"`, `"sigmoid"`, or `"softmax_matrix"` (the paper's Cayley variant).
        write: Likewise.
        temperature: τ of eq. cayley-constraints, dividing the read and write logits.
        dynamic: Whether coefficients depend on the token (a projection of the streams) or are parameters only.
        post_norm: `"rms"` normalises each stream after the write, without weights; `"layer"` is a layer norm with
            weights there (fig. jpmhc-block); None does not.
        write_scale: The output scale s of eq. cayley-fwd4, which multiplies the write weights; with another scale than
            one a fresh block is $x + s F(x)$.
        kernels: `"fused"` Triton kernels, the PyTorch `"reference"`, or `"auto"`: fused on CUDA where the kernels cover
            the case (otherwise a warning says why not), reference elsewhere and under `torch.func` transforms.
        eps: The norm's, inside its root.
        read_eps: Added to the read weights, as DeepSeek-V4 does.
        device: Where the coefficients' parameters are made.
        dtype: Their type; float32 if a half type is asked for.

    Shapes:
        x: [..., streams, dim], and the same out. Streams that are all equal may be given once, as [..., 1, dim]: the
            fused kernels then move one stream instead of n.
    """

    _begins = False  # whether the next streams may be a model's first, which are looked at once

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
        checks.at_least_one(dim, "dim")
        checks.at_least_one(streams, "streams")
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
        made = make_mixer(mixer, streams, dynamic)
        self.map = CoefficientMap(
            dim, made, norm, read, write, temperature, dynamic, favoured, device, dtype, eps=eps, read_eps=read_eps
        )
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
        if name == "sublayer":  # now, because no compiler follows the question what a sublayer takes
            super().__setattr__("_accepted", find_accepted(value))

    @property
    def mixer(self) -> Mixer:
        """The residual mixer."""
        return self.map.mixer

    def reset_parameters(self) -> None:
        """Put the coefficients back to their start, where the block is the plain residual; the sublayer stays."""
        self.map.reset_parameters()
        if self.layer_norm is not None:
            self.layer_norm.reset_parameters()

    def coefficients(self, x: Tensor) -> Coefficients:
        """Compute read weights, write weights and skip matrix for each token of x, in float32 or float64."""
        check_streams(x, self.streams, self.dim)
        (read, write, skip), _ = self.map(flatten_streams(x, self.streams, self.dim))
        parts = (read, write * self.write_scale, skip)
        return Coefficients(*(c.reshape(*x.shape[:-2], *c.shape[1:]) for c in parts))

    def read(self, x: Tensor) -> tuple[Tensor, Any]:
        """Compute the sublayer's input [..., dim], and what `write` needs to know."""
        check_streams(x, self.streams, self.dim)
        key = self._spec_key(x)
        if key:
            from jpmhc.kernels import connection as kernels

            weight, bias = self.map.parameters_for_kernels()
            return kernels.read(x, weight, bias, find_spec(key))
        flat = flatten_streams(x, self.streams, self.dim)
        coefficients, handed_on = self.map(flat)
        streams = flat if handed_on is None else handed_on
        if eager.applies(streams, coefficients.read):
            h, streams = eager.gather(streams, coefficients.read)
        else:
            h = reference.gather(streams, coefficients.read)
        return h.reshape(*x.shape[:-2], self.dim), ReadState(x, streams, coefficients)

    def write(self, x: Tensor, y: Tensor, state: Any) -> Tensor:
        """Write the sublayer's output y [..., dim] back to the streams, and return the new streams."""
        return self._write(x, y, state, mean=False)

    def write_mean(self, x: Tensor, y: Tensor, state: Any) -> Tensor:
        """Write as `write` does and return the mean of the new streams [..., dim], in one pass where kernels run."""
        return self._write(x, y, state, mean=True)

    def write_read(self, x: Tensor, y: Tensor, state: Any, following: "HyperConnection") -> tuple[Tensor, Tensor, Any]:
        """Write to the streams and read them for the next connection, in one pass where both run on kernels.

        Returns:
            The streams between the two [..., n, dim], the next sublayer's input [..., dim], and its state.
        """
        if fused.is_fused(state) and (x is state.x) and self.layer_norm is None:
            key = following._spec_key(x)
            if key and (following.streams, following.dim) == (self.streams, self.dim):
                from jpmhc.kernels import connection as kernels

                y = self.scale_output(check_sublayer_output(y, x)).to(x.dtype)
                weight, bias = following.map.parameters_for_kernels()
                return kernels.write_read(y, state, weight, bias, find_spec(key))
        x = self.write(x, y, state)
        return x, *following.read(x)

    def make_rewrite(
        self, y: Tensor, state: Any, following: "HyperConnection | None" = None
    ) -> Callable[[Tensor], Tensor]:
        """Return this write as a function of the streams alone, to write them again when nothing is differentiated.

        Where the write was fused with the read of the connection `following`, a post-norm is computed by that kernel
        again: another one would add up the squares in another order. The function uses the settings and weights of now,
        whatever they are changed to.
        """
        output, scale, normalise = keep(y), self.write_scale, self._make_norm()

        def find_output() -> Tensor:
            return output.find() if scale == 1 else output.find() * scale

        if not fused.is_fused(state):
            parts = [keep(part) for part in state.coefficients]

            def write_again(x: Tensor) -> Tensor:
                coefficients = Coefficients(*(part.find() for part in parts))
                streams = flatten_streams(x, self.streams, self.dim)
                return normalise(self._scatter(x, find_output(), ReadState(x, streams, coefficients)))

            return write_again
        from jpmhc.kernels import connection as kernels

        coefficients, state = keep(state.coefficients), state._replace(x=None, link=None, coefficients=None)

        def write_again_fused(x: Tensor) -> Tensor:
            now = state._replace(x=x, coefficients=coefficients.find())
            if following is not None and state.spec.post_norm:
                weight, bias = following.map.parameters_for_kernels()
                spec = find_spec(following._spec_key(x))
                return kernels.write_read(find_output().to(x.dtype), now, weight, bias, spec)[0].detach()
            out = kernels.write(find_output().to(x.dtype), now)
            return out if state.spec.post_norm else normalise(out)

        return write_again_fused

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Read, run the sublayer with any extra arguments, write; of a tuple it returns, the first is written."""
        if self.sublayer is None:
            raise ValueError("this connection was made without a sublayer: call its read and write")
        self.look_at_first_streams(x)
        h, state = self.read(x)
        y = self.sublayer(h, *args, **kwargs)
        out = self.write(x, first_of(y), state)
        return (out, *y[1:]) if isinstance(y, tuple) else out

    def look_at_first_streams(self, x: Tensor) -> None:
        """Warn once, in the first layer, if its streams may be tokens; a compiled first call does not look."""
        if not torch.compiler.is_compiling() and self._begins:
            check_streams(x, self.streams, self.dim)
            self._begins = not notice_tokens(x, self.streams)

    def _write(self, x: Tensor, y: Tensor, state: Any, mean: bool) -> Tensor:
        check_streams(x, self.streams, self.dim)
        y = self.scale_output(check_sublayer_output(y, x))
        self._check_state(x, state)
        if fused.is_fused(state):
            from jpmhc.kernels import connection as kernels

            if self.layer_norm is None:
                return kernels.write(y.to(x.dtype), state, x, mean)
            out = self.normalise(kernels.write(y.to(x.dtype), state, x, False))
            return out.mean(-2) if mean else out
        out = self.normalise(self._scatter(x, y, state))
        return out.mean(-2) if mean else out

    def _scatter(self, x: Tensor, y: Tensor, state: ReadState) -> Tensor:
        """Compute the new streams before their norm, in PyTorch. [..., n, dim]"""
        _, write, skip = state.coefficients
        y = y.reshape(-1, self.dim)
        # The streams that read() handed on carry the shortest backward pass; other streams are as valid.
        if x is state.source and eager.applies(state.streams, write):
            out = eager.scatter(state.streams, y, write, None if isinstance(self.mixer, Identity) else skip)
        else:
            out = reference.scatter(flatten_streams(x, self.streams, self.dim), y, write, skip)
        return out.view(*x.shape[:-2], self.streams, self.dim)

    def scale_output(self, y: Tensor) -> Tensor:
        """Multiply a sublayer's output by the output scale (eq. cayley-fwd4)."""
        return y if self.write_scale == 1 else y * self.write_scale

    def normalise(self, x: Tensor) -> Tensor:
        """Apply the norm that follows the write, if there is one. [..., n, dim]"""
        if self.layer_norm is not None:
            return reference.normalise_layer(x, self.layer_norm.weight, self.layer_norm.bias, self.map.eps)
        return x if self.post_norm is None else reference.normalise_streams(x, self.map.eps)

    def _make_norm(self) -> Callable[[Tensor], Tensor]:
        """Return `normalise` as it is now, without gradients for its weights."""
        eps = self.map.eps
        if self.layer_norm is not None:
            weight, bias = keep(self.layer_norm.weight), keep(self.layer_norm.bias)
            return lambda x: reference.normalise_layer(x, weight.find(), bias.find(), eps)
        return (lambda x: x) if self.post_norm is None else lambda x: reference.normalise_streams(x, eps)

    def _check_state(self, x: Tensor, state: Any) -> None:
        """Refuse a state that this connection's read did not return for streams like these."""
        if fused.is_fused(state):
            read, fits = state.x, (state.spec.n, state.spec.d) == (self.streams, self.dim)
        elif isinstance(state, ReadState):
            read, fits = state.source, state.streams.shape[1:] == (self.streams, self.dim)
        else:
            raise ValueError(f"the state must be what this connection's read returned, got {type(state).__name__}")
        if not fits or x.shape[:-2] != read.shape[:-2] or x.dtype != read.dtype:
            raise ValueError(
                f"the state must be what this connection's read returned for these streams: it is of {read.dtype} "
                f"{list(read.shape)}, the streams are {x.dtype} {list(x.shape)}"
            )

    def runs_fused(self, x: Tensor) -> bool:
        """Say whether the fused kernels read streams like these."""
        return bool(self._spec_key(x))

    def _spec_key(self, x: Tensor) -> str:
        """Return the key of the kernels' description of this connection, or "" where the reference runs."""
        if not fused.are_wanted(self.kernels, x.device.type):
            return ""
        return self._choose(
            x.device.type, x.dtype, self.settings_text, self.map.settings_text, self.mixer.settings_text
        )

    def _choose(self, device: str, dtype: torch.dtype, *texts: str) -> str:
        """Ask once while tracing; the texts are what torch.compile watches, so that a changed setting traces anew."""
        spec = fused.choose_spec(self, device, dtype)
        return "" if spec is None else spec.key

    # What torch.compiler.assume_constant_result sets; calling it here would import all of the compiler.
    _choose._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        m = self.map
        return f"dim={self.dim}, streams={self.streams}, norm={m.norm}, read={m.read}, write={m.write}"


def first_of(result: Any) -> Any:
    """Return what of a sublayer's result is written to the streams: the first of a tuple."""
    return result[0] if isinstance(result, tuple) and result else result
