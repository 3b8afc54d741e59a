"""What people who look cost: 50 dashboards poll while a worker drains a queue."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from typing import Any

from attrs import define, field

from benchmarks.database import SCHEMA, fresh_store
from benchmarks.drain import postmaster
from benchmarks.load import at_rest, enqueue_all, envelopes, multiply
from benchmarks.processes import (
    process_cpu_s,
    server_cpu_s,
    wait_until,
    worker_process,
)
from benchmarks.report import Report, percentile
from headgate_sync.backlog import MINUTE_MS
from headgate_sync.identity import Identity
from headgate_sync.inspection import Inspect
from headgate_sync.policy import RateClassConfig
from headgate_sync.postgres.store import PgStore
from tests.builders import envelope

# As the script of the console has it: every page is told to look again by a tick of
# 5 s, over a stream or by polling, and reads itself 0.7 s later.
TICK_S = 5.0
DEBOUNCE_S = 0.7
API = "/api/v1"
READS = (
    f"{API}/queues",
    f"{API}/cluster",
    f"{API}/jobs/counts",
    f"{API}/queues/bench/history?bucket_ms={MINUTE_MS}",
)
PAGES = ("/", "/", "/", "/queue?name=bench", "/jobs?queue=bench")
QUIET_QUEUES = 20


def who(environ: dict[str, Any]) -> Identity | None:
    """The hook of the server under measurement: each dashboard says its name."""
    name = environ.get("HTTP_X_DASHBOARD")
    return None if name is None else Identity(name)


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--dashboards", type=int, default=50)
    parser.add_argument("--threads", type=int, default=16, help="of the worker")
    parser.add_argument("--segment", type=int, default=5, help="seconds of a stretch")
    parser.add_argument("--jobs", type=int, default=500_000, help="of a run")
    parser.set_defaults(runs=4)


def run(url: str, options: Namespace) -> Report:
    """Alternate stretches of a drain alone and under load; a pair gives a ratio.

    In the scene `api` the dashboards share one identity and its limit of 50 requests a
    second; in the scene `console` each is an open page of a user.
    """
    sizes = {name: getattr(options, name) for name in ("dashboards", "threads", "jobs")}
    report = Report("dashboards", sizes)
    samples: dict[str, list[float]] = {}
    with (
        fresh_store(url) as store,
        _console(url) as (address, pid),
        _Fleet(address, options.dashboards) as fleet,
    ):
        _furnish(store)
        templates = envelopes(8, partitions=8)
        enqueue_all(store, templates)
        multiply(url, templates, options.jobs)
        at_rest(url)
        meter = _Meter(store.inspect, pid, postmaster(url))
        with worker_process(url, "--threads", str(options.threads)) as worker:
            wait_until(lambda: meter.left() < options.jobs * 0.99, timeout_s=60)
            for _ in range(options.runs):
                for scene in ("api", "console"):
                    alone = meter.stretch(options.segment)
                    with fleet.busy(scene):
                        found = meter.stretch(options.segment)
                    after = meter.stretch(options.segment)
                    told = {
                        "drain_alone_per_s": (alone["drain"] + after["drain"]) / 2,
                        f"drain_under_{scene}_per_s": found["drain"],
                        f"{scene}_web_cores": found["web_cpu"] - alone["web_cpu"],
                        # Beside what as many jobs cost it anyway.
                        f"{scene}_postgres_cores": found["postgres_cpu"]
                        - alone["postgres_cpu"] * found["drain"] / alone["drain"],
                        **fleet.figures(scene, options.segment),
                    }
                    for name, value in told.items():
                        samples.setdefault(name, []).append(value)
                    samples.setdefault(f"_{scene}_alone", []).append(
                        told["drain_alone_per_s"]
                    )
            if meter.left() < options.jobs * 0.02:
                raise RuntimeError("the queue ran empty; give it more --jobs")
            worker.kill()
    for scene in ("api", "console"):
        report.ratio(
            f"drain_under_{scene}/alone",
            samples[f"drain_under_{scene}_per_s"],
            samples.pop(f"_{scene}_alone"),
        )
    for name, values in samples.items():
        report.figure(name, values)
    return report


def _furnish(store: PgStore) -> None:
    """Something to show beside the queue that is drained."""
    for number in range(QUIET_QUEUES):
        queue = f"quiet{number}"
        store.enqueue(
            [envelope(f"{queue}-{n}", queue=queue, delay_ms=900_000) for n in range(20)]
        )
    inspect = store.inspect
    for number in range(4):
        inspect.upsert_rate_class(
            RateClassConfig(name=f"class{number}", limit=10, window_ms=1_000, burst=10)
        )


class _Meter:
    """The pace of the drain and what the processes burn."""

    def __init__(self, inspect: Inspect, web_pid: int, postgres_pid: int) -> None:
        self._inspect = inspect
        self._web_pid = web_pid
        self._postgres_pid = postgres_pid

    def left(self) -> int:
        """Unfinished jobs."""
        return self._inspect.unfinished("bench")

    def stretch(self, seconds: int) -> dict[str, float]:
        """Measure for so long."""
        web, postgres = process_cpu_s(self._web_pid), server_cpu_s(self._postgres_pid)
        started, before = time.perf_counter(), self.left()
        time.sleep(seconds)
        done, took = before - self.left(), time.perf_counter() - started
        return {
            "drain": done / took,
            "web_cpu": (process_cpu_s(self._web_pid) - web) / took,
            "postgres_cpu": (server_cpu_s(self._postgres_pid) - postgres) / took,
        }


@contextmanager
def _console(url: str) -> Iterator[tuple[tuple[str, int], int]]:
    """`headgate console` as a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "headgate_sync", "console"]
    hook = ["--auth", "benchmarks.dashboards:who"]
    process = subprocess.Popen(
        [*command, "--address", f"127.0.0.1:{port}", *hook],
        env={**os.environ, "HEADGATE_DATABASE_URL": url, "HEADGATE_SCHEMA": SCHEMA},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # its log of requests
    )
    try:
        address = ("127.0.0.1", port)
        wait_until(lambda: _answers(address), timeout_s=30, interval_s=0.05)
        yield address, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1).close()
    except OSError:
        return False
    return True


