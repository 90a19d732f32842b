"""Options of the test suite."""

import os
from pathlib import Path

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
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def conceptarc(request: pytest.FixtureRequest) -> Path:
    """Folder of the ConceptARC corpus, where the command line names it."""
    folder = request.config.getoption("--conceptarc")
    if folder is None:
        pytest.skip("needs --conceptarc FOLDER")
    return folder
