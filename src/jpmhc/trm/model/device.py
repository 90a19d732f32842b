"""Checking that a device can run a model, before any work is done there."""

import torch
from torch import nn

from jpmhc.connections import fused
from jpmhc.trm.model.config import RecursiveConfig
from jpmhc.trm.model.connections import make_connection
from jpmhc.trm.model.layers import attention


def refuse_device(config: RecursiveConfig, device: torch.device) -> None:
    """Refuse kernels that the configuration names and that the device does not have for this model."""
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
