"""Prometheus metrics: what a scrape says of workers and of the store."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import start_http_server
from prometheus_client.parser import text_string_to_metric_families

from headgate_sync.errors import ConfigurationError, InvalidRequest, StoreUnavailable
from headgate_sync.labels import OTHER
from headgate_sync.memory.store import MemStore
from headgate_sync.metrics import BUCKETS_S, PrometheusMetrics, StoreCollector
from headgate_sync.registry import Registry
from headgate_sync.signals import RateLimited
from headgate_sync.telemetry import (
    AckFailed,
    AdmissionMade,
    Admitted,
    Completed,
    Evicted,
    GateCorrected,
    JobSpan,
    LogDropped,
    Quarantined,
    Rejected,
    RenewFailed,
    Stuck,
    TelemetryEvent,
    Unhandled,
    WorkerMemory,
    WorkerSaturation,
)
from tests.builders import WORKER, claim_one, enqueue, envelope, steer
from tests.worker.rig import Gate, Steps, Tap, wait_for, working

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Samples:
    """Samples by name and labels, without the instants of creation."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def samples(registry: CollectorRegistry) -> Samples:
    return read(generate_latest(registry).decode())


def at(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((f"headgate_{name}", frozenset(labels.items())))


def span(**fields: Any) -> JobSpan:
    return JobSpan(
        **{
            "job_id": "a",
            "kind": "k",
            "queue": "q",
            "attempt": 0,
            "outcome": "success",
            "started_at_ms": 1,
            "ms": 30,
            "worker": "w",
            **fields,
        }
    )


@contextmanager
def served(registry: CollectorRegistry) -> Iterator[str]:
    """The address of a server that answers scrapes of the registry."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_scrape_over_http_tells_what_a_worker_did(store: Any) -> None:
    registry, jobs = CollectorRegistry(), Registry()
    sink = PrometheusMetrics(registry)
    jobs.task("good")(lambda: None)
    jobs.task("bad")(lambda: 1 / 0)
    jobs.task("limited")(lambda: RateLimited("1h"))
    for kind in ("good", "good", "bad", "limited", "unknown"):
        store.enqueue(
            [
                envelope(
                    f"{kind}-{len(steer(store).list_jobs().jobs)}",
                    kind=kind,
                    payload=b"{}",
                    rate_class="c" if kind == "limited" else "",
                )
            ]
        )
    with (
        working(store, jobs, telemetry=sink, run_duties=False),
        served(registry) as address,
    ):
        wait_for(
            lambda: (
                sum(
                    value
                    for (name, _), value in samples(registry).items()
                    if name == "headgate_job_attempt_duration_seconds_count"
                )
                == 5
            ),
            "five spans",
        )
        with urllib.request.urlopen(address) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            found = read(answer.read().decode())
    assert at(found, "jobs_admitted_total", queue="q") == 5
    assert at(found, "jobs_completed_total", kind="good") == 2
    assert at(found, "jobs_completed_total", kind="bad") is None
    assert at(found, "jobs_rejected_total", queue="q", policy="rate_class") == 1
    assert at(found, "jobs_unhandled_total", queue="q") == 1
    for kind, outcome, count in (
        ("good", "success", 2),
        ("bad", "retry", 1),
        ("limited", "rate_limited", 1),
        ("unknown", "snooze", 1),
    ):
        labels = {"queue": "q", "kind": kind, "outcome": outcome}
        name = "job_attempt_duration_seconds"
        assert at(found, f"{name}_count", **labels) == count
        assert at(found, f"{name}_bucket", le="+Inf", **labels) == count
    assert at(found, "worker_capacity", worker=WORKER) == 4
    assert at(found, "leases_lost_total", worker=WORKER) == 0


EVERY_EVENT: list[Any] = [
    Admitted(queue="q", count=3),
    Rejected(queue="q", policy="rate_class", count=2),
    Completed(kind="k", ms=5),
    Quarantined(fingerprint="secret-fingerprint", crashes=3),
    Evicted(count=7),
    Unhandled(queue="q", kind="k"),
    AckFailed(worker="w", job_id="secret-id", detail="secret-detail"),
    RenewFailed(worker="w", job_id="", detail="secret-detail"),
    Stuck(worker="w", job_id="secret-id", detail="timeout"),
    LogDropped(worker="w", job_id="secret-id", detail="d", count=50),
    AdmissionMade(
        worker="w",
        asked=4,
        admitted=3,
        refused={"rate_class": 2, "fairness": 1},
        ms=2.5,
    ),
    GateCorrected(count=4),
    span(outcome="lease_lost", ms=30, job_id="secret-id"),
    WorkerMemory(worker="w", used_bytes=9, limit_bytes=10, restart_requested=False),
    WorkerMemory(worker="w", used_bytes=11, limit_bytes=10, restart_requested=True),
    WorkerSaturation(
        worker="w",
        inflight=3,
        capacity=4,
        utilization=0.75,
        empty_poll_ratio=0.5,
        polls=2,
        empty_polls=1,
    ),
    object(),
]


def test_every_event_moves_its_metric() -> None:
    registry = CollectorRegistry()
    sink = PrometheusMetrics(registry)
    assert {type(event) for event in EVERY_EVENT} >= set(get_args(TelemetryEvent))
    for event in EVERY_EVENT:
        sink.on_event(event)
    found = samples(registry)
    for name, labels, value in (
        ("jobs_admitted_total", {"queue": "q"}, 3),
        ("jobs_rejected_total", {"queue": "q", "policy": "rate_class"}, 2),
        ("jobs_completed_total", {"kind": "k"}, 1),
        ("jobs_quarantined_total", {}, 1),
        ("jobs_evicted_total", {"queue": ""}, 7),
        ("jobs_unhandled_total", {"queue": "q"}, 1),
        ("ack_failures_total", {"worker": "w"}, 1),
        ("renew_failures_total", {"worker": "w"}, 1),
        ("handlers_stuck_total", {"worker": "w"}, 1),
        ("log_lines_dropped_total", {"worker": "w"}, 50),
        ("jobs_refused_total", {"policy": "rate_class"}, 2),
        ("jobs_refused_total", {"policy": "fairness"}, 1),
        ("admission_duration_seconds_count", {}, 1),
        ("admission_duration_seconds_sum", {}, 0.0025),
        ("gate_corrections_total", {}, 4),
        ("leases_lost_total", {"worker": "w"}, 1),
        ("worker_restart_requests_total", {"worker": "w"}, 1),
        ("worker_memory_bytes", {"worker": "w"}, 11),
        ("worker_memory_limit_bytes", {"worker": "w"}, 10),
        ("worker_utilization_ratio", {"worker": "w"}, 0.75),
        ("worker_empty_poll_ratio", {"worker": "w"}, 0.5),
        ("worker_inflight", {"worker": "w"}, 3),
        ("worker_capacity", {"worker": "w"}, 4),
    ):
        assert at(found, name, **labels) == value, name
    labels = {"queue": "q", "kind": "k", "outcome": "lease_lost"}
    bounds = {
        float(dict(key)["le"]): value
        for (name, key), value in found.items()
        if name == "headgate_job_attempt_duration_seconds_bucket"
    }
    assert bounds == {le: float(le >= 0.03) for le in (*BUCKETS_S, float("inf"))}
    assert at(found, "job_attempt_duration_seconds_sum", **labels) == 0.03
    assert "secret" not in generate_latest(registry).decode()


# Registration.


def test_a_registry_that_has_the_metrics_refuses_them_and_is_unchanged() -> None:
    registry = CollectorRegistry()
    first = PrometheusMetrics(registry)
    first.on_event(Admitted(queue="q"))
    before = generate_latest(registry)
    with pytest.raises(ConfigurationError) as refused:
        PrometheusMetrics(registry)
    assert str(refused.value) == (
        "PrometheusMetrics: the registry has headgate_ack_failures already; make one "
        "PrometheusMetrics for it and share that, or give each a CollectorRegistry of "
        "its own"
    )
    assert generate_latest(registry) == before


def test_one_name_that_is_taken_keeps_all_out() -> None:
    registry = CollectorRegistry()
    Counter("headgate_gate_corrections", "of somebody else", registry=registry)
    before = generate_latest(registry)
    with pytest.raises(ConfigurationError, match="has headgate_gate_corrections al"):
        PrometheusMetrics(registry)
    assert generate_latest(registry) == before


def test_a_registry_must_be_given_and_the_bound_be_sound() -> None:
    with pytest.raises(TypeError, match="registry"):
        PrometheusMetrics()  # type: ignore[call-arg]
    for limit in (0, 10_001, "9"):
        with pytest.raises(InvalidRequest, match="max_label_sets"):
            PrometheusMetrics(CollectorRegistry(), max_label_sets=limit)  # type: ignore[arg-type]


# Labels.


@pytest.mark.parametrize(
    "hostile",
    [
        'a"b',
        "back\\slash",
        "line\nbreak",
        '"} 1\nheadgate_jobs_quarantined_total 99',
        "{}=,# HELP x",
        "é雪\U0001f600",
        " ",
    ],
)
def test_a_hostile_value_is_one_value_of_one_sample(hostile: str) -> None:
    registry = CollectorRegistry()
    on = PrometheusMetrics(registry).on_event
    on(Admitted(queue=hostile))
    on(span(queue=hostile, kind=hostile))
    found = samples(registry)
    assert at(found, "jobs_admitted_total", queue=hostile) == 1
    assert at(found, "jobs_quarantined_total") == 0


def test_what_no_exporter_can_write_is_replaced_and_cut() -> None:
    registry = CollectorRegistry()
    on = PrometheusMetrics(registry).on_event
    on(Admitted(queue="lone \ud800 surrogate"))
    on(Admitted(queue="nul \0 byte"))
    on(Admitted(queue="x" * 100_000))
    found = samples(registry)
    for queue in ("lone \ufffd surrogate", "nul \ufffd byte", "x" * 255):
        assert at(found, "jobs_admitted_total", queue=queue) == 1


def test_the_number_of_label_sets_is_bounded_and_the_rest_is_counted(
    caplog: Any,
) -> None:
    registry = CollectorRegistry()
    on = PrometheusMetrics(registry, max_label_sets=10).on_event
    for number in range(1_000):
        on(Admitted(queue=f"q{number}"))
        on(span(queue=f"q{number}", kind=f"k{number}"))
        on(span(queue=f"q{number}", kind=f"k{number}", outcome="retry"))
    found = samples(registry)
    assert len([1 for name, _ in found if name.endswith("admitted_total")]) == 11
    assert at(found, "jobs_admitted_total", queue="q9") == 1
    assert at(found, "jobs_admitted_total", queue=OTHER) == 990
    name = "job_attempt_duration_seconds_count"
    assert len([1 for one, _ in found if one == f"headgate_{name}"]) == 22
    others = {"queue": OTHER, "kind": OTHER, "outcome": "retry"}
    assert at(found, name, **others) == 990
    assert caplog.text.count("metric headgate_jobs_admitted has 10 sets of labels") == 1


def test_threads_count_without_losing_any() -> None:
    registry = CollectorRegistry()
    on = PrometheusMetrics(registry, max_label_sets=2).on_event

    def tell() -> None:
        for number in range(1_000):
            on(Admitted(queue=f"q{number % 4}"))

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = [
        value
        for (name, _), value in samples(registry).items()
        if name == "headgate_jobs_admitted_total"
    ]
    assert (len(counted), sum(counted)) == (3, 8_000)


# The store's gauges.


class Source:
    """Something to look into, whose calls are noted."""

    def __init__(self, store: Any) -> None:
        self.inspect: Any = Tap(store.inspect)


def test_the_store_is_told_in_gauges(store: Any, clock: Any) -> None:
    registry = CollectorRegistry()
    StoreCollector(store, registry)
    enqueue(store, "a", "b", "c")
    enqueue(store, "d", queue="r")
    claim_one(store)
    clock.advance_ms(4_200)
    found = samples(registry)
    stats = {s.queue: s for s in steer(store).queue_stats()}
    assert at(found, "store_up") == 1
    assert at(found, "queue_unfinished_jobs", queue="q") == 3
    assert at(found, "queue_unfinished_jobs", queue="r") == 1
    assert at(found, "queue_arrival_rate", queue="q") == stats["q"].arrival_rate > 0
    assert at(found, "queue_drain_rate", queue="q") == 0
    # More jobs come than go: no figure, and no zero.
    assert at(found, "queue_time_to_drain_seconds", queue="q") is None
    oldest_ms = stats["q"].oldest_available_ms
    assert oldest_ms is not None
    assert at(found, "queue_oldest_available_seconds", queue="q") == oldest_ms / 1000
    assert at(found, "queue_live_workers", queue="q") == 0
    assert at(found, "queue_late_workers", queue="q") == 0
    quiet = stats["q"].quiet_groups
    assert at(found, "queue_quiet_arrival_rate", queue="q") == quiet.arrival_rate


def test_a_queue_says_how_many_workers_serve_it(store: Any) -> None:
    registry, gate, jobs = CollectorRegistry(), Gate(), Registry()
    jobs.task("k")(lambda: gate.hold())
    StoreCollector(store, registry)
    store.enqueue([envelope("a", kind="k", payload=b"{}")])
    enqueue(store, "b", queue="nobodys")
    with working(store, jobs, run_duties=False):
        gate.wait()
        found = samples(registry)
        gate.open()
    assert at(found, "queue_live_workers", queue="q") == 1
    assert at(found, "queue_live_workers", queue="nobodys") == 0


def test_the_store_is_asked_at_most_once_per_15_seconds_and_only_to_look(
    store: Any,
) -> None:
    registry, steps, source = CollectorRegistry(), Steps(), Source(store)
    StoreCollector(source, registry, now_s=steps)
    assert source.inspect.calls == []
    enqueue(store, "a")
    for _ in range(3):
        samples(registry)
    steps.advance(14.9)
    enqueue(store, "b")
    assert at(samples(registry), "queue_unfinished_jobs", queue="q") == 1
    assert source.inspect.calls == ["queue_stats", "cluster"]
    steps.advance(0.1)
    assert at(samples(registry), "queue_unfinished_jobs", queue="q") == 2
    assert source.inspect.calls == ["queue_stats", "cluster"] * 2


def test_a_store_that_does_not_answer_shows_as_down_and_is_left_alone_for_a_while(
    store: Any, caplog: Any
) -> None:
    registry, steps, source = CollectorRegistry(), Steps(), Source(store)
    StoreCollector(source, registry, now_s=steps)
    PrometheusMetrics(registry).on_event(Admitted(queue="q"))
    enqueue(store, "a")
    assert at(samples(registry), "store_up") == 1
    steps.advance(15)
    source.inspect.fail("queue_stats", StoreUnavailable("away"))
    for _ in range(3):
        found = samples(registry)
        assert at(found, "store_up") == 0
        assert at(found, "queue_unfinished_jobs", queue="q") is None
        assert at(found, "jobs_admitted_total", queue="q") == 1
    assert source.inspect.count("queue_stats") == 2
    assert caplog.text.count("no figures of the queues: away") == 1
    steps.advance(15)
    assert at(samples(registry), "queue_unfinished_jobs", queue="q") == 1


def test_a_scrape_does_not_wait_for_another_ones_reading(store: Any) -> None:
    registry, steps, source = CollectorRegistry(), Steps(), Source(store)
    StoreCollector(source, registry, now_s=steps)
    samples(registry)
    enqueue(store, "a")
    steps.advance(15)
    gate = Gate()

    def held(real: Any, *args: Any, **keywords: Any) -> Any:
        gate.hold()
        return real(*args, **keywords)

    source.inspect.around["queue_stats"] = held
    slow: list[Samples] = []
    thread = threading.Thread(target=lambda: slow.append(samples(registry)))
    thread.start()
    gate.wait()
    assert at(samples(registry), "queue_unfinished_jobs", queue="q") is None
    gate.open()
    thread.join()
    assert at(slow[0], "queue_unfinished_jobs", queue="q") == 1


def test_at_most_200_queues_are_told_or_those_that_are_named(store: Any) -> None:
    store.enqueue([envelope(f"j{n}", queue=f"q{n:03}") for n in range(250)])
    registry = CollectorRegistry()
    StoreCollector(store, registry)
    names = [name for name, _ in samples(registry)]
    assert names.count("headgate_queue_unfinished_jobs") == 200
    assert names.count("headgate_queue_live_workers") == 200
    named = CollectorRegistry()
    StoreCollector(store, named, queues=["q249", "never-used", "q249"])
    found = samples(named)
    assert at(found, "queue_unfinished_jobs", queue="q249") == 1
    told = generate_latest(named).decode()
    assert told.count('headgate_queue_unfinished_jobs{queue="q249"}') == 1
    assert at(found, "queue_unfinished_jobs", queue="never-used") == 0
    assert [name for name, _ in found].count("headgate_queue_unfinished_jobs") == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cache": "14999ms"}, "cache"),
        ({"queues": "q"}, "queues"),
        ({"queues": [f"q{n}" for n in range(201)]}, "queues"),
        ({"queues": [""]}, "queues"),
        ({"queues": [7]}, "queues"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_registered(
    options: dict[str, Any], text: str
) -> None:
    registry = CollectorRegistry()
    with pytest.raises(InvalidRequest, match=text):
        StoreCollector(MemStore(), registry, **options)
    assert generate_latest(registry) == b""


def test_a_second_collector_on_one_registry_is_refused() -> None:
    registry = CollectorRegistry()
    StoreCollector(MemStore(), registry)
    with pytest.raises(ConfigurationError, match="make one StoreCollector for it"):
        StoreCollector(MemStore(), registry)
