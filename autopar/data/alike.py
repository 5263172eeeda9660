"""All processes shard the same data in the same way. Before the first batch each says how, and all compare.

A process reads only its own rows of a batch. With another seed, batch size or source than the others it would read rows
of another batch, and nothing later would notice: the shapes are the same.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.data.reading import NumberedReader, StreamReader
from autopar.errors import ProcessMismatchError
from autopar.executables.multiprocess import with_process_lost_errors
from autopar.runtime.processes.agreement import exchange_in_turn

EXAMPLE, CONTENT = "type of an example", "content of some examples"
_SHOWN = 3  # values of an option in an error
_HINT = (
    "pass the same source and the same options in every process, not a part of the data in each: shard lets each "
    "process read its own rows of the whole batch"
)
_HINT_OF_CONTENT = _HINT + "; where the source changes examples at random, seed that alike in all processes"


def check_alike(reader: NumberedReader | StreamReader, options: Mapping[str, Any]) -> None:
    """Every process calls it before its first batch. Raises: ProcessMismatchError, in all alike; ProcessLostError."""
    if jax.process_count() == 1:
        return
    own = json.dumps({**options, **seen_of(reader)})
    said = with_process_lost_errors(
        lambda: exchange_in_turn(
            "autopar.data.shard", "autopar/data", own,
            together="all processes to take the first batch of their data together",
            hint="make the same data in every process, and take its batches in all of them, in the same order",
        )
    )  # fmt: skip
    compare([json.loads(text) for text in said], jax.process_index())


def seen_of(reader: NumberedReader | StreamReader) -> dict[str, str | None]:
    """The type of an example, and a digest of some; None where the source gives others when it is asked again."""
    sample = reader.sample()
    digest: str | None = _digest(sample)
    if isinstance(reader, NumberedReader) and _digest(reader.sample()) != digest:
        digest = None
    return {EXAMPLE: _type(sample), CONTENT: digest}


def compare(said: Sequence[Mapping[str, Any]], process: int) -> None:
    """Raises: ProcessMismatchError where processes differ in an option, or in what they read."""
    differing = [name for name in said[0] if name != CONTENT and len({str(own[name]) for own in said}) > 1]
    content = [own[CONTENT] for own in said]
    if not differing and (None in content or len(set(content)) == 1):
        return
    if differing:
        got, hint = "; ".join(_values(name, [own[name] for own in said]) for name in differing), _HINT
    else:
        others = ", ".join(str(p) for p, digest in enumerate(content) if digest != content[0])
        got, hint = f"another {CONTENT} in process {others} than in process 0", _HINT_OF_CONTENT
    raise ProcessMismatchError(
        where=f"autopar.data.shard, process {process} of {len(said)}",
        expected=f"the same {', '.join(differing or [CONTENT])} in all processes", got=got, hint=hint,
    )  # fmt: skip


def _values(name: str, values: Sequence[Any]) -> str:
    """`seed 0 in process 0, 1 in process 1`."""
    processes = collections.defaultdict(list)
    for process, value in enumerate(values):
        processes[str(value)].append(process)
    shown = [f"{value} in process {', '.join(map(str, by[:8]))}" for value, by in processes.items()]
    return f"{name} {', '.join(shown[:_SHOWN])}{', ...' if len(shown) > _SHOWN else ''}"


def _type(sample: Any) -> str:
    leaves, _ = jax.tree_util.tree_flatten_with_path(sample)
    return ", ".join(f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape[1:])}".strip() for path, x in leaves)


def _digest(sample: Any) -> str:
    total = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(sample):
        array = np.asarray(leaf)
        total.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes())
    return total.hexdigest()
