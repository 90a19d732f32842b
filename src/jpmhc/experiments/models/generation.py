"""Generation of an ARC decoder's answers to many prompts at once.

A generator has a fixed number of slots, each with a cache of keys and values for one prompt and its answer. All slots
write one token per step; on CUDA a step is one recorded graph. When answers are finished, the next prompts take the
free slots, so that short answers never wait for a long one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jpmhc import checks
from jpmhc.experiments.models.arc_decoder import ArcDecoder
from jpmhc.experiments.models.layers import Linear
from jpmhc.experiments.tasks.arc.puzzles import COLOURS, LARGEST
from jpmhc.experiments.tasks.arc.sequences import (
    END,
    IN_OUTPUT,
    IN_SEPARATOR,
    LONGEST_GRID,
    NO_LABEL,
    ROW_END,
    SEPARATOR,
    VOCABULARY,
    Sequences,
)
from jpmhc.machine import free_memory, record_graph

LONGEST_ANSWER = LONGEST_GRID + 1  # tokens, including the end token
_STEPS = 16  # steps between checks for finished answers, which wait for the device
_PROMPT_TOKENS = 2**16  # most tokens of prompts that are read together, including padding
_REFILL = 16  # prompts take free slots as soon as one slot in 16 is free


@dataclass(frozen=True)
class WrittenTokens:
    """The tokens of a generator's answers, before they are read as grids."""

    tokens: np.ndarray  # [B, N] uint8
    counts: np.ndarray  # [B] tokens of each answer, including the end token
    confidence: np.ndarray  # [B] geometric mean of the probabilities of the tokens written
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The number of tokens written per second."""
        return float(self.counts.sum()) / self.seconds


def prepare_answering(model: ArcDecoder) -> ArcDecoder:
    """Return a copy of a model for generation: without dropout, and with weights in the type of the activations."""
    with model.tokens.device:
        answering = ArcDecoder(model.config, len(model.puzzles))
    answering.load_state_dict(model.state_dict())
    for module in answering.modules():
        if isinstance(module, Linear):
            module.weight.data = module.weight.data.to(model.dtype)
    return answering.eval().requires_grad_(False)


class Generator:
    """A generator of greedy answers to many prompts at the same time.

    Args:
        model: A model from `prepare_answering`.
        slots: Number of prompts that are answered at the same time.
        capacity: Largest number of tokens of a prompt and its answer together.
    """

    def __init__(self, model: ArcDecoder, slots: int, capacity: int) -> None:
        checks.whole_number(slots, "slots")
        config = model.config
        self.model, self.slots, self.capacity = model, slots, capacity
        self.device = device = model.tokens.device
        shape = (config.layers, slots, config.heads, capacity, config.dim // config.heads)
        if device.type == "cuda":
            free, each = free_memory(device), 2 * model.dtype.itemsize * int(np.prod(shape)) // slots
            if slots * each > 0.9 * free:
                raise ValueError(f"{slots} slots of {each / 2**20:.0f} MiB do not fit: choose {int(0.8 * free / each)}")
        self.keys, self.values = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
        self.vectors = torch.zeros(slots, config.dim, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self.token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.coordinates = torch.zeros(slots, 3, dtype=torch.int64, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self.log_probability = torch.zeros(slots, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.written = torch.zeros(slots, LONGEST_ANSWER, dtype=torch.uint8, device=device)
        allowed = torch.zeros(VOCABULARY, dtype=torch.bool, device=device)
        allowed[:COLOURS] = allowed[ROW_END] = allowed[END] = True
        self.forbidden = torch.where(allowed, 0.0, -torch.inf)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequences,
        progress: Callable[[int, int], None] = lambda done, total: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> WrittenTokens | None:
        """Write an answer to every prompt; prompts are sequences without an output grid.

        `progress` is called with the number of finished answers and the number of prompts. `stop` is called every few
        tokens; if it returns True, the method returns None.
        """
        start, total = time.monotonic(), len(prompts)
        if total and prompts.lengths.max() + LONGEST_ANSWER > self.capacity:
            raise ValueError(
                f"a prompt has {prompts.lengths.max()} tokens and its answer up to {LONGEST_ANSWER}, which do not fit "
                f"into {self.capacity}"
            )
        waiting = list(np.argsort(-prompts.lengths, kind="stable")[::-1])  # taken from the end, the longest first
        tokens, counts = np.zeros((total, LONGEST_ANSWER), np.uint8), np.zeros(total, np.int64)
        confidence = np.zeros(total)
        owner = np.full(self.slots, -1)  # the prompt in each slot
        while waiting or (owner >= 0).any():
            done = self.done.cpu().numpy()
            ended = np.flatnonzero(done & (owner >= 0))
            if len(ended):
                at = torch.from_numpy(ended).to(self.device)
                tokens[owner[ended]] = self.written[at].cpu().numpy()
                counts[owner[ended]] = self.counts[at].cpu().numpy()
                mean = self.log_probability[at].double() / self.counts[at]
                confidence[owner[ended]] = mean.exp().cpu().numpy()
                owner[ended] = -1
                progress(total - len(waiting) - int((owner >= 0).sum()), total)
            free = np.flatnonzero(owner < 0)
            while waiting and len(free) * _REFILL >= self.slots:
                together = max(1, _PROMPT_TOKENS // int(prompts.lengths[waiting[-1]]))  # that are read at once
                chosen = [waiting.pop() for _ in range(min(len(free), len(waiting), together))]
                owner[free[: len(chosen)]] = chosen
                self._read(prompts, np.array(chosen), torch.from_numpy(free[: len(chosen)]).to(self.device))
                free = free[len(chosen) :]
            if stop():
                return None
            if (owner >= 0).any():
                self._run_steps()
        return WrittenTokens(tokens, counts, confidence, time.monotonic() - start)

    def _read(self, prompts: Sequences, chosen: np.ndarray, slots: Tensor) -> None:
        """Fill the caches of `slots` with the prompts numbered `chosen`; each slot's next token is the separator."""
        tokens, coordinates, _ = (t.to(self.device) for t in pad(prompts, chosen))
        longest = tokens.shape[1]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer][slots, :, :longest] = k.transpose(1, 2)
            self.values[layer][slots, :, :longest] = v.transpose(1, 2)
            return attend_causally(layer, q, k, v)

        vectors = _vectors(self.model, prompts, chosen)
        self.model.hidden(self.model.embed(tokens, vectors[:, None]), coordinates, attend)
        self.vectors[slots] = vectors
        self.lengths[slots] = torch.from_numpy(prompts.lengths[chosen].astype(np.int32)).to(self.device)
        self.token[slots] = SEPARATOR
        self.coordinates[slots] = torch.tensor([IN_SEPARATOR, 0, 0], device=self.device)
        self.counts[slots] = 0
        self.log_probability[slots] = 0.0
        self.done[slots] = False

    def _run_steps(self) -> None:
        if self.device.type == "cuda" and self.graph is None:
            names = ("lengths", "token", "coordinates", "counts", "log_probability", "done", "written")
            self.graph, _ = record_graph(self._step, lambda: {n: getattr(self, n) for n in names}, self.device)
        for _ in range(_STEPS):
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()

    def _step(self) -> None:
        """Run the model on each slot's newest token and write the next token."""
        model = self.model
        x = model.embed(self.token, self.vectors)
        hidden = model.hidden(x, self.coordinates, self._attend)
        log_probabilities = F.log_softmax(model.logits(hidden) + self.forbidden, dim=-1)
        best, following = log_probabilities.max(-1)
        active = ~self.done
        at = self.counts.clamp(max=LONGEST_ANSWER - 1)[:, None]
        former = self.written.gather(1, at)
        self.written.scatter_(1, at, torch.where(active[:, None], following[:, None].to(torch.uint8), former))
        self.log_probability += torch.where(active, best, 0.0)
        self.counts += active
        part, row, column = self.coordinates.unbind(-1)
        ends, starts = self.token == ROW_END, self.token == SEPARATOR
        row = torch.where(starts, 0, row + ends)
        column = torch.where(starts | ends, 0, column + 1)
        outside = ((row >= LARGEST) & (following != END)) | (column > LARGEST) | (self.counts >= LONGEST_ANSWER)
        self.lengths.copy_(torch.where(self.done, 0, self.lengths + 1))
        self.done |= (following == END) | outside
        self.coordinates.copy_(torch.stack([torch.full_like(part, IN_OUTPUT), row, column], -1))
        self.token.copy_(following)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        if self.device.type == "cuda":
            from jpmhc.kernels.cached_attention import attend_to_cache  # Triton is not there on every platform

            return attend_to_cache(q, k, v, keys, values, self.lengths)
        rows, lengths = torch.arange(len(q)), self.lengths.long()
        keys[rows, :, lengths], values[rows, :, lengths] = k, v
        longest = int(lengths.max()) + 1
        seen = torch.arange(longest) <= lengths[:, None]
        y = F.scaled_dot_product_attention(
            q[:, :, None], keys[:, :, :longest], values[:, :, :longest], attn_mask=seen[:, None, None]
        )
        return y[:, :, 0]


def attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of each position to itself and to earlier positions. [B, S, heads, head_dim]"""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, S, head_dim]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def pad(sequences: Sequences, chosen: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [B, S], coordinates [B, S, 3] and labels [B, S] of the `chosen` sequences, padded to one length."""
    lengths = sequences.lengths[chosen]
    inside = np.arange(lengths.max()) < lengths[:, None]
    at = (sequences.starts[:-1][chosen][:, None] + np.arange(lengths.max()))[inside]
    tokens = np.zeros(inside.shape, np.int64)
    coordinates = np.zeros((*inside.shape, 3), np.int64)
    labels = np.full(inside.shape, NO_LABEL, np.int64)
    tokens[inside], coordinates[inside] = sequences.tokens[at], sequences.coordinates[at]
    labels[inside] = sequences.labels[at]
    return torch.from_numpy(tokens), torch.from_numpy(coordinates), torch.from_numpy(labels)


def _vectors(model: ArcDecoder, sequences: Sequences, chosen: np.ndarray) -> Tensor:
    numbers = (torch.from_numpy(t[chosen]).to(model.tokens.device) for t in (sequences.puzzles, sequences.symmetries))
    return model.vectors(*numbers)


@torch.no_grad()
def measure_losses(model: ArcDecoder, sequences: Sequences) -> np.ndarray:
    """Return the mean cross-entropy in nats of each sequence's labels, [B]; sequences must contain output grids."""
    device = model.tokens.device
    losses = np.zeros(len(sequences))
    order = np.argsort(-sequences.lengths, kind="stable")
    while len(order):
        chosen = order[: max(1, _PROMPT_TOKENS // int(sequences.lengths[order[0]]))]
        order = order[len(chosen) :]
        tokens, coordinates, labels = (t.to(device) for t in pad(sequences, chosen))
        x = model.embed(tokens, _vectors(model, sequences, chosen)[:, None])
        logits = model.logits(model.hidden(x, coordinates, attend_causally))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="none")
        sums = each.view(labels.shape).double().sum(1) / (labels != NO_LABEL).sum(1).clamp(min=1)
        losses[chosen] = sums.cpu().numpy()
    return losses
