"""Padding that cuDNN does not know is written: windows counted by hand, and the memory of a step with strides."""

import re

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost.memory_program import written_padding
from autopar.verification import compile_for_target

IMAGES, KERNEL = (2, 8, 8, 3), (3, 3, 3, 5)


def convolve(images, kernel, stride=2, padding="SAME"):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (stride, stride), padding, dimension_numbers=layout)


def paddings(stride, padding="SAME", images=IMAGES, kernel=KERNEL):
    """Of a convolution, the gradient of its images, and that of its kernel."""

    def gradients(images, kernel):
        return jax.vjp(lambda *args: convolve(*args, stride, padding), images, kernel)[1]

    def both(images, kernel, made):
        return gradients(images, kernel)(made)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (images, kernel)]
    made = jax.eval_shape(lambda *args: convolve(*args, stride, padding), *shapes)
    forward = jax.make_jaxpr(lambda *args: convolve(*args, stride, padding))(*shapes)
    backward = jax.make_jaxpr(both)(*shapes, made)
    found = [
        eqn for closed in (forward, backward) for eqn in closed.eqns if eqn.primitive.name == "conv_general_dilated"
    ]
    of_kernel = [eqn for eqn in found if eqn.outvars[0].aval.size == shapes[1].size]
    of_images = [eqn for eqn in found if eqn.outvars[0].aval.size == shapes[0].size]
    return [written_padding(eqns[-1]) for eqns in (found[:1], of_images, of_kernel)]


def test_strides_of_two_over_an_even_size_pad_one_side():
    forward, of_images, of_kernel = paddings(2)
    assert forward.added == of_kernel.added == ((0, 0), (0, 1), (0, 1), (0, 0))
    assert forward == of_kernel  # one copy serves both
    assert forward.copy_share == 9 * 9 / (8 * 8)
    assert (of_images.is_copied, of_images.result_share) == (False, 9 * 9 / (8 * 8))


def test_both_sides_alike_are_left_to_the_library():
    for stride, padding in ((1, "SAME"), (1, "VALID"), (2, ((1, 1), (1, 1)))):
        assert [(p.is_copied, p.result_share) for p in paddings(stride, padding)] == [(False, 1.0)] * 3


def test_a_kernel_of_one_pixel_needs_no_padding():
    assert [(p.is_copied, p.result_share) for p in paddings(2, kernel=(1, 1, 3, 5))] == [(False, 1.0)] * 3


def test_what_the_gradient_of_a_wide_kernel_copies_has_the_difference_only():
    """Seven pixels over 8 with strides of two: two before, three behind."""
    forward, _, of_kernel = paddings(2, kernel=(7, 7, 3, 5))
    assert forward.added[1:3] == ((2, 3), (2, 3))
    assert of_kernel.added[1:3] == ((0, 1), (0, 1))


def test_the_padded_copy_is_held_until_the_backward_pass():
    def peak_bytes(padding):
        def step(state, batch):
            def loss(state):
                across = convolve(batch, state["across"], 2, padding)
                return jnp.sum(jnp.sin(convolve(across, state["wide"], 1)))  # here the most is held

            return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state)), 0.0

        shapes = {"across": (3, 3, 8, 8), "wide": (1, 1, 8, 256)}
        state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        batch = jax.ShapeDtypeStruct((64, 64, 64, 8), jnp.float32)
        cluster = autopar.Cluster.parse("dgx-h200:1")
        step = autopar.parallelize(step, cluster=cluster, cache_dir=None)
        return max(step.plan(state, batch).predicted.peak_bytes)

    assert peak_bytes("SAME") - peak_bytes(((1, 1), (1, 1))) == 64 * 65 * 65 * 8 * 4


@pytest.mark.extra("gpu")
@pytest.mark.parametrize(("size", "padded"), [(3, [65]), (7, [65, 69])])
def test_the_compiler_pads_and_makes_as_much(size, padded):
    """Of images of 64 pixels a side: their gradient, and what a convolution and its kernel's gradient read."""

    def step(state, batch):
        def loss(state):
            h = convolve(jax.nn.relu(convolve(batch, state["before"], 1)), state["across"], 2)
            return jnp.sum(jnp.sin(h))

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state)), 0.0

    shapes = {"before": (3, 3, 3, 32), "across": (size, size, 32, 32)}
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((64, 64, 64, 3), jnp.float32)
    cluster = autopar.Cluster.parse("dgx-h200:1")
    step = autopar.parallelize(step, cluster=cluster, cache_dir=None)
    text = compile_for_target(step, "gpu:h200:1", state, batch).as_text()
    assert sorted({int(n) for n in re.findall(r"f32\[64,(\d+),\1,32\]\S* fusion\(", text)} - {32, 64}) == padded
    gradients = r"cudnn-conv-bw-input\S* = \(f32\[64,(\d+),\1,32\]"
    assert re.findall(gradients, text) == ["65"]
    forward, of_images, of_kernel = paddings(2, images=(64, 64, 64, 32), kernel=shapes["across"])
    assert sorted({64 + sum(copy.added[1]) for copy in (forward, of_kernel)}) == padded
    assert of_images.result_share == (65 / 64) ** 2
