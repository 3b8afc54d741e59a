"""Exceptions that fail when they are looked at still end in an outcome."""

from __future__ import annotations

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
