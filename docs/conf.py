"""Sphinx: `python -m sphinx -W docs OUTPUT`, in an environment where the packages are installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

project = "Phalanx"
author = "the Phalanx authors"
project_copyright = author
release = (ROOT / "core" / "VERSION").read_text().strip()
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
extensions += ["commands"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Phalanx {release}"
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
