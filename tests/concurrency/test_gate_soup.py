"""A crowd on the gate: at no instant is a limit exceeded, and no work is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from headgate_sync.lifecycle import Outcome
from headgate_sync.memory.store import MemStore
from headgate_sync.store import Store
from tests.backends import Backend, PostgresBackend
from tests.builders import DAY_MS, admit, counts, steer
from tests.concurrency.gate_rules import (
    CEILINGS,
    LONGEST_CALL_S,
    QUEUES,
    Claimed,
    Member,
    check_budget,
    check_fences,
    crowded_by,
    set_up,
)
from tests.concurrency.threads import together

CALLS = 480  # of all threads together
CALLS_OF_A_PROCESS = 60
SAMPLE = """
SELECT queue, partition_key, rate_class FROM headgate.headgate_job
WHERE state = 'running'
"""


@contextmanager
def sampler_of(store: Store, url: str) -> Iterator[Callable[[], list[Any]]]:
    """Reads what runs at one instant, inside the store."""
    if isinstance(store, MemStore):
        yield lambda: [
            (row["queue"], row["partition_key"], row["rate_class"])
            for row in store.snapshot()["jobs"]
            if row["state"] == "running"
        ]
        return
    with psycopg.connect(url, autocommit=True) as connection:
        yield lambda: connection.execute(SAMPLE).fetchall()


@contextmanager
def watched(store: Store, url: str, clock: Any) -> Iterator[list[str]]:
    """Let store time pass and look at what runs, over and over; yields the mistakes."""
    mistakes: list[str] = []
    over = threading.Event()

    def watch() -> None:
        with sampler_of(store, url) as sample:
            while not over.wait(0.005):
                clock.advance_ms(7)
                mistakes.extend(crowded_by(sample()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield mistakes
    finally:
        over.set()
        thread.join()


def drain(store: Store, clock: Any) -> None:
    """With all policies open everything that waits is handed out and ends."""
    inspect = steer(store)
    for queue in QUEUES:
        inspect.set_queue_paused(queue, False)
    for limit in CEILINGS:
        inspect.delete_concurrency_limit(limit.name)
    for name in ("metered", "narrow"):
        inspect.delete_rate_class(name)
    for _ in range(3):
        clock.advance_ms(DAY_MS)
        while store.reclaim_expired(1_000) or store.promote_due(1_000):
            pass
    for worker in ("w1", "w2"):
        while batch := admit(store, worker=worker, queues=QUEUES, capacity=1_000):
            for claim in batch.claims:
                store.ack(claim.lease_ref, Outcome.SUCCESS)
    unfinished = {"pending", "scheduled", "available", "running", "retryable"}
    assert not unfinished & set(counts(store)), counts(store)


def conclude(
    store: Store, backend: Backend, log: list[Claimed], mistakes: list[str]
) -> None:
    assert mistakes == []
    assert len(log) > 50
    check_fences(log)
    check_budget(log)
    # Also in the counters, once everything that was appended is folded.
    backend.audit()
    if store.maintenance is not None:
        while store.maintenance.gate_fold(10_000):
            pass
        assert sum(store.maintenance.gate_reconcile(100) for _ in range(8)) == 0
    drain(store, backend.clock)


@pytest.mark.parametrize("threads", [4, 8, 16])
def test_threads_keep_every_limit_at_every_instant(
    backend: Backend, make_store: Any, database_url: str, threads: int
) -> None:
    store = make_store(crash_limit=1_000)
    set_up(store)
    members = [Member(store, f"m{n}") for n in range(threads)]

    def run(member: Member) -> None:
        for _ in range(CALLS // threads):
            member.act()

    with watched(store, database_url, backend.clock) as mistakes:
        together([lambda member=member: run(member) for member in members])
    assert max(member.slowest_s for member in members) < LONGEST_CALL_S
    log = [claim for member in members for claim in member.log]
    conclude(store, backend, log, mistakes)


def test_processes_keep_every_limit_whatever_their_clocks_say(
    crowd: PostgresBackend, database_url: str
) -> None:
    store = crowd.make_store(crash_limit=1_000)
    set_up(store)
    command = [sys.executable, "-m", "tests.concurrency.gate_process"]
    calls = str(CALLS_OF_A_PROCESS)
    with watched(store, database_url, crowd.clock) as mistakes:
        running = [
            subprocess.Popen(
                [
                    *command,
                    f"p{n}",
                    database_url,
                    calls,
                    str(ahead_s),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for n, ahead_s in enumerate((0, 60, -60, 86_400))
        ]
        try:
            told = [each.communicate(timeout=120)[0] for each in running]
        finally:
            for each in running:
                if each.poll() is None:
                    each.kill()
                    each.wait()
    assert [each.returncode for each in running] == [0] * len(running)
    answers = [json.loads(text) for text in told]
    assert max(answer["slowest_s"] for answer in answers) < LONGEST_CALL_S
    log = [Claimed(**claim) for answer in answers for claim in answer["log"]]
    conclude(store, crowd, log, mistakes)
