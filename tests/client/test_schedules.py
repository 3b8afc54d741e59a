"""Schedules from the producer's side: upsert, declare, sync, run now."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import attrs
import pytest

from headgate_sync.app import Headgate
from headgate_sync.client import Client
from headgate_sync.client.pipeline import EnqueueRequest, Proceed
from headgate_sync.codec import JSON
from headgate_sync.context import JobContext
from headgate_sync.cron import next_after
from headgate_sync.envelope import Envelope
from headgate_sync.errors import (
    ConfigurationError,
    EnqueueForbidden,
    InvalidRequest,
    NotFound,
    SpecError,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.identity import Authorization, Identity, enqueue_identity
from headgate_sync.options import TaskOptions, Unique
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.registry import Registry
from headgate_sync.schedule import Schedule, ScheduleDef
from headgate_sync.worker import Worker, WorkerConfig
from headgate_sync.worker.duties import Duties
from headgate_sync.worker.scheduler import scheduler_sweep
from tests.backends import unchanged_by
from tests.builders import counts, job, steer
from tests.servers import new_database
from tests.worker.rig import Steps, Tap, wait_for, working

HOUR_MS = 3_600_000


@attrs.frozen
class Purge:
    days: int


def application(**options: Any) -> Headgate:
    hg = Headgate()

    @hg.task(
        "report:daily", version=2, queue="reports", partition="{region}", priority=3,
        max_attempts=4, timeout="9s", retention="1h", rate_class="smtp", weight=2,
        tags=["b", "a"], headers={"h": "v"}, **options,
    )  # fmt: skip
    def report(ctx: JobContext, region: str, limit: int = 5) -> None: ...

    hg.task("purge", version=3)(Purge) if Purge not in known else None
    known.add(Purge)
    hg.report = report  # type: ignore[attr-defined]
    return hg


known: set[type] = set()


@pytest.fixture
def hg(store: Any) -> Any:
    made = application()
    made.connect(store)
    return made


# Upsert


def test_a_schedule_carries_what_its_task_says(hg, store):
    one = hg.schedules.upsert(
        "eu", hg.report.job(region="eu"), "0 9 * * *", priority=7, tags=["x"]
    )
    assert JSON.decode(one.payload) == {"region": "eu"}
    assert (one.kind, one.schema_version, one.queue) == ("report:daily", 2, "reports")
    assert (one.partition_key, one.rate_class, one.weight) == ("eu", "smtp", 2)
    assert (one.priority, one.max_attempts, one.timeout_ms) == (7, 4, 9_000)
    assert (one.retention_ms, one.tags, one.headers) == (HOUR_MS, ("x",), {"h": "v"})
    assert hg.schedules.get("eu") == one


def test_the_first_tick_is_counted_from_store_time(hg, store, clock):
    one = hg.schedules.upsert("eu", hg.report.job("eu"), "@every:1000")
    assert one.next_run_ms == clock.now_ms() + 1_000
    assert one.paused is False


@pytest.mark.parametrize(
    "start_at",
    [
        datetime(2026, 10, 25, 2, 30, tzinfo=UTC),
        datetime(2026, 10, 25, 2, 30, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    ],
)
def test_a_start_is_taken_as_it_is_and_only_for_a_new_spec(hg, start_at):
    expected = int(start_at.timestamp() * 1000)
    job = hg.report.job("eu")
    assert hg.schedules.upsert("a", job, "@daily", start_at=start_at).next_run_ms == (
        expected
    )
    later = start_at + timedelta(days=1)
    assert hg.schedules.upsert("a", job, "@daily", start_at=later).next_run_ms == (
        expected
    )


def test_a_start_without_a_zone_is_refused(hg, backend):
    naive = datetime(2026, 1, 1)
    error = unchanged_by(
        backend,
        lambda: hg.schedules.upsert("a", "k", "@daily", start_at=naive),
    )
    assert isinstance(error, InvalidRequest)
    assert "no time zone" in str(error)


@pytest.mark.parametrize(
    "spec", ["CRON_TZ=Mars/Phobos 0 9 * * *", "0 0 31 2 *", "nonsense", 5]
)
def test_a_bad_spec_stores_nothing(hg, backend, spec):
    error = unchanged_by(
        backend, lambda: hg.schedules.upsert("a", hg.report.job("eu"), spec)
    )
    assert isinstance(error, SpecError)


def test_a_kind_a_payload_and_an_envelope_are_jobs_too(hg):
    by_kind = hg.schedules.upsert("k", "tick", timedelta(minutes=5), queue="q2")
    assert (by_kind.kind, by_kind.payload, by_kind.queue) == ("tick", b"", "q2")
    assert by_kind.spec == "@every:300000"
    purge = hg.schedules.upsert("p", Purge(30), "@daily")
    assert (purge.kind, purge.schema_version) == ("purge", 3)
    raw = Envelope(id="x", kind="raw", payload=b"\0", weight=4)
    assert hg.schedules.upsert("e", raw, "@daily").weight == 4


def test_the_kind_of_a_task_that_reads_its_payload_is_refused(hg):
    with pytest.raises(InvalidRequest, match=r"report:daily is that of a task.*job\("):
        hg.schedules.upsert("k", "report:daily", "@daily")
    assert hg.schedules.get("k") is None

    @hg.raw_handler("raw:tick")
    def tick(envelope: Envelope) -> None: ...

    assert hg.schedules.upsert("k", "raw:tick", "@daily").kind == "raw:tick"


def test_a_client_that_has_defaults_gives_them(store):
    client = Client(store, defaults=TaskOptions(queue="d", partition="p"))
    one = client.schedules.upsert("k", "tick", "@daily")
    assert (one.queue, one.partition_key) == ("d", "p")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"unique": "key"}, "unique"), ({"unique": True}, "unique"),
        ({"deadline": "1h"}, "deadline"), ({"delay": "1h"}, "delay"),
        ({"run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "run_at"),
        ({"pending": True}, "pending"),
        ({"nonsense": 1}, "nonsense"),
    ],
)  # fmt: skip
def test_an_option_that_no_tick_can_carry_is_refused(hg, backend, options, names):
    for target in (hg.report.job("eu"), "tick"):
        error = unchanged_by(
            backend,
            lambda target=target: hg.schedules.upsert("a", target, "@daily", **options),
        )
        assert isinstance(error, InvalidRequest)
        assert names in str(error)
    with pytest.raises(InvalidRequest, match=names):
        hg.schedule("a", hg.report.job("eu"), "@daily", **options)


@pytest.mark.parametrize("name", ["tz", "timezone"])
def test_a_zone_beside_the_spec_is_told_where_it_goes(hg, backend, name):
    """As an option it would be one of the job, and other schedulers take it."""
    zone: dict[str, Any] = {name: "Europe/Berlin"}
    calls: list[Callable[[], Any]] = [
        lambda: hg.periodic("0 9 * * *", args={"region": "eu"}, **zone)(hg.report),
        lambda: hg.schedule("a", "tick", "0 9 * * *", **zone),
        *(
            lambda target=target: hg.schedules.upsert("a", target, "@daily", **zone)
            for target in ("tick", hg.report.job("eu"), Envelope(id="e", kind="k"))
        ),
    ]
    for call in calls:
        error = unchanged_by(backend, call)
        assert isinstance(error, InvalidRequest)
        assert f"unknown option {name}: " in str(error)
        assert "'CRON_TZ=Europe/Berlin 0 9 * * *'" in str(error)
    assert hg.registry.declared() == {}


def test_an_id_of_a_job_is_no_part_of_a_schedule(hg):
    with pytest.raises(InvalidRequest, match="option id"):
        hg.schedules.upsert("a", hg.report.using(id="x").job("eu"), "@daily")
    with pytest.raises(InvalidRequest, match="option id"):
        hg.schedule("a", hg.report.using(id="x").job("eu"), "@daily")


def test_an_option_of_the_task_that_no_tick_can_carry_has_to_be_switched_off(store):
    hg = application(unique=Unique("{region}", window="1h"), deadline="2h")
    hg.connect(store)
    with pytest.raises(InvalidRequest, match=r"unique.*None"):
        hg.schedules.upsert("a", hg.report.job("eu"), "@daily")
    with pytest.raises(InvalidRequest, match=r"unique.*None"):
        hg.periodic("@daily", args={"region": "eu"})(hg.report)
    off = {"unique": None, "deadline": None}
    hg.schedules.upsert("a", hg.report.job("eu"), "@daily", **off)
    hg.periodic("@daily", args={"region": "eu"}, **off)(hg.report)
    hg.sync_schedules()


def test_lists_and_events_come_in_pages(hg, store, clock):
    for id in "abc":
        hg.schedules.upsert(id, "k", "@every:1000", queue="q")
    page = hg.schedules.list(limit=2)
    assert ([one.id for one in page.items], page.next_cursor) == (["a", "b"], "b")
    rest = hg.schedules.list(limit=2, cursor=page.next_cursor)
    assert ([one.id for one in rest.items], rest.next_cursor) == (["c"], None)
    for _ in range(3):
        clock.advance_ms(1_000)
        scheduler_sweep(store)
    newest = hg.schedules.events("a", limit=2)
    ticks = [event.tick_ms for event in newest.items]
    assert ticks == [clock.now_ms(), clock.now_ms() - 1_000]
    older = hg.schedules.events("a", limit=2, cursor=newest.next_cursor)
    assert [event.tick_ms for event in older.items] == [clock.now_ms() - 2_000]
    assert older.next_cursor is None
    for bad in ("x", "-1", "1.5", "9" * 30, "²", 5):
        with pytest.raises(InvalidRequest, match="cursor"):
            hg.schedules.events("a", cursor=bad)


def test_did_the_three_oclock_job_run(hg, store, clock):
    three = datetime(2026, 5, 1, 3, tzinfo=UTC)
    clock.freeze_at(int(three.timestamp() * 1000) - HOUR_MS)
    hg.schedules.upsert("n", hg.report.job("eu"), "0 3 * * *")
    clock.advance_ms(HOUR_MS)
    scheduler_sweep(store)
    (event,) = hg.schedules.events("n").items
    assert (event.tick_ms, event.outcome) == (int(three.timestamp() * 1000), "enqueued")
    assert hg.get(event.job_id).state == "available"


def test_a_pause_holds_until_the_resume(hg, store, clock):
    hg.schedules.upsert("a", "k", "@every:1000")
    hg.schedules.pause("a")
    hg.schedules.upsert("a", "k", "@every:1000", priority=4)
    clock.advance_ms(5_000)
    assert scheduler_sweep(store).enqueued == 0
    hg.schedules.resume("a")
    assert scheduler_sweep(store).enqueued == 1
    assert hg.schedules.upsert("a", "k", "@every:1000", paused=True).paused is True


def test_verbs_on_a_missing_schedule_say_so(hg):
    for call in (hg.schedules.pause, hg.schedules.resume, hg.schedules.delete):
        with pytest.raises(NotFound, match="schedule none does not exist"):
            call("none")
    with pytest.raises(NotFound, match="schedule none does not exist"):
        hg.schedules.run_now("none", idempotency_key="k")
    assert hg.schedules.get("none") is None


def test_a_store_without_inspection_is_named():
    class Bare:
        inspect = None

    with pytest.raises(Unsupported, match="inspect"):
        Client(Bare()).schedules.upsert("a", "k", "@daily")  # type: ignore[arg-type]


# Run now


def test_a_run_by_hand_is_one_job_per_key_and_moves_nothing(hg, store):
    before = hg.schedules.upsert("a", hg.report.job("eu"), "@daily")
    first = hg.schedules.run_now("a", idempotency_key="k1")
    second = hg.schedules.run_now("a", idempotency_key="k1")
    assert (first.id, first.joined) == (second.id, False)
    assert second.joined is True
    assert counts(store) == {"available": 1}
    made = job(store, first.id)
    assert made.periodic_origin is None
    assert (made.payload, made.tags, made.headers) == (
        before.payload, before.tags, before.headers,
    )  # fmt: skip
    assert hg.schedules.get("a") == before
    assert hg.schedules.run_now("a", idempotency_key="k2").id != first.id


@pytest.mark.parametrize("key", ["", "x" * 256, "\0", 5])
def test_a_key_of_a_run_by_hand_has_its_bounds(hg, key):
    hg.schedules.upsert("a", "k", "@daily")
    with pytest.raises(InvalidRequest, match="idempotency_key"):
        hg.schedules.run_now("a", idempotency_key=key)


# The pipeline


class Gatekeeper:
    """An authorizer that lets one subject schedule and run, and notes what it saw."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, str]] = []

    def __call__(self, asked: Authorization, envelope: Envelope) -> bool:
        subject = None if asked.identity is None else asked.identity.subject
        self.asked.append((subject, envelope.id))
        return subject == "ada"


