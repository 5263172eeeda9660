"""A table that is shared with another process is the one that this process makes alone."""

import dataclasses

import numpy as np
import pytest

from autopar.common.worker_processes import SharedJob, WorkerProcess
from autopar.inter_op import stage_problems
from autopar.inter_op.stage_problems import DecidedOptions, MeshScreen, tables
from tests.common.test_worker_processes import when_ready
from tests.inter_op.test_stage_costs import LIMITS, cluster, cut


@pytest.fixture(scope="module")
def worker():
    made = WorkerProcess()
    yield made
    made.end()


def fields(option):
    values = [getattr(option.option, f.name) for f in dataclasses.fields(option.option)]
    return [option.mesh, option.policies, option.terms, option.given_bytes, *values]


def are_equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(fields(one), fields(other), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("screens", [False, True])
def test_a_shared_table_is_the_same(monkeypatch, worker, screens):
    on, places = dataclasses.replace(cluster(), num_hosts=4), set()
    run = SharedJob.run

    def noted(job, *given):
        found = run(when_ready(job), *given)
        places.update(job._place_of.values())
        return found

    monkeypatch.setattr(SharedJob, "run", noted)
    found, decided = [], []
    for workers, worth in (([], 10**9), ([worker], 0)):
        monkeypatch.setattr(stage_problems, "worker_processes", lambda workers=workers: workers)
        monkeypatch.setattr(stage_problems, "WORTH_PROCESSES", worth)
        screen = MeshScreen(num_devices=8) if screens else None
        decided.append(DecidedOptions())
        found += [
            [option for m in (8, 4) for option in tables(cut(m), on, [1, 2, 4, 8], LIMITS, decided[-1], screen=screen)]
        ]
    alone, shared = found
    assert len(alone) == len(shared) > 10
    assert all(map(are_equal, alone, shared))
    assert list(decided[0]) == list(decided[1])
    for key, decisions in decided[0].items():
        assert [d.sharding.strategy for d in decisions] == [d.sharding.strategy for d in decided[1][key]]
    assert {None, worker} <= places  # both did some of it
