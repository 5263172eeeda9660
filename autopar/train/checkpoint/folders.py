"""Reads and writes folders of checkpoints, on a file system or in a bucket of Google Cloud Storage.

A folder in a bucket is a path of etils, as orbax takes it, which has the methods of a path of Python. It is read and
written through gcsfs, as etils has it, which is imported with the first such folder. Only an object that is not there
counts as missing: a bucket that does not answer is an error, and no folder without checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.errors import InvalidArgumentError, MissingPackageError

# The file of a complete checkpoint, on a file system and in a bucket. A bucket renames nothing at once: orbax writes
# its file after all others.
_COMMITTED, _COMMITTED_IN_BUCKET = "_CHECKPOINT_METADATA", "commit_success.txt"
COMMITTED = _COMMITTED, _COMMITTED_IN_BUCKET
_OWNER_FILE = "owner.json"
_SCHEME = "gs://"

logger = logging.getLogger("autopar")


def folder_of(folder: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder, which may not exist.

    Raises: InvalidArgumentError for a folder that is neither on a file system nor in a bucket `gs://`;
    MissingPackageError.
    """
    text = os.fspath(folder)
    if text.startswith(_SCHEME):
        if set(text) & set("*?[]"):  # fsspec would take them for patterns of other names
            raise InvalidArgumentError(
                where="the folder of checkpoints",
                expected="a name in a bucket without *, ?, [ and ]",
                got=repr(text),
                hint="take other characters, such as run-lr-1",
            )
        _bucket_files(_SCHEME).invalidate_cache()
        path: Path = import_module("etils.epath").Path(text)
        return path
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise InvalidArgumentError(
            where="the folder of checkpoints",
            expected="a folder of a file system, or gs://BUCKET/FOLDER as text",
            got=repr(text),
            hint="Path('gs://...') loses a slash: give the text; mount other stores as file systems",
        )
    return Path(text).absolute()


def is_in_bucket(path: Path) -> bool:
    return not isinstance(path, Path)


def names_in(folder: Path) -> list[str]:
    """The names of what is in a folder; none where it is not there."""
    if not is_in_bucket(folder):
        return [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
    try:
        entries = _bucket_files(folder).ls(str(folder), detail=False)
    except FileNotFoundError:
        return []
    return [name for entry in entries if (name := entry.rstrip("/").rsplit("/", 1)[-1])]


def complete_in(folder: Path, steps: Sequence[int]) -> list[int]:
    """Those of the steps of a folder of whose checkpoints all is there."""
    if not is_in_bucket(folder):
        return [step for step in steps if (folder / str(step) / _COMMITTED).is_file()]
    files = {step: f"{folder}/{step}/{_COMMITTED_IN_BUCKET}" for step in steps}
    read = _bucket_files(folder).cat([*files.values()], on_error="return") if files else {}  # all at once
    for answer in read.values():
        if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
            raise answer
    return [step for step, file in files.items() if isinstance(read[file.removeprefix(_SCHEME)], bytes)]


def take_back(checkpoint: Path) -> None:
    """Makes a checkpoint in a bucket one that is not complete, at once: what is left of it is removed later."""
    with contextlib.suppress(FileNotFoundError):
        _bucket_files(checkpoint).rm_file(str(checkpoint / _COMMITTED_IN_BUCKET))


def remove(path: Path) -> None:
    """Removes a file or folder with all in it, as far as it is there."""
    if not is_in_bucket(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        _bucket_files(path).rm(str(path), recursive=True)
    except FileNotFoundError:
        pass
    except Exception as error:  # networks have any; it is removed once more with the next checkpoint
        logger.warning("%s could not be removed from the bucket: %s", path, error)


# The file that says who owns a folder. In a bucket it is an object by itself: orbax takes a folder for a checkpoint.


def owner_file(folder: Path, name: str) -> Path:
    return folder / name if is_in_bucket(folder) else folder / name / _OWNER_FILE


def put_owner(folder: Path, name: str, data: bytes) -> None:
    """Writes an owner file of a name that nobody else has; the folder comes into being."""
    file = owner_file(folder, name)
    if not is_in_bucket(folder):
        file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def rename_owner(folder: Path, old: str, new: str) -> bool:
    """Whether the owner file has the new name now, whole and at once; one that had it stays, and keeps the folder."""
    if is_in_bucket(folder):
        return _create(owner_file(folder, new), owner_file(folder, old).read_bytes())
    try:
        os.rename(folder / old, folder / new)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def touch(file: Path) -> None:
    """Makes now the time of a file. Raises: FileNotFoundError; OSError, and in a bucket whatever a network has."""
    if is_in_bucket(file):
        _bucket_files(file).setxattrs(str(file), touched=str(time.time_ns()))
    else:
        os.utime(file)


def touched_s(file: Path) -> float | None:
    """When a file was touched, by the clock of its store; None where there is none."""
    if is_in_bucket(file):
        about = _about(file)
        return None if about is None else float(about["mtime"].timestamp())
    try:  # opened, or a network file system may answer from memory
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_mtime
    except OSError:
        return None


def _create(file: Path, data: bytes) -> bool:
    """Whether an object is made by this call: the store makes it where there is none, and refuses else."""
    try:
        _bucket_files(file).pipe_file(str(file), data, mode="create")
    except FileExistsError:  # also of our own, where the answer was lost and gcsfs asked again
        with contextlib.suppress(FileNotFoundError):  # another run may have given it back by now
            return bool(file.read_bytes() == data)
        return False
    return True


def _about(file: Path) -> dict[str, Any] | None:
    """What a bucket says about an object; None where there is none."""
    try:
        about: dict[str, Any] = _bucket_files(file).info(str(file))
    except FileNotFoundError:
        return None
    return about


def _bucket_files(path: str | Path) -> Any:
    """gcsfs, as etils has it for orbax. It must not answer from memory: others write to the bucket too."""
    try:
        import_module("gcsfs")
        files = import_module("etils.epath.backend").fsspec_backend.fs(path)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            where="a folder of checkpoints in a bucket",
            expected="the packages of the extra autopar[gcs]",
            got=f"no {error.name}",
            hint="pip install gcsfs google-cloud-storage orbax-checkpoint",
        ) from error
    files.dircache.use_listings_cache = False
    return files