ADA, BOB = Identity("ada"), Identity("bob")


def test_the_authorizer_is_asked_about_a_preview_of_the_jobs(store):
    seen: list[Envelope] = []

    def allow(asked: Authorization, envelope: Envelope) -> bool:
        seen.append(envelope)
        return True

    stored = Client(store, authorizer=allow).schedules.upsert(
        "a", "k", "@daily", queue="q", tags=["t"], sticky_worker="gpu-1"
    )
    assert seen == [stored.preview("a")]
    assert (seen[0].id, seen[0].queue, seen[0].tags, seen[0].sticky_worker) == (
        "schedule:a", "q", ("t",), "gpu-1",
    )  # fmt: skip
    assert len(seen[0].fingerprint) == 32


def test_a_refused_schedule_is_not_written(store, backend):
    gate = Gatekeeper()
    schedules = Client(store, authorizer=gate).schedules
    schedules.upsert("a", "k", "@daily", identity=ADA)
    definition = schedules.define("k", "@hourly")
    calls: list[Callable[[], object]] = [
        lambda: schedules.upsert("a", "other", "@daily"),
        lambda: schedules.upsert("b", "k", "@daily", identity=BOB),
        lambda: schedules.sync({"a": definition, "b": definition}, identity=BOB),
        lambda: schedules.run_now("a", idempotency_key="1", identity=BOB),
    ]
    for call in calls:

        def refused(call: Callable[[], object] = call) -> None:
            with pytest.raises(EnqueueForbidden):
                call()

        unchanged_by(backend, refused)
    asked = [(None, "schedule:a"), ("bob", "schedule:b"), ("bob", "schedule:a")]
    assert gate.asked[:4] == [("ada", "schedule:a"), *asked]
    assert len(gate.asked) == 5


