"""Draw the packages of jpmhc, and which of them imports which, into docs/architecture.md.

Run `python docs/draw_architecture.py` after an import between packages has come or gone; tests/test_docs.py compares.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import jpmhc

SOURCE = Path(jpmhc.__file__).parent
SOURCES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- begin packages -->", "<!-- end packages -->"


def folder_of(path: Path) -> str:
    """Return the package that a file belongs to, or the name of a module beside the packages."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


# Methods of results that import `jpmhc.report` when they are called. This one import leads upward and is not counted.
DRAWING = ("plot", "save_page")


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, except the methods that draw a result."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.FunctionDef) and child.name in DRAWING):
            yield from walk(child)


def names_used(path: Path) -> Iterator[str]:
    """Yield every name below `jpmhc` that a file imports, or reaches through `jpmhc.`, such as "connections.hyper"."""
    for node in walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name[6:] for alias in node.names if alias.name.startswith("jpmhc."))
        elif isinstance(node, ast.ImportFrom) and node.module == "jpmhc":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jpmhc."):
            yield str(node.module)[6:]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jpmhc":
            yield node.attr


def imported_folders(path: Path) -> set[str]:
    """Return the packages that a file imports from; a public name counts as the package that defines it."""
    folders = {jpmhc._HOMES.get(name, name).split(".")[0] for name in names_used(path)}
    return folders - {"__version__", folder_of(path)}


def imports_between_packages() -> dict[str, set[str]]:
    """Return what each package imports."""
    imports: dict[str, set[str]] = {folder_of(path): set() for path in SOURCES}
    for path in SOURCES:
        imports[folder_of(path)] |= imported_folders(path)
    return imports


def levels(imports: dict[str, set[str]]) -> dict[str, int]:
    """Return the level of each package: one more than the highest level that it imports from."""
    level: dict[str, int] = {}
    while len(level) < len(imports):
        ready = [name for name, used in imports.items() if name not in level and used <= set(level)]
        if not ready:
            raise ValueError(f"imports in a circle among {', '.join(sorted(set(imports) - set(level)))}")
        level |= {name: 1 + max((level[used] for used in imports[name]), default=0) for name in ready}
    return level


def first_sentence(name: str) -> str:
    """Return the first sentence of a package's docstring, without the full stop."""
    package = SOURCE / name / "__init__.py"
    text = ast.get_docstring(ast.parse((package if package.exists() else SOURCE / f"{name}.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")


def draw() -> str:
    """Return the table of packages, from the top of the imports to the bottom."""
    imports = {name: used for name, used in imports_between_packages().items() if name != "__main__"}
    level = levels(imports)
    lines = ["| level | package | holds | imports |", "|---|---|---|---|"]
    for name in sorted(imports, key=lambda name: (-level[name], name)):
        file = f"{name}/" if (SOURCE / name).is_dir() else f"{name}.py"
        used = ", ".join(sorted(imports[name], key=lambda other: (-level[other], other)))
        lines.append(f"| {level[name]} | `{file}` | {first_sentence(name)} | {used or '–'} |")
    return "\n".join(lines)


def update(page: str) -> str:
    """Return the text of the page with a new table between its marks."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{draw()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text()))
    print(f"wrote {PAGE}")
