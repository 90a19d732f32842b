"""A lens: the linear map from the streams after a layer to the final residual, averaged over prompts.

The final residual is the mean of the streams after the last layer, d numbers per token.

The logit lens applies the model's head to a hidden state as if no layer followed. The Jacobian lens first multiplies
the hidden state by the average derivative of the final residual with respect to the hidden state. In a model with n
streams, the derivative is with respect to all streams [d, n d]. A fitted lens has the least-squares map instead of the
derivative. The derivative misses a part of each sublayer after a norm: the norm removes the length of the hidden state,
so the sublayer's derivative in the direction of the hidden state is zero.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.diagnose.jacobian import Jacobian, LinearisedMap, linearise
from jpmhc.diagnose.methods import describe_bytes, describe_time
from jpmhc.diagnose.record import LayerCall, Recording, find_layers, longest_chain, record_layers
from jpmhc.diagnose.run import (
    borrow_model,
    check_model,
    find_ends,
    find_inner_model,
    list_names,
    read_arguments,
    record_graph,
    run_between,
)
from jpmhc.machine import free_memory

# The largest number of rows computed together, and the share of the free memory that these rows may take.
_CHUNK, _SHARE = 64, 0.4


@dataclass(frozen=True, eq=False)
class Lens:
    """The average linear map from the streams after a layer to the final residual.

    Attributes:
        layer: The layer's name.
        matrix: The average derivative of a token's final residual with respect to the token's streams, or the fitted
            map. [d, n, d]
        offset: The average final residual minus `matrix` times the average streams. [d]
        tokens: The number of tokens in the average.
    """

    layer: str
    matrix: Tensor
    offset: Tensor
    tokens: int

    def __repr__(self) -> str:
        return f"Lens({self.layer!r}, {self.matrix.shape[1]} streams of {self.matrix.shape[2]}, {self.tokens} tokens)"

    def __call__(self, streams: Tensor) -> Tensor:
        """Estimate the final residual, which the model's norm and head turn into logits, from the layer's streams.

        Args:
            streams: The streams after the layer. [..., n, d], or [..., d] for a model without hyper-connections

        Returns:
            The estimate. [..., d]
        """
        n, width = self.matrix.shape[1:]
        if n == 1 and streams.shape[-2:] != (1, width):
            streams = streams.unsqueeze(-2)
        if streams.shape[-2:] != (n, width):
            raise ValueError(f"the lens of {self.layer} reads streams [..., {n}, {width}], not {list(streams.shape)}")
        matrix = self.matrix.to(streams)
        return torch.einsum("onc,...nc->...o", matrix, streams) + self.offset.to(streams)

    def read(self, model: nn.Module, inputs: Any) -> Tensor:
        """Run the model, and estimate each token's final residual from the streams after the layer. [..., d]

        Args:
            model: The model that the lens was made for.
            inputs: The arguments of the model's call.
        """
        model = find_inner_model(model)
        args, kwargs = checks.call_arguments(inputs)
        recording = Recording()
        with torch.no_grad(), record_layers(model, find_layers(model), recording):
            model(*args, **kwargs)
        calls = [call for call in recording.calls if call.name == self.layer]
        if not calls:
            raise ValueError(f"this model has no layer {self.layer}: the lens was made for another one")
        return self(calls[0].after)

    def save(self, path: Path | str) -> Path:
        """Save the lens into a file and return the file's path."""
        path = Path(path)
        torch.save(asdict(self), path)
        return path

    @classmethod
    def load(cls, path: Path | str) -> Lens:
        """Load a lens from a file."""
        try:
            return cls(**torch.load(path, weights_only=True))
        except (KeyError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError):
            raise ValueError(f"{path} holds no lens: Lens.save writes one") from None


def lens(
    model: nn.Module,
    layer: str | int,
    prompts: Sequence[Any],
    *,
    rank: int | None = None,
    fit: bool = False,
    seed: int = 0,
    say: Callable[[str], None] | None = print,
) -> Lens:
    """Compute the average linear map from the streams after a layer to the mean of the streams after the last layer.

    The map is the average derivative of a token's final residual with respect to the token's own streams. One backward
    pass serves all tokens of a prompt: each token gets a random sign, so that derivatives with respect to other tokens
    cancel on average. The estimated time is printed during the first prompt.

    Args:
        model: A model with hyper-connections, or with a list of like layers.
        layer: A layer's name, or its number in the order of calls.
        prompts: The inputs of several calls of the model; a hundred give a good average.
        rank: Approximate the map as the mean of the streams plus a matrix of this rank, with 2 · rank products per
            prompt instead of d. None computes the map in full.
        fit: Fit the map by least squares instead, without derivatives. The fitted map predicts the final residual
            better, but shows correlations with the streams, not the effect of the streams.
        seed: The seed of the random signs and directions.
        say: Called with the estimated time; None for silence.

    Example:
        >>> import jpmhc
        >>> blocks = [jpmhc.HyperConnection(nn.Linear(8, 8), 8, index=index) for index in range(3)]
        >>> model = jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True)
        >>> prompts = [torch.randn(1, 5, 8) for _ in range(4)]
        >>> jpmhc.diagnose.lens(model, 0, prompts, say=None)
        Lens('connections.0', 4 streams of 8, 20 tokens)
    """
    if rank is not None:
        checks.whole_number(rank, "rank")
        if fit:
            raise ValueError("rank is for a lens of derivatives: leave it out with fit=True")
    if not isinstance(prompts, Sequence) or len(prompts) == 0:
        got = "an empty one" if isinstance(prompts, Sequence) else f"a {type(prompts).__name__}"
        raise ValueError(f"prompts must be a list of inputs of the model, not {got}")
    model = find_inner_model(model)
    check_model(model, read_arguments(prompts[0]))
    with borrow_model(model) as call:
        work = _Work(model, layer, call, rank, fit, seed, len(prompts), say or (lambda sentence: None))
        for prompt in prompts:
            work.add(prompt)
        if rank is not None:
            work.begin_second_pass()
            for prompt in prompts:
                work.add(prompt)
    return work.make_lens()


