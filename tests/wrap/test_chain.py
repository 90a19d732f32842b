"""Writes that are fused with the next read: how many there are, and when a layer does not read for the next."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import jpmhc
from jpmhc.wrap.chain import Chain
from tests.connections.counting import count_steps
from tests.wrap.models import Block, PostNormBlock, Stack, difference, disturb, wrapped_copy

X = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def counted(monkeypatch):
    """How often each way to write was taken."""
    return count_steps(monkeypatch, "write", "write_read", "write_mean")


def stack(kind=Block, **options):
    torch.manual_seed(0)
    return disturb(jpmhc.wrap(Stack((kind(12) for _ in range(3)), 12), inputs=X, **options))


def chain_of(model) -> Chain:
    hooks = [hook for block in model.blocks for hook in block._forward_hooks.values()]
    (chain,) = {hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), Chain)}
    return chain


def run(model, counted):
    counted.update(write=0, write_read=0, write_mean=0)
    return model(X)


def test_every_write_reads_for_the_next_connection_and_the_last_reduces(counted):
    run(stack(kernels="reference"), counted)
    # The reference's write_read writes, then reads.
    assert counted == {"write_read": 5, "write": 5, "write_mean": 1}


def test_a_norm_between_write_and_read_keeps_them_apart(counted):
    run(stack(PostNormBlock), counted)
    assert counted == {"write_read": 0, "write": 6, "write_mean": 0}


def test_no_layer_reads_for_the_next_in_inference_mode(counted):
    model = stack()
    with torch.inference_mode():
        run(model, counted)
    assert counted["write_read"] == 3


def test_no_layer_reads_for_the_next_where_it_is_computed_anew(counted):
    model = stack()
    whole = run(model, counted)
    x = model.embed(X)
    counted.update(write_read=0)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    assert counted["write_read"] == 3
    assert torch.equal(model.head(x), whole)


def test_a_layer_that_is_computed_anew_reads_for_itself(counted):
    model = stack()
    run(model, counted).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    x = model.embed(X)
    for place, block in enumerate(model.blocks):
        x = checkpoint(block, x, use_reentrant=False) if place == 1 else block(x)
    model.head(x).square().sum().backward()
    assert all(torch.allclose(p.grad, old, atol=1e-6) for p, old in zip(model.parameters(), gradients))


@pytest.mark.parametrize("in_place", [False, True])
def test_streams_that_were_changed_between_layers_are_read_again(in_place):
    model = stack()
    model.blocks[0].register_forward_hook(lambda block, args, x: x.mul_(1.5) if in_place else x * 1.5)
    with torch.no_grad():
        found = model(X)
        chain = chain_of(model)
        assert chain.calls.ahead is None
        chain.following.clear()
        assert torch.equal(found, model(X))


def test_copies_read_for_their_own_layers():
    model = stack()
    other = copy.deepcopy(model)
    for one in (model, other):
        assert [*chain_of(one).following.values()] == [*one.blocks[1:]]


def test_threads_may_call_a_model_at_the_same_time():
    model = stack()
    whole, alone = model(X), model(X[:, :1])
    begun, ended = threading.Event(), threading.Event()
    inner: list = []

    def wait(norm, args):
        """The inner call stays in its first layer until the outer call has ended."""
        if args[0].shape[1] == 1:
            begun.set()
            assert ended.wait(20)

    def call(head, args):
        """The inner call begins when the outer call has left its layers."""
        if not inner:
            inner.append(threads.submit(model, X[:, :1]))
            assert begun.wait(20)

    model.blocks[0].norms[1].register_forward_pre_hook(wait)
    model.head.register_forward_pre_hook(call)
    with ThreadPoolExecutor() as threads:
        try:
            assert torch.equal(model(X), whole)
        finally:
            ended.set()
        assert torch.equal(inner[0].result(), alone)


@pytest.mark.interpreter
def test_fused_kernels_compute_the_same():
    torch.manual_seed(0)
    plain = Stack((Block(16) for _ in range(2)), 16)
    x, found = X[:1, :2], []
    for kernels in ("reference", "fused"):
        model = disturb(wrapped_copy(plain, inputs=x, kernels=kernels), 0.2)
        with torch.no_grad():
            found.append(model(x))
    assert difference(*found) < 1e-5
