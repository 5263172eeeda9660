"""Settings of Sphinx for the pages of this folder, which `bash scripts/docs.sh` builds."""

import re
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

FOLDER = Path(__file__).parent

project = "autopar"
author = "the autopar authors"
release = metadata.version("autopar")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Pages that are read in a repository browser too: headings are linked to as they are there.
myst_heading_anchors = 4
# Code blocks of pages run in tests/test_pages.py; notebooks are shown as docs/execute_notebooks.py left them.
nb_execution_mode = "off"

html_theme = "sphinx_book_theme"
html_title = "autopar"
html_show_copyright = False
# One search field, that of the sidebar: the header of the theme has two more.
html_theme_options = {
    "article_header_end": ["article-header-buttons"],
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
}
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "sbt-sidebar-nav.html"]}

# In docstrings `name` is code, not a link that must lead somewhere.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Types of fields that have no entry of their own in the API's page.
nitpick_ignore_regex = [("py:class", r"autopar\..*|collections\..*|jax\..*|numpy\..*")]


def outward(link: re.Match[str]) -> str:
    """A link to what is outside this folder: to the file where it is Markdown, which is no page of the site; its text
    alone where it is a folder. Sphinx itself takes other files.
    """
    text, path = link["text"], link["path"]
    if (FOLDER / path).is_dir():
        return text
    return f"[{text}](path:{path})" if path.endswith(".md") else link[0]


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Changes the text of a page for the site: its outward links; and patterns of the index that no page matches are
    left out, as Sphinx would warn of them.
    """
    source[0] = re.sub(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<path>\.\./[^)#]+)(?:#[^)]*)?\)", outward, source[0])
    if name == "index":
        lines = source[0].splitlines(keepends=True)
        source[0] = "".join(line for line in lines if not line.endswith("*\n") or any(FOLDER.glob(line.strip())))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)
