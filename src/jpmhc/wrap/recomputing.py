"""Recomputing a wrapped layer in the backward pass, where `transformers` does that inside the layer's hooks."""

import functools
from typing import Any

from torch import nn

from jpmhc.wrap.recipe import CHILD
from jpmhc.wrap.route import Route
from jpmhc.wrap.streams import Streams

CHECKPOINT = "_gradient_checkpointing_func"  # what a layer of transformers has itself recomputed by


def follow_recomputing(layer: nn.Module) -> None:
    """Make a layer that has its forward recomputed, inside its hooks, hand over its streams as a tensor.

    Before version 5.23 such layers had a call of their own, which has the hooks recomputed too, and needs nothing.
    """
    checkpoint = vars(layer).get(CHECKPOINT)
    if checkpoint is not None and not _is_ours(checkpoint) and type(layer).__call__ is nn.Module.__call__:
        setattr(layer, CHECKPOINT, functools.partial(recompute_streams, checkpoint))


def forget_recomputing(layer: nn.Module) -> None:
    """Give a layer back what it has itself recomputed by."""
    checkpoint: Any = vars(layer).get(CHECKPOINT)
    if _is_ours(checkpoint):
        setattr(layer, CHECKPOINT, checkpoint.args[0])


def _is_ours(checkpoint: Any) -> bool:
    return isinstance(checkpoint, functools.partial) and checkpoint.func is recompute_streams


def recompute_streams(checkpoint: Any, run: Any, *args: Any) -> Any:
    """Run a layer so that it can be recomputed: each run begins with streams that no other run has gone through.

    Nothing is read ahead, into the layer or out of it: what crosses its border is what the checkpoint knows of.

    Args:
        checkpoint: What the layer is recomputed by.
        run: The layer's forward, bound to the layer and its keyword arguments; a part of the layer is left as it is.
        args: The layer's positional arguments.
    """
    layer = run.args[0] if isinstance(run, functools.partial) and run.args else None
    if not isinstance(layer, nn.Module) or CHILD not in layer._modules:
        return checkpoint(run, *args)
    held: Any = getattr(layer, CHILD)
    plan = held.plan
    entered = plan.entering(args, run.keywords)
    if not isinstance(entered, Streams):
        return checkpoint(run, *args)
    route = Route(plan.steps, held.additions, reduces=plan.last)
    args, kwargs = plan.with_entering(args, run.keywords, entered.x)

    def run_streams(*args: Any) -> Any:
        streams = Streams(plan.entering(args, kwargs), route)
        inner_args, inner_kwargs = plan.with_entering(args, kwargs, streams)
        output = run.func(*run.args, *inner_args, **inner_kwargs)
        return plan.with_leaving(output, leaving_streams(layer, output).x)

    output = checkpoint(run_streams, *args)
    return plan.with_leaving(output, Streams(plan.leaving(output), route, plan.steps))


def leaving_streams(layer: nn.Module, output: Any) -> Streams:
    """Return the streams in a wrapped layer's output; refuse it where they did not go the way they went before."""
    plan: Any = getattr(layer, CHILD).plan
    streams = plan.leaving(output)
    if not isinstance(streams, Streams) or streams.trail != plan.steps:
        raise RuntimeError(
            f"{plan.name} ({type(layer).__name__}) did not compute as when it was wrapped: its hidden state went "
            f"through {_steps(streams)}, not {', '.join(step.name for step in plan.steps)}"
        )
    return streams


def _steps(streams: Any) -> str:
    if not isinstance(streams, Streams):
        return "an unknown computation"
    return ", ".join(step.name for step in streams.trail) or "nothing"
