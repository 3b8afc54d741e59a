"""A store repeats no call whose answer got lost: only its caller knows if it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headgate_sync.errors import StoreUnavailable
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.store import PgStore
from tests.builders import (
    LEASE_MS,
    admit,
    claim_one,
    counts,
    crash_until_quarantined,
    enqueue,
    envelope,
    run_one,
    steer,
)
from tests.concurrency.threads import outcome_of
from tests.postgres.proxy import Proxy, proxy_to
from tests.postgres.watching import until

Call = Callable[[], object]
IN_TRANSACTION = b"Z\0\0\0\x05T"  # the server is ready, and nothing is committed yet


def _all_but_beginnings(data: bytes) -> bytes:
    return data if data.endswith(IN_TRANSACTION) else b""


class Line:
    """A store behind a line on which answers can get lost, and one beside it."""

    def __init__(self, proxy: Proxy, far: PgStore, near: Any, clock: Any) -> None:
        self._proxy = proxy
        self.far = far
        self.near = near
        self.clock = clock

    def lose_the_answer(self, call: Call, made: Call) -> None:
        """Make a call, and break the line once it has been committed.

        Of a call that is a transaction of several statements the last answer is lost.
        """
        steer(self.far).store_now_ms()  # the connection is there
        self._proxy.answers = _all_but_beginnings
        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(outcome_of, call, StoreUnavailable)
            try:
                until(made, "the commit")
            finally:
                self._proxy.answers = bytes  # for what the pool opens next
                self._proxy.cut()
            assert isinstance(sent.result(20), StoreUnavailable)


@pytest.fixture
def line(postgres: Any, database_url: str) -> Iterator[Line]:
    near = postgres.make_store()
    with proxy_to(database_url) as proxy:
        far = PgStore.connect(proxy.conninfo, pool_size=1, heartbeat_connection=False)
        yield Line(proxy, far, near, postgres.clock)
        far.close()


def admitting(line: Line) -> Call:
    enqueue(line.near, "a", "b")
    return lambda: admit(line.far, capacity=1)


def acking(line: Line) -> Call:
    ref = run_one(line.near, "a").lease_ref
    enqueue(line.near, "b")
    return lambda: line.far.ack_batch([Ack(lease=ref, outcome=Outcome.RETRY)])


def reclaiming(line: Line) -> Call:
    enqueue(line.near, "a", "b")
    admit(line.near)
    line.clock.advance_ms(LEASE_MS)
    return lambda: line.far.reclaim_expired(1)


def promoting(line: Line) -> Call:
    line.near.enqueue([envelope("a", delay_ms=5), envelope("b", delay_ms=5)])
    line.clock.advance_ms(5)
    return lambda: line.far.promote_due(1)


def evicting(line: Line) -> Call:
    enqueue(line.near, "a", "b", retention_ms=1)
    for claim in admit(line.near).claims:
        line.near.ack(claim.lease_ref, Outcome.SUCCESS)
    line.clock.advance_ms(1)
    return lambda: line.far.evict_retained(1)


def parking(line: Line) -> Call:
    enqueue(line.near, "a", "b", fingerprint="f")
    enqueue(line.near, "poison", queue="other", fingerprint="f")
    claim = claim_one(line.near, queues=("other",))
    crash_until_quarantined(line.near, line.clock, claim)
    return lambda: steer(line.far).quarantine_sweep(1)


def cancelling(line: Line) -> Call:
    enqueue(line.near, "a", "b")
    return lambda: steer(line.far).operator_cancel("a")


def deleting(line: Line) -> Call:
    enqueue(line.near, "a", "b")
    return lambda: steer(line.far).delete_job("a")


def replaying(line: Line) -> Call:
    enqueue(line.near, "a")
    return lambda: steer(line.far).replay_job("a")


@pytest.mark.parametrize(
    ("prepare", "after"),
    [
        (admitting, {"running": 1, "available": 1}),
        (acking, {"retryable": 1, "available": 1}),
        (reclaiming, {"retryable": 1, "running": 1}),
        (promoting, {"available": 1, "scheduled": 1}),
        (evicting, {"completed": 1}),
        (parking, {"quarantined": 2, "available": 1}),
        (cancelling, {"cancelled": 1, "available": 1}),
        (deleting, {"available": 1}),
        (replaying, {"available": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_call_whose_answer_is_lost_is_made_once(
    line: Line, prepare: Callable[[Line], Call], after: dict[str, int]
) -> None:
    call = prepare(line)
    before = counts(line.near)
    line.lose_the_answer(call, made=lambda: counts(line.near) != before)
    assert counts(line.near) == after
