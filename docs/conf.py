"""How Sphinx builds the documentation: `make docs`."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

from jpmhc import __version__

project = "jpmhc"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"  # browsers draw MathML themselves, so that the pages need no script and no network
html_title = f"jpmhc {__version__}"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_dmath_double_inline = True  # $$ inside a paragraph is a formula on a line of its own, as on GitHub
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_custom_sections = [("Shapes", "params_style")]
default_role = "code"
html_show_copyright = False
html_use_index = html_domain_indices = False  # no page links to them


def write_as_restructured_text(app, what, name, obj, options, lines):
    """Turn what docstrings take from Markdown, formulas between dollars, into reStructuredText."""
    text = re.sub(r"\$\$(.+?)\$\$", r":math:`\1`", "\n".join(lines), flags=re.S)
    text = re.sub(r"\$([^$\n]+(?:\n[^$\n]+)?)\$", r":math:`\1`", text)
    text = re.sub(r"(?<!`)(`[^`\n]+`)(?=\w)", r"\1\\ ", text)  # the plural of a name, as in `HyperConnection`s
    lines[:] = text.replace("[*", "[\\*").split("\n")


def link_contributing(app, name, source):
    """Let links to CONTRIBUTING.md, which lies beside the folder docs, lead to the page that includes it."""
    source[0] = re.sub(r"\]\(((?:\.\./)*)\.\./CONTRIBUTING\.md", r"](\1contributing.md", source[0])


def keep_together(app, doctree, name):
    """Let no line begin with a unit or the punctuation behind a formula; mark long cells, which get a wide column."""
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > 60:
            cell["classes"].append("long")
    for text in list(doctree.findall(nodes.Text)):
        units = re.sub(r"(?<=\d) (?=(%|ms|s|KiB|MiB|GiB)(?!\w))", "\u00a0", text)
        if units != text and not isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.math):
            text.parent.replace(text, nodes.Text(units))
    for formula in doctree.findall(nodes.math):
        siblings, place = formula.parent.children, formula.parent.index(formula)
        for key, step, pattern in (("before", -1, r"[(“]+$"), ("behind", 1, r"^[.,;:)”!?]+")):
            text = siblings[place + step] if 0 <= place + step < len(siblings) else None
            if isinstance(text, nodes.Text) and (found := re.search(pattern, text)):
                formula[key] = found[0]
                formula.parent.replace(text, nodes.Text(re.sub(pattern, "", text)))


def write_mathml(writer, formula, display):
    """Write a formula as MathML, and warn of a command that the converter does not know."""
    mathml = convert(formula.astext(), display=display)
    if "\\" in mathml:
        logging.getLogger(__name__).warning("not drawn in full: %s", formula.astext(), location=formula)
    before, behind = formula.get("before", ""), formula.get("behind", "")
    writer.body.append(f'<span class="formula">{before}{mathml}{behind}</span>' if before or behind else mathml)
    raise nodes.SkipNode


def write_inline(writer, formula):
    """Write a formula inside a line."""
    write_mathml(writer, formula, "inline")


def write_block(writer, formula):
    """Write a formula on a line of its own."""
    write_mathml(writer, formula, "block")


def setup(app):
    """Connect the functions above."""
    app.connect("autodoc-process-docstring", write_as_restructured_text)
    app.connect("source-read", link_contributing)
    app.connect("doctree-resolved", keep_together)
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
