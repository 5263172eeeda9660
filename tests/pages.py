"""The code blocks of a page of docs/, and running them: as a reader would, from the top, in an empty folder."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.small_steps import ROOT

# A block of Python whose first line is a comment with a file's name is that file.
FILE = re.compile(r"# (\w+\.py)\n")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`language`: "python" runs in one namespace for the page, "sh" in a shell; a page's outputs are "text"."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """The blocks that run, in order."""
    found = re.finditer(r"^```(python|sh)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    text = page.read_text()
    return [Block(language=m[1], text=m[2], line=text[: m.start()].count("\n") + 1) for m in found]


# A fenced block: its language, its text, and the empty lines behind it.
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$(\n*)", re.MULTILINE | re.DOTALL)


def outputs_of(page: Path) -> list[str]:
    """What a page says that its shell commands print: the text directly behind each, as far as it is shown (`...`)."""
    found = list(FENCED.finditer(page.read_text()))
    behind = [text for sh, text in itertools.pairwise(found) if sh[1] == "sh" and sh.end() == text.start()]
    return [_as_far_as_shown(text[2]) for text in behind if text[1] == "text"]


def texts_of(page: Path, beginning: str) -> list[str]:
    """The outputs on a page that begin in this way, of commands that stand on other pages."""
    found = FENCED.finditer(page.read_text())
    return [_as_far_as_shown(m[2]) for m in found if m[1] == "text" and m[2].startswith(beginning)]


def _as_far_as_shown(text: str) -> str:
    return text.partition("\n...\n")[0].rstrip("\n")


def run_page(page: Path, folder: Path, timeout_s: float) -> str:
    """Runs all blocks of a page in a folder, each language in processes of its own; what they print.

    Raises: AssertionError with the end of what was printed.
    """
    script: list[str] = []
    for block in blocks_of(page):
        named = FILE.match(block.text)
        if block.language == "sh":
            script += [block.text]
        elif named:
            (folder / named[1]).write_text(block.text)
        else:
            continue
    plain = [block for block in blocks_of(page) if block.language == "python" and not FILE.match(block.text)]
    if plain:
        # Empty lines in front make the lines of errors those of the page.
        lines: list[str] = []
        for block in plain:
            lines += [""] * (block.line - len(lines)) + block.text.splitlines()
        (folder / "page.py").write_text("\n".join(lines) + "\n")
        script.append("python page.py")
    (folder / "bin").mkdir()
    for name, arguments in (("python", ""), ("autopar", " -m autopar")):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable}{arguments} "$@"\n')
        command.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # A page runs with the flags that it sets itself.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-ec", "\n".join(script)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{page.name}: status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
    return done.stdout
