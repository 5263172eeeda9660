"""`ChoiceGraph`: the nodes and edges of the integer program, before costs.

A node is one choice. Each operation that multiplies, sums or otherwise has a choice of its own is a node; elementwise
and layout operations follow one of their operands and share its node. Other kinds of node choose only a layout:

- *argument*: the layout of an argument of the step;
- *placement*: the layout of the result of a summing operation after the reduction of its partial sums;
- *copy*: the layout in which several consumers of one role read a value, so that a shared gather is paid once;
- *boundary*: the layout of a value inside a loop (constants, carried values) or behind a branch;
- *transfer*: the one layout in which a value is sent to, or received from, another stage;
- *whole*: replicated, for readers that need the whole value.

Every value has a site: the node, and the layout of the value under each strategy of the node. A resharding to a reader
is an edge.
"""

from __future__ import annotations

import dataclasses

import msgspec

from autopar.ir.graph import Op
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.partial_sums import Partials
from autopar.ir.strategies import Strategy

Layouts = tuple[Layout, ...]


class LayoutSite(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The layouts of a value: under strategy s of `node` its layout is `layouts[s]`.

    Equal lists of layouts are one object in a choice graph, so that sites compare and hash by identity of their lists:
    they are looked up tens of thousands of times.
    """

    node: int
    layouts: Layouts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutSite) and self.node == other.node and self.layouts is other.layouts

    def __hash__(self) -> int:
        return hash((self.node, id(self.layouts)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """An edge: the resharding of a value from its site to the layouts that the target node's strategies read."""

    value: int
    source: LayoutSite
    target: LayoutSite
    count: float


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """One choice among `size` strategies; `members` are the operations whose strategies it decides, `layouts` what
    it chooses from where it chooses a layout only.
    """

    size: int
    name: str
    kind: str
    layouts: Layouts = ()
    members: list[tuple[Op, tuple[Strategy, ...]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceGraph:
    """The nodes and edges of a graph on one mesh, before costs.

    `unreduced[v]` is the site of a value as its operation leaves it (maybe partial); `reduced[v]` its site for readers
    that cannot read partial values; `copies[v, role.value]` the site of a copy that the readers of one role share, and
    `copies[v, ALL]` of a copy that all roles share. Values that cannot be split (scalars, odd sizes) have no site.
    """

    mesh: LogicalMesh
    nodes: tuple[Node, ...]
    reshards: tuple[Reshard, ...]
    unreduced: dict[int, LayoutSite]
    reduced: dict[int, LayoutSite]
    copies: dict[tuple[int, str], LayoutSite]
    of_op: dict[int, tuple[int, tuple[Strategy, ...]]]
    partials: Partials
    lists: LayoutLists

    def operand_layouts(self, strategies: tuple[Strategy, ...], i: int) -> Layouts:
        """The layout of operand i under each strategy; the same object for the same list."""
        return self.lists.of_operand(strategies, i)

    def result_layouts(self, strategies: tuple[Strategy, ...], i: int) -> Layouts:
        """The layout of result i under each strategy; the same object for the same list."""
        return self.lists.of_result(strategies, i)


class LayoutLists:
    """Lists of layouts, one object for equal ones."""

    def __init__(self) -> None:
        self._lists: dict[Layouts, Layouts] = {}
        self._of: dict[tuple[int, str, int], Layouts] = {}

    def shared(self, layouts: Layouts) -> Layouts:
        return self._lists.setdefault(layouts, layouts)

    def of_operand(self, strategies: tuple[Strategy, ...], i: int) -> Layouts:
        key = (id(strategies), "operand", i)
        if key not in self._of:
            self._of[key] = self.shared(tuple(s.operands[i] for s in strategies))
        return self._of[key]

    def of_result(self, strategies: tuple[Strategy, ...], i: int) -> Layouts:
        key = (id(strategies), "result", i)
        if key not in self._of:
            self._of[key] = self.shared(tuple(s.results[i] for s in strategies))
        return self._of[key]


def any_partial(layouts: Layouts) -> bool:
    return any(layout.partial for layout in layouts)
