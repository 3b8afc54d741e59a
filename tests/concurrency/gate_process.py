"""A member of a crowd as a process: makes some calls and prints its log as JSON."""

from __future__ import annotations

import json
import sys
import time

from attrs import asdict

from headgate_sync.postgres.store import PgStore
from tests.concurrency.gate_rules import Member


def main(name: str, conninfo: str, calls: str, fast_by_s: str) -> None:
    """Act; the process believes that it is later than it is."""
    real_s, real_ns, ahead_s = time.time, time.time_ns, int(fast_by_s)
    time.time = lambda: real_s() + ahead_s
    time.time_ns = lambda: real_ns() + ahead_s * 1_000_000_000
    store = PgStore.connect(conninfo)
    member = Member(store, name)
    try:
        for _ in range(int(calls)):
            member.act()
    finally:
        store.close()
    told = [asdict(claim) for claim in member.log]
    print(json.dumps({"log": told, "slowest_s": member.slowest_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
