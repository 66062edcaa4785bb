"""What Sphinx reads before it builds the site; `./x docs` calls it, and docs/website.py does the work."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from website import setup  # noqa: F401  # Sphinx calls it by this name

project = "ottava"
copyright = "the authors of ottava, Apache License 2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/notebooks/*.ipynb", "docs/api/*.rst"]
exclude_patterns = [".*", "runs", "src", "tests", "benchmarks", "dist", "build"]

nb_execution_mode = "off"  # `./x docs --notebooks` executes them, and the outputs are committed
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may begin at the second level

default_role = "code"  # docstrings quote code as Markdown does
napoleon_numpy_docstring = False
autodoc_typehints = "none"  # the signature has them
add_module_names = False

html_theme = "furo"
html_title = "ottava"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
