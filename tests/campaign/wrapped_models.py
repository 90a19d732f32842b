"""A plugin for pytest that wraps every model of `transformers` that a test makes, and changes its connections.

It is loaded by its bare name, since the tests that it changes have a package `tests` of their own. A model that `wrap`
refuses stays plain. Models that were saved with connections are loaded with `load_wrapped`.
"""

import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import jpmhc
from jpmhc.wrap.layers import CHILD
from jpmhc.wrap.pretrained import NOTE

BY = 0.1  # the size of the change of the connections' weights


class Busy:
    """Counts the constructors and loaders that are under way: only the outermost model is wrapped.

    Attributes:
        depth: The number of constructors and loaders under way.
        wrapped: The number of models that the running test has wrapped.
    """

    def __init__(self) -> None:
        self.depth, self.wrapped = 0, 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


BUSY = Busy()


@pytest.fixture(autouse=True)
def wrapped_models(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Let constructors return wrapped models, and let the plain loader load wrapped ones."""
    BUSY.wrapped = 0
    for model_class in _subclasses(PreTrainedModel):
        monkeypatch.setattr(model_class, "__init__", _make_init(model_class.__init__))
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", classmethod(_load(PreTrainedModel.from_pretrained.__func__))
    )
    yield
    record_property("wrapped", BUSY.wrapped)


def _subclasses(parent: type) -> Iterator[type]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


def _make_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with BUSY:
            original(self, *args, **kwargs)
        if not BUSY.depth and not any(parameter.is_meta for parameter in self.parameters()):
            wrap_and_disturb(self)

    return init


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(str(pretrained_model_name_or_path)) / str(kwargs.get("subfolder", "")) / "config.json"
        wrapped = folder.is_file() and NOTE in (json.loads(folder.read_text()).get("fusion_config") or {})
        load = jpmhc.load_wrapped if wrapped and not BUSY.depth else original
        with BUSY:
            return load(cls, pretrained_model_name_or_path, *args, **kwargs)

    return from_pretrained


def wrap_and_disturb(model: PreTrainedModel) -> None:
    """Wrap a model, if it can be, and change its connections as training does."""
    with warnings.catch_warnings(), BUSY, torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            jpmhc.wrap(model, inputs=_speech(model))
        except ValueError:
            return
        BUSY.wrapped += 1
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if f".{CHILD}." in f".{name}":
                    parameter.add_(BY * torch.randn_like(parameter))


def _speech(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """Return noise as the spectrogram that Whisper takes; None for models whose inputs `wrap` can guess."""
    if model.main_input_name != "input_features" or not hasattr(model.config, "max_source_positions"):
        return None
    parameter = next(model.parameters())
    inputs = {"input_features": torch.randn(2, model.config.num_mel_bins, 2 * model.config.max_source_positions)}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = torch.tensor([[3, 10, 17], [24, 31, 38]])
    return {
        name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }
