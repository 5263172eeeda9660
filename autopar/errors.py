"""The exceptions of autopar, as one tree. Every message has the place, the expected and the actual value, and a hint.

A violated invariant of autopar itself is an `assert` instead: a bug to report, which users cannot fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autopar.common.text import text_of_bytes


class AutoparError(Exception):
    """The base class of all errors of autopar; `except autopar.errors.AutoparError` catches them all.

    Attributes:
        where: The argument, module path, stage, file or source line of the error.
        expected: The expected value.
        got: The actual value.
        hint: The remedy.
    """

    def __init__(self, *, where: str, expected: str, got: str, hint: str) -> None:
        self.where = where
        self.expected = expected
        self.got = got
        self.hint = hint
        super().__init__(f"{where}: expected {expected}, got {got}\n  hint: {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle their positional arguments by default; ours have names, and cross processes in workers.
        return _restore, (type(self), str(self), dict(self.__dict__))


def _restore(kind: type[AutoparError], message: str, fields: dict[str, Any]) -> AutoparError:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(fields)
    return error


class InvalidArgumentError(AutoparError, ValueError):
    """An invalid argument or option."""


class BatchMismatchError(AutoparError, ValueError):
    """The leaves of a batch disagree about the number of examples, or the plan cannot divide that number."""


class MissingCompilerError(AutoparError, ImportError):
    """The compiler for absent hardware is not installed."""


class MissingPackageError(AutoparError, ImportError):
    """A package that only some uses need is not installed."""


class NotEnoughDevicesError(AutoparError):
    """A plan or a cluster names more devices than this program has."""


class PlanFormatError(AutoparError, ValueError):
    """A saved plan cannot be read: another format version, or a damaged file."""


class PlanMismatchError(AutoparError):
    """A plan was made for another step, other shapes or another mesh."""


class CheckpointNotFoundError(AutoparError):
    """There is no checkpoint in a folder, or none of the step that is asked for."""


class CheckpointFormatError(AutoparError, ValueError):
    """A checkpoint cannot be read: a newer format, a damaged file, or paths that lead out of its folder."""


class CheckpointMismatchError(AutoparError):
    """A checkpoint holds another tree, other shapes or other types than the state that it is to become."""


class CheckpointFolderInUseError(AutoparError):
    """Another run, which is alive, writes to a folder of checkpoints."""


class DonatedStateError(AutoparError):
    """A state was used again after a step took it over (its buffers now hold the new state)."""


class NonFiniteError(AutoparError, FloatingPointError):
    """A step made numbers that are not finite, with `jax_debug_nans` or `jax_debug_infs` set."""


class UnsupportedError(AutoparError):
    """A correct program that autopar cannot parallelise."""


class MixedExamplesError(UnsupportedError):
    """A step that cannot be split into micro-batches: the result of one example depends on the others."""


class ScheduleError(AutoparError):
    """An invalid pipeline order: an instruction is missing, too early or waits forever, or a buffer is never freed."""


class SolverError(AutoparError):
    """The solver ended without a plan, for another reason than memory."""


class ProcessMismatchError(AutoparError):
    """The processes of one program do not call the same step in the same order, or pass arguments that do not match."""


class ProcessLostError(AutoparError):
    """Another process of this program died, ended early or does not answer, so that a step cannot finish."""


class MemoryLimitError(AutoparError):
    """No plan fits into the memory of the devices.

    Attributes:
        limit_bytes: Memory of one device that the plan may use.
        needed_bytes: Bytes on one device of the plan nearest to fitting: of a given plan, of a recipe with stages, else
            of the smallest plan of one program; the hint gives the bytes of stages.
        largest: (name, bytes on one device) of the largest tensors that are alive at the peak, largest first.
    """

    def __init__(
        self, *, where: str, limit_bytes: int, needed_bytes: int, largest: Sequence[tuple[str, int]], hint: str
    ) -> None:
        assert needed_bytes > limit_bytes, f"{needed_bytes} bytes fit into {limit_bytes}"
        self.limit_bytes = limit_bytes
        self.needed_bytes = needed_bytes
        self.largest = tuple(sorted(largest, key=lambda item: -item[1]))
        names = ", ".join(f"{name} {text_of_bytes(size)}" for name, size in self.largest)
        super().__init__(
            where=where,
            expected=f"at most {text_of_bytes(limit_bytes)} per device",
            got=f"{text_of_bytes(needed_bytes)}, {text_of_bytes(self.bytes_over)} over"
            + (f" (largest at the peak: {names})" if names else ""),
            hint=hint,
        )

    def beside(self, attempts: Sequence[str]) -> MemoryLimitError:
        """This error with the other attempts in its hint."""
        hint = "; ".join([self.hint, *attempts])
        return type(self)(
            where=self.where,
            limit_bytes=self.limit_bytes,
            needed_bytes=self.needed_bytes,
            largest=self.largest,
            hint=hint,
        )

    @property
    def bytes_over(self) -> int:
        return self.needed_bytes - self.limit_bytes


# Checks of arguments, each of which raises InvalidArgumentError.


def expect_one_of(where: str, value: object, allowed: Iterable[str], hint: str, expected: str = "") -> None:
    """Raises unless the value is one of the allowed names, which are listed where `expected` does not say them."""
    names = tuple(allowed)
    if value not in names:
        expected = expected or " or ".join(repr(str(name)) for name in names)
        raise InvalidArgumentError(where=where, expected=expected, got=repr(value), hint=hint)


def expect_type(where: str, value: object, kind: type, expected: str, hint: str) -> None:
    """Raises unless the value is an instance, with the type that it has."""
    if not isinstance(value, kind):
        raise InvalidArgumentError(where=where, expected=expected, got=type(value).__name__, hint=hint)


def expect_step(where: str, value: object, methods: Sequence[str], hint: str, expected: str = "") -> None:
    """Raises unless the value has these methods of a step."""
    if not all(hasattr(value, name) for name in methods):
        expected = expected or "a step made by autopar.parallelize"
        raise InvalidArgumentError(where=where, expected=expected, got=type(value).__name__, hint=hint)


def expect_function(where: str, value: object, expected: str, hint: str) -> None:
    """Raises unless the value can be called."""
    if not callable(value):
        raise InvalidArgumentError(where=where, expected=expected, got=f"{value!r:.60}", hint=hint)


def expect_positive(where: str, value: object, expected: str, hint: str) -> None:
    """Raises unless the value is a whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(where=where, expected=expected, got=repr(value), hint=hint)
