"""Rate classes: exact buckets, several budgets, pauses and real weights."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.lease import Checkpoint
from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import BudgetConfig, RateClassConfig, Scope
from tests.backends import Backend, Clock
from tests.builders import START_MS, enqueue, envelope, job, state_of, steer
from tests.scenarios.gate import (
    admit,
    ceiling,
    fill,
    ids,
    policies,
    rate_class,
    served,
    tokens,
)

HOUR = "5/3600000"


def fill_class(store, count: int, name: str = "job", **fields) -> list[str]:
    return fill(
        store, name, count, **{"rate_class": "c", "partition_key": "", **fields}
    )


def test_a_class_admits_its_burst_and_no_more_on_any_worker(store):
    rate_class(store, "c", "5/1000", 5)
    fill_class(store, 20)
    assert len(admit(store, worker="w1")) == 5
    assert tokens(store, "c") == 0
    assert len(admit(store, worker="w2")) == 0


def test_cancelled_jobs_do_not_hide_when_a_class_reopens_for_another(store):
    rate_class(store, "c", "1/1000", 1)
    fill_class(store, 1, "spends")
    admit(store)
    for number in range(40):
        fill_class(store, 1, f"gone{number:02}", partition_key=f"p{number:02}")
    fill_class(store, 1, "waits", partition_key="z")
    assert ids(admit(store)) == []
    steer(store).cancel_jobs([f"gone{number:02}-1" for number in range(40)])
    assert admit(store).retry_after_ms == 1000


@pytest.mark.parametrize("queue", ["qa", "qb"])
def test_a_class_reopens_in_one_of_several_queues_that_are_asked(store, clock, queue):
    rate_class(store, "c", "1/1000", 1)
    fill_class(store, 3, queue=queue)
    both = {"queues": ("qa", "qb")}
    for number in (1, 2, 3):
        assert ids(admit(store, **both)) == [f"job-{number}"]
        clock.advance_ms(999)
        waits = admit(store, **both)
        assert (ids(waits), waits.retry_after_ms) == ([], 1 if number < 3 else None)
        clock.advance_ms(1)


def test_a_class_without_limit_any_more_opens_in_all_queues_that_are_asked(store):
    rate_class(store, "c", "0/1000", 1)
    fill_class(store, 2, "a", queue="qa")
    fill_class(store, 2, "b", queue="qb")
    both = ("qa", "qb")
    assert ids(admit(store, queues=both)) == ["a-1"]
    policies(store).delete_rate_class("c")
    assert sorted(ids(admit(store, queues=both))) == ["a-2", "b-1", "b-2"]


def test_a_drained_class_refills_by_the_millisecond(store, clock: Clock):
    rate_class(store, "c", "5/1000", 5)
    fill_class(store, 20)
    admit(store)
    found = []
    for at_ms in (199, 200, 399, 400, 1600):
        clock.freeze_at(START_MS + at_ms)
        found.append(len(admit(store)))
    assert found == [0, 1, 0, 1, 5]


def test_frequent_polling_loses_no_part_of_a_token(store, clock: Clock):
    rate_class(store, "c", "5/1000", 5)
    fill_class(store, 20)
    admit(store)
    claimed = 0
    for _ in range(100):
        clock.advance_ms(10)
        claimed += len(admit(store))
    assert claimed == 5


def test_an_unknown_class_is_unlimited_and_leaves_no_row(store):
    fill_class(store, 20)
    assert len(admit(store)) == 20
    assert policies(store).rate_classes() == []


def test_a_paused_class_has_no_credit_and_refills_only_after_it(store, clock: Clock):
    rate_class(store, "c", "5/1000", 5, paused=True)
    fill_class(store, 10)
    assert len(admit(store)) == 0
    assert state_of(store, "job-1") == "available"
    assert tokens(store, "c") == 0
    clock.advance_ms(10_000)
    rate_class(store, "c", "5/1000", 5)
    assert len(admit(store)) == 0
    clock.advance_ms(1000)
    assert len(admit(store)) == 5


def test_heavy_jobs_spend_more(store):
    rate_class(store, "c", HOUR, 5)
    store.enqueue([envelope(f"w{w}", rate_class="c", weight=w) for w in (3, 2, 1)])
    assert ids(admit(store)) == ["w3", "w2"]
    assert tokens(store, "c") == 0


def test_a_cheaper_run_refunds_and_a_dearer_one_leaves_debt(store):
    rate_class(store, "c", HOUR, 5)
    store.enqueue([envelope(f"w{w}", rate_class="c", weight=w) for w in (3, 2, 1)])
    three, two = admit(store).claims
    store.ack(three.lease_ref, Outcome.SUCCESS, actual_weight=1)
    assert tokens(store, "c") == 2
    assert ids(admit(store)) == ["w1"]
    store.ack(two.lease_ref, Outcome.SUCCESS, actual_weight=4)
    assert tokens(store, "c") == -1
    enqueue(store, "later", rate_class="c")
    assert ids(admit(store)) == []


def test_a_repeated_ack_refunds_once(store):
    rate_class(store, "c", HOUR, 5)
    enqueue(store, "a", rate_class="c", weight=3)
    [claim] = admit(store).claims
    for _ in range(2):
        store.ack(claim.lease_ref, Outcome.SUCCESS, actual_weight=1)
    assert tokens(store, "c") == 4
    with pytest.raises(LeaseRejected):
        store.ack(claim.lease_ref, Outcome.SKIP, actual_weight=0)
    assert tokens(store, "c") == 4


def test_a_refund_never_fills_above_the_burst(store, clock: Clock):
    rate_class(store, "c", "5/1000", 5)
    enqueue(store, "a", rate_class="c", weight=3)
    [claim] = admit(store).claims
    clock.advance_ms(10_000)
    store.ack(claim.lease_ref, Outcome.SUCCESS, actual_weight=0)
    assert tokens(store, "c") == 5


def test_a_class_made_later_does_not_charge_what_ran_before(store):
    enqueue(store, "a", rate_class="c")
    [claim] = admit(store).claims
    rate_class(store, "c", "5/1000", 5)
    store.ack(claim.lease_ref, Outcome.SUCCESS, actual_weight=7)
    assert tokens(store, "c") == 5


def test_a_job_heavier_than_the_burst_does_not_stop_its_class(store):
    rate_class(store, "c", "1/1000", 5)
    enqueue(store, "huge", rate_class="c", weight=10)
    enqueue(store, "small", rate_class="c")
    batch = admit(store)
    assert ids(batch) == ["small"]
    assert batch.refused == {"rate_class": 1}
    assert batch.retry_after_ms is None
    rate_class(store, "c", "100/1000", 10)
    assert ids(admit(store)) == []
    assert tokens(store, "c") == 4


def test_a_larger_burst_frees_what_was_set_aside(store, clock: Clock):
    rate_class(store, "c", "1/1000", 5)
    enqueue(store, "huge", rate_class="c", weight=10)
    assert ids(admit(store)) == []
    rate_class(store, "c", "100/1000", 10)
    clock.advance_ms(1000)
    assert ids(admit(store)) == ["huge"]


def test_deleting_a_class_frees_what_was_set_aside(store):
    rate_class(store, "c", "1/1000", 5)
    enqueue(store, "huge", rate_class="c", weight=10)
    assert ids(admit(store)) == []
    assert policies(store).delete_rate_class("c") == 1
    assert ids(admit(store)) == ["huge"]
    assert policies(store).delete_rate_class("c") is None


def test_a_lighter_job_does_not_overtake_a_heavy_one(store, clock: Clock):
    rate_class(store, "c", "1/1000", 3)
    enqueue(store, "first", rate_class="c")
    assert ids(admit(store)) == ["first"]
    enqueue(store, "heavy", rate_class="c", weight=3)
    enqueue(store, "light", rate_class="c")
    assert ids(admit(store)) == []
    clock.advance_ms(1000)
    assert ids(admit(store)) == ["heavy"]


def test_a_lighter_job_of_another_partition_does_not_overtake_either(
    store, clock: Clock
):
    rate_class(store, "c", "1/1000", 3)
    enqueue(store, "first", rate_class="c")
    assert ids(admit(store)) == ["first"]
    fill(store, "heavy", 1, rate_class="c", weight=3)
    fill(store, "light", 1, rate_class="c", scheduled_at_ms=9)
    batch = admit(store)
    assert ids(batch) == []
    assert batch.refused == {"rate_class": 1}
    clock.advance_ms(1000)
    assert ids(admit(store)) == ["heavy-1"]


def test_every_budget_of_a_class_must_have_room(store, clock: Clock):
    rate_class(store, "c", "100/3600000", 100, further=(BudgetConfig(5, 60_000, 5),))
    fill_class(store, 200)
    assert len(admit(store)) == 5
    assert (tokens(store, "c"), tokens(store, "c", 1)) == (95, 0)
    clock.advance_ms(60_000)
    assert len(admit(store)) == 5


def test_a_positive_balance_never_grows_by_a_change(store):
    rate_class(store, "c", "10/1000", 10)
    rate_class(store, "c", "10/1000", 4)
    assert tokens(store, "c") == 4
    rate_class(store, "c", "10/1000", 10)
    assert tokens(store, "c") == 4
    rate_class(store, "c", "10/3000", 10)
    assert tokens(store, "c") == 4


def test_a_change_keeps_further_budgets_unless_they_are_named(store):
    rate_class(store, "c", "5/1000", 5, further=(BudgetConfig(9, 1000, 9),))
    rate_class(store, "c", "6/1000", 6)
    [state] = policies(store).rate_classes()
    assert [(b.limit, b.burst) for b in state.budgets] == [(6, 6), (9, 9)]
    rate_class(store, "c", "6/1000", 6, further=())
    [state] = policies(store).rate_classes()
    assert [(b.limit, b.burst) for b in state.budgets] == [(6, 6)]


def test_a_pause_lasts_until_its_instant_and_keeps_the_tokens(store, clock: Clock):
    rate_class(store, "c", "5/1000", 5)
    fill_class(store, 10)
    policies(store).pause_rate_class("c", 5000, "provider is down")
    assert policies(store).rate_classes()[0].pause_reason == "provider is down"
    assert admit(store).retry_after_ms == 5000
    clock.advance_ms(4999)
    assert len(admit(store)) == 0
    clock.advance_ms(1)
    assert len(admit(store)) == 5


def test_a_pause_that_another_queue_met_says_nothing_about_a_full_one(store):
    """Nobody waits for a class whose jobs could not run if it were open."""
    enqueue(store, "runs", queue="full")
    admit(store, queues=("full",))
    ceiling(store, 1, "queue", scope=Scope.QUEUE, queue="full")
    for queue in ("full", "open"):
        enqueue(store, f"waits in {queue}", rate_class="c", queue=queue)
    policies(store).pause_rate_class("c", 5000)
    said = [admit(store, queues=names) for names in (("open", "full"), ("full",))]
    assert [batch.retry_after_ms for batch in said] == [5000, None]


def test_a_shorter_pause_does_not_cut_a_longer_one(store, clock: Clock):
    policies(store).pause_rate_class("c", 5000)
    policies(store).pause_rate_class("c", 10)
    fill_class(store, 1)
    clock.advance_ms(10)
    assert len(admit(store)) == 0
    assert policies(store).resume_rate_class("c")
    assert len(admit(store)) == 1
    assert not policies(store).resume_rate_class("unknown")


def test_rate_limited_gives_the_job_back_as_it_was(store):
    rate_class(store, "c", HOUR, 5)
    enqueue(store, "a", rate_class="c")
    [claim] = admit(store).claims
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    given_back = job(store, "a")
    assert (given_back.state, given_back.attempt, given_back.errors) == (
        "available",
        0,
        (),
    )
    assert tokens(store, "c") == 4
    assert [c.fence for c in admit(store).claims] == [2]


def test_a_handler_can_pause_its_class(store, clock: Clock):
    rate_class(store, "c", "5/1000", 5)
    enqueue(store, "a", rate_class="c")
    [claim] = admit(store).claims
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED, delay_ms=5000)
    clock.advance_ms(4999)
    assert ids(admit(store)) == []
    clock.advance_ms(1)
    assert ids(admit(store)) == ["a"]


def test_a_class_shared_by_partitions_goes_round(store):
    for name in "ABC":
        fill(store, name, 4, rate_class="c")
    rate_class(store, "c", "0/1000", 4)
    assert ids(admit(store, 6, quantum=1)) == ["A-1", "B-1", "C-1"]
    assert tokens(store, "c") == 1


def test_a_class_with_tokens_for_all_does_not_change_the_order(store):
    fill(store, "A", 10, rate_class="c")
    fill(store, "B", 10, rate_class="c")
    rate_class(store, "c", "0/1000", 8)
    assert served(admit(store, 6)) == {"A": 6}


def test_a_resumed_job_pays_for_what_is_left(store, clock: Clock):
    rate_class(store, "c", "0/1000", 6)
    enqueue(store, "a", rate_class="c", weight=5)
    [claim] = admit(store).claims
    store.checkpoint(claim.lease_ref, Checkpoint(remaining_weight=1))
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=1)
    clock.advance_ms(1)
    store.promote_due(1)
    assert tokens(store, "c") == 1
    assert ids(admit(store)) == ["a"]
    assert tokens(store, "c") == 0


def test_free_steps_pass_an_empty_class_but_not_a_paused_one(store, clock: Clock):
    rate_class(store, "c", "0/1000", 1)
    enqueue(store, "a", rate_class="c")
    [claim] = admit(store).claims
    store.checkpoint(claim.lease_ref, Checkpoint(remaining_weight=0))
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    policies(store).pause_rate_class("c", 100)
    assert ids(admit(store)) == []
    clock.advance_ms(100)
    assert ids(admit(store)) == ["a"]


def test_a_refund_in_another_queue_reopens_a_class_in_debt(store, clock: Clock):
    rate_class(store, "c", "1/1000", 5)
    enqueue(store, "refunds", rate_class="c", weight=4, queue="other")
    enqueue(store, "overruns", rate_class="c", queue="other")
    refunds, overruns = admit(store, queues=("other",)).claims
    store.ack(overruns.lease_ref, Outcome.SUCCESS, actual_weight=6)
    assert tokens(store, "c") == -5
    enqueue(store, "waits", rate_class="c")
    assert admit(store).retry_after_ms == 6000
    store.ack(refunds.lease_ref, Outcome.SUCCESS, actual_weight=1)
    assert tokens(store, "c") == -2
    clock.advance_ms(3000)
    assert ids(admit(store)) == ["waits"]


def test_a_later_call_says_how_long_the_class_stays_closed(store, clock: Clock):
    rate_class(store, "c", "1/700", 1)
    fill_class(store, 2)
    assert admit(store).retry_after_ms == 700
    clock.advance_ms(200)
    assert admit(store).retry_after_ms == 500


@pytest.mark.parametrize("partitions", [1, 700])
def test_blocked_classes_do_not_hide_what_is_behind_them(store, partitions):
    """A backlog of more rows than a call reads, and of more lanes than a window."""
    rate_class(store, "c", "0/1000", 1)
    enqueue(store, "takes-it", rate_class="c")
    admit(store)
    backlog = [
        envelope(f"j{n}", partition_key=f"p{n % partitions}", rate_class="c")
        for n in range(2_100)
    ]
    for start in range(0, len(backlog), 700):
        store.enqueue(backlog[start : start + 700])
    fill(store, "free", 10, scheduled_at_ms=9)
    assert served(admit(store, 10)) == {"free": 10}
    assert served(admit(store, 10)) == {}


def test_many_classes_that_run_dry_at_once_do_not_hide_the_others(store):
    for number in range(40):
        rate_class(store, f"c{number:02}", "0/1000", 1)
        fill(store, f"p{number:02}", 2, rate_class=f"c{number:02}")
    assert len(admit(store, 40)) == 40
    fill(store, "zz", 5, scheduled_at_ms=9)
    assert served(admit(store, 5)) == {"zz": 5}


def test_no_interval_passes_more_than_burst_and_rate_allow(store, clock: Clock):
    rate_class(store, "c", "7/1000", 4)
    fill_class(store, 400)
    charged: list[tuple[int, int]] = []
    for step in (0, 1, 143, 7, 999, 0, 13, 250, 3000, 2, 571):
        clock.advance_ms(step)
        charged.append((clock.now_ms(), len(admit(store))))
    for first in range(len(charged)):
        for last in range(first, len(charged)):
            spent = sum(count for _, count in charged[first : last + 1])
            elapsed_ms = charged[last][0] - charged[first][0]
            assert spent <= 4 + 7 * elapsed_ms / 1000


@pytest.mark.parametrize("is_set_anew", [False, True])
def test_a_clock_that_steps_back_takes_and_gives_nothing(
    store, clock: Clock, is_set_anew
):
    rate_class(store, "c", "5/1000", 5)
    fill_class(store, 20)
    assert len(admit(store)) == 5
    clock.advance_ms(-5000)
    assert len(admit(store)) == 0
    if is_set_anew:
        rate_class(store, "c", "5/1000", 5)
    clock.advance_ms(5000)
    assert len(admit(store)) == 0
    clock.advance_ms(200)
    assert len(admit(store)) == 1


def test_a_pause_lifted_while_the_clock_is_back_refills_from_then(store, clock: Clock):
    rate_class(store, "c", "5/1000", 5)
    fill_class(store, 20)
    assert len(admit(store)) == 5
    clock.advance_ms(-5000)
    rate_class(store, "c", "5/1000", 5, paused=True)
    rate_class(store, "c", "5/1000", 5)
    clock.advance_ms(200)
    assert len(admit(store)) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"limit": -1}, "limit is -1"),
        ({"window_ms": 0}, "window_ms is 0"),
        ({"burst": 0}, "burst is 0"),
        ({"burst": 2, "window_ms": 2**62}, r"burst \* window_ms"),
        ({"name": ""}, "name must not be empty"),
        ({"further": (BudgetConfig(1, 1, 1),) * 4}, "5 budgets, the limit is 4"),
    ],
)
def test_a_limit_out_of_range_is_refused(fields, text):
    values = {"name": "c", "limit": 1, "window_ms": 1000, "burst": 1, **fields}
    with pytest.raises(InvalidRequest, match=text):
        RateClassConfig(**values)


@pytest.mark.parametrize("delay_ms", [0, -1, 86_400_001])
def test_a_pause_of_no_time_or_of_days_is_refused(store, delay_ms):
    with pytest.raises(InvalidRequest, match="delay_ms"):
        policies(store).pause_rate_class("c", delay_ms)


def test_the_charge_of_a_claim_is_what_its_class_took(store, backend: Backend):
    rate_class(store, "c", "5/1000", 5)
    enqueue(store, "limited", rate_class="c", weight=2)
    enqueue(store, "free", rate_class="other", weight=2)
    admit(store)
    jobs = backend.snapshot().jobs
    assert (jobs["limited"]["rate_charge"], jobs["free"]["rate_charge"]) == (2, 0)
