"""Settings that are given once, when a module is made."""

from typing import Any

from torch import nn


class Settled(nn.Module):
    """A module that refuses to have its settings changed: what was planned or compiled with them would not notice."""

    settings: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.settings and (name in vars(self) or name in self._modules):
            raise AttributeError(f"{name} is set when a {type(self).__name__} is made: make a new one to change it")
        super().__setattr__(name, value)
