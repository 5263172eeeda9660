"""Enums that are in the keys of many tables."""

from __future__ import annotations

import enum


class HashedById(enum.Enum):
    """An enum whose members are hashed by what they are: `Enum` hashes their names anew each time, in Python."""

    __hash__ = object.__hash__
