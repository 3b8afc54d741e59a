"""A hundred thousand jobs in a database of their own, as after a bad night.

All is reached by ordinary calls over a hundred minutes of store time, so that states,
figures and histories agree; from then on the clock runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from headgate_sync.envelope import Envelope
from headgate_sync.lease import Ack, Checkpoint, Claim, ProgressUpdate
from headgate_sync.lifecycle import Outcome
from headgate_sync.loglines import LogLine
from headgate_sync.policy import BudgetConfig, Ceiling, OnSaturated, RateClassConfig
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from headgate_sync.schedule import Schedule, ScheduleEvent, TickOutcome
from tests import testschema
from tests.backends import SCHEMA, PostgresBackend
from tests.builders import DAY_MS, admit, beat, envelope, steer
from tests.servers import new_database

JOBS, BATCH = 100_000, 1_000
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
BATCHES = JOBS // BATCH
STEP_MS = MINUTE_MS
BIG, POISONED = "mail/eu", "thumbnails/us"
CLOSED, PAUSED, RETIRED = "webhooks/ap", "reports/ap", "reports/us"
NAMED = tuple(
    f"{name}/{region}"
    for name in ("mail", "exports", "billing", "webhooks", "search", "reports")
    for region in ("eu", "us", "ap")
)
SHARDS = tuple(f"import/shard-{number:02}" for number in range(100))
KINDS = ("mail:welcome", "mail:receipt", "export:csv", "hook:deliver", "index:page")
CLASSES = ("mailer", "crm-api", *(f"partner-{number:02}" for number in range(28)))
TENANTS, POISON, WORKERS, SCHEDULES, EVENTS = 150, 120, 120, 120, 90
TRACE = """Traceback (most recent call last):
  File "/srv/shop/tasks/mail.py", line 88, in send
    answer = session.post(url, json=body, timeout=10)
