"""Random programs under random ways of planning give what plain `jax.jit` gives."""

import jax
import numpy as np
import pytest

from benchmarks.random_programs.forms import FORMS
from benchmarks.random_programs.generator import generate
from benchmarks.random_programs.modes import Bench, Mode, difference, modes_of, modes_of_rules


def test_a_seed_is_one_program():
    assert generate(5).source == generate(5).source
    assert generate(5).source != generate(6).source
    assert modes_of(generate(5), 4) == modes_of(generate(5), 4)


def test_smaller_variants_still_run(tmp_path):
    program = generate(8)
    smaller = [v for v in program.variants() if len(v.source) < len(program.source)]
    assert smaller
    for i, variant in enumerate(smaller[:6]):
        step = Bench(variant, {}, tmp_path / str(i)).module
        jax.eval_shape(step.step, *step.arguments())


def test_what_counts_as_equal():
    def compared(expected, got, noise=0.0):
        return difference([jax.numpy.asarray(expected)], [jax.numpy.asarray(got)], [[noise]])

    a = np.float32([1.0, np.nan, 3.0])
    assert compared(a, a + np.float32(1e-6)) == ""
    assert "off by" in compared(a, a + np.float32(1e-4))
    assert compared(a, a + np.float32(1e-4), noise=1e-4) == ""
    assert "off by inf" in compared(a, np.float32([1.0, 2.0, 3.0]))
    assert "off by" in compared(np.int32([1, 2]), np.int32([1, 3]))
    assert "is right" in compared(np.int32([1, 2]), np.float32([1, 2]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 8])
def test_equals_plain_jit_or_is_refused_by_name(seed, tmp_path):
    program, rules = generate(seed), {}
    bench = Bench(program, rules, tmp_path)
    for mode in modes_of(program, 1):
        outcome = bench.run(mode)
        assert outcome.kind in ("equal", "refused"), f"{mode.text}: {outcome}\n{program.source}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_two_hundred_programs(first, tmp_path):
    rules: dict = {}
    for seed in range(first, first + 20):
        program = generate(seed)
        bench = Bench(program, rules, tmp_path)
        for mode in modes_of(program, 2):
            outcome = bench.run(mode)
            assert not outcome.failed, f"seed {seed}, {mode.text}: {outcome}\n{program.source}"


def test_the_free_search_of_a_known_program_splits(tmp_path):
    """The cluster is one on which splitting pays even for programs as small as these."""
    bench = Bench(generate(2), {}, tmp_path)
    plan = bench._step(Mode(name="free search", devices=4)).plan(*bench.arguments(False))
    assert any(not s.is_fully_replicated for s in jax.tree.leaves((plan.state_shardings, plan.batch_shardings)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [501, 504])
def test_a_program_as_layers_gives_the_same_in_each_form(seed, tmp_path):
    """All but that of cast parameters compute the same; in micro-batches each form gives what plain jit makes of it."""
    rules: dict = {}
    losses = {}
    for form in FORMS[1:]:
        program = generate(seed, form)
        bench = Bench(program, rules, tmp_path)
        outcomes = [bench.run(mode) for mode in modes_of_rules(program)[:1]]
        assert {outcome.kind for outcome in outcomes} <= {"equal", "refused"}, outcomes
        results = jax.tree.leaves(bench.module.step(*bench.arguments(False)))
        losses[form] = [np.asarray(x) for x in results]
    for form in ("unrolled", "checkpointed"):
        for a, b in zip(losses["scanned"], losses[form], strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
