"""The map from streams to a connection's coefficients, with the parameters behind it."""

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
    """What a connection does to each token: read weights [..., n], write weights [..., n], skip matrix [..., n, n]."""

    read: Tensor
    write: Tensor
    skip: Tensor


Project = Callable[[Tensor, Tensor, str, float], tuple[Tensor, Tensor]]  # streams, weight, norm, eps → logits, streams


def _project(x: Tensor, weight: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor]:
    return reference.compute_logits(x, weight, norm, eps), x


class CoefficientMap(SettingsModule):
    """Turns streams into logits and logits into coefficients; it stays in float32 when a model becomes half precision.

    Attributes:
        tokens_apart: Whether each process of a tensor-parallel group has other tokens (`parallelize_connections`).
        bias: The logits that every token has: those of the start, and all there are if the coefficients are static. [K]
        weight: Multiplies the normalised streams, divided by √(n · dim) so that an optimiser's step moves the logits of
            a wide model no more than those of a narrow one; zero at the start, None if the coefficients are static.
            [K, n * dim]
    """

    tokens_apart = False

    def __init__(
        self,
        dim: int,
        mixer: Mixer,
        norm: str,
        read: str,
        write: str,
        temperature: float,
        dynamic: bool,
        favoured: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = reference.EPS,
        read_eps: float = 0.0,
    ) -> None:
        super().__init__()
        self.configure(dim, mixer, norm, read, write, temperature, eps, read_eps)
        self.favoured = favoured
        # float32 at least, whatever the model's type: rounded logits would move the skip off its set
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        options: Any = {"dtype": dtype, "device": device}
        self.bias = nn.Parameter(torch.empty(sum(self.sizes), **options))
        self.weight = (
            nn.Parameter(torch.empty(sum(self.sizes), self.mixer.streams * dim, **options)) if dynamic else None
        )
        self.mixer.to(device)
        self.reset_parameters()

    def configure(
        self,
        dim: int,
        mixer: Mixer,
        norm: str,
        read: str,
        write: str,
        temperature: float,
        eps: float,
        read_eps: float,
        write_peak: float = 2.0,
        write_eps: float = 0.0,
    ) -> None:
        """Check and keep the settings, all but the parameters."""
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
        """Start as the plain residual on equal streams: reads sum to one, writes are one, the skip has row sums one."""
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
        """What the weight is multiplied by: 1/√(n · dim)."""
        return (self.mixer.streams * self.dim) ** -0.5

    def parameters_in_use(self) -> tuple[Tensor | None, Tensor]:
        """Return the weight, to be multiplied by `scale`, and the bias. [K, n * dim], [K]"""
        return self.weight, self.bias

    def parameters_for_kernels(self) -> tuple[Tensor | None, Tensor]:
        """Return weight and bias from which the kernels compute the coefficients themselves. [K, n * dim], [K]

        They give all logits, a static frame's entries included; the weight is to be multiplied by `scale`.
        """
        return self(None)  # a call of the module, so that hooks run which gather sharded parameters

    def _plain_parameters(self) -> tuple[Tensor | None, Tensor]:
        """Return `parameters_in_use` as plain tensors in float32 or float64, also if they are DTensors or rounded."""
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
        frames = [getattr(self.mixer, name).flatten() for name in self.mixer.grassmann_frames]
        if not frames:
            return weight, bias
        bias = torch.cat([bias, *frames])
        if weight is not None:
            weight = torch.cat([weight, weight.new_zeros(len(bias) - len(weight), weight.shape[-1])])
        return weight, bias

    def constrain(self, logits: Tensor) -> Coefficients:
        """Turn logits into coefficients. [T, K]"""
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
        """Compute the coefficients of each token, and hand x on for the next steps (None under hooks). [T, n, d]

        With None for x, return what `parameters_for_kernels` does.

        Args:
            x: The streams.
            project: Computes the logits, and hands the streams on.
        """
        self.check_filled()
        hooked = bool(self._forward_hooks)
        if x is None:
            weight, bias = self._map_to_all_logits()
            if hooked:  # a hook may register hooks on these, which parameters would keep for ever
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
        """Refuse to run on memory that nothing was ever written to."""
        if not self._filled:
            raise RuntimeError(
                "this connection came off the meta device and holds no values yet: call reset_parameters() or load a "
                "state dict first"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> "CoefficientMap":
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            half = moved.is_floating_point() and moved.dtype.itemsize < 4
            return moved.to(tensor.dtype) if half and moved.is_meta else tensor.to(moved.device) if half else moved

        was_meta = self.bias.is_meta
        super()._apply(keep_precision, recurse)
        if was_meta and not self.bias.is_meta:
            self._filled = False
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        old = state_dict.pop(prefix + "logits", None)  # the bias was called so up to version 0.1
        if old is not None:
            state_dict[prefix + "bias"] = old
        names = [prefix + name for name in self.state_dict()]
        self._filled = self._filled or all(name in state_dict for name in names)
        for name in names:  # as in `_apply`: coefficients need float32
            value = state_dict.get(name)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
                state_dict[name] = value.float()
        super()._load_from_state_dict(state_dict, prefix, *args)
