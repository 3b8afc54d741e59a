"""A node of the tests: sweeps the schedules over and over, until it is killed."""

from __future__ import annotations

import sys

from headgate_sync.errors import StoreUnavailable
from headgate_sync.postgres.store import PgStore
from headgate_sync.worker.scheduler import Scheduler


def main(conninfo: str) -> None:
    scheduler = Scheduler(PgStore.connect(conninfo, pool_size=2))
    print("ready", flush=True)
    while True:
        try:
            scheduler.sweep()
        except StoreUnavailable as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
