"""Several processes, each with its own rows: the losses are those of plain `jax.jit` on the rows of all."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autopar.errors import InvalidArgumentError, ProcessMismatchError
from autopar.execute.batches import BatchDecision, Leaf, PassedBatch, checked_mode, decide
from tests.in_processes import launch
from tests.small_steps import mlp_batch, mlp_state, mlp_step

PROGRAM = str(Path(__file__).with_name("own_rows.py"))
EXAMPLES, STEPS = 16, 3
REFUSED = {
    "numbers that differ": "the same batch['scale'] in all processes: it has no dimension of",
    "own rows, said global": "the batch was taken for that, since batch='global' says so, got other batch['x']",
    "planned for the rows of one": "the batch was taken for that, since its shape is that of the plan, got other",
    "planned for twice the rows": "the rows of all processes are those of the plan, got the same batch['x'] in all",
    "zeros first": "got other batch['x'] in process 1 than in process 0\n  hint: say batch='local'",
    "another state": "got state['first'], state['second']: other data in process 1",
    "on own devices": "jax.make_array_from_process_local_data",
}


def jit_losses() -> list[float]:
    state, losses = mlp_state(jax.random.key(0)), []
    for seed in range(STEPS):
        state, metrics = jax.jit(mlp_step)(state, mlp_batch(EXAMPLES, seed))
        losses.append(float(metrics["loss"]))
    return losses


def try_all(folder: Path, processes: int, devices: int, tries: list[str] | None = None) -> list[dict[str, Any]]:
    """What each process found."""
    ended = launch(folder, processes, devices, 280.0, program=PROGRAM, tries=tries)
    assert [code for code, _, _ in ended] == [0] * processes, "\n".join(text[-3000:] for _, text, _ in ended)
    return [json.loads((folder / f"found{i}").read_text()) for i in range(processes)]


def check(found: list[dict[str, Any]]) -> None:
    expected = jit_losses()
    for process, tried in enumerate(found):
        for name, got in tried.items():
            if name in REFUSED:
                assert (
                    f"ProcessMismatchError: {'scaled' if 'numbers' in name else 'mlp_step'}, process {process}" in got
                )
                assert REFUSED[name] in got, name
            else:
                assert not isinstance(got, str), f"{name}: {got}"
                np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_each_process_passes_its_own_rows(tmp_path):
    check(try_all(tmp_path, 2, 2, ["one program, a call", "stages, put_batch", "zeros first"]))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_rows_of_each_process_and_whole_batches(tmp_path, processes):
    found = try_all(tmp_path, processes, 2)  # with 4 processes a stage lies in two of them
    assert set(REFUSED) <= set(found[0])
    check(found)


@pytest.mark.slow
def test_other_rows_in_one_process_alone_are_named(tmp_path):
    (code, text, _), (other, said, _) = launch(tmp_path, 2, 2, 120.0, program=PROGRAM, tries=["fewer in one process"])
    assert "to pass batches of new shapes in the same call, got process 0 has begun another step" in said
    assert code not in (0, -9), text
    assert other != -9


def leaf(rows: int, hash_: str, path: str = "x", rest: tuple[int, ...] = (4,)) -> Leaf:
    return Leaf(path, False, (rows, *rest), "float32", hash_)


def taken(*batches: Leaf, word: str = "auto", planned: Any = (), before: str | None = None) -> str:
    return decide("step", [PassedBatch(word, (one,)) for one in batches], planned, before).mode


def test_equal_data_are_the_whole_batch_and_others_are_rows():
    assert taken(leaf(8, "a"), leaf(8, "a")) == "global"
    assert taken(leaf(8, "a"), leaf(8, "b")) == "local"
    assert taken(leaf(8, "a"), leaf(8, "a"), word="local") == "local"
    assert decide(
        "step", [PassedBatch("auto", (leaf(3, "a"),)), PassedBatch("auto", (leaf(5, "b"),))], (), None
    ) == BatchDecision("local", ((3, 5),), by_data=True)


def test_only_the_first_rows_that_differ_are_told():
    said = [decide("step", [PassedBatch("auto", (leaf(8, h),)) for h in "ab"], (), before).by_data for before in
            (None, "global", "local")]  # fmt: skip
    assert said == [True, True, False]


def test_shapes_of_plans_must_agree_with_the_data():
    assert taken(leaf(8, "a"), leaf(8, "b"), planned=[[(16, 4)]]) == "local"
    assert taken(leaf(8, "a"), leaf(8, "a"), planned=[[(8, 4)]]) == "global"
    with pytest.raises(ProcessMismatchError, match="since its shape is that of the plan"):
        taken(leaf(8, "a"), leaf(8, "b"), planned=[[(8, 4)]])
    with pytest.raises(ProcessMismatchError, match="the rows of all processes are those of the plan"):
        taken(leaf(8, "a"), leaf(8, "a"), planned=[[(16, 4)]])
    # Once batches were rows of each process, they stay so.
    assert taken(leaf(8, "a"), leaf(8, "a"), planned=[[(16, 4)]], before="local") == "local"
    assert taken(leaf(16, "a"), leaf(16, "b"), planned=[[(16, 4)]], before="local") == "local"


def test_what_has_no_rows_is_the_same_in_all_processes():
    def passed(hash_: str, scale: str) -> PassedBatch:
        return PassedBatch(
            "auto", (leaf(8, hash_), Leaf("scale", False, (), "float32", scale), leaf(3, "w", "weights"))
        )

    assert decide("step", [passed("a", "1"), passed("b", "1")], (), None).counts == ((8, 8), None, None)
    with pytest.raises(ProcessMismatchError, match="the same scale in all processes"):
        decide("step", [passed("a", "1"), passed("b", "2")], (), None)
    arrays = [PassedBatch("auto", (Leaf("batch['x']", True, (size, 8), "float32", "on [0, 1]"),)) for size in (8, 16)]
    with pytest.raises(ProcessMismatchError, match=r"it is a global array, .* of shapes \(8, 8\) and \(16, 8\)"):
        decide("step", arrays, (), None)


def test_processes_that_differ_in_more_than_rows_are_refused():
    with pytest.raises(ProcessMismatchError, match=r"rows of one shape and type of x .* float32\[8, 5\] in process 1"):
        taken(leaf(8, "a"), leaf(8, "b", rest=(5,)))
    with pytest.raises(ProcessMismatchError, match="x, y not in both of process 0 and 1"):
        taken(leaf(8, "a"), leaf(8, "b", "y"))
    others = [PassedBatch("auto", (leaf(8, "a"),), (("w", hash_),)) for hash_ in "ab"]
    with pytest.raises(ProcessMismatchError, match="w: other data in process 1 than in process 0"):
        decide("step", others, (), None)


def test_other_words_are_refused():
    assert checked_mode(None, "here") == "auto"
    with pytest.raises(InvalidArgumentError, match=r"'local' .* got 'mine'"):
        checked_mode("mine", "parallelize(batch=...)")
