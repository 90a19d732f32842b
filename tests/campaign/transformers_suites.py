"""The test suites of `transformers` with every model that they make wrapped: what passes plain must pass wrapped.

The suites come from a checkout of `transformers` (`--suite FOLDER`), best of the installed version. A test that ends in
a refusal of `REFUSALS` counts as withstood, and so does a test of `MEANINGLESS`. Any other error counts as failed, also
if jpmhc raised it. A test that passes without a wrapped model is not counted.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.campaign.tally import Tally

ROUND = 1
suite = Path()  # what the option --suite names
tests = ""  # what the option --tests names: which tests of a suite, as `pytest -k` takes it; all if it is empty
SECONDS = 1200  # for one suite, plain or wrapped
# Parts of the sentences in which jpmhc refuses, and what the tests do that meet them.
REFUSALS = {
    "did not compute as when": "a decoder wrapped with cross-attention is called without it, or the reverse",
    "did not call all of its layers": "fewer layers are called than when the model was wrapped",
    "the configuration asks for": "shapes differ; the test expects the error of transformers",
    "unlike its configuration": "the test removes saved weights, or a plain model shares its configuration",
    "load this model with jpmhc.load_wrapped": "the folder is loaded as a plain model",
}
# Parts of the names of tests that look at a model's own parts, and why a wrapped model has others.
MEANINGLESS = {
    "test_feed_forward_chunking": "the two models of the test have connections at other additions",
    "test_from_pretrained_no_checkpoint": "the test loads a wrapped model's weights with a plain configuration",
    "test_can_init_all_missing_weights": "the test compares a wrapped model with one from a plain configuration",
}


def run(rng: np.random.Generator, size: int) -> Tally:
    """Run `size` suites of models, which the generator chooses, or the one file that `suite` is."""
    tally = Tally()
    files = [suite] if suite.is_file() else sorted(suite.glob("tests/models/*/test_modeling_*.py"))
    if not files:
        tally.fail(f"{suite} has no tests/models/*/test_modeling_*.py")
    for number in rng.permutation(len(files))[:size]:
        compare(files[number].resolve(), tally)
    return tally


def compare(file: Path, tally: Tally) -> None:
    """Run one suite with wrapped models, run the tests that fail with plain models too, and count the tests."""
    wrapped = run_suite(file, ["-p", "wrapped_models", "-k", tests])
    suspects = [name for name, fault in wrapped.items() if fault not in ("", "skipped") and not is_named(name, fault)]
    plain = run_suite(file, [], suspects) if suspects else {}
    for name, fault in wrapped.items():
        if name not in suspects and fault != "skipped":
            tally.hold()
        elif plain.get(name) == "":
            tally.fail(f"{file.stem}::{name}: {fault}")


def is_named(test: str, fault: str) -> bool:
    """Return whether a test means nothing for a wrapped model, or whether its error is one of the named refusals."""
    return any(part in test for part in MEANINGLESS) or any(part in fault for part in REFUSALS)


def run_suite(file: Path, plugin: Sequence[str], names: Sequence[str] = ()) -> dict[str, str]:
    """Run one suite or some of its tests, and return for each test "" if it passed, "skipped", or its error.

    A test also counts as skipped if it passed with the plugin, but no model was wrapped.

    Args:
        file: The suite.
        plugin: The options of pytest that load a plugin.
        names: The tests, as `class::name`; all tests if there are none.
    """
    root = next(folder for folder in file.parents if (folder / "tests" / "models").is_dir())
    report = root / f".{file.stem}.xml"
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:subtests", f"--junitxml={report}"]
    path = os.pathsep.join([str(Path(__file__).parent), str(root / "utils"), os.environ.get("PYTHONPATH", "")])
    local = str(file.relative_to(root))
    subprocess.run(
        [sys.executable, "-m", "pytest", *([f"{local}::{name}" for name in names] or [local]), *options, *plugin],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=SECONDS,
    )
    results: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        results[name] = results.get(name) or _describe(case)  # of a test with parts, the first error
    report.unlink()
    return results


def _describe(case: ElementTree.Element) -> str:
    """Return "" if a test passed, "skipped" if it tried nothing, or the message of its error in one line."""
    for kind in ("failure", "error"):
        if (problem := case.find(kind)) is not None:
            return " ".join((problem.get("message") or "an error without a message").split())[:300]
    stayed_plain = case.find("properties/property[@name='wrapped'][@value='0']") is not None
    return "skipped" if stayed_plain or case.find("skipped") is not None else ""
