"""Draws programs: random steps of a few blocks each, the same for the same seed."""

from __future__ import annotations

import dataclasses

from benchmarks.random_programs.blocks import BLOCKS, MIXING
from benchmarks.random_programs.drafting import Draft, Statement, Unfit
from benchmarks.random_programs.program import Program

TRIES = 20


def generate(seed: int, form: str = "plain") -> Program:
    """The program of a seed in one of `forms.FORMS`: 3 to 8 blocks, a loss where it trains, and results."""
    d = Draft(seed)
    trains = d.chance(0.75)
    if d.chance(0.8):
        d.data(d.size(), *((d.size((2, 3, 4)),) if d.chance(0.4) else ()))
    else:
        d.data(d.size((4, 6, 8)), d.size((4, 5, 8)), d.size((2, 3, 4)))
    d.mixes = d.chance(0.5)
    names = [name for name in BLOCKS if d.mixes or name not in MIXING]
    favourites = [str(d.one(names)) for _ in range(8)]  # so that a program has several blocks of a kind
    wanted = ["dense"] * d.below(6) if trains else []  # some products, so that there are layers to cut between
    wanted += [str(d.one(favourites if d.chance(0.5) else names)) for _ in range(3 + d.below(6))]
    d.random.shuffle(wanted)
    for name in wanted:
        if not _tried(d, name):
            for _ in range(TRIES):
                if _tried(d, str(d.one(names))):
                    break
    return dataclasses.replace(_finished(d, seed, trains), form=form)


def _tried(d: Draft, name: str) -> bool:
    """Whether a block could be added."""
    saved, d.block = d.saved(), name
    try:
        BLOCKS[name](d)
    except Unfit:
        d.restore(saved)
        return False
    return True


def _finished(d: Draft, seed: int, trains: bool) -> Program:
    loss = tuple(_term(d, s) for s in _ends(d)) if trains else ()
    outputs: list[tuple[str, str]] = []
    read = set().union(*(s.uses for s in d.statements))
    ends = [s for s in d.statements if s.name not in read and not (trains and s.dtype == "float32")]
    some = [d.statements[-1 - d.below(min(len(d.statements), 6))] for _ in range(1 + d.below(3))]
    for i, s in enumerate([*ends, *some]):
        outputs.append((f"o{i}", _output(d, s)))
    if not loss and d.chance(0.2):
        outputs.append(("constant", str(d.one(("1.5", "3", "True", "jnp.float32(2)", "jnp.arange(3)")))))
    if not loss and d.parameters and d.chance(0.2):
        outputs.append(("parameter", f'p["{d.parameters[0].name}"]'))
    optimizer = str(d.one(("sgd", "momentum", "adam")))
    made = Program(
        seed=seed,
        parameters=tuple(d.parameters),
        others=tuple(d.others),
        batch=tuple(d.batch),
        statements=tuple(d.statements),
        loss=loss,
        outputs=tuple(outputs),
        updates=tuple(d.updates),
        optimizer=optimizer,
    )
    return made.tidied()


def _ends(d: Draft) -> list[Statement]:
    """Float values: the last, and those that nothing else reads."""
    read = set().union(*(s.uses for s in d.statements))
    floats = [s for s in d.statements if s.dtype in ("float32", "float64", "bfloat16")]
    ends = [s for s in floats if s.name not in read and (d.chance(0.8) or s is floats[-1])]
    return ends or floats[-1:]


def _term(d: Draft, s: Statement) -> str:
    x = f"{s.name}.astype(jnp.float32)" if s.dtype == "bfloat16" else s.name
    choices = [f"jnp.mean({x} ** 2)", f"jnp.mean(jnp.tanh({x}))", f"0.1 * jnp.sum({x} ** 2) / {d.examples}"]
    if len(s.shape) >= 1:
        choices.append(f"0.5 * jnp.sum(jnp.mean({x}, axis=0) ** 2)")
        choices.append(f"jnp.mean(jnp.sum({x}, axis=-1) ** 2) * {1 / s.shape[-1] ** 2:.4f}")
    if len(s.shape) == 2 and s.shape[0] == d.examples:
        t = next((v for v in d.statements if v.shape == (d.examples,) and v.dtype == "int32"), None)
        if t is not None:
            inside = f"({t.name} % {s.shape[1]})"
            choices.append(f"-jnp.mean(jax.nn.log_softmax({x})[jnp.arange({s.name}.shape[0]), {inside}])")
            choices.append(
                f"jnp.sum(jnp.where({t.name} > 0, jnp.mean({x} ** 2, -1), 0)) / jnp.maximum(jnp.sum({t.name} > 0), 1)"
            )
    return str(d.one(choices))


def _output(d: Draft, s: Statement) -> str:
    choices = [s.name, s.name, s.name]
    if s.dtype != "bool" and "complex" not in s.dtype and s.shape:
        choices += [f"jnp.mean({s.name})", f"jnp.sum({s.name}, axis=0)", f"jnp.max({s.name})"]
    if d.chance(0.15):
        return f'batch["{d.batch[d.below(len(d.batch))].name}"]'
    return str(d.one(choices))
