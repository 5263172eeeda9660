"""The reader of compiled programs: hand-written texts in every spelling, and programs that XLA compiles here."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.execute import collectives, parse
from autopar.hardware.collective_cost import CollectiveKind
from autopar.ops.kernels.row_exchange import LATER_TURNS
from tests.execute.spanned_axes import spanned_axes


def program(body: str, *, computations: str = "", header: str = "num_partitions=8") -> str:
    entry = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"
    return f"HloModule m, is_scheduled=true, {header}\n\n{computations}\n\n{entry}"


def only(text: str, **options: bool) -> collectives.Collective:
    found = collectives.collectives(text, **options)
    assert len(found) == 1
    return found[0]


def groups(spelling: str) -> tuple[tuple[int, ...], ...] | None:
    return parse.replica_groups(f", channel_id=1, replica_groups={spelling}, dimensions={{0}}", 8)


PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
STRIDED = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", PAIRS),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", PAIRS),
        ("[4,2]<=[2,4]T(1,0)", STRIDED),
        ("mesh['x'=4,'y'=2] {'y'}", PAIRS),
        ("mesh['data'=2,'model'=4] {'data'}", STRIDED),
        ("mesh['data'=2,'model'=4] {'data','model'}", (tuple(range(8)),)),
        ("mesh['data'=4,'data group'=2] {'data group'}", PAIRS),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'a'}", ((3, 0), (1, 2))),
        ("mesh['a'=8] {'a':(1)2}", STRIDED),
        ("mesh['a'=8] {'a':(4)2}", PAIRS),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("@mesh<a=2,b=4> {a}", STRIDED),
    ],
)
def test_replica_groups_in_every_spelling(spelling, expected):
    assert groups(spelling) == expected


def test_all_reduce_of_a_tuple():
    c = only(
        program(
            "  ROOT %r = (bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, f32[]) all-reduce(%a, %b), channel_id=1, "
            'replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="jit(f)/jvp(M)/dot" stack_frame_id=3}'
        )
    )
    assert (c.kind, c.group_size, c.result_bytes, c.dtype, c.count) == (CollectiveKind.ALL_REDUCE, 4, 68, "bf16", 1)
    assert c.sent_bytes_per_device == 2 * 3 / 4 * 68
    assert c.op_name == "jit(f)/jvp(M)/dot"
    assert c.count_is_exact


@pytest.mark.parametrize(
    ("line", "kind", "result_bytes", "sent"),
    [
        ("f32[8] all-gather(%a), replica_groups=[2,4]<=[8], dimensions={0}", CollectiveKind.ALL_GATHER, 32, 24),
        ("f32[2] reduce-scatter(%a), replica_groups=[2,4]<=[8], to_apply=%add", CollectiveKind.REDUCE_SCATTER, 8, 24),
        ("(f32[1], f32[1]) all-to-all(%a, %b), replica_groups=[4,2]<=[8]", CollectiveKind.ALL_TO_ALL, 8, 4),
        ("f32[8] collective-permute(%a), source_target_pairs={{0,1},{1,0}}", CollectiveKind.COLLECTIVE_PERMUTE, 32, 32),
        ("s4[8] all-gather(%a), replica_groups=[1,8]<=[8]", CollectiveKind.ALL_GATHER, 4, 3.5),
        # asynchronous: operands come with the results, except for all-reduce
        ("(f32[2], f32[8]) all-gather-start(%a), replica_groups=[2,4]<=[8]", CollectiveKind.ALL_GATHER, 32, 24),
        (
            "((f32[2], f32[1]), (f32[8], f32[4])) all-gather-start(%a, %b), replica_groups={{0,1,2,3}}",
            CollectiveKind.ALL_GATHER,
            48,
            36,
        ),
        ("f32[8] all-reduce-start(%a), replica_groups=[2,4]<=[8], to_apply=%add", CollectiveKind.ALL_REDUCE, 32, 48),
        (
            "(f32[8], f32[8]) all-reduce-start(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add",
            CollectiveKind.ALL_REDUCE,
            64,
            96,
        ),
        (
            "((f32[8]), f32[2], u32[]) reduce-scatter-start(%a), replica_groups=[2,4]<=[8]",
            CollectiveKind.REDUCE_SCATTER,
            8,
            24,
        ),
        (
            "(f32[8], f32[8], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}",
            CollectiveKind.COLLECTIVE_PERMUTE,
            32,
            32,
        ),
    ],
)
def test_bytes_of_each_kind_and_form(line, kind, result_bytes, sent):
    c = only(program(f"  %x = {line}"))
    assert (c.kind, c.result_bytes, c.sent_bytes_per_device) == (kind, result_bytes, sent)


def test_the_end_of_an_asynchronous_collective_does_not_count_again():
    text = program(
        "  %s = (f32[2], f32[8]) all-gather-start(%a), replica_groups=[2,4]<=[8]\n"
        "  %w = f32[8] all-gather-done(%s)\n"
        "  %t = ((f32[8]), f32[2]) async-start(%a), calls=%wrapped\n"
        "  %u = f32[2] async-done(%t), calls=%wrapped",
        computations="%wrapped (p.1: f32[8]) -> f32[2] {\n"
        "  ROOT %rs = f32[2] reduce-scatter(%p.1), replica_groups=[2,4]<=[8], to_apply=%add\n}",
    )
    assert collectives.traffic(collectives.collectives(text)).count == {
        CollectiveKind.ALL_GATHER: 1,
        CollectiveKind.REDUCE_SCATTER: 1,
    }


LOOP = """%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %b = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[4] get-tuple-element(%b), index=1
  %r = f32[4] all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add
  %step = s32[] constant(STEP)
  %next = s32[] fusion(%i, %step), kind=kLoop, calls=%plus
  ROOT %out = (s32[], f32[4]) tuple(%next, %r)
}

