"""The documentation names files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FOLDERS = "autopar|solver|runtime|tests|benchmarks|examples|scripts|docs"


def heading_links(page: Path) -> set[str]:
    """The fragments by which links reach the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_folders_that_a_page_names_exist(page):
    named = set(re.findall(rf"(?<![\w./])((?:{FOLDERS})/\w[\w/-]+(?:\.\w+)?)", page.read_text()))  # no `examples/s`
    assert not {path for path in named if not (ROOT / path).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, fragment = link.partition("#")
        target = (page.parent / path) if path else page
        if not link.startswith("http"):
            assert target.exists(), link
            assert not fragment or fragment in heading_links(target), link


def test_the_architecture_page_names_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "autopar").glob("*/__init__.py")}
    rows = re.findall(r"^\| `(?:autopar/)?(\w+)/?` \|", page, re.MULTILINE)
    assert set(rows) == packages


def test_functions_of_the_data_flow_are_defined_where_the_page_says():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^ +\| +([\w., ]+?) {2,}((?:autopar|solver|runtime)/.*)$", page, re.MULTILINE)
    assert len(rows) > 20
    for names, rest in rows:
        text = "\n".join((ROOT / path).read_text() for path in re.findall(r"[\w/]+\.py", rest))
        for name in (name.split(".")[-1] for name in names.split(", ")):
            assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), f"{name} in {rest}"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").rglob("*.[jm][sd]*")), ids=lambda p: p.name)
def test_kept_results_name_no_folder_of_a_machine(path):
    assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp)/", path.read_text())
