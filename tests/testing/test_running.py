"""Jobs run on the thread of the test: drain, perform_job, inline, and one handler."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import attrs
import psycopg
import pytest

from headgate_sync import (
    BatchJob,
    Envelope,
    Headgate,
    InvalidRequest,
    JobContext,
    MemStore,
    Registry,
    Skip,
    Snooze,
    StoreUnavailable,
    WorkerConfig,
)
from headgate_sync.client import Client
from headgate_sync.testing import (
    Performed,
    drain,
    enqueue_inline,
    perform_job,
    run_handler,
)
from tests.builders import counts, envelope, job, state_of, steer


def mail_of(hg: Headgate) -> Any:
    """A payload class; a class belongs to one declaration."""

    @hg.task("mail")
    @attrs.frozen
    class Mail:
        to: str

    return Mail


def facade(store: Any) -> Headgate:
    return Headgate(store)


def outcomes(performed: list[Performed]) -> list[str]:
    return [each.outcome for each in performed]


def test_a_job_that_fails_once_is_retried_by_the_next_drain(store, clock):
    hg, seen = facade(store), []

    @hg.task("flaky", retry=lambda info: "1ms")
    def flaky(ctx: JobContext) -> None:
        seen.append(ctx.attempt)
        if ctx.attempt == 0:
            raise ValueError("first")

    handle = flaky.enqueue()
    (first,) = drain(hg)
    assert (first.job_id, first.kind, first.outcome) == (handle.id, "flaky", "retry")
    assert first.error is not None
    assert first.error.startswith("ValueError: first")
    assert drain(hg) == []  # its retry is not due
    clock.advance_ms(1)
    assert outcomes(drain(hg)) == ["success"]
    assert seen == [0, 1]


def test_an_empty_queue_performs_nothing(store):
    hg = facade(store)
    assert perform_job(hg) is None
    assert drain(hg) == []


def test_perform_job_runs_exactly_one(store):
    hg, seen = facade(store), []

    @hg.task("count")
    def count(n: int) -> None:
        seen.append(n)

    for n in range(3):
        count.enqueue(n)
    performed = perform_job(hg)
    assert performed is not None
    assert performed.outcome == "success"
    assert seen == [0]
    assert len(drain(hg, n=1)) == 1
    assert seen == [0, 1]


def test_a_store_with_a_registry_will_do(store):
    registry = Registry()

    @registry.task("plain", queue="letters")
    def plain() -> None: ...

    Client(store).enqueue(plain.job())
    assert outcomes(drain(store, registry)) == ["success"]
    Client(store).enqueue(plain.job())
    assert drain(store, registry, WorkerConfig(queues=("other",))) == []
    assert outcomes(drain(store, facade(store))) == []  # which knows no such queue


def test_handlers_run_on_the_thread_of_the_caller(store):
    hg, threads = facade(store), []

    @hg.task("where")
    def where() -> None:
        threads.append(threading.get_ident())

    where.enqueue()
    before = threading.active_count()
    drain(hg)
    assert threads == [threading.get_ident()]
    assert threading.active_count() == before


def test_every_outcome_is_told(store):
    hg = facade(store)

    @hg.task("act")
    def act(what: str) -> str | None:
        if what == "skip":
            raise Skip("not now")
        if what == "snooze":
            raise Snooze("1h")
        if what == "fail":
            raise ValueError(what)
        return what

    for what in ("skip", "snooze", "fail", "done"):
        act.using(id=what, retention="1h").enqueue(what)
    store.enqueue([envelope("bad", kind="act", payload=b"{", queue="default")])
    told = {each.job_id: each for each in drain(hg)}
    assert {id: each.outcome for id, each in told.items()} == {
        "skip": "skip",
        "snooze": "snooze",
        "fail": "retry",
        "done": "success",
        "bad": "undecodable",
    }
    assert told["skip"].error == "not now"
    assert told["done"].result == "done" == hg.result("done")
    assert told["fail"].result is None


def test_a_job_that_lost_its_lease_says_so(store):
    hg = facade(store)

    @hg.task("cancelled")
    def cancelled(ctx: JobContext) -> None:
        hg.cancel(ctx.job_id)

    cancelled.enqueue()
    assert outcomes(drain(hg)) == ["lease_lost"]


def test_batch_handlers_get_the_claims_of_an_admit_together(store):
    hg, chunks = facade(store), []
    Mail = mail_of(hg)

    @hg.batch_handler(Mail, max_size=3, max_delay="1h")
    def deliver(jobs: list[BatchJob[Any]]) -> list[Skip | None]:
        chunks.append([each.args.to for each in jobs])
        return [Skip("c") if each.args.to == "c" else None for each in jobs]

    for to in "abcd":
        hg.enqueue(Mail(to))
    assert outcomes(drain(hg)) == ["success", "success", "skip", "success"]
    assert chunks == [["a", "b", "c"], ["d"]]
    hg.enqueue(Mail("e"))
    assert outcomes([perform_job(hg)]) == ["success"]  # type: ignore[list-item]
    assert chunks[2:] == [["e"]]


def test_the_threads_of_the_config_bound_a_chunk(store):
    hg, sizes = facade(store), []
    Mail = mail_of(hg)

    @hg.batch_handler(Mail, max_size=9, max_delay="1h")
    def deliver(jobs: list[BatchJob[Any]]) -> list[None]:
        sizes.append(len(jobs))
        return [None] * len(jobs)

    hg.configure_worker(capacity=2)
    hg.enqueue_many([Mail(to) for to in "abcde"])
    drain(hg)
    assert sizes == [2, 2, 1]


def test_until_empty_also_runs_what_handlers_enqueue(store):
    hg, seen = facade(store), []

    @hg.task("chain")
    def chain(ctx: JobContext, n: int) -> None:
        seen.append(n)
        if n:
            ctx.client.enqueue(chain.job(n - 1))

    chain.enqueue(2)
    assert len(drain(hg)) == 1
    assert len(drain(hg, until_empty=True)) == 2
    assert seen == [2, 1, 0]


def test_jobs_that_never_end_end_the_drain(store, monkeypatch):
    monkeypatch.setattr("headgate_sync.testing.running.MAX_ROUNDS", 5)
    hg = facade(store)

    @hg.task("again")
    def again() -> None:
        again.enqueue()

    again.enqueue()
    with pytest.raises(AssertionError, match=r"after 5 admits.*again.*success"):
        drain(hg, until_empty=True)


def test_reraise_raises_after_the_acks(store):
    hg = facade(store)

    @hg.task("act")
    def act(what: str) -> None:
        if what == "skip":
            raise Skip("fine")
        if what == "fail":
            raise LookupError("of the handler")

    for what in ("skip", "fail", "ok"):
        act.using(id=what, retention="1h").enqueue(what)
    with pytest.raises(LookupError, match="of the handler"):
        drain(hg, reraise=True)
    assert counts(store) == {"archived": 1, "retryable": 1, "completed": 1}
    act.using(id="skip2").enqueue("skip")
    assert outcomes(drain(hg, reraise=True)) == ["skip"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, pytest.fail.Exception])
@pytest.mark.parametrize("batch", [False, True])
def test_what_is_meant_for_the_test_comes_out_and_no_job_is_lost(store, raised, batch):
    hg = facade(store)
    Mail = mail_of(hg)

    @hg.task("stop")
    def stop() -> None:
        raise raised

    @hg.batch_handler(Mail, max_size=5, max_delay="1h")
    def deliver(jobs: list[BatchJob[Any]]) -> list[None]:
        if batch:
            raise raised
        return [None] * len(jobs)

    hg.enqueue(Mail("before"))
    if not batch:
        stop.enqueue()
    hg.enqueue(Mail("after"))
    with pytest.raises(raised):
        drain(hg)
    assert counts(store) == {"available": 2 if batch else 3}
    assert all(
        listed.crash_attempt == listed.attempt == 0
        for listed in steer(store).list_jobs().jobs
    )


def test_a_handler_that_exits_has_failed(store):
    hg = facade(store)

    @hg.task("exit")
    def leave() -> None:
        raise SystemExit(3)

    leave.enqueue()
    assert outcomes(drain(hg, reraise=False)) == ["retry"]


def test_the_gate_decides_what_a_drain_runs(store):
    hg = facade(store)

    @hg.task("act", queue="slow")
    def act() -> None: ...

    act.enqueue()
    steer(store).set_queue_paused("slow", True)
    assert drain(hg) == []
    steer(store).set_queue_paused("slow", False)
    act.using(delay="1h").enqueue()
    assert outcomes(drain(hg, until_empty=True)) == ["success"]


def test_hooks_and_sinks_of_the_worker_hear_of_it(store):
    hg, spans, deaths = facade(store), [], []

    class Sink:
        def on_event(self, event: Any) -> None:
            spans.append(event)

    hg.configure_worker(telemetry=Sink(), death_handlers=(deaths.append,))

    @hg.task("dies", max_attempts=1)
    def dies() -> None:
        raise ValueError

    dies.using(retention="1h").enqueue()
    assert outcomes(drain(hg)) == ["retry"]
    assert [death.envelope.kind for death in deaths] == ["dies"]
    assert [type(span).__name__ for span in spans] == ["JobSpan"]


def test_what_a_handler_logs_is_kept(store):
    import logging

    hg = facade(store)

    @hg.task("logs")
    def logs() -> None:
        logging.getLogger("app").error("said %d", 1)
        raise ValueError

    handle = logs.enqueue()
    drain(hg)
    (entry,) = job(store, handle.id).errors
    assert "said 1" in entry.logs[0]


@pytest.mark.needs("transactional")
def test_a_job_that_its_handler_completes_has_succeeded(store):
    hg, seen = facade(store), []

    @hg.task("once")
    def once(ctx: JobContext) -> None:
        ctx.once(lambda tx: seen.append(tx.connection))

    once.using(retention="1h").enqueue()
    assert outcomes(drain(hg)) == ["success"]
    assert counts(store) == {"completed": 1}
    assert len(seen) == 1


def test_a_result_that_is_no_json_is_told_as_bytes(store):
    hg = facade(store)

    @hg.task("picture")
    def picture():
        return b"\x89PNG"

    picture.enqueue()
    picture.enqueue()
    assert [each.result for each in drain(hg)] == [b"\x89PNG"] * 2


def test_threads_of_a_handler_end_before_its_ack(store):
    hg, seen = facade(store), []

    @hg.task("spawns")
    def spawns(ctx: JobContext) -> None:
        ctx.spawn(seen.append, 1)

    spawns.enqueue()
    assert outcomes(drain(hg)) == ["success"]
    assert seen == [1]


def test_an_outage_comes_out_of_the_drain():
    class Down(MemStore):
        def ack_batch(self, acks: Any) -> Any:
            raise StoreUnavailable("gone")

    store = Down()
    hg = facade(store)

    @hg.task("act")
    def act() -> None: ...

    act.enqueue()
    with pytest.raises(StoreUnavailable, match="gone"):
        drain(hg)

    class Deaf(MemStore):
        def admit(self, request: Any) -> Any:
            raise StoreUnavailable("no answer")

    with pytest.raises(StoreUnavailable, match="no answer"):
        drain(facade(Deaf()))


def test_bad_arguments_are_told_at_once(store):
    with pytest.raises(InvalidRequest, match="registry beside it"):
        drain(store)
    with pytest.raises(InvalidRequest, match="expected a Store or a Headgate, got str"):
        drain("postgresql://")
    with pytest.raises(InvalidRequest, match="n is 0"):
        drain(facade(store), n=0)
    with pytest.raises(InvalidRequest, match="expected a Headgate or a Client"):
        enqueue_inline(store).__enter__()


# Inline.


def test_an_inline_enqueue_has_run_when_it_returns(store):
    hg, seen = facade(store), []

    @hg.task("parent", queue="first")
    def parent() -> None:
        child.using(queue="elsewhere").enqueue()
        seen.append("parent")

    @hg.task("child")
    def child() -> None:
        seen.append("child")

    with enqueue_inline(hg):
        parent.enqueue()
        assert seen == ["child", "parent"]
        child.using(delay="1h").enqueue()
    child.enqueue()
    assert seen == ["child", "parent"]
    assert counts(store) == {"scheduled": 1, "available": 1}


def test_an_inline_client_works_without_a_facade(store):
    registry, seen = Registry(), []

    @registry.task("act")
    def act(n: int) -> None:
        seen.append(n)
        if n == 2:
            raise ValueError("two")

    client = Client(store)
    with enqueue_inline(client, registry):
        client.enqueue_many([act.job(1), act.job(2)])
    assert seen == [1, 2]
    raises = pytest.raises(ValueError, match="two")
    with enqueue_inline(client, registry, reraise=True), raises:
        client.enqueue(act.job(2))
    client.enqueue(act.job(3))
    assert seen == [1, 2, 2]
    assert counts(store) == {"retryable": 2, "available": 1}


def test_an_inline_job_is_over_for_those_who_wait(store):
    hg = facade(store)

    @hg.task("act", retention="1h")
    def act(n: int) -> int:
        return n + 1

    with enqueue_inline(hg):
        assert act.enqueue_and_wait(1, timeout="1ms").value == 2


def test_inline_works_inside_of_an_override_with_immediate_transactions(store):
    hg, seen = Headgate(), []

    @hg.task("act")
    def act() -> None:
        seen.append(1)

    with hg.override(store, tx="immediate"), enqueue_inline(hg):
        act.enqueue(tx=object())
    assert seen == [1]


@pytest.mark.needs("transactional")
def test_inline_leaves_the_jobs_of_a_transaction_to_its_commit(
    backend, store, database_url
):
    hg, seen = facade(store), []

    @hg.task("act")
    def act() -> None:
        seen.append(1)

    with psycopg.connect(database_url) as connection:
        with enqueue_inline(hg):
            act.enqueue(tx=connection)
        connection.rollback()
        assert drain(hg) == []
        with enqueue_inline(hg):
            act.enqueue(tx=connection)
        connection.commit()
    assert seen == []
    assert outcomes(drain(hg)) == ["success"]


def test_an_unknown_kind_is_handed_back(store):
    store.enqueue([envelope("a", kind="nobody", queue="default")])
    assert outcomes(drain(facade(store))) == ["snooze"]
    assert str(state_of(store, "a")) == "scheduled"


def test_an_envelope_will_do_for_inline(store):
    hg, seen = facade(store), []

    @hg.raw_handler("raw")
    def raw(envelope: Envelope) -> None:
        seen.append(envelope.payload)

    with enqueue_inline(hg):
        hg.enqueue(Envelope(id="r", kind="raw", payload=b"x"))
    assert seen == [b"x"]


def test_every_helper_runs_handlers_inside_of_what_the_worker_has_around_them(store):
    hg, seen = facade(store), []

    @hg.task("act")
    def act() -> None:
        seen.append("called")

    @contextmanager
    def scope():
        seen.append("in")
        yield
        seen.append("out")

    hg.configure_worker(around=[scope])
    act.enqueue()
    assert perform_job(hg).outcome == "success"
    act.enqueue()
    assert outcomes(drain(hg)) == ["success"]
    with enqueue_inline(hg):
        act.enqueue()
    assert run_handler(hg, act.job()).outcome == "success"
    assert seen == ["in", "called", "out"] * 4
