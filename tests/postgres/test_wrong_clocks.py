"""A worker whose clock is wrong takes nothing away and brings nothing forward."""

from __future__ import annotations

import subprocess
import sys

import pytest
from psycopg_pool import ConnectionPool

from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.builders import claim_one, enqueue, job, state_of
from tests.servers import new_database
from tests.worker.rig import PATIENCE_S, wait_for

MINUTE_MS = 60_000
WORKER = """
import sys, time
real, real_ns, ahead_s = time.time, time.time_ns, int(sys.argv[2])
time.time = lambda: real() + ahead_s
time.time_ns = lambda: real_ns() + ahead_s * 10**9
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from headgate_sync.worker import Worker, WorkerConfig
store = PgStore.connect(sys.argv[1])
config = WorkerConfig(queues=("of nobody",), worker_id="wrong", duty_interval="50ms")
with Worker(store, Registry(), config):
    sys.stdin.read()
store.close()
"""
HOLDERS = "SELECT name, holder FROM headgate.headgate_duty"


@pytest.mark.parametrize("ahead_s", [-600, 600])
def test_the_upkeep_of_a_worker_goes_by_the_clock_of_the_server(server_url, ahead_s):
    with new_database(server_url) as url:
        migrate_up(url)
        with ConnectionPool(url, min_size=1, open=True) as pool:
            store = PgStore(pool)
            enqueue(store, "held", queue="a")
            claim_one(store, queues=("a",), lease_ms=MINUTE_MS)
            enqueue(store, "later", delay_ms=MINUTE_MS)
            enqueue(store, "kept", queue="b", retention_ms=MINUTE_MS)
            store.ack(claim_one(store, queues=("b",)).lease_ref, Outcome.SUCCESS)
            assert store.claim_duty("quarantine", "right", MINUTE_MS)
            # What is due shows that all sweeps have run.
            enqueue(store, "lost", queue="c")
            claim_one(store, queues=("c",), lease_ms=1)
            enqueue(store, "due", delay_ms=1)
            enqueue(store, "lapsed", queue="d", retention_ms=1)
            store.ack(claim_one(store, queues=("d",)).lease_ref, Outcome.SUCCESS)
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, url, str(ahead_s)], stdin=subprocess.PIPE
            )
            try:
                wait_for(lambda: job(store, "lost").crash_attempt == 1, "a reclaim")
                wait_for(lambda: state_of(store, "due") == "available", "a promotion")
                wait_for(lambda: state_of(store, "lapsed") == "deleted", "an eviction")
                with pool.connection() as connection:
                    holders = dict(connection.execute(HOLDERS).fetchall())
            finally:
                process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
            assert holders.pop("quarantine") == "right"
            assert len(set(holders.values())) == 1
            assert (job(store, "held").state, job(store, "held").fence) == (
                "running",
                1,
            )
            assert state_of(store, "later") == "scheduled"
            assert state_of(store, "kept") == "completed"
            waits_ms = job(store, "lost").scheduled_at_ms - store.inspect.store_now_ms()
            assert waits_ms <= 1_000
            store.close()
