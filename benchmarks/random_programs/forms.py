"""The forms of a program of layers: scanned, written out, computed again in the backward pass, with cast parameters.

Each form runs the program's statements as layers, one behind the other, with parameters of their own: a value of the
examples goes from layer to layer, each layer has a loss of its own, and results are stacked. All forms compute the
same, but for the roundings of `cast`.
"""

from __future__ import annotations

LAYERS = 2
# By name: the parameters as a layer reads them, the layer, and how layers follow one another.
_SCAN = "carry, out = lax.scan(lambda c, p: layer(c, p, s, batch), carry, p, {layers})"
_LOOP = """outs = []
for i in range({layers}):
    carry, out = layer(carry, jax.tree.map(lambda x, i=i: x[i], p), s, batch)
    outs.append(out)
out = jax.tree.map(lambda *xs: jnp.stack(xs), *outs)"""
_CAST = "p = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype) if w.dtype == jnp.float32 else w, p)"
FORMS = ("plain", "scanned", "unrolled", "checkpointed", "cast")
SAME_RESULTS = ("scanned", "unrolled", "checkpointed")


def layers_of(
    form: str, statements: list[str], loss: str, new: str, outputs: str, carried: str, handed_on: str
) -> list[str]:
    """The lines of a function `layers(p, s, batch)` that gives (loss, new values of the state, outputs).

    Args:
        loss, new, outputs: Expressions of the statements' values.
        carried: The name of the leaf of the batch that goes from layer to layer; "" for none.
        handed_on: The expression of its next value.
    """
    inside = [*([_CAST] if form == "cast" else [])]
    inside += [f'batch = {{**batch, "{carried}": carry}}'] if carried else []
    inside += [*statements, f"return {handed_on}, ({loss}, {new}, {outputs})"]
    run = (_LOOP if form == "unrolled" else _SCAN).format(layers=LAYERS).splitlines()
    return [
        *(["@jax.checkpoint"] if form == "checkpointed" else []),
        "def layer(carry, p, s, batch):",
        *(f"    {line}" for line in inside),
        "",
        "",
        "def layers(p, s, batch):",
        f'    carry = batch["{carried}"]' if carried else "    carry = jnp.zeros(())",
        *(f"    {line}" for line in run),
        "    losses, new, outputs = out",
        '    return jnp.sum(losses), jax.tree.map(lambda x: x[-1], new), {**outputs, "carry": carry}',
    ]
