r"""The recursive transformer: two weight-tied blocks that are applied many times, until a learned head says stop.

One *call* of the network, :math:`f(z, u)`, adds the injection `u` to the state `z` and applies attention (or a
feed-forward layer over positions), feed-forward, attention, feed-forward. With `x` the embedded puzzle, one
*supervision step* repeats `h_cycles` times: `l_cycles` times ``z_l = f(z_l, z_h + x)``, then ``z_h = f(z_h, z_l)``.
Gradients pass through the last of the `h_cycles` only. Each supervision step ends with an answer read from `z_h`, and a
loss. The detached states enter the next supervision step, until the row halts and gets a new puzzle.

With ``mixer="identity"`` and one stream this is the Tiny Recursive Model. With another mixer or more streams, each
residual connection is a :class:`jpmhc.HyperConnection`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.checks import Count, NonNegative, Positive, Share
from jpmhc.connections import HyperConnectionStack, fused, reduce_streams
from jpmhc.experiments.models.connections import POST_NORMS, ConnectionConfig, make_connection
from jpmhc.experiments.models.layers import (
    Attend,
    Attention,
    Linear,
    NarrowLinear,
    PositionSwiGLU,
    PostNormResidual,
    PuzzleTable,
    Rotary,
    SwiGLU,
    attention,
    inner_width,
    pad_rows,
    rms_norm,
    truncated_normal_,
    widen,
)
from jpmhc.experiments.models.losses import row_losses


@dataclass(frozen=True)
class RecursiveConfig(ConnectionConfig):
    """Size, recursion and connections; the defaults are those of the public Tiny Recursive Model on ARC."""

    heads: Count = 8  # Number of attention heads.
    layers: Count = 2
    """Number of blocks of the weight-tied network; each has a layer between positions and a feed-forward layer."""
    between_positions: Literal["attention", "mlp"] = "attention"
    """The layer between positions: rotary attention, or a feed-forward layer over all positions of a row."""
    expansion: Positive = 4.0
    """Expansion of feed-forward layers: their gated inner width is two thirds of expansion · dim."""
    inner_multiple: Count = 256  # Number to whose multiples the inner width is rounded up.
    puzzle_slots: Count = 16  # Positions before the grid; the first gets the puzzle's vector, the others zeros.
    h_cycles: Count = 3  # Outer cycles per supervision step; gradients pass through the last cycle only.
    l_cycles: Count = 4  # Inner cycles per outer cycle.
    halt_max_steps: Count = 16  # Largest number of supervision steps per row; evaluation always takes this number.
    halt_exploration: Share = 0.1
    """Probability that a row may not halt before a random number of steps (from 2 to the maximum)."""
    halting_weight: NonNegative = 0.5  # Weight of the halting head's loss.
    stream_norm: Literal["stream", "layer", "call"] = "stream"
    """Normalisation of the streams. stream: each stream after every write, by an RMS norm without weights; layer: the
    same by a layer norm with weights, as in the paper's figure; call: once at the end of a call of the network."""
    stream_span: Literal["call", "recursion"] = "call"
    """Period in which streams stay separate: one call of the network, or the whole recursion, whose states then have
    streams."""
    attend: Attend = "auto"  # Attention kernel; auto leaves the choice to PyTorch.
    compute: Literal["float32", "bfloat16"] = "float32"  # Type of activations; weights are always float32.

    def __post_init__(self) -> None:
        super().__post_init__()
        if not inner_width(self.dim, self.expansion, self.inner_multiple):
            raise ValueError(f"expansion {self.expansion} leaves no inner width at dim {self.dim}: choose a larger one")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of 2 · heads = {2 * self.heads}, not {self.dim}")


