"""The command `jpmhc diagnose`."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torch import nn
from torch.utils._pytree import tree_map_only

from jpmhc.cli.command import make_main, options_of
from jpmhc.diagnose import diagnose as diagnose_model
from jpmhc.experiments.training.checkpoint import load_model, locate_checkpoint
from jpmhc.experiments.training.progress import Display
from jpmhc.files import require_writable, write_file


def diagnose(
    model: Annotated[str, tyro.conf.Positional],
    options: options_of(diagnose_model, "method", "tokens", "probes", "steps", "seconds", "seed"),  # type: ignore[valid-type]
    between: Annotated[tuple[str | None, str | None] | None, tyro.conf.arg(metavar="FIRST LAST")] = None,
    text: str | None = None,
    length: int | None = None,
    device: str = "cpu",
    out: Path = Path("out/diagnose"),
) -> None:
    """Measure the singular values of a real model's Jacobian, beside the theory, and say what is healthy.

    Example: jpmhc diagnose my_model.py:build --between embed norm

    Args:
        model: FILE.py:FUNCTION or MODULE:FUNCTION, a function without arguments that returns a model and its inputs (a
            tensor, a tuple or a dict); or the folder or name of a Hugging Face model; or the folder of a run of `jpmhc
            train`, whose model is measured on its first test, by default between its modules network and token_head.
        between: Names of two modules: measure the map from the first module's output to the second module's output.
            None instead of a name is the model's input or output.
        text: Text that a Hugging Face model reads; by default tokens spread over its vocabulary.
        length: Number of tokens without --text; 16 by default.
        device: Device for the computation: cpu or cuda.
        out: Folder for diagnosis.png, diagnosis.html, diagnosis.txt and singular_values.csv.
    """
    from jpmhc.report.diagnosis import write_singular_values

    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, not {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA device is available; use the cpu")
    run = Path(model)
    require_writable(out / "diagnosis.txt")
    with Display() as display:
        for option, value in (("--text", text), ("--length", length)):
            if value is not None and (":" in model or _is_run(run)):
                raise ValueError(f"{option} is for Hugging Face models, and {model} has its own inputs: leave it out")
        if _is_run(run):
            built, inputs = _load_run(run)
            between = between or ("network", "token_head")
        else:
            built, inputs = _load(model, text, length or 16)
        diagnosis = diagnose_model(
            built.to(device),
            tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs),
            between,
            **options,
            say=lambda sentence: print(f"plan: {sentence}"),
            progress=lambda name, share: display.show(name, round(100 * share), 100),
        )
        display.say("everything measured: 100%")
    print(f"\n{diagnosis}\n")
    print(f"wrote {write_file(out / 'diagnosis.txt', f'{diagnosis}{chr(10)}')}")
    diagnosis.plot(out / "diagnosis.png")
    print(f"wrote {out / 'diagnosis.png'}")
    print(f"wrote {diagnosis.save_page(out / 'diagnosis.html')}")
    print(f"wrote {write_singular_values(diagnosis, out / 'singular_values.csv')}")


main = make_main(diagnose)


def _is_run(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir() or (folder / "manifest.json").exists()


def _load(model: str, text: str | None, length: int) -> tuple[nn.Module, Any]:
    """Return the model that a function or a Hugging Face name makes, and its inputs.

    A Hugging Face model reads the text, or else `length` tokens.
    """
    module, colon, name = model.rpartition(":")
    if not colon and model.endswith(".py"):
        raise ValueError(f"{model} lacks the name of a function that makes the model, as in {model}:build")
    if not colon:
        return _load_hugging_face(model, text, length)
    if not module or not name:
        raise ValueError(f"a model is named FILE.py:FUNCTION or MODULE:FUNCTION, and {model!r} lacks one of the two")
    function = _find_function(module, name)
    try:
        signature(function).bind()
    except TypeError:
        raise ValueError(
            f"{model} has arguments; name a function without arguments that returns a model and its inputs"
        ) from None
    result = function()
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], nn.Module):
        raise ValueError(f"{model} must return a model and its inputs, such as `return net, torch.randn(1, 8, 64)`")
    return result


def _find_function(module_or_file: str, name: str) -> Callable[[], Any]:
    if module_or_file.endswith(".py"):
        if not Path(module_or_file).is_file():
            raise ValueError(f"there is no file {module_or_file}")
        spec = importlib.util.spec_from_file_location(Path(module_or_file).stem, module_or_file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(Path(module_or_file).resolve().parent))  # the file may import its neighbours
        spec.loader.exec_module(module)
    else:
        if importlib.util.find_spec(module_or_file.partition(".")[0]) is None:
            raise ValueError(
                f"there is no module {module_or_file}; a file is named with its ending: {module_or_file}.py:{name}"
            )
        module = importlib.import_module(module_or_file)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module_or_file} has no function {name}")
    return function


def _load_hugging_face(name: str, text: str | None, length: int) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    from jpmhc.wrap.pretrained import is_wrapped, load_wrapped

    if not Path(name).is_dir() and name.count("/") > 1:
        raise ValueError(f"there is no folder {name}; a model of your own is named FILE.py:FUNCTION")
    config = AutoConfig.from_pretrained(name)
    load = functools.partial(load_wrapped, AutoModel) if is_wrapped(config) else AutoModel.from_pretrained
    model = load(name).eval()
    if text is not None:
        if Path(name).is_dir() and not any(Path(name).glob("*token*")):
            raise ValueError(f"the folder {name} holds no tokenizer: leave --text out, or save the tokenizer there too")
        return model, dict(AutoTokenizer.from_pretrained(name)(text, return_tensors="pt"))
    words = int(model.config.vocab_size)
    return model, {"input_ids": (torch.arange(length) * (words // length + 1) % words)[None]}


def _load_run(folder: Path) -> tuple[nn.Module, Any]:
    """Return a run's recursive model, in float32, and the arguments of its supervision step on the run's first test."""
    checkpoint = locate_checkpoint(folder)
    model = load_model(checkpoint)
    core = model.core
    core.dtype = torch.float32
    batch = checkpoint.config.task.build().test_examples(np.zeros(1, dtype=np.int64))
    states = (state.contiguous() for state in core.initial_states(1))
    steps = torch.zeros(1, dtype=torch.int32)
    with torch.no_grad():
        puzzle = model.puzzles(batch.identifiers)
    return core, (puzzle, batch.inputs, batch.labels, *states, steps, torch.ones(1, dtype=torch.bool), steps)
