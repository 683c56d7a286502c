"""Settings of the site; ``sphinx-build -W docs OUTPUT`` builds it, the reference pages from the code and the data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reference_pages import write_reference

from memplan import __version__

project = "memplan"
author = "The memplan authors"
copyright = "The memplan authors"
release = __version__
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "memplan"
html_theme_options = {
    variables: {"code-font-size": "0.72em"} for variables in ("light_css_variables", "dark_css_variables")
}

write_reference(Path(__file__).parent / "reference")
