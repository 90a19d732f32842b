"""With which options a model was wrapped, and the connections that are made so."""

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from jpmhc import checks
from jpmhc.connections import HyperConnection
from jpmhc.mixers import MIXERS, Mixer
from jpmhc.wrap.plan import LayerPlan

CHILD = "hyper_connections"  # the name under which a wrapped layer holds its connections
# Options of a connection that leave a fresh one the plain residual addition, as wrapping needs it.
OPTIONS = ("norm", "read", "write", "temperature", "dynamic", "kernels", "eps", "read_eps")


@dataclass(frozen=True)
class Recipe:
    """The arguments of `HyperConnection` that all connections of a model share.

    Args:
        streams: The number of streams.
        mixer: A name from `MIXERS`, or a mixer; every connection gets a copy of its own.
        options: All others.
    """

    streams: int
    mixer: str | Mixer
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.options:
            checks.choice(name, OPTIONS, "option of wrap")

    def make_connection(self, dim: int, index: int) -> HyperConnection:
        """Make the connection with this number in the model."""
        return HyperConnection(None, dim, self.streams, copy.deepcopy(self.mixer), index=index, **self.options)

    def make_connections(self, model: nn.Module, plans: list[LayerPlan]) -> list["LayerConnections"]:
        """Make fresh connections for each planned layer, numbered through the model, where the layer is."""
        made: list[LayerConnections] = []
        index = 0
        modules = dict(model.named_modules())
        for plan in plans:
            if plan.name not in modules:
                kind = type(model).__name__
                raise ValueError(f"{kind} has no module {plan.name}, which was wrapped: load the class that was saved")
            layer = modules[plan.name]
            place = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0))
            made.append(LayerConnections(plan, self, index).to(place.device, place.dtype))
            index += plan.additions
        return made

    def to_json(self) -> dict[str, Any]:
        """Describe the recipe in plain numbers and strings; a mixer that cannot be described is None."""
        return {"streams": self.streams, "mixer": _describe_mixer(self.mixer), "options": dict(self.options)}

    @classmethod
    def from_json(cls, described: dict[str, Any]) -> "Recipe":
        """Make the recipe that `to_json` has described."""
        mixer = described["mixer"]
        if isinstance(mixer, dict):
            mixer = MIXERS[mixer["name"]](**mixer["settings"])
        if mixer is None:
            raise ValueError("the model was wrapped with a mixer that its configuration cannot describe")
        return cls(described["streams"], mixer, described["options"])


class LayerConnections(nn.Module):
    """The connections of one wrapped layer, one for each of its residual additions.

    Args:
        plan: How the residual stream runs through the layer.
        recipe: How connections are made.
        index: The number of the first connection in the model.
    """

    def __init__(self, plan: LayerPlan, recipe: Recipe, index: int) -> None:
        super().__init__()
        self.plan, self.recipe, self.index = plan, recipe, index
        self.additions = nn.ModuleList(recipe.make_connection(plan.dim, index + k) for k in range(plan.additions))

    def first_changed(self) -> int | None:
        """Return the number of the first connection that is no longer as it was made; None if all are."""
        for number, connection in enumerate(self.additions):
            fresh = self.recipe.make_connection(self.plan.dim, self.index + number).state_dict()
            if any(
                not torch.equal(value.cpu().to(fresh[key].dtype), fresh[key])
                for key, value in connection.state_dict().items()
            ):
                return number
        return None


def _describe_mixer(mixer: str | Mixer) -> Any:
    if isinstance(mixer, str):
        return mixer
    settings = {key: getattr(mixer, key, ...) for key in inspect.signature(type(mixer)).parameters}
    known = MIXERS.get(mixer.name) is type(mixer)
    plain = all(value is None or isinstance(value, int | float | str) for value in settings.values())
    return {"name": mixer.name, "settings": settings} if known and plain else None
