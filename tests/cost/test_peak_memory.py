"""Predicted memory: small programs whose peak is counted by hand, and models that XLA compiles here."""

import dataclasses
import math
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.cost import peak_memory
from autopar.cost.peak_memory import CPU, GPU, TPU, MemoryProgram, MemoryStep
from autopar.cost.xla_program import HOST_COPY, Tile
from autopar.execute import aot
from autopar.hardware.kinds import Platform
from benchmarks.zoo import CASES

BIG, SMALL = 1000, 10


class Builder:
    """Writes programs down: values are numbered as they are made."""

    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}
        self.steps: list[MemoryStep] = []

    def value(self, nbytes: int) -> int:
        self.nbytes[len(self.nbytes)] = nbytes
        return len(self.nbytes) - 1

    def __call__(self, kind: str, *inputs: int, nbytes: int = BIG, **fields) -> int:
        out = self.value(nbytes)
        fusible = kind not in {"dot_general", "gather", "sort", HOST_COPY} and not kind.startswith("reduce")
        self.steps.append(MemoryStep(inputs=inputs, outputs=(out,), kind=kind, fusible=fusible, **fields))
        return out

    def program(self, arguments, results, donated=None) -> MemoryProgram:
        return MemoryProgram(
            steps=tuple(self.steps),
            nbytes=self.nbytes,
            arguments=tuple(arguments),
            results=tuple(results),
            donated=donated or {},
        )


def peak(program: MemoryProgram, compiler=GPU) -> int:
    """The predicted peak, without the arguments."""
    found = peak_memory.estimate(program, compiler)
    assert found.peak_bytes == found.argument_bytes + found.result_bytes + found.temporary_bytes
    return found.peak_bytes - found.argument_bytes


def test_an_elementwise_chain_is_one_kernel():
    op = Builder()
    x = op.value(BIG)
    y = op("exp", op("mul", op("tanh", x), x))
    assert peak(op.program([x], [y])) == BIG


def test_what_a_matrix_product_reads_is_written():
    op = Builder()
    x, w = op.value(BIG), op.value(SMALL)
    h = op("tanh", op("dot_general", x, w))  # in place of the product
    y = op("dot_general", h, w, nbytes=SMALL)
    assert peak(op.program([x, w], [y])) == BIG + SMALL
    assert peak(op.program([x, w], [y]), TPU) == BIG + SMALL


def test_the_expensive_is_kept_where_it_is_not_computed_again_as_the_cheap_is():
    def saved(kind: str, compiler: peak_memory.Compiler) -> int:
        op = Builder()
        x, w = op.value(BIG), op.value(SMALL)
        z = op("dot_general", x, w)
        a = op(kind, z)
        s = op("reduce_sum", a, nbytes=SMALL)
        t = op("reduce_sum", op("mul", a, z), nbytes=SMALL)
        return peak(op.program([x, w], [s, t]), compiler)

    keeping = dataclasses.replace(GPU, keeps=frozenset({"exp"}))
    assert saved("exp", keeping) == 2 * BIG + SMALL  # z and its exponential, and one sum beside them
    assert saved("exp", GPU) == saved("add", GPU) == saved("add", keeping) == BIG + 2 * SMALL
    assert saved("tanh", GPU) == 2 * BIG + SMALL  # what a GELU's gradient reads
    assert saved("tanh", TPU) == BIG + 2 * SMALL


def test_a_gather_computes_what_it_reads_where_the_compiler_fuses_it():
    op = Builder()
    x, w = op.value(BIG), op.value(SMALL)
    z = op("dot_general", x, w)
    found = op("gather", op("log", z), nbytes=SMALL)
    program = op.program([x, w], [op("dot_general", z, found, nbytes=SMALL)])
    assert peak(program, GPU) == BIG + 2 * SMALL
    apart = dataclasses.replace(GPU, gathers_absorb=False)
    assert peak(program, apart) == 2 * BIG + SMALL  # the logarithm of everything is written first


