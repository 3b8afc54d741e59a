"""Whatever a constructor lets pass, both stores keep, and keep alike."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate_sync.lease import AdmitRequest
from headgate_sync.lifecycle import Outcome
from tests import observe, strategies
from tests.builders import LEASE_MS, envelope, run_one, steer

# The fixture is emptied by `make_store` at the start of each example.
pytestmark = pytest.mark.usefixtures("memory", "postgres")
any_value = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def on_both(memory, postgres, play):
    """Play the same on both stores; the answers and what is stored have to agree."""
    answers = [play(backend, backend.make_store()) for backend in (memory, postgres)]
    assert answers[0] == answers[1]
    found = observe.differences(memory.snapshot(), postgres.snapshot())
    assert not found, "\n".join(found)
    postgres.audit()


@any_value
@given(
    batch=st.lists(
        strategies.any_envelopes(), min_size=1, max_size=3, unique_by=lambda e: e.id
    )
)
def test_any_job_is_stored_alike_and_comes_back_whole(memory, postgres, batch):
    batch = [evolve(e, unique_key=None, unique_window_ms=0) for e in batch]

    def play(backend, store):
        store.enqueue(batch)
        backend.clock.freeze_at(2**62)
        store.promote_due(10)
        claims = []
        for one in batch:
            request = AdmitRequest(
                worker=one.sticky_worker,
                lease_id="lease",
                queues=(one.queue,),
                capacity=10,
                lease_ms=LEASE_MS,
            )
            claims += store.admit(request).claims
        sent = {one.id: one for one in batch}
        for claim in claims:
            found, one = claim.envelope, sent[claim.envelope.id]
            assert found.headers == one.headers
            assert found.payload == one.payload
            assert found.tags == one.tags
        return claims

    on_both(memory, postgres, play)


@any_value
@given(
    one=strategies.any_envelopes(id="first"), two=strategies.any_envelopes(id="second")
)
def test_any_two_jobs_meet_alike(memory, postgres, one, two):
    two = evolve(two, unique_key=one.unique_key, unique_window_ms=one.unique_window_ms)

    def play(backend, store):
        store.enqueue([one])
        try:
            store.enqueue([two])
        except Exception as error:
            return type(error), str(error)
        return None

    on_both(memory, postgres, play)


@any_value
@given(data=st.data())
def test_any_ack_is_stored_alike(memory, postgres, data):
    max_attempts = data.draw(st.sampled_from([1, 2**31 - 1]))
    retention_ms = data.draw(st.sampled_from([0, 1]))
    drawn = []

    def play(backend, store):
        claim = run_one(
            store, "a", max_attempts=max_attempts, retention_ms=retention_ms
        )
        if not drawn:
            ref = evolve(claim.lease_ref, lease_id="lease")
            drawn.append(data.draw(strategies.any_acks(ref)))
        return store.ack_batch([evolve(drawn[0], lease=claim.lease_ref)])

    on_both_but_leases(memory, postgres, play)


def on_both_but_leases(memory, postgres, play):
    """`on_both` where each store was asked under a lease id of its own."""
    answers = [play(backend, backend.make_store()) for backend in (memory, postgres)]
    assert answers[0] == answers[1]
    found = observe.differences(memory.snapshot(), postgres.snapshot())
    found = [line for line in found if "lease_id" not in line]
    assert not found, "\n".join(found)
    postgres.audit()


@any_value
@given(
    checkpoint=strategies.any_checkpoints(),
    progress=strategies.any_progress(),
    worker=strategies.ascii_texts(255),
    lease_id=strategies.texts(min_size=1),
)
def test_anything_a_holder_writes_is_stored_alike(
    memory, postgres, checkpoint, progress, worker, lease_id
):
    def play(backend, store):
        store.enqueue([envelope("a")])
        request = AdmitRequest(
            worker=worker,
            lease_id=lease_id,
            queues=("q",),
            capacity=1,
            lease_ms=LEASE_MS,
        )
        (claim,) = store.admit(request).claims
        store.checkpoint(claim.lease_ref, checkpoint)
        assert steer(store).read_checkpoint("a") == checkpoint
        store.progress.write_job_progress(claim.lease_ref, progress)
        backend.clock.advance_ms(LEASE_MS)
        reclaimed = store.reclaim_expired(10)
        backend.clock.advance_ms(1_000)
        store.promote_due(10)
        again = store.admit(evolve(request, lease_id="lease")).claims
        store.ack(again[0].lease_ref, Outcome.SUCCESS)
        return claim, reclaimed, again

    on_both(memory, postgres, play)


@any_value
@given(
    name=strategies.texts(min_size=1),
    holder=strategies.texts(min_size=1),
    other=strategies.texts(min_size=1),
)
def test_any_duty_is_held_alike(memory, postgres, name, holder, other):
    def play(backend, store):
        told = [
            store.claim_duty(name, holder, 1_000),
            store.claim_duty(name, other, 1_000),
            store.duty_tick(holder, [other, name], 1_000),
        ]
        backend.clock.advance_ms(1_000)
        return [*told, store.claim_duty(name, other, 1_000)]

    on_both(memory, postgres, play)
