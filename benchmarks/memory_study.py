"""How far `autopar.cost.peak_memory` is from XLA's own figure: `python -m benchmarks.memory_study [CASE ...]`.

Every case is compiled by plain `jax.jit` for one CPU device, state donated, at sizes where activations are tens of
megabytes, and predicted from its jaxpr alone. XLA's figure is `memory.allocated_bytes`; `lost` is the part of it that
XLA's buffers leave between them (below zero where buffers that are alive share memory).
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core as jax_core

from autopar.common import jax_compat
from autopar.cost import peak_memory
from autopar.cost.xla_program import MemoryStep
from autopar.hardware.kinds import Platform
from benchmarks.zoo import CASES

MEBIBYTE = 1 << 20

# Kinds that XLA neither computes inside their readers nor makes from what they read.
_UNFUSED = frozenset(
    {
        "dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "scatter_add", "scatter_mul",
        "sort", "top_k", "approx_top_k", "cumsum", "cumprod", "cummax", "cumlogsumexp", "fft", "cholesky",
        "triangular_solve", "lu", "qr", "eigh", "svd", "reduce_window", "reduce_window_sum",
        "reduce_window_max", "reduce_window_min", "select_and_scatter_add", "select_and_gather_add",
        "random_bits", "threefry2x32", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or",
        "reduce_prod", "reduce_xor", "argmax", "argmin", "concatenate", "dynamic_update_slice", "while",
        "scan", "cond", "pure_callback", "custom_call", "random_seed", "random_wrap", "random_unwrap",
        "random_fold_in",
    }
)  # fmt: skip


def program_of(closed: Any, donated: Mapping[int, int] | None = None) -> peak_memory.MemoryProgram:
    """A closed jaxpr with unsharded sizes as a `Program`.

    Args:
        closed: The jaxpr. Calls are inlined, `jax.checkpoint` as a barrier before its body; loops and branches nest.
        donated: For each argument (by position) the result (by position) that takes over its memory.
    """
    reader = _Reader()
    jaxpr = jax_compat.open_jaxpr(closed)
    arguments = [reader.new(v.aval) for v in jaxpr.invars]
    steps: list[MemoryStep] = []
    results = reader.inline(closed, arguments, steps)
    kept = [reader.own(r, arguments, steps) for r in results]
    return peak_memory.MemoryProgram(
        steps=tuple(steps),
        nbytes=reader.nbytes,
        arguments=(*arguments, *reader.constants),
        results=tuple(kept),
        donated={arguments[a]: kept[r] for a, r in (donated or {}).items()},
    )


class _Reader:
    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}
        self.constants: list[int] = []

    def new(self, aval: Any) -> int:
        self.nbytes[len(self.nbytes)] = nbytes(aval)
        return len(self.nbytes) - 1

    def own(self, value: int, arguments: list[int], steps: list[MemoryStep]) -> int:
        """A result that is an argument handed through needs memory of its own."""
        if value not in arguments:
            return value
        self.nbytes[len(self.nbytes)] = self.nbytes[value]
        steps.append(MemoryStep(inputs=(value,), outputs=(len(self.nbytes) - 1,), kind="convert", fusible=True))
        return len(self.nbytes) - 1

    def inline(self, closed: Any, arguments: list[int], steps: list[MemoryStep]) -> list[int]:
        jaxpr = jax_compat.open_jaxpr(closed)
        env: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var in jaxpr.constvars:
            env[var] = self.new(var.aval)
            self.constants.append(env[var])

        def read(atom: Any) -> int:
            if isinstance(atom, jax_core.Literal):
                value = self.new(atom.aval)
                steps.append(MemoryStep(inputs=(), outputs=(value,), kind="iota", fusible=True))
                return value
            return env[atom]

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in ("scan", "while", "cond"):
                inputs = [read(a) for a in eqn.invars]
                outputs = [self.new(v.aval) for v in eqn.outvars]
                steps.append(self.nested(eqn, inputs, outputs))
            elif (key := called(eqn)) is not None:
                inputs = [read(a) for a in eqn.invars]
                if name in jax_compat.REMAT_CALLS and eqn.params.get("prevent_cse", True):
                    passed = [self.new(a.aval) for a in eqn.invars]
                    steps.append(
                        MemoryStep(
                            inputs=tuple(inputs), outputs=tuple(passed), kind="optimization_barrier", fusible=False
                        )
                    )
                    inputs = passed
                outputs = self.inline(eqn.params[key], inputs, steps)
            else:
                inputs = [read(a) for a in eqn.invars if not isinstance(a, jax_core.Literal)]
                outputs = [self.new(v.aval) for v in eqn.outvars]
                steps.append(
                    MemoryStep(
                        inputs=tuple(inputs), outputs=tuple(outputs), kind=kind_of(eqn), fusible=name not in _UNFUSED,
                        reduces_last=reduces_last(eqn), key=key_of(eqn),
                        half_precision=all(
                            str(a.aval.dtype) in ("bfloat16", "float16") for a in (*eqn.invars, *eqn.outvars)
                        ),
                    )
                )  # fmt: skip
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def body(self, closed: Any) -> tuple[tuple[int, ...], tuple[MemoryStep, ...], tuple[int, ...]]:
        inputs = [self.new(v.aval) for v in jax_compat.open_jaxpr(closed).invars]
        steps: list[MemoryStep] = []
        outputs = self.inline(closed, inputs, steps)
        return tuple(inputs), tuple(steps), tuple(outputs)

    def nested(self, eqn: Any, inputs: list[int], outputs: list[int]) -> MemoryStep:
        match eqn.primitive.name:
            case "scan":
                return self.scan(eqn, inputs, outputs)
            case "while":
                return self.loop(eqn, inputs, outputs)
            case _:
                return self.cond(eqn, inputs, outputs)

    def scan(self, eqn: Any, inputs: list[int], outputs: list[int]) -> MemoryStep:
        num_constants, num_carried = jax_compat.scan_counts(eqn.params)
        inner, steps, results = self.body(eqn.params["jaxpr"])
        return MemoryStep(
            inputs=tuple(inputs), outputs=tuple(outputs), kind="scan", fusible=False, body=steps, body_inputs=inner,
            body_outputs=results, num_constants=num_constants, num_carried=num_carried, trips=eqn.params["length"],
        )  # fmt: skip

    def cond(self, eqn: Any, inputs: list[int], outputs: list[int]) -> MemoryStep:
        branches = []
        for closed in eqn.params["branches"]:
            inner, steps, results = self.body(closed)
            branches.append(
                MemoryStep(
                    inputs=tuple(inputs[1:]), outputs=tuple(outputs), kind="branch", fusible=False, body=steps,
                    body_inputs=inner, body_outputs=results,
                )
            )  # fmt: skip
        return MemoryStep(
            inputs=tuple(inputs), outputs=tuple(outputs), kind="cond", fusible=False, body=tuple(branches)
        )

    def loop(self, eqn: Any, inputs: list[int], outputs: list[int]) -> MemoryStep:
        skipped, constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        inner, steps, results = self.body(eqn.params["body_jaxpr"])
        return MemoryStep(
            inputs=tuple(inputs[skipped:]), outputs=tuple(outputs), kind="while", fusible=False, body=steps,
            body_inputs=inner, body_outputs=results, num_constants=constants, num_carried=len(outputs),
        )  # fmt: skip


def called(eqn: Any) -> str | None:
    """The parameter that holds the jaxpr of an equation that only calls one."""
    if eqn.primitive.name in jax_compat.REMAT_CALLS:
        return "jaxpr"
    return jax_compat.INLINED_CALLS.get(eqn.primitive.name)


def kind_of(eqn: Any) -> str:
    """The primitive's name; a broadcast that only adds dimensions of size one is a reshape."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size:
        return "reshape"
    return name