def test_a_softmax_and_its_gradient_take_no_memory_that_they_read_by_rows():
    def gradient(compiler: peak_memory.Compiler, several: bool) -> int:
        op = Builder()
        x, w = op.value(BIG), op.value(SMALL)
        weights, d = op("dot_general", x, w), op("dot_general", x, w)
        total = op("reduce_sum", op("mul", d, weights), nbytes=SMALL)
        out = op("dot_general", weights, op("dot_general", op("sub", d, total), w, nbytes=SMALL), nbytes=SMALL)
        if several:
            out = op("add", out, total, nbytes=SMALL)
        return peak(op.program([x, w], [out]), compiler)

    in_place = dataclasses.replace(GPU, row_kernels=False)
    assert gradient(GPU, several=False) == 3 * BIG + SMALL  # d and what is made of it, beside the weights
    assert gradient(in_place, several=False) == 2 * BIG + SMALL
    # A sum that others read too is made by a kernel of its own.
    assert gradient(GPU, several=True) == gradient(in_place, several=True) < 3 * BIG


def test_state_that_a_tpu_gathers_into_is_copied_at_the_start():
    op = Builder()
    weight, shard = op.value(BIG), op.value(SMALL)
    h = op("dot_general", weight, shard, nbytes=SMALL)
    new = op("all_gather", op("sub", shard, h, nbytes=SMALL))
    late = op("dot_general", new, shard, nbytes=SMALL)
    program = op.program([weight, shard], [new, late], {weight: new})
    assert peak(program, GPU) == SMALL  # the new weight takes the memory of the old one
    assert peak(program, TPU) == BIG + SMALL


def test_reshapes_are_names():
    op = Builder()
    x, w = op.value(BIG), op.value(SMALL)
    h = op("reshape", op("dot_general", x, w))
    assert peak(op.program([x, w], [op("dot_general", h, w, nbytes=SMALL)])) == BIG + SMALL


def layers(op: Builder, count: int):
    """`count` matrix products and the gradients of their weights, which are as large as the activations."""
    x, weights = op.value(BIG), [op.value(BIG) for _ in range(count)]
    inputs = [x]
    for w in weights:
        inputs.append(op("dot_general", inputs[-1], w))
    g, gradients = inputs.pop(), []
    for w, h in zip(reversed(weights), reversed(inputs), strict=True):
        gradients.insert(0, op("dot_general", h, g))
        g = op("dot_general", g, w)
    return x, weights, gradients


@pytest.mark.parametrize("compiler", [CPU, GPU])
def test_a_parameter_is_updated_in_place_as_soon_as_its_gradient_is_there(compiler):
    op = Builder()
    x, weights, gradients = layers(op, 6)
    new = [op("sub", w, g) for w, g in zip(weights, gradients, strict=True)]
    # Six products of the forward pass, then the gradient for the layer below and the one of a weight beside them.
    found = peak(op.program([x, *weights], new, dict(zip(weights, new, strict=True))), compiler)
    assert 7 * BIG <= found <= 8 * BIG


def test_a_number_that_every_update_reads_is_there_before_the_gradients():
    op = Builder()
    count, x, *weights = op.value(4), op.value(SMALL), *(op.value(BIG) for _ in range(6))
    gradients = [op("dot_general", x, key=i) for i in range(6)]
    rate = op("reduce_sum", count, nbytes=4)
    new = [op("sub", w, g, rate) for w, g in zip(weights, gradients, strict=True)]
    assert peak(op.program([count, x, *weights], new, dict(zip(weights, new, strict=True)))) == BIG + 4


