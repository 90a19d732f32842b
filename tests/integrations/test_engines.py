"""accelerate, the Trainer of transformers and Lightning train on two processes what one process trains."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.engines import make_model, train_alone


@pytest.mark.parametrize(
    ("engine", "tolerance"),
    [
        ("accelerate", 1e-6),
        ("accelerate-bfloat16", 2e-2),
        ("transformers", 1e-6),
        ("lightning", 1e-6),
        ("lightning-sharded", 1e-6),
    ],
)
def test_two_processes_train_what_one_does(tmp_path: Path, engine: str, tolerance: float):
    pytest.importorskip(engine.partition("-")[0])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, "-m", "tests.integrations.engines", engine, str(tmp_path)], check=True, timeout=240)
    start, alone = make_model().state_dict(), train_alone(tmp_path).state_dict()
    assert max((start[name] - alone[name]).abs().max() for name in alone if ".map." in name) > 1e-2
    for rank in range(2):
        trained = torch.load(tmp_path / f"{engine}-{rank}.pt")
        assert trained.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=tolerance)