%plus (u: s32[], v: s32[]) -> s32[] {
  %u = s32[] parameter(0)
  %v = s32[] parameter(1)
  ROOT %w = s32[] add(%u, %v)
}

%condition (c: (s32[], f32[4])) -> pred[] {
  %c = (s32[], f32[4]) parameter(0)
  %n = s32[] constant(BOUND)
  %k = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%k, %n), direction=DIRECTION
}"""


def loop_text(start: str, bound: str, step: str, direction: str, config: str = "") -> str:
    computations = LOOP.replace("STEP", step).replace("BOUND", bound).replace("DIRECTION", direction)
    body = (
        f"  %zero = s32[] constant({start})\n  %copy = s32[] copy(%zero)\n"
        "  %init = (s32[], /*index=1*/f32[4]) tuple(%copy, /*index=1*/%p)\n"
        f"  %while = (s32[], f32[4]) while(%init), condition=%condition, body=%body{config}"
    )
    return program(body, computations=computations)


def loop(*text: str) -> collectives.Collective:
    return only(loop_text(*text))


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction", "turns"),
    [("0", "5", "1", "LT", 5), ("2", "9", "3", "LT", 3), ("1", "4", "1", "LE", 4), ("7", "0", "-1", "GT", 7)],
)
def test_a_loop_turns_as_often_as_its_text_says(start, bound, step, direction, turns):
    c = loop(start, bound, step, direction)
    assert (c.count, c.count_is_exact) == (turns, True)
    assert c.total_bytes == turns * 2 * 7 / 8 * 16


def test_the_known_trip_count_is_believed_first():
    config = ', backend_config={"known_trip_count":{"n":"11"},"known_init_step":{"init":"0","step":"1"}}'
    assert loop("0", "5", "1", "LT", config).count == 11


def test_a_loop_that_depends_on_data_counts_once_and_says_so():
    c = loop("0", "5", "0", "LT")
    assert (c.count, c.count_is_exact) == (1, False)
    assert not collectives.traffic((c,)).count_is_exact


def test_turns_for_rows_that_the_first_one_left_count_for_nothing():
    config = f', metadata={{op_name="jit(step)/shard_map/{LATER_TURNS}/while"}}'
    assert not collectives.collectives(loop_text("0", "5", "0", "LT", config))


def test_the_branch_that_sends_most_counts():
    text = program(
        "  %c = f32[4] conditional(%pred, %p, %p), branch_computations={%small, %large}",
        computations="%small (a: f32[4]) -> f32[4] {\n  %g = f32[2] all-gather(%a), replica_groups=[4,2]<=[8]\n}\n"
        "%large (b: f32[4]) -> f32[4] {\n  %h = f32[4] call(%b), to_apply=%inner\n}\n"
        "%inner (d: f32[4]) -> f32[4] {\n  ROOT %r = f32[4] all-reduce(%d), replica_groups=[1,8]<=[8]\n}",
    )
    assert only(text).kind is CollectiveKind.ALL_REDUCE


def test_tpu_fuses_an_all_reduce_with_the_slice_that_is_kept():
    text = program(
        '  %f = f32[2] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(f)/dot"}',
        computations="%all-reduce-scatter.1 (a: f32[8]) -> f32[2] {\n"
        "  %r = f32[8]{0:T(256)} all-reduce(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add\n"
        "  ROOT %s = f32[2] dynamic-slice(%r, %i), dynamic_slice_sizes={2}\n}",
    )
    c = only(text)
    assert (c.kind, c.result_bytes, c.sent_bytes_per_device, c.op_name) == (
        CollectiveKind.REDUCE_SCATTER,
        8,
        24,
        "jit(f)/dot",
    )
    assert only(text, as_written=True).sent_bytes_per_device == 48


def test_tpu_carries_one_asynchronous_collective_through_several_fusions():
    gather = '%g = f32[8] all-gather(%a), replica_groups=[1,8]<=[8], frontend_attributes={{chain_id="0"}}'
    part = "%{name} (a: f32[1]) -> f32[8] {{\n  " + gather + "\n  ROOT %c = f32[8] custom-call(%g){target}\n}}\n"
    text = program(
        "\n".join(
            f"  %{name} = f32[8] fusion(%p), kind=kCustom, calls=%{name}.c" for name in ("start", "step", "done")
        ),
        computations=part.format(name="start.c", target=', custom_call_target="AsyncCollectiveStart"')
        + part.format(name="step.c", target="")
        + part.format(name="done.c", target=', custom_call_target="AsyncCollectiveDone"'),
    )
    assert only(text).sent_bytes_per_device == 28


def test_axes_that_a_group_spans():
    sizes = {"data": 2, "model": 4}

    def axes(spelling: str) -> tuple[str, ...]:
        return spanned_axes(only(program(f"  %x = f32[8] all-gather(%p), replica_groups={spelling}")), sizes)

    assert axes("[2,4]<=[8]") == ("model",)
    assert axes("[4,2]<=[2,4]T(1,0)") == ("data",)
    assert axes("{}") == ("data", "model")
    permute = only(program("  %x = f32[8] collective-permute(%p), source_target_pairs={{0,4},{4,0},{1,5},{5,1}}"))
    assert spanned_axes(permute, sizes) == ("data",)


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="as_text"):
        collectives.collectives("module @jit_f attributes {}")


# Programs that XLA compiles here.


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def line_by_line(text: str) -> dict[str, float]:
    """Bytes by kind from each line alone, as rulers of loop-free synchronous programs do."""
    sent: dict[str, float] = {}
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    for shapes, kind, rest in re.findall(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({kinds})\((.*)", text, re.MULTILINE):
        out = sum(
            4 * np.prod([int(d) for d in dims.split(",") if d]) for dims in re.findall(r"f32\[([\d,]*)\]", shapes)
        )
        if kind == "collective-permute":
            n = 2
        elif m := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
            n = int(m.group(2))
        elif m := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", m.group(1)))
            n = np.prod([int(sizes[a]) for a in re.findall(r"'(\w+)'", m.group(2))])
        else:
            n = len(re.search(r"replica_groups=\{\{([\d,]*)\}", rest).group(1).split(","))
        factor = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1.0}.get(
            kind, (n - 1) / n
        )
        sent[kind] = sent.get(kind, 0.0) + factor * out
    return sent


def test_every_kind_as_xla_writes_it(mesh):
    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
    def step(a):
        b = jax.lax.psum(a, "model")
        c = jax.lax.psum_scatter(b, "data", scatter_dimension=0, tiled=True)
        d = jax.lax.all_gather(c, "data", axis=0, tiled=True) + a
        e = jax.lax.all_to_all(d, "model", 0, 1, tiled=True)
        f = jax.lax.ppermute(e, "model", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return jax.lax.psum(f, ("data", "model")).sum() + a

    text = step.lower(jax.ShapeDtypeStruct((64, 256), jnp.float32)).compile().as_text()
    found = collectives.collectives(text)
    axes = {c.kind: (spanned_axes(c, mesh.shape), c.sent_bytes_per_device) for c in found}
    local = 32 * 64 * 4
    assert axes[CollectiveKind.REDUCE_SCATTER] == (("data",), local / 2)
    assert axes[CollectiveKind.ALL_GATHER] == (("data",), local / 2)
    assert axes[CollectiveKind.ALL_TO_ALL] == (("model",), local * 3 / 4)
    assert axes[CollectiveKind.COLLECTIVE_PERMUTE] == (("model",), local)
    reduces = {
        spanned_axes(c, mesh.shape): c.sent_bytes_per_device for c in found if c.kind is CollectiveKind.ALL_REDUCE
    }
    assert reduces == {("model",): local * 1.5, ("data", "model"): local * 2 * 7 / 8}
    assert collectives.traffic(found).bytes == line_by_line(text)


def test_the_collectives_of_a_scan_count_once_a_turn(mesh):
    def stack(x, w):
        def layer(c, wi):
            return jnp.tanh(c @ wi) @ wi.T, None

        return jax.lax.scan(layer, x, w)[0]

    on = lambda *spec: NamedSharding(mesh, P(*spec))
    step = jax.jit(stack, in_shardings=(on("data"), on(None, None, "model")), out_shardings=on("data"))
    args = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((5, 256, 512), jnp.float32)
    found = collectives.collectives(step.lower(*args).compile().as_text())
    largest = max(found, key=lambda c: c.total_bytes)
    assert (largest.kind, largest.count, largest.result_bytes) == (CollectiveKind.ALL_REDUCE, 5, 32 * 256 * 4)
    assert spanned_axes(largest, mesh.shape) == ("model",)
    assert "while/body" in largest.op_name


def test_loop_free_programs_agree_with_a_line_by_line_sum(mesh):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    on = lambda *spec: NamedSharding(mesh, P(*spec))
    shardings = [on(None, "model"), on("model", None), on("data", "model")]
    step = jax.jit(jax.grad(loss), in_shardings=(shardings, on("data")), out_shardings=shardings)
    args = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 3, jax.ShapeDtypeStruct((32, 128), jnp.float32)
    text = step.lower(*args).compile().as_text()
    result = collectives.traffic(collectives.collectives(text))
    assert result.bytes == pytest.approx(line_by_line(text))
    assert result.total_bytes > 0
    assert str(result).endswith("MB)")


def test_attributes_may_be_written_over_several_lines():
    """As XLA for TPUs writes what Pallas calls say of themselves."""
    call = "\n".join([
        '  %call = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", metadata={metadata={',
        '"xprof_metadata":"{\\"block_q\\": 512}"',
        '}}, metadata={op_name="splash/pallas_call"}',
    ])  # fmt: skip
    rest = "  ROOT %sum = f32[4]{0} all-reduce(%call), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
    text = program(f"  %p = f32[4]{{0}} parameter(0)\n{call}\n{rest}")
    entry = parse.parse(text).computations["main"]
    assert list(entry.instructions) == ["p", "call", "sum"]
    assert entry.instructions["call"].op_name == "splash/pallas_call"
    assert entry.root.name == "sum"
    assert only(text).sent_bytes_per_device == 2 * 7 / 8 * 16
