"""What a wrapped model of `transformers` notes in its configuration, so that `from_pretrained` does not drop it."""

import dataclasses
from typing import Any

from torch import nn

from jpmhc.wrap.plan import LayerPlan
from jpmhc.wrap.recipe import Recipe
from jpmhc.wrap.route import Step

# transformers refuses a configuration with a fusion it does not know, and says its name. A wrapped model that is loaded
# as a plain one would otherwise lose its connections with no more than a warning.
NOTE = "hyper-connections (load this model with jpmhc.load_wrapped)"


def record_wrapping(model: nn.Module, recipe: Recipe, plans: list[LayerPlan]) -> None:
    """Note in a model's configuration, if it has one of `transformers`, how it was wrapped."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        record = {**recipe.to_json(), "layers": [dataclasses.asdict(plan) for plan in plans]}
        config.fusion_config = {**(getattr(config, "fusion_config", None) or {}), NOTE: record}


def forget_wrapping(model: nn.Module) -> None:
    """Take the note out of a model's configuration again."""
    config: Any = getattr(model, "config", None)
    fusions = getattr(config, "fusion_config", None) or {}
    if NOTE in fusions:
        config.fusion_config = {key: value for key, value in fusions.items() if key != NOTE} or None


def read_record(record: dict[str, Any]) -> tuple[Recipe, list[LayerPlan]]:
    """Make the recipe and the plans that a record describes."""
    plans = []
    for layer in record["layers"]:
        steps = tuple(Step(*step) for step in layer["steps"])
        plans.append(LayerPlan(**{**layer, "steps": steps, "modules": tuple(layer["modules"])}))
    return Recipe.from_json(record), plans
