"""Enums that are hashed by what they are."""

import pickle

from autopar.common.enums import HashedById


class Color(HashedById):
    RED = "red"


def test_members_are_found_by_themselves_after_pickling():
    assert {Color.RED: 1}[pickle.loads(pickle.dumps(Color.RED))] == 1
