"""Save and load wrapped models of `transformers`.

A record in the configuration describes the wrapping, by a recipe (`Recipe`) and the layers' plans (`LayerPlan`).
`load_wrapped` adds the connections of the record before it loads the weights.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from jpmhc import checks
from jpmhc.mixers import MIXERS, Mixer
from jpmhc.wrap.installation import install
from jpmhc.wrap.layers import CHILD, LayerPlan, Recipe
from jpmhc.wrap.operations import TYPE_CHANGES
from jpmhc.wrap.streams import StreamStep

# The record's key. transformers refuses a configuration with an unknown fusion, and prints the fusion's name.
# Otherwise a wrapped model that is loaded as a plain model would lose its connections with only a warning.
NOTE = "hyper-connections (load this model with jpmhc.load_wrapped)"
# The arguments of `from_pretrained` that locate the files of the model and its configuration.
WHERE = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "trust_remote_code", "force_download")
# The arguments of `from_pretrained` about the loading of weights, of which some are also settings of configurations.
LOADING = {"dtype", "torch_dtype", "attn_implementation", "experts_implementation"}
LOADING |= {"quantization_config", "distributed_config", "fusion_config", "device_map"}
METHOD = "jpmhc"  # the name under which the preparation of wrapped models is registered in transformers


def record_wrapping(model: nn.Module, recipe: Recipe, plans: Sequence[LayerPlan]) -> None:
    """Write the recipe and the plans into the configuration of every `transformers` model in a module.

    Parts of a model may have separate configurations and may be saved alone, so each configuration gets a record of its
    own part's layers.
    """
    shared = {"streams": recipe.streams, "mixer": _describe_mixer(recipe.mixer), "options": dict(recipe.options)}
    for prefix, config in _own_configs(model):
        layers = [
            {**dataclasses.asdict(plan), "name": plan.name.removeprefix(prefix)}
            for plan in plans
            if plan.name.startswith(prefix)
        ]
        if layers:
            fusions = getattr(config, "fusion_config", None) or {}
            config.fusion_config = {**fusions, NOTE: {**shared, "layers": layers}}


def forget_wrapping(model: nn.Module) -> None:
    """Remove the records from a model's configurations."""
    for _, config in _own_configs(model):
        _remove_note(config)


def _remove_note(config: Any) -> None:
    if is_wrapped(config):
        config.fusion_config = {key: value for key, value in config.fusion_config.items() if key != NOTE} or None


