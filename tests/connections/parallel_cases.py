"""Ways to train one model on several processes, each compared with one process; run by test_distributed.py.

A case builds a model, spreads it over the processes of the group, trains it for some steps, and returns the largest
difference of losses, gradients and weights to the same model trained by this process alone, on all rows.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import jpmhc

WORDS, DIM, HEADS, LAYERS, ROWS, LENGTH, STEPS = 11, 16, 4, 4, 8, 8, 3


class Norm(nn.Module):
    """An RMS norm written in Python, as models of `transformers` have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Attention(nn.Module):
    """Causal self-attention with its norm, and no residual. Heads or tokens may be spread over processes."""

    tokens_apart = False  # context parallelism: each process has other tokens, and all keys and values are gathered

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        query, key, value = (part(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for part in self.parts())
        length = key.shape[2]
        if self.tokens_apart:
            key, value = (all_gather_tensor_autograd(one, 2, dist.group.WORLD) for one in (key, value))
        first = dist.get_rank() * length if self.tokens_apart else 0
        mask = torch.ones(length, key.shape[2], dtype=torch.bool).tril(first)
        return self.out(F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(-2))

    def parts(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class PlainModel(nn.Module):
    """A decoder without hyper-connections; `jpmhc.wrap` gives it some."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, DIM), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class OwnModel(nn.Module):
    """The same decoder with connections of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        sublayers = (make() for _ in range(LAYERS) for make in (Attention, MLP))
        blocks = [jpmhc.HyperConnection(one, DIM, index=k, post_norm="layer") for k, one in enumerate(sublayers)]
        self.embed, self.blocks = nn.Embedding(WORDS, DIM), jpmhc.HyperConnectionStack(blocks, True, expand=True)
        self.norm, self.head = Norm(), nn.Linear(DIM, WORDS, bias=False)
        self.blocks.recompute = options.get("recompute")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def make_model(kind: str, **options: Any) -> nn.Module:
    """Make the model, "own" or "wrapped", with connections as after some training; the same on every process."""
    torch.manual_seed(0)
    model = OwnModel(**options) if kind == "own" else jpmhc.wrap(PlainModel(), inputs=make_tokens(0)[:1, :-1])
    for one in find_connections(model):
        nn.init.normal_(one.map.weight, std=0.5)
        nn.init.normal_(one.map.bias, std=0.5)
    return model.double()


def find_connections(model: nn.Module) -> list[jpmhc.HyperConnection]:
    return [module for module in model.modules() if isinstance(module, jpmhc.HyperConnection)]


def make_tokens(step: int) -> Tensor:
    return torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())


def train(
    model: nn.Module,
    rows: slice = slice(None),
    *,
    columns: slice = slice(None),
    forward: nn.Module | None = None,
    groups: Any = None,
    clip: float | None = None,
) -> list[float]:
    """Train a model and return the mean losses over all processes.

    Args:
        model: The model.
        rows: The rows of each step that this process computes.
        columns: The tokens of these rows.
        forward: What is called in place of the model.
        groups: The optimiser's parameter groups, if they were made before.
        clip: The largest norm of a gradient.
    """
    optimizer = torch.optim.SGD(groups or jpmhc.parameter_groups(model, 0.01), lr=0.3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = make_tokens(step)[rows]
        loss = compute_loss((forward or model)(tokens[:, :-1][:, columns]), tokens[:, 1:][:, columns])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        mean = loss.detach().clone()
        if (rows, columns) != (slice(None), slice(None)):
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    return losses


def own_part(count: int = ROWS, mesh: DeviceMesh | None = None) -> slice:
    """Return this process's part of so many rows or tokens: one for each process of the mesh, by default of all."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if mesh is None else (mesh.get_local_rank(), mesh.size())
    return slice(rank * count // size, (rank + 1) * count // size)


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers add to it."""
    for added in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module."):
        name = name.replace(added, "")
    return name


def full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights and gradients of a model, whole."""
    for name, parameter in model.named_parameters():
        for kind, value in (("weight", parameter.detach()), ("gradient", parameter.grad)):
            whole = full(value)
            assert whole is not None, f"{name} has no gradient"
            yield f"{kind} of {plain_name(name)}", whole


def compare(
    kind: str,
    model: nn.Module,
    losses: list[float] | None,
    names: Callable[[str], str] = str,
    clip: float | None = None,
) -> float:
    """Return the largest difference to the model of that kind trained by one process.

    Args:
        kind: "own" or "wrapped".
        model: The model that several processes have trained, or a part of it.
        losses: Its losses, where this process knows them.
        names: Returns the name that a value of the part has in the whole model.
        clip: The largest norm of a gradient.
    """
    alone = make_model(kind)
    expected_losses = train(alone, clip=clip)
    expected = dict(values_of(alone))
    differences = [abs(a - b) for a, b in zip(expected_losses, losses or expected_losses, strict=True)]
    differences += [float((value.double() - expected[names(name)]).abs().max()) for name, value in values_of(model)]
    return max(differences)


# -- the ways ----------------------------------------------------------------------------------------------------------


def ddp(kind: str) -> float:
    model = make_model(kind)
    return compare(kind, model, train(model, own_part(), forward=DistributedDataParallel(model)))


def ddp_recompute(kind: str) -> float:
    model = make_model(kind, recompute="auto")
    return compare(kind, model, train(model, own_part(), forward=DistributedDataParallel(model)))


def fsdp1(kind: str) -> float:
    model = make_model(kind)
    groups = jpmhc.parameter_groups(model, 0.01)
    shared = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    losses = train(model, own_part(), forward=shared, groups=groups)
    with FullyShardedDataParallel.summon_full_params(shared, with_grads=True):
        return compare(kind, model, losses)


def make_sharded(kind: str, **options: Any) -> nn.Module:
    model = make_model(kind)
    jpmhc.shard_connections(model, **options)
    fully_shard(model, **options)
    return model


def fsdp2(kind: str, **options: Any) -> float:
    model = make_sharded(kind, **options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    gathered = count_gathered(model)
    losses = train(model, own_part())
    assert gathered == {1}  # of all layers, the one that computes
    return compare(kind, model, losses)


def count_gathered(model: nn.Module) -> set[int]:
    """Return a set that forward passes fill with how many sublayers of one kind have whole weights at a time."""
    counts: set[int] = set()
    sublayers = [module for module in model.modules() if isinstance(module, MLP)]

    def count(*_: object) -> None:
        counts.add(sum(not isinstance(one.up.weight, DTensor) for one in sublayers))

    for one in sublayers:
        one.up.register_forward_hook(count)
    return counts


def fsdp2_clipped(kind: str) -> float:
    model = make_sharded(kind)
    return compare(kind, model, train(model, own_part(), clip=0.1), clip=0.1)


def hsdp(kind: str) -> float:
    return fsdp2(kind, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")))


def fsdp2_offload(kind: str) -> float:
    return fsdp2(kind, offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_by_layer(kind: str) -> float:
    model = make_model(kind)
    for layer in model.blocks if kind == "own" else model.layers:
        fully_shard(layer)
    fully_shard(model)
    return compare(kind, model, train(model, own_part()))


def fsdp2_on_meta(kind: str) -> float:
    """Made on the meta device, sharded, and given its values afterwards, from a whole state dict."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values = make_model(kind).state_dict()
    with torch.device("meta"):
        model = OwnModel().double()
    jpmhc.shard_connections(model)
    fully_shard(model)
    model.to_empty(device="cpu")
    for one, other in zip(find_connections(model), find_connections(OwnModel().double())):
        one.reset_parameters()
        for name, value in other.map.named_parameters():
            torch.testing.assert_close(full(one.map.get_parameter(name).detach()), value.detach(), rtol=0, atol=1e-6)
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    return compare(kind, model, train(model, own_part()))


def fsdp2_bfloat16(kind: str) -> float:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = make_model(kind).float()
    jpmhc.shard_connections(model, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    types = set()
    for one in find_connections(model):
        one.map.register_forward_pre_hook(lambda module, _: types.add(module.bias.dtype))
    losses = train(model, own_part())
    assert types == {torch.float32}
    return compare(kind, model, losses)


def fsdp2_checkpointed(kind: str) -> float:
    model = make_model(kind)
    jpmhc.shard_connections(model)
    layers: Any = model.blocks.connections if kind == "own" else model.layers
    for k, layer in enumerate(layers):
        layers[k] = checkpoint_wrapper(layer)
    fully_shard(model)
    return compare(kind, model, train(model, own_part()))


def fsdp2_saved_on_cpu(kind: str) -> float:
    model = make_sharded(kind)
    with torch.autograd.graph.save_on_cpu():
        losses = train(model, own_part())
    return compare(kind, model, losses)


def fsdp2_compiled(kind: str) -> float:
    model = make_sharded(kind)
    for one in model.modules():
        if isinstance(one, Attention | MLP):
            one.compile(backend="aot_eager")
    return compare(kind, model, train(model, own_part()))


def context_parallel(kind: str) -> float:
    """Each process has some tokens of every row; attention gathers the keys and values of all."""
    model = make_model(kind)
    for module in model.modules():
        if isinstance(module, Attention):
            module.tokens_apart = True
    return compare(kind, model, train(model, columns=own_part(LENGTH), forward=DistributedDataParallel(model)))


def tensor_plan(model: nn.Module, sequence: bool, dtensors: bool) -> dict[str, Any]:
    """Return the plan of `parallelize_module` for the sublayers: heads and hidden units over the processes."""
    plan: dict[str, Any] = {}
    apart = {"input_layouts": Shard(1)} if sequence else {}
    together = {"output_layouts": Shard(1), "use_local_output": not dtensors} if sequence else {}
    for name, module in model.named_modules():
        if isinstance(module, Attention | MLP):
            first, last = (("query", "key", "value"), "out") if isinstance(module, Attention) else (("up",), "down")
            plan |= {f"{name}.{one}": ColwiseParallel(**apart) for one in first}
            plan[f"{name}.{last}"] = RowwiseParallel(**together)
            if sequence:
                plan[f"{name}.norm"] = SequenceParallel()
    if sequence:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), **together)
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return plan


def tensor_parallel(kind: str, sequence: bool = False, dtensors: bool = False) -> float:
    model, mesh = make_model(kind), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, tensor_plan(model, sequence, dtensors))
    jpmhc.parallelize_connections(model, mesh, sequence_parallel=sequence)
    return compare(kind, model, train(model))