def key_of(eqn: Any) -> str | None:
    """What an equation computes of its inputs, literals among them."""
    if eqn.effects:
        return None
    literals = [(i, str(a.val)) for i, a in enumerate(eqn.invars) if isinstance(a, jax_core.Literal)]
    return f"{eqn.primitive.name} {literals} {eqn.params} {eqn.outvars[0].aval if eqn.outvars else ''}"


def reduces_last(eqn: Any) -> bool:
    axes = eqn.params.get("axes", ())
    return not axes or eqn.invars[0].aval.ndim - 1 in axes


def nbytes(aval: Any) -> int:
    try:
        return int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize
    except (AttributeError, TypeError):
        return 0


def plain_mlp(widths: tuple[int, ...], batch: int, activation: Callable) -> tuple[Callable, tuple]:
    """Stochastic gradient descent on a multilayer perceptron."""

    def loss(ws, x):
        for w in ws:
            x = activation(x @ w)
        return (x**2).mean()

    def step(ws, x):
        return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws, x), strict=True)], {}

    ws = [jax.ShapeDtypeStruct(s, jnp.float32) for s in itertools.pairwise(widths)]
    return step, (ws, jax.ShapeDtypeStruct((batch, widths[0]), jnp.float32))


def zoo(name: str, **sizes: Any) -> tuple[Callable, tuple]:
    case = CASES[name](**sizes)
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.batch(0))
    return case.step, (state, batch)


