"""Training of the ARC decoder: a run's configuration, steps and checkpoint.

A step is a pure function of its number and the previous state: an epoch and a pack number decide the pack, and every
step seeds the generator of dropout. So a resumed run gives the same bits as an uninterrupted one.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from jpmhc import checks
from jpmhc.connections import parameter_groups
from jpmhc.experiments.models.arc_decoder import ArcDecoder, ArcDecoderConfig, RotaryAttention
from jpmhc.experiments.models.packed_attention import make_mask, packed_loss
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.arc import Arc, ArcConfig
from jpmhc.experiments.tasks.arc.sequences import Pack, PackedPairs
from jpmhc.experiments.training.config import restore
from jpmhc.experiments.training.contents import explaining_misfit, load_content
from jpmhc.experiments.training.prefetch import prefetch
from jpmhc.files import parse_json, replacing
from jpmhc.optim import NorMuon

FORMAT = "jpmhc ARC decoder 1"
CHECKPOINT = "decoder.pt"
_ENTRIES: dict[str, tuple[type, ...]] = {
    "format": (str,),
    "run": (str,),
    "fingerprint": (str,),
    "model": (dict,),
    "optimizers": (list,),
    "progress": (tuple,),
    "curves": (dict,),
    "sums": (Tensor,),
}
_SEED = 220  # a word of the random numbers' keys
_COUNTS = ("epochs", "tokens", "log_every", "slots", "evaluate_variants", "threads")
_INTERVALS = {
    "[0, inf)": ("lr", "other_lr", "weight_decay", "light_weight_decay"),
    "(0, inf)": ("clip", "minutes", "save_minutes"),
    "[0, 1]": ("warmup", "decay"),
}


@dataclass(frozen=True)
class ArcDecoderRun:
    """The settings of a training run of the ARC decoder and its final evaluation."""

    preset: Literal["arc-decoder", "arc-decoder-long", "arc-decoder-tiny"] = "arc-decoder"
    """The preset of all other defaults."""
    task: ArcConfig = field(default_factory=lambda: ArcConfig(augmentations=80, keep_answer_colours=True))
    """The puzzles and their variants."""
    model: ArcDecoderConfig = field(default_factory=ArcDecoderConfig)
    """The model; its fields are options without the prefix "model."."""
    epochs: int = 90
    """Number of times that training sees every pair, each time in a random variant."""
    tokens: int = 12_288
    """Tokens per step, into which several pairs are packed."""
    predict_inputs: bool = True
    """Whether training also predicts the tokens of input grids, as the public decoder does."""
    lr: float = 1.66e-3
    """Highest learning rate of NorMuon, for the matrices of attention and feed-forward layers."""
    other_lr: float = 3e-4
    """Highest learning rate of AdamW, for all other parameters."""
    weight_decay: float = 0.1
    """Decoupled weight decay of feed-forward matrices and of the projections of hyper-connections."""
    light_weight_decay: float = 0.01
    """Decoupled weight decay of attention, of the embeddings and of the last layer."""
    clip: float = 1.0
    """Norm to which larger gradients are clipped."""
    warmup: float = 0.02
    """Share of the run in which the learning rates rise."""
    decay: float = 0.2
    """Share of the run, at its end, in which the learning rates fall to zero."""
    seed: int = 0
    """Seed of initial weights, order of pairs and dropout; the task has its own seed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""
    threads: int | None = None
    """Number of CPU threads; None: PyTorch's default."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Whether to compile the step; auto: on CUDA, which needs it."""
    record: Literal["auto", "yes", "no"] = "auto"
    """Whether to record the step as a CUDA graph, so that the host need not launch its kernels; auto: on CUDA."""
    out: Path = Path("out/arc-decoder")
    """Folder of the run, for configuration, log, checkpoint and score."""
    resume: bool = False
    """Whether to resume the run in the folder."""
    minutes: float | None = None
    """Minutes after which the run saves a checkpoint and stops; --resume continues it. None: no limit."""
    save_minutes: float = 4.0
    """Minutes between checkpoints; one is always written at the end."""
    log_every: int = 50
    """Steps between lines of the log."""
    evaluate_variants: int | None = 80
    """Number of variants of each test that the final evaluation answers; None: all."""
    slots: int = 1024
    """Number of answers that are written at the same time."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            checks.optional_whole_number(getattr(self, name), name)
        for interval, names in _INTERVALS.items():
            for name in names:
                if getattr(self, name) is not None:
                    checks.inside(getattr(self, name), interval, name)
        counter.refuse_seed(self.seed)
        if self.evaluate_variants is not None and self.evaluate_variants > self.task.augmentations + 1:
            raise ValueError(
                f"evaluate_variants ({self.evaluate_variants}) must not exceed the variants that the task draws, "
                f"{self.task.augmentations} and each puzzle itself"
            )

    def rate_factor(self, progress: float) -> float:
        """Return the factor of the learning rates after a share of the run; it rises, stays at one, and falls to zero.

        >>> [ArcDecoderRun().rate_factor(progress) for progress in (0.01, 0.5, 0.9)]
        [0.5, 1.0, 0.5]
        """
        rise = progress / self.warmup if self.warmup else 1.0
        fall = (1 - progress) / self.decay if self.decay else 1.0
        return round(min(1.0, rise, fall), 12)

    def to_json(self) -> str:
        """Return the configuration as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> "ArcDecoderRun":
        """Read the configuration that `to_json` wrote."""
        return restore(cls, parse_json(text.encode()))


