"""MemStore: enqueue, admit and ack in one thread."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from benchmarks.load import envelopes
from benchmarks.report import Report
from headgate_sync.lease import Ack, AdmitRequest
from headgate_sync.lifecycle import Outcome
from headgate_sync.memory.store import MemStore


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--capacity", type=int, default=100)


def run(_url: str, options: Namespace) -> Report:
    """Jobs per second through the whole store, one thread."""
    report = Report("memory", {"jobs": options.jobs, "capacity": options.capacity})
    report.figure("jobs_per_s", [_round(options) for _ in range(options.runs)])
    return report


def _round(options: Namespace) -> float:
    store = MemStore()
    jobs = envelopes(options.jobs)
    started = time.perf_counter()
    for start in range(0, options.jobs, 100):
        store.enqueue(jobs[start : start + 100])
    number = done = 0
    while done < options.jobs:
        number += 1
        batch = store.admit(
            AdmitRequest(
                worker="bench",
                lease_id=f"bench:{number}",
                queues=("bench",),
                capacity=options.capacity,
                lease_ms=60_000,
            )
        )
        acks = [Ack(lease=c.lease_ref, outcome=Outcome.SUCCESS) for c in batch.claims]
        store.ack_batch(acks)
        done += len(acks)
    return options.jobs / (time.perf_counter() - started)
