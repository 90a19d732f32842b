"""Loading a wrapped model that `save_pretrained` has written."""

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

from jpmhc import checks
from jpmhc.wrap.hooks import install
from jpmhc.wrap.plan import LayerPlan
from jpmhc.wrap.recipe import CHILD
from jpmhc.wrap.record import NOTE, read_record, record_wrapping

# The arguments of `from_pretrained` that say where the files are; the configuration lies there too.
WHERE = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "trust_remote_code", "force_download")
METHOD = "jpmhc"  # the name under which transformers knows how the model is prepared


def load_wrapped(auto_class: Any, name_or_path: Any, **kwargs: Any) -> Any:
    """Load a wrapped model with its hyper-connections.

    Args:
        auto_class: The class to load it with, such as `AutoModelForCausalLM` or the model's own.
        name_or_path: The folder that `save_pretrained` wrote, or the model's name on the hub.
        kwargs: Of `from_pretrained`.

    Returns:
        The wrapped model, as it was saved.
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
    place = {key: kwargs[key] for key in WHERE if key in kwargs}
    config = copy.deepcopy(kwargs.pop("config", None) or AutoConfig.from_pretrained(name_or_path, **place))
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
    for key, found, asked in sorted(report["mismatched_keys"]):
        if not may_differ or _is_connection(key):
            _refuse_shape(key, list(asked), list(found))
    for keys, said in ((report["missing_keys"], "are without"), (report["unexpected_keys"], "have")):
        for key in sorted(filter(_is_connection, keys)):
            raise ValueError(f"the weights of {name_or_path} {said} {key}, against what its configuration says")
    return (model, report) if wants_report else model


def is_wrapped(config: Any) -> bool:
    """Say whether a configuration of `transformers` is that of a wrapped model."""
    return NOTE in (getattr(config, "fusion_config", None) or {})


def _is_connection(key: str) -> bool:
    return f".{CHILD}." in f".{key}"


def _refuse_shape(key: str, asked: list[int], found: list[int]) -> None:
    raise ValueError(f"the configuration asks for {key} of the shape {asked}, and the weights have {found}")


@functools.cache
def _preparation_class() -> Any:
    """Register, once, how transformers prepares a wrapped model before it loads weights.

    Its quantizers are the one place where a model may gain modules between its making and the loading of its weights.
    """
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class Preparation(QuantizationConfigMixin):
        """The record of how a model was wrapped."""

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
    """Return plans with the layers' names in this model, which may be the wrapped one's body, or have it as body."""
    modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    for take, give in (("", ""), (prefix, ""), ("", prefix)):
        fitting = [dataclasses.replace(plan, name=give + plan.name.removeprefix(take)) for plan in plans]
        if all(plan.name in modules for plan in fitting):
            return fitting
    return plans
