"""A choice of stages that can be built, from an answer of the search over stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from autopar.inter_op.stage_costs import PricedOption
from autopar.intra_op.ilp import ObjectiveWeights
from autopar.ir.mesh import LogicalMesh
from autopar.passes.remat import name_of
from autopar.solver import Stage, StagePlan, StageProblem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Stages to build: the first layer of each, the mesh of each group of devices, the policy of each layer.

    `terms`: the weights under which each stage is estimated to fit, where they are known. `over_limit`: whether its
    state alone would exceed the memory under the lowest price of a byte.
    """

    schedule: str
    chunks: int
    first_layers: tuple[int, ...]
    group_meshes: tuple[LogicalMesh, ...]
    policies: tuple[str, ...]
    terms: tuple[ObjectiveWeights, ...] = ()
    over_limit: tuple[bool, ...] = ()

    def text(self, num_microbatches: int) -> str:
        """The choice in a few words, as tables of candidates have it: one stage is a mesh, without a schedule."""
        meshes = [(mesh, len(list(group))) for mesh, group in itertools.groupby(self.group_meshes)]
        stages = len(self.first_layers)
        if stages == 1:
            words = [f"mesh {self.group_meshes[0]}"]
        else:
            each = f"{meshes[0][0]}" if len(meshes) == 1 else ", ".join(f"{n} of {mesh}" for mesh, n in meshes)
            words = [f"{stages} stages on meshes {each}", self.schedule]
        if num_microbatches > 1:
            words.insert(0, f"{num_microbatches} micro-batches")
        if policies := sorted({name_of(policy) for policy in self.policies if policy != "nothing"}):
            words.append(f"recompute {' and '.join(policies)}")
        return ", ".join(words)


def choice_of(problem: StageProblem, answer: StagePlan, options: Sequence[PricedOption]) -> StageChoice:
    """The stages, meshes and policies of an answer of the dynamic programme."""
    chosen = [options[stage.option] for stage in answer.stages]
    groups = len(answer.stages) // problem.chunks
    return StageChoice(
        schedule=problem.schedule.value,
        chunks=problem.chunks,
        first_layers=tuple(stage.first for stage in answer.stages),
        group_meshes=tuple(o.mesh for o in chosen[:groups]),
        policies=tuple(
            policy
            for o, stage in zip(chosen, answer.stages, strict=True)
            for policy in o.policies[stage.first : stage.last]
        ),
        terms=tuple(o.terms for o in chosen),
        over_limit=tuple(
            o.over_limit or _state_bytes(_cheapest(options, o), stage) > problem.limit_bytes
            for o, stage in zip(chosen, answer.stages, strict=True)
        ),
    )


def _cheapest(options: Sequence[PricedOption], like: PricedOption) -> PricedOption:
    """The option on the same mesh, with the same recomputation, that was decided under the lowest price of a byte."""
    same_mesh = (o for o in options if (o.mesh, o.policies) == (like.mesh, like.policies))
    return min(same_mesh, key=lambda o: o.terms.s_per_byte)


def _state_bytes(option: PricedOption, stage: Stage) -> int:
    return int(option.option.state_bytes[stage.first : stage.last].sum())
