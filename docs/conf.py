"""The documentation site: `make docs`, then build/docs/index.html."""

import coba_core

project = "coba_core"
author = "The coba_core maintainers"
release = version = coba_core.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"coba_core {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}
nitpicky = False
