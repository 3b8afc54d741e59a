"""A worker process of a test: claims and completes until the queue is empty.

Prints the ids that it completed. Each second attempt is given back first, so that jobs
change hands between the processes.
"""

from __future__ import annotations

import random
import sys

from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.store import PgStore
from tests.builders import admit, steer

MAX_ROUNDS = 5_000


def main(name: str, conninfo: str) -> None:
    luck = random.Random(name)
    store = PgStore.connect(conninfo)
    try:
        for round in range(MAX_ROUNDS):
            claims = admit(
                store, f"{name}-{round}", capacity=luck.randint(1, 20), worker=name
            ).claims
            if not claims and steer(store).unfinished("q") == 0:
                return
            acks = [
                Ack(
                    lease=claim.lease_ref,
                    outcome=luck.choice([Outcome.SUCCESS, Outcome.RATE_LIMITED]),
                )
                for claim in claims
            ]
            for ack, error in zip(acks, store.ack_batch(acks), strict=True):
                if error is None and ack.outcome is Outcome.SUCCESS:
                    print(ack.lease.job_id)
    finally:
        store.close()
    raise AssertionError("the queue never came to rest")


if __name__ == "__main__":
    main(*sys.argv[1:])
