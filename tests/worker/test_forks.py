"""Processes that a handler forks: they end where they leave its code.

Their one thread would go on as the worker's, with the job and connections of another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.binding import BatchJob
from headgate_sync.context import JobContext
from headgate_sync.lifecycle import State
from tests.builders import state_of
from tests.worker.test_batching import begin, bench_of
from tests.worker.test_batching import put as put_batch
from tests.worker.test_runner import put, running


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        (lambda: None, 1),
        (sys.exit, 0),
        (lambda: sys.exit(3), 3),
        (lambda: sys.exit("why"), 1),
        (lambda: 1 / 0, 1),
    ],
)
def test_a_process_that_a_handler_forks_ends_where_it_leaves_the_handler(
    store: Any, leave: Callable[[], object], code: int
) -> None:
    """Its one thread must not go on with the job of its parent."""
    parent = os.getpid()

    def handler() -> int:
        pid = os.fork()
        if pid == 0:
            leave()
            return -1
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    bench = running(store, handler, retention="1m")
    put(store, "a", retention_ms=60_000)
    try:
        bench.run_next()
    finally:
        if os.getpid() != parent:
            os._exit(99)
    assert state_of(store, "a") is State.COMPLETED
    assert store.results.read_result("a").data == str(code).encode()


@pytest.mark.parametrize("leave", [lambda: None, sys.exit, lambda: 1 / 0])
def test_a_process_that_is_forked_inside_of_once_leaves_its_transaction_alone(
    postgres: Any, leave: Callable[[], object]
) -> None:
    store, seen = postgres.make_store(), []
    own = "SELECT pg_current_xact_id()"

    def work(tx: Any) -> None:
        before = tx.connection.execute(own).fetchone()
        pid = os.fork()
        if pid == 0:
            leave()
            return
        os.waitpid(pid, 0)
        seen.append(tx.connection.execute(own).fetchone() == before)

    def handler(ctx: JobContext) -> None:
        parent = os.getpid()
        try:
            ctx.once(work)
        finally:
            if os.getpid() != parent:
                os._exit(99)

    bench = running(store, handler, retention="1m")
    put(store, "a", retention_ms=60_000)
    bench.run_next()
    assert seen == [True]
    assert state_of(store, "a") is State.COMPLETED


def test_a_process_that_a_tracked_thread_forks_ends_where_it_leaves_it(
    store: Any,
) -> None:
    codes: list[int] = []

    def beside() -> None:
        pid = os.fork()
        if pid == 0:
            return
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def handler(ctx: JobContext) -> None:
        ctx.spawn(beside)

    bench = running(store, handler, retention="1m")
    put(store, "a", retention_ms=60_000)
    bench.run_next()
    assert codes == [1]
    assert state_of(store, "a") is State.COMPLETED


def test_a_process_that_a_batch_handler_forks_ends_where_it_leaves_the_handler(
    store: Any,
) -> None:
    parent, codes = os.getpid(), []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        pid = os.fork()
        if pid == 0:
            sys.exit(3)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return [None] * len(jobs)

    put_batch(store, *"abc")
    bench = bench_of(store, handler)
    try:
        begin(bench)
    finally:
        if os.getpid() != parent:
            os._exit(99)
    assert codes == [3]
