"""Sphinx: the pages of this folder in Markdown, and the reference out of the docstrings."""

import loopq

project = "loopq"
release = version = loopq.__version__
copyright = "the loopq authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc"]
exclude_patterns = ["README.md"]
html_theme = "alabaster"
# `custom.css` is read by the theme: wide tables scroll, and dark follows the reader's system.
html_static_path = ["_static"]
html_theme_options = {
    "page_width": "78rem", "body_max_width": "62rem", "fixed_sidebar": True, "show_powered_by": False,
    "description": "Four-bit weights for looped transformers",
}  # fmt: skip

# A name in single backquotes is a name of the package.
default_role = "py:obj"
# Quotes and dots, but no dashes: `--option` keeps both of its hyphens.
smartquotes_action = "qe"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# Pages link to records, folders and sources of the repository, which are no pages.
suppress_warnings = ["myst.xref_missing"]
myst_heading_anchors = 3
