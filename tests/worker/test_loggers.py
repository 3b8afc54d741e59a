"""A log that cannot be written harms neither a job nor a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate_sync.errors import AttemptTimeout, StoreUnavailable
from headgate_sync.lifecycle import State
from headgate_sync.loggers import guarded
from headgate_sync.registry import Registry
from tests.builders import envelope, job, state_of
from tests.worker.rig import Tap, wait_for, working

NAME = "headgate_sync.worker.tests"


class DirectlyBase(BaseException):
    pass


class Handler(logging.Handler):
    """Does what the test says with each record of this package."""

    def __init__(self, does: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self.does = does
        self.addFilter(logging.Filter("headgate_sync"))

    def emit(self, record: logging.LogRecord) -> None:
        self.does(record)


@contextmanager
def logging_to(does: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    handler, root = Handler(does), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def fails(error: BaseException) -> Callable[[logging.LogRecord], None]:
    def emit(record: logging.LogRecord) -> None:
        raise error

    return emit


def handler_threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("headgate-handler-")}


@pytest.mark.parametrize(
    "error", [ConnectionError("log server"), SystemExit(1), DirectlyBase()]
)
def test_a_worker_goes_on_where_every_line_fails(
    store: Any, error: BaseException
) -> None:
    registry, tap = Registry(), Tap(store)

    @registry.task("k")
    def handler() -> None:
        raise ValueError("x")  # one line each

    ids = [f"j{number}" for number in range(20)]
    with logging_to(fails(error)), working(tap, registry, lease="900ms") as worker:
        before = handler_threads()
        store.enqueue([envelope(id, kind="k", payload=b"{}") for id in ids])
        for name in ("admit", "duty_tick"):
            tap.fail(name, StoreUnavailable("away"))  # and these log one
        wait_for(
            lambda: {state_of(store, id) for id in ids} == {State.RETRYABLE},
            "all have failed once",
        )
        assert handler_threads() == before
        assert all(loop.alive for loop in worker.health().threads.values())
    assert {job(store, id).attempt for id in ids} == {1}
    assert worker.exit_status is not None
    assert worker.exit_status.code == 0


def test_what_a_log_handler_raises_is_printed(capsys: Any) -> None:
    with logging_to(fails(ConnectionError("log server is away"))):
        guarded(NAME).warning("a line of %d", 7)
    assert "ConnectionError: log server is away" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AttemptTimeout("time")])
def test_what_is_meant_for_the_thread_passes(error: BaseException) -> None:
    with logging_to(fails(error)), pytest.raises(type(error)):
        guarded(NAME).warning("a line")


def test_a_line_names_the_function_that_wrote_it() -> None:
    seen: list[tuple[str, str, str]] = []

    def note(record: logging.LogRecord) -> None:
        seen.append((record.name, record.funcName or "", record.getMessage()))

    def writes() -> None:
        log = guarded(NAME)
        log.warning("one")
        try:
            raise ValueError("x")
        except ValueError:
            log.exception("two")

    with logging_to(note):
        writes()
    assert seen == [(NAME, "writes", "one"), (NAME, "writes", "two")]