def refuse_device(config: RecursiveConfig, device: torch.device) -> None:
    """Raise a ValueError if the weights exceed the machine's memory, or if the device lacks the model's kernels."""
    inner = inner_width(config.dim, config.expansion, config.inner_multiple)
    weights = config.layers * config.dim * (4 * config.dim + 3 * inner)
    checks.fits_memory(4 * weights, f"a model of {weights:.2g} weights (dim {config.dim}, layers {config.layers})")
    dtype = getattr(torch, config.compute)
    if config.attend != "auto":
        head = config.dim // config.heads
        trial = torch.zeros(1, config.heads, 16, head, dtype=dtype, device=device, requires_grad=True)
        try:
            attention(trial, trial, trial, config.attend)
        except RuntimeError as refusal:
            raise ValueError(
                f"attend={config.attend} is not possible on {device.type} in {config.compute} with heads of width "
                f"{head}: leave it at auto"
            ) from refusal
    if config.kernels == "fused":
        fused.choose_spec(make_connection(config, nn.Identity(), 0), device.type, dtype)


class Carry(NamedTuple):
    """The states and puzzles that a batch of rows carries from one supervision step to the next."""

    z_h: Tensor  # [B, T, d] or [B, T, n, d], T = puzzle slots + grid
    z_l: Tensor  # same shape as z_h
    steps: Tensor  # [B] int32, supervision steps taken on the current puzzle
    halted: Tensor  # [B] bool, rows that need a new puzzle before the next step
    inputs: Tensor  # [B, S]
    labels: Tensor  # [B, S]
    identifiers: Tensor  # [B]


class Step(NamedTuple):
    """The results of one supervision step: one entry per row, except the scalar `loss`."""

    z_h: Tensor
    z_l: Tensor
    steps: Tensor  # [B]
    halted: Tensor  # [B]
    language: Tensor  # [B] float64
    halting: Tensor  # [B]
    correct: Tensor  # [B]
    exact: Tensor  # [B] bool
    loss: Tensor  # scalar: the sum over rows of language + weight · halting


class Prediction(NamedTuple):
    """The answers to a batch of puzzles."""

    logits: Tensor  # [B, S, V]
    q_halt: Tensor  # [B] logit of "this row is exactly right"