_MLP = dict(layers=4, width=1024, features=512, classes=128, batch=4096)
_GPT = dict(layers=4, width=256, heads=4, vocabulary=1024, length=256, batch=16)
STUDY: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    "mlp tanh 8x1024": functools.partial(plain_mlp, (1024,) * 9, 4096, jnp.tanh),
    "mlp relu 4x2048": functools.partial(plain_mlp, (2048,) * 5, 1024, jax.nn.relu),
    "mlp gelu wide": functools.partial(plain_mlp, (512, 4096, 512, 4096, 512), 4096, jax.nn.gelu),
    "mlp": functools.partial(zoo, "mlp", **_MLP),
    "mlp_ema": functools.partial(zoo, "mlp_ema", **_MLP),
    "dropout": functools.partial(zoo, "dropout", width=1024, features=512, classes=128, batch=4096),
    "gpt": functools.partial(zoo, "gpt", **_GPT),
    "gpt_remat": functools.partial(zoo, "gpt_remat", **_GPT),
    "gpt_bf16": functools.partial(zoo, "gpt_bf16", **_GPT),
    "gpt_adamw": functools.partial(zoo, "gpt_adamw", **_GPT),
    "gpt long": functools.partial(zoo, "gpt", **(_GPT | dict(length=512, batch=8, layers=2))),
    "gpt wide": functools.partial(zoo, "gpt", **(_GPT | dict(width=1024, heads=8, layers=3, batch=4))),
    "gpt vocabulary": functools.partial(zoo, "gpt", **(_GPT | dict(vocabulary=16384, layers=1, batch=4))),
    "gpt_scan": functools.partial(zoo, "gpt_scan", **_GPT),
    "gpt_scan_remat": functools.partial(zoo, "gpt_scan_remat", **_GPT),
    "moe": functools.partial(zoo, "moe", **(_GPT | dict(layers=2))),
    "bert": functools.partial(zoo, "bert", **_GPT),
    "encoder_decoder": functools.partial(
        zoo,
        "encoder_decoder",
        layers=2,
        width=256,
        heads=4,
        vocabulary=1024,
        source_length=256,
        target_length=256,
        batch=8,
    ),
    "vit": functools.partial(zoo, "vit", layers=4, width=256, heads=4, image=64, patch=4, batch=16),
    "clip": functools.partial(zoo, "clip", width=256, heads=4, vocabulary=1024, length=256, image=64, batch=32),
    "resnet": functools.partial(zoo, "resnet", widths=(32, 64), blocks=2, image=64, batch=32),
    "lstm": functools.partial(zoo, "lstm", width=512, features=256, length=64, batch=128),
    "gnn": functools.partial(zoo, "gnn"),
    "nnx_model": functools.partial(zoo, "nnx_model", width=64, image=32, batch=64),
    "equinox_model": functools.partial(zoo, "equinox_model", width=256, heads=4, vocabulary=1024, length=256, batch=16),
    "haiku_model": functools.partial(zoo, "haiku_model", width=64, image=32, batch=64),
    "loss_scaling": functools.partial(zoo, "loss_scaling", **_MLP),
    # Below: models on which nothing was adjusted.
    "gpt short": functools.partial(zoo, "gpt", layers=8, width=384, heads=6, vocabulary=2048, length=64, batch=64),
    "gpt parameters": functools.partial(zoo, "gpt", layers=6, width=512, heads=8, vocabulary=8192, length=128, batch=2),
    "gpt clipped": functools.partial(
        zoo, "gpt", **(_GPT | dict(optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))))
    ),
    "gpt_adafactor": functools.partial(
        zoo, "gpt_adafactor", width=512, vocabulary=4096, layers=2, length=128, batch=16
    ),
    "gpt_scan 12": functools.partial(
        zoo, "gpt_scan", layers=12, width=512, heads=8, vocabulary=2048, length=128, batch=8
    ),
    "gpt_scan_remat 12": functools.partial(zoo, "gpt_scan_remat", **(_GPT | dict(layers=12, vocabulary=512))),
    "mlp_multi_steps": functools.partial(zoo, "mlp_multi_steps", **_MLP),
    "fixed_point": functools.partial(zoo, "fixed_point", width=1024, features=512, classes=128, batch=4096),
    "bookkeeping": functools.partial(zoo, "bookkeeping", **_MLP),
    "resnet deep": functools.partial(zoo, "resnet", widths=(16, 32, 64), blocks=3, image=64, batch=16),
}


