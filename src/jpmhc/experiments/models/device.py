"""Checks that a device can run a model, before work starts."""

import torch
from torch import nn

from jpmhc import checks
from jpmhc.connections import fused
from jpmhc.experiments.models.config import RecursiveConfig
from jpmhc.experiments.models.connections import make_connection
from jpmhc.experiments.models.layers import attention, inner_width


def refuse_device(config: RecursiveConfig, device: torch.device) -> None:
    """Raise a ValueError if the model cannot fit into memory, or if the device lacks its kernels."""
    _refuse_size(config)
    dtype = getattr(torch, config.compute)
    if config.attend != "auto":
        head = config.dim // config.heads
        trial = torch.zeros(1, config.heads, 16, head, dtype=dtype, device=device, requires_grad=True)
        try:
            attention(trial, trial, trial, config.attend)
        except RuntimeError as refusal:
            raise ValueError(
                f"attend={config.attend} is not possible on {device.type} in {config.compute} with heads of width "
                f"{head}: leave it at auto"
            ) from refusal
    if config.kernels == "fused":
        fused.choose_spec(make_connection(config, nn.Identity(), 0), device.type, dtype)


def _refuse_size(config: RecursiveConfig) -> None:
    """Raise a ValueError if the model's float32 weights alone need more memory than the machine has."""
    inner = inner_width(config.dim, config.expansion, config.inner_multiple)
    weights = config.layers * config.dim * (4 * config.dim + 3 * inner)
    checks.fits_memory(4 * weights, f"a model of {weights:.2g} weights (dim {config.dim}, layers {config.layers})")
