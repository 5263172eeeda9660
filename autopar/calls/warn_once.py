"""Warnings about a step, each given once."""

from __future__ import annotations

import logging

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
