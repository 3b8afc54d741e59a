"""Prometheus metrics: of what a worker does, and of the queues in the store."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from attrs import field, frozen

from headgate_sync.backlog import MAX_QUEUES, QueueStats
from headgate_sync.durations import duration_ms
from headgate_sync.errors import (
    ConfigurationError,
    HeadgateError,
    MissingExtra,
    Unsupported,
)
from headgate_sync.inspection import Inspect
from headgate_sync.labels import DEFAULT_LABEL_SETS, OTHER, LabelSets, clean
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
from headgate_sync.validation import check_count, check_name, check_texts
from headgate_sync.workers import QueueCover

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.multiprocess import mark_process_dead
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra(
        "metrics need prometheus_client: pip install 'headgate_sync[metrics]'"
    ) from error

logger = logging.getLogger(__name__)

_NAME = re.compile(r"headgate_\w+")
BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
ADMISSION_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
MIN_CACHE_MS = 15_000
LEASE_LOST = "lease_lost"

_COUNTERS = {
    "jobs_admitted": ("Jobs that were claimed.", ["queue"]),
    "jobs_rejected": ("Jobs handed back by their handlers.", ["queue", "policy"]),
    "jobs_completed": ("Jobs that succeeded.", ["kind"]),
    "jobs_quarantined": ("Jobs set aside at the crash limit.", []),
    "jobs_evicted": ("Finished jobs deleted after their retention.", ["queue"]),
    "jobs_unhandled": ("Claimed jobs of a kind without a handler.", ["queue"]),
    "worker_restart_requests": ("Drains at the memory limit.", ["worker"]),
    "leases_lost": ("Attempts whose outcome was not taken.", ["worker"]),
    "ack_failures": ("Ack calls that failed, outcomes given up.", ["worker"]),
    "renew_failures": ("Renewals without an answer.", ["worker"]),
    "handlers_stuck": ("Handlers that go on though told to stop.", ["worker"]),
    "log_lines_dropped": ("Log lines beyond the cap of an attempt.", ["worker"]),
    "jobs_refused": ("Jobs that admissions met and left waiting.", ["policy"]),
    "gate_corrections": ("Partitions whose counters were put right.", []),
}
_OF_WORKERS = [name for name, (_, labels) in _COUNTERS.items() if "worker" in labels]
_HISTOGRAMS = {
    "job_attempt_duration_seconds": (
        "Length of attempts, from the claim to the end of the handler.",
        ["queue", "kind", "outcome"],
        BUCKETS_S,
    ),
    "admission_duration_seconds": (
        "Length of admissions, from the question to the answer.",
        [],
        ADMISSION_BUCKETS_S,
    ),
}
_GAUGES = {
    "worker_utilization_ratio": "Share of the handlers that are busy.",
    "worker_empty_poll_ratio": "Share of the last admits that brought nothing.",
    "worker_inflight": "Slots taken.",
    "worker_capacity": "Handlers at the same time.",
    "worker_memory_bytes": "The last sample of the memory.",
    "worker_memory_limit_bytes": "Where the worker drains and ends.",
}


class _Bounded:
    """One metric with a bounded number of children.

    Args:
        free: how many of its labels, the first ones, can have any value; the others are
            words of this package.
    """

    def __init__(self, name: str, metric: Any, free: int, limit: int) -> None:
        self.metric = metric
        self._free = free
        self._sets = LabelSets(f"headgate_{name}", limit)
        self._children: dict[tuple[str, ...], Any] = {}  # bounded as the sets are

    def at(self, *values: str) -> Any:
        """The child for these label values."""
        if not values:
            return self.metric
        child = self._children.get(values)
        if child is None:
            names, words = values[: self._free], values[self._free :]
            used = self._sets.of(*names)
            child = self.metric.labels(*used, *words)
            if OTHER not in used:
                self._children[values] = child
        return child


class PrometheusMetrics(Collector):
    """A telemetry sink that keeps counters, gauges and two histograms.

    Label values are names of queues, kinds, outcomes, policies and workers; never ids,
    partitions, tags or texts of errors. Each metric has at most `max_label_sets` sets
    of names, what comes later counts as `_other`.

    Args:
        registry: where the metrics are shown.
        max_label_sets: 1 to 10,000, per metric.

    Raises:
        ConfigurationError: the registry has metrics of these names; it is unchanged.
        InvalidRequest: the number is out of range.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        max_label_sets: int = DEFAULT_LABEL_SETS,
    ) -> None:
        # The parts belong to no registry, this object as a whole does: either all of
        # their names are free or nothing is registered.
        self._metrics: dict[str, _Bounded] = {}
        for name, (text, labels) in _COUNTERS.items():
            counter = Counter(f"headgate_{name}", text, labels, registry=None)
            free = len([label for label in labels if label != "policy"])
            self._metrics[name] = _Bounded(name, counter, free, max_label_sets)
        for name, text in _GAUGES.items():
            gauge = Gauge(
                f"headgate_{name}",
                text,
                ["worker"],
                registry=None,
                multiprocess_mode="liveall",
            )
            self._metrics[name] = _Bounded(name, gauge, 1, max_label_sets)
        for name, (text, labels, bounds_s) in _HISTOGRAMS.items():
            histogram = Histogram(
                f"headgate_{name}", text, labels, buckets=bounds_s, registry=None
            )
            self._metrics[name] = _Bounded(name, histogram, 2, max_label_sets)
        self._takers: dict[type, Callable[[Any], None]] = {
            Admitted: lambda e: self._count(e.count, "jobs_admitted", e.queue),
            Rejected: lambda e: self._count(
                e.count, "jobs_rejected", e.queue, e.policy
            ),
            Completed: lambda e: self._count(1, "jobs_completed", e.kind),
            Quarantined: lambda e: self._count(1, "jobs_quarantined"),
            Evicted: lambda e: self._count(e.count, "jobs_evicted", e.queue),
            Unhandled: lambda e: self._count(1, "jobs_unhandled", e.queue),
            AckFailed: lambda e: self._count(1, "ack_failures", e.worker),
            RenewFailed: lambda e: self._count(1, "renew_failures", e.worker),
            Stuck: lambda e: self._count(1, "handlers_stuck", e.worker),
            LogDropped: lambda e: self._count(e.count, "log_lines_dropped", e.worker),
            AdmissionMade: self._admission,
            GateCorrected: lambda e: self._count(e.count, "gate_corrections"),
            JobSpan: self._span,
            WorkerSaturation: self._saturation,
            WorkerMemory: self._memory,
        }
        _register(registry, self)

    def on_event(self, event: TelemetryEvent) -> None:
        """Count an event; those of later releases are ignored."""
        taker = self._takers.get(type(event))
        if taker is not None:
            taker(event)

    def collect(self) -> Iterator[Metric]:
        """All metrics with their samples, for the registry."""
        for bounded in self._metrics.values():
            yield from bounded.metric.collect()

    def describe(self) -> Iterator[Metric]:
        """All metrics without samples, for the registry."""
        for bounded in self._metrics.values():
            yield from bounded.metric.describe()

    def _count(self, by: int, name: str, *labels: str) -> None:
        self._metrics[name].at(*labels).inc(by)

    def _set(self, name: str, worker: str, value: float) -> None:
        self._metrics[name].at(worker).set(value)

    def _admission(self, made: AdmissionMade) -> None:
        self._metrics["admission_duration_seconds"].at().observe(made.ms / 1000)
        for policy, count in made.refused.items():
            self._count(count, "jobs_refused", policy)

    def _span(self, span: JobSpan) -> None:
        child = self._metrics["job_attempt_duration_seconds"].at(
            span.queue, span.kind, span.outcome
        )
        child.observe(span.ms / 1000)
        if span.outcome == LEASE_LOST:
            self._count(1, "leases_lost", span.worker)

    def _saturation(self, told: WorkerSaturation) -> None:
        self._set("worker_utilization_ratio", told.worker, told.utilization)
        self._set("worker_empty_poll_ratio", told.worker, told.empty_poll_ratio)
        self._set("worker_inflight", told.worker, told.inflight)
        self._set("worker_capacity", told.worker, told.capacity)
        for name in _OF_WORKERS:
            # There from the start: a counter that appears at 1 shows no increase.
            self._metrics[name].at(told.worker)

    def _memory(self, told: WorkerMemory) -> None:
        self._set("worker_memory_bytes", told.worker, told.used_bytes)
        self._set("worker_memory_limit_bytes", told.worker, told.limit_bytes)
        if told.restart_requested:
            self._count(1, "worker_restart_requests", told.worker)


