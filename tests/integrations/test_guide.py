"""The script of the guide to many GPUs runs on two processes, and goes on from its checkpoint on one."""

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "many_gpus.md"


def run(script: str, processes: int, folder: Path) -> list[float]:
    """Run a script with torchrun in a folder, and return the losses that it prints."""
    leave = "import os\nos._exit(0)  # torch 2.13 sometimes aborts while Python takes such a process down\n"
    (folder / "train.py").write_text(script + leave)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    ended = subprocess.run([*launch, "train.py"], cwd=folder, capture_output=True, text=True, check=True, timeout=240)
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", ended.stdout, re.M)]


def test_the_script_trains_on_two_processes_and_goes_on_with_one(tmp_path: Path):
    script, checkpoints, *_ = re.findall(r"^```py\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    imports, save, load = checkpoints.split("\n\n")
    losses = run(
        f"{imports}\n" + script.replace("dist.barrier()", f"{save}\nsaving.result()\ndist.barrier()"), 2, tmp_path
    )
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    begin = "torch.manual_seed(1 + dist.get_rank())"
    further = run(f"{imports}\n" + script.replace(begin, f"{load}\n{begin}"), 1, tmp_path)
    assert max(further) < min(losses[:10])
