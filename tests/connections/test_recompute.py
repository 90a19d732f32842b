"""Streams that are written again in the backward pass: the same bits, fewer tensors kept."""

import gc
import itertools
import math
import weakref
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

import jpmhc
from jpmhc.connections import eager
from jpmhc.connections.recompute import StreamKeeper, choose_starts, count_saved_states

DEPTH = 7


class Sublayer(nn.Module):
    """Counts how often it runs, and may be checkpointed."""

    def __init__(self, dim: int, checkpointed: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.checkpointed = checkpointed
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.calls is not None:
            self.calls += 1
        return checkpoint(self.body, h, use_reentrant=False) if self.checkpointed else self.body(h)


def make_stack(kernels: str = "reference", checkpointed: bool = False, **options):
    torch.manual_seed(0)
    post_norm = options.pop("post_norm", None)
    blocks = [
        jpmhc.HyperConnection(Sublayer(16, checkpointed), 16, 4, index=k, kernels=kernels, post_norm=post_norm)
        for k in range(DEPTH)
    ]
    stack = jpmhc.HyperConnectionStack(blocks, **options)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stack


def results(stack, autocast: bool = False, call=None):
    device = next(stack.parameters()).device
    x = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = (call or stack)(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in stack.parameters())]


def assert_same(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("interval", [1, 2, 3, 100, "auto"])
def test_same_bits_on_the_reference(interval):
    assert_same(results(make_stack(recompute=interval)), results(make_stack()))


@pytest.mark.parametrize("options", [{"reduce": True}, {"post_norm": "rms"}, {"checkpointed": True}])
def test_same_bits_with_options(options):
    stack = make_stack(recompute=3, **options)
    assert_same(results(stack), results(make_stack(**options)))
    assert {block.sublayer.calls for block in stack} == {1}


def test_same_bits_under_autocast():
    assert_same(results(make_stack(recompute=3), autocast=True), results(make_stack(), autocast=True))


@pytest.mark.parametrize(
    ("interval", "post_norm"), [(3, None), (3, "rms"), (3, "layer"), ("auto", None), ("auto", "rms")]
)
def test_same_bits_on_the_kernels(interval, post_norm):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"kernels": "fused", "post_norm": post_norm}
    assert_same(*(results(make_stack(recompute=some, **options).to(device)) for some in (interval, None)))


@pytest.mark.parametrize("interval", [3, "auto"])
@pytest.mark.parametrize("whole", [0, 2, DEPTH - 1])
def test_same_bits_around_a_connection_that_is_called_as_a_whole(interval, whole):
    stack, wanted = make_stack(recompute=interval), make_stack()
    stack[whole].register_forward_hook(lambda module, given, result: None)
    assert_same(results(stack), results(wanted))


