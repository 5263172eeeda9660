"""MaxText's own training step, unmodified, planned for 8 chips of a TPU v5p from shapes, beside its own mesh rules.

    python -m benchmarks.maxtext_steps                       every step that the table does not have yet
    python -m benchmarks.maxtext_steps dense --compile       also compiled for v5p under both, ahead of time

MaxText needs Python 3.12 and a newer jax than the table of published steps is made with: an environment of its own,
with `pip install --no-deps maxtext` and what its modules import, `libtpu` among it, beside autopar. Rows are kept in
benchmarks/results/maxtext_steps.json, and the table in maxtext_steps.md beside it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import autopar
from autopar.verification import compile_for_target
from autopar.xla.collectives import collectives, traffic

RESULTS = Path(__file__).parent / "results" / "maxtext_steps.json"
TOPOLOGY, CLUSTER, TARGET = "v5p-16", "tpu-v5p:2x2x2", "tpu:v5p:2x2x2"  # MaxText counts cores, two a chip
SIZES = (
    "base_emb_dim=1024", "base_num_decoder_layers=8", "base_num_query_heads=8", "base_num_kv_heads=8",
    "base_mlp_dim=4096", "base_moe_mlp_dim=4096", "head_dim=128", "vocab_size=32768", "max_target_length=2048",
    "per_device_batch_size=2",
)  # fmt: skip
_EXPERTS = ("decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2")
STEPS = {
    "dense": ("attention=dot_product",),
    "dense, splash": ("attention=flash",),
    "experts by capacity": (
        "attention=dot_product", *_EXPERTS, "sparse_matmul=false", "megablox=false", "capacity_factor=1.25",
    ),
    "experts by grouped products, splash": ("attention=flash", *_EXPERTS),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Predicted: of the plan. Compiled: ours, and by MaxText's own mesh rules; 0 where that was not asked for."""

    step: str
    versions: str
    predicted_s: float
    predicted_sent_bytes: float
    predicted_peak_bytes: float
    notes: tuple[str, ...]
    compiled_sent_bytes: float = 0.0
    compiled_peak_bytes: float = 0.0
    own_sent_bytes: float = 0.0
    own_peak_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxTextStep:
    """A step as `maxtext.trainers.pre_train.train_compile` has it: `compile_own` compiles it by its mesh rules."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Any
    rules: Any
    compile_own: Callable[[], Any]

    @contextlib.contextmanager
    def traced_in(self) -> Iterator[None]:
        from flax.core.spmd import logical_axis_rules

        with jax.set_mesh(self.mesh), logical_axis_rules(self.rules):
            yield


def maxtext_step(options: Sequence[str]) -> MaxTextStep:
    import maxtext
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    fixed = (
        f"compile_topology={TOPOLOGY}", "compile_topology_num_slices=1", "run_name=planned",
        "enable_checkpointing=false", "dataset_type=synthetic", "skip_jax_distributed_system=true", "log_config=false",
    )  # fmt: skip
    base = str(Path(maxtext.__file__).parent / "configs" / "base.yml")
    config = pyconfig.initialize(["train_compile", base, *fixed, *SIZES, *options])
    mesh = train_compile.get_topology_mesh(config)
    arguments, keywords, shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    state = sharding.build_zero1_input_state_mesh_shardings(config, shardings, of_params)
    data = sharding.get_input_data_sharding(config, mesh)
    step, *how = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data, state, model, config, of_params
    )
    rules = config.logical_axis_rules
    return MaxTextStep(
        step=step,
        arguments=tuple(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), a) for a in arguments),
        mesh=mesh,
        rules=rules,
        compile_own=lambda: train_compile.jit_and_compile(
            step, arguments, keywords, mesh, *how, config, logical_axis_rules(rules)
        ),
    )


def sent_and_peak(compiled: Any) -> tuple[float, float]:
    """Bytes that each device sends in a step, and bytes that it needs at once."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return traffic(collectives(compiled.as_text())).total_bytes, held + memory.temp_size_in_bytes


def row_of(name: str, *, compiles: bool) -> Row:
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as MaxText does
    given = maxtext_step(STEPS[name])
    made = autopar.parallelize(given.step, cluster=CLUSTER, cache_dir=None, show_progress=False, donate_argnums=(0,))
    with given.traced_in():
        plan = made.plan(*given.arguments)
        ours = sent_and_peak(compile_for_target(made, TARGET, *given.arguments)) if compiles else (0.0, 0.0)
    own = sent_and_peak(given.compile_own()) if compiles else (0.0, 0.0)
    import maxtext

    return Row(
        step=name,
        versions=f"MaxText {maxtext.__version__}, jax {jax.__version__}",
        predicted_s=plan.predicted.step_time_s,
        predicted_sent_bytes=plan.predicted.sent_bytes,
        predicted_peak_bytes=max(plan.predicted.peak_bytes),
        notes=tuple(note for note in plan.record.notes if "author" in note or "without a rule" in note),
        compiled_sent_bytes=ours[0],
        compiled_peak_bytes=ours[1],
        own_sent_bytes=own[0],
        own_peak_bytes=own[1],
    )


def load() -> dict[str, Row]:
    rows = [Row(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    return {row.step: row for row in rows}


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "# MaxText's training step, unmodified",
        "",
        f"`python -m benchmarks.maxtext_steps`: planned from shapes for {CLUSTER}; {', '.join(SIZES)}. Sent: by each "
        "device in a step. Compiled, where asked for: for the same chips, ahead of time, ours and by MaxText's "
        "own mesh rules.",
        "",
        "| step | predicted | sent | peak | compiled: sent | peak | MaxText's own: sent | peak | with |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def cell(nbytes: float) -> str:
        return f"{nbytes / 1e6:,.0f} MB" if nbytes else ""

    for r in rows:
        compiled = (r.compiled_sent_bytes, r.compiled_peak_bytes, r.own_sent_bytes, r.own_peak_bytes)
        predicted = (r.predicted_sent_bytes, r.predicted_peak_bytes)
        cells = [r.step, f"{1e3 * r.predicted_s:.1f} ms", *map(cell, (*predicted, *compiled)), r.versions]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Notes of the plans:", "", *(f"- {r.step}: {note}" for r in rows for note in r.notes)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", choices=[*STEPS, []], default=[])
    parser.add_argument("--compile", action="store_true", help="minutes for each step and program")
    args = parser.parse_args()
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    for name in args.steps or [name for name in STEPS if name not in load()]:
        rows = load() | {name: row_of(name, compiles=args.compile)}
        kept = [rows[step] for step in STEPS if step in rows]
        RESULTS.write_text(json.dumps([dataclasses.asdict(row) for row in kept], indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(markdown(kept))
    print(markdown(list(load().values())))


if __name__ == "__main__":
    main()
