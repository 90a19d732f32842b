"""The host's time per token of a wrapped Llama, beside the plain one, on a CPU.

    python benchmarks/bench_host.py [--form launches reference] [--cache dynamic static] [--sources src OTHER/src]

Eight layers of d = 64 generate token by token, so that arithmetic takes almost no time. With `launches`, the
connections run as on a GPU, but CUDA's driver is not called: the kernels' numbers are missing, and the rest of the
host's work is there. With `reference`, the connections run in PyTorch. The processes for the folders of `--sources`
take turns, and measure their thread's time, not the clock's.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, CONNECTIONS = 8, 16
REPEATS, TOKENS = 60, 10


def measure(form: str, cache: str) -> None:
    """Answer each line of the standard input, "plain" or "wrapped", by the milliseconds per token of this model."""
    if form == "launches":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports the kernels
    import torch
    import transformers

    import jpmhc

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    models = {"plain": plain, "wrapped": jpmhc.wrap(copy.deepcopy(plain), kernels="reference")}
    if form == "launches":
        skip_launches()
        for module in models["wrapped"].modules():
            if isinstance(module, jpmhc.HyperConnection):
                module.kernels = "fused"
    prompt, token = torch.randint(256, (1, 16)), torch.randint(256, (1, 1))

    @torch.no_grad()
    def run(model: Any) -> float:
        kinds = {"dynamic": transformers.DynamicCache, "static": transformers.StaticCache}
        past = kinds[cache](config=config, **({"max_cache_len": 128} if cache == "static" else {}))
        begin = 0.0
        for number in range(4 + TOKENS):  # the first ones record the launches
            begin = time.thread_time() if number == 4 else begin
            model(prompt if number == 0 else token, past_key_values=past, use_cache=True)
        return (time.thread_time() - begin) / TOKENS * 1e3

    run(plain), run(models["wrapped"])
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(models[line.strip()]), flush=True)


def skip_launches() -> None:
    """Let launches pack their arguments as for CUDA's driver, and then call a function that does nothing."""
    import ctypes

    import torch

    from jpmhc.kernels import driver, launch, replay

    nothing = ctypes.CDLL(None).getppid
    nothing.argtypes, nothing.restype = [ctypes.c_void_p] * 4, None

    class Packed(driver.PackedLaunches):
        def __init__(self, kernels: Any, grids: Any, arguments: Any, pointers: int) -> None:
            super().__init__([], [], [], pointers)
            self.calls, self.call, self.stream = [(0, 1, 0, None) for _ in grids], nothing, 0

    class Recording(replay.Recording):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            pointers = len(self.indices)
            self.packed = Packed([], [grid for _, grid, _ in self.launches], [], pointers)

    driver._extended_driver = lambda: nothing
    replay.Recording = Recording  # type: ignore[misc]
    launch.Launcher.run = lambda self, grid, *arguments: None  # type: ignore[method-assign]
    torch._C._cuda_getCurrentRawStream = lambda device: 0


def compare(form: str, cache: str, sources: list[Path]) -> None:
    """Print the milliseconds per token of the plain model, and of the wrapped one for each folder of sources."""
    workers = []
    for folder in sources:
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", form, cache]
        worker = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        workers.append(worker)
    for worker in workers:
        while (line := ask(worker, "")) != "ready":
            if not line:
                sys.exit("a worker ended before it was ready")
    plain: list[float] = []
    wrapped: list[list[float]] = [[] for _ in sources]
    for _ in range(REPEATS):
        plain.append(float(ask(workers[0], "plain")))
        for worker, times in zip(workers, wrapped):
            times.append(float(ask(worker, "wrapped")))
    print(f"{form}, {cache} cache: plain {describe(plain)} ms per token")
    for folder, times in zip(sources, wrapped):
        each = [(mine - base) / CONNECTIONS for mine, base in zip(times, plain)]
        print(f"  {folder}: wrapped {describe(times)} ms per token, {describe(each)} ms per connection and token")
    for worker in workers:
        worker.communicate()


def ask(worker: Any, question: str) -> str:
    """Return the worker's next line, after sending it a question."""
    if question:
        worker.stdin.write(f"{question}\n")
        worker.stdin.flush()
    return str(worker.stdout.readline()).strip()


def describe(times: list[float]) -> str:
    return f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", nargs="+", choices=["launches", "reference"], default=["launches"])
    parser.add_argument("--cache", nargs="+", choices=["dynamic", "static"], default=["dynamic"])
    parser.add_argument("--sources", nargs="+", type=Path, default=[Path(__file__).parents[1] / "src"])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(*options.worker)
        return
    for form in options.form:
        for cache in options.cache:
            compare(form, cache, options.sources)


if __name__ == "__main__":
    main()
