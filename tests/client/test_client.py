"""Enqueueing through a client: one store call, typed answers, no half batches."""

from __future__ import annotations

import os
from typing import Any

import attrs
import pytest

from headgate_sync.app import Headgate
from headgate_sync.client import Client, JobClient, JobHandle
from headgate_sync.context import JobContext
from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.errors import (
    Backpressure,
    DuplicateJob,
    EnqueueForbidden,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    LeaseLost,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.identity import Identity, enqueue_identity
from headgate_sync.lifecycle import State
from headgate_sync.memory.store import MemStore
from headgate_sync.options import TaskOptions, Unique
from headgate_sync.registry import Registry
from headgate_sync.task import task
from tests.builders import (
    DAY_MS,
    admit,
    beat,
    claim_one,
    counts,
    envelope,
    state_of,
)
from tests.worker.rig import Tap, working

registry = Registry()


@registry.task("order:ship", queue="q", partition="{tenant}")
def ship(order_id: int, tenant: str = "acme") -> None: ...


@registry.task("order:bill", queue="q", unique="{order_id}")
def bill(order_id: int, amount: int = 1) -> None: ...


@task("mail", queue="q")
@attrs.frozen
class Mail:
    to: str


@pytest.fixture
def client(store):
    return Client(store, defaults=TaskOptions(retention="1d"))


def jobs(store):
    """The jobs that wait in the queue, by claiming them all."""
    found = []
    while claims := admit(store, capacity=100, queues=("q", "slow")).claims:
        found += [claim.envelope for claim in claims]
    return found


def test_a_job_is_stored_as_its_task_says(client, store):
    handle = client.enqueue(ship.job(7))
    claim = claim_one(store)
    assert handle == JobHandle(id=claim.envelope.id, kind="order:ship", queue="q")
    assert claim.envelope.payload == b'{"order_id":7}'
    assert claim.envelope.partition_key == "acme"
    assert claim.envelope.retention_ms == DAY_MS
    assert claim.envelope.fingerprint == fingerprint("order:ship", b'{"order_id":7}')


def test_instances_requests_and_envelopes_are_jobs(client, store):
    handles = client.enqueue_many(
        [Mail("ada"), ship.using(priority=5).job(1), envelope("raw", fingerprint="")]
    )
    found = {job.id: job for job in jobs(store)}
    assert set(found) == {handle.id for handle in handles}
    assert [handle.kind for handle in handles] == ["mail", "order:ship", "tk:msg"]
    assert found["raw"].fingerprint == fingerprint("tk:msg", b"ok")


@pytest.mark.parametrize(
    "job", [None, 3, "order:ship", ship, Mail, b"", {"order_id": 1}]
)
def test_anything_else_is_no_job(client, job):
    with pytest.raises(InvalidRequest, match="is no job"):
        client.enqueue(job)


def test_options_of_the_call_win_over_those_of_the_request(client, store):
    client.enqueue(ship.using(priority=1, queue="slow").job(1), priority=2)
    client.enqueue(ship.using(delay="1h", priority=1).job(2), run_at=None, delay=None)
    found = {job.payload: job for job in jobs(store)}
    assert found[b'{"order_id":1}'].priority == 2
    assert found[b'{"order_id":1}'].queue == "slow"
    assert found[b'{"order_id":2}'].priority == 1


def test_an_envelope_takes_no_options(client):
    with pytest.raises(
        InvalidRequest, match="an Envelope takes no options, got priority"
    ):
        client.enqueue(envelope("a"), priority=1)


def test_ids_are_fresh_and_rise(client):
    handles = [client.enqueue(ship.job(n)) for n in range(100)]
    ids = [handle.id for handle in handles]
    assert ids == sorted(set(ids))


def test_a_delay_counts_from_store_time(client, store, clock):
    handle = client.enqueue(ship.job(1), delay="5m")
    job = store.inspect.get_job(handle.id)
    assert (job.state, job.scheduled_at_ms) == (
        State.SCHEDULED,
        clock.now_ms() + 300_000,
    )


def test_the_same_id_with_the_same_content_is_a_replay(client, store):
    first = client.enqueue(ship.job(1), id="once")
    assert client.enqueue(ship.job(1), id="once") == first
    with pytest.raises(IdConflict, match="id conflict: job once exists"):
        client.enqueue(ship.job(2), id="once")
    assert len(jobs(store)) == 1


def test_a_held_key_is_a_typed_answer_that_can_be_joined(client, store):
    first = client.enqueue(bill.job(7))
    with pytest.raises(DuplicateJob) as caught:
        client.enqueue(bill.job(7))
    assert (caught.value.existing_id, caught.value.replaced) == (first.id, False)
    joined = client.enqueue_or_join(bill.job(7))
    assert joined == JobHandle(id=first.id, kind="order:bill", queue="q", joined=True)
    other = client.enqueue_or_join(bill.job(8))
    assert not other.joined
    assert len(jobs(store)) == 2


def test_a_replacement_is_a_success_of_the_request(client, store):
    rule = Unique("{order_id}", replace=("payload", "priority"))
    first = client.enqueue(bill.job(7), unique=rule)
    for call in (
        lambda: client.enqueue(bill.job(7, 2), unique=rule, priority=3),
        lambda: client.enqueue_or_join(bill.job(7, 2), unique=rule, priority=3),
        lambda: client.enqueue_many([bill.using(unique=rule, priority=3).job(7, 2)])[0],
    ):
        handle = call()
        assert (handle.id, handle.replaced, handle.joined) == (first.id, True, False)
    (job,) = jobs(store)
    assert (job.payload, job.priority) == (b'{"amount":2,"order_id":7}', 3)


def test_a_replacement_that_wrote_nothing_is_a_duplicate(client, store):
    rule = Unique("{order_id}", replace="scheduled_at")
    client.enqueue(bill.job(7), unique=rule)
    with pytest.raises(DuplicateJob):
        client.enqueue(bill.job(7), unique=rule)


def test_a_batch_is_all_or_nothing(client, store):
    client.enqueue(bill.job(7))
    with pytest.raises(DuplicateJob):
        client.enqueue_many([ship.job(1), Mail("x"), bill.job(7)])
    with pytest.raises(InvalidRequest, match="order_id: expected int, got str"):
        client.enqueue_many([ship.job(1), *(ship.job(x) for x in (2, "3"))])  # type: ignore[arg-type]
    with pytest.raises(IdConflict):
        client.enqueue_many([ship.using(id="a").job(1), ship.using(id="a").job(2)])
    assert len(jobs(store)) == 1


def test_an_empty_batch_is_nothing(client):
    assert client.enqueue_many([]) == []


def test_more_than_a_thousand_jobs_are_never_split_silently(client, store):
    with pytest.raises(InvalidRequest, match="batch has 1001 jobs, the limit is 1000"):
        client.enqueue_many(ship.job(n) for n in range(1001))
    assert jobs(store) == []


def test_chunks_are_sent_as_they_are_iterated(client, store):
    taken = []

    def source():
        for n in range(7):
            taken.append(n)
            yield ship.job(n)

    chunks = client.enqueue_chunks(source(), size=3)
    assert taken == []
    assert [len(next(chunks)), len(taken)] == [3, 3]
    assert [len(chunk) for chunk in chunks] == [3, 1]
    assert len(jobs(store)) == 7


@pytest.mark.parametrize("size", [0, -1, 1001, "5", 2.0, True])
def test_the_size_of_a_chunk_is_checked_at_the_call(client, size):
    with pytest.raises(InvalidRequest, match="size is"):
        client.enqueue_chunks([], size=size)


def test_refusals_of_the_store_come_out_typed(client, store, make_store):
    store.inspect.set_enqueue_limit("q", 1)
    client.enqueue(ship.job(1))
    with pytest.raises(Backpressure) as full:
        client.enqueue(ship.job(2))
    assert (full.value.queue, full.value.limit, full.value.current) == ("q", 1, 1)


def test_a_quarantined_content_is_refused(make_store, clock):
    store = make_store(crash_limit=1)
    client = Client(store)
    client.enqueue(ship.job(1))
    claim_one(store, lease_ms=1)
    clock.advance_ms(2)
    store.reclaim_expired(10)
    with pytest.raises(FingerprintQuarantined):
        client.enqueue(ship.job(1))
    client.enqueue(ship.job(2))


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        (lambda: Mail("x" * 1_048_576), "task mail: payload has 1048585 bytes"),
        (
            lambda: bill.using(unique="{order_id}" * 600).job(10),
            "unique_key has 1200 bytes",
        ),
    ],
)
def test_what_is_too_large_is_refused_before_the_store(client, store, job, fault):
    with pytest.raises(InvalidRequest, match=fault):
        client.enqueue(job())
    assert jobs(store) == []


