"""When a connection runs on the fused Triton kernels, and how it is handed to them."""

import importlib.util
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch

from jpmhc import modes
from jpmhc.kernels.spec import Spec, make_spec
from jpmhc.mixers import Mixer, TritonForm

if TYPE_CHECKING:
    from jpmhc.connections.hyper import HyperConnection


def describe(connection: "HyperConnection") -> Spec | str:
    """Describe the connection to the kernels, or say in one sentence why they cannot run it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    coefficients = connection.map
    form = _triton_form(coefficients.mixer)
    if isinstance(form, str):
        return form
    return make_spec(
        form,
        coefficients.dim,
        coefficients.norm,
        coefficients.eps,
        coefficients.read,
        coefficients.write,
        coefficients.temperature,
        connection.post_norm == "rms",
        coefficients.scale,
        coefficients.read_eps,
        coefficients.write_peak,
        coefficients.write_eps,
    )


def _triton_form(mixer: Mixer) -> TritonForm | str:
    """Return the mixer's Triton form, unless a subclass changed what the mixer computes and left the form as it was."""
    kind = type(mixer)
    described = next(base for base in kind.__mro__ if "triton_form" in vars(base))
    if kind.forward is not getattr(described, "forward", None):
        return f"the mixer {kind.__name__} has a forward of its own, which the kernels do not know"
    return mixer.triton_form()


def are_wanted(kernels: str, device: str) -> bool:
    """Say whether the setting asks for the fused kernels on such a device, if they can run there."""
    return kernels == "fused" or (kernels == "auto" and device == "cuda")


_CHOSEN: dict[tuple[object, ...], Spec] = {}  # by the texts of a connection's settings, which name all that matters


def choose_spec(connection: "HyperConnection", device: str, dtype: torch.dtype) -> Spec | None:
    """Return the description by which the kernels run; where they cannot, warn why and return None, or refuse."""
    coefficients = connection.map
    texts = (connection.settings_text, coefficients.settings_text, coefficients.mixer.settings_text)
    runs = device == "cuda" or _interprets()
    bias = coefficients.bias
    case = (*texts, device, runs, dtype, bias.dtype, bias.device.type, coefficients.weight is None)
    if torch._guards.CompileContext.try_get() is not None:
        from jpmhc.kernels.operators import declare_to_inductor

        declare_to_inductor()
    known = _CHOSEN.get(case)
    if known is not None and not modes.is_transformed():
        return known
    spec = describe(connection)
    reason = spec if isinstance(spec, str) else _reason_against(connection, spec, device, dtype)
    if reason is None:
        assert isinstance(spec, Spec)
        _CHOSEN[case] = spec
        return spec
    if connection.kernels == "fused":
        raise ValueError(f'kernels="fused" is not possible: {reason}')
    warnings.warn(f"hyper-connection runs on the PyTorch reference: {reason}", stacklevel=3)
    return None


def _reason_against(connection: "HyperConnection", spec: Spec, device: str, dtype: torch.dtype) -> str | None:
    if device != "cuda" and not _interprets():
        return f"the kernels need a CUDA device, the streams are on {device}"
    if connection.map.bias.device.type != device:
        return f"the connection is on {connection.map.bias.device.type} and its streams are on {device}"
    if modes.is_transformed():
        return "the kernels have no rules for torch.func transforms, forward-mode derivatives and torch.jit.trace"
    if connection.map.bias.dtype != torch.float32:
        return f"the coefficients must be float32, they are {connection.map.bias.dtype}"
    from jpmhc.kernels.connection import why_not  # Triton is not there on every platform

    return why_not(spec, dtype, connection.map.weight is not None)


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_fused(state: Any) -> bool:
    """Say whether a read's state comes from the fused kernels."""
    return type(state).__module__ == "jpmhc.kernels.connection"
