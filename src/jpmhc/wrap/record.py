"""What a wrapped model of `transformers` notes in its configuration, so that `from_pretrained` does not drop it."""

import dataclasses
from typing import Any

from torch import nn

from jpmhc.wrap.plan import LayerPlan
from jpmhc.wrap.recipe import Recipe
from jpmhc.wrap.route import StreamStep

# transformers refuses a configuration with a fusion it does not know, and says its name. A wrapped model that is loaded
# as a plain one would otherwise lose its connections with no more than a warning.
NOTE = "hyper-connections (load this model with jpmhc.load_wrapped)"


def record_wrapping(model: nn.Module, recipe: Recipe, plans: list[LayerPlan]) -> None:
    """Note how a model of `transformers`, which may be inside another module, was wrapped, in its configuration."""
    prefix, inner = find_pretrained(model)
    if inner is None:
        return
    names = [plan.name.removeprefix(f"{prefix}.") if prefix else plan.name for plan in plans]
    layers = [{**dataclasses.asdict(plan), "name": name} for plan, name in zip(plans, names)]
    fusions = getattr(inner.config, "fusion_config", None) or {}
    inner.config.fusion_config = {**fusions, NOTE: {**recipe.to_json(), "layers": layers}}


def forget_wrapping(model: nn.Module) -> None:
    """Take the note out of a model's configuration again."""
    _, inner = find_pretrained(model)
    fusions = getattr(inner.config, "fusion_config", None) or {} if inner is not None else {}
    if inner is not None and NOTE in fusions:
        inner.config.fusion_config = {key: value for key, value in fusions.items() if key != NOTE} or None


def find_pretrained(model: nn.Module) -> tuple[str, Any]:
    """Find the outermost model of `transformers` in a module, and its name there; None where there is none."""
    for name, module in model.named_modules():
        if hasattr(type(module), "base_model_prefix") and hasattr(module.config, "save_pretrained"):
            return name, module
    return "", None


def read_record(record: dict[str, Any]) -> tuple[Recipe, list[LayerPlan]]:
    """Make the recipe and the plans that a record describes."""
    for key in ("layers", "streams", "mixer", "options"):
        if key not in record:
            raise ValueError(f"the configuration does not say how the model was wrapped: {key!r} is missing")
    plans = []
    for layer in record["layers"]:
        steps = tuple(StreamStep(*step) for step in layer["steps"])
        plans.append(LayerPlan(**{**layer, "steps": steps, "modules": tuple(layer["modules"])}))
    return Recipe.from_json(record), plans