# On TPU the product writes it converted.
@pytest.mark.parametrize(("compiler", "expected"), [(GPU, 3 * BIG + 7 * SMALL), (TPU, 2 * BIG + 8 * SMALL)])
def test_a_gradient_is_converted_and_sent_before_the_next_one_is_there(compiler, expected):
    op = Builder()
    x = op.value(SMALL)
    gradients = [op("dot_general", x, key=i) for i in range(8)]
    # The backward pass of casts at the start of a loss stands at its end.
    wide = [op("convert_element_type", g, nbytes=2 * BIG) for g in gradients]
    parts = [op("reduce_scatter", g, nbytes=SMALL) for g in wide]
    assert peak(op.program([x], parts), compiler) == expected


def test_a_global_norm_keeps_all_gradients():
    op = Builder()
    x, weights, gradients = layers(op, 6)
    norm = op("add", *(op("reduce_sum", g, nbytes=SMALL) for g in gradients), nbytes=SMALL)
    new = [op("sub", w, op("mul", g, norm)) for w, g in zip(weights, gradients, strict=True)]
    program = op.program([x, *weights], new, dict(zip(weights, new, strict=True)))
    assert peak(program) >= 6 * BIG
    by_hand = {v for v, _ in peak_memory.estimate(program).at_peak}
    assert by_hand >= set(weights)


def test_results_that_are_not_donated_take_memory():
    op = Builder()
    x = op.value(BIG)
    y = op("neg", x)
    assert peak(op.program([x], [y])) == BIG
    assert peak(op.program([x], [y], {x: y})) == 0
    assert peak(op.program([x], [x])) == BIG  # handed through: a copy


def test_an_update_before_the_last_read_of_its_argument_needs_both():
    op = Builder()
    p, x = op.value(BIG), op.value(SMALL)
    new = op("neg", p)
    late = op("dot_general", op("sort", new, nbytes=SMALL), p, nbytes=SMALL)
    assert peak(op.program([p, x], [new, late], {p: new})) == BIG + 2 * SMALL


def rematerialised(op: Builder, with_barrier: bool) -> MemoryProgram:
    """Two layers forward; backward computes the first product again, for the sake of its exponential."""
    x, w = op.value(SMALL), op.value(SMALL)
    first = op("dot_general", x, w, key="first")
    last = op("dot_general", op("dot_general", first, w, nbytes=SMALL), w)
    g = op("dot_general", last, w, nbytes=SMALL)
    passed = op.value(SMALL), op.value(SMALL), op.value(SMALL)
    if with_barrier:
        op.steps.append(MemoryStep(inputs=(x, w, g), outputs=passed, kind="optimization_barrier", fusible=False))
    else:
        passed = x, w, g
    again = op("dot_general", *passed[:2], key="first")
    return op.program([x, w], [op("dot_general", again, passed[2], nbytes=SMALL)])


def test_a_barrier_keeps_recomputation_late():
    assert peak(rematerialised(Builder(), with_barrier=True)) == BIG + 2 * SMALL
    undone = peak_memory.compiler_for(Platform.CPU, (0, 10, 2))  # which finds the first product again, and keeps it
    assert peak(rematerialised(Builder(), with_barrier=True), undone) == 2 * BIG + SMALL


@pytest.mark.parametrize(("late", "expected"), [(False, BIG + 5 * SMALL), (True, 3 * BIG + 3 * SMALL)])
def test_gradients_of_a_layer_that_is_computed_again_may_be_sent_at_its_end(late, expected):
    """Two layers of two gradients; those of a layer are there at once, with what it makes of its input last."""
    op = Builder()
    x = op.value(SMALL)
    cotangent, parts = x, []
    for layer in range(2):
        passed = op.value(SMALL), op.value(SMALL)
        op.steps.append(MemoryStep(inputs=(x, cotangent), outputs=passed, kind="optimization_barrier", fusible=False))
        again = op("dot_general", *passed, nbytes=SMALL, key=layer)
        gradients = [op("dot_general", again, passed[1], key=(layer, i)) for i in range(2)]
        cotangent = op("sort", op("dot_general", again, passed[0]), nbytes=SMALL)
        parts += [op("reduce_scatter", g, nbytes=SMALL) for g in gradients]
    compiler = dataclasses.replace(GPU, reduces_late=late)
    assert peak(op.program([x], parts), compiler) == expected


