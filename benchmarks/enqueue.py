"""How fast producers are, alone, inside a caller's transaction, and in bulk."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import psycopg

from benchmarks.bare import INSERT, PAYLOAD, TEXT, Bare, bare
from benchmarks.database import fresh_store
from benchmarks.load import envelopes
from benchmarks.report import Report
from headgate_sync.postgres.store import PgStore


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--jobs", type=int, default=2000, help="single enqueues a run")
    parser.add_argument(
        "--batches", type=int, default=20, help="batches of 1,000 a run"
    )


def run(url: str, options: Namespace) -> Report:
    """Measure single, joined and bulk enqueue, each beside its bare statement."""
    report = Report("enqueue", {"jobs": options.jobs, "batches": options.batches})
    samples: dict[str, list[float]] = {}
    with bare(url) as plain, fresh_store(url) as store:
        for _ in range(options.runs):
            plain.reset()
            for name, seconds, count in (
                ("bare_single", _each(options.jobs, plain.insert_one), options.jobs),
                ("single", _single(store, options.jobs), options.jobs),
                ("bare_1000", _each(options.batches, lambda: plain.insert_many(1000)),
                 options.batches * 1000),
                ("batch_1000", _bulk(store, options.batches), options.batches * 1000),
            ):  # fmt: skip
                samples.setdefault(f"{name}_per_s", []).append(count / seconds)
            for name, added_us in _joined(url, plain, store, options.jobs).items():
                samples.setdefault(name, []).append(added_us)
    for name, values in samples.items():
        report.figure(name, values)
    report.ratio("single/bare", samples["single_per_s"], samples["bare_single_per_s"])
    report.ratio(
        "batch_1000/bare", samples["batch_1000_per_s"], samples["bare_1000_per_s"]
    )
    report.ratio("joined/bare", samples["joined_us"], samples["bare_joined_us"])
    return report


def _each(count: int, call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - started


def _single(store: PgStore, count: int) -> float:
    jobs = iter(envelopes(count, payload=PAYLOAD))
    return _each(count, lambda: store.enqueue([next(jobs)]))


def _bulk(store: PgStore, batches: int) -> float:
    loads = iter([envelopes(1000, payload=PAYLOAD) for _ in range(batches)])
    return _each(batches, lambda: store.enqueue(next(loads)))


def _joined(url: str, plain: Bare, store: PgStore, count: int) -> dict[str, float]:
    """Microseconds that one more statement costs inside an open transaction."""
    jobs = iter(envelopes(count, payload=PAYLOAD))
    with psycopg.connect(url) as connection:
        connection.execute("SELECT 1")
        bare_s = _each(count, lambda: connection.execute(INSERT, (TEXT,)))
        connection.commit()
        connection.execute("SELECT 1")
        assert store.transactional is not None
        tx = store.transactional.join(connection)
        ours_s = _each(count, lambda: store.transactional.enqueue_tx(tx, [next(jobs)]))
        connection.commit()
    return {"bare_joined_us": bare_s / count * 1e6, "joined_us": ours_s / count * 1e6}
