"""Sphinx configuration for `make docs`; see CONTRIBUTING.md."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent), str(DOCS.parent / "client")]

from shardcache import __version__  # noqa: E402  # found by the line above, installed or not

project = "shardcache"
author = "the shardcache authors"
project_copyright = f"{author}, Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "from_the_code",
]
exclude_patterns = ["_ext", "_static", "examples"]
nitpicky = True
# Names of Python's and other projects' own, whose sites would have to be asked, and of what is not for users.
nitpick_ignore_regex = [
    ("py:.*", r"(?!shardcache).*"),
    ("py:class", r"shardcache_client\.(arguments|epoch_reader|stages|lengths|ray)\..*"),
    ("py:class", r"shardcache_client\.order\.(shards\.manifest|topology)\..*"),
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_mock_imports = ["pyarrow", "ray", "transformers"]  # not installed for the docs: half a gigabyte
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
default_role = "literal"
highlight_language = "text"  # blocks without a language are what programs print
smartquotes = False  # they would turn the dashes of options into one
add_module_names = False
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"shardcache {release}"
html_static_path = ["_static", "pictures"]  # dark pictures, which the style sheet names
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_show_sphinx = False
html_copy_source = False
