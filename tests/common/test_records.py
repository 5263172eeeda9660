"""Frozen dataclasses that are made often: made, changed and frozen as others are."""

import copy
import dataclasses
import pickle

import pytest

from autopar.common.records import HashedById, made_often, replaced
from autopar.ir.layout import Layout


@made_often
@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2


@made_often
@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    name: str
    size: int = 0


class Color(HashedById):
    RED = "red"


@pytest.mark.parametrize("made", [Point(1), Named(name="a", size=3)])
def test_they_are_frozen_and_equal_to_copies(made):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, 5)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == dataclasses.replace(made) == made
    assert hash(made) == hash(copy.copy(made))


def test_fields_are_given_by_place_or_name_or_default():
    assert (Point(1).x, Point(1).y, Point(1, 3).y, Point(y=4, x=1).y) == (1, 2, 3, 4)
    with pytest.raises(TypeError, match="name"):
        Named()
    with pytest.raises(TypeError, match="positional"):
        Named("a")
    assert repr(Point(1)) == "Point(x=1, y=2)"


def test_replaced_changes_a_copy_that_is_frozen():
    first = Point(1, 5)
    second = replaced(first, x=7)
    assert (first, second, type(second)) == (Point(1, 5), Point(7, 5), Point)
    with pytest.raises(dataclasses.FrozenInstanceError):
        second.x = 1
    with pytest.raises(AttributeError):
        replaced(first, z=1)
    assert replaced(Named(name="a", size=1), size=2) == Named(name="a", size=2)


def test_a_layout_that_was_hashed_and_changed_has_another_hash():
    layout = Layout(((0,), ()))
    hash(layout)
    assert {replaced(layout, partial=(1,)): 1, layout: 2} == {Layout(((0,), ()), (1,)): 1, Layout(((0,), ())): 2}
    assert pickle.loads(pickle.dumps(layout)) in {layout}


def test_a_class_with_a_default_factory_is_refused():
    @dataclasses.dataclass(frozen=True)
    class WithList:
        values: list = dataclasses.field(default_factory=list)

    with pytest.raises(TypeError, match="WithList"):
        made_often(WithList)


def test_a_subclass_is_refused():
    with pytest.raises(TypeError, match="Third"):

        class Third(Point):
            pass


def test_members_are_found_by_themselves_after_pickling():
    assert {Color.RED: 1}[pickle.loads(pickle.dumps(Color.RED))] == 1