def test_the_identity_of_a_schedule_comes_from_the_call_the_job_or_the_context(store):
    schedules = Client(store, authorizer=Gatekeeper()).schedules
    report = Registry().task("report")(lambda: None)
    schedules.upsert("a", report.using(identity=ADA).job(), "@daily")
    with enqueue_identity(ADA):
        schedules.upsert("b", report.job(), "@daily")
        schedules.run_now("b", idempotency_key="1")
    assert schedules.sync(
        {"c": schedules.define(report.job(), "@daily")}, identity=ADA
    ).created == ("c",)


def test_a_run_by_hand_passes_through_the_pipeline_and_a_tick_does_not(store, clock):
    seen: list[str] = []

    class Hook:
        def begin(self, attempt: Any) -> None:
            seen.append(f"begin for {attempt.identity.subject}")

        def end(self, attempt: Any, outcome: Any) -> None:
            seen.append(outcome.result)

    def stamp(request: EnqueueRequest, proceed: Proceed) -> None:
        request.batch = [attrs.evolve(e, tags=("stamped",)) for e in request.batch]
        proceed(request)

    client = Client(
        store, authorizer=Gatekeeper(), middleware=[stamp], insert_hooks=[Hook()]
    )
    client.schedules.upsert("t", "k", "@every:1000", identity=ADA)
    clock.advance_ms(1_000)
    assert scheduler_sweep(store).enqueued == 1
    assert seen == []
    handle = client.schedules.run_now("t", idempotency_key="1", identity=ADA)
    assert seen == ["begin for ada", "succeeded"]
    assert job(store, handle.id).tags == ("stamped",)


