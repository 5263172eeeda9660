"""Plan files: JSON with a version and a checksum, so that a damaged plan never runs as another one.

Whether a plan is one of its step shows where it is made into a function (`autopar.compiler.check_decisions`).
"""

from __future__ import annotations

import hashlib

import msgspec

from autopar.common.files import Fault, JsonFaultError, decoded
from autopar.errors import PlanFormatError
from autopar.plan.schema import FORMAT_VERSION, PlanRecord

_HINT = (
    "plan anew (step.plan(...).save(path)); what a plan must hold to is said with autopar.constrain, not by editing it"
)


class _File(msgspec.Struct, omit_defaults=True):
    """`key` is the cache key of a plan of the cache; files that users save have none."""

    format_version: int
    checksum: str = ""
    key: str = ""
    plan: msgspec.Raw = msgspec.Raw(b"")


def encode(record: PlanRecord, key: str = "") -> bytes:
    """JSON with the format's version and a checksum, and the key if the plan is in the cache."""
    body = msgspec.json.encode(record)
    file = _File(format_version=FORMAT_VERSION, checksum=checksum(body), key=key, plan=msgspec.Raw(body))
    return msgspec.json.encode(file)


def decode(data: bytes, where: str, key: str | None = None) -> PlanRecord:
    """The plan of a file, which is named by `where`; with a key, only a plan that was saved under it.

    Raises: PlanFormatError for another format version, and for a changed file; the error names the place (such as
    `$.plan.pipeline.stages[1].axis_sizes[0]`) of a value that no plan has there.
    """
    try:
        file = decoded(data, _File, "a plan saved by autopar")
    except JsonFaultError as error:
        fault = error.fault
        got = fault.got if fault.place == "$" else f"{fault.got} at {fault.place}, where {fault.expected} is expected"
        raise PlanFormatError(where=where, expected="a plan saved by autopar", got=got, hint=_HINT) from error
    if file.format_version != FORMAT_VERSION:
        raise PlanFormatError(
            where=where,
            expected=f"format version {FORMAT_VERSION}",
            got=f"format version {file.format_version}",
            hint="make the plan anew (step.plan(...).save(path)); plans are cheap to find and are cached on disk",
        )
    if key is not None and file.key != key:
        raise PlanFormatError(
            where=where, expected=f"the plan of key {key}", got=f"that of key {file.key!r}", hint=_HINT
        )
    changed = "" if checksum(bytes(file.plan)) == file.checksum else "; it was changed since it was saved (checksum)"
    fault = Fault(place="$.plan", expected="a plan as it was saved", got="another one")
    try:
        record = decoded(bytes(file.plan), PlanRecord, "a plan", "$.plan")
        if not changed:
            return record
    except JsonFaultError as error:
        fault = error.fault
    raise PlanFormatError(
        where=f"{where}, {fault.place}", expected=fault.expected, got=f"{fault.got}{changed}", hint=_HINT
    )


def checksum(body: bytes) -> str:
    """Digits that tell whether a file was changed."""
    return hashlib.sha256(body).hexdigest()