def test_the_same_computation_is_done_once_but_each_result_has_memory_of_its_own():
    op = Builder()
    x, w = op.value(SMALL), op.value(SMALL)
    twice = [op("dot_general", x, w, key="same") for _ in range(2)]
    assert peak(op.program([x, w], twice)) == 2 * BIG
    late = [op("dot_general", v, w, nbytes=SMALL) for v in twice]
    assert peak(op.program([x, w], late)) == BIG + 2 * SMALL


def scanned(trips: int, stacked: bool) -> MemoryProgram:
    op = Builder()
    w, start, xs = op.value(SMALL), op.value(BIG), op.value(trips * SMALL)
    inner_w, inner, x = op.value(SMALL), op.value(BIG), op.value(SMALL)
    body = Builder()
    body.nbytes = op.nbytes
    h = body("tanh", body("dot_general", inner, inner_w))
    after = body("dot_general", h, x)
    out, ys = op.value(BIG), op.value(trips * BIG)
    op.steps.append(
        MemoryStep(
            inputs=(w, start, xs),
            outputs=(out, ys) if stacked else (out,),
            kind="scan",
            fusible=False,
            body=tuple(body.steps),
            trips=trips,
            body_inputs=(inner_w, inner, x),
            body_outputs=(after, h) if stacked else (after,),
            num_constants=1,
            num_carried=1,
        )
    )
    last = op("reduce_sum", *((out, ys) if stacked else (out,)), nbytes=SMALL)
    return op.program([w, start, xs], [last])


def test_a_scan_holds_its_stacks_its_carry_and_one_turn():
    # The carried value, the hidden one and the next carried one; a slice of xs for the second product.
    assert peak(scanned(5, stacked=False)) == 3 * BIG + SMALL
    assert peak(scanned(5, stacked=True)) == (3 + 5) * BIG + SMALL


@pytest.mark.parametrize("compiler", [GPU, dataclasses.replace(TPU, products_round=False)], ids=["GPU", "TPU"])
def test_branches_share_their_memory(compiler):
    op = Builder()
    which, x = op.value(4), op.value(SMALL)
    out = op.value(SMALL)
    branches = []
    for hidden in (BIG, 3 * BIG):
        inner = op.value(SMALL)
        body = Builder()
        body.nbytes = op.nbytes
        result = body("dot_general", body("dot_general", inner, inner, nbytes=hidden), inner, nbytes=SMALL)
        branches.append(
            MemoryStep(
                inputs=(x,), outputs=(out,), kind="branch", fusible=False, body=tuple(body.steps),
                body_inputs=(inner,), body_outputs=(result,),
            )
        )  # fmt: skip
    op.steps.append(MemoryStep(inputs=(which, x), outputs=(out,), kind="cond", fusible=False, body=tuple(branches)))
    assert peak(op.program([which, x], [out]), compiler) == 3 * BIG + 2 * SMALL


def test_on_cpu_a_broadcast_that_a_reduction_needs_is_written():
    op = Builder()
    x, gain, w = op.value(BIG), op.value(50), op.value(SMALL)
    y = op("mul", x, gain)
    h = op("dot_general", y, w)
    s = op("reduce_sum", op("mul", h, gain), nbytes=SMALL)
    t = op("dot_general", h, w, nbytes=SMALL)
    program = op.program([x, gain, w], [s, t])
    assert peak(program, CPU) - peak(program, GPU) == BIG


