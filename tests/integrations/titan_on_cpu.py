"""Run torchtitan's trainer on the CPU, which it does not support by itself: started by test_torchtitan.py.

torchtitan calls functions of a GPU, and this file supplies them for the CPU. `cpu_attention.py` replaces its attention,
whose kernels have no backward pass on the CPU.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import Schedule1F1B
from torchtitan.tools import utils


class CPU:
    """The functions of `torch.cuda` that torchtitan calls, for the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**34, name="CPU")

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        return

    def empty_cache(self) -> None:
        return

    def current_device(self) -> int:
        return 0


def step_microbatches(schedule: Schedule1F1B, **microbatches: Any) -> None:
    """Run a pipeline on a list of microbatches, as `step` does in torch 2.15."""
    stage = schedule._stage
    stage.has_backward = schedule._has_backward
    stage.clear_runtime_states()
    schedule._step_microbatches(**microbatches)


def main() -> None:
    torch.set_num_threads(1)
    divide = FSDPModule.set_gradient_divide_factor

    def divide_in_sums(module: FSDPModule, factor: float) -> None:  # gloo has no sum with a factor in it
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    if not hasattr(dist, "set_timeout"):  # torch 2.13 lacks two functions that torchtitan 0.3 calls
        dist.set_timeout = lambda *_: None
        Schedule1F1B.step = step_microbatches
    FSDPModule.set_gradient_divide_factor = divide_in_sums
    utils.device_type, utils.device_module = "cpu", CPU()
    from torchtitan import train

    train.main()


if __name__ == "__main__":
    main()
