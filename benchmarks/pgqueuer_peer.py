"""pgqueuer as the peer: its tables, its jobs, its worker; run as a process of its own.

Needs the extra `bench`. Parts: install, load COUNT, send COUNT GAP_MS, work.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import asyncpg
from pgqueuer import AsyncpgDriver, PgQueuer, Queries

from benchmarks.jobs import STAMPS

URL = "HEADGATE_BENCH_URL"
SLOTS = 16


async def _queries() -> tuple[asyncpg.Connection, Queries]:
    connection = await asyncpg.connect(os.environ[URL])
    return connection, Queries(AsyncpgDriver(connection))


async def install() -> None:
    """Create the peer's tables anew."""
    connection, queries = await _queries()
    if await connection.fetchval("SELECT to_regclass('pgqueuer')") is not None:
        await queries.uninstall()
    await queries.install()
    await connection.close()


async def load(count: int) -> None:
    """Enqueue no-op jobs in batches of 1,000."""
    connection, queries = await _queries()
    for start in range(0, count, 1000):
        size = min(1000, count - start)
        await queries.enqueue(["noop"] * size, [b"{}"] * size, [0] * size)
    await connection.close()


async def send(count: int, gap_ms: int) -> None:
    """Enqueue one job at a time and print when each call returned, in nanoseconds."""
    connection, queries = await _queries()
    for number in range(count):
        await queries.enqueue("stamp", str(number).encode(), 0)
        print(number, time.monotonic_ns(), flush=True)
        await asyncio.sleep(gap_ms / 1e3)
    await connection.close()


async def work() -> None:
    """Run the peer's worker with sixteen slots until the process is ended."""
    connection = await asyncpg.connect(os.environ[URL])
    queue = PgQueuer(AsyncpgDriver(connection))

    @queue.entrypoint("noop")
    async def noop(_job: object) -> None:
        pass

    @queue.entrypoint("stamp")
    async def stamp(job: object) -> None:
        started = time.monotonic_ns()
        number = job.payload.decode()  # type: ignore[attr-defined]
        with Path(os.environ[STAMPS]).open("a") as stamps:
            stamps.write(f"{number} {started}\n")

    # It insists on twice the batch size as the number of slots.
    await queue.run(batch_size=SLOTS // 2, max_concurrent_tasks=SLOTS)


def main() -> None:
    """Run one of the four parts."""
    part, *numbers = sys.argv[1:]
    sizes = [int(number) for number in numbers]
    calls = {"install": install, "load": load, "send": send, "work": work}
    asyncio.run(calls[part](*sizes))


if __name__ == "__main__":
    main()
