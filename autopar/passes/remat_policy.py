"""What each layer recomputes, by one text for all: `input`, or `input every 2` for every second layer."""

from __future__ import annotations

import re

from autopar.frontend.recompute_in_scans import Recompute, is_by_value

_TEXT = re.compile(rf"({'|'.join(policy.value for policy in Recompute)})(?: every ([1-9]\d*))?")
FORMS = " or ".join(repr(policy.value) for policy in Recompute) + ", also with ' every 2' or another number behind it"


def name_of(policy: str) -> str:
    """The policy of a layer in a word or two."""
    return "by value" if is_by_value(policy) else policy


def is_policy(text: str) -> bool:
    return _TEXT.fullmatch(text) is not None


def policies_of(text: str, num_layers: int) -> tuple[str, ...]:
    """The policy of each layer: with a number n of the layers n-1, 2n-1 and so on, the others keep everything.

    What is kept and what is computed again is then in between (Megatron's recomputation of some layers, Korthikanti et
    al., "Reducing activation recomputation in large transformer models", 2023, section 5).
    """
    found = _TEXT.fullmatch(text)
    assert found is not None, f"{text!r} is no policy: {FORMS}"
    policy, every = found[1], int(found[2] or 1)
    return tuple(policy if layer % every == every - 1 else Recompute.NOTHING.value for layer in range(num_layers))