class RecursiveCore(nn.Module):
    """The recursive model without its puzzle table: the parameters with dense gradients."""

    h_init: Tensor
    l_init: Tensor

    def __init__(self, config: RecursiveConfig, vocabulary: int, length: int) -> None:
        super().__init__()
        self.config = config
        self.positions = config.puzzle_slots + length
        self.dtype = getattr(torch, config.compute)
        self.tokens = nn.Parameter(truncated_normal_(torch.empty(vocabulary, config.dim), 1 / math.sqrt(config.dim)))
        rotary = Rotary(config.dim // config.heads, self.positions)
        sublayers: list[nn.Module] = []
        for _ in range(config.layers):
            if config.between_positions == "attention":
                sublayers.append(Attention(config.dim, config.heads, rotary, config.attend))
            else:
                sublayers.append(PositionSwiGLU(self.positions, config.expansion, config.inner_multiple))
            sublayers.append(SwiGLU(config.dim, config.expansion, config.inner_multiple))
        self.network: nn.Module
        if config.plain:
            self.network = nn.Sequential(*(PostNormResidual(sublayer) for sublayer in sublayers))
        else:
            post_norm = POST_NORMS[config.stream_norm]
            connections = (make_connection(config, layer, i, post_norm) for i, layer in enumerate(sublayers))
            self.network = HyperConnectionStack(connections, reduce=config.stream_span == "call")
        self.token_head = NarrowLinear(config.dim, vocabulary)
        # Two outputs (halt, continue), so that the parameter count is the public model's; only the first is used.
        self.q_head = Linear(config.dim, 2, bias=True)
        with torch.no_grad():
            # No row halts at the start: the halting logit is −5 for every state.
            self.q_head.weight.zero_()
            assert self.q_head.bias is not None
            self.q_head.bias.fill_(-5.0)
        self.register_buffer("h_init", truncated_normal_(torch.empty(config.dim), 1.0))
        self.register_buffer("l_init", truncated_normal_(torch.empty(config.dim), 1.0))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row of the states z_h and z_l."""
        carried = (self.config.streams,) if self.config.stream_span == "recursion" and not self.config.plain else ()
        return (self.positions, *carried, self.config.dim)

    def embed_rows(self, puzzle: Tensor, inputs: Tensor) -> Tensor:
        """Return the network's input [B, T, d]: the puzzle slots, then the tokens [B, S], all multiplied by √d.

        The first slot holds the row's vector from `puzzle` [B, d], the other slots zeros.
        """
        # A product with indicators instead of a gather. With a dozen different tokens its backward pass is one small
        # matrix product; the gather's backward pass would add hundreds of thousands of rows into a dozen.
        tokens = pad_rows(self.tokens.to(self.dtype))
        indicators = inputs[..., None] == torch.arange(len(tokens), device=inputs.device)
        grid = indicators.to(self.dtype) @ tokens
        slots = grid.new_zeros(len(grid), self.config.puzzle_slots - 1, self.config.dim)
        return math.sqrt(self.config.dim) * torch.cat((puzzle.to(self.dtype)[:, None, :], slots, grid), dim=1)

    def apply_network(self, state: Tensor, injection: Tensor) -> Tensor:
        """Return f(state, injection): one call of the network."""
        x = state + injection
        if self.config.plain:
            return self.network(x)
        if self.config.stream_span == "call":
            x = x.unsqueeze(-2)  # one stream, from which the stack starts n equal ones; it returns their mean
        x = self.network(x)
        return rms_norm(x) if self.config.stream_norm == "call" else x

    def run_cycle(self, z_h: Tensor, z_l: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run one outer cycle on the embedded puzzle x: update z_l `l_cycles` times, then z_h; return z_h and z_l."""
        for _ in range(self.config.l_cycles):
            z_l = self.apply_network(z_l, z_h + x)
        return self.apply_network(z_h, z_l), z_l

    def run_supervision_step(
        self, puzzle: Tensor, inputs: Tensor, z_h: Tensor, z_l: Tensor
    ) -> tuple[Tensor, Tensor, Prediction]:
        """Run one supervision step and return the new detached states and the prediction read from z_h.

        `puzzle` [B, d] are the rows' puzzle vectors, and `inputs` [B, S] their tokens.
        """
        x = self.embed_rows(puzzle, inputs)
        if len(self.state_shape) == 3:
            x = x[..., None, :]  # every stream of the states gets the same input
        with torch.no_grad():
            for _ in range(self.config.h_cycles - 1):
                z_h, z_l = self.run_cycle(z_h, z_l, x)
        z_h, z_l = self.run_cycle(z_h, z_l, x)
        answer = reduce_streams(z_h) if len(self.state_shape) == 3 else z_h
        logits = self.token_head(answer[:, self.config.puzzle_slots :])
        q_halt = widen(self.q_head(answer[:, 0]))[:, 0]
        return z_h.detach(), z_l.detach(), Prediction(logits, q_halt)

    def initial_states(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the initial states z_h and z_l of rows with a new puzzle, as views of two fixed vectors."""
        h, l = (init.to(self.dtype).expand(rows, *self.state_shape) for init in (self.h_init, self.l_init))
        return h, l

    def forward(
        self,
        puzzle: Tensor,  # [B, d] vectors of the rows' puzzles
        inputs: Tensor,  # [B, S] tokens
        labels: Tensor,  # [B, S] tokens to predict
        z_h: Tensor,  # [B, *state_shape]
        z_l: Tensor,  # [B, *state_shape]
        steps: Tensor,  # [B] supervision steps taken so far
        fresh: Tensor,  # [B] whether a row begins a new puzzle, so that its states and step count are reset
        minimum: Tensor,  # [B] number of steps before which a row may not halt; with 0 the halting head decides alone
    ) -> Step:
        """Run one supervision step of training: reset `fresh` rows, and compute answers, losses and halting."""
        wide = fresh.view(-1, *(1,) * len(self.state_shape))
        h_init, l_init = self.initial_states(len(fresh))
        z_h, z_l = torch.where(wide, h_init, z_h), torch.where(wide, l_init, z_l)
        z_h, z_l, prediction = self.run_supervision_step(puzzle, inputs, z_h, z_l)
        return self.score_step(z_h, z_l, prediction, labels, torch.where(fresh, 0, steps) + 1, minimum)

    def score_step(
        self, z_h: Tensor, z_l: Tensor, prediction: Prediction, labels: Tensor, steps: Tensor, minimum: Tensor
    ) -> Step:
        """Compute each row's losses, and decide which rows halt.

        `steps` [B] counts each row's supervision steps, including this one. A row cannot halt before step `minimum`
        [B].
        """
        losses = row_losses(prediction.logits, labels, prediction.q_halt)
        with torch.no_grad():
            halted = ((prediction.q_halt > 0) | (steps >= self.config.halt_max_steps)) & (steps >= minimum)
        loss = (losses.language + self.config.halting_weight * losses.halting).sum()
        return Step(z_h, z_l, steps, halted, *losses, loss)


class RecursiveModel(nn.Module):
    """The recursive model: the core and the table of puzzle vectors.

    Args:
        config: Size, recursion and connections of the model.
        vocabulary: Number of different tokens, including PAD (0).
        length: Tokens per row.
        identifiers: Number of rows of the puzzle table.
    """

    def __init__(self, config: RecursiveConfig, vocabulary: int, length: int, identifiers: int) -> None:
        super().__init__()
        for name, value in (("vocabulary", vocabulary), ("length", length), ("identifiers", identifiers)):
            checks.whole_number(value, name)
        self.config = config
        self.core = RecursiveCore(config, vocabulary, length)
        self.puzzles = PuzzleTable(identifiers, config.dim)
        self._run_step: Callable[..., tuple[Tensor, Tensor, Prediction]] = self.core.run_supervision_step

    def empty_carry(self, rows: int, length: int) -> Carry:
        """Return a carry in which every row has halted and needs a puzzle."""
        device = self.core.h_init.device
        z_h, z_l = self.core.initial_states(rows)
        tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        return Carry(
            z_h.contiguous(),
            z_l.contiguous(),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.bool, device=device),
            tokens,
            tokens.clone(),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )

    @torch.no_grad()
    def predict(
        self, inputs: Tensor, identifiers: Tensor, disturb: Callable[[Tensor], Tensor] | None = None
    ) -> Prediction:
        """Return the prediction after `halt_max_steps` supervision steps from initial states, without early halting.

        `inputs` [B, S] are tokens, and `identifiers` [B] are rows of the puzzle table. Before every step, `disturb`
        changes both states, for example by noise.
        """
        puzzle = self.puzzles(identifiers)
        z_h, z_l = self.core.initial_states(len(inputs))
        for _ in range(self.config.halt_max_steps):
            if disturb is not None:
                z_h, z_l = disturb(z_h), disturb(z_l)
            z_h, z_l, prediction = self._run_step(puzzle, inputs, z_h, z_l)
        return prediction

    def compile_prediction(self) -> None:
        """Compile the step that `predict` repeats; this takes a minute and pays off for thousands of rows."""
        self._run_step = torch.compile(self.core.run_supervision_step)


def refill_rows(carry: Carry, inputs: Tensor, labels: Tensor, identifiers: Tensor) -> Carry:
    """Return the carry with new tokens, labels and identifiers in the halted rows.

    The arguments have new puzzles for all rows; only those for halted rows are used. The flag `halted` stays set, so
    that the next step resets the states of these rows.
    """
    fresh = carry.halted
    return carry._replace(
        inputs=torch.where(fresh[:, None], inputs, carry.inputs),
        labels=torch.where(fresh[:, None], labels, carry.labels),
        identifiers=torch.where(fresh, identifiers, carry.identifiers),
    )
