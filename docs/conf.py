"""How Sphinx builds the documentation: `make docs`."""

import re

from jpmhc import __version__

project = "jpmhc"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jpmhc {__version__}"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
default_role = "code"
html_show_copyright = False


def write_as_restructured_text(app, what, name, obj, options, lines):
    """Turn what docstrings take from Markdown, formulas between dollars, into reStructuredText."""
    text = re.sub(r"\$\$(.+?)\$\$", r":math:`\1`", "\n".join(lines), flags=re.S)
    text = re.sub(r"\$([^$\n]+(?:\n[^$\n]+)?)\$", r":math:`\1`", text)
    lines[:] = text.replace("[*", "[\\*").split("\n")


def name_targets(app, name, source):
    """Turn anchors that are written for other viewers into targets that Sphinx knows."""
    source[0] = re.sub(r'^<a id="([^"]+)"></a>', r"(\1)=\n", source[0], flags=re.M)


def setup(app):
    """Connect the functions above."""
    app.connect("autodoc-process-docstring", write_as_restructured_text)
    app.connect("source-read", name_targets)
