"""The options of a step, as given to `autopar.parallelize`."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from autopar.calls.following import FollowedStep
from autopar.calls.search import Search
from autopar.calls.signatures import Signature
from autopar.hardware.cluster import Cluster
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan

logger = logging.getLogger("autopar")


class WarnOnce:
    """Logs sentences about a step; a sentence that was logged before is left out."""

    def __init__(self, step_name: str) -> None:
        self._step_name = step_name
        self._logged: set[str] = set()

    def __call__(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            logger.warning("%s: %s", self._step_name, sentence)


DEFAULT_ARGNUMS = {"batch_argnums": (1,), "donate_argnums": (0,), "static_argnums": ()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Names as in the signature of `parallelize`, whose `plan` is a plan, the request of a recipe, or a step to follow.

    Attributes:
        request: The request of the recipe with the wishes of the search.
    """

    plan: Plan | None
    recipe: PlanRequest
    follow: FollowedStep | None
    search: Search
    cluster: Cluster | None
    batch_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    batch_argnames: tuple[str, ...]
    donate_argnames: tuple[str, ...]
    static_argnames: tuple[str, ...]
    batch_axis: Any
    batch: str
    cache_dir: str | Path | None
    request: PlanRequest = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "request", self.search.request(self.recipe))

    @property
    def has_recipe(self) -> bool:
        return self.recipe != PlanRequest()

    @property
    def show_progress(self) -> bool:
        return self.search.show_progress is not False

    def with_numbers(self, signature: Signature) -> StepOptions:
        """The options with argument numbers in place of names, and counted from 0 in place of those that count from the
        last argument. Raises: InvalidArgumentError for an unknown name.
        """
        numbers: dict[str, Any] = {}
        for kind in ("batch", "donate", "static"):
            names, argnums = getattr(self, f"{kind}_argnames"), getattr(self, f"{kind}_argnums")
            are_given = argnums != DEFAULT_ARGNUMS[f"{kind}_argnums"]
            if any(number < 0 for number in argnums):
                argnums = tuple(map(signature.from_first, argnums))
                numbers[f"{kind}_argnums"] = argnums
            if names:
                explicit = argnums if are_given else ()
                named = signature.numbers(f"{kind}_argnames", names)
                numbers |= {f"{kind}_argnums": tuple(dict.fromkeys((*explicit, *named))), f"{kind}_argnames": ()}
        return dataclasses.replace(self, **numbers)
