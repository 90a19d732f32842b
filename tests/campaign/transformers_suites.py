"""The test suites of `transformers` with every model that they make wrapped: what passes plain must pass wrapped.

The suites come from a checkout of `transformers` (`--suite FOLDER`), best of the installed version. A test that ends in
one of jpmhc's own sentences counts as withstood, and so does a test that means nothing for a wrapped model.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np

from tests.campaign.tally import Tally

ROUND = 1
suite = Path()  # what the option --suite names
SECONDS = 1200  # for one suite, plain or wrapped
# Tests that look at a model's own parts, and why a wrapped model has others.
MEANINGLESS = {
    "test_model_weights_reload_no_missing_tied_weights": "the test removes keys of the plain model's file",
    "test_feed_forward_chunking": "the two models of the test have connections at other additions",
    "test_from_pretrained_no_checkpoint": "the test loads a wrapped model's weights with a plain configuration",
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
    """Run one suite plain and wrapped, and count each test that passes plain."""
    plain, wrapped = run_suite(file, wrapped=False), run_suite(file, wrapped=True)
    for name in (name for name, fault in plain.items() if fault == ""):
        fault = wrapped.get(name, "not run")
        reason = next((reason for part, reason in MEANINGLESS.items() if part in name), None)
        refused = "jpmhc/wrap" in fault or "jpmhc.load_wrapped" in fault  # in the place, or in the sentence
        if fault in ("", "skipped") or reason is not None or refused:
            tally.hold()
        else:
            tally.fail(f"{file.stem}::{name}: {fault.splitlines()[0]}")


def run_suite(file: Path, wrapped: bool) -> dict[str, str]:
    """Run one suite, and return for each test "" if it passed, "skipped", or its error and the place that raised it."""
    root = next(folder for folder in file.parents if (folder / "tests" / "models").is_dir())
    report = root / f".{file.stem}-{'wrapped' if wrapped else 'plain'}.xml"
    plugin = ["-p", "wrapped_models"] if wrapped else []
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
    path = os.pathsep.join([str(Path(__file__).parent), str(root / "utils"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "pytest", str(file.relative_to(root)), *options, *plugin],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=SECONDS,
    )
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        results[name] = "skipped" if case.find("skipped") is not None else _describe(case)
    report.unlink()
    return results


def _describe(case: ElementTree.Element) -> str:
    """Return the error of a test in one line, and in another one the place that raised it."""
    problem = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
    if problem is None:
        return ""
    lines = [line for line in (problem.text or "").splitlines() if ".py:" in line and not line.startswith("E ")]
    message = " ".join((problem.get("message") or "").split())[:300]
    return f"{message}\n{lines[-1].strip() if lines else ''}"