@define
class _Tally:
    """What came back."""

    took_ms: list[float] = field(factory=list)
    refused: int = 0


class _Fleet:
    """The dashboards, all on one thread: they shall cost as little as they can."""

    def __init__(self, address: tuple[str, int], size: int) -> None:
        self._address = address
        self._size = size
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._tallies: dict[str, _Tally] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> _Fleet:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def busy(self, scene: str) -> Iterator[None]:
        """Let all dashboards poll for the length of the block."""
        lives = {"api": self._reading, "console": self._looking}
        self._tallies[scene] = _Tally()
        self._call(self._start(scene, lives[scene]))
        try:
            yield
        finally:
            self._call(self._stop())

    def figures(self, scene: str, seconds: int) -> dict[str, float]:
        """What the last block gave."""
        tally = self._tallies[scene]
        return {
            f"{scene}_requests_per_s": len(tally.took_ms) / seconds,
            f"{scene}_p50_ms": percentile(tally.took_ms, 0.5),
            f"{scene}_p95_ms": percentile(tally.took_ms, 0.95),
            f"{scene}_refused": float(tally.refused),
        }

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(
        self, scene: str, life: Callable[[_Tally, int], Coroutine[Any, Any, None]]
    ) -> None:
        tally = self._tallies[scene]
        self._tasks = [
            self._loop.create_task(life(tally, number)) for number in range(self._size)
        ]

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in found:
            if not isinstance(one, asyncio.CancelledError):
                raise RuntimeError("a dashboard ended early") from one

    async def _reading(self, tally: _Tally, number: int) -> None:
        """One read a second, each of another figure."""
        await asyncio.sleep(random.random())
        line = await asyncio.open_connection(*self._address)
        for path in cycle(READS[number % 4 :] + READS[: number % 4]):
            started = time.monotonic()
            await _get(tally, line, path, "dashboards")
            await asyncio.sleep(max(0.0, started + 1 - time.monotonic()))

    async def _looking(self, tally: _Tally, number: int) -> None:
        """An open page: a hint over a stream or by polling, then the page."""
        name, page = f"user{number}", PAGES[number % len(PAGES)]
        hints, stream = await asyncio.open_connection(*self._address)
        _ask(stream, f"{API}/events", name)
        listens = _status(await hints.readline()) == 200
        if not listens:
            stream.close()
            await asyncio.sleep(random.random() * TICK_S)
        line = await asyncio.open_connection(*self._address)
        for turn in count():
            if listens:
                await _next_event(hints)
            elif turn:
                await asyncio.sleep(TICK_S - DEBOUNCE_S)
            if not listens:
                await _get(tally, line, f"{API}/events/poll?since=1", name)
            await asyncio.sleep(DEBOUNCE_S)
            await _get(tally, line, page, name)


_Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _get(tally: _Tally, line: _Line, path: str, who: str) -> None:
    """Ask over a connection that stays open, as a browser does."""
    reader, writer = line
    started = time.perf_counter()
    _ask(writer, path, who)
    status, length = _status(await reader.readline()), 0
    while (header := await reader.readline()).strip():
        name, _, value = header.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    await reader.readexactly(length)
    if status == 200:
        tally.took_ms.append((time.perf_counter() - started) * 1000)
    else:
        tally.refused += 1


def _ask(writer: asyncio.StreamWriter, path: str, who: str) -> None:
    lines = (f"GET {path} HTTP/1.1", "Host: localhost", f"X-Dashboard: {who}", "", "")
    writer.write("\r\n".join(lines).encode())


def _status(line: bytes) -> int:
    return int(line.split()[1])


async def _next_event(stream: asyncio.StreamReader) -> None:
    """Wait for the next hint; heartbeats are none."""
    while not (line := await stream.readline()).startswith(b"data:"):
        if not line:
            raise RuntimeError("a stream ended early")
