"""Sharding rules of equations, written as `operands -> results; factors`.

Factors are letters, in order of appearance. Behind a factor's size stands what happens when it is split: nothing where
it passes, `+` where results are sums, `^` where they are combined by max and the like, `!` where it may not be split.
"""

import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.graph import FactorKind
from autopar.ir.rules import RuleBook, equation_key

MARK = {FactorKind.PASS: "", FactorKind.SUM: "+", FactorKind.EXTREMUM: "^", FactorKind.FIXED: "!"}
BOOK = RuleBook()


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def equation(function, *args, primitive=None):
    """The only equation of a function, or the only one of a primitive."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    (eqn,) = [e for e in eqns if primitive in (None, e.primitive.name)]
    return eqn


def rule_of(eqn, book=BOOK):
    book.learn([(equation_key(eqn), eqn)])
    return book.rule(equation_key(eqn))


def rule_text(function, *args, primitive=None):
    rule = rule_of(equation(function, *args, primitive=primitive))

    def tensor(dims):
        return "[" + ", ".join("*".join(string.ascii_lowercase[f] for f in dim) or "1" for dim in dims) + "]"

    operands = ", ".join(map(tensor, rule.operands))
    results = ", ".join(map(tensor, rule.results))
    sizes = " ".join(f"{string.ascii_lowercase[i]}={f.size}{MARK[f.kind]}" for i, f in enumerate(rule.factors))
    return f"{operands} -> {results}; {sizes}"


def test_matmul_sums_over_what_it_contracts():
    assert rule_text(jnp.matmul, shape(4, 8), shape(8, 2)) == "[a, b], [b, c] -> [a, c]; a=4 b=8+ c=2"


def test_batched_matmul():
    def product(a, b):
        return jax.lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))))

    assert rule_text(product, shape(2, 3, 4), shape(2, 4, 5)) == "[a, b, c], [a, c, d] -> [a, b, d]; a=2 b=3 c=4+ d=5"


def test_transpose_passes_all():
    assert rule_text(jnp.transpose, shape(2, 3)) == "[a, b] -> [b, a]; a=2 b=3"


def test_a_reshape_that_merges_keeps_both_factors_the_major_one_first():
    assert rule_text(lambda x: x.reshape(6, 4), shape(2, 3, 4)) == "[a, b, c] -> [a*b, c]; a=2 b=3 c=4"


def test_a_reshape_that_splits_a_dimension():
    assert rule_text(lambda x: x.reshape(2, 3, 4), shape(6, 4)) == "[a*b, c] -> [a, b, c]; a=2 b=3 c=4"


def test_a_reshape_across_boundaries_may_not_be_split():
    rule = rule_of(equation(lambda x: x.reshape(4, 3), shape(3, 4)))
    assert {rule.factors[f].kind for dim in rule.operands[0] for f in dim} == {FactorKind.FIXED}


def test_a_reshape_that_regroups_keeps_what_both_sides_have():
    assert rule_text(lambda x: x.reshape(8, 3), shape(4, 6)) == "[a, b*c] -> [a*b, c]; a=4 b=2 c=3"


def test_dimensions_of_size_one_have_no_factor():
    assert rule_text(jnp.add, shape(4, 1), shape(4, 1)) == "[a, 1], [a, 1] -> [a, 1]; a=4"


def test_rows_gathered_from_a_table_are_a_sum_over_a_split_table():
    text = rule_text(lambda table, i: table[i], shape(8, 4), shape(6, dtype=jnp.int32), primitive="gather")
    assert text == "[a, b], [c, 1] -> [c, b]; a=8+ b=4 c=6"


def test_rows_added_into_a_table_are_a_sum_over_the_updates():
    def add_rows(table, i, rows):
        return table.at[i].add(rows)

    text = rule_text(add_rows, shape(8, 4), shape(6, dtype=jnp.int32), shape(6, 4), primitive="scatter-add")
    assert text == "[a, b], [c, 1], [c, b] -> [a, b]; a=8 b=4 c=6+"


@pytest.mark.parametrize(("reduce", "mark"), [(jnp.sum, "+"), (jnp.max, "^"), (jnp.min, "^"), (jnp.prod, "^")])
def test_reductions_sum_or_combine_over_the_reduced_dimension(reduce, mark):
    assert rule_text(lambda x: reduce(x, axis=1), shape(4, 6)) == f"[a, b] -> [a]; a=4 b=6{mark}"


@pytest.mark.parametrize("run", [jax.lax.cumsum, jax.lax.cummax, jax.lax.sort])
def test_what_runs_along_a_dimension_keeps_it_whole(run):
    assert rule_text(lambda x: run(x, 1), shape(4, 6)) == "[a, b] -> [a, b]; a=4 b=6!"


def test_argmax_and_top_k_keep_the_searched_dimension_whole():
    assert rule_text(lambda x: jax.lax.argmax(x, 1, np.int32), shape(4, 6)) == "[a, b] -> [a]; a=4 b=6!"
    text = rule_text(lambda x: jax.lax.top_k(x, 2), shape(4, 6))
    assert text == "[a, b] -> [a, c], [a, d]; a=4 b=6! c=2! d=2!"


def test_a_convolution_splits_batch_and_channels_but_not_the_image():
    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    text = rule_text(convolve, shape(2, 8, 8, 3), shape(3, 3, 3, 4))
    assert text == "[a, b, c, d], [e, f, d, g] -> [a, b, c, g]; a=2 b=8! c=8! d=3+ e=3! f=3! g=4"


def test_random_bits_can_be_made_in_any_layout():
    key = jax.eval_shape(lambda: jax.random.key(0))
    text = rule_text(lambda key: jax.random.bits(key, (4, 6)), key, primitive="random_bits")
    assert text == "[] -> [a, b]; a=4 b=6"


@pytest.mark.parametrize("function", [lambda x: x**3, jax.lax.erf, jnp.exp, jax.lax.lgamma])
def test_elementwise_operations_pass_all(function):
    assert rule_text(function, shape(4, 6)) == "[a, b] -> [a, b]; a=4 b=6"


def test_a_broadcast_may_split_what_it_adds():
    text = rule_text(lambda x: jax.lax.broadcast_in_dim(x, (4, 6), (1,)), shape(6))
    assert text == "[a] -> [b, a]; a=6 b=4"


def test_concatenated_and_sliced_dimensions_stay_whole():
    text = rule_text(lambda a, b: jax.lax.concatenate([a, b], 1), shape(4, 6), shape(4, 2))
    assert text == "[a, b], [a, c] -> [a, d]; a=4 b=6! c=2! d=8!"
    assert rule_text(lambda x: x[:, 1:3], shape(4, 6), primitive="slice") == "[a, b] -> [a, c]; a=4 b=6! c=2!"


def test_an_iota_is_made_in_any_layout():
    assert rule_text(lambda: jax.lax.iota(jnp.int32, 4)) == " -> [a]; a=4"


def test_what_cannot_be_split_says_so():
    rule = rule_of(equation(lambda x: jax.lax.cumsum(x, axis=0), shape(4)))
    assert rule.note == "none of its dimensions can be split"
    assert rule_of(equation(jnp.exp, shape(1, 1))).note == ""  # there is nothing to split


def test_equal_equations_are_asked_about_once():
    book = RuleBook()
    first = equation(jnp.matmul, shape(4, 8), shape(8, 2))
    again = equation(jnp.matmul, shape(4, 8), shape(8, 2))
    other = equation(jnp.matmul, shape(4, 8), shape(8, 6))
    assert equation_key(first) == equation_key(again) != equation_key(other)
    book.learn([(equation_key(eqn), eqn) for eqn in (first, again, other)])
    assert book.asked == 2
    kept = RuleBook(book.known)
    assert rule_of(first, kept) == rule_of(again, book)
    assert kept.asked == 0


def test_books_of_one_process_share_what_they_learn():
    learned = {}
    eqn = equation(jnp.matmul, shape(4, 8), shape(8, 2))
    first, second = RuleBook(learned=learned), RuleBook(learned=learned)
    first.learn([(equation_key(eqn), eqn)])
    rule = learned[equation_key(eqn)]
    second.learn([(equation_key(eqn), None)])  # nothing is lowered: there is no equation to lower
    assert second.rule(equation_key(eqn)) is rule
    assert first.asked == second.asked == 1  # neither has it on disk


def test_a_literal_operand_is_part_of_what_an_equation_computes():
    def key(function):
        return equation_key(equation(function, shape(4)))

    assert key(lambda x: x * 2.0) == key(lambda x: x * 2.0) != key(lambda x: x * 3.0)


def test_literals_are_told_apart_by_all_their_digits_and_not_by_their_class():
    def key(number):
        with jax.enable_x64(True):
            return equation_key(equation(lambda x: x * number, jax.ShapeDtypeStruct((4,), "float64")))

    assert key(0.1234567891) == key(np.float64(0.1234567891)) != key(np.float64(0.1234567892))


def test_rules_learned_together_are_those_learned_alone():
    eqns = [
        equation(jnp.matmul, shape(4, 8), shape(8, 2)),
        equation(jnp.transpose, shape(4, 8)),
        equation(lambda x: jax.lax.cumsum(x, axis=1), shape(4, 8)),
        equation(lambda x: x.reshape(2, 2, 8), shape(4, 8)),
    ]
    together = RuleBook()
    together.learn([(equation_key(eqn), eqn) for eqn in eqns])
    assert [together.rule(equation_key(eqn)) for eqn in eqns] == [rule_of(eqn, RuleBook()) for eqn in eqns]
