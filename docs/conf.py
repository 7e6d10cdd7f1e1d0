"""How Sphinx makes the site of these pages: ``python -m sphinx -W -n -b html docs docs/_build``."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE / "_ext")]

import actorrpc  # noqa: E402 (found by the line above)

project = "actorrpc"
author = "actorrpc authors"
copyright = author
version = release = actorrpc.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "reference",
    "repository_links",
    "foreign_requests",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"actorrpc {release}"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["llms.txt"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
# The docstring of a dataclass of options describes its fields. The signature of the constructor is shown at the class.
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"

# Names of other packages: the site is built offline, and so without their indexes.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|collections|concurrent|threading|contextlib|pathlib|types|asyncio|numpy|enum|msgpack|logging|typing)\..*",
    ),
]
