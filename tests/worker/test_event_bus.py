"""The event bus: bounded, never in the way, told only what the store took."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import InvalidRequest
from headgate_sync.events import EventBus, EventKind, JobEvent
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.signals import RateLimited, Revoke, Skip, Snooze
from tests.builders import envelope, steer
from tests.worker.rig import PATIENCE_S, wait_for, working


def event(job_id: str = "a", **fields: Any) -> JobEvent:
    values: dict[str, Any] = {
        "kind": EventKind.COMPLETED,
        "job_kind": "k",
        "queue": "q",
        "attempt": 0,
        "state": State.COMPLETED,
        "error": None,
        "at_ms": 1,
        **fields,
    }
    return JobEvent(job_id=job_id, **values)


def put(store: Any, *ids: str, **fields: Any) -> None:
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )


def test_what_does_not_fit_is_dropped_for_that_subscriber_alone() -> None:
    bus = EventBus()
    with bus.subscribe(capacity=1) as small, bus.subscribe() as large:
        for id in "abc":
            bus.publish(event(id))
        assert small.get(0).job_id == "a"
        assert small.get(0) is None
        assert [large.get(0).job_id for _ in range(3)] == ["a", "b", "c"]
        assert (small.dropped, large.dropped) == (2, 0)
        bus.publish(event("d"))
        assert small.get(0).job_id == "d"


def test_a_subscriber_hears_of_what_it_asked_for() -> None:
    bus = EventBus()
    failed = bus.subscribe(kinds={EventKind.FAILED})
    named = bus.subscribe(kinds=["completed"], job_kinds=["mail"])
    bus.publish(event("a"))
    bus.publish(event("b", kind=EventKind.FAILED))
    bus.publish(event("c", job_kind="mail"))
    assert failed.get(0).job_id == "b"
    assert named.get(0).job_id == "c"
    assert (failed.get(0), named.get(0)) == (None, None)
    assert (failed.dropped, named.dropped) == (0, 0)


def test_closing_from_another_thread_ends_the_loop() -> None:
    bus = EventBus()
    subscription = bus.subscribe()
    seen: list[str] = []

    def read() -> None:
        while (told := subscription.get()) is not None:
            seen.append(told.job_id)

    reads = threading.Thread(target=read)
    reads.start()
    bus.publish(event("a"))
    wait_for(lambda: seen == ["a"], "it is read")
    subscription.close()
    subscription.close()
    reads.join(PATIENCE_S)
    assert not reads.is_alive()
    assert seen == ["a"]
    bus.publish(event("b"))
    assert subscription.get() is None
    assert not bus.has_subscribers


def test_what_was_published_before_the_end_is_still_read() -> None:
    bus = EventBus()
    with bus.subscribe() as subscription:
        bus.publish(event("a"))
    assert [told.job_id for told in subscription] == ["a"]


def test_a_listener_hears_everything_until_it_leaves():
    bus, heard = EventBus(), []
    for _ in range(2):
        bus.attach(heard.append)
    bus.publish(event("a"))
    bus.detach(heard.append)
    bus.publish(event("b"))
    bus.detach(heard.append)
    bus.publish(event("c"))
    assert [one.job_id for one in heard] == ["a", "a", "b"]
    assert not bus.has_subscribers


@pytest.mark.parametrize("timeout", [1e10, float("inf")])
def test_an_event_may_be_waited_for_longer_than_a_system_can_wait(
    timeout: float,
) -> None:
    bus = EventBus()
    subscription = bus.subscribe()
    later = threading.Timer(0.1, bus.publish, [event("a")])
    later.start()
    told = subscription.get(timeout)
    later.join(PATIENCE_S)
    assert told is not None
    assert told.job_id == "a"


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5])
def test_a_capacity_out_of_range_is_refused(capacity: Any) -> None:
    with pytest.raises(InvalidRequest, match="capacity"):
        EventBus().subscribe(capacity)


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (
            {"kinds": ["done"]},
            "kinds names done, allowed are completed, failed, cancelled",
        ),
        ({"kinds": "failed"}, "kinds must be a collection, got one text"),
        ({"job_kinds": "mail"}, "kinds must be a collection, got one text"),
    ],
)
def test_a_wish_that_could_never_be_met_is_refused(
    wish: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        EventBus().subscribe(**wish)
    assert str(refusal.value) == text


@pytest.mark.parametrize(
    ("ends", "fields", "kind", "state", "error"),
    [
        (lambda: None, {}, "completed", "completed", None),
        (lambda: None, {"retention_ms": 0}, "completed", "deleted", None),
        (lambda: Skip("why"), {}, "failed", "archived", "why"),
        (lambda: Revoke(), {}, "cancelled", "deleted", None),
        (lambda: 1 / 0, {}, "failed", "retryable", "ZeroDivisionError"),
        (lambda: 1 / 0, {"max_attempts": 1}, "failed", "archived", "ZeroDivision"),
        (lambda: None, {"payload": b"?"}, "failed", "undecodable", "Malformed"),
    ],
)
def test_each_outcome_is_told_with_the_state_that_it_led_to(
    store: Any, ends: Any, fields: Any, kind: str, state: str, error: str | None
) -> None:
    registry, bus = Registry(), EventBus()
    registry.task("k")(ends)
    put(store, "a", **fields)
    with bus.subscribe() as heard, working(store, registry, event_bus=bus):
        told = heard.get(PATIENCE_S)
    assert told is not None
    assert (told.kind.value, told.state.value) == (kind, state)
    assert (told.job_id, told.job_kind, told.queue) == ("a", "k", "q")
    assert told.attempt == 0
    assert (told.error is None) if error is None else (error in (told.error or ""))
    found = steer(store).get_job("a")
    assert (found.state if found else "deleted") == state


def test_a_job_that_is_only_put_off_is_no_event(store: Any) -> None:
    registry, bus = Registry(), EventBus()
    ends = {"a": Snooze("1h"), "b": RateLimited("1h")}

    @registry.task("k")
    def puts_off(ctx: JobContext) -> Any:
        return ends.get(ctx.job_id)

    put(store, "a", "b")
    with bus.subscribe() as heard, working(store, registry, event_bus=bus):
        wait_for(
            lambda: {steer(store).get_job(id).state for id in "ab"} == {"scheduled"},
            "both are put off",
        )
        put(store, "c")
        told = heard.get(PATIENCE_S)
    assert told is not None
    assert told.job_id == "c"
    assert heard.get(0) is None


def test_an_ack_that_the_store_refuses_is_no_event(store: Any) -> None:
    registry, bus = Registry(), EventBus()

    @registry.task("k")
    def is_cancelled(ctx: JobContext) -> None:
        if ctx.job_id == "a":
            steer(store).operator_cancel("a")

    put(store, "a")
    with bus.subscribe() as heard, working(store, registry, event_bus=bus):
        wait_for(lambda: steer(store).get_job("a").state == "cancelled", "cancelled")
        put(store, "b")
        told = heard.get(PATIENCE_S)
    assert told is not None
    assert told.job_id == "b"
    assert heard.get(0) is None


@pytest.mark.needs("transactional")
def test_a_job_that_completes_in_its_own_transaction_is_an_event(
    store: Any, backend: Any
) -> None:
    registry, bus = Registry(), EventBus()

    @registry.task("k")
    def completes(ctx: JobContext) -> None:
        ctx.once(lambda tx: None)

    put(store, "a")
    with bus.subscribe() as heard, working(store, registry, event_bus=bus):
        told = heard.get(PATIENCE_S)
    assert told is not None
    assert (told.kind.value, told.state.value) == ("completed", "completed")
