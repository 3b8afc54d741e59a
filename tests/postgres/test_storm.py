"""All kinds of calls at once on a few jobs: counters hold and nothing deadlocks."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack, closing

import pytest
from psycopg_pool import ConnectionPool

from headgate_sync.errors import (
    DuplicateJob,
    FingerprintQuarantined,
    IdConflict,
    LeaseRejected,
    NotFound,
    StoreError,
)
from headgate_sync.lease import Ack, Checkpoint, JobResult, ProgressUpdate
from headgate_sync.lifecycle import ACKABLE, Outcome
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from headgate_sync.worker import Worker, WorkerConfig
from tests.backends import SCHEMA
from tests.builders import DAY_MS, admit, counts, enqueue, envelopes, steer
from tests.contract.test_schedules import schedule
from tests.postgres.watching import until

# Answers to calls that came too late.
LATE = (
    LeaseRejected, NotFound, ValueError, DuplicateJob, IdConflict,
    FingerprintQuarantined,
)  # fmt: skip


def deadlocks(admin):
    admin.execute("SELECT pg_stat_clear_snapshot()")
    return admin.execute(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    ).fetchone()[0]


class Storm:
    """Threads that make random calls on a few jobs, with stale leases among them."""

    def __init__(self, store, clock, seed):
        self.store = store
        self.clock = clock
        self.random = random.Random(seed)
        self.refs = []
        self.names = [f"s{number}" for number in range(60)]
        self.unexpected = []

    def run(self, calls):
        for _ in range(calls):
            call = self.random.choice(
                [
                    self.enqueue, self.admit, self.admit, self.ack, self.ack,
                    self.renew, self.renew, self.sweep, self.steer, self.write,
                    self.quarantine, self.upkeep,
                ]
            )  # fmt: skip
            try:
                call()
            except LATE:
                continue
            except StoreError as error:
                self.unexpected.append(error)

    def enqueue(self):
        names = self.random.sample(self.names, 8)
        for queue in ("q", "r"):
            self.store.enqueue(
                envelopes(
                    *[f"{name}{queue}" for name in names],
                    queue=queue,
                    partition_key=self.random.choice("xy"),
                    rate_class=self.random.choice(["", "c"]),
                    fingerprint=self.random.choice("fgh"),
                    retention_ms=self.random.choice([0, 5]),
                    tags=("t",),
                )
            )

    def admit(self):
        claims = admit(self.store, capacity=12, queues=("q", "r"), lease_ms=5).claims
        self.refs = (self.refs + [claim.lease_ref for claim in claims])[-60:]

    def some(self):
        return self.random.sample(self.refs, min(len(self.refs), 25))

    def ack(self):
        outcomes = sorted(ACKABLE)
        acks = []
        for ref in self.some():
            outcome = self.random.choice(outcomes)
            delays = {Outcome.SNOOZE: 3, Outcome.RATE_LIMITED: 1, Outcome.RETRY: 60}
            acks.append(
                Ack(
                    lease=ref,
                    outcome=outcome,
                    delay_ms=delays.get(outcome),
                    actual_weight=self.random.choice([None, 0, 2]),
                )
            )
        self.store.ack_batch(acks)

    def renew(self):
        self.store.renew(self.some(), lease_ms=5)

    def sweep(self):
        self.store.reclaim_expired(20)
        self.store.promote_due(20)
        self.store.evict_retained(20)

    def steer(self):
        verbs = steer(self.store)
        for _ in range(3):
            verb = self.random.choice(
                [verbs.operator_cancel, verbs.operator_retry, verbs.delete_job]
            )
            verb(self.random.choice(self.names) + self.random.choice("qr"))

    def write(self):
        ref = self.random.choice(self.refs) if self.refs else None
        if ref is not None:
            self.store.checkpoint(ref, Checkpoint(in_progress_step="s"))
            self.store.outputs.write_job_output(ref, JobResult(1, b"x"))
            self.store.progress.write_job_progress(ref, ProgressUpdate(1, 2))

    def quarantine(self):
        steer(self.store).quarantine_sweep(20)
        steer(self.store).quarantine_release(self.random.choice("fgh"))

    def upkeep(self):
        self.clock()
        self.store.maintenance.gate_fold(50)
        self.store.maintenance.gate_reconcile(10)


@pytest.mark.slow
def test_a_storm_of_calls_ends_without_a_deadlock(postgres, admin, database_url):
    """Counters and rows are compared at the end, as after every test."""
    before = deadlocks(admin)
    stepping = threading.Lock()

    def step():
        with stepping:
            postgres.clock.advance_ms(3)

    with ExitStack() as stack:
        pool = stack.enter_context(
            ConnectionPool(database_url, min_size=8, max_size=8, open=True, timeout=60)
        )
        stores = [
            PgStore(pool, SCHEMA, crash_limit=2, pool_timeout_ms=60_000)
            for _ in range(8)
        ]
        for store in stores:
            stack.callback(store.close)
        storms = [Storm(store, step, seed) for seed, store in enumerate(stores)]
        blowing = [threading.Thread(target=storm.run, args=(60,)) for storm in storms]
        for thread in blowing:
            thread.start()
        for thread in blowing:
            thread.join()
    assert [error for storm in storms for error in storm.unexpected] == []
    assert deadlocks(admin) == before


@pytest.mark.slow
def test_workers_that_start_at_one_moment_share_what_an_outage_left(
    postgres, admin, database_url
):
    """Lapsed leases, due retries and ticks and finished jobs, thousands of each."""
    before = deadlocks(admin)
    store, clock = postgres.make_store(), postgres.clock
    for kind, number in (("lost", 4_000), ("due", 2_000), ("over", 2_000)):
        names = [f"{kind}{place}" for place in range(number)]
        for start in range(0, number, 1_000):
            batch = names[start : start + 1_000]
            enqueue(store, *batch, fingerprint="", retention_ms=1)
            refs = [c.lease_ref for c in admit(store, capacity=1_000).claims]
            if kind != "lost":
                outcome = Outcome.RETRY if kind == "due" else Outcome.SUCCESS
                store.ack_batch([Ack(lease=ref, outcome=outcome) for ref in refs])
    for place in range(40):
        spec = schedule(f"s{place}", queue="ticks", next_run_ms=clock.now_ms())
        steer(store).upsert_schedule(spec)
    clock.advance_ms(DAY_MS)
    gate = threading.Barrier(8)
    with ExitStack() as stack:
        workers = []
        for number in range(8):
            own = stack.enter_context(closing(PgStore.connect(database_url, SCHEMA)))
            config = WorkerConfig(
                queues=("elsewhere",), worker_id=f"w{number}", duty_interval="20ms"
            )
            worker = Worker(own, Registry(), config)
            stack.callback(worker.stop)
            workers.append(worker)

        def run(worker):
            gate.wait()
            worker.run(install_signal_handlers=False)

        running = [threading.Thread(target=run, args=(worker,)) for worker in workers]
        for thread in running:
            thread.start()
        until(
            lambda: counts(store) == {"retryable": 4_000, "available": 2_040},
            "all is put in order",
        )
        told = [worker.health().threads for worker in workers]
        for worker in workers:
            worker.stop()
        for thread in running:
            thread.join()
    assert [worker.exit_status.code for worker in workers] == [0] * 8
    assert {loop.failures for loops in told for loop in loops.values()} == {0}
    assert deadlocks(admin) == before
