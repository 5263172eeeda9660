"""A Llama of long sequences as the search plans it, beside the recipes that experts take for them. Nothing is run.

    python -m benchmarks.long_context                     prints all plans: 32,768 and 131,072 tokens, 16 and 64 devices
    python -m benchmarks.long_context "v5p, 16" --keep    those whose names contain it; writes results
    python -m benchmarks.long_context --show              the table as it stands

Llama 3 8B: 32 layers in a scan, each recomputed in the backward pass, 8 heads of keys, bfloat16, AdamW in float32.
Each device has 8,192 tokens of a step, so that there are fewer sequences than devices. Attention is that of the code,
planned with `attention="blockwise"` (the device's kernel), or jax's splash attention as it is called, which only TPUs
have.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar
from autopar import recipes
from autopar.errors import AutoparError
from benchmarks import row_processes
from benchmarks.machine import description, markdown
from benchmarks.zoo.llama import llama

RESULTS = row_processes.ROOT / "benchmarks" / "results" / "long_context.json"
TOKENS_OF_DEVICE, KV_HEADS, HEADS = 8192, 8, 32
TIMEOUT_S = 1500.0  # of all plans of one setting
FREE = "free search"
COLUMNS = (
    "setting", "plan", "mesh", "step, s", "beside the search", "sent by a device, GB", "peak, GB", "planned in, s",
    "why not",
)  # fmt: skip
CLUSTERS = {
    "v5p, 16": "tpu-v5p:2x2x4",
    "v5p, 64": "tpu-v5p:4x4x4",
    "H100, 16": "dgx-h100x2",
    "H100, 64": "dgx-h100x8",
}
LENGTHS = (32_768, 131_072)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """`splash`: jax's kernel, called by the step; else attention in plain JAX, planned in blocks."""

    devices: str
    length: int
    splash: bool

    @property
    def name(self) -> str:
        kernel = "splash" if self.splash else "blockwise"
        return f"{self.devices}, {self.length:,} tokens, {kernel}"

    @property
    def cluster(self) -> autopar.Cluster:
        return autopar.Cluster.parse(CLUSTERS[self.devices])

    @property
    def sequences(self) -> int:
        return self.cluster.num_devices * TOKENS_OF_DEVICE // self.length


