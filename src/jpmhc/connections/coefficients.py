"""The module that computes a connection's coefficients (read weights, write weights, skip matrix) from the streams.

Shapes: T tokens, n streams of width d, and K logits per token, from which the gates and the mixer make coefficients.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jpmhc import checks, dtensors
from jpmhc.connections import gates, reference
from jpmhc.mixers import Mixer, SettingsModule

NORMS = ("rms", "layer", "rms_outside")


class Coefficients(NamedTuple):
    """A connection's weights for each token: read weights [..., n], write weights [..., n], skip matrix [..., n, n]."""

    read: Tensor
    write: Tensor
    skip: Tensor


Project = Callable[[Tensor, Tensor, str, float], tuple[Tensor, Tensor]]  # streams, weight, norm, eps → logits, streams


def _project(x: Tensor, weight: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor]:
    return reference.compute_logits(x, weight, norm, eps), x


class CoefficientMap(SettingsModule):
    """A module that computes the coefficients of each token from the streams, always in float32 or float64.

    Its arguments are those of `HyperConnection`; `settings` are the other arguments of `configure`.

    Attributes:
        favoured: The number of the stream that the read prefers at the start; None if it prefers none, so that streams
            that are equal stay equal.
        tokens_apart: Whether processes of a tensor-parallel group have different tokens (`parallelize_connections`).
        bias: The part of the K logits that all tokens share. Static coefficients have no other part. [K]
        weight: The projection from the normalised streams to logits, None if the coefficients are static. It is zero at
            the start. Each use divides it by √(n · dim), so that an optimiser's step moves the logits of a wide model
            no more than the logits of a narrow model. [K, n * dim]
    """

    tokens_apart = False

    def __init__(
        self,
        dim: int,
        mixer: Mixer,
        dynamic: bool,
        favoured: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.configure(dim, mixer, **settings)
        self.favoured = favoured
        # At least float32, whatever the model's type: with rounded logits the skip matrix would miss its constraint.
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        count = sum(self.sizes)
        self.bias = nn.Parameter(torch.empty(count, dtype=dtype, device=device))
        weight = torch.empty(count, mixer.streams * dim, dtype=dtype, device=device) if dynamic else None
        self.weight = None if weight is None else nn.Parameter(weight)
        self.mixer.to(device)
        self.reset_parameters()

    def configure(
        self,
        dim: int,
        mixer: Mixer,
        *,
        norm: str = "rms",
        read: str = "sigmoid",
        write: str = "sigmoid",
        temperature: float = 1.0,
        eps: float = reference.EPS,
        read_eps: float = 0.0,
        write_peak: float = 2.0,
        write_eps: float = 0.0,
    ) -> None:
        """Check and store the settings, without making parameters."""
        for name, value, known in (("norm", norm, NORMS), ("read", read, gates.READS), ("write", write, gates.WRITES)):
            checks.choice(value, known, name)
        temperature = checks.positive_number(temperature, "temperature")
        eps = checks.positive_number(eps, "eps")
        checks.inside(read_eps, "[0, 0.1]", "read_eps")
        write_peak = checks.positive_number(write_peak, "write_peak")
        if (read_eps and read != "sigmoid") or (write_peak != 2 and write != "sigmoid"):
            raise ValueError('read_eps goes with read="sigmoid", write_peak with write="sigmoid"')
        self.dim, self.mixer, self.norm, self.read, self.write = dim, mixer, norm, read, write
        self.temperature, self.eps, self.read_eps = temperature, eps, read_eps
        self.write_peak, self.write_eps = write_peak, write_eps
        n = mixer.streams
        self.sizes = (gates.READS[read].size(n), gates.WRITES[write].size(n), mixer.logits)

    def reset_parameters(self) -> None:
        """Set the parameters so that a connection around a sublayer F computes x + F(x) on equal streams x.

        The read weights then sum to one, every write weight is one, and every row of the skip matrix sums to one.
        """
        n = self.mixer.streams
        with torch.no_grad(), torch.device("cpu"):
            read = gates.READS[self.read].start(gates.favouring(self.favoured, n) - self.read_eps) * self.temperature
            write = gates.WRITES[self.write].start(torch.ones(n, dtype=torch.float64)) * self.temperature
            dtensors.fill(self.bias, torch.cat([read, write, self.mixer.start().double()]))
            if self.weight is not None:
                self.weight.zero_()
        self.mixer.reset_parameters()
        self._filled = True

    @property
    def scale(self) -> float:
        """The factor 1/√(n · dim), by which the weight is multiplied."""
        return (self.mixer.streams * self.dim) ** -0.5

    def parameters_in_use(self) -> tuple[Tensor | None, Tensor]:
        """Return the weight, not yet multiplied by `scale`, and the bias. [K, n * dim], [K]"""
        return self.weight, self.bias

    def parameters_for_kernels(self) -> tuple[Tensor | None, Tensor]:
        """Return the weight and bias from which the kernels compute the coefficients. [K, n * dim], [K]

        Here K also counts the entries of the mixer's Grassmann frames, appended to the bias. The kernels multiply the
        weight by `scale`.
        """
        return self(None)  # a call of the module, so that its hooks gather sharded parameters

    def _plain_parameters(self) -> tuple[Tensor | None, Tensor]:
        """Return `parameters_in_use`, with DTensors as plain tensors and half types as float32."""
        weight, bias = self.parameters_in_use()
        weight = None if weight is None else dtensors.leave(weight, self.tokens_apart)
        bias = dtensors.leave(bias, self.tokens_apart)
        if bias.dtype.itemsize >= 4:
            return weight, bias
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"a mixed-precision policy rounds the coefficients of the hyper-connections to {bias.dtype}: call "
                "jpmhc.shard_connections before fully_shard, which keeps them in float32",
                stacklevel=2,
            )
        return None if weight is None else weight.float(), bias.float()

    def _map_to_all_logits(self) -> tuple[Tensor | None, Tensor]:
        weight, bias = self._plain_parameters()
        mixer = self.mixer
        if not mixer.grassmann_frames:
            return weight, bias
        bias = torch.cat([bias, *(getattr(mixer, name).flatten() for name in mixer.grassmann_frames)])
        if weight is not None:
            weight = torch.cat([weight, weight.new_zeros(len(bias) - len(weight), weight.shape[-1])])
        return weight, bias

    def constrain(self, logits: Tensor) -> Coefficients:
        """Return the coefficients of T tokens from their logits. [T, K]"""
        n = self.mixer.streams
        read, write, skip = torch.split_with_sizes(logits, self.sizes, -1)
        if self.temperature != 1:
            read, write = read / self.temperature, write / self.temperature
        read, write = gates.READS[self.read](read, n), gates.WRITES[self.write](write, n)
        if self.read_eps:
            read = read + self.read_eps
        if self.write_peak != 2 or self.write_eps:
            write = write * (self.write_peak / 2) + self.write_eps
        return Coefficients(read, write, self.mixer(skip))

    def forward(
        self, x: Tensor | None, project: Project = _project
    ) -> tuple[Coefficients, Tensor | None] | tuple[Tensor | None, Tensor]:
        """Return the coefficients of each token, and the streams for the next step (None if there are hooks).

        If x is None, return the weight and bias that `parameters_for_kernels` describes.

        Args:
            x: The streams. [T, n, d]
            project: A function that computes the logits. It also returns the streams for the next step (see eager.py).
        """
        self.check_filled()
        hooked = bool(self._forward_hooks)
        if x is None:
            weight, bias = self._map_to_all_logits()
            if hooked:  # a hook may register hooks on the result, which would stay on parameters
                return None if weight is None else weight.clone(), bias.clone()
            return weight, bias
        weight, bias = self._plain_parameters()
        if weight is None:
            return self.constrain(bias.expand(x.shape[0], -1)), None if hooked else x
        # FSDP's hooks warn of outputs that are views.
        logits, x = (_project if hooked else project)(x, weight, self.norm, self.eps)
        # Not torch.add(…, alpha=…): Inductor of torch 2.13 drops alpha where it fuses the sum with a matrix product.
        return self.constrain(bias + self.scale * logits), None if hooked else x

    def check_filled(self) -> None:
        """Raise an error if the parameters come from the meta device and have no values yet."""
        if not self._filled:
            raise RuntimeError(
                "this connection came off the meta device and holds no values yet: call reset_parameters() or load a "
                "state dict first"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoefficientMap":
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            half = moved.is_floating_point() and moved.dtype.itemsize < 4
            return moved.to(tensor.dtype) if half and moved.is_meta else tensor.to(moved.device) if half else moved

        was_meta = self.bias.is_meta
        super()._apply(keep_precision, recurse)
        if was_meta and not self.bias.is_meta:
            self._filled = False
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        old = state_dict.pop(prefix + "logits", None)  # the bias's name up to version 0.1
        if old is not None:
            state_dict[prefix + "bias"] = old
        names = [prefix + name for name in self.state_dict()]
        self._filled = self._filled or all(name in state_dict for name in names)
        for name in names:  # as in `_apply`: the parameters stay in float32
            value = state_dict.get(name)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
                state_dict[name] = value.float()
        super()._load_from_state_dict(state_dict, prefix, *args)
