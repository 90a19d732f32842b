"""Group a model's parameters for weight decay, and load a plain model's weights into a model with connections."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections.coefficients import CoefficientMap
from jpmhc.connections.hyper import HyperConnection
from jpmhc.connections.stack import HyperConnectionStack


def parameter_groups(model: nn.Module, weight_decay: float, *, projections_apart: bool = False) -> list[dict[str, Any]]:
    """Return two optimiser groups: matrices with weight decay; mixing logits, frames, norms and biases without.

    Over a long run, decay would pull the mixing logits to zero: all read weights would become equal, and every mixture
    of permutations uniform. The projection of dynamic coefficients is a matrix and decays, towards static coefficients.

    Args:
        model: Any module with hyper-connections inside.
        weight_decay: The weight decay of the matrices.
        projections_apart: Return three groups: the second has the coefficients' projections, with weight decay. The
            first group is then for an optimiser of hidden matrices such as Muon, the other two are for AdamW.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"parameter_groups takes the model itself, got {type(model).__name__}")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'the model'} is in FullyShardedDataParallel already, which flattens matrices, so that they "
                "cannot be told from biases: call parameter_groups before it (with use_orig_params=True), or take "
                "fully_shard"
            )
    checks.switch(projections_apart, "projections_apart")
    checks.non_negative_number(weight_decay, "weight_decay")
    maps = [module for module in model.modules() if isinstance(module, CoefficientMap)]
    mixing = {id(parameter) for one in maps for parameter in one.parameters() if parameter is not one.weight}
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (spared if parameter.ndim < 2 or id(parameter) in mixing else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    if projections_apart:
        projections = {id(one.weight) for one in maps if one.weight is not None}
        groups[0]["params"] = [parameter for parameter in decayed if id(parameter) not in projections]
        apart = [parameter for parameter in decayed if id(parameter) in projections]
        groups.insert(1, {"params": apart, "weight_decay": weight_decay})
    return groups


def load_plain_weights(
    model: nn.Module, weights: Mapping[str, Tensor], rename: Mapping[str, str] | None = None
) -> None:
    """Load a plain model's weights into the same model with hyper-connections, which then gives the same outputs.

    Each weight of the plain model must have a name in this model, and each weight of this model, except the
    connections' own, must get a value of its shape. Otherwise nothing is loaded, and the error lists the names. A
    connection keeps the name of the layer that it wraps: `layers.0.linear.weight` goes to
    `layers.connections.0.sublayer.linear.weight` without a `rename`.

    Args:
        model: The model with new connections, whose own parameters do not change.
        weights: The plain model's `state_dict()`.
        rename: New beginnings of names, {plain model's: this model's}. The longest matching beginning is replaced.
    """
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights must be a plain model's state_dict(), got {type(weights).__name__}")
    if not isinstance(rename or {}, Mapping):
        raise ValueError(f"rename must be a dict of beginnings of names, got {type(rename).__name__}")
    rename = rename or {}
    for beginning in rename:
        if not any(name.startswith(beginning) for name in weights):
            raise ValueError(
                f"no weight's name begins with {beginning!r}; the first one is {next(iter(weights), None)!r}"
            )
    now = model.state_dict()
    own_names = {_plain_name(model, name): name for name in now}  # {plain model's name: this model's name}
    own = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, CoefficientMap)
        for name in module.state_dict()
    }
    values: dict[str, Tensor] = {}
    unknown = []
    for name, value in weights.items():
        new = _rename(name, rename)
        own_name = new if new in own_names.values() else own_names.get(new)
        if own_name is None:
            unknown.append(name)
        else:
            values[own_name] = value
    missing = [plain for plain, own_name in own_names.items() if own_name not in own and own_name not in values]
    if missing or unknown:
        raise ValueError(
            f"the names do not match: {_list_names(missing)} of the model without a value, {_list_names(unknown)} of "
            "the weights without a parameter; say which names belong together by "
            "load_plain_weights(model, weights, {'their beginning': 'the model's beginning'})"
        )
    for own_name, value in values.items():
        if now[own_name].shape != value.shape:
            raise ValueError(
                f"{own_name} of the model has the shape {list(now[own_name].shape)}, and the weights have "
                f"{list(value.shape)} for it; nothing was loaded"
            )
    model.load_state_dict(values, strict=False)


def _plain_name(model: nn.Module, name: str) -> str:
    """Return a parameter's name without the parts that stacks and connections add to it."""
    parts, module = [], model
    for part in name.split("."):
        is_inner = isinstance(module, HyperConnection) and part == "sublayer"
        if not is_inner and not (isinstance(module, HyperConnectionStack) and part == "connections"):
            parts.append(part)
        module = getattr(module, part, module)
    return ".".join(parts)


def _rename(name: str, rename: Mapping[str, str]) -> str:
    beginning = max((old for old in rename if name.startswith(old)), key=len, default=None)
    return name if beginning is None else rename[beginning] + name.removeprefix(beginning)


def _list_names(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} ({', '.join(names[:most])}{more})" if names else "none"
