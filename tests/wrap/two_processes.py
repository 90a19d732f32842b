"""Two processes train a wrapped model under DDP; started by test_distributed.py."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import jpmhc

STEPS = 3


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    return jpmhc.wrap(encoder, inputs=torch.randn(2, 5, 16), mixer="cayley").double()


def rows() -> torch.Tensor:
    return torch.randn(STEPS, 4, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(model: nn.Module, part: slice) -> None:
    """Fit the model to its inputs turned around, on a part of each step's rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x in rows():
        optimizer.zero_grad()
        (model(x[part]) - x[part].flip(1)).square().mean().backward()
        optimizer.step()


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    model = wrapped()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    shared = DistributedDataParallel(model)
    train(shared, slice(2 * rank, 2 * rank + 2))
    torch.save(model.state_dict(), Path(folder) / f"rank-{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # torch 2.13 sometimes aborts while Python takes such a process down


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Not forked: a child of a process that has computed may inherit a lock that nobody will open.
    mp.start_processes(run, (sys.argv[1],), nprocs=2, start_method="spawn")
    alone = wrapped()
    train(alone, slice(None))
    torch.save(alone.state_dict(), Path(sys.argv[1]) / "alone.pt")