# Settings that may change when a run is resumed, because they do not change its result.
_FREE = (
    "preset",
    "device",
    "threads",
    "compile",
    "record",
    "slots",
    "evaluate_variants",
    "out",
    "resume",
    "minutes",
    "save_minutes",
    "log_every",
)


@dataclass(frozen=True)
class Progress:
    """The progress of a run in training."""

    epoch: int
    pack: int  # number of the next pack in this epoch
    step: int
    share: float  # finished share of the run
    loss: float | None
    gradient_norm: float | None
    tokens_per_second: float | None
    peak_bytes: int | None


def summarize(progress: Progress) -> str:
    """Return the main numbers of a step in one line."""
    peak = "" if progress.peak_bytes is None else f" · {progress.peak_bytes / 2**30:.1f} GiB"
    return (
        f"step {progress.step} · loss {progress.loss:.4f} · gradient {progress.gradient_norm:.3g} · "
        f"{progress.tokens_per_second:,.0f} tokens/s{peak}"
    )


class PackedLoss:
    """A decoder and its loss function, which is compiled on CUDA or if the run says so."""

    def __init__(self, run: ArcDecoderRun, puzzles: int, device: torch.device) -> None:
        self.model = model = ArcDecoder(run.model, puzzles).to(device)

        def loss(pack: Pack, vectors: Tensor, mask: Tensor | BlockMask) -> Tensor:
            return packed_loss(model, pack, vectors, mask)

        self._loss: Callable[[Pack, Tensor, Tensor | BlockMask], Tensor] = loss
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        if run.compile == "yes" or (run.compile == "auto" and device.type == "cuda"):
            self._loss = torch.compile(loss, dynamic=False)

    def __call__(self, pack: Pack) -> Tensor:
        """Compute the mean cross-entropy of a pack's labels."""
        return self._loss(pack, self.model.vectors(pack.puzzles, pack.symmetries), make_mask(pack))


