"""Rings whose steps a kernel runs: the same numbers as on one device, hidden halves left out, balanced positions."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from autopar.ops.attention import execute, ring
from autopar.ops.attention.form import Gradients
from autopar.ops.attention.kernels import Kernel
from autopar.ops.attention.ring_order import exchanges, ring_order
from tests.ops.attention.test_kernels import AND_CAUSAL, FORM, PACKED, SAME, form_of, packed
from tests.ops.attention.test_match import plain

GRADIENTS = Gradients(out="bqhgd", query="bqhgd", key="bkhd", value="bkhd")


def operands(positions, width=8):
    keys = jax.random.split(jax.random.key(0), 4)
    query, change = (jax.random.normal(key, (2, positions, 2, 2, width)) for key in keys[:2])
    key, value = (jax.random.normal(key, (2, positions, 2, width)) for key in keys[2:])
    return query, key, value, change


def passes(places, library, form=FORM):
    """(result, logarithm of each row's sum, gradients of queries, keys and values)."""

    def run(query, key, value, change, *arrays):
        out, largest, total = execute.run(form, None, places, (query, key, value, *arrays), library)
        args = (query, key, value, out, largest, total, change, *arrays)
        return out, largest + jnp.log(total), *execute.run(form, GRADIENTS, places, args, library)

    return run


def on_devices(count, library, form=FORM):
    split, rows = PartitionSpec(None, "sequence"), PartitionSpec(None, None, None, "sequence")
    mesh = Mesh(np.array(jax.devices()[:count]), ("sequence",))
    places = ring.Places(axes={"q": ("sequence",)}, sizes={"sequence": count})
    arrays = tuple(split if "q" in names else PartitionSpec() for names in form.arrays)
    specs = {"in_specs": (*(split,) * 4, *arrays), "out_specs": (split, rows, split, split, split)}
    return jax.jit(jax.shard_map(passes(places, library, form), mesh=mesh, check_vma=False, **specs))


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_a_causal_ring_computes_what_one_device_does(count):
    args = operands(4 * count)
    expected = jax.jit(passes(ring.HERE, Kernel.BLOCKS))(*args)
    for a, b in zip(expected, on_devices(count, Kernel.BLOCKS)(*args), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6 * float(abs(a).max()))


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_each_device_has_a_part_from_the_front_and_one_as_far_from_the_end(count):
    first, second = exchanges(count)
    parts = {i: [] for i in range(count)}
    for moves, half in ((first, 0), (second, 1)):
        assert sorted(target for _, target in moves) == list(range(count))
        for source, target in moves:
            parts[target].append(2 * source + half)
    assert {i: sorted(found) for i, found in parts.items()} == {i: [i, 2 * count - 1 - i] for i in range(count)}


def products(function, *args):
    """Multiplications of all matrix products of a program, of a branch those of the alternative with most."""

    def of(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                ((contracted, _), _) = eqn.params["dimension_numbers"]
                inner = np.prod([eqn.invars[0].aval.shape[d] for d in contracted])
                total += int(eqn.outvars[0].aval.size * inner)
            inside = [of(j) for j in jax.extend.core.jaxprs_in_params(eqn.params)]
            if eqn.primitive.name == "cond":
                assert max(inside) < 1.01 * min(inside)  # no device waits for another
                total += max(inside)
            else:
                total += sum(inside) * eqn.params.get("length", 1)
        return total

    return of(jax.make_jaxpr(function)(*args).jaxpr)


def test_under_a_causal_mask_each_step_but_the_first_computes_half_the_scores():
    """Of four devices in four steps 1 + 3 / 2 of their blocks, where blocks in order would take four."""
    args = operands(256)
    whole = products(passes(ring.HERE, Kernel.BLOCKS), *args)
    assert products(on_devices(4, Kernel.BLOCKS), *args) * 4 / whole == pytest.approx((1 + 3 / 2) / 4, rel=0.01)


def test_only_causal_rings_of_two_halves_are_balanced():
    assert ring_order(FORM, 8, 4).balanced
    assert not ring_order(FORM, 8, 1).balanced
    assert not ring_order(FORM, 7, 4).balanced
    assert not ring_order(form_of(plain), 8, 4).balanced


def test_rows_that_see_nothing_have_no_number_as_in_plain_jax():
    """Segments of queries that no key has: their weights are no numbers, which gradients of all values add up."""
    form = packed((*AND_CAUSAL, ("eq", (), *SAME)), -np.inf, sources=(0, 1))
    query, key, value, change = operands(16)
    segments = jnp.asarray(np.stack([np.repeat([1, 2, 3], [5, 7, 4]), np.repeat([4, 1, 3], [6, 6, 4])]))
    of_keys = jnp.where(segments == 3, 9, segments)
    seen = jnp.tril(segments[:, :, None] == of_keys[:, None, :])[:, None, None]

    def plain_attention(query, key, value):
        scores = 0.25 * jnp.einsum("bqhgd,bkhd->bhgqk", query, key)
        return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), value)

    out, pull = jax.vjp(plain_attention, query, key, value)
    assert ring_order(form, 4, 4).balanced
    made = on_devices(4, Kernel.BLOCKS, form)(query, key, value, change, segments, of_keys)
    for a, b in zip((out, *pull(change)), (made[0], *made[2:]), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", [FORM, PACKED])
def test_the_kernel_of_tpus_runs_the_steps_of_a_ring(form, interpreted):
    segments = jnp.asarray(np.stack([np.repeat([1, 2, 3], [100, 300, 112]), np.repeat([1, 2, 0], [200, 250, 62])]))
    args = (*operands(512), *(segments for _ in form.arrays))
    expected = jax.jit(passes(ring.HERE, Kernel.BLOCKS, form))(*args)
    found = on_devices(2, Kernel.TPU_SPLASH, form)(*args)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6 * float(abs(a).max()))
