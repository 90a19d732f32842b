"""Every way to train on several processes equals one process; `make test-distributed` runs those on 4 and 8 too."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import jpmhc
from tests import triton_interpreter
from tests.connections import parallel_cases
from tests.connections.parallel_cases import CASES, Outcome, make_model, own_part
from tests.connections.ranks import run_on


@functools.cache
def run_cases(processes: int) -> dict[tuple[str, str], Outcome]:
    """Run all cases for so many processes, in one group."""
    return run_on(processes, parallel_cases.run_all, timeout=150 * processes)[0]


def list_cases(processes: int) -> list[tuple[str, str]]:
    return [(name, kind) for name, case in CASES.items() if processes in case.processes for kind in case.kinds]


@pytest.mark.parametrize(("name", "kind"), list_cases(2))
def test_two_processes_equal_one(name: str, kind: str):
    assert run_cases(2)[name, kind].difference < CASES[name].tolerance


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("processes", "name", "kind"), [(count, *case) for count in (4, 8) for case in list_cases(count)]
)
def test_more_processes_equal_one(processes: int, name: str, kind: str):
    assert run_cases(processes)[name, kind].difference < CASES[name].tolerance


@pytest.mark.parametrize("kind", ["own", "wrapped"])
def test_checkpoint_of_two_processes_is_loaded_by_one(tmp_path: Path, kind: str):
    run_on(2, parallel_cases.save_sharded, kind, str(tmp_path))
    assert run_on(1, parallel_cases.load_and_go_on, kind, str(tmp_path))[0] < parallel_cases.EXACT


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["own", "wrapped"])
def test_checkpoint_of_four_processes_is_loaded_by_one_and_two(tmp_path: Path, kind: str):
    run_on(4, parallel_cases.save_sharded, kind, str(tmp_path), timeout=300)
    for processes in (1, 2):
        assert run_on(processes, parallel_cases.load_and_go_on, kind, str(tmp_path))[0] < parallel_cases.EXACT


def raise_errors() -> dict[str, str]:
    """Do what is refused, and return the messages."""
    mesh = init_device_mesh("cpu", (2,))
    streams = torch.randn(2, 4, 4, 16)

    def give_dtensor(model: nn.Module, dim: int) -> None:
        model(distribute_tensor(streams, mesh, [Shard(dim)]))

    def shard_late(model: parallel_cases.OwnModel) -> None:
        for block in model.blocks:
            fully_shard(block)
        jpmhc.shard_connections(model)

    def prepare(model: nn.Module) -> nn.Module:
        jpmhc.parallelize_connections(model, mesh, sequence_parallel=True)
        return model

    attempts = {
        "plain weights": lambda: give_dtensor(jpmhc.HyperConnection(nn.Identity(), 16, index=1), 1),
        "streams apart": lambda: give_dtensor(prepare(jpmhc.HyperConnection(nn.Identity(), 16, index=1)), 2),
        "sharded late": lambda: shard_late(parallel_cases.OwnModel()),
        "FSDP1 first": lambda: jpmhc.parameter_groups(
            FullyShardedDataParallel(make_model("own"), device_id=torch.device("cpu")), 0.1
        ),
        "shards in FSDP1": lambda: jpmhc.shard_connections(
            FullyShardedDataParallel(make_model("own"), device_id=torch.device("cpu"))
        ),
        "frames": lambda: prepare(jpmhc.HyperConnection(None, 16, mixer="grassmann", dynamic=False)),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_what_cannot_work_is_refused():
    for messages in run_on(2, raise_errors):
        assert "call jpmhc.parallelize_connections(model, mesh, sequence_parallel=True)" in messages["plain weights"]
        assert "not within a token" in messages["streams apart"]
        assert "call shard_connections first" in messages["sharded late"]
        assert "call parameter_groups before it" in messages["FSDP1 first"]
        assert "shard_connections is for fully_shard" in messages["shards in FSDP1"]
        assert "has parameters of its own" in messages["frames"]


def shard_apart() -> tuple[float, list[str]]:
    """Return the error of a forgotten sum of gradients, and what a rounding policy makes the connections warn of."""
    forgotten = parallel_cases.sequence_parallel_without_sum("own")
    messages = []
    for kind in ("own", "wrapped"):
        model = make_model(kind).float()
        for layer in model.blocks if kind == "own" else model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        with pytest.warns(UserWarning, match="call jpmhc.shard_connections before fully_shard") as warned:
            model(parallel_cases.make_tokens(0)).sum().backward()
        messages += [str(one.message) for one in warned]
    return forgotten, messages


def test_forgotten_sum_is_seen_and_rounding_is_warned_of():
    assert dist.is_available()
    for forgotten, messages in run_on(2, shard_apart):
        assert forgotten > 1e-3  # so the comparison of the cases above can fail
        assert any("call jpmhc.shard_connections before fully_shard" in message for message in messages)


def train_fused(part: slice, shard: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Train two fused connections for two steps. Return the weights, and how often a write and a read were one step."""
    torch.manual_seed(0)
    blocks = [jpmhc.HyperConnection(nn.Linear(16, 16), 16, index=k, kernels="fused") for k in range(2)]
    for block in blocks:
        nn.init.normal_(block.map.weight)
    model = nn.Sequential(nn.Linear(16, 16), jpmhc.HyperConnectionStack(blocks, True, expand=True), nn.Linear(16, 4))
    if shard:
        jpmhc.shard_connections(model)
        fully_shard(model)
    joined = []
    blocks[0].write_read = lambda *given, step=blocks[0].write_read: joined.append(1) or step(*given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))[part]).square().mean().backward()
        optimizer.step()
    return {name: parallel_cases.full(value.detach()) for name, value in model.named_parameters()}, len(joined)


def compare_fused() -> tuple[float, int]:
    triton_interpreter.repair()
    (sharded, joined), (alone, _) = train_fused(own_part(), True), train_fused(slice(None), False)
    return max(float((sharded[name] - value).abs().max()) for name, value in alone.items()), joined


@pytest.mark.interpreter
def test_sharded_connections_stay_fused_with_their_neighbours():
    for difference, joined in run_on(2, compare_fused):
        assert difference < 1e-6
        assert joined == 2
