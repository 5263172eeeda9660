"""Plans that cannot be used as they are given: of another step, for other shapes, damaged files."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import errors
from autopar.plan.schema import FORMAT_VERSION
from tests.small_steps import (
    MLP_BATCH,
    MLP_STATE,
    assert_close,
    grouped,
    mlp_batch,
    mlp_step,
    new_mlp_state,
    slow_cluster,
)


def small(function=mlp_step, **options):
    return autopar.parallelize(function, **grouped(**{"cluster": slow_cluster(2), **options}))


def assert_works(step, *more) -> None:
    assert_close(step(new_mlp_state(), mlp_batch(), *more), mlp_step(new_mlp_state(), mlp_batch()))


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return small(cache_dir=None).plan(MLP_STATE, MLP_BATCH)


@pytest.fixture(scope="module")
def plan_bytes(plan, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return path.read_bytes()


def flipped(data: st.DataObject, content: bytes) -> bytes:
    at = data.draw(st.integers(0, len(content) - 1))
    return content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]


def test_a_plan_of_another_step(plan):
    def other(state, batch):
        new, metrics = mlp_step(state, batch)
        return new, {"loss": metrics["loss"] * 2}

    with pytest.raises(errors.PlanMismatchError, match="plan of mlp_step: expected a plan for other") as caught:
        autopar.parallelize(other, plan=plan)(new_mlp_state(), mlp_batch())
    assert "plan again" in caught.value.hint
    assert "one for the same shapes, and other operations" in str(caught.value)


@pytest.mark.parametrize(
    "wishes",
    [
        {"num_microbatches": 2},
        {"schedule": "1f1b"},
        {"per_microbatch": "norm"},
        {"expert_load": [3, 1]},
        {"attention": "blockwise"},
        {"remat": ["scores"]},
        {"constraints": "pins"},
        {"cluster": "dgx-h100"},
    ],
    ids=lambda wishes: next(iter(wishes)),
)
def test_wishes_beside_a_plan_are_refused(plan, wishes):
    (name,) = wishes
    with pytest.raises(errors.InvalidArgumentError, match=f"{name}=.*run as it is.*got a plan, and {name}="):
        autopar.parallelize(mlp_step, plan=plan, **grouped(**wishes))


def test_a_plan_for_other_shapes(plan):
    parallel = autopar.parallelize(mlp_step, plan=plan)
    whole, part = mlp_batch(), mlp_batch(8)
    with pytest.raises(errors.PlanMismatchError, match="plan of mlp_step: expected a plan for mlp_step ") as caught:
        parallel(new_mlp_state(), part)
    names = sorted(whole)
    for batch, before in ((part, "with "), (whole, "got one for ")):
        assert before + ", ".join(f"batch['{n}'] float32{list(batch[n].shape)}" for n in names) in str(caught.value)
    assert_works(parallel)


def test_a_plan_for_other_arguments(plan):
    more = {f"z{i}": np.zeros(16, np.float32) for i in range(5)}
    with pytest.raises(errors.PlanMismatchError) as caught:
        autopar.parallelize(mlp_step, plan=plan)(new_mlp_state(), mlp_batch() | more)
    assert "with batch['z0'] float32[16], batch['z1'] float32[16], batch['z2'] float32[16], and 2 more" in str(
        caught.value
    )
    assert "one for batch['z0'] absent, " in str(caught.value)


def test_a_plan_for_a_larger_mesh():
    large = autopar.plan(mlp_step, MLP_STATE, MLP_BATCH, cluster=autopar.Cluster.preset("dgx-h100", hosts=2))
    parallel = autopar.parallelize(mlp_step, plan=large)
    with pytest.raises(errors.NotEnoughDevicesError, match="expected 16 devices, got 8"):
        parallel(new_mlp_state(), mlp_batch())


def test_a_plan_file_of_another_version(plan_bytes, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(plan_bytes) | {"format_version": FORMAT_VERSION + 1}))
    with pytest.raises(
        errors.PlanFormatError, match=f"plan.json: expected format version {FORMAT_VERSION}, got"
    ) as caught:
        autopar.Plan.load(path)
    assert "plan anew" in caught.value.hint or "make the plan anew" in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"not a plan", b"\xff\xfe", b'{"format_version": "1"}']
)
def test_files_that_are_no_plans(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(errors.PlanFormatError, match=r"plan\.json: expected a plan saved by autopar"):
        autopar.Plan.load(path)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_truncated_plan_files(share, plan_bytes, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(plan_bytes[: int(share * len(plan_bytes))])
    with pytest.raises(errors.PlanFormatError, match=r"plan\.json"):
        autopar.Plan.load(path)


def test_a_plan_file_with_a_field_missing(plan_bytes, tmp_path):
    path = tmp_path / "plan.json"
    for name in json.loads(plan_bytes):
        content = json.loads(plan_bytes)
        del content[name]
        path.write_text(json.dumps(content))
        with pytest.raises(errors.PlanFormatError, match=name):
            autopar.Plan.load(path)


FLIPS = settings(max_examples=300, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


def test_flipped_bytes_never_give_another_exception(plan_bytes, tmp_path):
    path = tmp_path / "plan.json"

    @FLIPS
    @given(data=st.data())
    def check(data):
        path.write_bytes(flipped(data, plan_bytes))
        with contextlib.suppress(errors.PlanFormatError):
            assert isinstance(autopar.Plan.load(path), autopar.Plan)

    check()


def test_flipped_bytes_never_give_another_plan(plan, plan_bytes, tmp_path):
    path = tmp_path / "plan.json"

    @FLIPS
    @given(data=st.data())
    def check(data):
        path.write_bytes(flipped(data, plan_bytes))
        with contextlib.suppress(errors.PlanFormatError, UnicodeDecodeError):
            assert autopar.Plan.load(path).record == plan.record

    check()


def damaged(content: dict, what: str) -> dict:
    """A plan that is well-formed JSON of the right types, and no plan."""
    decisions = content["decisions"]
    if what == "layout number":
        decisions["raw"] = dict.fromkeys(decisions["raw"], 10000)
    elif what == "mesh axis":
        content["axis_sizes"] = [1]
    elif what == "strategy number":
        decisions["of_op"] = dict.fromkeys(decisions["of_op"], 10000)
    elif what == "no decisions":
        decisions["of_op"] = decisions["raw"] = decisions["placed"] = {}
    elif what == "result layouts":
        content["results"] = []
    elif what == "argument layouts":
        content["arguments"] = content["arguments"][:1]
    return content


DAMAGES = ["layout number", "mesh axis", "strategy number", "no decisions", "result layouts", "argument layouts"]


@pytest.mark.parametrize("what", DAMAGES)
def test_a_plan_file_that_was_changed_is_refused(what, plan_bytes, tmp_path):
    path = tmp_path / "plan.json"
    content = json.loads(plan_bytes)
    path.write_text(json.dumps(content | {"plan": damaged(content["plan"], what)}))
    with pytest.raises(errors.PlanFormatError, match="checksum"):
        autopar.Plan.load(path)
