"""Fully sharded training on two processes: equal to one process, with float32 coefficients and fused kernels."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import jpmhc

STEPS = 2


def make_model(kernels: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        jpmhc.HyperConnection(nn.Sequential(nn.Linear(16, 16), nn.GELU()), 16, index=k, kernels=kernels)
        for k in range(2)
    ]
    stack = jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True)
    for block in blocks:
        nn.init.normal_(block.map.weight)
    return nn.Sequential(nn.Linear(16, 16), stack, nn.Linear(16, 4))


def train(model: nn.Module, part: slice) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))[part]
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run_rank(rank: int, folder: str, kernels: str, mixed: bool) -> None:
    torch.set_num_threads(1)
    if kernels == "fused":
        from tests import triton_interpreter

        triton_interpreter.repair()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = make_model(kernels)
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    jpmhc.shard_connections(model, **options)
    fully_shard(model, **options)
    types, fused = set(), []
    for block in model[1]:
        block.map.register_forward_pre_hook(lambda module, _: types.add(module.bias.dtype))
        block.write_read = lambda *given, step=block.write_read: fused.append(1) or step(*given)
    train(model, slice(4 * rank, 4 * rank + 4))
    values: dict[str, Tensor] = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save({"values": values, "types": types, "fused": len(fused)}, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # now and then torch 2.13 aborts when Python takes down the process of a sharded model


@pytest.mark.parametrize(
    ("kernels", "mixed"), [("reference", True), pytest.param("fused", False, marks=pytest.mark.interpreter)]
)
def test_equal_to_one_process(tmp_path: Path, kernels: str, mixed: bool):
    multiprocessing.spawn(run_rank, (str(tmp_path), kernels, mixed), 2)
    found = torch.load(tmp_path / "found.pt")
    alone = make_model(kernels)
    train(alone, slice(None))
    assert found["types"] == {torch.float32}
    assert found["fused"] == STEPS  # the seam between the two connections, in every step
    for name, value in alone.state_dict().items():
        tolerance = 3e-3 if mixed else 1e-6  # sublayers and heads compute in bfloat16
        torch.testing.assert_close(found["values"][name], value, rtol=tolerance, atol=tolerance)


def test_model_without_connections_is_refused():
    with pytest.raises(ValueError, match="Linear has no hyper-connections"):
        jpmhc.shard_connections(nn.Linear(2, 2))
