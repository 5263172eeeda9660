"""What is kept, where a run goes on, what is refused, and what a kill or a preemption leaves."""

import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import multihost_utils

import autopar
from autopar.checkpoint import Checkpointer, Preempted
from autopar.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DonatedStateError,
    InvalidArgumentError,
    MissingPackageError,
    NonFiniteError,
    PlanFormatError,
    UnsupportedError,
)
from benchmarks.zoo import CASES
from tests.train.checkpoint.trees import assert_equal

ROOT = Path(__file__).parents[3]


class Batches:
    """Batches with a position."""

    def __init__(self) -> None:
        self.number = 0

    def position(self) -> dict[str, int]:
        return {"batch": self.number}

    def restore(self, position: dict[str, int]) -> None:
        self.number = position["batch"]


def checkpointer(folder, **options) -> Checkpointer:
    return Checkpointer(folder, on_preemption=False, **options)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with the checkpoint of step 1."""
    with checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.arange(4.0)}, "n": 3})
    return tmp_path


def test_every_second_step_is_saved_and_the_latest_two_are_kept(tmp_path):
    with checkpointer(tmp_path, every=2, keep=2) as checkpoints:
        begun = [checkpoints.save(i, {"w": jnp.full(2, i)}) for i in range(1, 9)]
        checkpoints.save(9, {"w": jnp.full(2, 9)}, force=True)
    assert begun == [False, True] * 4
    assert checkpoints.steps() == [8, 9]
    assert sorted(os.listdir(tmp_path)) == ["8", "9"]
    assert checkpoints.restore()["w"].tolist() == [9, 9]
    assert checkpoints.restore(8)["w"].tolist() == [8, 8]


def test_a_run_begins_and_then_goes_on_where_it_was(tmp_path):
    case = CASES["mlp"]()
    step = autopar.parallelize(case.step, plan=autopar.recipes.zero(3), cache_dir=None)
    data = Batches()
    with checkpointer(tmp_path) as checkpoints:
        state, start = checkpoints.restore_or(case.init, jax.random.key(0), step=step, data=data)
        assert start == 0
        state, _ = step(state, case.batch(0))
        data.number = 7
        checkpoints.save(1, state, plan=step, data=data)
        expected = jax.tree.map(np.asarray, state)
        data.number = 0
        again, start = checkpoints.restore_or(case.init, jax.random.key(0), step=step, data=data)
    assert (start, data.number) == (1, 7)
    assert_equal(jax.tree.map(np.asarray, again), expected)
    planned = step.state_shardings(jax.tree.leaves(again))
    assert [x.sharding for x in jax.tree.leaves(again)] == planned


def test_a_step_of_another_past_is_refused_until_later_ones_are_dropped(tmp_path):
    with checkpointer(tmp_path) as checkpoints:
        for i in (1, 2, 3):
            checkpoints.save(i, {"w": jnp.full(2, i)})
        assert not checkpoints.save(3, {"w": jnp.zeros(2)})  # it is there already
        checkpoints.restore(1)
        with pytest.raises(InvalidArgumentError, match="expected a step after 3"):
            checkpoints.save(2, {"w": jnp.zeros(2)})
        assert checkpoints.discard_after(1) == [2, 3]
        checkpoints.save(2, {"w": jnp.full(2, 20)})
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.restore()["w"].tolist() == [20, 20]


def test_a_missing_checkpoint_says_what_there_is(saved, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"a checkpoint of step 5, got steps \[1\]"):
        checkpointer(saved).restore(5)
    with pytest.raises(CheckpointNotFoundError, match="no folder"):
        checkpointer(tmp_path / "nowhere").restore()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"params": {"w": jnp.zeros(4)}}, "with 'n' beside them"),
        ({"params": {"w": jnp.zeros(4), "b": jnp.zeros(1)}, "n": 3}, "a checkpoint without 'params/b'"),
        ({"params": {"w": jnp.zeros(5)}, "n": 3}, r"\['params'\]\['w'\]: expected float32\[5\].*got float32\[4\]"),
        ({"params": {"w": jnp.zeros(4, "int32")}, "n": 3}, r"expected int32\[4\].*got float32\[4\]"),
        ({"params": {"w": jnp.zeros(4)}, "n": jnp.float32(0)}, r"\['n'\]: expected float32\[\].*got int64\[\]"),
    ],
)
def test_another_state_is_refused_with_its_leaf(saved, like, message):
    with pytest.raises(CheckpointMismatchError, match=message):
        checkpointer(saved).restore(like=like)


def test_numbers_become_arrays_where_they_fit(tmp_path):
    with checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"n": 3, "x": 0.5, "np": np.arange(3), "large": 2**40, "text": "a"})
        like = {"n": jnp.int32(0), "x": jnp.float32(0), "np": jnp.zeros(3, "int32")}
        expected = {"n": jnp.int32(3), "x": jnp.float32(0.5), "np": jnp.arange(3)}
        assert_equal(checkpoints.restore(like=like, partial=True), expected)
        for name in ("large", "text"):
            with pytest.raises(CheckpointMismatchError, match=rf"\['{name}'\]: expected int32"):
                checkpoints.restore(like={name: jnp.int32(0)}, partial=True)


def test_an_array_of_jax_is_never_rounded(tmp_path):
    with checkpointer(tmp_path) as checkpoints:
        with jax.enable_x64(True):
            checkpoints.save(1, {"w": jnp.arange(3.0)})
        with pytest.raises(CheckpointMismatchError, match=r"expected float32\[3\].*got float64\[3\]"):
            checkpoints.restore(like={"w": jnp.zeros(3)})
        with jax.enable_x64(True):
            shapes = jax.eval_shape(lambda: {"w": jnp.arange(3.0)})
        for like in (None, shapes):
            with pytest.raises(CheckpointMismatchError, match=r"w.*: expected an array of a type that JAX has"):
                checkpoints.restore(like=like)
        with jax.enable_x64(True):
            assert checkpoints.restore()["w"].dtype == "float64"


def test_what_a_run_counts_on_the_host_comes_back_as_it_was(tmp_path):
    """Numbers beyond 32 bits, and texts, of which JAX makes no arrays."""

    def create():
        return {"w": jnp.ones(2), "seen": np.array([0, 7]), "tokens": 0, "scale": 1e300, "name": "run a"}

    with checkpointer(tmp_path) as checkpoints:
        state, start = checkpoints.restore_or(create)
        state |= {"seen": np.array([2**40, 7]), "tokens": 2**40}
        checkpoints.save(start + 1, state)
        again, start = checkpoints.restore_or(create)
    assert start == 1
    assert isinstance(again["seen"], np.ndarray)
    assert again["seen"].tolist() == [2**40, 7]
    assert {name: again[name] for name in ("tokens", "scale", "name")} == {
        "tokens": 2**40, "scale": 1e300, "name": "run a",
    }  # fmt: skip


def test_without_orbax_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.delitem(sys.modules, "autopar.train.checkpoint.array_files", raising=False)
    with pytest.raises(MissingPackageError, match="pip install orbax-checkpoint"):
        checkpointer(tmp_path).save(1, {"w": jnp.zeros(2)})


def test_a_layout_without_a_structure_is_refused(saved):
    with pytest.raises(InvalidArgumentError, match="the structure of the state"):
        checkpointer(saved).restore(shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_the_objects_of_a_run_go_on_where_they_were(tmp_path):
    def create(seed):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    with checkpointer(tmp_path) as checkpoints:
        (model, optimizer), start = checkpoints.restore_or(create, 0)
        model.kernel[...] = model.kernel + 1
        checkpoints.save(1, (model, optimizer))
        (again, its_optimizer), next_start = checkpoints.restore_or(create, 0)
    assert (start, next_start) == (0, 1)
    assert isinstance(its_optimizer, nnx.Optimizer)
    assert np.array_equal(again.kernel[...], model.kernel[...])


def test_objects_of_a_seed_are_made_by_a_step(tmp_path):
    """As the page on checkpoints has it: `step.init` traces the arguments of `create`, of which none is the seed."""

    def create(seed):
        return nnx.Linear(2, 3, rngs=nnx.Rngs(seed))

    train_step = autopar.parallelize(lambda model, batch: model(batch).sum(), cache_dir=None)
    with checkpointer(tmp_path) as checkpoints:
        model, start = checkpoints.restore_or(lambda: create(0), step=train_step)
    assert start == 0
    assert np.array_equal(model.kernel[...], create(0).kernel[...])


def test_a_number_of_python_stays_one_under_a_plan(tmp_path):
    def step(state, batch):
        return {"w": state["w"] + batch.sum(0), "n": state["n"] + 1}, {}

    train_step = autopar.parallelize(step, plan=autopar.recipes.zero(3), cache_dir=None)
    state = {"w": jnp.arange(8.0), "n": 3}
    train_step.plan(state, jnp.ones((8, 8)))
    with checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        back = checkpoints.restore(like=state, step=train_step)
    assert_equal(back, state)
    assert len(back["w"].sharding.device_set) == 8


@pytest.mark.parametrize("leaf", [{"a"}, np.array(["a"])], ids=["set", "array of text"])
def test_a_leaf_that_is_neither_an_array_nor_static_is_refused(leaf, tmp_path):
    with pytest.raises(UnsupportedError, match=r"\['f'\]: expected arrays.*got (set|ndarray)"):
        checkpointer(tmp_path).save(1, {"f": leaf})


def test_a_function_in_a_state_is_taken_from_the_structure_that_it_is_restored_to(tmp_path):
    with checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"f": jnp.sin, "w": jnp.arange(3.0)})
        back = checkpoints.restore(like={"f": jnp.cos, "w": jnp.zeros(3)})
        assert list(checkpoints.restore()) == ["w"]
    assert back["f"] is jnp.cos
    assert back["w"].tolist() == [0, 1, 2]


def test_a_state_that_was_donated_is_refused(tmp_path):
    state = {"w": jnp.arange(4.0)}
    jax.jit(lambda x: x + 1, donate_argnums=0)(state["w"])
    with pytest.raises(DonatedStateError, match=r"\['w'\]: expected the state that the last step returned"):
        checkpointer(tmp_path).save(1, state)


def test_a_plan_that_is_none_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"expected a plan, or a step.*got function"):
        checkpointer(tmp_path).save(1, {"w": jnp.zeros(2)}, plan=lambda: None)


@pytest.mark.parametrize(("option", "value"), [("every", 0), ("keep", 0), ("every", 1.5)])
def test_bad_options_are_refused(tmp_path, option, value):
    with pytest.raises(InvalidArgumentError, match=rf"{option}=.*got {value}"):
        checkpointer(tmp_path, **{option: value})


def test_a_position_that_is_no_json_is_refused(tmp_path):
    data = Batches()
    data.number = np.int64(3)
    with pytest.raises(InvalidArgumentError, match="expected a position of numbers"):
        checkpointer(tmp_path).save(1, {"w": jnp.zeros(2)}, data=data)


def test_a_position_that_was_not_saved_is_not_restored(saved):
    with pytest.raises(CheckpointMismatchError, match="expected a position of the data"):
        checkpointer(saved).restore(data=Batches())


@pytest.mark.parametrize("number", [-1, 1.0, "1"])
def test_a_step_that_is_no_number_of_steps_is_refused(tmp_path, number):
    with pytest.raises(InvalidArgumentError, match="expected the number of steps done"):
        checkpointer(tmp_path).save(number, {"w": jnp.zeros(2)})


def test_a_run_goes_back_to_its_latest_checkpoint_and_on_with_other_batches(tmp_path):
    data = Batches()
    with checkpointer(tmp_path, every=2) as checkpoints:
        for number in (1, 2, 3):
            data.number += 1
            checkpoints.save(number, {"w": jnp.full(2, float(number))}, data=data)
        state, number = checkpoints.roll_back(like={"w": jnp.full(2, jnp.nan)}, most=2)
        assert (state["w"].tolist(), number, data.number) == ([2, 2], 2, 3)
        state, number = checkpoints.roll_back(data=data, most=2)
        assert (state["w"].tolist(), number, data.number) == ([2, 2], 2, 2)
        with pytest.raises(NonFiniteError, match=r"roll_back to step 2 .*expected at most 2 steps"):
            checkpoints.roll_back(most=2)
        assert checkpoints.save(4, state)


def test_big_endian_arrays_are_saved_as_their_numbers(tmp_path):
    with checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.array([1, 2, 3], ">f4")})
        assert checkpoints.restore()["w"].tolist() == [1, 2, 3]
        assert checkpoints.restore(like={"w": np.zeros(3, ">f4")})["w"].tolist() == [1, 2, 3]


def test_a_part_whose_name_two_leaves_have_is_refused(tmp_path):
    with checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": {"b": np.zeros(1)}, "a/b": np.ones(1)})
        with pytest.raises(CheckpointMismatchError, match="got two of that name"):
            checkpoints.restore(like={"a/b": np.zeros(1)}, partial=True)


# Hostile and damaged checkpoints


def edited(folder: Path, **changes) -> None:
    path = folder / "1" / "manifest" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["../w", "/etc/passwd", "a/../../b", "a\0b"])
def test_names_that_lead_out_of_the_folder_are_refused(saved, name):
    edited(saved, leaves=[{"name": name, "kind": "array", "shape": [4], "dtype": "float32"}])
    with pytest.raises(CheckpointFormatError, match="names of leaves"):
        checkpointer(saved).restore()


def test_links_are_refused(saved, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (saved / "1" / "state" / "d").rename(elsewhere / "d")
    (saved / "1" / "state" / "d").symlink_to(elsewhere / "d")
    with pytest.raises(CheckpointFormatError, match=r"state/d.*got a symbolic link"):
        checkpointer(saved).restore()


def test_a_checkpoint_that_is_a_link_is_refused(saved, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (saved / "1").rename(elsewhere / "1")
    (saved / "1").symlink_to(elsewhere / "1")
    with pytest.raises(CheckpointFormatError, match="got a symbolic link"):
        checkpointer(saved).restore()


def test_what_is_removed_is_never_behind_a_link(tmp_path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "precious").mkdir()
    (tmp_path / "deleted").symlink_to(elsewhere)
    with pytest.raises(CheckpointFormatError, match=r"deleted: expected a folder, got a symbolic link"):
        checkpointer(tmp_path).save(1, {"w": jnp.zeros(2)})
    assert (elsewhere / "precious").is_dir()


def test_damaged_arrays_are_refused(saved):
    for path in (saved / "1" / "state").rglob("d/*"):
        path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CheckpointFormatError, match="arrays that can be read"):
        checkpointer(saved).restore()


@pytest.mark.parametrize(
    "leaf",
    [
        {"kind": "number", "dtype": "int", "number": "__import__('os')"},
        {"kind": "number", "dtype": "object", "number": "1"},
        {"kind": "array", "dtype": "nothing", "shape": [0]},
        {"kind": "key", "dtype": "nothing", "shape": [0]},
        {"kind": "array", "dtype": "float32", "shape": [-1]},
    ],
)
def test_leaves_of_no_type_are_refused(saved, leaf):
    edited(saved, leaves=[{"name": "x", **leaf}])
    with pytest.raises(CheckpointFormatError, match="metadata, x: expected a"):
        checkpointer(saved).restore()


def test_arrays_in_files_by_name_are_refused(saved):
    path = saved / "1" / "state" / "_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_ocdbt": False}))
    with pytest.raises(CheckpointFormatError, match="one OCDBT database"):
        checkpointer(saved).restore()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format_version": 99}, CheckpointFormatError, "got format version 99"),
        ({"leaves": 3}, CheckpointFormatError, r"\$\.leaves"),
        ({"step": 4}, CheckpointFormatError, "got that of step 4"),
        ({"plan": '{"format_version": 1000000, "plan": {}}'}, PlanFormatError, "plan: expected format version"),
        ({"plan": "cos\nsystem\n(S'true'\ntR."}, PlanFormatError, "plan: expected a plan saved by autopar"),
    ],
)
def test_a_changed_checkpoint_is_refused(saved, changes, error, message):
    edited(saved, **changes)
    with pytest.raises(error, match=message):
        checkpointer(saved).restore()


def test_a_folder_without_an_end_is_no_checkpoint(saved):
    (saved / "2").mkdir()
    (saved / "7.orbax-checkpoint-tmp").mkdir()
    assert checkpointer(saved).steps() == [1]


# Kills and preemption, in a process of their own

PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
from autopar.checkpoint import Checkpointer
folder, pause_s = sys.argv[1], float(sys.argv[2])
checkpoints = Checkpointer(folder, keep=2)
state, start = checkpoints.restore_or(lambda: {"w": jnp.zeros((256, 1024)), "n": jnp.int32(0)})
advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
for i in range(start, 10_000):
    state = advance(state)
    checkpoints.save(i + 1, state)
    print(i + 1, flush=True)
    time.sleep(pause_s)
"""


