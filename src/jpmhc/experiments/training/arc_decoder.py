"""Training of the ARC decoder: a run's steps and checkpoint.

A step trains on one pack, a row of several sequences. It depends only on its number and the previous state: the
numbers of the epoch and of the pack in the epoch determine the pack, and every step seeds the generator of dropout. So
a resumed run gives the same bits as an uninterrupted one.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from jpmhc.connections import parameter_groups
from jpmhc.experiments.models.arc_decoder import ArcDecoder, RotaryAttention, make_mask, packed_loss
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.arc import Arc
from jpmhc.experiments.tasks.arc.sequences import Pack, PackedPairs
from jpmhc.experiments.training.config import FREE, ArcDecoderRun
from jpmhc.experiments.training.contents import Content, explaining_misfit, load_content
from jpmhc.experiments.training.prefetch import prefetch
from jpmhc.files import replacing
from jpmhc.machine import record_graph
from jpmhc.optim import NorMuon
from jpmhc.optim.base import ParameterGroup

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
    """A decoder for a number of `puzzles`, and its loss function, which is compiled if `run.compile` asks for it."""

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

    `compiled` is the attribute `loss` of an earlier training with equal model settings and tokens per step. It is
    reused with new initial weights, which saves the compilation.
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
        """Yield the epoch and the number in the epoch of each remaining pack of the run."""
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
        """Run the part of a training step that a CUDA graph can record; return the loss and the gradient's norm. [2]"""
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
        for name in FREE:
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
    """A CUDA graph of the device's operations in one training step; every step of the run replays it."""

    def __init__(self, training: Training) -> None:
        self.pack = training.pairs.pack(training.epoch, training.index).to(training.device)
        self.graph, self.sums = record_graph(lambda: training.compute(self.pack), training.tensors, training.device)

    def replay(self, pack: Pack) -> Tensor:
        """Train on a pack; return the loss and the gradient's norm in a tensor that the next step overwrites. [2]"""
        for name, tensor in vars(pack).items():
            getattr(self.pack, name).copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.sums


def make_optimizers(run: ArcDecoderRun, model: ArcDecoder, recorded: bool = False) -> list[torch.optim.Optimizer]:
    """Return NorMuon for the matrices of attention and feed-forward layers, and AdamW for all other parameters.

    With `recorded`, learning rates are tensors on the device, so that a CUDA graph can record the steps.
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
    rest: list[ParameterGroup] = [{"params": light, "weight_decay": run.light_weight_decay}]
    for group in parameter_groups(model, run.weight_decay):
        if others := [parameter for parameter in group["params"] if id(parameter) not in known]:
            rest.append({**group, "params": others})
    adam = torch.optim.AdamW(rest, run.other_lr, (0.9, 0.95), fused=model.tokens.is_cuda, capturable=recorded)
    optimizers = [NorMuon(matrices, run.lr), adam]
    if recorded:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = torch.tensor(group["lr"], device=model.tokens.device)
    return optimizers


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> Content:
    """Read a decoder's checkpoint; raise a ValueError if the file is something else."""
    if not path.is_file():
        raise ValueError(f"there is no checkpoint of an ARC decoder at {path}")
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
