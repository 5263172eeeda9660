"""Modules of a plan: what they cost, and their collectives in rows."""

import autopar
from autopar.plan import modules, render
from autopar.plan.modules import ModuleCost, module_costs, within
from tests.plan.records import module, pipeline, program


def test_collectives_of_repeated_layers_are_one_row():
    (row,) = modules.costliest(program(layers=3))
    assert (row.module, row.count, row.sent_bytes, row.time_s) == ("layer*/mlp", 6, 24_000, 6.0)


def test_collectives_of_stages_are_means_over_the_devices():
    (row,) = modules.costliest(pipeline(layers=4, stages=2))
    assert row.time_s == 4 * 0.5 / 2


def test_collectives_are_counted_where_they_are():
    """A mean of half a collective is one on half of the devices."""
    one = module("embed", compute_s=1.0, send_s=1.0, stage=1)
    (row,) = modules.costliest(pipeline(modules=(one,)))
    assert (row.count_text, row.where_text, row.count, row.time_s) == ("2", " in stage 1", 1.0, 0.5)
    more = tuple(module("layer0/mlp", compute_s=1.0, send_s=1.0, stage=s) for s in (0, 1, 1))
    record = pipeline(modules=more)
    (row,) = modules.costliest(record)
    assert (row.count_text, row.where_text, row.count) == ("2 to 4", "", 3.0)
    assert "2 to 4 all-reduce over x  layer*/mlp  12 kB      1.5 s" in str(autopar.Plan(record))
    assert "2 to 4" in render.table(record)


def test_collectives_that_are_hidden_rank_by_their_time():
    """Sums leave traces of exposed time."""
    rows = [module(name, compute_s=1.0, send_s=s, exposed_s=e) for name, s, e in (("a", 1.0, 1e-15), ("b", 2.0, 0.0))]
    assert [row.module for row in modules.costliest(program(modules=tuple(rows)))] == ["b", "a"]


def test_layers_cost_what_they_cost_together():
    rows = (module("a/layer0", compute_s=1.0, send_s=2.0, exposed_s=0.5), module("a/layer1", compute_s=3.0))
    costs = module_costs(program(modules=rows))
    assert costs == {"a/layer*": ModuleCost(compute_s=4.0, send_s=2.0, exposed_s=0.5, sent_bytes=8000.0)}
    assert within(costs) == {("a",): 4.5, ("a", "layer*"): 4.5}
