"""The store's clock is the server's: no caller's clock has a part in a decision."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.builders import LEASE_MS, enqueue
from tests.postgres.watching import until, wait_until_blocked
from tests.scenarios.gate import admit, ceiling, fill, rate_class
from tests.servers import new_database

TOLERANCE_MS = 5_000
CLAIM = """
import sys, time
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + {ahead}
time.time_ns = lambda: real_ns() + {ahead} * 10**9
from headgate_sync.postgres.store import PgStore
from tests.scenarios.gate import admit
store = PgStore.connect(sys.argv[1])
print(len(admit(store, worker="w2")), len(admit(store, worker="w2", queues=("r",))))
store.close()
"""


@pytest.mark.parametrize("ahead_s", [60, -60])
def test_a_worker_whose_clock_is_wrong_gets_what_the_others_get(server_url, ahead_s):
    with new_database(server_url) as url:
        migrate_up(url)
        with ConnectionPool(url, min_size=1, open=True) as pool:
            store = PgStore(pool)
            rate_class(store, "c", "5/10000000", 5)
            fill(store, "job", 20, rate_class="c", partition_key="")
            assert len(admit(store, worker="w1")) == 5
            enqueue(store, *[f"r{n}" for n in range(5)], queue="r")
            told = subprocess.run(
                [sys.executable, "-c", CLAIM.format(ahead=ahead_s), url],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            store.close()
        assert told.stdout.split() == ["0", "5"]
        with psycopg.connect(url) as second:
            rows = second.execute(
                "SELECT lease_expires_at_ms - claimed_at_ms,"
                " abs(claimed_at_ms - extract(epoch FROM clock_timestamp()) * 1000)"
                " FROM headgate.headgate_job WHERE queue = 'r'"
            ).fetchall()
        assert {length_ms for length_ms, _ in rows} == {LEASE_MS}
        assert max(off_ms for _, off_ms in rows) < TOLERANCE_MS


RUNNING_CLOCK = """
CREATE SEQUENCE public.reading;
CREATE OR REPLACE FUNCTION headgate.headgate_now_ms() RETURNS bigint
  LANGUAGE sql VOLATILE
  AS $$ SELECT 1000000 + 100 * nextval('public.reading') $$
"""


def test_a_class_gave_what_it_had_at_the_instant_that_its_claims_bear(server_url):
    """Although the clock goes on while one call comes to hold class after class."""
    with new_database(server_url) as url:
        migrate_up(url)
        with (
            ConnectionPool(url, min_size=1, open=True) as pool,
            psycopg.connect(url, autocommit=True) as admin,
        ):
            admin.execute(RUNNING_CLOCK)
            store = PgStore(pool)
            rate_class(store, "first", "1/1000000", 5)
            rate_class(store, "later", "1/1000000", 5)
            # More lanes than a window holds stand before those of the other class.
            for number in range(40):
                fill(store, f"a{number:02}", 1, rate_class="first")
            fill(store, "z", 5, rate_class="later")
            claims = admit(store, 10).claims
            store.close()
            told = admin.execute(
                "SELECT rate_class, refilled_at_ms, units FROM headgate.headgate_budget"
            ).fetchall()
    by_class = Counter(claim.envelope.rate_class for claim in claims)
    assert by_class == {"first": 5, "later": 5}
    [claimed_at_ms] = {claim.claimed_at_ms for claim in claims}
    # What was taken did not grow again before the instant at which it was taken.
    assert sorted(told) == [("first", claimed_at_ms, 0), ("later", claimed_at_ms, 0)]


@pytest.mark.parametrize("limited", [False, True], ids=["plain", "limited"])
def test_a_lease_granted_after_a_wait_has_its_whole_length(
    postgres, database_url, limited
):
    """Also when the wait for the queue took longer than the lease will."""
    store = postgres.make_store()
    if limited:
        rate_class(store, "c", "5/1000", 5)
        ceiling(store, 9, "queue")
    fill(store, "job", 1, rate_class="c" if limited else "")

    def claims_after_a_wait():
        """None where the queue was locked for longer than anybody waits."""
        with psycopg.connect(database_url) as other, ThreadPoolExecutor(1) as threads:
            other.execute("SELECT headgate.headgate_lock_queues(ARRAY['q'])")
            asked = threads.submit(admit, store)
            wait_until_blocked(postgres.connection, other)
            postgres.clock.advance_ms(2 * LEASE_MS)
            other.rollback()
            return asked.result().claims

    [claim] = until(claims_after_a_wait, "a claim after a wait")
    assert claim.expires_at_ms == postgres.clock.now_ms() + LEASE_MS
    assert store.reclaim_expired(1) == []
