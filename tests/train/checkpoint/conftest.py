"""Buckets on this machine."""

import itertools
from collections.abc import Iterator

import pytest

from tests.train.checkpoint.bucket_server import Bucketful, serving


@pytest.fixture(scope="session")
def buckets() -> Iterator[Bucketful]:
    """The objects of a server that the clients of this process, and those that it begins, take for Google's."""
    with serving() as (stored, variables), pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        pytest.importorskip("gcsfs")
        yield stored


_numbers = itertools.count(1)


@pytest.fixture
def bucket(buckets: Bucketful) -> str:
    """The name of a bucket with nothing in it."""
    return f"bucket-{next(_numbers)}"


@pytest.fixture(params=["file system", "bucket"])
def any_folder(request: pytest.FixtureRequest) -> str:
    """The path of a folder that is not there yet, on a file system and in a bucket."""
    if request.param == "bucket":
        return f"gs://{request.getfixturevalue('bucket')}/run"
    return str(request.getfixturevalue("tmp_path") / "run")