def test_a_store_without_transactions_refuses_them():
    client = Client(MemStore())
    with pytest.raises(
        Unsupported, match="MemStore cannot join a transaction"
    ) as caught:
        client.enqueue(ship.job(1), tx=object())
    assert caught.value.capability == "transactional"


def test_an_immediate_client_sends_past_the_transaction():
    store = MemStore()
    client = Client(store, tx="immediate")
    client.enqueue(ship.job(1), tx=object())
    assert len(jobs(store)) == 1


def test_a_client_of_a_callers_store_is_not_used_after_a_fork():
    client = Client(MemStore())
    child = os.fork()
    if child == 0:
        try:
            client.enqueue(ship.job(1))
        except RuntimeError as error:
            said = str(error)
            told = said.startswith("client used after fork: ") and "child" in said
            os._exit(0 if told else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.enqueue(ship.job(1))


# Inside a handler

PARENT = {
    "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
    "tracestate": "v=1",
    "own": "x",
}


class Stop:
    """Stands for the context's check."""

    def __init__(self) -> None:
        self.stopped = False

    def __call__(self) -> None:
        if self.stopped:
            raise LeaseLost("stop")


@pytest.fixture
def stop():
    return Stop()


@pytest.fixture
def inner(client, stop):
    return JobClient(client, check=stop, headers=PARENT)


def test_a_child_gets_the_trace_of_its_parent(inner, store):
    inner.enqueue(ship.job(1))
    inner.enqueue_many([ship.job(2)])
    inner.enqueue_or_join(ship.job(3))
    for job in jobs(store):
        assert dict(job.headers) == {
            k: PARENT[k] for k in ("traceparent", "tracestate")
        }


def test_a_child_keeps_a_trace_of_its_own(inner, store):
    own = {"traceparent": f"00-{'c' * 32}-{'d' * 16}-00"}
    inner.enqueue(ship.job(1), headers=own)
    inner.enqueue(Envelope(id="e", kind="x", queue="q", headers=own))
    assert [dict(job.headers) for job in jobs(store)] == [own, own]


def test_a_child_is_enqueued_as_whoever_the_handler_names(store, stop):
    asked = []

    def authorizer(authorization, job):
        asked.append(authorization.identity)
        return True

    inner = JobClient(Client(store, authorizer=authorizer), check=stop, headers=PARENT)
    one, other = Identity("one"), Identity("other")
    inner.enqueue(ship.job(1))
    inner.enqueue(ship.job(2), identity=one)
    inner.enqueue_or_join(ship.using(identity=other).job(3))
    with enqueue_identity(one):
        inner.enqueue_many([ship.job(4)])
        inner.enqueue_many([ship.job(5)], identity=other)
    assert asked == [None, one, other, one, other]


def test_a_handler_enqueues_through_the_parts_of_its_facade(store):
    trail = []

    def middleware(request, proceed):
        trail.append([(job.kind, dict(job.headers)) for job in request.batch])
        proceed(request)

    hg = Headgate(
        store,
        middleware=[middleware],
        authorizer=lambda asked, job: job.kind != "secret",
    )

    @hg.task("child", queue="q")
    def child() -> None: ...

    @hg.task("secret", queue="q")
    def secret() -> None: ...

    @hg.task("parent", queue="q", retention="1d")
    def parent(ctx: JobContext) -> str:
        ctx.client.enqueue(child.job())
        with pytest.raises(EnqueueForbidden):
            ctx.client.enqueue(secret.job())
        return "ok"

    trace = {k: PARENT[k] for k in ("traceparent", "tracestate")}
    with working(store, hg.registry, producer=hg.client):
        done = parent.using(headers=trace).enqueue_and_wait(timeout="20s")
    assert done.unwrap() == "ok"
    assert trail == [
        [("parent", trace)],
        [("child", trace)],
        [("secret", trace)],
    ]


def test_after_the_lease_is_lost_no_child_appears(inner, store, stop):
    stop.stopped = True
    for call in (
        lambda: inner.enqueue(ship.job(1)),
        lambda: inner.enqueue_or_join(ship.job(1)),
        lambda: inner.enqueue_many([ship.job(1)]),
    ):
        with pytest.raises(LeaseLost):
            call()
    assert jobs(store) == []


def test_the_client_of_an_attempt_ends_with_it(inner, store):
    inner.close()
    with pytest.raises(RuntimeError, match="ends with the attempt"):
        inner.enqueue(ship.job(1))
    assert jobs(store) == []


# Pinned jobs


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def inspected(store: Any) -> Any:
    """A store whose inspection is tapped."""
    tapped: Any = Tap(store)
    tapped.inspect = Tap(store.inspect)
    return tapped


@pytest.mark.parametrize("piped", [False, True])
def test_a_worker_that_was_never_seen_is_warned_of_once(store, caplog, piped):
    parts = {"authorizer": lambda asked, job: True} if piped else {}
    client = Client(store, **parts)
    beat(store, "gpu-1")
    client.enqueue_many(
        [
            envelope("a"),
            envelope("b", sticky_worker="gpu-1"),
            envelope("c", sticky_worker="gpu-2"),
            envelope("d", sticky_worker="gpu-2"),
        ]
    )
    client.enqueue(envelope("e", sticky_worker="gpu-2"))
    [warning] = warnings(caplog)
    assert warning == (
        "job c in queue q is pinned to worker gpu-2, which was never seen: "
        "it waits until a worker of this id comes"
    )


def test_a_worker_that_cannot_be_looked_up_is_looked_up_with_the_next_job(
    store, caplog
):
    tapped = inspected(store)
    client = Client(tapped)
    tapped.inspect.fail("get_worker", StoreUnavailable("away"))
    client.enqueue(envelope("a", sticky_worker="gpu-2"))
    assert warnings(caplog) == []
    client.enqueue(envelope("b", sticky_worker="gpu-2"))
    assert len(warnings(caplog)) == 1
    assert counts(store) == {"available": 2}


@pytest.mark.needs("transactional")
def test_a_pinned_job_of_a_transaction_asks_for_no_second_connection(
    store, backend, caplog
):
    tapped = inspected(store)
    with backend.pool.connection() as connection, connection.transaction():
        Client(tapped).enqueue(envelope("a", sticky_worker="gpu-2"), tx=connection)
    assert tapped.inspect.count("get_worker") == 0
    assert state_of(store, "a") == "available"
