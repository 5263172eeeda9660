"""Executes the notebooks of examples/notebooks in place: `python docs/execute_notebooks.py [NAME ...]`.

What depends on the run and not on the code (when it ran, the version of Python) is left out, so that a notebook that is
executed again differs where its outputs do.
"""

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
TIMEOUT_S = 600


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs of a new run in a folder. Raises: nbclient's CellExecutionError, with the cell."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, record_timing=False, resources=where).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Text that came in pieces, as time had it, in one; without the progress lines of plans that are made."""
    whole: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.get("data") == {"text/plain": ""}:
            continue
        if output.output_type == "stream" and whole and whole[-1].get("name") == output.name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="without .ipynb (all of them)")
    parser.add_argument("--into", type=Path, default=FOLDER, help="the folder to write to (where they are)")
    parsed = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    names = [f"{name}.ipynb" for name in parsed.names]
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path, parsed.into), parsed.into / path.name)
        print(f"Executed {path.name}")


if __name__ == "__main__":
    main()
