"""Exceptions that fail when they are looked at still end in an outcome."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from tests.builders import envelope, job, state_of
from tests.worker.rig import Bench


def nasty(part: str, raised: type[BaseException]) -> type[Exception]:
    """An exception with one part that raises."""

    def fail(self: object) -> Any:
        raise raised("when looked at")

    made = property(fail) if part == "retry_after" else fail
    return type("Nasty", (Exception,), {part: made})


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["__str__", "__repr__", "retry_after"])
def test_an_error_that_cannot_be_looked_at_is_a_failed_attempt(
    store: Any, part: str, raised: type[BaseException]
) -> None:
    registry, kind = Registry(), nasty(part, raised)

    @registry.task("k")
    def fails() -> None:
        raise kind("said")

    store.enqueue([envelope("a", kind="k", payload=b"{}")])
    Bench(store, registry).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    (entry,) = job(store, "a").errors
    assert entry.error is not None
    assert "Nasty" in entry.error.splitlines()[0]


class Text(str):
    """A text none of whose methods works."""

    __slots__ = ()

    def _fail(self, *_: object, **__: object) -> Any:
        raise SystemExit("when looked at")

    __len__ = __str__ = __format__ = encode = partition = replace = _fail
    split = splitlines = startswith = strip = translate = _fail


class Odd(Exception):
    """Whatever it was made with is its text."""

    def __str__(self) -> str:
        said: str = self.args[0]
        return said


def chained(count: int) -> Exception:
    error = ValueError("first")
    for number in range(count):
        error, error.__cause__ = ValueError(f"cause {number}"), error
    return error


def circular() -> Exception:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def noted(notes: Any) -> Exception:
    error = ValueError("noted")
    error.__notes__ = notes
    return error


@pytest.mark.parametrize(
    "error",
    [
        Odd(Text("x")),
        Odd(5),
        chained(5_000),
        circular(),
        noted(5),
        noted([1, None, Text("x")]),
        noted(["x" * 100_000]),
        type("Stray", (Exception,), {"__module__": None})("x"),
        type("Q" * 10_000, (Exception,), {})("x"),
        SyntaxError("bad", ("f\0ile", 10**30, -5, "te\0xt")),
        OSError(2, "no", os.fsdecode(b"\xff\0")),
        ExceptionGroup("many", [chained(50), circular(), *map(ValueError, range(999))]),
        KeyError(threading.Lock()),
    ],
    ids=lambda error: type(error).__name__[:9],
)
def test_whatever_an_error_is_made_of_its_text_is_kept_and_bounded(
    store: Any, error: Exception
) -> None:
    registry = Registry()

    @registry.task("k")
    def fails() -> None:
        raise error

    store.enqueue([envelope("a", kind="k", payload=b"{}")])
    Bench(store, registry).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    (entry,) = job(store, "a").errors
    assert entry.error is not None
    assert 0 < len(entry.error.encode()) <= 8_192


@pytest.mark.parametrize("option", ["retry", "is_failure"])
def test_a_policy_that_ends_the_program_ends_no_attempt(
    store: Any, option: str
) -> None:
    registry = Registry()

    def leave(_: object) -> Any:
        raise SystemExit

    options: dict[str, Any] = {option: leave}

    @registry.task("k", **options)
    def fails() -> None:
        raise ValueError("said")

    store.enqueue([envelope("a", kind="k", payload=b"{}")])
    Bench(store, registry).run_next()
    assert state_of(store, "a") is State.RETRYABLE
