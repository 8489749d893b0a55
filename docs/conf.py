"""Sphinx: `python -m sphinx -W docs OUTPUT`, in an environment where the packages are installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "Phalanx"
author = "the Phalanx authors"
project_copyright = author
release = (ROOT / "core" / "VERSION").read_text().strip()
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
extensions += ["c_reference", "cpp_reference", "python_reference", "ops_reference", "support_matrix"]
extensions += ["commands", "environment"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
pygments_dark_style = "one-dark"  # that of the theme underlines every imported name
html_title = f"Phalanx {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["phalanx.css"]
html_logo = html_favicon = "_static/logo.svg"
html_search_scorer = str(ROOT / "docs" / "_static" / "scorer.js")
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1c66a8", "color-brand-content": "#1c66a8"},
    "dark_css_variables": {"color-brand-primary": "#7fb8ee", "color-brand-content": "#7fb8ee"},
}

default_role = "py:obj"  # `name` in docstrings: code, and a link where there is such a name
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
