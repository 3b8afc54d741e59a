"""Schedules on a real server: outages at every point, foreign settings."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from headgate_sync.cron import next_after
from headgate_sync.errors import StoreUnavailable
from headgate_sync.postgres.store import PgStore
from headgate_sync.worker.scheduler import scheduler_sweep
from tests.backends import SCHEMA
from tests.builders import START_MS, counts, steer
from tests.contract.test_schedules import events, known, schedule
from tests.postgres.proxy import proxy_to
from tests.postgres.watching import until

IDS = tuple(f"s{n}" for n in range(4))


def swept(store):
    """Whether a sweep came to its end."""
    try:
        scheduler_sweep(store)
    except StoreUnavailable:
        return False
    return True


def test_a_connection_lost_at_any_point_of_a_sweep_loses_and_doubles_nothing(
    postgres, database_url
):
    """The whole sweep is some forty answers; the line breaks at each of them."""
    direct = postgres.make_store()
    with proxy_to(database_url) as proxy:
        store = PgStore.connect(proxy.conninfo, pool_size=2)
        passed: list[bytes] = []
        cuts: list[int] = []
        break_at = 0

        def answers(data: bytes) -> bytes:
            passed.append(data)
            if len(passed) == break_at:
                cuts.append(break_at)
                proxy.cut()
            return data

        proxy.answers = answers
        for break_at in range(1, 60):
            postgres.reset()
            for id in IDS:
                steer(direct).upsert_schedule(schedule(id, next_run_ms=START_MS))
            passed.clear()
            with suppress(StoreUnavailable):
                scheduler_sweep(store)
            break_at = 0
            # A connection that the pool was just opening may be broken as well.
            until(lambda: swept(store), "the end of the outage")
            for id in IDS:
                assert known(direct, id).next_run_ms == START_MS + 1_000, id
                assert [e[2] for e in events(direct, id)][-1] == "enqueued"
            assert counts(direct) == {"available": len(IDS)}
        # How many pieces the answers come in varies by one or two.
        assert len(cuts) >= 20
        store.close()


def test_sessions_that_are_ended_by_an_administrator_are_replaced(
    postgres, admin, database_url
):
    direct = postgres.make_store()
    named = make_conninfo(database_url, application_name="headgate-ended")
    store = PgStore.connect(named, pool_size=2)
    for id in IDS:
        steer(direct).upsert_schedule(schedule(id, next_run_ms=START_MS))
    for round in range(5):
        scheduler_sweep(store)
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'headgate-ended'"
        )
        postgres.clock.advance_ms(1_000)
        for _ in range(3):  # one per connection whose end was not known in time
            with suppress(StoreUnavailable):
                scheduler_sweep(store)
        postgres.clock.advance_ms(1_000)
        for id in IDS:
            assert [e[0] for e in events(direct, id)] == [
                START_MS + n * 1_000 for n in range(2 * round + 2)
            ]
    store.close()


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/St_Johns"])
def test_the_zone_of_a_session_plays_no_part(postgres, database_url, zone):
    postgres.make_store()
    settings = make_conninfo(database_url, options=f"-c TimeZone={zone}")
    store = PgStore.connect(settings, pool_size=2)
    spec = "CRON_TZ=Europe/Berlin 30 2 * * *"
    anchor_ms = next_after(spec, START_MS)
    one = schedule(spec=spec, next_run_ms=anchor_ms)
    assert steer(store).upsert_schedule(one).next_run_ms == anchor_ms
    postgres.clock.freeze_at(anchor_ms)
    scheduler_sweep(store)
    assert events(store)[0][0] == anchor_ms
    assert known(store).last_enqueued_ms == anchor_ms
    store.close()


def test_a_locked_schedule_is_left_to_who_has_it(postgres, database_url):
    store = postgres.make_store()
    for id in ("a", "b"):
        steer(store).upsert_schedule(schedule(id, next_run_ms=START_MS))
    with psycopg.connect(database_url) as other:
        other.execute(f"SELECT 1 FROM {SCHEMA}.headgate_schedule"
                      " WHERE id = 'a' FOR UPDATE")  # fmt: skip
        report = scheduler_sweep(store)
        assert (report.lost, report.enqueued) == (1, 1)
        other.rollback()
    assert scheduler_sweep(store).enqueued == 1


def test_a_job_that_the_database_refuses_stops_its_schedule_and_spares_the_earlier(
    postgres, admin
):
    """A statement that fails must not take the ticks before it along."""
    store = postgres.make_store()
    one = schedule(next_run_ms=START_MS, on_missed="backfill", backfill_limit=3)
    steer(store).upsert_schedule(one)
    postgres.clock.advance_ms(2_000)
    admin.execute(
        f"ALTER TABLE {SCHEMA}.headgate_job ADD CONSTRAINT refused"
        f" CHECK (periodic_tick_ms <> {START_MS + 1_000}) NOT VALID"
    )
    try:
        report = scheduler_sweep(store)
    finally:
        admin.execute(f"ALTER TABLE {SCHEMA}.headgate_job DROP CONSTRAINT refused")
    assert (report.enqueued, report.failed) == (1, 1)
    assert events(store)[-1][2:] == ("failed", "store_error")
    assert known(store).next_run_ms == START_MS + 1_000
    assert scheduler_sweep(store).enqueued == 2
    assert counts(store) == {"available": 3}
