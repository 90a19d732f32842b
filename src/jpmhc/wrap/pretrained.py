"""Saving and loading wrapped models of `transformers`: the record in the configuration, and `load_wrapped`."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from jpmhc import checks
from jpmhc.mixers import MIXERS, Mixer
from jpmhc.wrap.chain import install
from jpmhc.wrap.layers import CHILD, LayerPlan, Recipe
from jpmhc.wrap.streams import StreamStep

# transformers refuses a configuration with a fusion that it does not know, and prints the fusion's name. A wrapped
# model that is loaded as a plain one would otherwise lose its connections with no more than a warning.
NOTE = "hyper-connections (load this model with jpmhc.load_wrapped)"
# The arguments of `from_pretrained` that say where the files are; the configuration is there too.
WHERE = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "trust_remote_code", "force_download")
METHOD = "jpmhc"  # the name under which transformers knows the preparation of a wrapped model


def record_wrapping(model: nn.Module, recipe: Recipe, plans: Sequence[LayerPlan]) -> None:
    """Note in the configuration of a model of `transformers`, or of the one inside a module, how it was wrapped."""
    prefix, inner = find_pretrained(model)
    if inner is None:
        return
    names = [plan.name.removeprefix(f"{prefix}.") if prefix else plan.name for plan in plans]
    layers = [{**dataclasses.asdict(plan), "name": name} for plan, name in zip(plans, names)]
    shared = {"streams": recipe.streams, "mixer": _describe_mixer(recipe.mixer), "options": dict(recipe.options)}
    fusions = getattr(inner.config, "fusion_config", None) or {}
    inner.config.fusion_config = {**fusions, NOTE: {**shared, "layers": layers}}


def forget_wrapping(model: nn.Module) -> None:
    """Remove the note from a model's configuration."""
    _, inner = find_pretrained(model)
    fusions = getattr(inner.config, "fusion_config", None) or {} if inner is not None else {}
    if inner is not None and NOTE in fusions:
        inner.config.fusion_config = {key: value for key, value in fusions.items() if key != NOTE} or None


def find_pretrained(model: nn.Module) -> tuple[str, Any]:
    """Return the outermost model of `transformers` in a module, after its name there; None if there is none."""
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
    mixer = record["mixer"]
    if mixer is None:
        raise ValueError("the model was wrapped with a mixer that its configuration cannot describe")
    if isinstance(mixer, dict):
        mixer = MIXERS[mixer["name"]](**mixer["settings"])
    return Recipe(record["streams"], mixer, record["options"]), plans


def _describe_mixer(mixer: str | Mixer) -> str | dict[str, Any] | None:
    """Describe a mixer in numbers and strings; None if that is not possible."""
    if isinstance(mixer, str):
        return mixer
    settings = {key: getattr(mixer, key, ...) for key in inspect.signature(type(mixer)).parameters}
    known = MIXERS.get(mixer.name) is type(mixer)
    plain = all(value is None or isinstance(value, int | float | str) for value in settings.values())
    return {"name": mixer.name, "settings": settings} if known and plain else None


