"""wrap and unwrap: turn a model's residual additions into hyper-connections in place, and back."""

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jpmhc.connections import HyperConnection
from jpmhc.mixers import Mixer, make_mixer
from jpmhc.wrap.additions import describe_wrapping
from jpmhc.wrap.comparison import OutputComparison, call_arguments, explaining_guess
from jpmhc.wrap.installation import install, uninstall
from jpmhc.wrap.layers import CHILD, Recipe, wrapped_layers
from jpmhc.wrap.pretrained import forget_wrapping, is_described, is_pretrained, record_wrapping
from jpmhc.wrap.search import plan_layers


def wrap(
    model: nn.Module,
    streams: int = 4,
    mixer: str | Mixer = "cayley",
    inputs: Any = None,
    layers: Iterable[nn.Module] | None = None,
    **options: Any,
) -> nn.Module:
    """Turn every residual addition in a model's layers into a hyper-connection, in place.

    The wrapped model computes the same function until it is trained further. No module is moved or renamed: each layer
    gains a child `hyper_connections`. The model runs a few times, to find its layers and to compare outputs and
    gradients before and after wrapping; if they differ, all changes are undone and an error is raised. The logger
    "jpmhc" logs how many additions became connections; a warning names the additions that stay plain.

    Args:
        model: Any transformer: from `transformers`, from PyTorch, or your own.
        streams: The number of residual streams.
        mixer: The constraint on the matrices that mix the streams: a name from `MIXERS`, or a `Mixer`.
        inputs: The arguments of the model's call: a tensor, a tuple of arguments, or a dict of arguments. Not needed
            for models of `transformers` that take tokens or images. Layers that these inputs do not reach stay plain.
        layers: The layers to wrap, modules of the model; None to find the layers.
        options: Further options of `HyperConnection`: norm, read, write, temperature, dynamic, kernels, eps, read_eps.

    Returns:
        The model itself.

    Example:
        >>> import jpmhc, torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        >>> x = torch.randn(1, 5, 16)
        >>> before = model(x)
        >>> model = jpmhc.wrap(model, streams=4, mixer="cayley", inputs=x)
        >>> torch.allclose(model(x), before, atol=1e-5)
        True
        >>> len(model.layers[0].hyper_connections.additions)
        2
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    for name in wrapped_layers(model):
        raise ValueError(f"{name} is wrapped already: unwrap the model before you wrap it again")
    if layers is None and any(isinstance(module, HyperConnection) for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} has hyper-connections already: wrap takes a model with plain residual "
            "additions, or the plain layers of this one as layers="
        )
    _refuse_distributed(model)
    _refuse_compiled(model, "")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device, without numbers: load the weights before you wrap the model"
            )
    recipe = Recipe(streams, mixer, options)
    _refuse_mixer(make_mixer(mixer, streams))
    args, kwargs = call_arguments(model, inputs)
    with OutputComparison(model, args, kwargs) as comparison:
        with contextlib.nullcontext() if inputs is not None else explaining_guess(model, kwargs):
            counts = comparison.begin()
        plans = plan_layers(model, None if layers is None else _names_of(model, layers), comparison.run)
        for plan in plans:
            _refuse_compiled(model, plan.name)
        _refuse_skipping(model, [plan.name for plan in plans])
        comparison.differentiate(plans[0])
        with torch.inference_mode(False):  # weights of inference mode could not be trained
            install(model, recipe.make_connections(model, plans))
        try:
            comparison.check()
        except BaseException:
            uninstall(model)
            raise
    for name, connections in wrapped_layers(model).items():
        connections.train(model.get_submodule(name).training)
    record_wrapping(model, recipe, plans)
    summary, partial = describe_wrapping(model, plans, counts)
    logging.getLogger("jpmhc").info(summary)
    if partial and layers is None:
        warnings.warn(summary, stacklevel=2)
    if is_pretrained(model) and not is_described(mixer):
        name = type(mixer).__name__
        warnings.warn(
            f"the configuration that save_pretrained writes cannot describe the mixer {name}: load the saved model "
            f"with jpmhc.load_wrapped(…, mixer={name}(…))",
            stacklevel=2,
        )
    if hasattr(model, "peft_config"):
        warnings.warn(
            "PEFT saves the adapters of this model without its hyper-connections: save merge_and_unload(), or wrap the "
            "base model first and name hyper_connections in modules_to_save",
            stacklevel=2,
        )
    return model


def unwrap(model: nn.Module, force: bool = False) -> nn.Module:
    """Remove the hyper-connections of a wrapped model, in place.

    Args:
        model: A wrapped model.
        force: Remove hyper-connections even if they have been trained, which changes the model's outputs.

    Returns:
        The model itself.

    Example:
        >>> import jpmhc, torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        >>> layer = jpmhc.wrap(layer, inputs=torch.randn(1, 5, 16))
        >>> hasattr(layer, "hyper_connections"), hasattr(jpmhc.unwrap(layer), "hyper_connections")
        (True, False)
    """
    wrapped = wrapped_layers(model) if isinstance(model, nn.Module) else {}
    if not wrapped:
        raise ValueError(f"this {type(model).__name__} is not wrapped")
    if any(hasattr(p, "full_tensor") for connections in wrapped.values() for p in connections.parameters()):
        raise ValueError(
            f"the weights of this {type(model).__name__} are spread over processes: gather them by "
            "get_model_state_dict, load them into a wrapped model that is not sharded, and unwrap that one"
        )
    for name, connections in wrapped.items():
        changed = None if force else connections.first_changed()
        if changed is not None:
            raise ValueError(
                f"{name}.{CHILD}.additions.{changed} has been trained, and without it the model computes something "
                "else: unwrap(model, force=True) removes it all the same"
            )
    uninstall(model)
    forget_wrapping(model)
    return model


def _names_of(model: nn.Module, layers: Iterable[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers must be modules of the model, got {layers!r}")
    layers = list(layers)
    for layer in layers:
        if id(layer) not in known:
            raise ValueError(f"layers must be modules of the model, got a {type(layer).__name__} that is none of them")
    if not layers:
        raise ValueError("layers must have at least one module")
    return [known[id(layer)] for layer in layers]


def _refuse_mixer(mixer: Mixer) -> None:
    """Raise an error if the rows of the mixer's start do not sum to one, as a plain addition needs."""
    with torch.no_grad():
        error = float((mixer(mixer.start()).sum(-1) - 1).abs().max())
    if not error < 1e-3:
        raise ValueError(
            f"the matrix that {type(mixer).__name__} starts from has rows whose sums differ from one by up to "
            f"{error:.2g}, so that the wrapped model would not compute what it computes now: choose a start whose rows "
            "sum to one"
        )


