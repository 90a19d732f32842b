"""A wrapped model on two processes is the wrapped model on one."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import jpmhc


def test_two_processes_train_what_one_does(tmp_path):
    subprocess.run([sys.executable, "-m", "tests.wrap.two_processes", str(tmp_path)], check=True, timeout=120)
    alone, *others = (torch.load(tmp_path / name) for name in ("alone.pt", "rank-0.pt", "rank-1.pt"))
    connections = [name for name in alone if "hyper_connections" in name and name.endswith("weight")]
    assert connections
    assert all(alone[name].abs().max() > 1e-5 for name in connections)  # they start at zero
    for other in others:
        assert other.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-12)


def test_stages_hand_over_streams():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    model = jpmhc.wrap(nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False), inputs=x)
    for module in model.modules():
        if isinstance(module, jpmhc.HyperConnection):
            nn.init.normal_(module.map.weight)
    whole = model(x)
    first, second = (jpmhc.prepare_stage(nn.Sequential(*model.layers[part])) for part in (slice(3), slice(3, 4)))
    streams = first(x)
    assert streams.shape == (2, 5, 4, 16)
    torch.testing.assert_close(second(streams.clone()), whole)  # the clone comes from another process


def test_a_module_without_wrapped_layers_is_no_stage():
    with pytest.raises(ValueError, match="no layers of a wrapped model"):
        jpmhc.prepare_stage(nn.Linear(2, 2))
