"""What every kept table says of itself: the machine, the versions, the date."""

import datetime
import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

_FOLDERS = re.compile(r"/\S*/(?=[^/\s]+/[^/\s]+\.py)")  # all of a path but the last folder and the file

# Of XLA. Programs this small spend more time in LLVM's optimiser than they could ever win by it; and a fusion may not
# leave out a rounding to half precision that the program asks for, which another program then does not leave out.
CHEAP_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_allow_excess_precision=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
# The older emitters of fusions compile two to four times as fast; later jaxlibs have the newer ones alone.
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    CHEAP_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
PACKAGES = ("jax", "jaxlib", "numpy")


def description() -> str:
    """One line: processor, cores, load, system, versions, date."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{processor()}, {os.cpu_count()} cores (load {load}), {platform.system()}; "
        f"Python {platform.python_version()}, {versions}; {datetime.date.today().isoformat()}."
    )


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; rows may be short."""
    lines = [columns, ["---"] * len(columns), *([*row, *[""] * (len(columns) - len(row))] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kept_rows(path: Path) -> list[list[str]]:
    """The rows of the table that `markdown` wrote into a file; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    tables = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return tables[2:]


def without_folders(text: str) -> str:
    """A text whose absolute paths of Python files keep the last folder and the file: pages name no machine."""
    return _FOLDERS.sub("", text)
