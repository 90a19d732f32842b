"""The documentation: links lead somewhere, code runs, and tables name what there is."""

import ast
import importlib
import inspect
import io
import re
import shutil
import tokenize
from pathlib import Path

import pytest
from docs import draw_architecture

import jpmhc

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "jpmhc"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Pages whose blocks of Python need nothing but the library and its extras.
RUNNING = (
    "README.md",
    "docs/guides/cost.md",
    "docs/guides/diagnose.md",
    "docs/guides/export.md",
    "docs/guides/gpt.md",
    "docs/guides/own_mixer.md",
    "docs/guides/spectra.md",
    "docs/index.md",
)


# Pages whose blocks need `transformers` as well.
RUNNING_WITH_TRANSFORMERS = ("docs/guides/dialects.md",)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs or f'<a id="{anchor}">' in found.read_text(), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_formulas_are_drawn(page):
    """Every dollar outside code begins or ends a formula, and every formula becomes MathML in full."""
    markdown_it = pytest.importorskip("markdown_it", reason="the documentation's packages are not installed")
    from latex2mathml.converter import convert
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    reader = markdown_it.MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)
    tokens = list(reader.parse(page.read_text()))
    for token in tokens:
        tokens.extend(token.children or [])
        if token.type == "text":
            assert "$" not in token.content, f"{name(page)}: a formula begins or ends too late: {token.content}"
        elif token.type.startswith("math"):
            assert "\\" not in convert(token.content), f"{name(page)}: not drawn in full: {token.content}"


@pytest.mark.parametrize("page", [page for page in RUNNING if (ROOT / page).exists()])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documentation"}  # a block may use what those before it have made
    for block in python_blocks(ROOT / page):
        exec(compile(block, page, "exec"), names)


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def test_every_page_with_python_is_run():
    elsewhere = {"docs/guides/hugging_face.md"}  # tests/wrap/test_guide.py
    assert {name(page) for page in PAGES if python_blocks(page)} <= {*RUNNING, *RUNNING_WITH_TRANSFORMERS} | elsewhere


@pytest.mark.parametrize("page", RUNNING_WITH_TRANSFORMERS)
def test_python_blocks_on_transformers_run(page, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    test_python_blocks_run(page, tmp_path, monkeypatch)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "index.md":
            assert page.name in index, f"docs/index.md does not mention {name(page)}"


# Files that a page may name although they are the reader's own, or made by a command.
ELSEWHERE = {"NAME.py", "NAME_triton.py", "my_model.py", "singular_values.csv"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_files_that_a_page_names_exist(page):
    """Paths in code, such as `kernels/gates.py` or `benchmarks/harness.py`, are those of files that exist."""
    for path in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|csv))`", page.read_text()):
        found = any((home / path).exists() for home in (ROOT, SOURCE)) or ("/" not in path and any(SOURCE.rglob(path)))
        assert found or path.split("/")[-1] in ELSEWHERE, f"{name(page)} names {path}, which is not there"


def test_the_table_of_packages_is_drawn_from_the_imports():
    page = draw_architecture.PAGE.read_text()
    assert page == draw_architecture.update(page), "run `python docs/draw_architecture.py`"


def test_every_equation_that_code_cites_is_in_the_table():
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (`.*`) \|$", (ROOT / "docs/equations.md").read_text(), re.M)
    table: dict[str, set[str]] = {}
    for label, files in rows:
        table.setdefault(label, set()).update(re.findall(r"`([^`]+)`", files))
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    for label, files in table.items():
        for file in files:
            named = label in equations_at_code(sources.get(file, ""))
            assert named, f"docs/equations.md says that {file} computes {label}, and no line of code there names it"
    for file, text in sources.items():
        for label in re.findall(r"\b(?:eq|eqs|alg)\. ([A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*)", text, re.I):
            assert label in table, f"docs/equations.md does not have {label}, which {file} names"


WORD = r"[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*"
AND = r"(?:,\s+and|,|\s+and)\s+"
CITATION = re.compile(rf"\b(?:eqs?\.|algs?\.|tables?)\s+({WORD}(?:{AND}{WORD})*)", re.I)


def equations_at_code(text):
    """Return the labels that comments cite, and docstrings of functions and classes before their lists of arguments."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    docstrings = [re.split(r"\b(?:Args|Attributes|Note):", ast.get_docstring(node) or "")[0] for node in nodes]
    return {label for cited in CITATION.findall("\n".join(comments + docstrings)) for label in re.split(AND, cited)}


def test_a_word_that_is_no_citation_does_not_count_as_an_equation():
    text = 'def psi(kappa):\n    """Return psi (eqs. q_recursion and e_recursion)."""  # kappa, alg. ov_panel\n'
    assert equations_at_code(text) == {"q_recursion", "e_recursion", "ov_panel"}


def test_readme_is_short_and_names_every_mixer():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("| `")]) <= 80  # and a row of the table for every mixer
    named = re.findall(r"^\| `(\w+)` \|", "\n".join(lines), re.M)
    assert sorted(named) == sorted(jpmhc.MIXERS)


def test_pictures_of_the_readme_are_small():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / picture).stat().st_size < 100_000


PACKAGES = (
    "",
    ".connections",
    ".dialects",
    ".diagnose",
    ".mixers",
    ".optim",
    ".paper",
    ".paper.generators",
    ".spectra",
    ".wrap",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(package):
    """A function, class or constant of `__all__` is on the page under one of the paths that lead to it."""
    page = (ROOT / "docs" / "api.md").read_text()
    module = importlib.import_module(f"jpmhc{package}")
    documented = {path.rpartition(".")[2] for path in re.findall(r"jpmhc\.([\w.]+)", page)}
    missing = set(module.__all__) - documented - {"__version__"}
    missing = {name for name in missing if not inspect.ismodule(getattr(module, name))}
    assert not missing, f"add to docs/api.md: {', '.join(sorted(missing))}"


def test_built_pages_show_every_formula(tmp_path):
    """Each $$ of the sources is a line of its own; no dollar or backslash is left; no formula loses its full stop."""
    sphinx = pytest.importorskip("sphinx.cmd.build", reason="the documentation's packages are not installed")
    pytest.importorskip("furo")
    source, built = tmp_path / "docs", tmp_path / "built"
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("*.png", "results", "guides", "LOG.md"))
    (source / "index.md").write_text("# Pages\n\n```{toctree}\n:glob:\n\nderivations/*\n```\n")
    arguments = ["-q", "-D", "suppress_warnings=myst.xref_missing,toc.not_included,toc.excluded"]
    assert (
        sphinx.main(
            [
                *arguments,
                "-D",
                "exclude_patterns=api.md,claims.md,equations.md,architecture.md,contributing.md",
                str(source),
                str(built),
            ]
        )
        == 0
    )
    for page in sorted((ROOT / "docs" / "derivations").glob("*.md")):
        html = (built / "derivations" / f"{page.stem}.html").read_text()
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        assert html.count('display="block"') == len(re.findall(r"\$\$.+?\$\$", text, re.S)), page.name
        body = re.sub(r"<(script|style|pre|code|title|math|head)\b.*?</\1>", "", html, flags=re.S)
        assert not re.search(r"\$|\\[a-z]+", re.sub(r"<[^>]+>", " ", body)), page.name
        assert not re.search(r"</math>[.,;:)](?![.,;:)]|</span>)", html), page.name
        loaded = re.findall(r'(?:src|href)="(https?://[^"]+)"', re.sub(r"<a\b[^>]*>", "", html))
        assert not loaded, f"{page.name} loads {loaded} from the network"
