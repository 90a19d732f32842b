"""The script of the guide to many GPUs runs on two processes."""

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "many_gpus.md"


def test_the_script_trains_on_two_processes(tmp_path: Path):
    script = re.search(r"^```py\n(import torch\n.*?)^```", GUIDE.read_text(), re.M | re.S)
    assert script is not None
    leave = "import os\nos._exit(0)  # torch 2.13 sometimes aborts while Python takes such a process down\n"
    (tmp_path / "train.py").write_text(script[1] + leave)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launch, str(tmp_path / "train.py")], capture_output=True, text=True, check=True, timeout=240
    )
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", ended.stdout, re.M)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