class _Work:
    """The sums over prompts from which a lens is computed.

    Attributes:
        sketch: For a map of low rank, in the second pass: orthonormal directions of the streams. [n d, rank]
        products: For a fitted map, the sum of x xᵀ over tokens; x [n d] are a token's streams. [n d, n d]
        energy: For a fitted map, the sum of |y|² over tokens; y [d] is a token's final residual.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: str | int,
        call: Callable[..., Any],
        rank: int | None,
        fit: bool,
        seed: int,
        prompts: int,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.layer, self.call, self.rank, self.prompts, self.say = model, layer, call, rank, prompts, say
        self.fit = fit
        self.layers = find_layers(model)
        if not self.layers:
            raise ValueError("this model has no hyper-connections and no list of layers: there is nothing to look into")
        self.generator = torch.Generator().manual_seed(seed)
        self.name, self.tokens, self.sketch, self.chunk = "", 0, torch.empty(0), 1
        self.first: LinearisedMap | None = None
        self.total, self.streams, self.final, self.directions, self.products = (torch.empty(0) for _ in range(5))
        self.energy = 0.0

    def add(self, prompt: Any) -> None:
        """Add the products of one prompt to the sums."""
        jacobian = Jacobian(self._linearise(prompt))
        at = jacobian.at
        count, width = math.prod(at.positions), at.y.shape[-1]
        streams, final = (part.detach().double().reshape(count, -1).cpu() for part in (at.x, at.y))
        if not bool(torch.isfinite(final).all()):
            raise ValueError("a prompt gives NaN or infinity after the last layer: leave it out")
        if not len(self.sketch):
            self.tokens += count
            self.streams += streams.sum(0)
            self.final += final.sum(0)
        if self.fit:
            self.total += final.mT @ streams
            self.products += streams.mT @ streams
            self.energy += float(final.square().sum())
            return
        signs = torch.randint(0, 2, (count, 1), generator=self.generator).mul(2).sub(1).to(at.y)
        if len(self.sketch):
            products = jacobian.multiply(self._spread(self.sketch.mT, signs)).reshape(-1, count, width)
        else:
            chunks = self.directions.split(self.chunk)
            rows = [jacobian.multiply_transposed(self._spread(chunk, signs)) for chunk in chunks]
            products = torch.cat(rows).reshape(len(self.directions), count, -1)
        self.total += (products * signs).sum(1).double().cpu()

    def _spread(self, rows: Tensor, signs: Tensor) -> Tensor:
        """Copy rows to every token, multiplied by the token's sign. [k, size], [tokens, 1] → [k, tokens size]"""
        return (rows.to(signs).unsqueeze(1) * signs).flatten(1)

    def begin_second_pass(self) -> None:
        """Set the sketch to the directions in which the map differs most from the mean of the streams."""
        difference = self.total / self.tokens - self._mean_streams(self.directions)
        self.sketch = torch.linalg.qr(difference.mT)[0]
        self.total = torch.zeros(len(self.directions), len(self.final), dtype=torch.float64)

    def make_lens(self) -> Lens:
        """Compute the lens from the sums over all tokens."""
        width = len(self.final)
        matrix = self.total / self.tokens  # the map [d, n d], or after a second pass (map @ sketch)ᵀ [rank, d]
        mean = self._mean_streams(torch.eye(width, dtype=torch.float64))
        if self.fit:
            products = self.products - torch.outer(self.streams, self.streams) / self.tokens
            shared = self.total - torch.outer(self.final, self.streams) / self.tokens
            energy = self.energy - float(self.final.square().sum()) / self.tokens
            rest = energy - 2 * float((shared * mean).sum()) + float(((mean @ products) * mean).sum())
            matrix = mean + fit_ridge(products, shared - mean @ products, rest, self.tokens - 1)
        elif len(self.sketch):
            matrix = mean + (matrix.mT - mean @ self.sketch) @ self.sketch.mT
        offset = (self.final - matrix @ self.streams) / self.tokens
        return Lens(self.name, matrix.reshape(width, -1, width).float(), offset.float(), self.tokens)

    def _mean_streams(self, rows: Tensor) -> Tensor:
        """Multiply rows by the matrix [d, n d] that maps all streams to their mean. [k, d] → [k, n d]"""
        n = len(self.streams) // len(self.final)
        return (rows / n).repeat(1, n)

    def _linearise(self, prompt: Any) -> LinearisedMap:
        ends = find_ends(self.model, read_arguments(prompt), None, self.call)
        _, _, calls, saved = record_graph(self.model, self.layers, ends, self.call)
        chain = longest_chain(calls)
        index = self._find(chain)
        self.name = chain[index].name
        x, last = chain[index + 1].before, chain[-1]
        final = last.after.mean(-2) if last.coefficients is not None else last.after
        positions = tuple(final.shape[:-1])

        def run(start: Tensor) -> Tensor:
            recording = Recording(replacement=(chain[index + 1].number, start))
            with record_layers(self.model, self.layers, recording):
                run_between(ends, self.call)
            after = next(call.after for call in recording.calls if call.number == last.number)
            return after.mean(-2) if last.coefficients is not None else after

        if self.fit and self.first is None:
            self.first = LinearisedMap(x, final, run, positions)
            self._plan(self.first, saved)
        if self.first is not None:
            return LinearisedMap(x, final, run, positions, self.first.forward, self.first.batched)
        self.first = linearise(run, x, final, positions, f"from {self.name} to the final residual", 0)
        self._plan(self.first, saved)
        return self.first

    def _find(self, chain: Sequence[LayerCall]) -> int:
        """Return the layer's index in the chain; raise an error if the layer is missing or the last one."""
        names = [call.name for call in chain]
        index = self.layer if type(self.layer) is int else -1
        if isinstance(self.layer, str) and self.layer in names:
            index = names.index(self.layer)
        if not 0 <= index < len(chain) - 1:
            raise ValueError(
                f"the lens needs one of the layers before the last, by name or by number from 0, not {self.layer!r}; "
                f"this model has {list_names(names) or 'none'}"
            )
        return index

    def _plan(self, at: LinearisedMap, saved: int) -> None:
        """Initialise the sums, choose the number of rows that fit into memory, and print the estimated time."""
        width, size = at.y.shape[-1], at.x.numel() // math.prod(at.positions)
        free_bytes = _SHARE * free_memory(at.y.device)
        self.chunk = max(1, min(_CHUNK, int(free_bytes / max(saved / 4, 1)))) if at.batched else _CHUNK
        self.directions = torch.eye(width, dtype=torch.float64)
        if self.rank is not None:
            self.directions = torch.randn(min(self.rank, width), width, dtype=torch.float64, generator=self.generator)
        self.total = torch.zeros(len(self.directions), size, dtype=torch.float64)
        self.streams, self.final = (torch.zeros(count, dtype=torch.float64) for count in (size, width))
        if self.fit:
            self.products = torch.zeros(size, size, dtype=torch.float64)
            self.say(f"{self.prompts} prompts, one run each: about {describe_bytes(saved + 8 * size * (size + width))}")
            return
        product = at.seconds["row"] + (at.seconds["forward"] if self.rank is not None else 0)
        rows = len(self.directions)
        memory = saved + self.chunk * saved // 4 * at.batched + 16 * rows * size
        self.say(
            f"{self.prompts} prompts of {rows} {'rows' if self.rank is None else 'rows and columns'} each: about "
            f"{describe_time(self.prompts * rows * product)} and {describe_bytes(memory)}"
        )


def fit_ridge(products: Tensor, shared: Tensor, energy: float, freedom: int) -> Tensor:
    """Fit a matrix B with y ≈ B x by ridge regression. [d, k]

    The ridge parameter minimises the generalised cross-validation error, residual / (freedom - p)², where p is the
    effective number of parameters.

    Args:
        products: The sum of x xᵀ over centred examples x [k]. [k, k]
        shared: The sum of y xᵀ over centred examples y [d]. [d, k]
        energy: The sum of |y|² over centred examples.
        freedom: The number of examples minus one.
    """
    values, vectors = torch.linalg.eigh(products)
    values, rotated = values.clamp_min(0), shared @ vectors
    best, matrix = math.inf, torch.zeros_like(shared)
    for ridge in float(values.mean()) * torch.logspace(-9, 3, 49, dtype=torch.float64) + 1e-300:
        trial = rotated / (values + ridge)
        residual = energy - 2 * float((rotated * trial).sum()) + float((trial.square() * values).sum())
        free = freedom - float((values / (values + ridge)).sum())
        if free > 1 and residual / free**2 < best:
            best, matrix = residual / free**2, trial @ vectors.mT
    return matrix
