"""What one admit costs beside the bare claim, at several depths and widths.

Bare is a claim from a plain table; same is one from a copy of the rows and indexes.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from benchmarks.bare import Bare, bare
from benchmarks.database import fresh_store
from benchmarks.load import at_rest, backlog, preload
from benchmarks.report import Report, percentile
from benchmarks.twin import twin
from headgate_sync.lease import Ack, AdmitRequest
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.store import PgStore


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--capacity", type=int, default=16)
    parser.add_argument("--calls", type=int, default=200)


def run(url: str, options: Namespace) -> Report:
    """Time admits in every scene; each claim is acked outside the timed part."""
    sizes = {"capacity": options.capacity, "calls": options.calls}
    report = Report("admit", sizes)
    medians = []
    for rows in options.rows:
        plain_p50: list[float] = []
        with bare(url) as plain:
            for _ in range(options.runs):
                plain.fill(rows)
                at_rest(url)
                plain_p50.append(percentile(bare_claims(plain, options), 0.5))
        report.figure(f"bare_p50_ms_{rows}", plain_p50)
        for partitions in options.partitions:
            scene = f"{rows}x{partitions}"
            with fresh_store(url) as store:
                backlog(url, store, rows, partitions=partitions)
                settle_news(store)
                runs, same_p50 = [], []
                for _ in range(options.runs):
                    with twin(url) as copy:
                        at_rest(url)
                        copy.claims(20, options.capacity)
                        same = copy.claims(options.calls, options.capacity)
                        same_p50.append(percentile(same, 0.5))
                    # Past the fold of what the load appended, and at the same depth.
                    _admits(store, options, calls=20)
                    runs.append(_admits(store, options))
                    spent = (options.calls + 20) * options.capacity
                    preload(store, spent, partitions=partitions)
            p50 = [percentile(run, 0.5) for run in runs]
            report.figure(f"same_p50_ms_{scene}", same_p50)
            medians.append(report.figure(f"admit_p50_ms_{scene}", p50))
            report.figure(f"admit_p95_ms_{scene}", [percentile(r, 0.95) for r in runs])
            report.ratio(f"admit/bare_{scene}", p50, plain_p50)
            report.ratio(f"admit/same_{scene}", p50, same_p50)
    report.ratios["slowest/fastest_scene"] = round(max(medians) / min(medians), 3)
    return report


def settle_news(store: PgStore) -> None:
    """Fold everything that was announced, as the upkeep would."""
    while store.maintenance.gate_fold(10_000):
        pass


def bare_claims(plain: Bare, options: Namespace) -> list[float]:
    """Time claims from the plain table; each is acked outside the timed part."""
    times = []
    for _ in range(options.calls):
        started = time.perf_counter()
        ids = plain.claim(options.capacity)
        times.append((time.perf_counter() - started) * 1e3)
        plain.ack(ids)
    return times


def _admits(
    store: PgStore, options: Namespace, calls: int | None = None
) -> list[float]:
    times = []
    for number in range(calls or options.calls):
        request = AdmitRequest(
            worker="bench",
            lease_id=f"bench:{number}",
            queues=("bench",),
            capacity=options.capacity,
            lease_ms=600_000,
        )
        started = time.perf_counter()
        batch = store.admit(request)
        times.append((time.perf_counter() - started) * 1e3)
        acks = [Ack(lease=c.lease_ref, outcome=Outcome.SUCCESS) for c in batch.claims]
        if not acks:
            raise RuntimeError("the gate answered nothing although work is waiting")
        store.ack_batch(acks)
    return times
