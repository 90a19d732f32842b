"""Install connections and hooks in a model, and remove them."""

import itertools
from collections.abc import Sequence

from torch import nn

from jpmhc.wrap.chain import Chain, forget_recomputing
from jpmhc.wrap.layers import CHILD, LayerConnections
from jpmhc.wrap.stream_modules import StreamModule, module_step
from jpmhc.wrap.streams import register_with_einops

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
NESTED = "use_nested_tensor"  # an attribute of PyTorch's encoder: whether its layers may get a nested tensor


def install(model: nn.Module, connections: Sequence[LayerConnections]) -> None:
    """Add the connections to their layers, and register hooks on the layers and on the modules around them."""
    register_with_einops()
    for members in _split_chains(connections):
        names = [member.plan.name for member in members]
        layers = [model.get_submodule(name) for name in names]
        owner = _find_owner(model, names)
        chain = Chain([member.plan for member in members], layers, owner, members[0].recipe.streams)
        for member, layer in zip(members, layers):
            layer.add_module(CHILD, member)
            layer.register_forward_pre_hook(chain.begin, with_kwargs=True)
            layer.register_forward_hook(chain.end, with_kwargs=True)
            carriers = {step.name for step in member.plan.steps}
            for inner in member.plan.modules:
                fits = None if module_step(inner) in carriers else False
                StreamModule(inner, fits).register(layer.get_submodule(inner))
        for module in [owner, *_modules_around(model, owner)]:
            if not isinstance(module, CONTAINERS) and module not in layers:
                module.register_forward_pre_hook(chain.enter, with_kwargs=True, prepend=True)
                module.register_forward_hook(chain.leave, prepend=True, always_call=True)
            if isinstance(module, nn.TransformerEncoder) and getattr(module, NESTED):
                # A nested tensor cannot become streams; None counts as False, and `uninstall` recognises it.
                setattr(module, NESTED, None)


def prepare_stage(stage: nn.Module) -> nn.Module:
    """Prepare some layers of a wrapped model as a stage of a pipeline that sends streams to the next stage, in place.

    Wrap the whole model on every process, put the stage's layers into a module, and prepare that module. The stage's
    output is then the streams [..., n, d] for the next stage's first layer, or after the model's last layer the hidden
    state.

    Args:
        stage: A module that contains the stage's layers.

    Returns:
        The stage itself.

    Example:
        >>> import jpmhc, torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        >>> x = torch.randn(1, 5, 16)
        >>> model = jpmhc.wrap(torch.nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False), inputs=x)
        >>> first, second = torch.nn.Sequential(*model.layers[:2]), torch.nn.Sequential(*model.layers[2:])
        >>> jpmhc.prepare_stage(first)(x).shape, jpmhc.prepare_stage(second)(torch.randn(1, 5, 4, 16)).shape
        (torch.Size([1, 5, 4, 16]), torch.Size([1, 5, 16]))
    """
    hooks = (hook for module in stage.modules() for hook in module._forward_hooks.values())
    chains = [owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), Chain)]
    if not chains:
        raise ValueError(f"this {type(stage).__name__} has no layers of a wrapped model")
    for chain in chains:
        chain.staged = True
    return stage


def uninstall(model: nn.Module) -> None:
    """Remove all connections and hooks from a model."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), Chain | StreamModule):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_with_kwargs.pop(key, None)
        if CHILD in module._modules:
            delattr(module, CHILD)
        if isinstance(module, nn.TransformerEncoder) and getattr(module, NESTED) is None:
            setattr(module, NESTED, True)
        forget_recomputing(module)


def _split_chains(connections: Sequence[LayerConnections]) -> list[list[LayerConnections]]:
    """Split the layers into chains; within a chain, each layer hands its streams to the next layer."""
    chains: list[list[LayerConnections]] = []
    for member in connections:
        if member.plan.first or not chains:
            chains.append([])
        chains[-1].append(member)
    return chains


def _find_owner(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return the innermost module that contains all these layers and is not a list of modules."""
    parts = [name.split(".")[:-1] for name in names]
    common = list(itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts)))
    path = [level[0] for level in common]
    while path and isinstance(model.get_submodule(".".join(path)), CONTAINERS):
        path.pop()
    return model.get_submodule(".".join(path))


def _modules_around(model: nn.Module, owner: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that contain the owner."""
    return [module for module in model.modules() if module is not owner and any(m is owner for m in module.modules())]
