"""The project as a package: what is listed is what is there, and what is imported is declared."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"autopar": "autopar", "solver": "autopar.solver", "runtime": "autopar.runtime"}

# Import name -> name in package indexes, where they differ.
DISTRIBUTION_OF = {
    "absl": "absl_py",
    "haiku": "dm_haiku",
    "orbax": "orbax_checkpoint",
    "ott": "ott_jax",
    "sklearn": "scikit_learn",
    "tunix": "google_tunix",
}


def python_files(folder: Path) -> list[Path]:
    links = {p for p in folder.iterdir() if p.is_symlink()}
    return sorted(p for p in folder.rglob("*.py") if not links & set(p.parents))


# Imported in a notebook only, where it is.
IN_NOTEBOOKS = {"IPython"}
# Its own requirements exclude those of this project: the module that imports it says how it is installed beside them.
INSTALLED_BY_HAND = {"maxtext"}


def test_every_sub_package_is_listed():
    there = set()
    for folder, package in FOLDERS.items():
        for path in python_files(ROOT / folder):
            there.add(".".join([package, *path.parent.relative_to(ROOT / folder).parts]))
    setuptools = PROJECT["tool"]["setuptools"]
    assert set(setuptools["packages"]) == there
    assert setuptools["package-dir"] == {package: folder for folder, package in FOLDERS.items()}


@pytest.mark.parametrize("name", ["solver", "runtime"])
def test_links_are_relative(name):
    link = ROOT / "autopar" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def distributions(requirements: list[str]) -> set[str]:
    """Names without versions and extras: `jax` of `jax[tpu]>=0.10`."""
    return {re.split(r"[<>=!~ \[]", text)[0].replace("-", "_") for text in requirements}


def foreign_imports(folders: list[str]) -> set[str]:
    """Distributions that the files of some folders import, without our own and those of the standard library."""
    imported: set[str] = set()
    for path in (path for folder in folders for path in python_files(ROOT / folder)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.split(".")[0])
    own = {path.name for path in ROOT.iterdir() if path.is_dir()}
    return {DISTRIBUTION_OF.get(name, name) for name in imported - own - set(sys.stdlib_module_names)}


def test_what_the_package_imports_is_a_dependency():
    project = PROJECT["project"]
    declared = distributions(project["dependencies"] + project["optional-dependencies"]["train"])
    missing = foreign_imports(list(FOLDERS)) - declared - IN_NOTEBOOKS
    assert not missing, f"not in the dependencies or the extra train of pyproject.toml: {missing}"


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (["examples"], ["examples", "published", "train"]),
        (["docs"], ["docs"]),
        (["benchmarks", "tests"], ["dev", "published", "tpu", "tunix", "levanter", "torchax"]),
    ],
)
def test_what_the_rest_imports_is_in_the_extras(folders, extras):
    project = PROJECT["project"]
    declared = distributions(project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]])
    missing = foreign_imports(folders) - declared - INSTALLED_BY_HAND
    assert not missing, f"not in the dependencies or the extras {extras} of pyproject.toml: {missing}"


def test_no_file_is_called_like_a_module_of_the_standard_library():
    names = {p.stem for folder in FOLDERS for p in python_files(ROOT / folder)} - {"__init__", "__main__"}
    assert not names & set(sys.stdlib_module_names)


def test_the_scripts_and_the_project_ask_for_the_same_python():
    version = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["project"]["requires-python"])
    script = (ROOT / "scripts" / "environment.sh").read_text()
    assert version is not None
    assert f"sys.version_info < ({version[1]}, {version[2]})" in script


def test_a_wrong_python_is_refused_with_what_to_do(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    run = subprocess.run(
        ["bash", "scripts/test.sh"], cwd=ROOT, env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "Python 3.11 or later, got: Python 3.9.1" in run.stderr
    assert "PYTHON=python3.12" in run.stderr


def sdist_of(source: Path, folder: Path) -> Path:
    """The archive of a source distribution. It has files where the checkout has links."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=300)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.mark.slow
@pytest.mark.parametrize("form", ["source", "sdist"])
def test_an_installed_package_works_away_from_the_checkout(tmp_path, form):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    source, target = tmp_path / "source", tmp_path / "site"
    # From a copy, since setuptools leaves its build folder where it builds.
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    installed = source if form == "source" else sdist_of(source, tmp_path)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", target, installed], check=True)
    modules = [
        ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__")
        for folder, package in FOLDERS.items()
        for path in python_files(ROOT / folder)
        if path.stem != "__main__"
    ]
    # -P: without the current folder; -S would lose the dependencies, so the target simply comes first.
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(target)!r})\n"
        f"for name in {modules!r}: assert importlib.import_module(name).__file__.startswith({str(target)!r}), name"
    )
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wheel", "sdist"])
def test_an_installed_package_passes_tests_from_an_empty_folder(tmp_path, form):
    """The tests of the source distribution with what they import, but none of the packages' own files."""
    source, empty, target = tmp_path / "source", tmp_path / "empty", tmp_path / "site"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    archive = sdist_of(source, tmp_path)
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    empty.mkdir()
    for folder in ("tests", "benchmarks", "examples"):
        shutil.copytree(unpacked / folder, empty / folder)
    shutil.copy(unpacked / "pyproject.toml", empty)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if form == "wheel":
        made = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheels", source]
        subprocess.run([*pip, *made], check=True)
        (archive,) = (tmp_path / "wheels").glob("*.whl")
    installed = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target, archive]
    subprocess.run([*pip, *installed], check=True)
    environment = os.environ | {"PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"}
    code = f"import autopar, sys; assert autopar.__file__.startswith({str(target)!r}), autopar.__file__"
    subprocess.run([sys.executable, "-c", code], cwd=empty, env=environment, check=True)
    run = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/ir", "tests/solver"]
    subprocess.run(run, cwd=empty, env=environment, check=True, timeout=600)
