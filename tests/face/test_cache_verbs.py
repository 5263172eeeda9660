"""`autopar cache list` and `clear`: what is kept, and only that."""

import json
import os
from pathlib import Path

import pytest

import autopar
from autopar.__main__ import main
from autopar.kept_files import Kind, clear, kept_in
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """One plan, the rules that it was made with, a file named like a measurement, and one that is not autopar's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(folder))
    autopar.plan(mlp_step, MLP_STATE, MLP_BATCH, cluster="dgx-h100", search=autopar.Search(effort="quick"))
    (folder / "measured-cpu-2cores-1x8-jax1.json").write_text("{}")
    (folder / "notes.json").write_text("not autopar's")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def out_of(capsys, *arguments: str) -> str:
    assert main(["cache", *arguments]) == 0
    return capsys.readouterr().out


def test_what_is_kept_is_listed_by_kind_and_cleared_by_kind(cache, capsys):
    made = json.loads(out_of(capsys, "list", "--json"))
    assert made["directory"] == str(cache)
    assert [row["kind"] for row in made["files"]] == ["plans", "rules", "measurements"]
    plan = made["files"][0]
    assert plan["what"] == "mlp_step on dgx-h100"
    assert plan["size_bytes"] == Path(plan["path"]).stat().st_size
    assert plan["written"][:2] == "20"
    assert "measured-cpu-2cores-1x8-jax1.json" not in out_of(capsys, "list").splitlines()[0]
    assert "mlp_step on dgx-h100" in out_of(capsys, "list")

    assert "removed 1 plans" in out_of(capsys, "clear", "--kind", "plans")
    assert names(cache) == ["measured", "notes.json", "rules"]
    removed = json.loads(out_of(capsys, "clear", "--json"))["removed"]
    assert [row["kind"] for row in removed] == ["rules", "measurements"]
    assert names(cache) == ["notes.json"], "what autopar did not write stays"
    assert "nothing to remove" in out_of(capsys, "clear")
    assert "nothing is kept" in out_of(capsys, "list")


def test_newest_first_and_damaged_plans_are_said_to_be_that(tmp_path):
    for name, age_s in (("plan-1.json", 2000), ("plan-2.json", 1000)):
        (tmp_path / name).write_text("{")
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "plan-3.json").mkdir()
    found = kept_in(tmp_path).files
    assert [Path(file.path).name for file in found] == ["plan-2.json", "plan-1.json"]
    assert {file.what for file in found} == {"cannot be read"}


def test_no_directory_and_no_home_are_no_errors(tmp_path):
    assert kept_in(tmp_path / "none").files == ()
    assert "no home directory" in str(kept_in(None))
    assert clear(None, tuple(Kind)).to_dict() == {"directory": None, "removed": []}


@pytest.mark.parametrize("arguments", [[], ["clear", "--kind", "everything"], ["list", "--kind", "plans"]])
def test_wrong_arguments_are_another_status(arguments):
    with pytest.raises(SystemExit) as ended:
        main(["cache", *arguments])
    assert ended.value.code == 2