SETTINGS = {
    setting.name: setting
    for devices in CLUSTERS
    for length in LENGTHS
    for setting in (
        *([Setting(devices=devices, length=length, splash=True)] if "v5p" in devices else []),
        Setting(devices=devices, length=length, splash=False),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One plan's prediction; `failure` in its place."""

    name: str
    mesh: str = ""
    step_time_s: float = 0.0
    sent_bytes: float = 0.0
    peak_bytes: float = 0.0
    plan_s: float = 0.0
    failure: str = ""


def plans_of(setting: Setting) -> dict[str, recipes.Recipe | None]:
    """Each kind alone, on all devices; and with ZeRO-3, over as many devices as a sequence needs at 8,192 tokens each.

    Tensor parallelism is one of the 8 heads of keys a device, which is also a host of H100s.
    """
    shared = setting.length // TOKENS_OF_DEVICE
    kinds = ("ulysses", "ring", "usp")
    found: dict[str, recipes.Recipe | None] = {FREE: None}
    found |= {f'sequence_parallel("{kind}")': recipes.sequence_parallel(kind) for kind in kinds}
    found |= {"tensor_parallel()": recipes.tensor_parallel()}
    found |= {"zero(3)": recipes.zero(3)}
    for sp in dict.fromkeys((min(shared, KV_HEADS), shared)):
        for kind in kinds:
            found[f'sp={sp} "{kind}", zero=3'] = recipes.combine(sp=sp, sequence=kind, zero=3)
    found[f"tp={KV_HEADS}, zero=3"] = recipes.combine(tp=KV_HEADS, zero=3)
    found[f"tp={KV_HEADS}, sequence_parallel, zero=3"] = recipes.combine(tp=KV_HEADS, sequence_parallel=True, zero=3)
    if shared > KV_HEADS:
        found[f'tp={KV_HEADS}, sp={shared // KV_HEADS} "ring", zero=3'] = recipes.combine(
            tp=KV_HEADS, sp=shared // KV_HEADS, sequence="ring", zero=3
        )
    return found


@functools.lru_cache
def _splash_kernel(length: int) -> Any:
    """Causal, in blocks of 1,024, as MaxText has them."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    block = min(1024, length)
    names = (
        "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq",
        "block_kv_dq",
    )  # fmt: skip
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * HEADS)
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mha(
            mask,
            block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(names, block)),
            head_shards=1,
            q_seq_shards=1,
        )


def splash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """jax's kernel in the place of the zoo's attention."""
    examples, length, kv_heads, group, head = query.shape
    query_heads = query.reshape(examples, length, kv_heads * group, head) * head**-0.5
    arrays = (jnp.moveaxis(a, 1, 2) for a in (query_heads, key, value))
    return jnp.moveaxis(jax.vmap(_splash_kernel(length))(*arrays), 1, 2).reshape(query.shape)


def step_of(setting: Setting) -> tuple[Any, Any, Any]:
    """(training step, shapes of its state, shapes of its batch)."""
    case = llama(
        layers=32, width=4096, heads=HEADS, kv_heads=KV_HEADS, feed_forward=14_336, vocabulary=128_256,
        length=setting.length, batch=setting.sequences, block=setting.length, core=splash if setting.splash else None,
        scan=True, dtype=jnp.bfloat16, optimizer=optax.adamw(1e-4),
    )  # fmt: skip
    state = jax.eval_shape(case.init, jax.random.key(0))
    return case.step, state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))


def planned(setting: Setting, name: str, recipe: recipes.Recipe | None, step: tuple[Any, Any, Any]) -> Plan:
    """One plan. Seconds are of processor time."""
    begun_s = time.process_time()
    options = {} if setting.splash else {"attention": "blockwise"}
    try:
        found = autopar.plan(
            *step, plan=recipe, cluster=setting.cluster, cache_dir=None, show_progress=False, **options
        )
    except AutoparError as error:
        where = "" if str(error.where).startswith("step on") else f"{str(error.where).split(' at ')[0]}: "
        failure = f"{where}expected {error.expected}, got {str(error.got).split(' (largest')[0]}"
        return Plan(name=name, plan_s=time.process_time() - begun_s, failure=failure)
    groups = ", ".join(f"{axis} {len(devices[0])}" for axis, devices in found.groups().items())
    return Plan(
        name=name,
        mesh=groups,
        step_time_s=found.predicted.step_time_s,
        sent_bytes=found.predicted.sent_bytes,
        peak_bytes=max(found.predicted.peak_bytes),
        plan_s=time.process_time() - begun_s,
    )


def rows_of(name: str) -> dict[str, Any]:
    """All plans of a setting, in this process."""
    setting = SETTINGS[name]
    step = step_of(setting)
    return {"plans": [dataclasses.asdict(planned(setting, plan, r, step)) for plan, r in plans_of(setting).items()]}


def cells(name: str, row: dict[str, Any]) -> list[list[str]]:
    """The lines of a setting: the search first, then the others by their time, then those that are none."""
    if row.get("failure"):
        return [[name, row["failure"]]]
    plans = [Plan(**plan) for plan in row["plans"]]
    searched_s = next((p.step_time_s for p in plans if p.name == FREE), 0.0)
    plans.sort(key=lambda p: (p.name != FREE, bool(p.failure), p.step_time_s))
    return [
        [name, p.name, "", "", "", "", "", f"{p.plan_s:.0f}", p.failure]
        if p.failure
        else [
            name, p.name, p.mesh, f"{p.step_time_s:.3f}", f"{p.step_time_s / searched_s:.3f}" if searched_s else "",
            f"{p.sent_bytes / 1e9:.1f}", f"{p.peak_bytes / 1e9:.1f}", f"{p.plan_s:.0f}",
        ]
        for p in plans
    ]  # fmt: skip


def keep(rows: row_processes.Rows) -> None:
    rows = {name: rows[name] for name in SETTINGS if name in rows}
    row_processes.keep(RESULTS, rows)
    lines = [line for name, row in rows.items() for line in cells(name, row)]
    assert __doc__ is not None, "python -OO has no docstrings"
    what = __doc__.split("\n\n")[-1].strip().replace("\n", " ")
    RESULTS.with_suffix(".md").write_text(
        f"# Long sequences\n\n`python -m benchmarks.long_context --keep`. {what} {_NOTES}\n\n"
        f"{description()}\n\n{markdown(COLUMNS, lines)}\n"
    )


_NOTES = """Figures are predicted; sent and peak are those of one device. A plan that is none says why in the last
column: with whole parameters and moments on each device the state alone is 128 GB. Splash attention needs whole
positions of keys, so rings cannot go through it. Where fewer devices share a sequence than it has parts of 8,192 tokens
(sp=8, or tp=8 alone, of 131,072), there are more copies than sequences, and their devices do the same work twice. In
the program of splash attention all blocks are counted, also those that the causal mask skips, so that its seconds are
not to be held against those of attention in blocks."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"parts of names, of {'; '.join(SETTINGS)}")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name} and the page beside it")
    parser.add_argument("--show", action="store_true", help="plan nothing; with --keep the page is written anew")
    parser.add_argument("--child", metavar="SETTING", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(rows_of(arguments.child)))
        return 0
    rows = row_processes.load(RESULTS)
    slower = 0
    for name in SETTINGS:
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        if not arguments.show:
            row = row_processes.in_fresh_process("benchmarks.long_context", ["--child", name], TIMEOUT_S)
            rows = row_processes.load(RESULTS) | {name: row}
            if arguments.keep:
                keep(rows)
        lines = cells(name, rows.get(name, {"failure": "not planned yet"}))
        slower += sum(line[4] < "1" for line in lines if len(line) > 4 and line[4])
        print("\n".join(" | ".join(line) for line in lines), flush=True)
    if arguments.keep:
        keep(row_processes.load(RESULTS))
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