def begun(folder: Path, pause_s: float = 0) -> subprocess.Popen:
    """A run that has saved some steps."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", PROGRAM, str(folder), str(pause_s)]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(3):
        assert run.stdout.readline()
    return run


def test_sigterm_saves_and_ends(tmp_path):
    run = begun(tmp_path, pause_s=0.02)
    run.send_signal(signal.SIGTERM)
    out, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (143, "")
    last = checkpointer(tmp_path).latest()
    assert last > max([3, *map(int, out.split())])  # the save that ended it said nothing
    assert int(checkpointer(tmp_path).restore()["n"]) == last


@pytest.mark.slow
def test_a_program_that_ends_waits_for_its_last_checkpoint(tmp_path):
    program = f"{PROGRAM.replace('10_000', '2')}\nimport logging\nprint(logging.root.handlers)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", program, str(tmp_path), "0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("1\n2\n[]\n", "")  # no handler of the root logger
    assert checkpointer(tmp_path).steps() == [1, 2]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 12), reason="a program that ends begins threads")
def test_a_checkpoint_that_is_lost_at_the_end_is_an_error_that_says_how_to_keep_it(tmp_path):
    without = "from autopar.checkpoint import unfinished\nunfinished.NUM_SPARE_THREADS = 0\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", without + PROGRAM.replace("10_000", "2"), str(tmp_path), "0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "the last checkpoint could not be written: call checkpoints.close() before the program ends" in ended.stderr
    assert checkpointer(tmp_path).steps() == [1]


@pytest.mark.slow
def test_a_kill_at_any_time_leaves_a_checkpoint_that_opens(tmp_path):
    last = 0
    for wait_s in np.random.default_rng(0).uniform(0, 0.2, size=8):
        run = begun(tmp_path)
        time.sleep(wait_s)
        run.kill()
        run.communicate()
        state = checkpointer(tmp_path).restore()
        assert int(state["n"]) == checkpointer(tmp_path).latest() >= last
        assert np.unique(np.asarray(state["w"])).tolist() == [int(state["n"])]
        last = int(state["n"])
    with checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(last + 1, state)
    assert sorted(os.listdir(tmp_path), key=int) == [str(n) for n in checkpoints.steps()]  # and nothing else


def test_a_handler_that_was_there_is_called_and_gets_its_signal_back(tmp_path):
    arrived = []
    earlier = signal.signal(signal.SIGTERM, lambda *_: arrived.append("SIGTERM"))
    try:
        checkpoints = Checkpointer(tmp_path)
        assert not checkpoints.preempted(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.preempted(1)
        with pytest.raises(Preempted) as raised:
            checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.close()
        assert (raised.value.step_number, raised.value.code, checkpoints.steps()) == (1, 143, [1])
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert arrived == ["SIGTERM"] * 2


@pytest.mark.parametrize("name", ["w/", "a//b", "..", "\ud800"])
def test_a_name_that_could_not_be_read_again_is_not_saved(tmp_path, name):
    with pytest.raises(UnsupportedError, match="call the entry of the state otherwise"):
        checkpointer(tmp_path).save(1, {name: jnp.ones(2)})


def test_leaves_are_all_there_without_a_structure(tmp_path):
    with checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"scale": Scale(count=1, value=2), "state": jnp.ones(())})
    found = checkpointer(tmp_path).restore()
    assert {name: int(x) for name, x in found["scale"].items()} == {"count": 1, "value": 2}
    assert int(found["state"]) == 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scale:
    count: int
    value: int


def test_what_could_not_be_written_is_saved_again(tmp_path, monkeypatch):
    checkpoints = checkpointer(tmp_path)
    checkpoints.save(1, {"w": jnp.ones(2)})
    checkpoints.wait()
    checkpoints.save(2, {"w": jnp.ones(2)})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._writer, "wait_until_finished", fails)
        with pytest.raises(OSError, match="no space"):
            checkpoints.wait()
    shutil.rmtree(tmp_path / "2", ignore_errors=True)
    checkpoints._writer.reload()
    assert checkpoints.save(2, {"w": jnp.ones(2)}, force=True)
    checkpoints.close()
    assert checkpointer(tmp_path).latest() == 2


def fails():
    raise OSError("no space left on device")


def test_a_checkpoint_leaves_no_objects_behind(tmp_path):
    state = {"w": jnp.arange(4.0), "v": jnp.zeros((2, 2))}
    with checkpointer(tmp_path) as checkpoints:
        for number in range(1, 8):
            checkpoints.save(number, state)
            checkpoints.wait()
            gc.collect()
            if number == 3:
                before = len(gc.get_objects())
    assert len(gc.get_objects()) - before < 20


def test_who_writes_does_not_ask_whether_the_program_is_to_end(tmp_path, monkeypatch):
    """JAX's agreement is by the step that was asked about last: orbax asks about those of checkpoints, later on."""
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    with checkpointer(tmp_path) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, {"w": jnp.arange(4.0)})
    assert asked == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: c.restore_or({"w": 1}),
            r"restore_or\(create, \.\.\.\): expected the function that makes .* got dict",
        ),
        (lambda c: c.restore_or(dict, step=len), r"restore_or\(step=\.\.\.\): expected a step .* got builtin_function"),
        (lambda c: c.restore(step=len), r"restore\(step=\.\.\.\): expected a step made by autopar.parallelize"),
        (lambda c: c.roll_back(step=len), r"roll_back\(step=\.\.\.\): expected a step made by autopar.parallelize"),
        (lambda c: c.restore(data={}), r"restore\(data=\.\.\.\): .* got dict, without restore"),
        (lambda c: c.save(2, {"w": 1}, data=[]), r"save\(data=\.\.\.\): .* got list, without position"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(saved, call, message):
    with pytest.raises(InvalidArgumentError, match=message):
        call(checkpointer(saved))


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InvalidArgumentError, match=r"expected a folder, .* got a file, "):
            checkpointer(folder)
    checkpointer(tmp_path / "not yet" / "there")
    assert not (tmp_path / "not yet").exists()
