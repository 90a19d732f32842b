"""Options of the test suite."""

import importlib.util
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

# Without a device the Triton kernels run in the interpreter, which has to be chosen before anything imports them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from tests import triton_interpreter

    triton_interpreter.repair()

    from jpmhc import mixers
    from jpmhc.kernels import write_read  # noqa: F401

    for mixer in mixers.MIXERS.values():  # now, before a test takes the variable away
        mixer.by_default(4, dynamic=True).triton_form()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--conceptarc", type=Path, default=None, help="folder with the ConceptARC corpus; its tests are skipped without"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    mark, reason = ("interpreter", INTERPRETER) if has_gpu else ("gpu", "needs a CUDA device")
    for item in items:
        if mark in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
        if "cli" in item.path.parts and (missing := [name for name in COMMANDS if not _is_installed(name)]):
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


INTERPRETER = "on the CPU, through Triton's interpreter, which is not there beside a CUDA device"
EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def _import_names(extra: str) -> set[str]:
    """Return the packages of an extra, as they are imported."""
    names = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in EXTRAS[extra]}
    return {"yaml" if name == "pyyaml" else name for name in names} - {"jpmhc"}


COMMANDS = sorted(_import_names("cli") | _import_names("spectra"))  # without which the commands refuse to run
OPTIONAL = set().union(*map(_import_names, EXTRAS))


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _skip_without_package(report: Any, error: str, path: Path) -> None:
    """Make a failure a skip with the package's name, if it is an optional package that is not installed."""
    missing = re.search(r"No module named '(\w+)", error)
    if missing is not None and missing[1] in OPTIONAL and not _is_installed(missing[1]):
        report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: needs {missing[1]}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield
    if report.failed:
        _skip_without_package(report, str(report.longrepr), collector.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and call.excinfo is not None and call.excinfo.errisinstance(ModuleNotFoundError):
        _skip_without_package(report, str(call.excinfo.value), item.path)
    return report


@pytest.fixture(scope="session")
def conceptarc(request: pytest.FixtureRequest) -> Path:
    """Folder of the ConceptARC corpus, where the command line names it."""
    folder = request.config.getoption("--conceptarc")
    if folder is None:
        pytest.skip("needs --conceptarc FOLDER")
    return folder
