"""What acks do to the budgets and pauses of rate classes, alone and in batches."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import MIN_UNITS, NEVER_MS, Budget, RateClassConfig
from tests.backends import SCHEMA
from tests.builders import START_MS, admit, enqueue, envelope, steer

MAX_WEIGHT = 2**31 - 1


@pytest.fixture
def store(postgres):
    opened = postgres.make_store()
    yield opened
    opened.close()


def table(name, command):
    return sql.SQL(command).format(
        sql.SQL("{}.{}").format(sql.Identifier(SCHEMA), sql.Identifier(name))
    )


def budget_of(admin, name):
    [row] = admin.execute(
        table(
            "headgate_budget",
            "SELECT limit_tokens, window_ms, burst, units, refilled_at_ms FROM {}"
            " WHERE rate_class = %s",
        ),
        [name],
    ).fetchall()
    return Budget(
        limit=row[0],
        window_ms=row[1],
        burst=row[2],
        units=row[3],
        refilled_at_ms=row[4],
    )


def set_units(admin, name, units):
    admin.execute(
        table("headgate_budget", "UPDATE {} SET units = %s WHERE rate_class = %s"),
        [units, name],
    )


def class_of(store, name):
    [found] = [c for c in steer(store).rate_classes() if c.name == name]
    return found


def claimed(store, charges, rate_class="c"):
    """Running jobs that were charged these weights."""
    store.enqueue(
        [
            envelope(f"{rate_class}{place}", rate_class=rate_class, weight=charge)
            for place, charge in enumerate(charges)
        ]
    )
    claims = admit(store, capacity=len(charges), quantum=1_000).claims
    assert len(claims) == len(charges)
    by_id = {claim.envelope.id: claim.lease_ref for claim in claims}
    return [by_id[f"{rate_class}{place}"] for place in range(len(charges))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    works=st.lists(
        st.tuples(st.integers(1, 6), st.one_of(st.none(), st.integers(0, 12))),
        min_size=1,
        max_size=8,
    ),
    balance=st.integers(-20, 20),
    limit=st.integers(0, 3),
    elapsed_ms=st.integers(0, 2_000),
)
def test_a_batch_settles_a_class_like_its_acks_one_by_one(
    postgres, admin, works, balance, limit, elapsed_ms
):
    store = postgres.make_store(heartbeat_connection=False)
    steer(store).upsert_rate_class(
        RateClassConfig(name="c", limit=limit, window_ms=500, burst=100)
    )
    refs = claimed(store, [charge for charge, _ in works])
    steer(store).upsert_rate_class(
        RateClassConfig(name="c", limit=limit, window_ms=500, burst=20)
    )
    set_units(admin, "c", balance * 500)
    before = budget_of(admin, "c")
    postgres.clock.advance_ms(elapsed_ms)
    acks = [
        Ack(lease=ref, outcome=Outcome.SUCCESS, actual_weight=actual)
        for ref, (_, actual) in zip(refs, works, strict=True)
    ]
    assert store.ack_batch(acks) == [None] * len(acks)
    settled = [(charge, actual) for charge, actual in works if actual is not None]
    if not settled:
        assert budget_of(admin, "c") == before
        return
    now = before.at(START_MS + elapsed_ms)
    assert budget_of(admin, "c") == reduce(
        lambda budget, work: budget.settled(*work), settled, now
    )


def test_the_greatest_debt_that_is_possible_does_not_overflow(store, admin):
    steer(store).upsert_rate_class(
        RateClassConfig(name="c", limit=1, window_ms=2**61, burst=2)
    )
    [ref] = claimed(store, [1])
    store.ack(ref, Outcome.SUCCESS, actual_weight=MAX_WEIGHT)
    assert budget_of(admin, "c").units == MIN_UNITS


def test_an_ack_of_a_paused_class_does_not_end_the_pause(store, admin):
    config = RateClassConfig(name="c", limit=5, window_ms=1_000, burst=5)
    steer(store).upsert_rate_class(config)
    [ref] = claimed(store, [2])
    steer(store).upsert_rate_class(
        RateClassConfig(name="c", limit=5, window_ms=1_000, burst=5, paused=True)
    )
    store.ack(ref, Outcome.SUCCESS, actual_weight=0)
    assert budget_of(admin, "c").refilled_at_ms == NEVER_MS
    enqueue(store, "later", rate_class="c")
    assert admit(store).claims == []


def test_classes_of_one_batch_are_settled_each_for_itself(store, admin):
    for name in ("c", "d"):
        steer(store).upsert_rate_class(
            RateClassConfig(name=name, limit=0, window_ms=1, burst=10)
        )
    refs = [*claimed(store, [3]), *claimed(store, [3], rate_class="d")]
    acks = [
        Ack(lease=ref, outcome=Outcome.SKIP, actual_weight=actual)
        for ref, actual in zip(refs, (0, 5), strict=True)
    ]
    assert store.ack_batch(acks) == [None, None]
    assert (budget_of(admin, "c").tokens, budget_of(admin, "d").tokens) == (10, 5)


def test_a_refused_ack_changes_no_budget(postgres, store, admin):
    steer(store).upsert_rate_class(
        RateClassConfig(name="c", limit=0, window_ms=1, burst=10)
    )
    [ref] = claimed(store, [3])
    steer(store).operator_cancel("c0")
    before = postgres.image()
    [answer] = store.ack_batch(
        [Ack(lease=ref, outcome=Outcome.RATE_LIMITED, actual_weight=0, delay_ms=5)]
    )
    assert answer is not None
    assert postgres.image() == before


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_handler_that_was_told_to_wait_pauses_the_class(postgres, store, known):
    if known:
        steer(store).upsert_rate_class(
            RateClassConfig(name="c", limit=5, window_ms=1_000, burst=5)
        )
    one, other = claimed(store, [1, 1])
    acks = [
        Ack(lease=one, outcome=Outcome.RATE_LIMITED, delay_ms=5_000),
        Ack(lease=other, outcome=Outcome.RATE_LIMITED, delay_ms=2_000),
    ]
    assert store.ack_batch(acks) == [None, None]
    assert class_of(store, "c").paused_until_ms == START_MS + 5_000
    postgres.clock.advance_ms(4_999)
    assert admit(store).claims == []
    postgres.clock.advance_ms(1)
    assert len(admit(store).claims) == 2


def test_a_shorter_pause_does_not_cut_a_longer_one(store):
    one, other = claimed(store, [1, 1])
    store.ack(one, Outcome.RATE_LIMITED, delay_ms=5_000)
    store.ack(other, Outcome.RATE_LIMITED, delay_ms=1_000)
    assert class_of(store, "c").paused_until_ms == START_MS + 5_000


def test_a_job_without_a_class_pauses_nothing(store):
    [ref] = claimed(store, [1], rate_class="")
    store.ack(ref, Outcome.RATE_LIMITED, delay_ms=5_000)
    assert steer(store).rate_classes() == []
    assert len(admit(store).claims) == 1
