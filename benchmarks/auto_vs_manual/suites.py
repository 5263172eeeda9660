"""Which rows there are to make: sets that answer one question each, or all that is selected by hand."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from benchmarks.auto_vs_manual.manual import AUTO, NAMES, RECIPES, TIMED
from benchmarks.auto_vs_manual.models import Model, chosen, models

CLUSTERS = (
    *(f"p3.16xlarge{hosts}" for hosts in ("", "x2", "x4", "x8")),
    *(f"dgx-a100-80g{hosts}" for hosts in ("", "x2", "x4", "x8", "x16")),
    *(f"dgx-h100{hosts}" for hosts in ("", "x2", "x4", "x8", "x16")),
    "tpu-v4:4x4x4",
    "tpu-v5e:4x4",
    "tpu-v5p:4x4x4",
    "tpu-v6e:4x4",
    "local:8",
)
ALPA_FAMILIES = ("gpt", "moe", "wide-resnet")
GPUS_A_HOST = 8
# What Alpa compared its plans with, by family: the systems that experts wrote for it, and parts of its own search.
OF_FAMILY = {
    "gpt": ("megatron grid",),
    "moe": ("expert and data",),
    "wide-resnet": ("pipeline and data",),
}
HARDWARE = ("dgx-a100-80g", "dgx-h100x2", "tpu-v5e:4x4")
HARDWARE_MODELS = {
    "gpt-2.6B": ("tensor parallel", "megatron grid"),
    "moe-2.4B": ("expert and data",),
    "wide-resnet-1B": ("pipeline and data",),
    "bert-340M": ("tensor parallel", "megatron grid"),
    "t5-770M": ("tensor parallel", "megatron grid"),
    "vit-632M": ("tensor parallel", "megatron grid"),
    "llama-8B": ("tensor parallel", "ulysses", "ring attention"),
    "unet-460M": ("pipeline and data",),
}
SMALL_RECIPES = (
    AUTO, TIMED, "data parallel", "zero 1", "zero 2", "zero 3", "tensor parallel", "equal stages",
    "intra-operator only",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One row to be made."""

    model: Model
    cluster: str
    recipe: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model.name, self.cluster, self.recipe


def p3(gpus: int) -> str:
    """A p3.16xlarge or several of so many GPUs, or a part of one."""
    if gpus < GPUS_A_HOST:
        return f"p3.16xlarge/{gpus}"
    return "p3.16xlarge" if gpus == GPUS_A_HOST else f"p3.16xlargex{gpus // GPUS_A_HOST}"


def weak_scaling() -> list[Job]:
    """Alpa's models, each on the hosts it is sized for, beside what Alpa compared itself with."""
    jobs = []
    for model in models().values():
        if model.family in ALPA_FAMILIES and model.parameters and (model.gpus or 0) >= GPUS_A_HOST:
            names = (AUTO, *OF_FAMILY[model.family], "data parallel", "zero 3", "intra-operator only", "equal stages")
            jobs += [Job(model=model, cluster=p3(model.gpus or 0), recipe=name) for name in names]
    return sorted(jobs, key=lambda job: (job.model.gpus or 0, SUITE_ORDER.index(job.recipe), job.model.family))


def intra_operator() -> list[Job]:
    """The integer program alone, without stages and micro-batches, beside ZeRO and the like; and the whole search."""
    names = (AUTO, "intra-operator only", "data parallel", "zero 2", "zero 3", "shard the largest")
    return [
        Job(model=model, cluster=p3(model.gpus), recipe=name)
        for model in models().values()
        if model.gpus is not None and model.gpus > 1 and model.parameters is None
        for name in names
    ]


def hardware() -> list[Job]:
    """A model of every family on GPUs and TPUs of other kinds than Alpa's, beside the recipes that suit it."""
    return [
        Job(model=models()[name], cluster=cluster, recipe=recipe)
        for cluster in HARDWARE
        for name, extra in HARDWARE_MODELS.items()
        for recipe in (AUTO, "data parallel", "zero 1", "zero 3", *extra)
    ]


def measured() -> list[Job]:
    """Small models of every family, run on 8 virtual CPU devices."""
    extra = {"moe": ("expert and data",)}
    return [
        Job(model=model, cluster="local:8", recipe=name)
        for model in models().values()
        if model.small
        for name in (*SMALL_RECIPES, *extra.get(model.family, ()))
    ]


SUITE_ORDER = (AUTO, "megatron grid", "expert and data", "pipeline and data", *RECIPES)
SUITES: dict[str, Callable[[], list[Job]]] = {
    "weak-scaling": weak_scaling,
    "intra-operator": intra_operator,
    "hardware": hardware,
    "measured": measured,
}


def selected(
    suites: Sequence[str], names: Sequence[str] | None, clusters: Sequence[str] | None, recipes: Sequence[str] | None
) -> list[Job]:
    """The jobs of the suites, narrowed down; without a suite every model on every cluster under every recipe.

    Clusters that are not in `CLUSTERS` may be named too. Small models run on local clusters only, and alone there.
    """
    known = models()
    wanted = chosen(names, list(known)) if names else list(known)
    under = chosen(recipes, list(NAMES)) if recipes else list(NAMES)
    if suites:
        jobs = [job for suite in suites for job in SUITES[suite]()]
        on = set(clusters) if clusters else None
        kept = [j for j in jobs if j.model.name in wanted and j.recipe in under and (on is None or j.cluster in on)]
        return list({job.key: job for job in kept}.values())
    pairs = itertools.product(wanted, clusters or CLUSTERS)
    return [
        Job(model=known[name], cluster=cluster, recipe=recipe)
        for name, cluster in pairs
        if known[name].small == cluster.startswith("local")
        for recipe in under
        if recipe != TIMED or known[name].small
    ]
