"""The application whose handlers the tests of isolation run in processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs

from headgate_sync.app import Headgate
from headgate_sync.context import JobContext, current_job
from headgate_sync.errors import Unsupported
from headgate_sync.registry import Registry
from headgate_sync.signals import RateLimited, Revoke, Skip, Snooze

ROOT = Path(__file__).parents[2]

registry = Registry()
inside: ContextVar[str] = ContextVar("inside", default="")


class TooMany(Exception):
    retry_after = timedelta(seconds=90)


def is_failure(error: Exception) -> bool:
    return not isinstance(error, ConnectionError)


SIGNALS: dict[str, Callable[[], BaseException]] = {
    "skip": lambda: Skip("no such user"),
    "snooze": lambda: Snooze("5m"),
    "revoke": Revoke,
    "rate_limited": RateLimited,
    "error": lambda: ValueError("bad\nvalue"),
    "later": lambda: TooMany("slow down"),
    "no_failure": lambda: ConnectionError("reset"),
    "exit": lambda: SystemExit(3),
}


@registry.task("iso", is_failure=is_failure, retention="1h")
def iso(ctx: JobContext, how: str = "", code: int = 0) -> None:
    """End in the way that is asked for."""
    assert current_job() is ctx
    print("a line of the handler's own", end="")
    if how in SIGNALS:
        raise SIGNALS[how]()
    if how == "die":
        os._exit(code)
    if how == "spawn":
        ctx.spawn(sys.exit, 5)
    if how == "context":
        assert ctx.attempt == 0
        assert ctx.max_attempts == 25
        assert not ctx.cancelled
        for use in (
            lambda: ctx.step("a", print),
            lambda: ctx.report_progress(1, 2),
            lambda: ctx.persist_output(b""),
            lambda: ctx.record_result(b""),
            lambda: ctx.once(print),
            lambda: ctx.extend_lease("5m"),
            ctx.release,
        ):
            refused(use)


def refused(use: Callable[[], Any]) -> None:
    try:
        use()
    except Unsupported:
        return
    raise AssertionError("available in here")


@registry.task("mail")
@attrs.frozen
class Mail:
    to: str


@registry.handler(Mail)
def deliver(mail: Mail) -> None:
    """Deliver nothing."""
    if mail.to == "nobody":
        raise Skip("unknown")


@registry.task("result")
def result() -> Any:
    """Return what no process can hand over; nothing declares it."""
    return 5


@registry.task("scoped")
def scoped(fails: bool = False) -> None:
    """Look at what is around it."""
    assert inside.get() == current_job().job_id
    if fails:
        raise ValueError("of the handler")


@contextmanager
def scope() -> Iterator[None]:
    """Name the job, and fail after a handler that did not."""
    inside.set(current_job().job_id)
    yield
    if current_job().kind == "scoped":
        raise OSError("of the scope")


hg = Headgate()
hg.include(registry)
hg.configure_worker(around=[scope])