class HasInspect(Protocol):
    """A `Headgate` or a store."""

    @property
    def inspect(self) -> Inspect | None:
        """How to look into the store."""
        ...


@frozen
class _Queues:
    """One reading of the store; `up` is false where it did not answer."""

    up: bool
    stats: Sequence[QueueStats] = ()
    cover: dict[str, QueueCover] = field(factory=dict)


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


_OF_QUEUES: dict[str, tuple[str, Callable[[QueueStats], float | None]]] = {
    "unfinished_jobs": ("Jobs in no terminal state.", lambda s: s.unfinished_jobs),
    "arrival_rate": ("Jobs per second that came.", lambda s: s.arrival_rate),
    "drain_rate": ("Jobs per second that succeeded.", lambda s: s.drain_rate),
    "time_to_drain_seconds": (
        "Until the backlog is gone at these rates; absent while it does not shrink.",
        lambda s: _seconds(s.time_to_drain_ms),
    ),
    "oldest_available_seconds": (
        "How long the job that waited longest has been available; absent without one.",
        lambda s: _seconds(s.oldest_available_ms),
    ),
    "quiet_arrival_rate": (
        "As arrival_rate, without the partitions that stand out.",
        lambda s: s.quiet_groups.arrival_rate,
    ),
    "quiet_drain_rate": (
        "As drain_rate, without the partitions that stand out.",
        lambda s: s.quiet_groups.drain_rate,
    ),
    "quiet_time_to_drain_seconds": (
        "As time_to_drain_seconds, without the partitions that stand out.",
        lambda s: _seconds(s.quiet_groups.time_to_drain_ms),
    ),
    "quiet_oldest_available_seconds": (
        "As oldest_available_seconds, without the partitions that stand out.",
        lambda s: _seconds(s.quiet_groups.oldest_available_ms),
    ),
}


