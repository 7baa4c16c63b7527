"""Sphinx: the pages of this folder in Markdown, and the reference out of the docstrings."""

import loopq

project = "loopq"
release = version = loopq.__version__
copyright = "the loopq authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc"]
exclude_patterns = ["README.md"]
html_theme = "alabaster"
html_theme_options = {"page_width": "72rem", "fixed_sidebar": True}

# A name in single backquotes is a name of the package.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# Pages link to records, folders and sources of the repository, which are no pages.
suppress_warnings = ["myst.xref_missing"]
myst_heading_anchors = 3
