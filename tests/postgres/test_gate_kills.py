"""Sessions that end in the middle of an admission leave all of it or nothing."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from headgate_sync.errors import StoreError
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.store import PgStore
from tests.backends import PostgresBackend
from tests.builders import envelope, steer
from tests.scenarios.gate import admit, ceiling, dispatched, rate_class, tokens

NAME = "headgate-victim"
BURST = 1_000_000
PATIENCE_S = 60
END = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE pid = (
  SELECT pid FROM pg_stat_activity
  WHERE application_name = %s AND state = 'active' ORDER BY random() LIMIT 1
)
"""


def busy(store: Any, name: str, over: threading.Event, done: list[int]) -> None:
    """Enqueue, admit and ack until it is over, whatever gets lost."""
    turn = 0
    while not over.is_set():
        turn += 1
        with suppress(StoreError):
            store.enqueue(
                [
                    envelope(
                        f"{name}-{turn}-{n}",
                        partition_key=str(n % 5),
                        rate_class="c",
                        weight=1 + n % 3,
                        fingerprint="",
                    )
                    for n in range(10)
                ]
            )
            claims = admit(store, 12).claims
            done.append(len(claims))
            store.ack_batch(
                [Ack(lease=c.lease_ref, outcome=Outcome.SUCCESS) for c in claims[::2]]
            )


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_admissions_that_are_cut_off_leave_consistent_books(
    postgres: PostgresBackend, database_url: str, admin: psycopg.Connection[Any]
) -> None:
    quiet = postgres.make_store()
    rate_class(quiet, "c", "0/1000", BURST)
    ceiling(quiet, 40, "queue")
    luck, ended = random.Random(1), 0
    with ConnectionPool(
        database_url, kwargs={"application_name": NAME}, max_size=6, open=True
    ) as pool:
        store = PgStore(pool, heartbeat_connection=False)
        over, done = threading.Event(), list[int]()
        threads = [
            threading.Thread(target=busy, args=(store, f"t{n}", over, done))
            for n in range(4)
        ]
        give_up_at_s = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.start()
        while ended <= 10 or sum(done) <= 60:
            assert time.monotonic() < give_up_at_s
            # Any point of a call: the next victim is whoever is at it.
            over.wait(luck.random() / 10)
            ended += len(admin.execute(END, [NAME]).fetchall())
        over.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        store.close()
    rows = postgres.snapshot().jobs.values()
    claimed = [row for row in rows if row["fence"]]
    assert len(claimed) > 50
    assert {row["fence"] for row in claimed} == {1}
    # Tokens and the ledger moved by exactly what was claimed and committed.
    assert tokens(quiet, "c") == BURST - sum(row["weight"] for row in claimed)
    assert dispatched(postgres, "q") == [len(claimed)]
    postgres.audit()
    while quiet.maintenance.gate_fold(10_000):
        pass
    assert sum(quiet.maintenance.gate_reconcile(100) for _ in range(4)) == 0
    steer(quiet).delete_concurrency_limit("limit")
    waiting = sum(row["state"] == "available" for row in rows)
    rest = 0
    while batch := admit(quiet, 500):
        rest += len(batch)
    assert rest == waiting


@pytest.mark.parametrize("limit", [None, 1_000])
def test_an_enqueue_that_stays_open_delays_nobody(
    postgres: PostgresBackend, database_url: str, limit: int | None
) -> None:
    store = postgres.make_store()
    steer(store).set_enqueue_limit("q", limit)
    rate_class(store, "c", "100/1000", 100)
    with psycopg.connect(database_url) as caller:
        tx = store.transactional.join(caller)
        store.transactional.enqueue_tx(tx, [envelope("open", rate_class="c")])
        started = time.monotonic()
        store.enqueue([envelope(f"n{n}", rate_class="c") for n in range(3)])
        claims = admit(store).claims
        assert [claim.envelope.id for claim in claims] == ["n0", "n1", "n2"]
        assert store.renew([c.lease_ref for c in claims], lease_ms=60_000) == []
        for claim in claims:
            store.ack(claim.lease_ref, Outcome.SUCCESS, actual_weight=0)
        store.enqueue([envelope("another")])
        # A call that waited for the transaction would wait for ever.
        assert time.monotonic() - started < 5
        caller.commit()
    assert len(admit(store)) == 2
