"""A traced step: the jaxpr of a user's function, its trees, and which leaves are state, batch and constants."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

# How many rows each expert gets, of each of some layers, of the mixtures whose module a pattern names; empty: equally
# many.
ExpertLoad = tuple[tuple[str, tuple[tuple[float, ...], ...]], ...]

# The names of placements: a value laid otherwise from there on; shardings in the types of arguments and results, where
# the mesh of the code is explicit; those of NNX variables.
RESHARD, TYPES, METADATA = "reshard", "types", "metadata of nnx"


class ShardingsInCode(enum.StrEnum):
    """What layouts that the step's code names are to a plan."""

    ADVICE = "advice"  # one more candidate beside those of the search
    PINS = "pins"  # kept
    IGNORE = "ignore"


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """A removed placement: its name in the user's code, and its line."""

    name: str
    line: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenLayout:
    """A layout that the step's code gives to a value: the axes that split each dimension (None: left open), over a mesh
    of the code's own. `number` tells apart two that are alike but for what they are written of.
    """

    place: Placement
    dims: tuple[tuple[str, ...] | None, ...]
    axis_sizes: tuple[tuple[str, int], ...]
    number: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A function traced to a jaxpr. Leaves are numbered over all dynamic arguments in order.

    `constants` are arrays the function closes over; `tied[i]` is the output leaf that becomes input leaf i in the next
    step, found for each donated argument; `fingerprint` identifies the jaxpr between processes; `retrace` traces the
    function once more, on the leaves' shapes or on others. `is_pure()`: two traces of it agree, where that was to be
    checked. `attention_kernel`: in its graphs attention that this kernel takes is one operation a pass, by the name
    of `autopar.ops.attention.kernels.Kernel` (BLOCKS takes all that is found); empty: attention is as it is written.
    `scan_recompute`: what the bodies of its scans save for the backward pass, by the value of a policy or a text of
    `autopar.frontend.recompute_in_scans`; empty: what the code saves.
    `per_microbatch`: patterns of modules that may mix the examples of a micro-batch
    (`autopar.passes.accumulation`). `expert_load`: how many rows each expert gets (`ExpertLoad`). `row_blocks`: the
    device (`DeviceKind`) whose ragged products are made in blocks of rows where that takes less time
    (`autopar.ops.kernels.grouped`); None: they are as written.
    `changed_in_place` are the paths of leaves that the function replaced in the containers it was given. `placements`
    are what was removed from the code, `written` the layouts among them, by the variable of the jaxpr that each is
    written of. `callbacks` are called when the step has run, with its last results (`autopar.frontend.callbacks`).
    `trace_again` is `retrace` with what was removed of the code beside the jaxpr. `saved_names`: the names that
    `jax.checkpoint` saves in place of those of the code's policies (`autopar.frontend.saved_names`); None: as written.
    `result_types` are the shardings of the results in the explicit mesh of the user's; empty where there is none.
    `untyped` are the leaves of the arguments that lie in no such mesh. `types_of_results` are the `result_types`, but
    None for what replaces one of these: it stays where the plan has it.
    `example_dims[i]` is the dimension of a batch leaf that counts examples, where that is not the first one; None where
    the leaf holds none.
    `stacked_over`: in its graph as one program equal matrices of the update are stacked for so many devices
    (`autopar.passes.stack_updates`); 0: each for itself.
    `uneven_over`: in that graph examples may be split unevenly over so many devices (`autopar.passes.round_examples`);
    0: only as they divide.
    `notes` stand in its plans: why an argument is not donated.
    """

    name: str
    jaxpr: Any
    constants: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    argument_of: tuple[int, ...]
    donated: frozenset[int]
    batch: frozenset[int]
    tied: dict[int, int]
    fingerprint: str
    retrace: Callable[[Sequence[jax.ShapeDtypeStruct]], Any]
    is_pure: Callable[[], bool] = lambda: True
    attention_kernel: str = ""
    scan_recompute: str = ""
    per_microbatch: tuple[str, ...] = ()
    expert_load: ExpertLoad = ()
    row_blocks: Any = None
    placements: tuple[Placement, ...] = ()
    written: tuple[tuple[Any, WrittenLayout], ...] = ()
    changed_in_place: tuple[str, ...] = ()
    result_types: tuple[NamedSharding, ...] = ()
    untyped: frozenset[int] = frozenset()
    callbacks: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    trace_again: Callable[[Sequence[jax.ShapeDtypeStruct]], Any] | None = None
    saved_names: tuple[str, ...] | None = None
    stacked_over: int = 0
    uneven_over: int = 0
    example_dims: Mapping[int, int | None] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    types_of_results: tuple[NamedSharding | None, ...] = dataclasses.field(init=False, compare=False, default=())

    def __post_init__(self) -> None:
        staying = {self.tied.get(leaf) for leaf in self.untyped} if self.result_types else ()
        types = (None if i in staying else of_result for i, of_result in enumerate(self.result_types))
        object.__setattr__(self, "types_of_results", tuple(types))  # once: it is read at each call

    def example_dim(self, leaf: int) -> int | None:
        """The dimension of a leaf that counts examples; None where it has none."""
        dim = self.example_dims.get(leaf, 0) if leaf in self.batch else None
        return dim if dim is not None and dim < len(self.in_avals[leaf].shape) else None

    @property
    def layouts_in_code(self) -> tuple[WrittenLayout, ...]:
        """The written layouts without their variables, equal for every trace of the same code."""
        return tuple(layout for _, layout in self.written)


def is_same_step(first: TracedStep, second: TracedStep) -> bool:
    """Whether two traces have the same computation and the same trees, so that a plan of one holds for the other."""
    parts = ("fingerprint", "in_tree", "out_tree", "tied", "donated", "batch", "example_dims", "layouts_in_code")
    return all(getattr(first, part) == getattr(second, part) for part in parts)
