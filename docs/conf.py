"""Settings of the documentation site: `make docs` builds it into build/docs.

The theme and MyST are those of jax and flax. Pages load nothing from the network: fonts, icons, styles and search are files of the site.
"""

import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "_ext"))

project = "maxlm"
author = "the maxlm authors"
project_copyright = author
release = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
version = release

extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design", "maxlm_site"]
exclude_patterns = ["README.md", "_ext", "_static", "lab/transfer"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are executed by a test
nb_merge_streams = True
suppress_warnings = ["misc.highlighting_failure"]  # blocks that show a format with an ellipsis
highlight_language = "text"
copybutton_prompt_text = "$ "

html_theme = "sphinx_book_theme"
html_title = "maxlm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_theme_options = {
    "show_navbar_depth": 1,
    "max_navbar_depth": 3,
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "use_issues_button": False,
    "use_repository_button": False,
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
