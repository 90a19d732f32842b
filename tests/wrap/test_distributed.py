"""A wrapped model on two processes is the wrapped model on one."""

import subprocess
import sys

import torch


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