def _pretrained_parts(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (prefix of its names, module) for each `transformers` model in a module, outermost first."""
    return [
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if hasattr(type(module), "base_model_prefix") and hasattr(module.config, "save_pretrained")
    ]


def is_pretrained(model: nn.Module) -> bool:
    """Return whether a module is a model of `transformers` or contains one."""
    return bool(_pretrained_parts(model))


def _own_configs(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name prefix of the outermost part that uses the configuration, configuration) for each configuration.

    Other models may share a configuration object, so this model's modules get a copy of it. A model without a head
    keeps the object, because it may be the body of a larger model that is saved with this configuration.
    """
    outermost: dict[int, tuple[str, Any]] = {}
    for prefix, part in _pretrained_parts(model):
        outermost.setdefault(id(part.config), (prefix, part))
    copies: dict[int, Any] = {}
    for _, part in outermost.values():
        if not is_wrapped(part.config) and (part.base_model is not part or part.can_generate()):
            copy.deepcopy(part.config, copies)
    for module in model.modules() if copies else ():
        for name, value in vars(module).items():
            if id(value) in copies and hasattr(value, "save_pretrained"):
                setattr(module, name, copies[id(value)])
    return [(prefix, part.config) for prefix, part in outermost.values()]


def read_record(record: dict[str, Any], mixer: Mixer | None = None) -> tuple[Recipe, list[LayerPlan]]:
    """Return the recipe and the plans that a record describes.

    Args:
        record: The record from the configuration.
        mixer: The mixer, if it is a class of the user's own, which a record cannot describe.
    """
    for key in ("layers", "streams", "mixer", "options"):
        if key not in record:
            raise ValueError(f"the configuration does not say how the model was wrapped: {key!r} is missing")
    plans = []
    for layer in record["layers"]:
        steps = tuple(StreamStep(*step) for step in layer["steps"] if step[0] not in TYPE_CHANGES)
        plans.append(LayerPlan(**{**layer, "steps": steps, "modules": tuple(layer["modules"])}))
    return Recipe(record["streams"], _read_mixer(record["mixer"], mixer), record["options"]), plans


def _read_mixer(described: str | dict[str, Any] | None, mixer: Mixer | None) -> str | Mixer:
    """Return the mixer `described` in a record; if it is a class of the user's own, return the given `mixer`."""
    if isinstance(described, dict) and described["settings"] is None:
        own = described["name"]
        if mixer is None or type(mixer).__name__ != own:
            other = type(mixer).__name__ if isinstance(mixer, Mixer) else repr(mixer)
            raise ValueError(
                f"the model was wrapped with the mixer {own}, which a configuration cannot describe: give load_wrapped "
                f"mixer={own}(…)" + ("" if mixer is None else f", not {other}")
            )
        settings, _ = _read_settings(mixer)
        for key, value in described.get("known", {}).items():
            if settings.get(key, value) != value:
                raise ValueError(f"the model was wrapped with {own}({key}={value!r}), not {key}={settings[key]!r}")
        return mixer
    if mixer is not None:
        raise ValueError("mixer= is for a mixer of your own; this configuration describes the model's mixer")
    if isinstance(described, dict):
        return MIXERS[described["name"]](**described["settings"])
    if described is None:
        raise ValueError("the configuration does not describe the mixer that the model was wrapped with")
    return described


def _describe_mixer(mixer: str | Mixer) -> str | dict[str, Any]:
    """Return a mixer's description for a record: its name, or a dict with its name and settings.

    If a record cannot hold all settings, "settings" is None, and "known" has the settings that it can hold.
    """
    if isinstance(mixer, str):
        return mixer
    settings, complete = _read_settings(mixer)
    if complete and type(mixer) in MIXERS.values():
        return {"name": mixer.name, "settings": settings}
    return {"name": type(mixer).__name__, "settings": None, "known": settings}


def _read_settings(mixer: Mixer) -> tuple[dict[str, int | float | str | None], bool]:
    """Return the settings of a mixer that a record can hold (numbers, texts, None), and whether they are complete."""
    settings = {key: getattr(mixer, key, ...) for key in inspect.signature(type(mixer)).parameters}
    plain = {key: value for key, value in settings.items() if value is None or isinstance(value, int | float | str)}
    return plain, len(plain) == len(settings)


def is_described(mixer: str | Mixer) -> bool:
    """Return whether a configuration can describe a mixer, so that `load_wrapped` needs no `mixer` argument."""
    described = _describe_mixer(mixer)
    return isinstance(described, str) or described["settings"] is not None


def load_wrapped(auto_class: Any, name_or_path: str | Path, *, mixer: Mixer | None = None, **kwargs: Any) -> Any:
    """Load a wrapped model with its hyper-connections.

    Args:
        auto_class: The class that loads the model, such as `AutoModelForCausalLM` or the model's own class.
        name_or_path: The folder that `save_pretrained` wrote, or the model's name on the hub.
        mixer: The mixer, if the model was wrapped with a mixer of your own.
        kwargs: Further arguments of `from_pretrained`.

    Returns:
        The wrapped model with the saved weights.

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
    if not hasattr(auto_class, "from_pretrained") or not isinstance(name_or_path, str | Path):
        raise ValueError(
            "load_wrapped takes a class such as AutoModelForCausalLM and then a folder, got "
            f"{checks.quote(auto_class)} and {checks.quote(name_or_path)}"
        )
    if "streams" in kwargs:
        raise ValueError("load_wrapped takes no streams=: the saved configuration says how the model was wrapped")
    is_path = isinstance(name_or_path, Path) or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if is_path and not Path(name_or_path).is_dir():
        raise ValueError(f"there is no folder {name_or_path}")
    given = kwargs.get("config")
    config, kwargs = _load_config(auto_class, name_or_path, kwargs)
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    if not is_wrapped(config):
        for name in filter(lambda name: is_wrapped(parts[name]), parts):
            raise ValueError(
                f"in {name_or_path} the part of {name} was wrapped as a model of its own, which cannot be loaded "
                "inside another: wrap the whole model with layers="
            )
        if given is not None:
            raise ValueError(
                "the configuration in config= has no hyper-connections: change the configuration that was saved with "
                f"{name_or_path}"
            )
        raise ValueError(f"{name_or_path} is not a wrapped model: its configuration has no hyper-connections")
    if getattr(config, "quantization_config", None) is not None or "quantization_config" in kwargs:
        raise ValueError(
            f"{name_or_path} is quantised: load the plain model, wrap it, and load the connections' weights into it"
        )
    recipe, plans = read_record(config.fusion_config[NOTE], mixer)
    for part in (config, *parts.values()):
        _remove_note(part)
    wants_report = kwargs.pop("output_loading_info", False)
    may_differ = kwargs.pop("ignore_mismatched_sizes", False)
    model, report = auto_class.from_pretrained(
        name_or_path,
        config=config,
        quantization_config=_preparation_class()(recipe, plans, may_differ),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that the refusal below names the key
        **kwargs,
    )
    for key, saved_shape, shape in sorted(report["mismatched_keys"]):
        if not may_differ or _is_connection(key):
            _refuse_shape(key, list(shape), list(saved_shape))
    layers = dict(model.named_modules())
    for keys, verb in ((report["missing_keys"], "are without"), (report["unexpected_keys"], "have")):
        for key in sorted(filter(_is_connection, keys)):
            if key.partition(f"{CHILD}.")[0].removesuffix(".") in layers:
                raise ValueError(
                    f"the weights of {name_or_path} {verb} {key}, unlike its configuration; a model that was never "
                    "wrapped but shared its configuration with a wrapped one is loaded by from_pretrained(…, config=…)"
                )
    return (model, report) if wants_report else model


def _load_config(auto_class: Any, name_or_path: str | Path, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration, changed by the settings among `kwargs`, and the other entries of `kwargs`.

    As in `from_pretrained`, the other entries are for the model's class.
    """
    from transformers import AutoConfig

    given = kwargs.get("config")
    if hasattr(given, "save_pretrained"):
        return copy.deepcopy(given), {key: value for key, value in kwargs.items() if key != "config"}
    config_class = getattr(auto_class, "config_class", None) or AutoConfig
    location = {key: kwargs[key] for key in WHERE if key in kwargs}
    settings = {key: value for key, value in kwargs.items() if key not in (*WHERE, *LOADING, "config")}
    config, unused = config_class.from_pretrained(
        given or name_or_path, return_unused_kwargs=True, **location, **copy.copy(settings)
    )
    known = settings.keys() - unused.keys()
    return config, {key: value for key, value in kwargs.items() if key not in known and key != "config"}


def is_wrapped(config: object) -> bool:
    """Return whether a configuration of `transformers` belongs to a wrapped model."""
    return NOTE in (getattr(config, "fusion_config", None) or {})


def _is_connection(key: str) -> bool:
    return f".{CHILD}." in f".{key}"


def _refuse_shape(key: str, shape: list[int], saved_shape: list[int]) -> None:
    raise ValueError(f"the configuration asks for {key} of the shape {shape}, and the weights have {saved_shape}")


@functools.cache
def _preparation_class() -> Any:
    """Register a quantizer in transformers that adds connections to a model before its weights are loaded.

    A quantizer is the only way in transformers to add modules between a model's construction and the loading of its
    weights. The registration happens once; the return value is the quantizer's configuration class.
    """
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class Preparation(QuantizationConfigMixin):
        """The recipe and plans of a wrapped model; `may_differ` allows weights with other shapes than the model's."""

        def __init__(self, recipe: Recipe, plans: list[LayerPlan], may_differ: bool) -> None:
            self.quant_method: Any = METHOD
            self.recipe, self.plans, self.may_differ = recipe, plans, may_differ

    @register_quantizer(METHOD)
    class Preparer(HfQuantizer):
        """A quantizer that only adds connections to a model before its weights are loaded."""

        is_trainable = True

        def is_serializable(self) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            preparation: Any = self.quantization_config
            self.recipe, self.plans = preparation.recipe, _fit_names(model, preparation.plans)
            strict = model._keep_in_fp32_modules_strict or set()
            model._keep_in_fp32_modules_strict = {*strict, CHILD}
            install(model, self.recipe.make_connections(model, self.plans))
            self.shapes = {key: list(value.shape) for key, value in model.named_parameters()}
            return model

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            preparation: Any = self.quantization_config
            resized: list[str] = []
            for key, value in list(model.named_parameters()):  # before 5.23 shapes are not checked
                if list(value.shape) != self.shapes[key]:
                    if not preparation.may_differ or _is_connection(key):
                        _refuse_shape(key, self.shapes[key], list(value.shape))
                    owner, _, name = key.rpartition(".")
                    module = model.get_submodule(owner)
                    setattr(module, name, nn.Parameter(value.new_empty(self.shapes[key])))
                    module._is_hf_initialized = False
                    resized.append(f"{key} (saved {list(value.shape)}, now {self.shapes[key]})")
            if resized:  # transformers initialises the parameters that were not loaded
                model.initialize_weights()
                model.tie_weights()
                warnings.warn(
                    f"saved weights of another shape were not loaded, and {', '.join(resized)} got fresh values: "
                    "train them before you use the model",
                    stacklevel=2,
                )
            self.remove_quantization_config(model)
            for module in model.modules():
                if hasattr(module, "config"):
                    vars(module.config).pop("_is_quantized", None)
            record_wrapping(model, self.recipe, self.plans)
            return model

    return Preparation


def _fit_names(model: Any, plans: list[LayerPlan]) -> list[LayerPlan]:
    """Return the plans with the layers' names in this model, which may be a part of the saved model, or contain it.

    Layers of parts that this model lacks are left out.
    """
    modules, base = dict(model.named_modules()), f"{model.base_model_prefix}."
    prefixes = {plan.name[:end] for plan in plans for end in range(len(plan.name)) if plan.name[end - 1] == "."}
    best: list[LayerPlan] = []
    for removed, added in (("", ""), ("", base), *((prefix, "") for prefix in sorted(prefixes))):
        named = [
            dataclasses.replace(plan, name=added + plan.name.removeprefix(removed))
            for plan in plans
            if plan.name.startswith(removed)
        ]
        fitting = [
            plan for plan in named if plan.name in modules and plan.kind in ("", type(modules[plan.name]).__name__)
        ]
        if len(fitting) > len(best):
            # Keep all layers of a chain if one fits; a missing layer inside a chain raises an error later.
            chains = list(itertools.accumulate(plan.first for plan in named))
            present = {chain for plan, chain in zip(named, chains) if plan in fitting}
            best = [plan for plan, chain in zip(named, chains) if chain in present]
    return best or plans