ConnectionError: smtp.example.org refused the connection after 10 s"""


@contextmanager
def loaded(server_url: str) -> Iterator[PgStore]:
    """A store that has all of it, with the connections of a console."""
    with (
        new_database(server_url) as url,
        psycopg.connect(url, autocommit=True) as admin,
    ):
        migrate_up(url, SCHEMA)
        testschema.install_clock(admin, SCHEMA)
        # One lost lease is enough, so that a hundred contents are soon in quarantine.
        store = PgStore.connect(url, SCHEMA, crash_limit=1, listen=url)
        try:
            clock = PostgresBackend(None, admin).clock  # type: ignore[arg-type]
            clock.freeze_at(time.time_ns() // 1_000_000 - (BATCHES + 1) * STEP_MS)
            pick = random.Random(7)
            _poison(store, clock)
            for number in range(BATCHES):
                _enqueue(store, number, pick)
                clock.advance_ms(STEP_MS)
                if number % 4 == 3:
                    _work(store, number, pick)
            admin.execute(
                f"UPDATE {SCHEMA}.headgate_test_clock SET frozen_at_ms = NULL"
            )
            _configure(store)
            _fleet(store)
            found = admin.execute(f"SELECT count(*) FROM {SCHEMA}.headgate_job")
            assert found.fetchone() == (JOBS,)
            yield store
        finally:
            store.close()


def _poison(store: PgStore, clock: Any) -> None:
    """Jobs of many contents whose workers die."""
    store.enqueue(
        [
            envelope(
                f"poison-{n:03}",
                queue=POISONED,
                payload=b"%d" % n,
                kind=KINDS[n % len(KINDS)],
                scheduled_at_ms=0,
            )
            for n in range(POISON)
        ]
    )
    admit(store, queues=[POISONED], capacity=POISON, lease_ms=1)
    clock.advance_ms(STEP_MS)
    assert len(store.reclaim_expired(1_000)) == POISON


def _enqueue(store: PgStore, number: int, pick: random.Random) -> None:
    first = number * BATCH + (POISON if number == 0 else 0)
    store.enqueue([_job(n, pick) for n in range(first, (number + 1) * BATCH)])


def _job(number: int, pick: random.Random) -> Envelope:
    drawn = pick.random()
    queue = BIG if drawn < 0.4 else pick.choice(NAMED if drawn < 0.85 else SHARDS)
    # Of the tenants the first ones ask for most.
    tenant = int(TENANTS * pick.random() ** 3)
    fields: dict[str, Any] = {
        "queue": queue,
        "kind": pick.choice(KINDS),
        "partition_key": f"tenant-{tenant:03}",
        "payload": b'{"order":%d,"tenant":%d}' % (number, tenant),
        "headers": {"request": f"r-{number}"},
        "tags": [f"batch:{number // 5_000}", pick.choice(("vip", "trial", "paid"))],
        "scheduled_at_ms": 0,
        "priority": pick.choice((0, 0, 0, 5)),
        "max_attempts": pick.choice((1, 5, 25)),
    }
    if queue in NAMED and pick.random() < 0.4:
        fields["rate_class"] = CLASSES[NAMED.index(queue)]
    if drawn > 0.995:
        fields["pending"] = True
    elif pick.random() < 0.05:
        fields["delay_ms"] = pick.randrange(DAY_MS, 7 * DAY_MS)
    return envelope(f"job-{number:06}", **fields)


def _work(store: PgStore, number: int, pick: random.Random) -> None:
    """Take some jobs and end them in every way."""
    worker = f"worker-{number % WORKERS:03}"
    claims = admit(
        store,
        queues=pick.sample(NAMED, 6) + pick.sample(SHARDS, 10),
        capacity=700,
        worker=worker,
        lease_ms=12 * HOUR_MS,
    ).claims
    last = number == BATCHES - 1
    kept = len(claims) // 2 if last else 0
    for claim in claims[:5]:
        assert store.progress is not None
        steps = Checkpoint(
            completed_steps=("fetch", "render"),
            in_progress_step="send",
            step_set_hash="s1",
        )
        store.checkpoint(claim.lease_ref, steps)
        update = ProgressUpdate(current=420, total=1_000, message="420 rows written")
        store.progress.write_job_progress(claim.lease_ref, update)
    store.ack_batch([_ack(claim, pick) for claim in claims[kept:]])
    cancelled = [f"job-{number * BATCH + n:06}" for n in range(900, 1_000, 4)]
    steer(store).cancel_jobs(cancelled)


def _ack(claim: Claim, pick: random.Random) -> Ack:
    drawn = pick.random()
    took_ms = pick.randrange(20, 9_000)
    if drawn < 0.8:
        return Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS, latency_ms=took_ms)
    if drawn < 0.83:
        return Ack(
            lease=claim.lease_ref, outcome=Outcome.SKIP, reason_code="NO_ADDRESS"
        )
    if drawn < 0.85:
        return Ack(
            lease=claim.lease_ref, outcome=Outcome.UNDECODABLE, error="not JSON: 'x'"
        )
    lines = [
        LogLine(level=level, message=text, at_ms=claim.claimed_at_ms, fields={"try": 1})
        for level, text in (
            ("debug", "opening a connection"),
            ("info", "sending to tenant"),
            ("warn", "the answer takes long"),
            ("error", "refused"),
        )
    ]
    return Ack(
        lease=claim.lease_ref,
        outcome=Outcome.RETRY,
        error=TRACE,
        error_code="SMTP_REFUSED",
        latency_ms=took_ms,
        delay_ms=pick.randrange(HOUR_MS, DAY_MS),
        logs=[line.encode() for line in lines],
    )


def _configure(store: PgStore) -> None:
    inspect = steer(store)
    for n, name in enumerate(CLASSES):
        further = (BudgetConfig(limit=500, window_ms=HOUR_MS, burst=500),)
        inspect.upsert_rate_class(
            RateClassConfig(
                name=name,
                limit=20 + n,
                window_ms=MINUTE_MS,
                burst=20 + n,
                paused=n == 3,
                further=further if n % 3 == 0 else None,
            )
        )
    inspect.pause_rate_class(CLASSES[1], DAY_MS, "their maintenance window")
    for n, queue in enumerate(NAMED):
        inspect.upsert_concurrency_limit(
            Ceiling(
                name=f"per tenant of {queue}" if n % 2 else f"all of {queue}",
                queue=queue,
                scope="partition" if n % 2 else "queue",
                max_concurrent=1 + n,
                on_saturated=list(OnSaturated)[n % len(OnSaturated)],
            )
        )
    inspect.upsert_concurrency_limit(
        Ceiling(name="the CRM", scope="class", rate_class="crm-api", max_concurrent=4)
    )
    inspect.set_queue_paused(PAUSED, True)
    inspect.set_queue_weight(BIG, 10)
    inspect.set_enqueue_limit(BIG, 50_000)
    inspect.set_enqueue_limit(CLOSED, 0)
    inspect.sample_queue_memory()


def _fleet(store: PgStore) -> None:
    inspect = steer(store)
    now_ms = inspect.store_now_ms()
    for n in range(WORKERS):
        beat(
            store,
            f"worker-{n:03}",
            host=f"app-{n % 7}.example.org",
            pid=1_000 + n,
            queues=(*NAMED[:-2], *SHARDS[n % 90 : n % 90 + 10]),
            concurrency=16,
            inflight=n % 17,
            polls=128,
            empty_polls=n,
            started_at_ms=now_ms - n * HOUR_MS,
            status=("running", "running", "quiet")[n % 3],
            duties_active=n % 5 != 0,
            beat_ms=HOUR_MS,  # nobody is late while the tests run
        )
    inspect.signal_worker("worker-003", "quiet")
    for n in range(SCHEDULES):
        inspect.upsert_schedule(
            Schedule(
                id=f"report-{n:03}",
                kind="export:csv",
                spec="CRON_TZ=Europe/Berlin 0 9 * * 1-5" if n % 2 else "@daily",
                queue=NAMED[n % len(NAMED)],
                next_run_ms=now_ms + (1 + n) * HOUR_MS,
                paused=n % 7 == 3,
            )
        )
    for n in reversed(range(EVENTS)):
        outcome = TickOutcome.FAILED if n % 9 == 4 else TickOutcome.ENQUEUED
        inspect.record_schedule_event(
            ScheduleEvent(
                schedule_id="report-000",
                tick_ms=now_ms - (1 + n) * DAY_MS,
                job_id="" if outcome is TickOutcome.FAILED else f"job-{n:06}",
                outcome=outcome,
                reason="queue full" if outcome is TickOutcome.FAILED else "accepted",
            )
        )