def _refuse_distributed(model: nn.Module) -> None:
    """Raise an error for a model inside DDP or FSDP, which would not synchronise or shard new connections."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    outer: list[nn.Module] = []
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        kinds = (DistributedDataParallel, *sharded[1:])
        outer = [one for one in gc.get_objects() if issubclass(type(one), kinds) and model in one.modules()]
    for name, module in [*model.named_modules(), *(("", one) for one in outer)]:
        if isinstance(module, (DistributedDataParallel, *sharded)):
            kind = "DistributedDataParallel" if isinstance(module, DistributedDataParallel) else "FSDP"
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is in {kind} already, which would not see the new "
                f"connections: wrap the plain model first, and then put the wrapped model in {kind}"
            )


def _refuse_compiled(model: nn.Module, layer: str) -> None:
    """Raise an error if a layer or a module around it is compiled, because compiled code would not see the streams.

    A layer that was compiled in place, by its method `compile`, is compiled again with its streams.
    """
    parts = layer.split(".") if layer else []
    for name in (".".join(parts[:depth]) for depth in range(len(parts) + 1)):
        module = model.get_submodule(name)
        in_place = module._compiled_call_impl is not None and (name != layer or not layer)
        if in_place or hasattr(module, "_orig_mod"):
            raise ValueError(
                f"{name or 'the model'} is compiled already: wrap the plain model first, and then compile the wrapped "
                "model"
            )


def _refuse_skipping(model: nn.Module, names: list[str]) -> None:
    """Raise an error if the model skips whole layers in training, because the streams might never be reduced."""
    for name in sorted({name.rpartition(".")[0].rpartition(".")[0] for name in names}):
        outer = model.get_submodule(name)
        for owner, setting in ((outer, "its layerdrop"), (getattr(outer, "config", None), "layerdrop in its config")):
            chance = getattr(owner, "layerdrop", 0)
            if isinstance(chance, int | float) and chance > 0:
                raise ValueError(
                    f"{name or 'the model'} ({type(outer).__name__}) skips whole layers in training, which cannot be "
                    f"wrapped: set {setting} from {chance} to 0"
                )
