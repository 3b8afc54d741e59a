"""What `explain_admission` says about one job, for every reason that there is."""

from __future__ import annotations

import attrs
import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.explanation import MAX_AHEAD, UNLIMITED
from headgate_sync.lease import Checkpoint
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.policy import BudgetConfig
from tests.backends import Backend, Clock, unchanged_by
from tests.builders import (
    START_MS,
    beat,
    bring_to,
    claim_one,
    enqueue,
    job,
    run_one,
    steer,
)
from tests.scenarios.gate import (
    ack_all,
    admit,
    ceiling,
    fill,
    ids,
    policies,
    rate_class,
    tokens,
)
from tests.scenarios.test_admission_holds import quarantine

HOUR = "5/3600000"


def explain(store, id: str):
    found = steer(store).explain_admission(id)
    assert found is not None, f"no job {id}"
    return found


def told(store, id: str):
    """Reason, verdict, details and estimate, as one comparable value."""
    found = explain(store, id)
    return (
        found.blocked_by,
        found.admissible,
        dict(found.detail),
        found.estimated_admission_ms,
    )


def place(position: int = 0, deficit: int = 0) -> dict[str, str]:
    return {
        "position_in_partition": str(position),
        "partition_deficit": str(deficit),
    }


def test_nobody_explains_a_missing_job(store):
    assert steer(store).explain_admission("nobody") is None


@pytest.mark.parametrize("id", ["a\0b", "\ud800", None, 1])
def test_an_id_that_no_job_can_have_is_refused(store, id):
    with pytest.raises(InvalidRequest, match="job_id"):
        steer(store).explain_admission(id)


def test_an_explanation_cannot_be_changed(store):
    enqueue(store, "a")
    found = explain(store, "a")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        found.admissible = False
    with pytest.raises(TypeError):
        found.detail["x"] = "y"


# Jobs that do not stand at the gate


def test_a_running_job_was_admitted(store, clock: Clock):
    claim = run_one(store, "a")
    assert told(store, "a") == (
        None,
        True,
        {
            "state": "running",
            "claimed_by": "w",
            "lease_expires_at_ms": str(claim.expires_at_ms),
        },
        0,
    )


@pytest.mark.parametrize("state", [State.COMPLETED, State.ARCHIVED, State.CANCELLED])
def test_a_finished_job_is_not_waiting_for_anything(store, clock: Clock, state):
    bring_to(store, clock, "a", state)
    assert told(store, "a") == (None, False, {"state": state}, None)


def test_a_pending_job_waits_for_somebody_to_promote_it(store):
    enqueue(store, "a", pending=True)
    assert told(store, "a") == ("pending", False, {"state": "pending"}, None)


@pytest.mark.parametrize("state", [State.SCHEDULED, State.RETRYABLE])
def test_a_job_of_later_waits_for_its_instant(store, clock: Clock, state):
    bring_to(store, clock, "a", state)
    at_ms = job(store, "a").scheduled_at_ms
    clock.advance_ms(53_000)
    detail = {"scheduled_at_ms": str(at_ms)}
    assert told(store, "a") == ("schedule", False, detail, 7_000)
    clock.advance_ms(8_000)
    assert told(store, "a") == ("schedule", False, detail, 0)


def test_a_quarantined_job_names_its_fingerprint(store, clock: Clock):
    bring_to(store, clock, "a", State.QUARANTINED, fingerprint="fp")
    detail = {"fingerprint": "fp", "crash_count": "3"}
    assert told(store, "a") == ("quarantine", False, detail, None)


def test_a_quarantined_job_without_fingerprint_tells_its_own_crashes(
    store, clock: Clock
):
    bring_to(store, clock, "a", State.QUARANTINED, fingerprint="")
    detail = {"fingerprint": "", "crash_count": "3"}
    assert told(store, "a") == ("quarantine", False, detail, None)


# Jobs at the gate, in its order


def test_a_paused_queue_comes_before_every_other_reason(store, clock: Clock):
    rate_class(store, "c", "0/1000", 1, paused=True)
    ceiling(store, 1, "queue")
    enqueue(store, "a", rate_class="c")
    steer(store).set_queue_paused("q", True)
    assert told(store, "a") == ("queue_paused", False, {"queue": "q"}, None)
    steer(store).set_queue_paused("q", False)
    assert explain(store, "a").blocked_by == "rate_class"


def test_a_waiting_sibling_of_a_quarantined_job_is_blocked(store, clock: Clock):
    enqueue(store, "a", fingerprint="fp")
    quarantine(store, clock, "fp")
    detail = {"fingerprint": "fp", "crash_count": "3"}
    assert told(store, "a") == ("quarantine", False, detail, None)
    assert ids(admit(store)) == []
    assert told(store, "a") == ("quarantine", False, detail, None)
    steer(store).quarantine_release("fp")
    assert explain(store, "a").admissible


def test_a_class_paused_by_its_flag_tells_no_time(store):
    rate_class(store, "c", "5/1000", 5, paused=True)
    enqueue(store, "a", rate_class="c")
    detail = {"rate_class": "c", "paused": "true"}
    assert told(store, "a") == ("rate_class", False, detail, None)


def test_a_class_paused_for_a_time_tells_until_when_and_why(store, clock: Clock):
    policies(store).pause_rate_class("c", 5_000, "the provider said 429")
    enqueue(store, "a", rate_class="c")
    clock.advance_ms(2_000)
    detail = {
        "rate_class": "c",
        "paused_until_ms": str(START_MS + 5_000),
        "reason": "the provider said 429",
    }
    assert told(store, "a") == ("rate_class", False, detail, 3_000)
    clock.advance_ms(3_000)
    assert explain(store, "a").admissible


def test_a_job_heavier_than_the_smallest_burst_never_passes(store):
    rate_class(store, "c", "1/1000", 9, further=(BudgetConfig(1, 1000, 5),))
    enqueue(store, "a", rate_class="c", weight=6)
    detail = {"rate_class": "c", "weight": "6", "burst": "5", "oversize": "true"}
    assert told(store, "a") == ("rate_class", False, detail, None)
    assert ids(admit(store)) == []
    assert told(store, "a") == ("rate_class", False, detail, None)


def test_an_empty_bucket_tells_the_time_to_the_token(store):
    rate_class(store, "c", "5/1000", 5)
    fill(store, "spends", 5, rate_class="c")
    enqueue(store, "a", rate_class="c")
    assert len(admit(store, 5)) == 5
    detail = {
        "rate_class": "c",
        "weight": "1",
        "tokens_ahead_in_class": "0",
        "tokens_available": "0",
        "slot": "0",
    }
    assert told(store, "a") == ("rate_class", False, detail, 200)
    assert ids(admit(store)) == []
    assert told(store, "a") == ("rate_class", False, detail, 200)


def test_jobs_ahead_in_the_class_count_before_a_job_of_weight_two(store):
    rate_class(store, "c", "10/1000", 10)
    enqueue(store, "spends", rate_class="c", weight=10)
    assert len(admit(store)) == 1
    fill(store, "ahead", 3, rate_class="c", partition_key="")
    enqueue(store, "a", rate_class="c", weight=2)
    detail = {
        "rate_class": "c",
        "weight": "2",
        "tokens_ahead_in_class": "3",
        "tokens_available": "0",
        "slot": "0",
    }
    assert told(store, "a") == ("rate_class", False, detail, 500)


def test_the_estimate_is_rounded_up(store):
    rate_class(store, "c", "3/1000", 3)
    fill(store, "spends", 3, rate_class="c")
    enqueue(store, "a", rate_class="c")
    admit(store, 3)
    assert explain(store, "a").estimated_admission_ms == 334


def test_the_slowest_of_several_budgets_is_named(store):
    rate_class(store, "c", "100/1000", 100, further=(BudgetConfig(1, 60_000, 2),))
    fill(store, "spends", 2, rate_class="c")
    enqueue(store, "a", rate_class="c")
    admit(store, 2)
    found = explain(store, "a")
    assert found.detail["slot"] == "1"
    assert found.detail["tokens_available"] == "0"
    assert found.estimated_admission_ms == 60_000


def test_a_budget_that_never_refills_tells_no_time(store):
    rate_class(store, "c", "100/1000", 1, further=(BudgetConfig(0, 1_000, 1),))
    enqueue(store, "spends", rate_class="c")
    enqueue(store, "a", rate_class="c")
    admit(store, 1)
    found = explain(store, "a")
    assert (found.blocked_by, found.detail["slot"]) == ("rate_class", "1")
    assert found.estimated_admission_ms is None


def test_debt_counts_in_the_estimate(store):
    rate_class(store, "c", "1/1000", 1)
    enqueue(store, "spends", rate_class="c")
    enqueue(store, "a", rate_class="c")
    [claim] = admit(store, 1).claims
    store.ack(claim.lease_ref, Outcome.SUCCESS, actual_weight=4)
    found = explain(store, "a")
    assert found.detail["tokens_available"] == "-3"
    assert found.estimated_admission_ms == 4_000


def test_jobs_ahead_that_are_passed_over_cost_nothing(store, clock: Clock):
    rate_class(store, "c", "0/1000", 1)
    enqueue(store, "huge", rate_class="c", weight=2)
    enqueue(store, "bomb", rate_class="c", fingerprint="fp")
    enqueue(store, "a", rate_class="c")
    quarantine(store, clock, "fp")
    found = explain(store, "a")
    assert (found.admissible, found.detail["tokens_ahead_in_class"]) == (True, "0")
    assert ids(admit(store)) == ["a"]


def test_a_job_pinned_to_a_worker_that_nobody_saw_waits_for_it(store):
    enqueue(store, "a", sticky_worker="v")
    beat(store, "w")
    assert told(store, "a") == (
        "sticky_worker",
        False,
        {"sticky_worker": "v", "last_seen_ms": ""},
        None,
    )


def test_a_pinned_job_waits_once_its_worker_has_missed_three_beats(store, clock):
    enqueue(store, "a", sticky_worker="v")
    beat(store, "v", beat_ms=700)
    clock.advance_ms(2_100)
    assert explain(store, "a").admissible
    clock.advance_ms(1)
    assert told(store, "a") == (
        "sticky_worker",
        False,
        {"sticky_worker": "v", "last_seen_ms": str(START_MS)},
        None,
    )
    beat(store, "v", beat_ms=700)
    assert explain(store, "a").admissible


def test_the_missing_worker_is_told_before_its_class_and_after_its_queue(store):
    enqueue(store, "a", rate_class="c", sticky_worker="v")
    rate_class(store, "c", "0/1000", 1)
    policies(store).pause_rate_class("c", 1_000)
    assert explain(store, "a").blocked_by == "sticky_worker"
    steer(store).set_queue_paused("q", True)
    assert explain(store, "a").blocked_by == "queue_paused"


def test_a_partition_served_longer_ago_comes_first_in_the_class(store):
    rate_class(store, "c", "0/1000", 3)
    fill(store, "A", 3, rate_class="c")
    assert ids(admit(store, 1)) == ["A-1"]
    fill(store, "B", 2, rate_class="c")
    assert told(store, "A-2")[:2] == ("rate_class", False)
    assert explain(store, "B-2").admissible
    assert ids(admit(store)) == ["B-1", "B-2"]


def test_jobs_pinned_to_somebody_else_are_not_ahead(store):
    rate_class(store, "c", "0/1000", 1)
    beat(store, "v")
    enqueue(store, "theirs", rate_class="c", sticky_worker="v")
    enqueue(store, "a", rate_class="c")
    assert explain(store, "a").detail["tokens_ahead_in_class"] == "0"
    enqueue(store, "mine", rate_class="c", sticky_worker="v")
    assert explain(store, "mine").detail["tokens_ahead_in_class"] == "2"


def test_a_class_closed_for_a_heavier_job_keeps_a_lighter_one_out(store, clock):
    rate_class(store, "c", "1/1000", 3)
    enqueue(store, "spends", rate_class="c", weight=2)
    enqueue(store, "heavy", rate_class="c", weight=3)
    assert ids(admit(store)) == ["spends"]
    steer(store).operator_cancel("heavy")
    enqueue(store, "light", rate_class="c")
    assert told(store, "light") == (
        "rate_class",
        False,
        {
            "rate_class": "c",
            "weight": "1",
            "closed_until_ms": str(START_MS + 2_000),
        },
        2_000,
    )
    assert ids(admit(store)) == []
    clock.advance_ms(2_000)
    assert explain(store, "light").admissible
    assert ids(admit(store)) == ["light"]


def test_what_a_checkpoint_left_to_pay_is_explained(store):
    rate_class(store, "c", HOUR, 5)
    enqueue(store, "a", rate_class="c", weight=5)
    claim = claim_one(store)
    store.checkpoint(claim.lease_ref, Checkpoint(remaining_weight=0))
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    found = explain(store, "a")
    assert (found.admissible, found.detail["weight"]) == (True, "0")
    assert ids(admit(store)) == ["a"]


@pytest.mark.parametrize(
    ("strategy", "follows"),
    [
        ("queue", {}),
        ("discard", {"next": "archived"}),
        ("cancel_incoming", {"next": "cancelled"}),
    ],
)
def test_a_full_ceiling_tells_its_figures_and_what_follows(store, strategy, follows):
    ceiling(store, 2, strategy)
    fill(store, "A", 3)
    admit(store, 2)
    assert told(store, "A-3") == (
        "concurrency_limit",
        False,
        {
            "ceiling": "limit",
            "scope": "partition",
            "max_concurrent": "2",
            "inflight": "2",
            "on_saturated": strategy,
            **follows,
        },
        None,
    )
    assert ids(admit(store)) == []


def test_a_full_ceiling_that_displaces_does_not_block(store):
    ceiling(store, 1, "cancel_running")
    fill(store, "A", 2)
    admit(store, 1)
    found = explain(store, "A-2")
    assert (found.admissible, found.detail["inflight"]) == (True, "1")
    assert ids(admit(store)) == ["A-2"]


def test_a_freed_slot_is_seen_before_the_next_admission(store):
    ceiling(store, 1, "queue")
    fill(store, "A", 2)
    batch = admit(store)
    assert explain(store, "A-2").blocked_by == "concurrency_limit"
    ack_all(store, batch)
    found = explain(store, "A-2")
    assert (found.admissible, found.detail["inflight"]) == (True, "0")


@pytest.mark.parametrize("scope", ["queue", "class"])
def test_ceilings_of_every_scope_are_explained(store, scope):
    if scope == "queue":
        ceiling(store, 1, "queue", scope="queue")
    else:
        ceiling(store, 1, "queue", scope="class", queue="", rate_class="c")
    enqueue(store, "runs", "a", partition_key="A", rate_class="c")
    enqueue(store, "b", partition_key="B", rate_class="c")
    batch = admit(store, 1)
    for id in ("a", "b"):
        found = explain(store, id)
        assert (found.blocked_by, found.detail["scope"]) == ("concurrency_limit", scope)
    ack_all(store, batch)
    assert explain(store, "b").admissible


def test_of_several_full_ceilings_the_one_that_decides_is_named(store):
    ceiling(store, 1, "discard", name="a")
    ceiling(store, 1, "queue", name="c")
    ceiling(store, 1, "queue", name="b", scope="queue")
    fill(store, "A", 2)
    assert len(admit(store, 1)) == 1
    assert explain(store, "A-2").detail["ceiling"] == "b"
    assert ids(admit(store)) == []
    assert job(store, "A-2").state == "available"


def test_a_share_that_others_use_up_delays_but_does_not_block(store):
    fill(store, "A", 3)
    assert ids(admit(store, 1, quantum=1)) == ["A-1"]
    detail = {
        **place(1),
        "quantum": "automatic",
        "last_round": "1",
        "noisy": "false",
    }
    assert told(store, "A-3") == (None, True, detail, 0)
    policies(store).set_partition_quantum("q", "A", 2)
    assert told(store, "A-3") == (None, True, place(1), 0)
    policies(store).set_partition_quantum("q", "A", 1)
    assert told(store, "A-3")[2] == {**detail, "quantum": "1"}


def test_a_noisy_partition_is_told_so(store):
    fill(store, "A", 4)
    fill(store, "B", 3)
    assert len(admit(store, 2, quantum=2)) == 2
    assert explain(store, "A-4").detail["noisy"] == "true"


def test_a_job_that_nothing_keeps_back_is_admissible(store):
    enqueue(store, "a")
    assert told(store, "a") == (None, True, place(), 0)


def test_a_class_that_nobody_configured_is_unlimited(store):
    enqueue(store, "a", rate_class="nope")
    detail = {**place(), "rate_class": "nope", "tokens_available": UNLIMITED}
    assert told(store, "a") == (None, True, detail, 0)
    assert UNLIMITED == "unlimited (no such rate class)"


def test_an_admissible_job_tells_its_class_and_ceiling_and_worker(store):
    rate_class(store, "c", "5/1000", 5)
    ceiling(store, 4, "queue")
    enqueue(store, "a", rate_class="c", weight=2, sticky_worker="v")
    beat(store, "v")
    assert told(store, "a") == (
        None,
        True,
        {
            **place(),
            "rate_class": "c",
            "weight": "2",
            "tokens_ahead_in_class": "0",
            "tokens_available": "5",
            "ceiling": "limit",
            "scope": "partition",
            "max_concurrent": "4",
            "inflight": "0",
            "on_saturated": "queue",
            "sticky_worker": "v",
        },
        0,
    )


def test_priority_and_age_decide_the_position(store):
    enqueue(store, "old", scheduled_at_ms=1)
    enqueue(store, "young", scheduled_at_ms=2)
    enqueue(store, "urgent", scheduled_at_ms=3, priority=5)
    positions = [
        explain(store, id).detail["position_in_partition"]
        for id in ("urgent", "old", "young")
    ]
    assert positions == ["0", "1", "2"]


def test_positions_are_counted_up_to_a_bound(store):
    rate_class(store, "c", "0/1000", 2_000_000)
    fill(store, "A", MAX_AHEAD + 5, rate_class="c")
    last = explain(store, f"A-{MAX_AHEAD + 5}")
    assert last.detail["position_in_partition"] == str(MAX_AHEAD)
    assert last.detail["tokens_ahead_in_class"] == str(MAX_AHEAD)


def test_explaining_changes_nothing(store, backend: Backend, clock: Clock):
    rate_class(store, "c", "5/1000", 1)
    ceiling(store, 1, "queue")
    names = fill(store, "A", 3, rate_class="c") + fill(store, "B", 2)
    enqueue(store, "later", delay_ms=5)
    admit(store, 1)
    clock.advance_ms(10_000)
    for id in [*names, "later", "nobody"]:
        call = lambda id=id: steer(store).explain_admission(id)  # noqa: E731
        assert unchanged_by(backend, call) is None
    assert tokens(store, "c") == 1
