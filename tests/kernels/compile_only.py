"""Compile every kernel that a connection launches for a Hopper GPU, on a machine that has none.

    python tests/kernels/compile_only.py MIXER STREAMS DIM [SETTINGS OF THE SPEC AS JSON] [STREAMS HELD IN x]

Launches are recorded instead of run: each becomes a compilation with the types, divisibilities and constants it would
have on the device. Prints one line a kernel: name, registers a thread, bytes spilled, bytes of shared memory.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
OPTIONS = ("num_warps", "num_stages", "maxnreg")
done: set[str] = set()


def compile_launch(kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
    """What `kernel[grid](*args, **kwargs)` does here instead of running."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args)) | kwargs
    if "COMPILED" in values:
        values["COMPILED"] = True
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            tensor = isinstance(value, torch.Tensor)
            signature[parameter.name] = TYPES[value.dtype] if tensor else "i32"
            if tensor or (value % 16 == 0 and not parameter.do_not_specialize):
                attributes[(index,)] = [["tt.divisibility", 16]]
    key = repr((kernel.__name__, signature, constants, options))
    if key in done:
        return
    done.add(key)
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [str(PTXAS), "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    print(kernel.__name__, registers, spilled, compiled.metadata.shared, flush=True)


def main() -> None:
    from jpmhc.connections import fused
    from tests.kernels.connection_cases import make_case

    name, n, d, *more = sys.argv[1:]
    settings = json.loads(more[0] if more else "{}")
    delayed = settings.pop("delayed", False)
    spec = make_case(name, int(n), int(d), **settings).spec
    held = int(more[1]) if len(more) > 1 else spec.n
    JITFunction.run = compile_launch
    x = torch.zeros(64, held, spec.d, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(spec.logits, spec.n * spec.d, requires_grad=True)
    bias = torch.zeros(spec.logits, requires_grad=True)
    with torch.no_grad():
        h, state = fused.read_streams(x, weight, bias, spec)
        if not spec.post_norm:
            fused.write_read_streams(h, state, weight, bias, spec, delayed)
    h, state = fused.read_streams(x, weight, bias, spec)
    _, h, state = fused.write_read_streams(h, state, weight, bias, spec, delayed)
    (fused.write_streams(h, state).sum() + fused.write_streams(h, state, mean=True).sum()).backward()


if __name__ == "__main__":
    main()
