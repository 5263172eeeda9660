"""A random program: a training step or a plain step as Python source, and what it is called with."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from benchmarks.random_programs.forms import LAYERS, layers_of

# What statements may call beside jax itself; each stands in the source of the programs that call it.
HELPERS = {
    "scaled_gradient": """
@jax.custom_vjp
def scaled_gradient(x):
    return 2.0 * x


def scaled_gradient_forward(x):
    return 2.0 * x, (x,)


def scaled_gradient_backward(kept, g):
    return (g * 0.5 * jnp.cos(kept[0]).astype(g.dtype),)


scaled_gradient.defvjp(scaled_gradient_forward, scaled_gradient_backward)
""",
    "clipped_gradient": """
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped_gradient(x, bound):
    return x


def clipped_gradient_forward(x, bound):
    return x, None


def clipped_gradient_backward(bound, kept, g):
    return (jnp.clip(g, -bound, bound),)


clipped_gradient.defvjp(clipped_gradient_forward, clipped_gradient_backward)
""",
    "soft_abs": """
@jax.custom_jvp
def soft_abs(x):
    return jnp.sqrt(x * x + 0.1)


@soft_abs.defjvp
def soft_abs_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    y = soft_abs(x)
    return y, t * x / y
""",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """An array of the state or of the batch.

    Attributes:
        kind: How it is filled: "normal", "uniform", "integers" (below `bound`), "bools", "zeros", "complex".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    bound: int = 2

    @property
    def source(self) -> str:
        shape = repr(self.shape)
        made = {
            "normal": f"random.normal(size={shape})",
            "uniform": f"random.uniform(0.1, 0.9, size={shape})",
            "integers": f"random.integers(0, {self.bound}, size={shape})",
            "bools": f"random.integers(0, 2, size={shape})",
            "zeros": f"np.zeros({shape})",
            "complex": f"(random.normal(size={shape}) + 1j * random.normal(size={shape}))",
        }[self.kind]
        dtype = "jnp.bfloat16" if self.dtype == "bfloat16" else f"np.{self.dtype}{'_' if self.dtype == 'bool' else ''}"
        return f'"{self.name}": np.asarray({made}).astype({dtype}),'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statement:
    """`name = text`, where the text names values of earlier statements.

    Attributes:
        block: The kind of block that it is part of.
    """

    name: str
    text: str
    shape: tuple[int, ...]
    dtype: str
    block: str

    @property
    def uses(self) -> set[str]:
        return set(re.findall(r"\bv\d+\b", self.text))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A step of `(state, batch)`.

    Attributes:
        parameters: Leaves of `state["p"]`, which are trained.
        others: Leaves of `state["s"]`, each replaced by an expression of `updates`.
        loss: Terms of the loss, expressions; none in a plain step, which trains nothing.
        outputs: What is returned beside the state, by name.
        optimizer: "sgd", "momentum" or "adam".
        form: One of `forms.FORMS`: the statements as they are, or as layers.
    """

    seed: int
    parameters: tuple[Leaf, ...]
    others: tuple[Leaf, ...]
    batch: tuple[Leaf, ...]
    statements: tuple[Statement, ...]
    loss: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    updates: tuple[tuple[str, str], ...]
    optimizer: str = "sgd"
    form: str = "plain"

    @property
    def stored(self) -> tuple[Leaf, ...]:
        """The parameters as the state has them: in layers they are stacked."""
        if self.form == "plain":
            return self.parameters
        return tuple(dataclasses.replace(leaf, shape=(LAYERS, *leaf.shape)) for leaf in self.parameters)

    @property
    def blocks(self) -> list[str]:
        return sorted({s.block for s in self.statements})

    @property
    def source(self) -> str:
        """A module with `step` and `arguments`."""
        body = [f"{s.name} = {s.text}" for s in self.statements]
        text = "\n".join([*body, *self.loss, *(x for _, x in (*self.outputs, *self.updates))])
        helpers = [code for name, code in HELPERS.items() if name + "(" in text]
        new = ", ".join(f'"{name}": {x}' for name, x in self.updates)
        outputs = ", ".join(f'"{name}": {x}' for name, x in self.outputs)
        if self.form != "plain":
            loss = " + ".join(self.loss) or "0.0"
            layers = layers_of(self.form, body, loss, f"{{{new}}}", f"{{{outputs}}}", *self._carried())
            helpers += ["\n".join(layers), ""]
            body = ["loss, new, outputs = layers(p, s, batch)", "return loss, (new, outputs)"]
            if not self.loss:
                body = [
                    'p, s = state["p"], state["s"]', "_, new, outputs = layers(p, s, batch)",
                    'return {"p": p, "s": new}, outputs',
                ]  # fmt: skip
            head = "def loss_fn(p, s, batch):" if self.loss else "def step(state, batch):"
        elif self.loss:
            head = "def loss_fn(p, s, batch):"
            body += [f"loss = {' + '.join(self.loss)}", f"return loss, ({{{new}}}, {{{outputs}}})"]
        else:
            head = "def step(state, batch):"
            body = [
                'p, s = state["p"], state["s"]',
                *body,
                f'return {{"p": p, "s": {{{new}}}}}, {{{outputs}}}',
            ]
        lines = [
            f'"""Random program {self.seed}: {", ".join(self.blocks)}."""',
            "import functools\n",
            "import jax",
            "import jax.numpy as jnp",
            "import numpy as np",
            "from jax import lax\n",
            *helpers,
            "",
            head,
            *(f"    {line}" for line in body),
            "",
            *([_STEPS[self.optimizer]] if self.loss else []),
            "",
            "def arguments(seed=0):",
            "    random = np.random.default_rng(seed)",
            "    p = {",
            *(f"        {leaf.source}" for leaf in self.stored),
            "    }",
            "    s = {",
            *(f"        {leaf.source}" for leaf in self.others),
            "    }",
            "    batch = {",
            *(f"        {leaf.source}" for leaf in self.batch),
            "    }",
            f"    return {_STATES[self.optimizer if self.loss else 'sgd']}, batch",
        ]
        return "\n".join(lines) + "\n"

    def _carried(self) -> tuple[str, str]:
        """The leaf of the batch that goes from layer to layer, and what a layer makes of it."""
        for leaf in self.batch:
            if leaf.dtype == "float32":
                like = [s for s in self.statements if (s.shape, s.dtype) == (leaf.shape, leaf.dtype)]
                made = f"jnp.tanh({like[-1].name})" if like else "1.0"
                return leaf.name, f'0.5 * batch["{leaf.name}"] + 0.5 * {made}'
        return "", "carry + 1.0"

    def variants(self) -> Iterator[Program]:
        """Smaller programs, the smallest first."""
        count = len(self.statements)
        for size in (count // 2, count // 4, 1):
            for start in range(0, count if size else 0, max(size, 1)):
                dropped = {s.name for s in self.statements[start : start + size]}
                yield self._without(dropped)
        for i in range(len(self.loss)):
            if len(self.loss) > 1:
                yield dataclasses.replace(self, loss=self.loss[:i] + self.loss[i + 1 :]).tidied()
        for i in range(len(self.outputs)):
            yield dataclasses.replace(self, outputs=self.outputs[:i] + self.outputs[i + 1 :]).tidied()
        for i, (name, _) in enumerate(self.updates):
            kept = tuple(leaf for leaf in self.others if leaf.name != name)
            rest = self.updates[:i] + self.updates[i + 1 :]
            yield dataclasses.replace(self, others=kept, updates=rest).tidied()
        if self.optimizer != "sgd":
            yield dataclasses.replace(self, optimizer="sgd")

    def _without(self, dropped: set[str]) -> Program:
        """Without some statements: earlier values of the same type, or constants, take their places."""
        kept: list[Statement] = []
        instead: dict[str, str] = {}

        def replaced(text: str) -> str:
            return re.sub(r"\bv\d+\b", lambda m: instead.get(m.group(), m.group()), text)

        for s in self.statements:
            if s.name not in dropped:
                kept.append(dataclasses.replace(s, text=replaced(s.text)))
                continue
            same = [k.name for k in kept if (k.shape, k.dtype) == (s.shape, s.dtype)]
            value = "True" if s.dtype == "bool" else "1" if "int" in s.dtype else "0.5"
            instead[s.name] = same[-1] if same else f"jnp.full({s.shape}, {value}, jnp.{s.dtype})"
        return dataclasses.replace(
            self,
            statements=tuple(kept),
            loss=tuple(map(replaced, self.loss)),
            outputs=tuple((n, replaced(x)) for n, x in self.outputs),
            updates=tuple((n, replaced(x)) for n, x in self.updates),
        ).tidied()

    def tidied(self) -> Program:
        """Without statements that nothing reads, and leaves that nothing reads."""
        ends = "\n".join([*self.loss, *(x for _, x in (*self.outputs, *self.updates))])
        needed = set(re.findall(r"\bv\d+\b", ends))
        kept: list[Statement] = []
        for s in reversed(self.statements):
            if s.name in needed:
                needed |= s.uses
                kept.append(s)
        kept.reverse()
        text = "\n".join([ends, *(s.text for s in kept)])
        updated = {name for name, _ in self.updates}
        return dataclasses.replace(
            self,
            statements=tuple(kept),
            parameters=tuple(x for x in self.parameters if f'p["{x.name}"]' in text),
            others=tuple(x for x in self.others if x.name in updated),
            batch=tuple(x for x in self.batch if f'batch["{x.name}"]' in text) or self.batch[:1],
        )


_STEPS = {
    "sgd": """