def test_live_ranges_add_up_to_the_estimate_and_are_linear():
    program = scanned(4, stacked=True)
    ranges = peak_memory.live_ranges(program)
    end = max(r.stop for r in ranges)

    def most(scale: int) -> float:
        return max(
            sum(scale * r.share * program.nbytes[r.value] for r in ranges if r.start <= p < r.stop) for p in range(end)
        )

    assert most(1) == peak_memory.estimate(program).peak_bytes
    assert most(3) == 3 * peak_memory.estimate(program).peak_bytes


def test_every_platform_has_a_compiler():
    assert [peak_memory.compiler_for(platform, (0, 12)) for platform in Platform] == [CPU, GPU, TPU]


def calls_of(program):
    """How many functions are called to estimate what a program needs."""
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        peak_memory.estimate(program, CPU)
    finally:
        sys.setprofile(None)
    return count


def test_the_estimate_of_a_long_program_is_linear_in_its_length():
    def chain(products):
        op = Builder()
        x, w = op.value(BIG), op.value(SMALL)
        y = x
        for _ in range(products):
            y = op("dot_general", y, w)
            for kind in ("add", "mul", "tanh", "mul", "add", "exp", "sub"):
                y = op(kind, y, x)
        return op.program([x, w], [y])

    short, long = chain(250), chain(2500)
    assert len(long.steps) == 20_000
    assert calls_of(long) < 10.5 * calls_of(short)


_GPT = dict(layers=2, width=128, heads=4, vocabulary=512, length=256, batch=8)
COMPILED = {
    "mlp": dict(layers=4, width=1024, features=512, classes=128, batch=4096),
    "gpt": _GPT,
    "gpt_remat": _GPT,
    "gpt_scan": _GPT,
    "lstm": dict(width=256, features=128, length=64, batch=64),
    "moe": _GPT,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_models_need_what_was_predicted(name):
    case = CASES[name](**COMPILED[name])
    step = autopar.parallelize(
        case.step, cluster=autopar.Cluster.local(1), search=autopar.Search(num_microbatches=1), cache_dir=None
    )
    predicted, compiled = step.plan(*case.shapes()).predicted, step.compile(*case.shapes())
    assert predicted.peak_bytes[0] == pytest.approx(peak_memory.allocated_bytes(compiled.executable), rel=0.15)


def test_allocated_bytes_are_arguments_results_and_temporaries():
    x, w = jax.ShapeDtypeStruct((1024, 256), jnp.float32), jax.ShapeDtypeStruct((256, 256), jnp.float32)
    compiled = jax.jit(lambda x, w: x @ w @ w, donate_argnums=0).lower(x, w).compile()
    assert peak_memory.allocated_bytes(compiled) == (2 * 1024 + 256) * 256 * 4


@pytest.mark.parametrize(
    ("platform", "whole", "expected"),
    [
        ("tpu", {"total_allocation_bytes": 344, "peak_memory_in_bytes": 340}, 344),
        ("tpu", {"peak_memory_in_bytes": 340}, 340),  # before jax 0.12
        ("tpu", {"peak_memory_in_bytes": 500}, 420),  # most of it vector memory
        ("cpu", {"total_allocation_bytes": 420, "peak_memory_in_bytes": 117}, 420),
    ],
)
def test_space_between_buffers_is_allocated_once(platform, whole, expected):
    stats = SimpleNamespace(
        argument_size_in_bytes=117, output_size_in_bytes=101, alias_size_in_bytes=100, temp_size_in_bytes=302, **whole
    )
    output = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
    executable = SimpleNamespace(memory_analysis=lambda: stats, output_shardings=(output,))
    assert peak_memory.allocated_bytes(executable) == expected


def sgd_on_a_scan(weights, x):
    """Layers that are computed again: XLA sets aside a stack of gradients, and one of inputs."""

    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def loss(weights):
        return jnp.square(jax.lax.scan(jax.checkpoint(layer), x, weights)[0]).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@pytest.mark.extra("tpu")
def test_a_tpu_needs_the_memory_that_is_read_from_its_program():
    """Its compiler refuses a program for less memory, and makes it for the memory and the 5 MiB of the program."""
    where = NamedSharding(aot.target_mesh("tpu:v5e:2x2", (4,), ("x",)), PartitionSpec())
    shapes = (3, 1024, 4096), (3, 4096, 1024), (4096, 1024)
    *weights, x = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where) for shape in shapes)
    lowered = jax.jit(sgd_on_a_scan, donate_argnums=0).lower(tuple(weights), x)
    needed_mib = peak_memory.allocated_bytes(lowered.compile()) / 2**20
    lowered.compile({"xla_tpu_max_hbm_size_mib": math.ceil(needed_mib) + 8})
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory"):
        lowered.compile({"xla_tpu_max_hbm_size_mib": math.floor(needed_mib) - 4})