def sequence_parallel(kind: str) -> float:
    return tensor_parallel(kind, sequence=True)


def sequence_parallel_dtensors(kind: str) -> float:
    return tensor_parallel(kind, sequence=True, dtensors=True)


def sequence_parallel_without_sum(kind: str) -> float:
    """A mistake on purpose: the connections' gradients are not summed over the processes."""
    model, mesh = make_model(kind), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, tensor_plan(model, True, False))
    return compare(kind, model, train(model))


def fsdp2_tensor_parallel(kind: str, sequence: bool = True) -> float:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    model = make_model(kind)
    parallelize_module(model, mesh["tensor"], tensor_plan(model, sequence, False))
    jpmhc.parallelize_connections(model, mesh["tensor"], sequence_parallel=sequence)
    jpmhc.shard_connections(model, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return compare(kind, model, train(model, own_part(mesh=mesh["data"])))


class Stage(nn.Module):
    """Some of a model's layers for one process of a pipeline; the first embeds, the last predicts."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        first, last = stage == 0, stage == stages - 1
        if isinstance(model, OwnModel):
            blocks = [*model.blocks]
            cuts = [round(k * len(blocks) / stages + (0 < k < stages)) for k in range(stages + 1)]  # inside a layer
            self.offset = cuts[stage]
            self.blocks = jpmhc.HyperConnectionStack(blocks[slice(*cuts[stage : stage + 2])], last, expand=first)
            self.layers = nn.ModuleList()
        else:
            self.offset = stage * LAYERS // stages
            self.layers = model.layers[self.offset : (stage + 1) * LAYERS // stages]
            self.blocks = None
            jpmhc.prepare_stage(self.layers)
        self.embed = model.embed if first else None
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x if self.blocks is None else self.blocks(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def name_in_model(self, name: str) -> str:
        """Return the name that a value of this stage has in the whole model."""
        for part in ("blocks.connections.", "layers."):
            before, found, rest = name.partition(part)
            if found:
                number, _, rest = rest.partition(".")
                return f"{before}{part}{int(number) + self.offset}.{rest}"
        return name


def run_pipeline(stage: Stage, mesh: DeviceMesh, rows: slice, schedule: type[Any]) -> None:
    """Train the stage of this process."""
    group, count = mesh.get_group(), mesh.size()
    runner = schedule(
        PipelineStage(stage, mesh.get_local_rank(), count, torch.device("cpu"), group=group),
        n_microbatches=2 if schedule is ScheduleGPipe else count,
        loss_fn=compute_loss,
    )
    optimizer = torch.optim.SGD(jpmhc.parameter_groups(stage, 0.01), lr=0.3)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = make_tokens(step)[rows]
        given = (tokens[:, :-1],) if stage.embed is not None else ()
        runner.step(*given, target=tokens[:, 1:] if stage.head is not None else None)
        optimizer.step()


def pipeline(kind: str, schedule: type[Any] = ScheduleGPipe) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stage = Stage(make_model(kind), mesh.get_local_rank(), mesh.size())
    run_pipeline(stage, mesh, slice(None), schedule)
    return compare(kind, stage, None, stage.name_in_model)


def pipeline_1f1b(kind: str) -> float:
    return pipeline(kind, Schedule1F1B)


def three_dimensions(kind: str) -> float:
    """FSDP2, tensor parallel with sequence-parallel streams, and a pipeline together."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("pipeline", "data", "tensor"))
    stage = Stage(make_model(kind), mesh["pipeline"].get_local_rank(), 2)
    plan = {key: value for key, value in tensor_plan(stage, True, False).items() if "." in key or getattr(stage, key)}
    parallelize_module(stage, mesh["tensor"], plan)
    jpmhc.parallelize_connections(stage, mesh["tensor"], sequence_parallel=True)
    jpmhc.shard_connections(stage, mesh=mesh["data"])
    fully_shard(stage, mesh=mesh["data"])
    run_pipeline(stage, mesh["pipeline"], own_part(mesh=mesh["data"]), ScheduleGPipe)
    return compare(kind, stage, None, stage.name_in_model)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_sharded(kind: str, folder: str) -> None:
    """Train a fully sharded model with AdamW, and save it and its optimiser with `torch.distributed.checkpoint`."""
    model = make_sharded(kind)
    optimizer = torch.optim.AdamW(jpmhc.parameter_groups(model, 0.1), lr=0.01)
    take_steps(model, optimizer, 0, STEPS)
    values, state = get_state_dict(model, optimizer)
    checkpoint.async_save({"model": values, "optimizer": state}, checkpoint_id=folder).result()


def load_and_go_on(kind: str, folder: str) -> float:
    """Load what `save_sharded` saved, on any number of processes; compare further steps with an uninterrupted run."""
    model = make_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    jpmhc.shard_connections(model)
    fully_shard(model)
    optimizer = torch.optim.AdamW(jpmhc.parameter_groups(model, 0.1), lr=0.01)
    values, state = get_state_dict(model, optimizer)
    checkpoint.load({"model": values, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)
    take_steps(model, optimizer, STEPS, 2 * STEPS)
    alone = make_model(kind)
    take_steps(alone, torch.optim.AdamW(jpmhc.parameter_groups(alone, 0.1), lr=0.01), 0, 2 * STEPS, slice(None))
    expected = dict(values_of(alone))
    return max(float((value - expected[name]).abs().max()) for name, value in values_of(model))


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int, rows: slice | None = None
) -> None:
    """Train with the rows of the steps from `first` to `end`, by default on this process's rows."""
    for step in range(first, end):
        optimizer.zero_grad()
        tokens = make_tokens(step)[own_part() if rows is None else rows]
        compute_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()


EXACT, ROUNDED = 1e-11, 2e-2  # float64; bfloat16 sublayers


@dataclass(frozen=True)
class Case:
    """A way to train, the kinds of models it is tried with, the tolerance, and the numbers of processes."""

    run: Callable[[str], float]
    kinds: tuple[str, ...] = ("own", "wrapped")
    tolerance: float = EXACT
    processes: tuple[int, ...] = (2, 4)


CASES = {
    "DDP": Case(ddp),
    "DDP, streams recomputed": Case(ddp_recompute, ("own",)),
    "FSDP1": Case(fsdp1),
    "FSDP2": Case(fsdp2),
    "FSDP2 by layer, without shard_connections": Case(fsdp2_by_layer),
    "FSDP2, made on the meta device": Case(fsdp2_on_meta, ("own",)),
    "FSDP2, parameters in CPU memory": Case(fsdp2_offload),
    "FSDP2 in bfloat16, coefficients in float32": Case(fsdp2_bfloat16, tolerance=ROUNDED),
    "FSDP2, layers recomputed": Case(fsdp2_checkpointed),
    "FSDP2, activations saved on the CPU": Case(fsdp2_saved_on_cpu),
    "FSDP2, sublayers compiled": Case(fsdp2_compiled),
    "FSDP2, gradients clipped": Case(fsdp2_clipped),
    "HSDP": Case(hsdp, processes=(4,)),
    "tensor parallel": Case(tensor_parallel),
    "tensor parallel, streams sharded by tokens": Case(sequence_parallel),
    "tensor parallel, streams sharded as DTensors": Case(sequence_parallel_dtensors),
    "context parallel": Case(context_parallel),
    "pipeline, GPipe": Case(pipeline),
    "pipeline, 1F1B": Case(pipeline_1f1b),
    "FSDP2 and tensor parallel": Case(fsdp2_tensor_parallel, processes=(4,)),
    "FSDP2, tensor parallel and pipeline": Case(three_dimensions, processes=(4, 8)),
}


@dataclass(frozen=True)
class Outcome:
    """What a case came to: the largest difference to one process, on any process, and seconds."""

    difference: float
    seconds: float


def run_all(names: list[str] | None = None) -> dict[tuple[str, str], Outcome]:
    """Run the cases for this number of processes, on every process of the group alike."""
    outcomes = {}
    # Sublayers may return views, which their linear layers do; connections and wrapped layers may not.
    warnings.filterwarnings("error", message=".*FSDP(Block|HyperConnection|CoefficientMap).* returned a view tensor")
    for name, case in CASES.items():
        if dist.get_world_size() in case.processes and (names is None or name in names):
            for kind in case.kinds:
                begin = time.perf_counter()
                try:
                    difference = case.run(kind)
                except Exception as error:
                    error.add_note(f"case: {name}, {kind}")
                    raise
                largest = torch.tensor(difference)
                dist.all_reduce(largest, dist.ReduceOp.MAX)  # processes of a pipeline know their own stage alone
                outcomes[name, kind] = Outcome(float(largest), time.perf_counter() - begin)
    return outcomes