def test_declared_schedules_are_code_and_nobody_is_asked_about_them(store):
    hg = Headgate(store, authorizer=Gatekeeper())
    hg.schedule("a", Envelope(id="x", kind="k"), "@daily")
    assert hg.sync_schedules().created == ("a",)


# Declarations


def test_declaring_writes_nothing_and_sync_writes_it(hg, backend, store):
    def declare() -> None:
        hg.periodic("@daily", args={"region": "eu"})(hg.report)
        hg.periodic(
            "CRON_TZ=Europe/Berlin 0 9 * * MON-FRI", id="us", args={"region": "us"}
        )(hg.report)
        hg.schedule("purge", Purge(days=30), "@daily", on_missed="run_once")

    unchanged_by(backend, declare)
    report = hg.sync_schedules()
    assert report.created == ("report:daily", "us", "purge")
    stored = {one.id: one for one in hg.schedules.list().items}
    assert JSON.decode(stored["us"].payload) == {"region": "us"}
    assert stored["us"].spec == "CRON_TZ=Europe/Berlin 0 9 * * MON-FRI"
    assert stored["purge"].on_missed == "run_once"
    before = backend.image()
    again = hg.sync_schedules()
    assert again.unchanged == report.created
    assert (again.created, again.changed, again.deleted) == ((), (), ())
    assert backend.image() == before


