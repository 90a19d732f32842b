"""Connections whose logits have one learned scale for the read, one for the write and one for the skip."""

from typing import Any

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections import HyperConnection
from jpmhc.connections.coefficients import CoefficientMap
from jpmhc.connections.hyper import KERNELS
from jpmhc.mixers import Mixer, SettingsModule


class ScaledParameters(nn.Module):
    """The parameters of one connection as published models keep them.

    Attributes:
        fn: The projection. [K, n * dim]
        base: The bias. [K]
        scale: What multiplies the projection's logits of the read, of the write and of the skip. [2 or 3]
    """

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.fn, self.base, self.scale = (nn.Parameter(tensor.detach().clone()) for tensor in (fn, base, scale))


class ScaledMap(CoefficientMap):
    """Computes logits as m · scale + base with m = fn · norm(x); the parameters lie in another module.

    Args:
        parameters: A module with `fn`, `base` and `scale`. They are looked up at every call, so that whatever moves,
            shards or replaces them there is seen here.
        borrowed: Whether the parameters belong to a model that goes on to own them; else they become the map's.
        norm: As in `HyperConnection`.
        settings: As in `CoefficientMap.configure`.
    """

    def __init__(
        self, parameters: nn.Module, borrowed: bool, dim: int, mixer: Mixer, norm: str = "rms", **settings: Any
    ) -> None:
        SettingsModule.__init__(self)
        self.configure(dim, mixer, norm, "sigmoid", "sigmoid", 1.0, **settings)
        self.favoured, self._filled = 0, True
        if borrowed:
            self.__dict__["source"] = parameters
        else:
            self.source = parameters

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The projection, without its scales. [K, n * dim]"""
        return self.source.fn  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        """The bias, in float32 at least. [K]"""
        return _widen(self.source.base)  # type: ignore[arg-type]

    @property
    def scale(self) -> float:
        return 1.0

    def parameters_in_use(self) -> tuple[Tensor, Tensor]:
        scales = _widen(self.source.scale)  # type: ignore[arg-type]
        sizes = [size for size in self.sizes if size]
        each = torch.cat([part.expand(size) for part, size in zip(scales.split(1), sizes)])
        return _widen(self.weight) * each.unsqueeze(-1), self.bias

    def reset_parameters(self) -> None:
        raise RuntimeError("the parameters of this connection come from a published model, which has no start to go to")


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class ScaledConnection(HyperConnection):
    """A hyper-connection on a `ScaledMap`; it reads, writes and fuses like any other.

    Args:
        coefficients: The map.
        sublayer: As in `HyperConnection`.
        kernels: Likewise.
    """

    def __init__(self, coefficients: ScaledMap, sublayer: Any = None, kernels: str = "auto") -> None:
        SettingsModule.__init__(self)
        checks.choice(kernels, KERNELS, "kind of kernels")
        self.sublayer, self.kernels, self.post_norm = sublayer, kernels, None
        self.write_scale, self.layer_norm = 1.0, None
        self.dim, self.streams = coefficients.dim, coefficients.mixer.streams
        self.map = coefficients
