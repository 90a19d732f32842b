"""Train torchtitan's smallest Llama 3 on two processes, plain and with hyper-connections.

Writes benchmarks/results/torchtitan.csv, which docs/guides/many_gpus.md sums up:

    python benchmarks/check_torchtitan.py
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from harness import write_csv

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # for the tests, which start the trainer on the CPU

from tests.integrations.test_torchtitan import PARALLELISMS, make_assets, train  # noqa: E402


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_assets(Path(folder))
        for parallelism, options in PARALLELISMS.items():
            print(f"training {parallelism}", flush=True)
            modules = ("llama3", "jpmhc.integrations.torchtitan")
            plain, hyper = (train(Path(folder), one, *options, "--training.steps", "10") for one in modules)
            rows += [
                {"parallelism": parallelism, "step": step, "plain": plain[step], "hyper_connections": hyper[step]}
                for step in plain
            ]
    rows = [{**row, "torchtitan": version("torchtitan")} for row in rows]
    write_csv("torchtitan", rows)


if __name__ == "__main__":
    main()