class Training:
    """A decoder in training.

    `compiled` is a loss that was compiled for the same model and tokens per step; its model gets new initial weights.
    """

    def __init__(
        self, run: ArcDecoderRun, arc: Arc, device: torch.device, compiled: "PackedLoss | None" = None
    ) -> None:
        self.run, self.arc, self.device = run, arc, device
        if run.record == "yes" and device.type != "cuda":
            raise ValueError(f"record=yes needs a CUDA device, not {device.type}: leave it at auto")
        self.pairs = PackedPairs(arc, run.tokens, run.seed, run.predict_inputs)
        self.loss = compiled or PackedLoss(run, len(arc.puzzles), device)
        self.model = self.loss.model
        torch.manual_seed(run.seed)
        self.model.load_state_dict(ArcDecoder(run.model, len(arc.puzzles)).state_dict())
        self.model.zero_grad(set_to_none=True)
        self.records = run.record == "yes" or (run.record == "auto" and device.type == "cuda")
        self.optimizers = make_optimizers(run, self.model, self.records)
        self.rates = [[float(group["lr"]) for group in one.param_groups] for one in self.optimizers]
        self.recorded: RecordedStep | None = None
        self.epoch, self.index, self.step, self.seconds = 0, 0, 0, 0.0
        self.curves: dict[str, list[float]] = {"epoch": [], "loss": [], "gradient_norm": [], "seconds": []}
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss and gradient norm over this epoch

    @property
    def finished(self) -> bool:
        """Whether all epochs are finished."""
        return self.epoch >= self.run.epochs

    @property
    def share(self) -> float:
        """The finished share of the run, from 0 to 1."""
        if self.finished:
            return 1.0
        return (self.epoch + self.index / self.pairs.count_packs(self.epoch)) / self.run.epochs

    def train(
        self, stop: Callable[[], bool], show: Callable[[Progress], None], save: Callable[[], None] = lambda: None
    ) -> None:
        """Train until the run is finished, or until `stop`, which is called before every step, returns True.

        `show` is called with the progress every `log_every` steps, and `save` every `save_minutes` minutes.
        """
        began, steps = time.monotonic() - self.seconds, 0
        looked = saved = time.monotonic()
        self.model.train()
        if self.records and self.recorded is None and not self.finished:
            self.recorded = RecordedStep(self)
        for pack in prefetch(self._make_pack, self._remaining_packs(), ahead=1):
            if stop():
                break
            if time.monotonic() - saved > 60 * self.run.save_minutes:
                save()
                saved = time.monotonic()
            sums = self._take_step(pack)
            steps += 1
            if self.step % self.run.log_every == 0 or self.step == 1 or self.finished:
                loss, norm = sums.tolist()  # waits for the device
                if not math.isfinite(loss):
                    raise ValueError(
                        f"the loss of step {self.step} with mixer {self.run.model.mixer} is {loss}: lower --lr"
                    )
                now = time.monotonic()
                show(self._describe(loss, norm, steps * self.run.tokens / (now - looked)))
                looked, steps = now, 0
            self.seconds = time.monotonic() - began

    def _make_pack(self, position: tuple[int, int]) -> Pack:
        pack = self.pairs.pack(*position)
        return pack.pin_memory() if self.device.type == "cuda" else pack

    def _remaining_packs(self) -> Iterator[tuple[int, int]]:
        """Yield the epoch of each remaining pack of the run, and its number in the epoch."""
        first = self.index
        for epoch in range(self.epoch, self.run.epochs):
            yield from ((epoch, index) for index in range(first, self.pairs.count_packs(epoch)))
            first = 0

    def _take_step(self, pack: Pack) -> Tensor:
        """Train on one pack and return the loss and the gradient's norm, on the device. [2]"""
        run = self.run
        factor = run.rate_factor((self.epoch + (self.index + 0.5) / self._count_packs()) / run.epochs)
        for optimizer, rates in zip(self.optimizers, self.rates):
            for group, rate in zip(optimizer.param_groups, rates):
                if self.records:
                    group["lr"].fill_(factor * rate)
                else:
                    group["lr"] = factor * rate
        torch.manual_seed(int(counter.bits(run.seed, _SEED, self.step) >> 1))
        sums = self.compute(pack.to(self.device)) if self.recorded is None else self.recorded.replay(pack)
        self.step += 1
        self.index += 1
        if self.index == self._count_packs():
            means = (self._sums / self.index).tolist()
            for name, value in zip(self.curves, (self.epoch + 1, *means, self.seconds)):
                self.curves[name].append(value)
            self._sums.zero_()
            self.epoch, self.index = self.epoch + 1, 0
        return sums

    def compute(self, pack: Pack) -> Tensor:
        """Run the device's operations of a training step, and return the loss and the gradient's norm. [2]"""
        loss = self.loss(pack)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sums = torch.stack([loss.detach(), norm.detach()]).double()
        self._sums += sums
        return sums

    def tensors(self) -> dict[tuple[int | str, ...], Tensor]:
        """Return all tensors that a training step changes, by name."""
        tensors: dict[tuple[int | str, ...], Tensor] = {("sums",): self._sums}
        for name, parameter in self.model.named_parameters():
            tensors["model", name] = parameter.data
        for k, optimizer in enumerate(self.optimizers):
            for number, state in optimizer.state_dict()["state"].items():
                tensors |= {(k, number, name): value for name, value in state.items()}
        return tensors

    def _count_packs(self) -> int:
        return self.pairs.count_packs(self.epoch)

    def _describe(self, loss: float, norm: float, speed: float) -> Progress:
        cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else None
        return Progress(self.epoch, self.index, self.step, self.share, loss, norm, speed, peak)

    def save(self, path: Path) -> None:
        """Write a checkpoint with the complete state of the training."""
        content = {
            "format": FORMAT,
            "run": self.run.to_json(),
            "fingerprint": self.arc.fingerprint(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": (self.epoch, self.index, self.step, self.seconds),
            "curves": self.curves,
            "sums": self._sums,
        }
        with replacing(path) as file:
            torch.save(content, file)

    def load(self, path: Path) -> None:
        """Restore the state from a checkpoint; raise a ValueError if it has other settings or other puzzles."""
        content = read_checkpoint(path, self.device)
        saved, present = (dataclasses.asdict(run) for run in (ArcDecoderRun.from_json(content["run"]), self.run))
        for name in _FREE:
            del saved[name], present[name]
        differing = [name for name in present if saved[name] != present[name]]
        if "task" in differing and content["fingerprint"] == self.arc.fingerprint():  # files may have moved
            differing.remove("task")
        if differing:
            raise ValueError(f"{path} belongs to a run with other settings: {', '.join(differing)} differ")
        if content["fingerprint"] != self.arc.fingerprint():
            raise ValueError(f"{path} was trained on other puzzles than the ones read now")
        with explaining_misfit(path, "model"):
            self.model.load_state_dict(content["model"])
        with explaining_misfit(path, "optimizers"):
            for optimizer, state in zip(self.optimizers, content["optimizers"]):
                own = optimizer.state_dict()["param_groups"]  # made for this device; rates are set before every step
                optimizer.load_state_dict({"state": state["state"], "param_groups": own})
        self.epoch, self.index, self.step, self.seconds = content["progress"]
        self.curves, self._sums = content["curves"], content["sums"]


class RecordedStep:
    """A CUDA graph of the device's operations in a training's next step.

    Before recording, three steps compile and choose kernels. Their effect is undone, so that every step of a run is a
    replay of the graph.
    """

    def __init__(self, training: Training) -> None:
        device = training.device
        self.pack = training.pairs.pack(training.epoch, training.index).to(device)
        before = {name: tensor.clone() for name, tensor in training.tensors().items()}
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                training.compute(self.pack)
        torch.cuda.current_stream(device).wait_stream(stream)
        with torch.no_grad():
            for name, tensor in training.tensors().items():
                if name in before:
                    tensor.copy_(before[name])
                else:  # a new optimiser's state begins at zero
                    tensor.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.sums = training.compute(self.pack)

    def replay(self, pack: Pack) -> Tensor:
        """Train on a pack; return the loss and the gradient's norm in a tensor that the next step overwrites. [2]"""
        for name, tensor in vars(pack).items():
            getattr(self.pack, name).copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.sums


def make_optimizers(run: ArcDecoderRun, model: ArcDecoder, recorded: bool = False) -> list[torch.optim.Optimizer]:
    """Return NorMuon for the matrices of attention and feed-forward layers, and AdamW for all other parameters.

    Steps that are `recorded` as a CUDA graph need learning rates in tensors on the device.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, RotaryAttention)]
    attention = {id(linear.weight) for layer in layers for linear in (layer.qkv, layer.out)}
    hidden = model.hidden_matrices()
    known = {id(matrix) for matrix in hidden}
    matrices = [
        {"params": [m for m in hidden if id(m) in attention], "weight_decay": run.light_weight_decay},
        {"params": [m for m in hidden if id(m) not in attention], "weight_decay": run.weight_decay},
    ]
    light = [model.tokens, model.puzzles, model.symmetries, model.head.weight]
    known |= {id(parameter) for parameter in light}
    rest: list[dict[str, Any]] = [{"params": light, "weight_decay": run.light_weight_decay}]
    for group in parameter_groups(model, run.weight_decay):
        if others := [parameter for parameter in group["params"] if id(parameter) not in known]:
            rest.append({**group, "params": others})
    adam = torch.optim.AdamW(rest, run.other_lr, (0.9, 0.95), fused=model.tokens.is_cuda, capturable=recorded)
    optimizers = [NorMuon(matrices, run.lr), adam]
    if recorded:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = torch.tensor(group["lr"], device=model.tokens.device)
    return optimizers


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a decoder's checkpoint; raise a ValueError if the file is something else."""
    if not path.is_file():
        raise ValueError(f"saved is no checkpoint of an ARC decoder at {path}")
    content = load_content(path, _ENTRIES, device)
    if content["format"] != FORMAT:
        raise ValueError(f"{path} is not a checkpoint this version reads: its format is not {FORMAT!r}")
    return content


def load_decoder(path: Path, device: torch.device | str = "cpu") -> tuple[ArcDecoderRun, ArcDecoder, str]:
    """Load a run's configuration, its decoder and the fingerprint of its puzzles from a checkpoint."""
    content = read_checkpoint(path, device)
    run = ArcDecoderRun.from_json(content["run"])
    with explaining_misfit(path, "model"):
        model = ArcDecoder(run.model, len(content["model"]["puzzles"]))
        model.load_state_dict(content["model"])
    return run, model.to(device), content["fingerprint"]
