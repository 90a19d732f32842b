"""The kernels as the compiler sees them: what the interpreter accepts need not compile, or fit into registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_only.py"
KERNELS = {
    "_prepare", "_project", "_combine", "_write_to_read", "_constrain_rows", "_write", "_write_backward",
    "_combine_backward", "_logits_backward", "_streams_backward", "_weight_backward",
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"n": 4, "d": 512, "norm": "rms", "post_norm": True}, 1),
        ({"n": 4, "d": 1000, "mixer": "sinkhorn", "iterations": 20, "read": "softmax_matrix"}, 4),
        ({"n": 4, "d": 64, "mixer": "cayley", "iterations": 2}, 4),
        ({"n": 4, "d": 64, "mixer": "grassmann", "rank": 3}, 4),
        ({"n": 4, "d": 64, "mixer": "permutation", "permutations": [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1]]}, 4),
        ({"n": 4, "d": 64, "mixer": "kronecker", "read": "sigmoid", "write": "softmax_matrix"}, 4),
        ({"n": 2, "d": 64, "mixer": "identity"}, 2),
    ],
)
def test_compiles_for_hopper_without_spilling(settings: dict, held: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(SCRIPT), json.dumps(settings), str(held)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == KERNELS
    for name, _, spilled, shared in lines:
        assert int(spilled) == 0, f"{name} spills {spilled} bytes"
        assert int(shared) <= 227 * 1024, f"{name} wants {shared} bytes of shared memory, Hopper has 232448"