# TPU


def test_what_is_read_soon_lies_in_vector_memory_and_what_waits_does_not():
    def kept_bytes(vector_memory_bytes: int, between: int) -> int:
        """Of a value of BIG bytes that is read again after so many products, which move BIG bytes and little more."""
        op = Builder()
        w, other = op.value(SMALL), op.value(BIG)
        h = op("dot_general", w)
        y = op("reduce_sum", h, nbytes=SMALL)
        for _ in range(between):
            y = op("dot_general", other, y, nbytes=SMALL)
        y = op("dot_general", h, y, nbytes=SMALL)
        program = op.program([w, other], [y])
        return peak(program, TPU) - peak(program, dataclasses.replace(TPU, vector_memory_bytes=vector_memory_bytes))

    turns = TPU.vector_memory_turns
    assert BIG <= kept_bytes(BIG + 2 * SMALL, turns - 1) <= BIG + 2 * SMALL
    assert kept_bytes(BIG - 1, turns - 1) <= 2 * SMALL  # too little room
    assert kept_bytes(BIG + 2 * SMALL, turns + 1) <= 2 * SMALL  # too long a wait


def test_what_waits_least_lies_in_vector_memory_first():
    def peak_with(vector_memory_bytes: int) -> int:
        """Of two values of BIG bytes at once: the first is made first and read last."""
        op = Builder()
        w = op.value(SMALL)
        first = op("dot_general", w)
        second = op("dot_general", op("reduce_sum", first, nbytes=SMALL))
        y = op("dot_general", second, op("reduce_sum", second, nbytes=SMALL), nbytes=SMALL)
        y = op("dot_general", first, y, nbytes=SMALL)
        program = op.program([w], [y])
        return peak(program, dataclasses.replace(TPU, vector_memory_bytes=vector_memory_bytes))

    assert peak_with(0) >= 2 * BIG
    assert BIG <= peak_with(BIG + 2 * SMALL) <= BIG + 3 * SMALL
    assert peak_with(2 * BIG + 2 * SMALL) <= 3 * SMALL


def test_what_comes_from_the_hosts_memory_or_goes_there_lies_in_the_devices():
    op = Builder()
    in_host, w = op.value(0), op.value(SMALL)
    here = op(HOST_COPY, in_host)
    new = op("dot_general", here, w)
    program = op.program([in_host, w], [op(HOST_COPY, new, nbytes=0)])
    assert peak(program, dataclasses.replace(TPU, vector_memory_bytes=4 * BIG)) == 2 * BIG


@pytest.mark.parametrize(("nbytes", "address"), [(2, 4), (1, 4), (3, None)])
def test_a_place_is_the_lowest_that_is_free(nbytes, address):
    assert peak_memory._free_address({(6, 4), (0, 4)}, nbytes, 12) == address  # 4 and 5, 10 and 11 are free


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [((8, 128), 4096), ((16, 64), 16 * 128 * 4), ((9, 129), 16 * 256 * 4), ((3, 128), 4 * 128 * 4), ((64,), 256)],
)
def test_arrays_fill_whole_tiles(shape, nbytes):
    assert Tile(rows=8, columns=128).nbytes(shape, 4) == nbytes