def step(state, batch):
    grads, (s, outputs) = jax.grad(loss_fn, has_aux=True)(state["p"], state["s"], batch)
    p = jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), state["p"], grads)
    return {"p": p, "s": s}, outputs
""",
    "momentum": """
def step(state, batch):
    (loss, (s, outputs)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["p"], state["s"], batch)
    m = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), state["m"], grads)
    p = jax.tree.map(lambda p, m: p - (0.1 * m).astype(p.dtype), state["p"], m)
    return {"p": p, "m": m, "s": s}, (loss, outputs)
""",
    "adam": """
def step(state, batch):
    (loss, (s, outputs)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["p"], state["s"], batch)
    count = state["count"] + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    n = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * (g * g.conj()).real, state["n"], grads)
    rate = 0.1 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    p = jax.tree.map(lambda p, m, n: (p - rate * m / (jnp.sqrt(n) + 1e-2)).astype(p.dtype), state["p"], m, n)
    norm = jnp.sqrt(sum(jnp.sum(g.real ** 2) for g in jax.tree.leaves(grads)))
    return {"p": p, "m": m, "n": n, "count": count, "s": s}, (loss, norm, outputs)
""",
}
_STATES = {
    "sgd": '{"p": p, "s": s}',
    "momentum": '{"p": p, "m": {k: np.zeros(x.shape, x.dtype) for k, x in p.items()}, "s": s}',
    "adam": (
        '{"p": p, "m": {k: np.zeros(x.shape, x.dtype) for k, x in p.items()}, '
        '"n": {k: np.zeros(x.shape, x.real.dtype) for k, x in p.items()}, "count": np.int32(0), "s": s}'
    ),
}


def load(program: Program, folder: Path) -> ModuleType:
    """The program's module, from a file, so that errors can name its lines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"program_{program.seed}_{program.form}.py"
    path.write_text(program.source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
