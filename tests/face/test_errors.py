"""Messages of errors: where, expected, got, what to do."""

import pickle
import re

import pytest

from autopar import errors

FIELDS = {"where": "batch['x']", "expected": "64 examples", "got": "60", "hint": "drop the last batch"}
PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.AutoparError) and kind is not errors.MemoryLimitError
]


def out_of_memory() -> errors.MemoryLimitError:
    return errors.MemoryLimitError(
        where="stage 2 of 4",
        limit_bytes=80_000_000_000,
        needed_bytes=83_200_000_000,
        largest=[("params['embed']", 412_000_000), ("layer7 activations", 6_000_000_000), ("step", 4)],
        hint="num_microbatches=16 would need 71 GB",
    )


@pytest.mark.parametrize("kind", PLAIN)
def test_the_message_says_all_four(kind):
    assert str(kind(**FIELDS)) == "batch['x']: expected 64 examples, got 60\n  hint: drop the last batch"


@pytest.mark.parametrize("kind", PLAIN)
def test_errors_cross_processes(kind):
    error = pickle.loads(pickle.dumps(kind(**FIELDS)))
    assert type(error) is kind
    assert str(error) == str(kind(**FIELDS))
    assert (error.where, error.expected, error.got, error.hint) == tuple(FIELDS.values())


def test_wrong_arguments_are_value_errors_too():
    assert {kind for kind in PLAIN if issubclass(kind, ValueError)} == {
        errors.InvalidArgumentError,
        errors.BatchMismatchError,
        errors.PlanFormatError,
        errors.CheckpointFormatError,
    }


def test_nothing_may_be_left_unsaid():
    with pytest.raises(TypeError, match="hint"):
        errors.SolverError(where="stage 1", expected="a plan", got="none")


def test_out_of_memory_names_what_is_over_and_the_largest_first():
    assert str(out_of_memory()) == (
        "stage 2 of 4: expected at most 80 GB per device, got 83.2 GB, 3.2 GB over "
        "(largest at the peak: layer7 activations 6 GB, params['embed'] 412 MB, step 4 B)\n"
        "  hint: num_microbatches=16 would need 71 GB"
    )


def test_out_of_memory_keeps_its_numbers_across_processes():
    error = pickle.loads(pickle.dumps(out_of_memory()))
    assert error.bytes_over == 3_200_000_000
    assert error.largest[0] == ("layer7 activations", 6_000_000_000)
    assert str(error) == str(out_of_memory())


def test_what_fits_is_no_memory_error():
    with pytest.raises(AssertionError, match="10 bytes fit into 20"):
        errors.MemoryLimitError(where="stage 1", limit_bytes=20, needed_bytes=10, largest=[], hint="none")


@pytest.mark.parametrize(
    ("check", "right", "wrong", "text"),
    [
        (lambda v: errors.expect_one_of("f(x)", v, ("a", "b"), "leave it out"), "a", "c", "'a' or 'b', got 'c'"),
        (lambda v: errors.expect_one_of("f(x)", v, {"a": 1}, "", "a name"), "a", 1, "a name, got 1"),
        (lambda v: errors.expect_type("f(x)", v, str, "a text", ""), "a", 1, "a text, got int"),
        (lambda v: errors.expect_function("f(x)", v, "a function", ""), len, 1.5, "a function, got 1.5"),
        (lambda v: errors.expect_positive("f(x)", v, "a number", ""), 1, 0, "a number, got 0"),
        (lambda v: errors.expect_positive("f(x)", v, "a number", ""), 2, True, "a number, got True"),
        (lambda v: errors.expect_step("f(x)", v, ("upper",), ""), "a", 1, "autopar.parallelize, got int"),
    ],
)
def test_checks_of_arguments_say_what_they_expect(check, right, wrong, text):
    check(right)
    with pytest.raises(errors.InvalidArgumentError, match=re.escape(text)) as caught:
        check(wrong)
    assert caught.value.where == "f(x)"
