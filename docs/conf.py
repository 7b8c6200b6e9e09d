"""How the documentation is built.  Warnings are errors: see tests/docs/test_build.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import lazytensor

project = "lazytensor"
version = release = lazytensor.__version__
copyright = "the lazytensor authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "lazytensor_pages"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
html_title = "lazytensor"
html_copy_source = False
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
