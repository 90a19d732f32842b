"""Kernels asked for by name are refused where the device has none, and let pass where it has."""

import pytest
import torch

from jpmhc.experiments.models import RecursiveConfig
from jpmhc.experiments.models.device import refuse_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("attend", ["cudnn", "efficient"])
def test_attention_that_the_cpu_does_not_have(attend):
    config = RecursiveConfig(dim=16, heads=2, attend=attend)
    with pytest.raises(ValueError, match=f"^attend={attend} is not possible on cpu in float32 with heads of width 8"):
        refuse_device(config, CPU)


def test_fused_kernels_need_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = RecursiveConfig(dim=16, heads=2, mixer="cayley", streams=2, kernels="fused")
    with pytest.raises(ValueError, match=r'^kernels="fused" is not possible: the kernels need a CUDA device'):
        refuse_device(config, CPU)


@pytest.mark.parametrize("attend", ["auto", "math", "flash"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_the_cpu_has_passes(attend, compute):
    refuse_device(RecursiveConfig(dim=16, heads=2, attend=attend, compute=compute), CPU)
    refuse_device(RecursiveConfig(dim=16, heads=2, mixer="cayley", streams=2, kernels="reference"), CPU)
