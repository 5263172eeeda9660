"""For tests of work that processes share."""

import time

from autopar.common.worker_processes import SharedJob


def when_ready(job: SharedJob) -> SharedJob:
    """A job once all its workers have it, so that each does some of it."""
    until_s = time.monotonic() + 60
    while len(job._ready) < len(job.workers) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert len(job._ready) == len(job.workers)
    return job


def wait_for_workers(monkeypatch) -> list:
    """Makes jobs wait for their workers; a list of the places to which items go, workers and None for this process."""
    places, run, take = [], SharedJob.run, SharedJob._take
    monkeypatch.setattr(SharedJob, "run", lambda job, *given: run(when_ready(job), *given))
    monkeypatch.setattr(SharedJob, "_take", lambda job, place: (places.append(place), take(job, place))[1])
    return places
