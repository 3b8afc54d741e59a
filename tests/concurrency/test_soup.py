"""Everything at once for a while: what comes in goes out once, and books balance."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

from headgate_sync.errors import (
    DuplicateJob,
    FingerprintQuarantined,
    InvalidRequest,
    LeaseRejected,
    NotFound,
)
from headgate_sync.lease import Ack, Checkpoint
from headgate_sync.lifecycle import UNFINISHED, Outcome
from tests.builders import admit, counts, envelope, envelopes, steer
from tests.concurrency.threads import outcome_of, together

QUEUES = ("q0", "q1", "q2")


def produce(store, name, rounds):
    """Enqueue batches over all queues, some with a contested key."""
    luck, accepted = random.Random(name), []
    for round in range(rounds):
        batch = [
            envelope(
                f"{name}-{round}-{n}",
                queue=luck.choice(QUEUES),
                partition_key=luck.choice("xyz"),
                priority=luck.randint(0, 2),
                retention_ms=luck.choice([0, 5]),
                delay_ms=luck.choice([0, 0, 1]),
                unique_key=luck.choice([None, None, None, b"k1", b"k2"]),
            )
            for n in range(luck.randint(1, 6))
        ]
        if outcome_of(lambda batch=batch: store.enqueue(batch), DuplicateJob) is None:
            accepted += [job.id for job in batch]
    return accepted


def consume(store, name, rounds):
    """Claim and end attempts in every way; returns the ids that ended for good."""
    luck, ended = random.Random(name), []
    for round in range(rounds):
        queues = luck.sample(QUEUES, luck.randint(1, 3))
        claims = admit(
            store, f"{name}-{round}", capacity=luck.randint(1, 12), queues=queues
        ).claims
        store.renew([claim.lease_ref for claim in claims], lease_ms=60_000)
        acks = []
        for claim in claims:
            if luck.random() < 0.3:
                store.checkpoint(claim.lease_ref, Checkpoint(completed_steps=("s",)))
            outcome = luck.choice(
                [Outcome.SUCCESS] * 3
                + [Outcome.RETRY, Outcome.SNOOZE, Outcome.RATE_LIMITED, Outcome.REVOKE]
            )
            delay_ms = 1 if outcome in {Outcome.RETRY, Outcome.SNOOZE} else None
            acks.append(Ack(lease=claim.lease_ref, outcome=outcome, delay_ms=delay_ms))
        luck.shuffle(acks)
        for ack, error in zip(acks, store.ack_batch(acks), strict=True):
            gone = isinstance(error, LeaseRejected)
            if not gone and ack.outcome in {Outcome.SUCCESS, Outcome.REVOKE}:
                ended.append(ack.lease.job_id)
    return ended


def keep_house(store, clock, rounds):
    """Run all sweeps; the clock moves on between them."""
    for _ in range(rounds):
        clock.advance_ms(1)
        store.promote_due(20)
        store.reclaim_expired(20)
        store.evict_retained(20)
        steer(store).quarantine_sweep(20)
        if store.maintenance is not None:
            store.maintenance.gate_fold(50)
            store.maintenance.gate_reconcile(10)
    return []


def meddle(store, rounds):
    """Steer jobs and queues that others are working on."""
    luck, ended = random.Random(7), []
    for _ in range(rounds):
        id = f"p{luck.randint(0, 2)}-{luck.randint(0, rounds)}-{luck.randint(0, 5)}"
        verb = luck.choice(["operator_cancel", "operator_retry", "delete_job"])
        refused = outcome_of(
            lambda verb=verb, id=id: getattr(steer(store), verb)(id),
            NotFound,
            InvalidRequest,
            DuplicateJob,
        )
        if refused is None and verb == "delete_job":
            ended.append(id)
        queue = luck.choice(QUEUES)
        steer(store).set_queue_paused(queue, luck.random() < 0.2)
        steer(store).set_queue_weight(queue, luck.randint(1, 3))
    for queue in QUEUES:
        steer(store).set_queue_paused(queue, False)
    return ended


def settle_down(store, clock):
    """Run what is left to its end."""
    for _ in range(200):
        clock.advance_ms(60_000)
        store.promote_due(1_000)
        store.reclaim_expired(1_000)
        claims = admit(store, capacity=500, queues=QUEUES).claims
        store.ack_batch(
            [Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS) for claim in claims]
        )
        if not set(counts(store)) & {state.value for state in UNFINISHED}:
            return
    raise AssertionError(f"never came to rest: {counts(store)}")


def test_everything_at_once_keeps_the_books(backend, make_store, clock):
    store = make_store(crash_limit=10)
    rounds = 80
    answers = together(
        [
            *[lambda n=n: produce(store, f"p{n}", rounds) for n in range(3)],
            *[lambda n=n: consume(store, f"c{n}", rounds) for n in range(3)],
            lambda: keep_house(store, clock, rounds),
            lambda: meddle(store, rounds),
        ]
    )
    accepted = {id for ids in answers[:3] for id in ids}
    backend.audit()
    settle_down(store, clock)
    ended = Counter(id for ids in answers[3:6] for id in ids)
    assert set(ended) <= accepted
    assert {id for id, times in ended.items() if times > 1} <= set(answers[7])
    assert [steer(store).unfinished(queue) for queue in QUEUES] == [0, 0, 0]


def test_quarantine_and_release_cross_with_intake_and_admission(make_store, clock):
    store = make_store(crash_limit=1)

    def crash_and_release():
        moved = 0
        for _ in range(15):
            clock.advance_ms(10)
            store.reclaim_expired(100)
            steer(store).quarantine_sweep(100)
            found = outcome_of(
                lambda: steer(store).quarantine_release("poison"), NotFound
            )
            moved += found if isinstance(found, int) else 0
        return moved

    def intake(name):
        taken = 0
        for n in range(40):
            job = envelope(f"{name}{n}", fingerprint="poison")
            refused = outcome_of(
                lambda job=job: store.enqueue([job]), FingerprintQuarantined
            )
            taken += refused is None
        return taken

    def claim():
        return [len(admit(store, capacity=3, lease_ms=5).claims) for _ in range(40)]

    together([crash_and_release, lambda: intake("a"), lambda: intake("b"), claim])
    clock.advance_ms(10)
    store.reclaim_expired(1_000)
    steer(store).quarantine_sweep(1_000)
    if outcome_of(lambda: steer(store).quarantine_release("poison"), NotFound):
        assert set(counts(store)) <= {"available"}


def test_workers_in_several_processes_share_the_jobs(crowd):
    store = crowd.make_store()
    ids = [f"n{n:04}" for n in range(600)]
    for start in range(0, 600, 100):
        store.enqueue(
            envelopes(
                *ids[start : start + 100], partition_key=str(start), max_attempts=9
            )
        )
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.concurrency.process",
                str(n),
                crowd.pool.conninfo,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    done: Counter[str] = Counter()
    try:
        for each in running:
            told, _ = each.communicate(timeout=120)
            assert each.returncode == 0
            done.update(told.split())
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
                each.wait()
    assert sorted(done) == ids
    assert set(done.values()) == {1}
    assert counts(store) == {"completed": 600}