def test_a_task_keeps_its_place_in_a_stack_of_decorators():
    hg = Headgate()

    @hg.periodic("@daily", id="a", args={"n": 1})
    @hg.periodic("@hourly", id="b", args={"n": 2})
    @hg.task("t")
    def handler(n: int) -> int:
        return n

    assert handler(5) == 5
    assert list(hg.registry.declared()) == ["b", "a"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"args": {"region": "eu", "regoin": 1}}, "regoin"),
        ({"args": {"region": 5}}, "region"),
        ({}, "region"),
        ({"args": {"region": "eu"}, "id": "a b"}, "invalid schedule id"),
        ({"args": {"region": "eu"}, "on_missed": "never"}, "on_missed"),
        ({"args": {"region": "eu"}, "backfill_limit": 1_001}, "backfill_limit"),
        ({"args": {"region": "eu"}, "partition": "{tenant}"}, "tenant"),
        ({"args": {"region": "eu"}, "max_attempts": 0}, "max_attempts"),
    ],
)
def test_a_declaration_that_does_not_fit_its_task_is_refused_at_once(arguments, says):
    hg = application()
    with pytest.raises(InvalidRequest, match=says):
        hg.periodic("@daily", **arguments)(hg.report)
    assert hg.registry.declared() == {}


def test_a_bad_spec_is_refused_where_it_stands():
    hg = application()
    with pytest.raises(SpecError, match="bad minute"):
        hg.periodic("61 * * * *", args={"region": "eu"})(hg.report)


def test_periodic_on_a_plain_function_says_what_it_stands_above():
    def plain() -> None: ...

    with pytest.raises(TypeError, match="periodic stands above task"):
        Headgate().periodic("@daily")(plain)


def test_an_id_is_declared_once():
    hg = application()
    hg.schedule("a", "k", "@daily")
    with pytest.raises(InvalidRequest, match="declared more than once"):
        hg.schedule("a", "k", "@hourly")
    other = Registry()
    other.schedule("a", "k", "@hourly")
    other.task("only:there")(lambda: None)
    with pytest.raises(InvalidRequest, match="declared more than once"):
        hg.include(other)
    assert "only:there" not in hg.registry.kinds()


def test_an_included_registry_brings_its_schedules():
    hg, other = application(), Registry()
    other.schedule("b", "k", "@hourly")
    hg.include(other)
    hg.include(other)
    assert list(hg.registry.declared()) == ["b"]


def test_a_declaration_whose_annotations_come_later_is_checked_at_the_start():
    registry = Registry()

    @registry.periodic("@daily", args={"later": 5})
    @registry.task("late")
    def handler(later: Later) -> None: ...  # noqa: F821

    with pytest.raises(InvalidRequest, match="Later"):
        registry.check()


@pytest.mark.parametrize("job", [5, None, "a b", object()])
def test_what_is_no_job_cannot_be_declared(job):
    with pytest.raises(InvalidRequest):
        Headgate().schedule("a", job, "@daily")


# Sync


def definition(**fields: Any) -> ScheduleDef:
    return ScheduleDef(**{"kind": "k", "spec": "@daily", **fields})


def test_another_spec_is_told_with_both_texts(hg, caplog, clock):
    hg.schedules.sync({"a": definition()})
    with caplog.at_level(logging.WARNING):
        report = hg.schedules.sync({"a": definition(spec="@hourly")})
    assert report.changed == ("a",)
    assert "`0 * * * *` replaces `0 0 * * *`" in caplog.text
    assert hg.schedules.get("a").next_run_ms == next_after("@hourly", clock.now_ms())


def test_pruning_deletes_below_the_prefix_only(hg):
    hg.schedules.sync({id: definition() for id in ("app.a", "app.b", "other")})
    with pytest.raises(InvalidRequest, match="prefix"):
        hg.schedules.sync({}, delete_missing=True)
    with pytest.raises(InvalidRequest, match="prefix"):
        hg.schedules.sync({}, delete_missing=True, prefix="")
    report = hg.schedules.sync(
        {"app.b": definition()}, delete_missing=True, prefix="app."
    )
    assert (report.deleted, report.unchanged) == (("app.a",), ("app.b",))
    assert [one.id for one in hg.schedules.list().items] == ["app.b", "other"]


def test_a_bad_id_in_a_sync_writes_nothing(hg, backend):
    error = unchanged_by(
        backend, lambda: hg.schedules.sync({"a": definition(), "b c": definition()})
    )
    assert isinstance(error, InvalidRequest)


