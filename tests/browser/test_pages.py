"""Report and explorer in Chromium: they draw, react, need no network, and fit a desk, a telephone and the dark."""

import shutil
from pathlib import Path

import pytest
from benchmarks.compute_atlas import assemble_atlas, compute_choice
from matplotlib import image

from jpmhc import cli
from jpmhc.report.explorer import MISSING, render_explorer
from jpmhc.report.page import write_page
from tests.browser.chromium import FOUND, Chromium
from tests.report.run_folders import write_run, write_votes

pytestmark = pytest.mark.skipif(
    FOUND is None, reason="Chromium is not installed: make browser installs it where that can be done"
)
SIZES = {"desk": (1200, 900), "telephone": (390, 800)}
ARROW_LEFT = ("ArrowLeft", 37)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


def check(browser, folder, name):
    """Look at a page at every size, light and dark: nothing is wider than the window, and the scheme is taken."""
    for place, (width, height) in SIZES.items():
        papers = set()
        for dark in (False, True):
            browser.resize(width, height, dark=dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            papers.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            shot = browser.screenshot(folder / f"{name}-{place}-{'dark' if dark else 'light'}.png")
            assert image.imread(shot).shape[1] == width
        assert len(papers) == 2
    assert browser.errors == []
    assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []


def test_the_explorer_follows_its_sliders_and_its_link(browser, tmp_path):
    cli.main(["explore", "--out", str(tmp_path / "explore.html")])
    browser.resize(1200, 900)
    browser.open(f"file://{tmp_path}/explore.html")
    curve = "document.getElementById('curve').getAttribute('d')"
    collapsed = "document.querySelector('#numbers td:nth-child(2)').textContent"
    before = browser.evaluate(curve), browser.evaluate(collapsed)
    assert "NaN" not in before[0]
    assert float(before[1].split()[0]) > 70  # three of four directions of random bistochastic skips are lost
    browser.evaluate("document.getElementById('mixer').focus()")
    for _ in range(2):  # by the keyboard, from sinkhorn to identity
        browser.press(*ARROW_LEFT)
    after = browser.evaluate(curve), browser.evaluate(collapsed)
    assert after[0] != before[0]
    assert float(after[1].split()[0]) < 1
    link = browser.evaluate("document.getElementById('link').href")
    assert "mixer=identity" in link
    assert browser.evaluate("location.href") == link
    browser.open(link)
    assert browser.evaluate(curve) == after[0]
    check(browser, tmp_path, "explore")


def test_a_link_to_an_unknown_choice_is_answered(browser, tmp_path):
    cli.main(["explore", "--out", str(tmp_path / "explore.html")])
    browser.open(f"file://{tmp_path}/explore.html#mixer=foo&depht=3")
    said = browser.evaluate("document.getElementById('refused').textContent")
    assert "asks for mixer foo, which is not on this page (it has identity," in said
    assert "sinkhorn is shown" in said
    assert "asks for depht, which is no choice of this page (mixer," in said
    browser.open(f"file://{tmp_path}/explore.html#mixer=cayley")
    assert browser.evaluate("document.getElementById('refused').hidden")
    assert browser.evaluate("document.getElementById('mixer').selectedOptions[0].textContent") == "cayley"
    assert browser.errors == []


def test_the_explorer_says_what_its_atlas_lacks(browser, tmp_path):
    held = assemble_atlas(
        {("sinkhorn", 4, 48, 0.25, "gelu", "before"): compute_choice(("sinkhorn", 4, 4, 0.25, "gelu", "none"))}
    )
    said = "document.getElementById('said').textContent"
    held.theory[:] = MISSING  # samples alone
    write_page(render_explorer(held), tmp_path / "samples.html")
    browser.open(f"file://{tmp_path}/samples.html")
    assert "The theory was not computed for this choice" in browser.evaluate(said)
    assert browser.evaluate("document.getElementById('curve')") is None
    browser.open(f"file://{tmp_path}/samples.html#depth=4")
    assert "not in the atlas" in browser.evaluate(said)
    assert browser.evaluate("document.querySelectorAll('circle.sampled').length") == 1  # the legend's
    assert browser.errors == []


def test_the_report_runs_nothing_and_fits(browser, tmp_path):
    evil = "</pre><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    run = write_run(tmp_path / "run", note=evil)
    grid = [[1, 2, 3], [4, 5, 6]]
    candidates = [{"grid": grid, "votes": 5, "of": 9}]
    write_votes(run, [{"task": evil, "test": 0, "input": grid, "output": grid, "candidates": candidates}])
    page = tmp_path / "report.html"
    cli.main(["report", str(run), str(write_run(tmp_path / "other", mixer="sinkhorn")), "--out", str(page)])
    browser.open(f"file://{page}")
    assert browser.evaluate("window.hacked") is None
    assert browser.evaluate("document.querySelectorAll('script').length") == 0
    assert browser.evaluate("document.querySelectorAll('figure svg.chart').length") > 10
    assert browser.evaluate("document.querySelectorAll('img.grid').length") == 3
    check(browser, tmp_path, "report")


def test_built_pages_stay_in_their_window(browser, tmp_path):
    sphinx = pytest.importorskip("sphinx.cmd.build", reason="the documentation's packages are not installed")
    pytest.importorskip("furo")
    docs = Path(__file__).parents[2] / "docs"
    shutil.copytree(docs / "_static", tmp_path / "docs" / "_static")
    shutil.copy(docs / "conf.py", tmp_path / "docs")
    code = "# " + "a comment that is longer than any window " * 8
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n```python\n{code}\n```\n\nLet $n$, 30 % of $(m)$.\n")
    assert sphinx.main(["-q", str(tmp_path / "docs"), str(tmp_path / "built")]) == 0
    for width in (390, 800, 1100, 1280, 1600):
        browser.resize(width, 900)
        browser.open(f"file://{tmp_path}/built/index.html")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelector('.content').getBoundingClientRect().right") <= width
    assert browser.evaluate("document.querySelector('.formula').textContent") == "n,"
    assert "30\u00a0%" in browser.evaluate("document.querySelector('article').textContent")
    assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []
