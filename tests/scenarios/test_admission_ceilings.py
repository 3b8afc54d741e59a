"""Ceilings: what they count, and what happens to a job that finds no room."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.lease import SentAway
from headgate_sync.lifecycle import Outcome
from headgate_sync.operations import BulkRequest
from headgate_sync.policy import Ceiling
from tests.backends import Backend, Clock
from tests.builders import crash, envelope, job, state_of, steer
from tests.scenarios.gate import (
    ack_all,
    admit,
    ceiling,
    deficits,
    dispatched,
    fill,
    ids,
    inflight,
    policies,
    rate_class,
    served,
    tokens,
)


def test_a_full_partition_waits_for_an_exit(store):
    ceiling(store, 2, "queue")
    fill(store, "A", 6)
    first = admit(store)
    assert ids(first) == ["A-1", "A-2"]
    assert first.refused == {"concurrency_limit": 1}
    assert ids(admit(store)) == []
    ack_all(store, first, only=["A-1"])
    assert ids(admit(store)) == ["A-3"]


def test_each_partition_has_the_limit_for_itself(store):
    ceiling(store, 1, "queue")
    for name in "ABC":
        fill(store, name, 2)
    assert ids(admit(store)) == ["A-1", "B-1", "C-1"]


def test_a_partition_that_another_workers_jobs_fill_earns_no_credit(
    store, backend: Backend
):
    ceiling(store, 1, "queue")
    fill(store, "own", 1, partition_key="A", sticky_worker="w1")
    assert ids(admit(store, worker="w1")) == ["own-1"]
    fill(store, "A", 1)
    fill(store, "B", 3)
    assert ids(admit(store, 1, quantum=1, worker="w2")) == ["B-1"]
    assert deficits(backend, "A", "B") == [0, 0]


def test_what_waits_at_a_ceiling_is_untouched(store, backend: Backend):
    ceiling(store, 2, "queue")
    fill(store, "A", 3)
    admit(store)
    waiting = backend.snapshot().jobs["A-3"]
    assert (waiting["state"], waiting["lease_id"], waiting["fence"]) == (
        "available",
        None,
        0,
    )


@pytest.mark.parametrize(
    ("strategy", "state", "reason"),
    [
        ("discard", "archived", "saturation_discard"),
        ("cancel_incoming", "cancelled", "saturation_cancel"),
    ],
)
def test_incoming_jobs_can_be_sent_away(
    store, backend: Backend, clock: Clock, strategy, state, reason
):
    ceiling(store, 1, strategy)
    fill(store, "A", 3)
    batch = admit(store, 10)
    assert ids(batch) == ["A-1"]
    assert batch.sent_away == (SentAway("q", strategy, 2),)
    for name in ("A-2", "A-3"):
        gone = job(store, name)
        assert (gone.state, gone.reason_code) == (state, reason)
        assert gone.finalized_at_ms == clock.now_ms()
        assert (gone.attempt, gone.fence, gone.claimed_by) == (0, 0, None)
    assert dispatched(backend, "q") == [3]
    assert steer(store).unfinished("q") == 1


def test_what_was_sent_away_is_told_by_queue_and_policy(store):
    ceiling(store, 1, "discard", name="a", queue="a")
    ceiling(store, 1, "cancel_incoming", name="a2", queue="a", scope="queue")
    ceiling(store, 1, "cancel_incoming", name="B", queue="B")
    fill(store, "A", 3, queue="a")
    fill(store, "A2", 1, queue="a")
    fill(store, "B", 2, queue="B")
    fill(store, "C", 2, queue="c")
    batch = admit(store, 10, queues=("a", "B", "c"))
    assert len(batch.claims) == 4
    assert batch.sent_away == (
        SentAway("B", "cancel_incoming", 1),
        SentAway("a", "cancel_incoming", 1),
        SentAway("a", "discard", 2),
    )
    assert admit(store, 10, queues=("a", "B", "c")).sent_away == ()


def test_the_newcomer_can_displace_the_running_job(store, backend: Backend):
    ceiling(store, 1, "cancel_running")
    fill(store, "A", 2)
    [old] = admit(store, 1).claims
    [new] = admit(store, 1).claims
    assert (old.envelope.id, new.envelope.id) == ("A-1", "A-2")
    displaced = job(store, "A-1")
    assert (displaced.state, displaced.fence) == ("cancelled", 1)
    assert displaced.lease_expires_at_ms is None
    with pytest.raises(LeaseRejected):
        store.ack(old.lease_ref, Outcome.SUCCESS)
    assert inflight(backend, "A") == 1
    assert dispatched(backend, "q") == [2]


def test_only_as_many_are_displaced_as_need_room(store, clock: Clock):
    ceiling(store, 2, "cancel_running")
    fill(store, "A", 1)
    admit(store)
    clock.advance_ms(1)
    fill(store, "B", 2, partition_key="A", scheduled_at_ms=2)
    assert ids(admit(store)) == ["B-1", "B-2"]
    assert state_of(store, "A-1") == "cancelled"


def test_the_oldest_claim_is_displaced(store, clock: Clock):
    ceiling(store, 2, "cancel_running")
    fill(store, "A", 3)
    admit(store, 1)
    clock.advance_ms(1)
    admit(store, 1)
    assert ids(admit(store, 1)) == ["A-3"]
    assert [state_of(store, f"A-{n}") for n in (1, 2)] == ["cancelled", "running"]


def test_the_oldest_claim_need_not_be_the_oldest_job(store, clock: Clock):
    ceiling(store, 2, "cancel_running")
    fill(store, "A", 1)
    fill(store, "urgent", 1, partition_key="A", priority=1)
    for name in ("urgent-1", "A-1"):
        assert ids(admit(store, 1)) == [name]
        clock.advance_ms(1)
    fill(store, "new", 1, partition_key="A")
    assert ids(admit(store, 1)) == ["new-1"]
    assert state_of(store, "urgent-1") == "cancelled"
    assert state_of(store, "A-1") == "running"


def test_a_call_does_not_displace_its_own_claims(store):
    ceiling(store, 2, "cancel_running")
    fill(store, "A", 5)
    assert ids(admit(store)) == ["A-1", "A-2"]
    assert state_of(store, "A-3") == "available"


def test_what_was_sent_away_does_not_fill_its_partition(store):
    ceiling(store, 3, "queue")
    ceiling(store, 1, "discard", name="whole", scope="queue")
    fill(store, "B", 1)
    running = admit(store)
    fill(store, "A", 3)
    assert admit(store).sent_away == (SentAway("q", "discard", 3),)
    ack_all(store, running)
    fill(store, "again", 1, partition_key="A")
    assert ids(admit(store)) == ["again-1"]


def test_capacity_bounds_what_is_sent_away(store):
    ceiling(store, 1, "discard")
    fill(store, "A", 5)
    assert ids(admit(store, 3)) == ["A-1"]
    states = [str(state_of(store, f"A-{n}")) for n in range(2, 6)]
    assert states == ["archived", "archived", "available", "available"]


def test_a_job_that_waits_at_a_ceiling_spends_no_token(store):
    rate_class(store, "c", "0/1000", 5)
    ceiling(store, 2, "queue")
    fill(store, "A", 10, rate_class="c")
    assert len(admit(store)) == 2
    assert tokens(store, "c") == 3


def test_a_job_sent_away_spends_no_token(store):
    rate_class(store, "c", "0/1000", 2)
    fill(store, "A", 4, rate_class="c")
    admit(store, 1)
    ceiling(store, 1, "discard")
    assert len(admit(store)) == 0
    assert [str(state_of(store, f"A-{n}")) for n in (2, 3, 4)] == ["archived"] * 3
    assert tokens(store, "c") == 1


def test_a_lowered_ceiling_cancels_nothing(store):
    ceiling(store, 4, "queue")
    fill(store, "A", 9)
    running = admit(store)
    ceiling(store, 2, "queue")
    found = []
    for name in ids(running):
        ack_all(store, running, only=[name])
        found.append(len(admit(store, 1)))
    assert found == [0, 0, 1, 1]


def exits(store, clock: Clock, claim, how: str) -> None:
    """Let a running job leave by one way."""
    if how in ("reclaimed", "quarantined"):
        crash(store, clock, claim)
    elif how == "cancelled":
        steer(store).operator_cancel(claim.envelope.id)
    elif how == "exhausted":
        store.ack(claim.lease_ref, Outcome.RETRY)
    else:
        delay_ms = 60_000 if how in ("snooze", "retry") else None
        store.ack(claim.lease_ref, Outcome(how), delay_ms=delay_ms)


@pytest.mark.parametrize(
    "how",
    [
        "success",
        "retry",
        "skip",
        "undecodable",
        "revoke",
        "snooze",
        "rate_limited",
        "exhausted",
        "reclaimed",
        "quarantined",
        "cancelled",
    ],
)
@pytest.mark.parametrize("retention_ms", [0, 1000])
def test_every_exit_frees_one_slot(
    make_store, backend: Backend, clock: Clock, how, retention_ms
):
    store = make_store(crash_limit=1 if how == "quarantined" else 3)
    ceiling(store, 2, "queue")
    attempts = 1 if how == "exhausted" else 5
    fill(store, "A", 3, retention_ms=retention_ms, max_attempts=attempts)
    first, _ = admit(store).claims
    exits(store, clock, first, how)
    ended = {"exhausted": "archived", "quarantined": "quarantined"}
    if how in ended:
        assert state_of(store, first.envelope.id) == ended[how]
    after = 0 if how in ("reclaimed", "quarantined") else 1
    assert inflight(backend, "A") == after
    assert len(admit(store)) == 1


@pytest.mark.parametrize("how", ["named", "an operation", "their queue deleted"])
def test_jobs_that_are_cancelled_together_free_a_slot_each(
    store, backend: Backend, how
):
    ceiling(store, 3, "queue")
    ceiling(store, 4, "queue", name="class", queue="", scope="class", rate_class="c")
    fill(store, "A", 5, rate_class="c")
    fill(store, "B", 1, rate_class="c", queue="other")
    running = ids(admit(store, queues=("q", "other")))
    assert sorted(running) == ["A-1", "A-2", "A-3", "B-1"]
    if how == "named":
        assert steer(store).cancel_jobs(["A-1", "A-2", "A-3", "A-4"]) == 4
    elif how == "an operation":
        steer(store).create_operation(
            BulkRequest(id="op", action="cancel", queue="q", state="running")
        )
        assert steer(store).run_pending_operations(10) == 3
    else:
        operation = steer(store).delete_queue("q", force=True)
        while steer(store).get_operation(operation).status != "completed":
            steer(store).run_pending_operations(10)
    fill(store, "again", 5, partition_key="A", rate_class="c")
    assert len(admit(store)) == 3
    assert inflight(backend, "A") == 3
    assert ids(admit(store, queues=("other",))) == []


def test_cancelling_a_waiting_job_frees_nothing(store, backend: Backend):
    ceiling(store, 1, "queue")
    fill(store, "A", 3)
    admit(store)
    steer(store).operator_cancel("A-2")
    assert inflight(backend, "A") == 1
    assert ids(admit(store)) == []


def test_a_queue_can_be_bounded_as_a_whole(store):
    ceiling(store, 3, "queue", scope="queue")
    for name in "ABC":
        fill(store, name, 2)
    batch = admit(store)
    assert len(batch) == 3
    assert len(admit(store)) == 0
    ack_all(store, batch, only=ids(batch)[:1])
    assert len(admit(store)) == 1


def test_a_new_ceiling_counts_what_left_each_queue_before_it_came(store):
    """Also where both were asked for at once, and only one of them had exits."""
    both = ("qa", "qb")
    for queue in both:
        fill(store, queue, 3, queue=queue)
    batch = admit(store, queues=both)
    ack_all(store, batch, only=[f"qb-{n}" for n in (1, 2, 3)])
    assert ids(admit(store, queues=both)) == []
    for queue in both:
        ceiling(store, 3, "queue", name=queue, queue=queue, scope="queue")
        fill(store, f"{queue}-more", 4, queue=queue)
    assert ids(admit(store, queues=both)) == [f"qb-more-{n}" for n in (1, 2, 3)]


def test_a_class_can_be_bounded_over_all_queues(store):
    ceiling(store, 2, "queue", queue="", scope="class", rate_class="c")
    fill(store, "A", 3, rate_class="c", queue="a")
    fill(store, "B", 3, rate_class="c", queue="b")
    fill(store, "free", 1, queue="b")
    first = admit(store, 1, queues=("a",))
    assert ids(admit(store, 9, queues=("b",))) == ["B-1", "free-1"]
    assert ids(admit(store, 9, queues=("a", "b"))) == []
    ack_all(store, first)
    assert ids(admit(store, 9, queues=("b",))) == ["B-2"]


def test_an_exit_frees_its_class_though_nothing_of_it_waits(store):
    ceiling(store, 1, "queue", queue="", scope="class", rate_class="c")
    fill(store, "A", 1, rate_class="c")
    ack_all(store, admit(store))
    fill(store, "plain", 1)
    assert ids(admit(store)) == ["plain-1"]
    fill(store, "again", 1, rate_class="c")
    assert ids(admit(store)) == ["again-1"]


def test_the_strongest_full_ceiling_decides(store):
    ceiling(store, 1, "cancel_running", name="weak")
    ceiling(store, 1, "discard", name="strong", scope="queue")
    fill(store, "A", 2)
    assert ids(admit(store)) == ["A-1"]
    assert state_of(store, "A-1") == "running"
    assert state_of(store, "A-2") == "archived"


def test_one_victim_can_make_room_under_two_ceilings(store, clock: Clock):
    ceiling(store, 1, "cancel_running", name="partition")
    ceiling(store, 2, "cancel_running", name="whole", scope="queue")
    fill(store, "A", 1)
    fill(store, "B", 1)
    assert len(admit(store)) == 2
    clock.advance_ms(1)
    fill(store, "new", 1, partition_key="A")
    assert ids(admit(store)) == ["new-1"]
    assert state_of(store, "A-1") == "cancelled"
    assert state_of(store, "B-1") == "running"


def test_a_missing_victim_displaces_nobody(store):
    """The candidate needs two, and the second could only be its own call's claim."""
    ceiling(store, 1, "cancel_running", name="partition")
    ceiling(store, 2, "cancel_running", name="whole", scope="queue")
    fill(store, "A", 1)
    admit(store)
    fill(store, "B", 1, scheduled_at_ms=2)
    fill(store, "B2", 1, partition_key="B", scheduled_at_ms=3)
    assert ids(admit(store)) == ["B-1"]
    assert state_of(store, "A-1") == "running"
    assert state_of(store, "B2-1") == "available"


def test_a_victim_makes_no_room_in_a_partition_of_that_name_elsewhere(store):
    ceiling(store, 1, "discard", name="a", queue="qa")
    ceiling(store, 1, "cancel_running", queue="", scope="class", rate_class="c")
    steer(store).set_queue_weight("qb", 3)
    fill(store, "X", 1, queue="qa", partition_key="p")
    fill(store, "Y", 1, queue="qb", partition_key="p", rate_class="c")
    for queue in ("qa", "qb"):
        assert len(admit(store, queues=(queue,))) == 1
    fill(store, "more", 1, queue="qa", partition_key="p")
    fill(store, "new", 1, queue="qb", partition_key="p", rate_class="c")
    assert ids(admit(store, queues=("qa", "qb"))) == ["new-1"]
    found = {name: str(state_of(store, f"{name}-1")) for name in ("X", "Y", "more")}
    assert found == {"X": "running", "Y": "cancelled", "more": "archived"}


def test_two_ceilings_that_one_victim_does_not_relieve_take_two(store, clock: Clock):
    """The second one was lowered below what is running."""
    ceiling(store, 1, "cancel_running", name="partition")
    ceiling(store, 2, "cancel_running", name="whole", scope="queue")
    for name in "AB":
        fill(store, name, 1)
        assert ids(admit(store)) == [f"{name}-1"]
        clock.advance_ms(1)
    ceiling(store, 1, "cancel_running", name="whole", scope="queue")
    fill(store, "new", 1, partition_key="A")
    assert ids(admit(store)) == ["new-1"]
    assert [state_of(store, f"{name}-1") for name in "AB"] == ["cancelled"] * 2


def test_the_narrowest_ceiling_chooses_the_victim(store, clock: Clock):
    """Whoever leaves the partition leaves its class as well, so that one is enough."""
    ceiling(
        store,
        2,
        "cancel_running",
        name="class",
        queue="",
        scope="class",
        rate_class="c",
    )
    ceiling(store, 1, "cancel_running", name="partition")
    for name in "AB":
        fill(store, name, 1, rate_class="c")
        assert ids(admit(store)) == [f"{name}-1"]
        clock.advance_ms(1)
    fill(store, "new", 1, partition_key="B", rate_class="c")
    assert ids(admit(store)) == ["new-1"]
    found = [str(state_of(store, f"{name}-1")) for name in "AB"]
    assert found == ["running", "cancelled"]


def test_the_lowest_of_two_alike_chooses_the_victim(store, clock: Clock):
    """So that it does not matter which of them was made first."""
    for name in "AB":
        fill(store, name, 1, partition_key="p")
        assert ids(admit(store)) == [f"{name}-1"]
        clock.advance_ms(1)
    ceiling(store, 2, "cancel_running", name="a")
    ceiling(store, 1, "cancel_running", name="b")
    fill(store, "new", 1, partition_key="p")
    assert ids(admit(store)) == ["new-1"]
    found = [str(state_of(store, f"{name}-1")) for name in "AB"]
    assert found == ["cancelled", "running"]


@pytest.mark.parametrize(
    "counted",
    [
        {"queue": "", "scope": "class", "rate_class": "c"},
        {"queue": "qa", "scope": "queue"},
    ],
)
def test_who_finds_nobody_to_displace_hides_no_other_work(store, counted):
    """The class, or the queue, has more waiting partitions than a call looks at."""
    ceiling(store, 1, "cancel_running", **counted)
    for n in range(100):
        fill(store, f"p{n:03}", 1, queue="qa", rate_class="c")
    fill(store, "z", 1, queue="qb" if counted["queue"] else "qa")
    asked = {"capacity": 10, "quantum": 0, "queues": ("qa", "qb")}
    batch = admit(store, **asked)
    assert ids(batch) == ["p000-1", "z-1"]
    # What waits behind a settled ceiling is not looked at lane by lane.
    assert batch.refused["concurrency_limit"] < 100


def test_full_partitions_do_not_hide_an_open_one(store):
    ceiling(store, 1, "queue")
    partitions = 300
    for turn in range(2):
        store.enqueue(
            [
                envelope(f"{name}-{turn}", partition_key=f"p{name:03}")
                for name in range(partitions)
            ]
        )
    assert sum(len(admit(store)) for _ in range(partitions // 100)) == partitions
    fill(store, "zz", 1, scheduled_at_ms=9)
    assert served(admit(store, 1)) == {"zz": 1}


def test_a_new_ceiling_bars_what_is_full_and_a_deleted_one_frees_it(store):
    """In more partitions than a call looks at."""
    partitions = 300
    for turn in range(2):
        store.enqueue(
            [envelope(f"{n}-{turn}", partition_key=f"p{n}") for n in range(partitions)]
        )
    admitted = sum(len(admit(store, 100, quantum=1)) for _ in range(3))
    assert admitted == partitions
    ceiling(store, 1, "queue")
    fill(store, "zz", 1, scheduled_at_ms=9)
    assert served(admit(store, 10)) == {"zz": 1}
    assert policies(store).delete_concurrency_limit("limit")
    assert len(admit(store, 10)) == 10
    assert not policies(store).delete_concurrency_limit("limit")


def test_a_ceiling_cannot_be_moved(store):
    ceiling(store, 1, "queue")
    with pytest.raises(InvalidRequest, match="counts something else; delete it first"):
        ceiling(store, 1, "queue", queue="other")
    [stored] = policies(store).concurrency_limits()
    assert stored.queue == "q"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_concurrent": 0}, "max_concurrent is 0"),
        ({"on_saturated": "drop"}, "on_saturated is 'drop'"),
        ({"scope": "job"}, "scope is 'job'"),
        ({"queue": ""}, "queue must not be empty: a limit of scope partition needs it"),
        ({"rate_class": "c"}, "names a queue and no rate_class"),
        ({"scope": "class"}, "rate_class must not be empty: a limit of scope class"),
        ({"scope": "class", "rate_class": "c"}, "names a rate_class and no queue"),
    ],
)
def test_a_ceiling_that_makes_no_sense_is_refused(fields, text):
    values = {"name": "limit", "queue": "q", "max_concurrent": 1, **fields}
    with pytest.raises(InvalidRequest, match=text):
        Ceiling(**values)
