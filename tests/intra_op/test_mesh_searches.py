"""Searches on meshes that are shared with another process find what this process finds alone."""

import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.common.jax_pickle import dumps
from autopar.common.progress import Deadline, Progress
from autopar.common.worker_processes import WorkerProcess
from autopar.compiler.planner import planning_context
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.intra_op import mesh_choice, mesh_searches
from autopar.intra_op.mesh_searches import mesh_candidates
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.kernels import known
from autopar.plan.context import Rejection
from autopar.plan.options import PlanRequest
from tests.sections import BOOK
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step
from tests.workers import wait_for_workers

MASK = np.ones(1 << 16, np.float32)


def masked_step(state, batch):
    new_state, metrics = mlp_step(state, batch)
    return new_state, metrics | {"masked": (jnp.sum(state["bias"]) * MASK).sum()}


@pytest.fixture(scope="module")
def worker():
    made = WorkerProcess()
    made.call(pickle.loads, dumps(mesh_searches.MeshSearches)).result(120)
    yield made
    made.end()


def context(step=masked_step):
    """On a cluster of sixteen devices, where whatever is slower than the best is wanted too."""
    cluster = dataclasses.replace(Cluster.preset("dgx-h100", hosts=4), devices_per_host=4)
    traced = trace(step, (MLP_STATE, MLP_BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    return planning_context(traced, cluster, PlanRequest(), BOOK, Progress("", show=False), keep_tolerance=1e9)


def test_shared_searches_find_the_same(monkeypatch, worker):
    monkeypatch.setattr("autopar.intra_op.mesh_searches.worth_trying", lambda *_: True)
    places = wait_for_workers(monkeypatch)
    monkeypatch.setattr(mesh_searches, "WORTH_PROCESSES", 0)
    made, found = context(), []
    for workers in ([], [worker]):
        monkeypatch.setattr(mesh_searches, "worker_processes", lambda workers=workers: workers)
        found.append(list(mesh_candidates(made)))
    assert {None, worker} <= set(places)  # both did some of it
    alone, shared = found
    assert len(alone) == len(shared)
    assert sum(len(each.sharding.mesh.axis_sizes) == 3 for each in shared if isinstance(each, SpmdCandidate)) > 2
    for one, other in zip(alone, shared, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Rejection):
            assert one == other
            continue
        assert one.trial == other.trial
        assert one.sharding.strategy == other.sharding.strategy
        assert one.sharding.partials == other.sharding.partials
        assert one.lowered.instructions == other.lowered.instructions


def test_no_search_begins_behind_the_deadline():
    made = dataclasses.replace(context(), deadline=Deadline.after(0.0))
    mesh = mesh_choice.LogicalMesh(axis_sizes=(2, 2, 4))
    (found,) = [mesh_searches.MeshSearches(made, [mesh], 1.0).found(0)]
    assert found == mesh_choice.not_tried(mesh, "the 0 s of time_limit_s were over")
    assert mesh_searches.candidate_of(made, mesh, found) == found


def test_what_is_slower_is_so_beside_the_best_that_there_is_now():
    made, mesh = context(), mesh_choice.LogicalMesh(axis_sizes=(2, 2, 4))
    (row, *_) = mesh_candidates(made)
    after = made.after([row])
    beside_another = mesh_choice.slower(after, row.model, 3 * row.step_time_s, 3 * row.step_time_s)
    found = dataclasses.replace(beside_another, why="slower by a year", text=f"mesh {mesh}", axis_sizes=mesh.axis_sizes)
    again = mesh_searches.candidate_of(after, mesh, found)
    assert again.why == beside_another.why
    assert (again.text, again.axis_sizes) == (f"mesh {mesh}", mesh.axis_sizes)


def test_searches_are_not_shared_where_kernels_are_known_by_name(monkeypatch, worker):
    monkeypatch.setattr(mesh_searches, "worker_processes", lambda: [worker])
    monkeypatch.setattr(mesh_searches, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(known, "_ENTRIES", {})
    meshes = [mesh_choice.LogicalMesh(axis_sizes=each) for each in ((2, 2, 4), (4, 2, 2))]
    assert set(mesh_searches.searched_at_once(context(), meshes, 10.0)) == set(meshes)
    autopar.known_kernel("of the user's", "b [d] -> b [d]", flops=lambda x: x.size)
    assert mesh_searches.searched_at_once(context(), meshes, 10.0) == {}


def test_neither_numbers_nor_the_code_are_handed_on():
    sent = dumps(mesh_searches.MeshSearches(context(), [], 1.0))
    assert len(sent) < MASK.nbytes
    assert b"test_mesh_searches" not in sent


def test_searches_on_few_axes_or_of_few_operations_are_not_shared(monkeypatch, worker):
    monkeypatch.setattr(mesh_searches, "worker_processes", lambda: pytest.fail("no process was needed"))
    made = context()
    for sizes in ([(2, 8), (8, 2)], [(2, 2, 4)], [(2, 2, 4), (4, 2, 2)]):
        meshes = [mesh_choice.LogicalMesh(axis_sizes=each) for each in sizes]
        assert mesh_searches.searched_at_once(made, meshes, 1.0) == {}
