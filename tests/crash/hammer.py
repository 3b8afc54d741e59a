"""Processes of the tests that produce and admit at random, until they are ended."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psycopg

from headgate_sync.envelope import Envelope
from headgate_sync.lease import Ack, AdmitRequest
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.store import PgStore
from tests.builders import envelope

QUEUES = ("a", "b", "c")
WORKERS = ("w0", "w1")
LEASE_MS = 2_000


class RolledBack(Exception):
    """Ends a transaction or a savepoint that was not to be."""


def job(luck: random.Random, name: str) -> Envelope:
    return envelope(
        name,
        queue=luck.choice(QUEUES),
        partition_key=f"p{luck.randrange(60)}",
        sticky_worker=luck.choice(["", "", "", *WORKERS]),
        rate_class=luck.choice(["", "", "c", "d"]),
        fingerprint="",
    )


def produce(url: str, seed: int, seconds: float) -> None:
    """Enqueue in transactions of all lengths; print the ids of those that committed."""
    luck, end_s, number = random.Random(seed), time.monotonic() + seconds, 0
    store = PgStore.connect(url)
    with psycopg.connect(url) as caller:
        while time.monotonic() < end_s:
            kept: list[str] = []
            with suppress(RolledBack), caller.transaction():
                for _ in range(luck.randint(1, 4)):
                    names = [f"{seed}-{number + n}" for n in range(luck.randint(1, 20))]
                    number += len(names)
                    with suppress(RolledBack), caller.transaction():
                        store.transactional.enqueue_tx(
                            store.transactional.join(caller),
                            [job(luck, name) for name in names],
                        )
                        if luck.random() < 0.2:
                            raise RolledBack
                        kept += names
                    time.sleep(luck.choice([0, 0, 0, 0, 0, 0.01, 0.3, 1]))
                if luck.random() < 0.2:
                    kept.clear()
                    raise RolledBack
            print(*kept, flush=True)


def requests(luck: random.Random) -> Iterator[AdmitRequest]:
    number = 0
    while True:
        number += 1
        yield AdmitRequest(
            worker=luck.choice(WORKERS),
            lease_id=f"{os.getpid()}-{number}",
            queues=tuple(sorted(luck.sample(QUEUES, luck.randint(1, 3)))),
            capacity=luck.choice([1, 4, 16, 40]),
            lease_ms=LEASE_MS,
            quantum=luck.choice([0, 0, 1, 3]),
        )


def admit(url: str, seed: int) -> None:
    """Admit and settle, without end."""
    luck, store = random.Random(seed), PgStore.connect(url)
    for request in requests(luck):
        acks = []
        for claim in store.admit(request).claims:
            outcome = luck.choice([*[Outcome.SUCCESS] * 8, *_AGAIN])
            delay_ms = 200 if outcome is Outcome.SNOOZE else None
            acks.append(Ack(lease=claim.lease_ref, outcome=outcome, delay_ms=delay_ms))
        luck.shuffle(acks)
        for start in range(0, len(acks), 7):
            store.ack_batch(acks[start : start + 7])
        if not acks:
            time.sleep(0.02)


_AGAIN = (Outcome.RATE_LIMITED, Outcome.SNOOZE)

if __name__ == "__main__":
    role, conninfo, seed, *rest = sys.argv[1:]
    if role == "produce":
        produce(conninfo, int(seed), float(rest[0]))
    else:
        admit(conninfo, int(seed))
