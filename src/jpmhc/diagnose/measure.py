"""diagnose: measure a model's Jacobian and its layers, and compare them with the theory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.diagnose.compare import PROBES, TheoryComparison, compare_token, draw_vectors
from jpmhc.diagnose.diagnosis import Diagnosis
from jpmhc.diagnose.jacobian import Jacobian, LinearisedMap, linearise, shared_positions
from jpmhc.diagnose.layers import LayerMeasurement, measure_gain, measure_gradients, measure_streams
from jpmhc.diagnose.methods import (
    SVD_SECONDS,
    Method,
    Part,
    describe_bytes,
    describe_time,
    measure_matrix,
    measure_quadrature,
    plan_part,
    spectrum_of,
)
from jpmhc.diagnose.record import Recording, find_layers, longest_chain, record_layers
from jpmhc.diagnose.run import (
    Ends,
    borrow_model,
    check_model,
    find_ends,
    find_inner_model,
    fit_batch,
    read_arguments,
    record_graph,
    run_between,
)
from jpmhc.diagnose.shared_modes import SharedModes, find_modes, multiply_all
from jpmhc.diagnose.spectrum import Spectrum

# The share of the time limit that each kind of measurement may use.
_SHARES = {"whole": 0.4, "tokens": 0.15, "layers": 0.25, "sublayers": 0.2}
# The number of random vectors for gains and gradients, and the largest n d for which sublayers are rotated.
_VECTORS = 4
_WIDEST = 3072
# A measurement of one token may take this many seconds even if the time limit is lower.
_BEARABLE = 10.0


def diagnose(
    model: nn.Module,
    inputs: Any,
    between: Sequence[str | None] | None = None,
    *,
    method: Method = "auto",
    tokens: int = 2,
    probes: int = 4,
    steps: int = 64,
    seconds: float = 120.0,
    seed: int = 0,
    say: Callable[[str], None] | None = print,
    progress: Callable[[str, float], None] | None = None,
) -> Diagnosis:
    """Measure the singular values of a model's Jacobian at real inputs, and compare them with the theory.

    The model may be any module: a plain network, a Hugging Face model, a model with hyper-connections. It is measured
    in its current mode (eval or train), in float32 at least. Its weights, gradients and buffers and the state of the
    random numbers do not change. The plan, with time and memory, is printed before the measurement begins.

    Args:
        model: The model.
        inputs: The arguments of the model's call: a tensor, a tuple of arguments, or a dict of arguments.
        between: The names of two modules; the map leads from the output of the first to the output of the second. None
            instead of a name means the model's input or output. Integer inputs are differentiated at the embeddings.
        method: "dense" (every row by a backward pass), "lanczos" (quadrature from random vectors, with error bars), or
            "auto": dense if it fits into memory and time.
        tokens: The number of single tokens to measure, evenly spaced.
        probes: The number of random vectors of Lanczos quadrature.
        steps: The number of Lanczos steps per random vector.
        seconds: The time limit; longer measurements are shortened or left out, with a note.
        seed: The seed of the random vectors.
        say: Called with each sentence of the plan; None for silence.
        progress: Called with the name of the current measurement and the finished share of that measurement.

    Returns:
        The diagnosis, to print or to read by its attributes; the attribute `verdict` is five sentences.

    Example:
        >>> import jpmhc, torch
        >>> blocks = [jpmhc.HyperConnection(torch.nn.Linear(8, 8), 8, index=index) for index in range(2)]
        >>> model = jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True)
        >>> diagnosis = jpmhc.diagnose(model, torch.randn(1, 3, 8), tokens=1, say=None)
        >>> len(diagnosis.verdict), len(diagnosis.layers), diagnosis.whole.shape
        (5, 2, (24, 24))
    """
    checks.choice(method, get_args(Method), "method")
    for name, value in (("tokens", tokens), ("probes", probes), ("steps", steps)):
        checks.whole_number(value, name)
    checks.positive_number(seconds, "seconds")
    begun = time.perf_counter()
    model = find_inner_model(model)
    arguments = read_arguments(inputs)
    check_model(model, arguments)
    speak = say or (lambda sentence: None)
    with borrow_model(model) as call:
        ends = find_ends(model, arguments, between, call)
        shortened = fit_batch(model, ends, call)
        work = _Work(model, call, ends, method, probes, steps, seconds, seed, progress)
        work.notes += shortened
        work.plan(tokens)
        for line in work.describe_plan():
            speak(line)
        whole = work.measure(work.whole, Jacobian(work.at))
        token_spectra = {
            position: work.measure(part, Jacobian(work.at, position)) for position, part in work.tokens.items()
        }
        streams = measure_streams(work.chain) if work.chain and work.chain[0].coefficients is not None else None
        comparisons = [work.compare(position) for position in work.layer_positions]
        layers, modes = work.measure_layers(comparisons)
    mode = "train" if model.training else "eval"
    return Diagnosis(
        model=f"{type(model).__name__} in {mode} mode",
        start=ends.start_name,
        stop=ends.stop_name,
        gain=_signal_gain(work.at),
        whole=whole,
        tokens=token_spectra,
        layers=layers,
        streams=streams,
        comparisons=comparisons,
        modes=modes,
        parts=work.all_parts(),
        positions=math.prod(work.at.positions),
        notes=work.notes,
        seconds=time.perf_counter() - begun,
    )


class _Work:
    """The state of a running diagnosis: the model's graph, the planned measurements, and the notes."""

    def __init__(
        self,
        model: nn.Module,
        call: Callable[..., Any],
        ends: Ends,
        method: str,
        probes: int,
        steps: int,
        seconds: float,
        seed: int,
        progress: Callable[[str, float], None] | None,
    ) -> None:
        self.model, self.call, self.ends = model, call, ends
        self.method, self.probes, self.steps, self.seconds, self.seed = method, probes, steps, seconds, seed
        self.progress = progress
        self.notes: list[str] = []
        self.found_layers = find_layers(model)
        x, y, calls, self.saved = record_graph(model, self.found_layers, ends, call)
        # If the map begins inside a layer, a part of that layer does not depend on the map's input.
        self.calls = [call for call in calls if call.before.requires_grad and call.output.requires_grad]
        name = f"from {ends.start_name} to {ends.stop_name}"
        self.at = linearise(lambda start: run_between(ends, call, start)[1], x, y, self._positions(x, y), name, seed)
        self.chain = longest_chain(self.calls)
        self.whole = self._plan_part("the whole map", Jacobian(self.at), "whole")
        self.tokens: dict[int, Part] = {}
        self.layers_at: LinearisedMap | None = None
        self.layer_positions: dict[int, Part] = {}
        self.rotating, self.rotating_seconds = False, 0.0
        if self.at.forward == "central differences":
            self.notes.append("an operation of the model has no forward mode: J v is taken by central differences")
        if min(x.dtype.itemsize, y.dtype.itemsize) < 4:
            self.notes.append(f"the model itself computes in {y.dtype}: singular values are good to two digits")
        if not self.at.batched:
            self.notes.append("an operation of the model cannot be batched: gradients are taken one by one")

    def _positions(self, x: Tensor, y: Tensor) -> tuple[int, ...]:
        n = max((call.streams for call in self.calls), default=1)
        if n > 1 and x.shape == y.shape and x.ndim > 2 and x.shape[-2] == n:
            return tuple(x.shape[:-2])  # x and y are streams, and all streams of a token form one position
        return shared_positions(x, y)

    def _run_layers(self, start: Tensor) -> Tensor:
        """Run the model with `start` as the streams before the first layer; return the streams after the last layer."""
        recording = Recording(replacement=(self.chain[0].number, start))
        with record_layers(self.model, self.found_layers, recording):
            run_between(self.ends, self.call, self.at.x.detach())
        last = self.chain[-1].number
        return next(call.after for call in recording.calls if call.number == last)

    def plan(self, tokens: int) -> None:
        """Choose the measurements, and a method for each."""
        if math.prod(self.at.positions) > 1:
            self.tokens = self._plan_tokens("token", self.at, "tokens", tokens)
        if not self.chain:
            return
        first, last = self.chain[0].before, self.chain[-1].after
        positions = self.chain[0].positions
        name = f"from {self.chain[0].name} to {self.chain[-1].name}"
        self.layers_at = linearise(self._run_layers, first, last, positions, name, self.seed)
        self.layer_positions = self._plan_tokens("all layers at token", self.layers_at, "layers", tokens)
        width = self.chain[0].inside.shape[-1]
        wide = width * self.chain[0].streams
        # seconds for the rows of every sublayer's Jacobian, and for the decomposition of the rotated layers
        cost = len(self.layer_positions) * (width * self.at.seconds["row"] + SVD_SECONDS * wide**3)
        # Rotation needs sublayers that map vectors of `width` at each token, which sublayers on images do not.
        plain = math.prod(positions) * width == self.chain[0].inside.numel()
        self.rotating = plain and wide <= _WIDEST and 0 < cost < _SHARES["sublayers"] * self.seconds
        self.rotating_seconds = cost if self.rotating else 0.0
        if not self.rotating and self.layer_positions:
            why = f"their matrices would take {describe_time(cost)} (a larger seconds= allows it)"
            if not plain:
                why = "they have no matrix at a single position"
            elif wide > _WIDEST:
                why = f"their matrices have more than {_WIDEST} rows"
            self.notes.append(
                f"the sublayers' gains and shared modes are estimated from random vectors, and sublayers are not "
                f"rotated: {why}"
            )
        if len({getattr(call.module, "sublayer", call.module) for call in self.chain}) < len(self.chain):
            self.notes.append(
                "some layers share their weights: they show as shared modes, and the free theory assumes independent "
                "ones; spectra.Network(..., tied=labels) has the law for shared weights"
            )
        if len(self.chain) < len(self.calls):
            self.notes.append(
                f"of {len(self.calls)} calls of layers the theory follows {len(self.chain)}, {name}: the longest run "
                "in which each layer gets the output of the one before, unchanged"
            )

    def _plan_tokens(self, name: str, at: LinearisedMap, share: str, tokens: int) -> dict[int, Part]:
        """Plan the measurement of single tokens, evenly spaced, and return the plans by the token's number.

        If one token would exceed the time limit, add a note and plan no token.

        Args:
            name: The beginning of the names of the measurements.
            at: The map, whose Jacobian's blocks for single tokens are measured.
            share: The key in `_SHARES` of these measurements' share of the time limit.
            tokens: The number of tokens.
        """
        positions = _spread(tokens, math.prod(at.positions))
        parts = {
            position: self._plan_part(f"{name} {position}", Jacobian(at, position), share, len(positions))
            for position in positions
        }
        cost = max(part.seconds for part in parts.values())
        if self.method == "auto" and cost > max(self.seconds, _BEARABLE):
            self.notes.append(
                f"single tokens would take {describe_time(cost)} each and are left out ({name} …): raise seconds="
            )
            return {}
        return parts

    def _plan_part(self, name: str, jacobian: Jacobian, share: str, among: int = 1) -> Part:
        seconds = self.seconds * _SHARES[share] / among
        return plan_part(name, jacobian, self.saved, seconds, self.method, self.probes, self.steps)

    def all_parts(self) -> list[Part]:
        """Return all planned measurements."""
        return [self.whole, *self.tokens.values(), *self.layer_positions.values()]

    def describe_plan(self) -> list[str]:
        """Return one sentence per measurement, and a sentence with the total time and memory."""
        parts = self.all_parts()
        total = sum(part.seconds for part in parts) + self.rotating_seconds
        memory = self.saved + max(part.bytes for part in parts)
        lines = [f"from {self.ends.start_name} to {self.ends.stop_name}", *map(str, parts)]
        if self.calls:
            # random vectors through all layers and through each layer alone, and again at tokens without rotation
            passes = 2 * _VECTORS + (0 if self.rotating else PROBES * len(self.layer_positions))
            seconds = passes * self.at.seconds["backward"]
            total += seconds
            sketches = _VECTORS * sum(call.output.numel() * call.output.dtype.itemsize for call in self.calls)
            lines.append(
                f"gradients, gains and shared modes of {len(self.calls)} layers from random vectors, about "
                f"{describe_time(seconds)} and {describe_bytes(sketches)}"
            )
        if self.rotating:
            depth, streams, width = len(self.chain), self.chain[0].streams, self.chain[0].inside.shape[-1]
            # bytes of the sublayers' matrices, their stack and rotated copies, and of four matrices of all streams
            matrices = 8 * (4 * depth * width**2 + 4 * (streams * width) ** 2)
            memory = max(memory, self.saved + matrices)
            lines.append(
                "the Jacobian of every sublayer at those tokens and its shared modes, about "
                f"{describe_time(self.rotating_seconds)} and {describe_bytes(matrices)}"
            )
        return [*lines, f"in all about {describe_time(total)} and {describe_bytes(memory)} with the model's own graph"]

    def measure(self, part: Part, jacobian: Jacobian) -> Spectrum:
        """Measure the spectrum of one Jacobian as planned."""
        if part.method == "dense":
            return spectrum_of(measure_matrix(jacobian, part.chunk, self._count(part)))
        return measure_quadrature(jacobian, part.probes, part.steps, self.seed, self._count(part))

    def _count(self, part: Part) -> Callable[[int], None]:
        done = 0

        def count(products: int) -> None:
            nonlocal done
            done += products
            if self.progress is not None:
                self.progress(part.name, done / part.products)

        count(0)
        return count

    def measure_layers(
        self, comparisons: Sequence[TheoryComparison]
    ) -> tuple[list[LayerMeasurement], SharedModes | None]:
        """Measure each layer's gain, gradient and streams, and the layers' shared modes (see shared_modes.py).

        Args:
            comparisons: The comparisons at single tokens; the mean of their predicted gradients is each layer's
                prediction.
        """
        if not self.calls:
            return [], None
        gradients = measure_gradients(
            self.calls, self.at.y, draw_vectors(_VECTORS, self.at.y.numel(), self.at.y, self.seed + 1)
        )
        layers, sketches = [], {}
        for call, gradient in zip(self.calls, gradients):
            vectors = draw_vectors(_VECTORS, call.output.numel(), self.at.y, self.seed + 2)
            skip, gain, sketches[call.number] = measure_gain(call, vectors)
            streams = measure_streams([call]) if call.coefficients is not None else None
            similarity = float(streams.similarity[0]) if streams else 1.0
            dominance = float(streams.dominance[0]) if streams else 1.0
            layers.append(LayerMeasurement(call.name, skip, gain, gradient, similarity, dominance))
        modes = None
        if len(self.chain) > 1:
            chain = torch.stack([sketches[call.number] for call in self.chain])
            modes = find_modes(multiply_all(chain).double(), chain[0].numel())
        if not comparisons:
            return layers, modes
        rows = {call.number: row for row, call in enumerate(self.calls)}
        predicted = torch.stack([item.gradients for item in comparisons]).mean(0)
        # The theory ends at the last layer, so its gradients are scaled to the measured gradient of that layer.
        predicted = predicted * (layers[rows[self.chain[-1].number]].gradient / predicted[-1])
        for call, value in zip(self.chain, predicted.tolist()):
            layers[rows[call.number]] = replace(layers[rows[call.number]], predicted=value)
        return layers, modes

    def compare(self, position: int) -> TheoryComparison:
        """Measure the map through all layers at one token, and compare it with the theory."""
        assert self.layers_at is not None
        part = self.layer_positions[position]
        return compare_token(
            self.chain,
            Jacobian(self.layers_at, position),
            part,
            all_streams=self.at.y.shape == self.chain[-1].after.shape,
            by_matrices=self.rotating,
            seed=self.seed,
            progress=self._count(part),
        )


def _spread(count: int, among: int) -> list[int]:
    """Return `count` evenly spaced numbers below `among`, including the last one."""
    count = min(count, among)
    return [among * (number + 1) // count - 1 for number in range(count)]


def _signal_gain(at: LinearisedMap) -> float:
    """Return the output's root mean square divided by the input's; 1 if either is zero."""
    x, y = (float(tensor.detach().double().square().mean().sqrt()) for tensor in (at.x, at.y))
    return y / x if x > 0 and y > 0 else 1.0
