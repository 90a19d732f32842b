"""The kernels as the compiler sees them: what the interpreter accepts need not compile, or fit into registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jpmhc.kernels.write_read import one_gradient_kernel_pays
from tests.kernels.connection_cases import NAMES, make_case

SCRIPT = Path(__file__).parent / "compile_only.py"
ROOT = Path(__file__).parents[2]
KERNELS = {
    "_prepare", "_project", "_sum_streams", "_write_read", "_constrain", "_write", "_write_backward",
    "_sum_backward", "_logits_backward", "_streams_backward", "_weight_backward", "_finish_gradients", "_decode",
}  # fmt: skip


# Two blocks of an orthostochastic matrix, 64 numbers a token, run but spill.
EVERY = [(name, 4, 128, {}, 4) for name in NAMES if name != "orthostochastic, two blocks"]
PARTICULAR = [
    ("cayley", 4, 512, {"norm": "rms", "post_norm": True}, 1),
    ("sinkhorn", 4, 1000, {"read": "softmax_matrix"}, 4),
    ("kronecker", 4, 64, {"read": "sigmoid", "write": "softmax_matrix"}, 4),
    ("identity", 2, 64, {}, 2),
    ("sinkhorn", 2, 200, {}, 2),
    ("cayley", 4, 2048, {}, 4),
    ("cayley", 4, 512, {"delayed": True}, 4),
    ("sinkhorn", 4, 256, {"delayed": True}, 4),
    (
        "sinkhorn of DeepSeek-V4",
        4,
        64,
        {"norm": "rms_outside", "read": "sigmoid", "write": "sigmoid", "read_eps": 1e-6},
        4,
    ),
]


@pytest.mark.parametrize(("name", "n", "d", "settings", "held"), [*EVERY, *PARTICULAR])
def test_compiles_for_hopper_without_spilling(
    name: str, n: int, d: int, settings: dict, held: int, tmp_path: Path
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(SCRIPT), name, str(n), str(d), json.dumps(settings), str(held)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    spec = make_case(name, n, d, **{key: value for key, value in settings.items() if key != "delayed"}).spec
    joined = held == n and one_gradient_kernel_pays(spec, spec, torch.bfloat16)
    assert {line[0] for line in lines} == KERNELS | ({"_write_read_backward"} if joined else set())
    for kernel, _, spilled, shared in lines:
        assert int(spilled) == 0, f"{kernel} spills {spilled} bytes"
        assert int(shared) <= 227 * 1024, f"{kernel} wants {shared} bytes of shared memory, Hopper has 232448"