def load_wrapped(auto_class: Any, name_or_path: Any, **kwargs: Any) -> Any:
    """Load a wrapped model with its hyper-connections.

    Args:
        auto_class: The class to load it with, such as `AutoModelForCausalLM` or the model's own.
        name_or_path: The folder that `save_pretrained` wrote, or the model's name on the hub.
        kwargs: Of `from_pretrained`.

    Returns:
        The wrapped model, as it was saved.

    Example:
        >>> import contextlib, jpmhc, tempfile, transformers
        >>> config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
        >>> model = jpmhc.wrap(transformers.GPT2LMHeadModel(config))
        >>> folder = tempfile.mkdtemp()
        >>> with contextlib.redirect_stdout(None):  # DeepSpeed, if it is installed, prints a line
        ...     model.save_pretrained(folder)
        >>> type(jpmhc.load_wrapped(transformers.AutoModelForCausalLM, folder)).__name__
        'GPT2LMHeadModel'
    """
    from transformers import AutoConfig

    if not hasattr(auto_class, "from_pretrained") or not isinstance(name_or_path, str | Path):
        raise ValueError(
            "load_wrapped takes a class such as AutoModelForCausalLM and then a folder, got "
            f"{checks.quote(auto_class)} and {checks.quote(name_or_path)}"
        )
    is_path = isinstance(name_or_path, Path) or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if is_path and not Path(name_or_path).is_dir():
        raise ValueError(f"there is no folder {name_or_path}")
    location = {key: kwargs[key] for key in WHERE if key in kwargs}
    config = copy.deepcopy(kwargs.pop("config", None) or AutoConfig.from_pretrained(name_or_path, **location))
    if not is_wrapped(config):
        for part in getattr(config, "sub_configs", ()):
            if is_wrapped(getattr(config, part, None)):
                raise ValueError(
                    f"in {name_or_path} the part of {part} was wrapped as a model of its own, which cannot be loaded "
                    "inside another: wrap the whole model with layers="
                )
        raise ValueError(f"{name_or_path} is not a wrapped model: its configuration has no hyper-connections")
    if getattr(config, "quantization_config", None) is not None or "quantization_config" in kwargs:
        raise ValueError(
            f"{name_or_path} is quantised: load the plain model, wrap it, and load the connections' weights into it"
        )
    fusions = config.fusion_config
    config.fusion_config = {key: value for key, value in fusions.items() if key != NOTE} or None
    preparation = _preparation_class()(fusions[NOTE])
    wants_report = kwargs.pop("output_loading_info", False)
    may_differ = kwargs.pop("ignore_mismatched_sizes", False)
    model, report = auto_class.from_pretrained(
        name_or_path,
        config=config,
        quantization_config=preparation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that the refusal below names the key
        **kwargs,
    )
    for key, saved_shape, shape in sorted(report["mismatched_keys"]):
        if not may_differ or _is_connection(key):
            _refuse_shape(key, list(shape), list(saved_shape))
    for keys, verb in ((report["missing_keys"], "are without"), (report["unexpected_keys"], "have")):
        for key in sorted(filter(_is_connection, keys)):
            raise ValueError(f"the weights of {name_or_path} {verb} {key}, unlike its configuration")
    return (model, report) if wants_report else model


def is_wrapped(config: object) -> bool:
    """Say whether a configuration of `transformers` belongs to a wrapped model."""
    return NOTE in (getattr(config, "fusion_config", None) or {})


def _is_connection(key: str) -> bool:
    return f".{CHILD}." in f".{key}"


def _refuse_shape(key: str, shape: list[int], saved_shape: list[int]) -> None:
    raise ValueError(f"the configuration asks for {key} of the shape {shape}, and the weights have {saved_shape}")


@functools.cache
def _preparation_class() -> Any:
    """Register, once, the preparation of a wrapped model before transformers loads its weights.

    Its quantizers are the only means to give a model modules after it is made and before its weights are loaded.
    """
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class Preparation(QuantizationConfigMixin):
        """Holds the record of how a model was wrapped."""

        def __init__(self, record: dict[str, Any]) -> None:
            self.quant_method: Any = METHOD
            self.record = record

    @register_quantizer(METHOD)
    class Preparer(HfQuantizer):
        """Gives a model its connections before its weights are loaded, and leaves no other trace."""

        is_trainable = True

        def is_serializable(self) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            preparation: Any = self.quantization_config
            self.recipe, plans = read_record(preparation.record)
            self.plans = _fit_names(model, plans)
            strict = model._keep_in_fp32_modules_strict or set()
            model._keep_in_fp32_modules_strict = {*strict, CHILD}
            install(model, self.recipe.make_connections(model, self.plans))
            self.shapes = {key: list(value.shape) for key, value in model.named_parameters()}
            return model

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            for key, value in model.named_parameters():  # before 5.23 a quantizer's weights could have any shape
                if list(value.shape) != self.shapes[key]:
                    _refuse_shape(key, self.shapes[key], list(value.shape))
            self.remove_quantization_config(model)
            for module in model.modules():
                if hasattr(module, "config"):
                    vars(module.config).pop("_is_quantized", None)
            record_wrapping(model, self.recipe, self.plans)
            return model

    return Preparation


def _fit_names(model: Any, plans: list[LayerPlan]) -> list[LayerPlan]:
    """Return the plans with the layers' names in this model, which may be the wrapped model's body, or contain it."""
    modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    for removed, added in (("", ""), (prefix, ""), ("", prefix)):
        fitting = [dataclasses.replace(plan, name=added + plan.name.removeprefix(removed)) for plan in plans]
        if all(plan.name in modules for plan in fitting):
            return fitting
    return plans
