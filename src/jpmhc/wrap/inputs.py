"""What a model is called with in the probing run."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jpmhc.checks import to_call_arguments

Call = tuple[tuple[Any, ...], dict[str, Any]]

# What models raise that are called without something they need.
_FAILURES = (AttributeError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def call_arguments(model: nn.Module, inputs: Any) -> Call:
    """The arguments of one call of the model: those that were given, or small ones for a Hugging Face model."""
    return ((), default_inputs(model)) if inputs is None else to_call_arguments(inputs)


def default_inputs(model: nn.Module) -> dict[str, Any]:
    """Two sequences of eight tokens, or two images of noise, by what the model's configuration says it takes."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    device = next((parameter.device for parameter in model.parameters()), None)
    if config is not None and main == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        count = max(2, min(int(getattr(text, "vocab_size", 2)), 1000))
        tokens = (torch.arange(16).reshape(2, 8) * 7 + 3) % count
        found: dict[str, Any] = {"input_ids": tokens.to(device)}
        if getattr(config, "is_encoder_decoder", False):
            found["decoder_input_ids"] = found["input_ids"][:, :5]
        return found
    if config is not None and main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size: Any = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        images = torch.randn(
            2, getattr(vision, "num_channels", 3), height, width, generator=torch.Generator().manual_seed(0)
        )
        return {"pixel_values": images.to(device, next(p.dtype for p in model.parameters() if p.is_floating_point()))}
    raise ValueError(
        f"cannot guess what {type(model).__name__} is called with: give inputs=, a tensor, tuple or dict of arguments"
    )


@contextlib.contextmanager
def explaining_guess(model: nn.Module, guessed: dict[str, Any]) -> Iterator[None]:
    """Turn the failure of a model that was called with guessed arguments into a sentence that asks for others."""
    try:
        yield
    except _FAILURES as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{type(model).__name__} cannot be called with {' and '.join(guessed)} alone, which was guessed "
            f"({type(error).__name__}: {said}): give inputs=, a tensor, tuple or dict of arguments"
        ) from error
