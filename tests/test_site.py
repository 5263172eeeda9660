"""The documentation as a site: its index, the notebooks of its gallery, its figures, and the whole of it."""

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_steps import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
LARGEST_BYTES = 200_000
TIMEOUT_S = 900.0


def run(*arguments: str) -> str:
    """What a program of Python prints. Raises: AssertionError where it fails, with the end of what it printed."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


def test_the_index_leads_to_every_page():
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    entries = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    lost = {page for page in pages if not any(fnmatch.fnmatch(page, entry) for entry in entries)}
    assert not lost, f"add to docs/index.md: {lost}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_notebooks_were_executed_whole_and_are_small(path):
    assert path.stat().st_size < LARGEST_BYTES
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds
    assert "/root/" not in path.read_text()
    assert "/home/" not in path.read_text()


def outputs_of(notebook: dict) -> list[list[str]]:
    """The kinds of outputs of each cell."""
    return [[o["output_type"] for o in cell["outputs"]] for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.extra("docs")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    run("docs/execute_notebooks.py", "--into", str(tmp_path), path.stem)
    assert outputs_of(json.loads((tmp_path / path.name).read_text())) == outputs_of(json.loads(path.read_text()))


@pytest.mark.extra("docs")
def test_figures_are_drawn_from_plans(tmp_path):
    run("docs/figures.py", "--into", str(tmp_path))
    assert "zb-h1: " in (tmp_path / "schedules.svg").read_text()
    assert "data_parallel()" in (tmp_path / "recipes.svg").read_text()
    kept = {path.name for path in (DOCS / "images").glob("*.svg")}
    assert {path.name for path in tmp_path.glob("*.svg")} == kept


def built(source: Path, target: Path) -> str:
    """What Sphinx prints, as scripts/docs.sh calls it."""
    script = (ROOT / "scripts" / "docs.sh").read_text()
    found = re.search(r'"\$python" (-m sphinx .*) docs build/docs', script)
    assert found is not None
    return run(*found[1].split(), str(source), str(target))


@pytest.mark.extra("docs")
def test_the_site_is_built_without_a_warning(tmp_path):
    built(DOCS, tmp_path / "site")
    api = (tmp_path / "site" / "api.html").read_text()
    assert 'id="autopar.parallelize"' in api
    assert 'id="autopar.recipes.zero"' in api
    for page in ("tutorial", "gallery/pipeline"):
        assert (tmp_path / "site" / f"{page}.html").is_file()


@pytest.mark.extra("docs")
def test_a_link_that_leads_nowhere_is_an_error(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "conf.py").write_text((DOCS / "conf.py").read_text())
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[nowhere](nowhere.md)\n")
    with pytest.raises(AssertionError, match=r"nowhere\.md"):
        built(tmp_path / "docs", tmp_path / "site")
