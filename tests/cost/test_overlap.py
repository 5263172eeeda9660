"""Time with overlap: small programs on two streams by hand, and steps whose timeline and predicted time are one."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import autopar
from autopar import recipes
from autopar.cost.cost_model import cost_model
from autopar.cost.overlap import timed
from autopar.cost.stream_simulator import SendTime, Stream, StreamWork, overlap_of, run
from autopar.cost.usage import compute_times_s, predicted_collectives
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, Fabric, Link
from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind
from autopar.hardware.kinds import Platform
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.plan.summary import timeline_of
from autopar.search.intra_op.ilp import GivenLayouts, IntraOp
from autopar.search.intra_op.mesh_searches import state_along_largest
from autopar.search.intra_op.spmd_candidate import evaluated
from tests.small_steps import chain_step, grouped

MEGABYTE = 1 << 20


def compute(name, seconds, reads="", makes=None, is_light=False):
    """`reads` and `makes` are names with spaces between them; what is made has the name of the work."""
    makes = name if makes is None else makes
    return StreamWork(
        name=name, stream=Stream.COMPUTE, seconds=seconds, reads=tuple(reads.split()), makes=tuple(makes.split()),
        is_light=is_light,
    )  # fmt: skip


def send(name, seconds, reads="", reduces=False, nbytes=1.0, stream=Stream.SEND):
    return StreamWork(
        name=name, stream=stream, seconds=seconds, reads=tuple(reads.split()), makes=(name,), nbytes=nbytes,
        reduction="sum" if reduces else None,
    )  # fmt: skip


def timetable(program, combined_bytes=0):
    """(name, start, end) of what takes time, in the order in which it starts."""
    ran = run(program, combined_bytes)
    return [(e.name, e.start_s, e.end_s) for e in ran.events()]


# By hand


def test_a_gather_hides_behind_the_product_before_it():
    program = [send("w1", 2.0), compute("h1", 3.0, "x w1"), send("w2", 2.0), compute("h2", 3.0, "h1 w2")]
    assert timetable(program) == [("w1", 0, 2), ("h1", 2, 5), ("w2", 2, 4), ("h2", 5, 8)]


def test_a_reduction_hides_behind_the_backward_pass_of_the_layer_before():
    # The update reads both sums, and resharding stands in the program where it is read: behind everything.
    program = [
        compute("g2", 1.0, "h2"), compute("h1'", 3.0, "h2"), compute("g1", 1.0, "h1'"),
        send("sum2", 2.0, "g2", reduces=True), compute("new2", 1.0, "sum2"),
        send("sum1", 2.0, "g1", reduces=True), compute("new1", 1.0, "sum1"),
    ]  # fmt: skip
    assert sorted(timetable(program)) == [
        ("g1", 4, 5), ("g2", 0, 1), ("h1'", 1, 4), ("new1", 7, 8), ("new2", 5, 6), ("sum1", 5, 7), ("sum2", 1, 3),
    ]  # fmt: skip


def test_a_chain_hides_nothing():
    program = [compute("a", 1.0), send("b", 2.0, "a", reduces=True), compute("c", 3.0, "b"), send("d", 4.0, "c")]
    ran = run(program)
    assert ran.end_s == 1 + 2 + 3 + 4
    assert ran.hidden_s == 0


def test_a_gather_comes_no_further_ahead_than_two_results():
    program = [w for i in range(4) for w in (send(f"w{i}", 1.0), compute(f"h{i}", 10.0, f"h{i - 1} w{i}"))]
    starts = {name: start for name, start, _ in timetable(program)}
    assert [starts[f"w{i}"] for i in range(4)] == [0, 1, 2, 11]  # the last one when h1 has its turn
    assert [starts[f"h{i}"] for i in range(4)] == [1, 11, 21, 31]


def test_small_gathers_come_ahead_of_large_ones():
    program = [
        send("large", 1.0, nbytes=4.0), compute("a", 9.0, "large"), send("small", 1.0), compute("b", 1.0, "a small"),
        send("large too", 8.0, nbytes=4.0), compute("c", 1.0, "b large too"),
    ]  # fmt: skip
    program[5] = replace(program[5], reads=("b", "large too"))
    assert run(program).end_s == 1 + 9 + 1 + 1
    # The third is over what may be ahead with the first, which by then is read.
    assert ("large too", 2, 10) in timetable(program)


def test_a_cast_is_made_before_the_gather_that_reads_it():
    program = [
        send("w1", 1.0), compute("h1", 4.0, "w1"),
        compute("half", 1.0, "w2", is_light=True), send("w2 whole", 2.0, "half"), compute("h2", 4.0, "h1 w2 whole"),
    ]  # fmt: skip
    program[4] = replace(program[4], reads=("h1", "w2 whole"))
    assert sorted(timetable(program)) == [("h1", 1, 5), ("h2", 5, 9), ("half", 0, 1), ("w1", 0, 1), ("w2 whole", 1, 3)]


def test_what_waits_for_the_batch_is_not_computed_earlier():
    program = [
        compute("h", 4.0, "x"), compute("half", 1.0, "h", is_light=True), send("whole", 2.0, "half"),
        compute("y", 1.0, "whole"),
    ]  # fmt: skip
    assert timetable(program) == [("h", 0, 4), ("half", 4, 5), ("whole", 5, 7), ("y", 7, 8)]


def test_small_reductions_wait_for_one_another():
    program = [
        compute("g2", 1.0), send("s2", 1.0, "g2", reduces=True, nbytes=2.0),
        compute("g1", 5.0), send("s1", 1.0, "g1", reduces=True, nbytes=2.0), compute("new", 1.0, "s1 s2"),
    ]  # fmt: skip
    assert run(program, combined_bytes=3).end_s == 1 + 5 + 1 + 1
    assert run(program, combined_bytes=4).end_s == 1 + 5 + 2 + 1


def test_a_reduction_that_is_read_before_the_next_is_made_waits_for_none():
    program = [
        compute("a", 1.0), send("b", 1.0, "a", reduces=True), compute("c", 1.0, "b"), send("d", 1.0, "c", reduces=True),
    ]  # fmt: skip
    assert timetable(program, combined_bytes=100) == [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4)]


def test_what_waits_for_a_reduction_holds_up_nothing():
    # The gradient of a bias, summed over a dimension of one as jax writes it, stands before the next layer's product.
    program = [
        compute("b2", 1.0, "h2"), send("sum", 4.0, "b2", reduces=True), compute("of one", 1.0, "sum"),
        compute("h1'", 3.0, "h2"), compute("b1", 1.0, "h1'"),
    ]  # fmt: skip
    assert timetable(program) == [("b2", 0, 1), ("h1'", 1, 4), ("sum", 1, 5), ("b1", 4, 5), ("of one", 5, 6)]


def test_gradients_of_weights_run_behind_those_of_activations_whose_reduction_they_hide():
    program = [
        compute("w'", 3.0, "y'"), compute("x'", 1.0, "y'"), send("sum", 2.0, "x'", reduces=True),
        compute("before", 1.0, "sum"),
    ]  # fmt: skip
    assert timetable(program) == [("x'", 0, 1), ("w'", 1, 4), ("sum", 1, 3), ("before", 4, 5)]
    # One whose sum over devices is sent leads to a collective itself.
    program.append(send("sum of w'", 1.0, "w'", reduces=True))
    assert ("w'", 0, 3) in timetable(program)


def test_a_product_in_pieces_leads_to_no_collective_by_those_that_bring_them():
    def of_product(work):
        return replace(work, pieces_of="w")

    program = [
        of_product(compute("p0", 2.0, "y'")), of_product(send("s1", 0.5, "p0")), of_product(compute("p1", 2.0, "s1")),
        compute("x'", 1.0, "y'"), send("sum", 3.0, "x'", reduces=True), compute("before", 1.0, "sum"),
        send("more", 1.0, "before", reduces=True), compute("last", 1.0, "more"),
    ]  # fmt: skip
    ran = timetable(program)
    assert ran[:3] == [("x'", 0, 1), ("p0", 1, 3), ("sum", 1, 4)]
    assert ran[-1] == ("last", 7, 8)
    # Were they to lead to one, they would keep their turn.
    in_order = timetable([replace(work, pieces_of=None) for work in program])
    assert (in_order[0], in_order[-1]) == (("p0", 0, 2), ("last", 8, 9))


def test_reductions_that_wait_for_each_other_start_alone():
    def other(work):
        return replace(work, reduction="other")

    program = [
        compute("a", 1.0), send("a sum", 1.0, "a", reduces=True),
        compute("b", 1.0, "a"), other(send("b other", 1.0, "b", reduces=True)),
        compute("c", 1.0, "a"), compute("d", 1.0, "b"),
    ]  # fmt: skip
    program[4] = replace(program[4], reads=("a sum",))
    program[5] = replace(program[5], reads=("b other",))
    program += [other(send("c other", 1.0, "c", reduces=True)), send("d sum", 1.0, "d", reduces=True)]
    ran = run(program, combined_bytes=100)
    assert len(ran.order) == len(program)
    assert max(ran.compute_s, ran.send_s) <= ran.end_s <= ran.compute_s + ran.send_s


def test_a_collective_is_exposed_where_nothing_is_computed():
    cause, other = (CollectiveKind.ALL_GATHER, (0,), "a"), (CollectiveKind.ALL_REDUCE, (0, 1), "b")
    program = [
        replace(send("w", 4.0), causes=((cause, 1.0),)),
        compute("x", 1.0),
        compute("y", 2.0, "w"),
        replace(send("v", 2.5, "x"), causes=((cause, 1.0),)),
        replace(send("g", 1.0, "y", stream=Stream.BOTH), causes=((other, 1.0),)),
    ]
    # The gathers run from 0 to 4 and 4 to 6.5, computing from 0 to 1 and 4 to 6.
    ran = run(program)
    assert {c: t.exposed_s for c, t in ran.sends().items()} == {cause: 3.5, other: 1.0}
    loop = StreamWork(name="loop", stream=Stream.BOTH, seconds=ran.end_s, reads=(), makes=("z",), inside=(ran,))
    assert {c: t.exposed_s for c, t in run([compute("k", 1.0), loop]).sends().items()} == {cause: 3.5, other: 1.0}


def test_each_of_combined_gathers_is_exposed_by_its_part():
    """The first with the latency that they share."""
    small, large = ((CollectiveKind.ALL_GATHER, (0,), module) for module in ("norm", "embedding"))
    program = [
        replace(send(name, seconds), gather=(0,), latency_s=1.0, causes=((cause, 1.0),))
        for name, seconds, cause in (("v", 1.0, small), ("w", 4.0, large))
    ]
    ran = run([*program, compute("x", 1.0), compute("y", 2.0, "v w")], combined_bytes=2)
    assert (len(ran.order), ran.end_s) == (3, 6.0)
    assert ran.sends() == {small: SendTime(1.0, 0.75), large: SendTime(3.0, 2.25)}


def test_a_loop_that_sends_keeps_both_streams_busy():
    body = run([send("w", 2.0), compute("h", 3.0), compute("y", 1.0, "h w")])
    loop = StreamWork(name="loop", stream=Stream.BOTH, seconds=body.end_s, reads=("x",), makes=("y",), inside=(body,))
    ran = run([compute("x", 1.0), send("other", 2.0), loop, compute("z", 1.0, "y other")])
    assert ran.end_s == 2 + 4 + 1
    assert (ran.compute_s, ran.send_s) == (1 + 4 + 1, 2 + 2)
    assert max(e.end_s for e in ran.events()) == ran.end_s


def test_what_a_compiler_does_not_take_apart_holds_up_computing():
    program = [compute("a", 1.0), send("b", 2.0, "a", stream=Stream.BOTH), compute("c", 3.0), send("d", 4.0, "c")]
    assert timetable(program) == [("a", 0, 1), ("b", 1, 3), ("c", 3, 6), ("d", 6, 10)]


def test_compilers_differ():
    assert overlap_of(Platform.CPU).kinds == frozenset()
    assert overlap_of(Platform.GPU).kinds == frozenset(PLANNED_KINDS)
    assert CollectiveKind.ALL_REDUCE not in overlap_of(Platform.TPU).kinds
    assert CollectiveKind.ALL_GATHER in overlap_of(Platform.TPU).kinds


# Any program

DURATIONS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0])


@st.composite
def programs(draw):
    works = []
    for i in range(draw(st.integers(1, 14))):
        reads = tuple(draw(st.sets(st.integers(-1, i - 1), max_size=3)))
        stream = draw(st.sampled_from(list(Stream)))
        works.append(
            StreamWork(
                name=str(i),
                stream=stream,
                seconds=0.0 if stream is Stream.NEITHER else draw(DURATIONS),
                reads=reads,
                makes=(i,),
                nbytes=draw(st.sampled_from([0.0, 1.0, 3.0])),
                reduction=draw(st.sampled_from([None, "sum", "other"])) if stream is Stream.SEND else None,
                is_light=draw(st.booleans()),
            )
        )
    return works


@given(programs(), st.sampled_from([0, 2, 100]))
def test_the_end_lies_between_the_longest_sum_and_all(program, combined_bytes):
    ran = run(program, combined_bytes)
    assert max(ran.compute_s, ran.send_s, ran.host_s) <= ran.end_s <= ran.compute_s + ran.send_s + ran.host_s
    assert ran.compute_s == sum(w.seconds for w in program if w.stream is Stream.COMPUTE)
    assert ran.host_s == sum(w.seconds for w in program if w.stream is Stream.HOST)
    assert ran.compute_s + ran.send_s + ran.host_s == sum(w.seconds for w in program)


@given(programs(), st.sampled_from([0, 2, 100]))
def test_what_computing_does_not_hide_is_what_the_step_waits_for(program, combined_bytes):
    sends = (Stream.SEND, Stream.BOTH)
    program = [
        replace(w, causes=(((CollectiveKind.ALL_REDUCE, (0,), w.name), 1.0),)) if w.stream in sends else w
        for w in program
        if w.stream is not Stream.HOST
    ]
    ran = run(program, combined_bytes)
    assert sum(t.exposed_s for t in ran.sends().values()) == ran.end_s - ran.compute_s
    assert sum(t.seconds for t in ran.sends().values()) == ran.send_s


def test_copies_to_the_host_run_beside_computing_and_collectives():
    copies = [StreamWork(name=f"copy {n}", stream=Stream.HOST, seconds=2.0, reads=(n,), makes=(f"{n}'",)) for n in "ab"]
    program = [compute("a", 3.0), copies[0], send("c", 3.0, "a"), compute("b", 1.0, "a"), copies[1]]
    ran = run(program)
    # The first copy, the collective and the second product start at 3; the second copy waits for the first.
    assert dict(zip((w.name for w in ran.order), ran.starts_s, strict=True)) == {
        "a": 0.0, "copy a": 3.0, "c": 3.0, "b": 3.0, "copy b": 5.0,
    }  # fmt: skip
    assert (ran.end_s, ran.host_s, ran.hidden_s) == (7.0, 4.0, 4.0)


@given(programs(), st.sampled_from([0, 2, 100]))
def test_everything_runs_once_when_what_it_reads_is_there_and_its_stream_is_free(program, combined_bytes):
    ran = run(program, combined_bytes)
    assert sorted(ran.order, key=id) == sorted(program, key=id)
    there_s = {value: start + w.seconds for w, start in zip(ran.order, ran.starts_s, strict=True) for value in w.makes}
    free_s = dict.fromkeys(Stream, 0.0)
    for work, start_s in zip(ran.order, ran.starts_s, strict=True):
        assert all(start_s >= there_s.get(value, 0.0) for value in work.reads)
        if work.stream is Stream.NEITHER:
            continue
        for stream in (Stream.COMPUTE, Stream.SEND) if work.stream is Stream.BOTH else (work.stream,):
            assert start_s >= free_s[stream]
            free_s[stream] = start_s + work.seconds


# Steps

WIDTH, EXAMPLES, LAYERS = 4096, 32_768, 4


def arguments(width=WIDTH):
    examples = jax.ShapeDtypeStruct((EXAMPLES, width), jnp.float32)
    return [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS, {"x": examples, "y": examples}


def plan(cluster, function=chain_step, args=None, **options):
    made = autopar.parallelize(function, cluster=cluster, cache_dir=None, **grouped(**options))
    return made.plan(*(args or arguments()))


H100S = Cluster.preset("dgx-h100")


def test_collectives_over_links_that_are_waited_for_hide_nothing():
    waits = dataclasses.replace(H100S, inside_host=dataclasses.replace(H100S.inside_host, is_asynchronous=False))
    hidden, exposed = (plan(c, plan=recipes.zero(3)).predicted for c in (H100S, waits))
    assert hidden.hidden_time_s > 0.3 * hidden.collective_time_s
    assert exposed.hidden_time_s == 0.0
    assert exposed.step_time_s == pytest.approx(exposed.compute_time_s + exposed.collective_time_s)


def test_links_over_hosts_and_over_a_torus_are_waited_for_if_their_wires_are():
    def waited_for(link):
        return dataclasses.replace(link, is_asynchronous=False)

    hosts = Cluster.preset("dgx-h100", hosts=2)
    inside = dataclasses.replace(hosts, inside_host=waited_for(hosts.inside_host))
    between = dataclasses.replace(hosts, between_hosts=waited_for(hosts.between_hosts))
    slice_ = Cluster.parse("tpu-v5e:2x4")
    torus = dataclasses.replace(slice_, inside_host=waited_for(slice_.inside_host))
    for cluster in (hosts, slice_):
        assert link_of(cluster, (8,) if cluster is slice_ else (16,)).is_asynchronous
    for cluster, sizes in ((inside, (16,)), (between, (16,)), (torus, (8,))):
        assert not link_of(cluster, sizes).is_asynchronous


def link_of(cluster, sizes):
    return cost_model(cluster, LogicalMesh(axis_sizes=sizes)).links.link((0,))


def assert_one_number(found):
    made = found.predicted
    events = timeline_of(found.record).events
    assert max(e.end_s for e in events) == made.step_time_s
    if found.record.pipeline is None:
        computed = sum(e.end_s - e.start_s for e in events if e.category == "compute")
        sent = sum(e.end_s - e.start_s for e in events if e.category == "send")
        assert computed == pytest.approx(made.compute_time_s)
        assert sent == pytest.approx(made.collective_time_s)
        assert made.step_time_s == pytest.approx(computed + sent - made.hidden_time_s)


def test_on_gpus_gradients_are_reduced_behind_the_backward_pass():
    found = plan(H100S, plan=autopar.recipes.data_parallel())
    assert_one_number(found)
    # All but the last one, which nothing is left to hide, and what the loss sends.
    gradients = next(c for c in found.predicted.collectives if c.sent_bytes > MEGABYTE)
    assert found.predicted.hidden_time_s > 0.6 * gradients.time_s
    assert "of it hidden" in found.table()


def test_on_gpus_parameters_are_gathered_ahead():
    found = plan(H100S, plan=autopar.recipes.zero(3))
    assert_one_number(found)
    gathered_s = sum(c.time_s for c in found.predicted.collectives if c.kind == "all-gather")
    assert found.predicted.hidden_time_s > 0.8 * gathered_s


def test_tpus_hide_gathers_and_no_reductions():
    tpus = Cluster.preset("tpu-v5e", topology="2x4")
    reduced = plan(tpus, plan=autopar.recipes.data_parallel())
    assert reduced.predicted.hidden_time_s == pytest.approx(0.0, abs=1e-12)
    gathered = plan(tpus, plan=autopar.recipes.zero(3))
    assert gathered.predicted.hidden_time_s > 0
    for found in (reduced, gathered):
        assert_one_number(found)


@pytest.mark.parametrize("recipe", [autopar.recipes.data_parallel(), autopar.recipes.zero(3)])
def test_virtual_cpu_devices_hide_nothing(recipe):
    found = plan(cpus(), plan=recipe)
    made = found.predicted
    assert made.hidden_time_s == pytest.approx(0.0, abs=1e-9 * made.step_time_s)
    assert made.step_time_s == pytest.approx(made.compute_time_s + made.collective_time_s, rel=1e-12)
    assert_one_number(found)
    assert "hidden" not in str(found)


def cpus(count=4):
    device = presets.cpu_device(num_devices=count, cores=4, host_bytes=64 * 10**9)
    return Cluster.flat(count, device=device, links=(presets.cpu_link(count),))


def test_a_pipeline_ends_with_its_timeline():
    slow = Link(latency_s=1e-5, bytes_per_s=5e9, source="made up")
    cluster = Cluster(
        name="two hosts", device=presets.H100, num_hosts=2, devices_per_host=2, inside_host=presets.NVLINK4,
        between_hosts=slow,
    )  # fmt: skip
    found = plan(cluster, plan=autopar.recipes.pipeline(2, num_microbatches=4))
    assert found.record.pipeline is not None
    assert_one_number(found)


def scanned(params, batch):
    def loss(params):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return params - 0.1 * grads, value


def test_a_scan_over_layers_is_on_the_timeline():
    examples = jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32)
    args = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32), {"x": examples, "y": examples}
    found = plan(H100S, scanned, args, plan=autopar.recipes.data_parallel())
    assert_one_number(found)


# A branch


def branching(a, b, choose):
    return jax.lax.cond(choose, lambda a, b: jnp.tanh(a @ b), lambda a, b: a @ b @ b @ b, a, b)


@pytest.mark.parametrize("fabric", list(Fabric))
def test_of_a_branch_the_longest_counts(fabric):
    link = Link(latency_s=1e-6, bytes_per_s=1e9, source="made up", fabric=fabric)
    model = cost_model(Cluster.flat(2, device=presets.H100, links=(link,)), LogicalMesh(axis_sizes=(2,)))
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    args = (shape, shape, jax.ShapeDtypeStruct((), jnp.bool_))
    graph = build_graph(trace(branching, args, names="abc", donate=(), batch=()), RuleBook())
    whole = {v: Layout(((), ())) for v in graph.block.inputs[:2]}
    intra_op = IntraOp(graph, model, GivenLayouts(fixed=whole))
    candidate = evaluated(graph, model, intra_op.decode(intra_op.solve(time_limit_s=60.0)))
    ran = timed(graph, candidate.lowered, model)
    computed_s = sum(compute_times_s(graph, candidate.lowered, model).values())
    sent_s = sum(use.time_s for use in predicted_collectives(graph, candidate.lowered, model))
    assert ran.compute_s == pytest.approx(computed_s)
    assert ran.send_s == pytest.approx(sent_s)
    assert max(ran.compute_s, ran.send_s) <= ran.end_s <= ran.compute_s + ran.send_s + 1e-15


@pytest.mark.parametrize(("width", "layers", "examples"), [(1024, 6, 8192), (4096, 4, 4096)])
def test_no_kind_of_data_parallelism_is_faster_where_what_it_sends_hides(width, layers, examples):
    matrices = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    batch = dict.fromkeys(("x", "y"), jax.ShapeDtypeStruct((examples, width), jnp.float32))

    def step_time_s(recipe):
        cluster = Cluster.preset("p3.16xlarge", hosts=1)
        options = {"cluster": cluster, "plan": recipe, "cache_dir": None}
        return autopar.plan(chain_step, matrices, batch, **grouped(**options)).predicted.step_time_s

    by_hand = [recipes.data_parallel(), *map(recipes.zero, (1, 2, 3))]
    assert step_time_s(None) <= min(map(step_time_s, by_hand))


def test_a_state_lies_along_the_largest_dimension_that_divides():
    def step(state, batch):
        return jax.tree.map(lambda leaf: leaf + jnp.sum(batch), state)

    shapes = {"tall": (64, 8), "odd": (63, 8), "neither": (63, 7), "number": ()}
    state = {name: jax.ShapeDtypeStruct(dims, jnp.float32) for name, dims in shapes.items()}
    batch = jax.ShapeDtypeStruct((16,), jnp.float32)
    graph = build_graph(trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,)), RuleBook())
    found = state_along_largest(graph, LogicalMesh(axis_sizes=(4,)))
    names = sorted(shapes)
    assert {names[number]: layout.dims for number, layout in found} == {"tall": ((0,), ()), "odd": ((), (0,))}
