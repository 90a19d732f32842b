"""The base class of this package's optimisers."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from jpmhc import checks

ParameterGroup = dict[str, Any]  # parameters under "params", and options by name


class GroupwiseOptimizer(Optimizer):
    """An optimiser whose step updates one parameter group after the other.

    Args:
        params: Parameters or groups of them.
        defaults: The values of options that a group does not set. `lr`, `betas` and `weight_decay` are checked.
    """

    def __init__(self, params: ParamsT, defaults: ParameterGroup) -> None:
        if not isinstance(defaults["lr"], Tensor):
            checks.inside(defaults["lr"], "[0, inf)", "lr")
        for beta in defaults.get("betas", ()):
            checks.inside(beta, "[0, 1)", "betas")
        checks.inside(defaults.get("weight_decay", 0.0), "[0, inf)", "weight_decay")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update_group(group)
        return loss

    @abstractmethod
    def update_group(self, group: ParameterGroup) -> None:
        """Update the parameters of one group that have a gradient."""