@pytest.mark.parametrize("interval", [3, "auto"])
def test_compiled_stack_gives_the_same_and_compiles_a_sublayer_once(interval, monkeypatch):
    graphs, writes = [], []

    def count(graph, _):
        graphs.append(graph)
        return graph

    def write(keeper, *given, run=StreamKeeper.write):
        writes.append(given)
        return run(keeper, *given)

    monkeypatch.setattr(StreamKeeper, "write", write)
    torch.compiler.reset()
    stack = make_stack(recompute=interval)
    for block in stack:
        block.sublayer.calls = None  # what is counted is compiled anew for every number
    found = results(stack, call=torch.compile(stack, backend=count))
    for a, b in zip(found, results(make_stack()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
    assert len(writes) == DEPTH  # all of them watched, so that their streams can be written again


def test_an_exported_stack_keeps_all_its_streams():
    stack, x = make_stack(recompute=3), torch.randn(2, 4, 16)
    for block in stack:
        block.sublayer.calls = None
    exported = torch.export.export(stack, (x,))
    torch.testing.assert_close(exported.module()(x), stack(x))


def count_streams_alive(recompute) -> int:
    """How many of the stream tensors between the connections are still in memory when the forward pass is over."""
    stack, streams = make_stack(recompute=recompute), []
    for block in stack:

        def note(x, y, state, write=block.write):
            out = write(x, y, state)
            streams.append(weakref.ref(out.untyped_storage()))
            return out

        block.write = note
    y = stack(torch.randn(64, 4, 16, requires_grad=True))
    gc.collect()
    alive = sum(one() is not None for one in streams)
    y.sum().backward()
    return alive


def test_keeps_every_third():
    assert count_streams_alive(None) == DEPTH
    assert count_streams_alive(3) == 3  # after 3 and 6 connections, and the result
    assert count_streams_alive("auto") == 3  # after 5 and 6, and the result


def test_the_last_streams_are_at_hand_when_the_backward_pass_begins(monkeypatch):
    stack, writes, scatter = make_stack(recompute=3), [], eager.scatter
    monkeypatch.setattr(eager, "scatter", lambda *given: writes.append(1) or scatter(*given))
    y = stack(torch.randn(2, 4, 16, requires_grad=True))
    assert len(writes) == DEPTH
    y.sum().backward()
    assert len(writes) == DEPTH + 2 * (DEPTH // 3)  # two in each segment that was complete


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_a_graph_that_is_dropped_frees_its_streams(kernels):
    pytest.importorskip("triton")
    stack = make_stack(recompute=3, kernels=kernels)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(2, 4, 16, device=device, requires_grad=True)
    y = stack.to(device)(x)
    input_alive = weakref.ref(x)
    del x, y
    gc.collect()
    assert input_alive() is None


@pytest.mark.parametrize("recompute", [None, 3])
def test_streams_that_are_changed_in_place_are_refused(recompute):
    x = torch.randn(2, 4, 16)
    y = make_stack(recompute=recompute)(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="place"):
        y.sum().backward()


def test_backward_twice():
    stack = make_stack(recompute=3)
    x = torch.randn(2, 4, 16, requires_grad=True)
    y = stack(x).square().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * first, rtol=0, atol=0)


def peak_of_model(starts, kept: tuple[int, ...], streams: int) -> Fraction:
    """The most stream tensors alive while a segment is differentiated, if sublayers keep so many hidden states."""
    ends = [*sorted(starts)[1:], len(kept)]
    segments = enumerate(zip(sorted(starts), ends, strict=True), start=1)
    return max(tensors + (end - start - 1) + Fraction(sum(kept[:end]), streams) for tensors, (start, end) in segments)


@pytest.mark.parametrize("streams", [2, 4, 8])
@pytest.mark.parametrize(
    "kept", [*((4,) * count for count in range(1, 11)), (2,) * 9, (4, 4, 2, 2, 2, 4, 2), (2, 2, 2, 4, 4, 4, 4)]
)
def test_no_other_segments_have_a_lower_peak(kept, streams):
    later = range(1, len(kept))
    choices = ((0, *some) for count in range(len(kept)) for some in itertools.combinations(later, count))
    lowest = min(peak_of_model(starts, kept, streams) for starts in choices)
    assert peak_of_model(choose_starts(kept, streams), kept, streams) == lowest


def test_segments_grow_towards_the_beginning():
    assert choose_starts((4,), 4) == {0}
    assert choose_starts((4,) * 12, 4) == {0, 8, 11}
    assert choose_starts((4,) * 26, 4) == {0, 15, 22, 25}


def test_checkpointed_sublayers_are_counted():
    body = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    wrapped = nn.Sequential(checkpoint_wrapper(body))
    assert [count_saved_states(layer) for layer in (body, torch.sin, wrapped)] == [4, 4, 2]
    body.gradient_checkpointing = True  # as in transformers
    assert [count_saved_states(nn.ModuleList([body]).train(mode)) for mode in (True, False)] == [2, 4]
    assert choose_starts((2,) * 24, 4) == {0, 11, 18, 22}
    stack = make_stack(recompute="auto")
    for block in stack:
        block.sublayer.body = checkpoint_wrapper(block.sublayer.body)
    assert_same(results(stack), results(make_stack()))


class LiveBytes(TorchDispatchMode):
    """Notes the most bytes that were alive at once of the tensors that are made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def measure_peak(connections: int, streams: int, recompute) -> float:
    """The peak of a forward and a backward pass in stream tensors, around sublayers that keep four hidden states."""
    dim, tokens = 512, 16
    blocks = [
        jpmhc.HyperConnection(lambda h: h.sin().sin().sin(), dim, streams, "identity", dynamic=False, index=k)
        for k in range(connections)
    ]
    stack = jpmhc.HyperConnectionStack(blocks, reduce=True, recompute=recompute)
    x = torch.randn(tokens, streams, dim, requires_grad=True)
    with LiveBytes() as live:
        stack(x).sum().backward()
    return live.peak / (4 * x.numel())


@pytest.mark.parametrize(("connections", "streams"), [(12, 4), (24, 4), (24, 2), (24, 8), (48, 4)])
def test_the_peak_is_lower_than_with_equal_segments_by_what_the_model_says(connections, streams):
    interval = round(math.sqrt(streams * connections / (streams + 2)))
    kept = (4,) * connections
    starts = choose_starts(kept, streams), range(0, connections, interval)
    expected = [float(peak_of_model(some, kept, streams)) for some in starts]
    found = [measure_peak(connections, streams, recompute) for recompute in ("auto", interval)]
    assert found[1] - found[0] == pytest.approx(expected[1] - expected[0], abs=0.25)
    assert found[0] < measure_peak(connections, streams, None)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "all", True])
def test_bad_input(wrong):
    with pytest.raises(ValueError, match="recompute"):
        make_stack(recompute=wrong)


def test_not_with_delayed():
    with pytest.raises(ValueError, match="delayed"):
        make_stack(recompute=2, delayed=True)


def test_the_write_that_is_repeated_is_the_one_that_was_done():
    """Weights that are swapped for one call, and settings that are changed before the backward pass."""
    stack = make_stack(recompute=3, post_norm="layer").double()
    swapped = {name: value.detach() + 0.1 for name, value in stack.named_parameters()}
    x = torch.randn(2, 4, 16, dtype=torch.float64)

    def gradient(stack):
        leaf = x.clone().requires_grad_()
        y = torch.func.functional_call(stack, swapped, (leaf,))
        for block in stack:
            block.write_scale = 0.5
        y.square().sum().backward()
        return leaf.grad

    assert torch.equal(gradient(stack), gradient(make_stack(post_norm="layer").double()))


def test_a_sublayers_output_that_is_changed_in_place_is_refused():
    room = torch.empty(2, 16)
    blocks = [jpmhc.HyperConnection(lambda h: room.copy_(h), 16, index=k).requires_grad_(False) for k in range(2)]
    trained = jpmhc.HyperConnection(nn.Linear(16, 16), 16, index=2)
    y = jpmhc.HyperConnectionStack([*blocks, trained, *blocks], recompute=4, expand=True)(torch.randn(2, 16))
    with pytest.raises(RuntimeError, match="changed in place"):
        y.square().sum().backward()


def test_checkpointing_of_the_whole_stack_keeps_what_it_keeps_without():
    def count_saved(recompute) -> int:
        saved: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            make_stack(recompute=recompute)(torch.randn(2, 4, 16))
        return len(saved)

    assert count_saved(3) == count_saved(None)


@pytest.mark.parametrize("mixer", ["cayley", "sinkhorn"])
def test_no_tokens(mixer):
    blocks = [jpmhc.HyperConnection(nn.Linear(16, 16), 16, 4, mixer, index=k) for k in range(5)]
    stack = jpmhc.HyperConnectionStack(blocks, recompute=2).bfloat16()
    x = torch.randn(0, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    stack(x).sum().backward()
    assert x.grad.shape == x.shape


def test_transforms_take_the_stack():
    x = torch.randn(3, 2, 4, 16)
    found, wanted = (make_stack(recompute=interval) for interval in (3, None))
    torch.testing.assert_close(torch.func.vmap(found)(x), wanted(x))
    assert torch.equal(*(torch.func.grad(lambda x, s=s: s(x).sum())(x[0]) for s in (found, wanted)))


def test_inference_tensors_into_frozen_connections():
    with torch.inference_mode():
        x = torch.randn(2, 4, 16)
    y = make_stack(recompute=3).requires_grad_(False)(x)
    assert torch.equal(y, make_stack()(x.clone()))
