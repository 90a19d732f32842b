"""Train a wrapped model with an engine on torchrun's processes: python -m tests.integrations.engines ENGINE FOLDER."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import jpmhc
from tests.connections.parallel_cases import full

WORDS, DIM, ROWS, LENGTH, EPOCHS, RATE, DECAY = 11, 16, 4, 6, 3, 0.2, 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))).roll(1, -2)


class Model(nn.Module):
    """A model of tokens that returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, DIM), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = {} if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}
        return {**loss, "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens and the tokens after them; one step takes them all."""

    def __init__(self) -> None:
        self.tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = jpmhc.wrap(Model(), inputs=Rows().tokens[:1, :-1])
    for module in model.modules():
        if isinstance(module, jpmhc.HyperConnection):
            nn.init.normal_(module.map.weight, std=0.5)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(jpmhc.parameter_groups(model, DECAY), lr=RATE, momentum=0.5)


def make_batches() -> Any:
    return DataLoader(Rows(), batch_size=ROWS // int(os.environ.get("WORLD_SIZE", "1")))


def train_alone(folder: Path) -> nn.Module:
    """Train on one process, without an engine."""
    model = make_model()
    optimizer = make_optimizer(model)
    for _ in range(EPOCHS):
        for batch in make_batches():
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    return model


def train_with_accelerate(folder: Path, precision: str = "no") -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = make_model()
    types = watch_types(model)
    plain, optimizer = model, make_optimizer(model)
    model, optimizer, batches = accelerator.prepare(model, optimizer, make_batches())
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
    assert types == {torch.float32}
    return plain


def train_with_accelerate_in_bfloat16(folder: Path) -> nn.Module:
    return train_with_accelerate(folder, "bf16")


def watch_types(model: nn.Module) -> set[torch.dtype]:
    """Return a set that forward passes fill with the types of the connections' skip matrices."""
    types: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, jpmhc.HyperConnection):
            module.mixer.register_forward_hook(lambda _, args, skip: types.add(skip.dtype))
    return types


def train_with_trainer(folder: Path) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    class OurTrainer(Trainer):
        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            self.optimizer = make_optimizer(model or self.model)
            return self.optimizer

    model = make_model()
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
        num_train_epochs=EPOCHS,
        lr_scheduler_type="constant",
        learning_rate=RATE,
        max_grad_norm=0,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    OurTrainer(model, arguments, train_dataset=Rows()).train()
    return model


def train_with_lightning(folder: Path, sharded: bool = False) -> nn.Module:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def configure_model(self) -> None:
            if sharded:
                mesh = self.device_mesh["data_parallel"]
                jpmhc.shard_connections(self.model, mesh=mesh)
                fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model)

    module, processes = Module(), int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1) if sharded else "ddp",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_batches())
    return module.model


def train_sharded_with_lightning(folder: Path) -> nn.Module:
    return train_with_lightning(folder, sharded=True)


ENGINES = {
    "alone": train_alone,
    "accelerate": train_with_accelerate,
    "accelerate-bfloat16": train_with_accelerate_in_bfloat16,
    "transformers": train_with_trainer,
    "lightning": train_with_lightning,
    "lightning-sharded": train_sharded_with_lightning,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    engine, folder = sys.argv[1], Path(sys.argv[2])
    model = ENGINES[engine](folder)
    torch.save(
        {name: full(value) for name, value in model.state_dict().items()}, folder / f"{engine}-{os.environ['RANK']}.pt"
    )
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 sometimes aborts while Python takes such a process down
