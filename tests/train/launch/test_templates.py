"""The templates of examples/launch: their syntax, and that they name what is there."""

import re
import subprocess

import pytest

from autopar.train.launch.command_line import parse
from tests.train.launch.launching import ROOT

FOLDER = ROOT / "examples" / "launch"
SHELL = sorted([*FOLDER.glob("*.sbatch"), *FOLDER.glob("*.sh")])


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_have_no_syntax_errors(path):
    assert path.read_text().startswith("#!/bin/bash\n")
    found = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=20)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_reads_its_options_before_the_first_command(path):
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]
    assert {"--nodes", "--ntasks-per-node"} <= set(re.findall(r"^#SBATCH (--[\w-]+)", "\n".join(lines), re.MULTILINE))


def test_the_launcher_takes_what_the_template_passes():
    text = (FOLDER / "launch.sbatch").read_text().replace("\\\n", " ")
    found = re.search(r"-m autopar\.launch (.*?) train\.py", text)
    assert found is not None
    values = {"$SLURM_NNODES": "2", "$SLURM_NODEID": "1", "$COORDINATOR": "node1:9000"}
    words = [values.get(word.strip('"'), word) for word in found[1].split()]
    options = parse([*words, "train.py", "--epochs", "3"])
    assert (options.nodes, options.node_rank, options.coordinator, options.processes) == (2, 1, "node1:9000", 8)


def test_mpirun_says_how_it_is_used():
    found = subprocess.run(["bash", FOLDER / "mpirun.sh"], capture_output=True, text=True, timeout=20)
    assert found.returncode == 2
    assert found.stderr.startswith("usage: ")


def test_the_jobset_is_structured_as_kubernetes_reads_it():
    text = (FOLDER / "jobset.yaml").read_text()
    documents = [re.sub(r"^\s*#.*\n", "", part, flags=re.MULTILINE) for part in text.split("\n---\n")]
    kinds = [re.findall(r"^kind: (\w+)$", document, re.MULTILINE) for document in documents]
    assert kinds == [["ServiceAccount"], ["Role"], ["RoleBinding"], ["JobSet"]]
    assert all(len(re.findall(r"^apiVersion: \S+$", document, re.MULTILINE)) == 1 for document in documents)
    lines = [line for document in documents for line in document.splitlines() if line]
    assert all(re.fullmatch(r"(  )*(- )?[\w.\"/-]+:?( .*)?", line) for line in lines), "keys in steps of two spaces"


def test_the_jobset_starts_as_many_pods_as_it_needs():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with other packages only")
    *_, jobset = yaml.safe_load_all((FOLDER / "jobset.yaml").read_text())
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    pod = job["template"]["spec"]
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
