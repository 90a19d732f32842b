"""The examples in docstrings run, and every public name has one."""

import doctest
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import jpmhc

SOURCE = Path(jpmhc.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text())
PACKAGES = ("", "spectra", "paper", "manifolds", "optim", "dialects")  # every name of theirs needs an example
# The functions that need an example in a module that is a public name itself, such as `manifolds.birkhoff`.
FUNCTIONS = ("project", "violation", "sample", "load", "dump", "best_generating_set", "spectral_gap")

# Public names that still lack an example; the list only shrinks.
MISSING = """
    expand_streams HyperConnection HyperConnectionStack load_plain_weights manifolds.permutation.violation
    parameter_groups reduce_streams spectra.choose StreamExpansion StreamHead
"""


def module_of(path: Path) -> str:
    return ".".join(("jpmhc", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_examples_run(file):
    module = importlib.import_module(module_of(file))
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report: list[str] = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, globs={**vars(module), "jpmhc": jpmhc}):
        torch.manual_seed(0)
        runner.run(example, out=report.append)
    assert not runner.failures, "\n".join(report)
    assert runner.tries


def test_every_public_name_has_an_example():
    names = {name for package in PACKAGES for name in names_without_example(package)}
    missing = sorted(names - set(MISSING.split()))
    assert not missing, f"no example: {', '.join(missing)}"


def names_without_example(package: str) -> Iterator[str]:
    home = importlib.import_module(f"jpmhc.{package}".rstrip("."))
    for name in home.__all__:
        value = getattr(home, name)
        members = {name: value}
        if isinstance(value, types.ModuleType):
            members = {f"{name}.{function}": vars(value)[function] for function in FUNCTIONS if function in vars(value)}
        for label, member in members.items():
            if callable(member) and not has_example(member):
                yield f"{package}.{label}".lstrip(".")


def has_example(member: object) -> bool:
    parts = [member, *vars(member).values()] if isinstance(member, type) else [member]
    return any(">>> " in (getattr(part, "__doc__", None) or "") for part in parts)