# At the start of a worker


def declaring(spec: str = "@daily") -> Registry:
    registry = Registry()

    @registry.periodic(spec, args={"n": 1})
    @registry.task("t")
    def handler(n: int) -> None: ...

    return registry


def test_a_worker_applies_what_is_declared_and_keeps_a_pause(store):
    def started() -> bool:
        return steer(store).get_schedule("t") is not None

    with working(store, declaring()):
        wait_for(started, "the schedule is there")
    steer(store).set_schedule_paused("t", True)
    steps = Steps()
    worker = Worker(store, declaring(), WorkerConfig(queues=("q",)))
    Duties(
        store, "w", interval_ms=1_000, now_s=steps, at_start=worker._apply_schedules
    ).step()
    found = steer(store).get_schedule("t")
    assert found is not None
    assert found.paused is True


def test_two_workers_of_one_build_write_once(backend, store):
    for expected in ("created", "unchanged"):
        before = backend.image()
        report = Client(store).schedules.apply(declaring().declared())
        assert getattr(report, expected) == ("t",)
        assert (backend.image() == before) is (expected == "unchanged")


@pytest.mark.parametrize("config", [{"run_duties": False}, {"sync_schedules": False}])
def test_a_worker_that_shall_not_write_does_not(store, config):
    with working(store, declaring(), **config):
        pass
    assert steer(store).list_schedules() == []


def test_a_store_that_keeps_no_schedules_is_a_mistake_of_the_set_up(store):
    class Bare(Tap):
        inspect = None

    worker = Worker(Bare(store), declaring(), WorkerConfig(queues=("q",)))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="schedules are declared"):
        worker.run(install_signal_handlers=False)


def test_an_outage_at_the_start_is_waited_for(store, caplog):
    calls: list[int] = []

    def at_start() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise StoreUnavailable("away")
        if len(calls) == 2:
            raise InvalidRequest("will never do")

    steps = Steps()
    duties = Duties(store, "w", interval_ms=1_000, now_s=steps, at_start=at_start)
    for _ in range(4):
        duties.step()
    assert len(calls) == 2
    assert "will never do" in caplog.text


def test_hooks_of_a_worker_see_its_ticks(store, clock):
    seen: list[str] = []

    class Hook:
        def begin(self, attempt: Any) -> None:
            seen.append(attempt.schedule_id)

        def end(self, attempt: Any, outcome: Any) -> None:
            seen.append(outcome.reason)

    Client(store).schedules.upsert("t", "k", "@every:1000")
    clock.advance_ms(1_000)
    with working(store, Registry(), periodic_hooks=[Hook()], duty_interval="10ms"):
        wait_for(lambda: len(seen) == 2, "the tick is seen")
    assert seen == ["t", "accepted"]


# The command

APP = """
from headgate_sync import Headgate

hg = Headgate.from_env()

@hg.periodic("@daily", id="app.{name}", args={{"n": 1}})
@hg.task("t")
def handler(n: int) -> None: ...
"""


def test_the_command_syncs_and_prunes(server_url, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headgate_sync", "cron", "sync", *arguments],
            cwd=tmp_path,
            env={**os.environ, "HEADGATE_DATABASE_URL": url, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    path = os.pathsep.join(part for part in sys.path if part)
    with new_database(server_url) as url:
        migrate_up(url)
        (tmp_path / "one.py").write_text(APP.format(name="one"))
        (tmp_path / "two.py").write_text(APP.format(name="two"))
        done = run("one:hg")
        assert (done.returncode, done.stdout) == (0, "created app.one\n"), done.stderr
        assert run("one:hg").stdout == "unchanged app.one\n"
        told = json.loads(run("one:hg", "-o", "jsonl").stdout)
        assert told == {"id": "app.one", "done": "unchanged"}
        pruned = run("two:hg", "--prune", "--prefix", "app.")
        assert pruned.stdout == "created app.two\ndeleted app.one\n"
        for arguments, says in (
            (("two:hg", "--prune"), "--prefix"),
            (("two:hg", "--prefix", "a"), "--prune"),
            (("none:hg",), "no module named none"),
        ):
            wrong = run(*arguments)
            assert wrong.returncode == 2
            assert says in wrong.stderr
            assert wrong.stderr.count("\n") == 1


def test_the_values_are_frozen(hg):
    one = hg.schedules.upsert("a", "k", "@daily")
    assert isinstance(one, Schedule)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        one.spec = "@hourly"