def measured(name: str, step: Callable, args: tuple) -> dict[str, int]:
    """XLA's figures, remembered between runs."""
    kept = (
        pathlib.Path(tempfile.gettempdir())
        / "autopar_memory_study"
        / f"{name} {jax.__version__} with live.json".replace(" ", "_")
    )
    if not kept.exists():
        with tempfile.TemporaryDirectory() as dump:
            compiled = jax.jit(step, donate_argnums=0).lower(*args).compile(compiler_options={"xla_dump_to": dump})
            live_bytes = peak_of_live(pathlib.Path(dump))
        stats, text = compiled.memory_analysis(), compiled.as_text()
        assert stats is not None, "XLA's CPU compiler says what it allocates"
        assert text is not None, "XLA's CPU compiler gives its program"
        kept.parent.mkdir(exist_ok=True)
        kept.with_suffix(".hlo").write_text(text)
        kept.write_text(
            json.dumps(
                dict(
                    arguments=stats.argument_size_in_bytes,
                    results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
                    temporaries=stats.temp_size_in_bytes,
                    total=peak_memory.allocated_bytes(stats),
                    live=live_bytes,
                )
            )
        )
    return json.loads(kept.read_text())


def peak_of_live(dump: pathlib.Path) -> int:
    """The most bytes that are alive at once in XLA's own order; what it allocates beyond them is lost."""
    largest = max(dump.glob("*live-range.txt"), key=lambda path: path.stat().st_size)
    found = re.search(r"peak usage: ([\d ]+) bytes", largest.read_text())
    assert found is not None, "XLA's CPU compiler writes down what is alive at the peak"
    return int(found.group(1).replace(" ", ""))


def main(names: list[str]) -> None:
    print(f"jax {jax.__version__}")
    columns = f"{'predicted':>10} {'XLA':>8} {'ratio':>6} {'lost':>6}"
    print(f"{'model':18} {'steps':>6} {'predict s':>9} {'args MiB':>9} {columns}")
    for name in names or STUDY:
        step, args = STUDY[name]()
        closed = jax.make_jaxpr(step)(*args)
        size = len(jax.tree.leaves(args[0]))
        program = program_of(closed, {i: i for i in range(size)})
        begin = time.perf_counter()
        predicted = peak_memory.estimate(program, peak_memory.compiler_for(Platform.CPU, jax.__version_info__))
        elapsed_s = time.perf_counter() - begin
        found = measured(name, step, args)
        print(
            f"{name:18} {len(program.steps):6} {elapsed_s:9.4f} {found['arguments'] / MEBIBYTE:9.1f} "
            f"{predicted.peak_bytes / MEBIBYTE:10.1f} {found['total'] / MEBIBYTE:8.1f} "
            f"{predicted.peak_bytes / found['total']:6.2f} {1 - found['live'] / found['total']:6.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