class StoreCollector(Collector):
    """Gauges of the queues, read from the store when somebody scrapes.

    Reads only, at most once per `cache`, and at most 200 queues: the first by name, or
    those that are named. Meant for one process of a fleet; two would show every figure
    twice. A store that does not answer leaves out all gauges but `headgate_store_up`,
    and is asked again after `cache`. Scrapes that come while one reads get the figures
    of the reading before.

    Args:
        source: a `Headgate` or a store; nothing is opened before the first scrape.
        registry: where the gauges are shown.
        cache: 15 seconds or more.
        queues: up to 200 names; None is the first 200 that there are.
        now_s: monotonic seconds.

    Raises:
        ConfigurationError: the registry has metrics of these names; it is unchanged.
        InvalidRequest: cache or queues are out of range.
    """

    def __init__(
        self,
        source: HasInspect,
        registry: CollectorRegistry,
        *,
        cache: timedelta | str = "15s",
        queues: Sequence[str] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._cache_s = duration_ms("cache", cache, minimum_ms=MIN_CACHE_MS) / 1000
        if queues is not None:
            check_texts("queues", queues)
            check_count("queues", len(queues), MAX_QUEUES)
            for queue in queues:
                check_name("queues", queue)
        self._names = None if queues is None else tuple(dict.fromkeys(queues))
        self._now_s = now_s
        self._reading = threading.Lock()  # held by the one scrape that asks the store
        self._last: tuple[float, _Queues] | None = None
        _register(registry, self)

    def collect(self) -> Iterator[Metric]:
        """The gauges with their samples, for the registry."""
        queues = self._current()
        yield GaugeMetricFamily(*_UP, value=float(queues.up))
        for name, (text, figure) in _OF_QUEUES.items():
            family = GaugeMetricFamily(_of_queue(name), text, labels=["queue"])
            for stats in queues.stats:
                value = figure(stats)
                if value is not None:
                    family.add_metric([clean(stats.queue)], value)
            yield family
        for name, text in _COVER.items():
            family = GaugeMetricFamily(_of_queue(name), text, labels=["queue"])
            for stats in queues.stats:
                cover = queues.cover.get(stats.queue)
                value = 0 if cover is None else getattr(cover, name)
                family.add_metric([clean(stats.queue)], value)
            yield family

    def describe(self) -> Iterator[Metric]:
        """The gauges without samples, for the registry."""
        yield GaugeMetricFamily(*_UP)
        for name, (text, _) in _OF_QUEUES.items():
            yield GaugeMetricFamily(_of_queue(name), text, labels=["queue"])
        for name, text in _COVER.items():
            yield GaugeMetricFamily(_of_queue(name), text, labels=["queue"])

    def _current(self) -> _Queues:
        last = self._last
        if not self._reading.acquire(blocking=last is None):
            assert last is not None
            return last[1]
        try:
            last = self._last
            if last is None or self._now_s() - last[0] >= self._cache_s:
                queues = self._read()
                # Counted from the answer: a store that is slow is asked less often.
                last = self._last = (self._now_s(), queues)
            return last[1]
        finally:
            self._reading.release()

    def _read(self) -> _Queues:
        try:
            inspect = self._source.inspect
            if inspect is None:
                raise Unsupported("inspect")
            stats = inspect.queue_stats(queues=self._names)
            cover = {served.queue: served for served in inspect.cluster().queues}
        except HeadgateError as error:
            logger.warning("no figures of the queues: %s", error)
            return _Queues(up=False)
        return _Queues(up=True, stats=stats, cover=cover)


_UP = ("headgate_store_up", "Whether the store answered when it was asked last.")
_COVER = {
    "live_workers": "Workers that serve the queue and have beaten within 15 minutes.",
    "late_workers": "Of these, those that missed three beats and are probably dead.",
}


def _of_queue(name: str) -> str:
    return f"headgate_queue_{name}"


def forget_dead_processes(folder: Path | str) -> list[int]:
    """Remove the gauges of processes that have ended, for a scrape of several.

    A process that was killed cannot take its gauges back. Only for a folder whose
    processes all run on this machine and in this process's own namespace of ids.

    Args:
        folder: what `PROMETHEUS_MULTIPROC_DIR` names.

    Returns:
        Ids of the processes whose gauges were removed.
    """
    found = {int(path.stem.rpartition("_")[2]) for path in _gauge_files(folder)}
    dead = sorted(pid for pid in found if not _runs(pid))
    for pid in dead:
        mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
    return dead


def _gauge_files(folder: Path | str) -> Iterator[Path]:
    for path in Path(folder).glob("gauge_live*_*.db"):
        if path.stem.rpartition("_")[2].isdigit():
            yield path


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _register(registry: CollectorRegistry, collector: Collector) -> None:
    try:
        registry.register(collector)
    except ValueError as error:
        name = type(collector).__name__
        taken = min(_NAME.findall(str(error)), default="one of its metrics")
        raise ConfigurationError(
            f"{name}: the registry has {taken} already; make one {name} for it and "
            "share that, or give each a CollectorRegistry of its own"
        ) from error  # which lists all names
