"""Real worker processes, and what they did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psycopg

from headgate_sync.app import Headgate
from headgate_sync.client import Client
from headgate_sync.envelope import Envelope
from headgate_sync.inspection import JobSummary

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
QUEUE = "crash"
TABLES = """
CREATE TABLE IF NOT EXISTS public.run (job text, fence bigint, pid int);
CREATE TABLE IF NOT EXISTS public.effect (job text, fence bigint);
CREATE TABLE IF NOT EXISTS public.reached (point text, pid int);
CREATE TABLE IF NOT EXISTS public.part (name text, fence bigint);
CREATE TABLE IF NOT EXISTS public.held (
  job text, pid int, since timestamptz, until timestamptz);
TRUNCATE public.run, public.effect, public.reached, public.part, public.held;
"""


class Process:
    """One worker process."""

    def __init__(self, url: str, log: Path, *arguments: str, **environ: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "headgate_sync.worker", "tests.crash.app:hg"]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    "HEADGATE_DATABASE_URL": url,
                    "PYTHONPATH": str(ROOT),
                    **environ,
                },
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def kill(self) -> None:
        """End it without any chance to do something about it."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        return self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        """End it politely; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None


class Fleet:
    """Worker processes over one database, with the tables of their application."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.processes: list[Process] = []
        self.facade = Headgate(url)
        self._pause = threading.Event()  # never set: processes have no event to wait on
        self.query(TABLES)

    def start(self, *arguments: str, **environ: str) -> Process:
        """Start one more worker with a short lease, on two threads unless said."""
        log = self.folder / f"worker-{len(self.processes)}.log"
        defaults = {"--lease": "2s", "--threads": "2", "--shutdown-timeout": "10s"}
        for name, value in defaults.items():
            if name not in arguments:
                arguments = (*arguments, name, value)
        process = Process(self.url, log, *arguments, **environ)
        self.processes.append(process)
        return process

    def start_ready(self, *arguments: str, **environ: str) -> Process:
        """Start one more worker, and wait until it takes jobs."""
        process = self.start(*arguments, **environ)
        self.enqueue("plain", f"ready-{process.pid}")
        self.wait_for(
            lambda: process.pid in self.pids(f"ready-{process.pid}"), "it takes jobs"
        )
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        for process in self.processes:
            if not process.ended:
                process.signal(signal.SIGCONT)
                process.kill()
        self.facade.close()

    # The database

    def query(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(text, values or None)
            return cursor.fetchall() if cursor.description else []

    def enqueue(
        self, kind: str, *ids: str, payload: bytes = b"{}", **fields: Any
    ) -> None:
        client = Client(self.facade.store)
        client.enqueue_many(
            [
                Envelope(
                    id=id,
                    kind=kind,
                    payload=payload,
                    **{"queue": QUEUE, "retention_ms": 3_600_000, **fields},
                )
                for id in ids
            ]
        )

    def job(self, id: str) -> JobSummary:
        found = self.facade.get(id)
        assert found is not None, f"no job {id}"
        return found

    def state(self, id: str) -> str:
        return self.job(id).state

    def runs(self, id: str) -> list[int]:
        """The fences of a job's runs, in order."""
        rows = self.query("SELECT fence FROM public.run WHERE job = %s ORDER BY 1", id)
        return [fence for (fence,) in rows]

    def pids(self, id: str) -> list[int]:
        """Who ran a job, in order."""
        rows = self.query(
            "SELECT pid FROM public.run WHERE job = %s ORDER BY fence", id
        )
        return [pid for (pid,) in rows]

    def effects(self) -> Counter[str]:
        """How many rows each job wrote."""
        return Counter(job for (job,) in self.query("SELECT job FROM public.effect"))

    def reached(self, point: str) -> bool:
        found = self.query("SELECT 1 FROM public.reached WHERE point = %s", point)
        return bool(found)

    def reach(self, point: str) -> None:
        """Let go on who awaits a point."""
        self.query("INSERT INTO public.reached VALUES (%s, 0)", point)

    # Waiting

    def wait_for(
        self, condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S
    ) -> float:
        """Wait until something holds; returns the seconds it took."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > patience_s:
                raise AssertionError(f"never: {what}\n{self.logs()}")
            self._pause.wait(0.02)
        return time.monotonic() - began_s

    def let_pass(self, seconds: float) -> None:
        """Give the processes time in which something could happen that must not."""
        self._pause.wait(seconds)

    def reconnect(self) -> None:
        """Use fresh connections, after the server was away."""
        self.facade.close()
        self.facade = Headgate(self.url)

    def wait_state(self, id: str, state: str) -> float:
        return self.wait_for(lambda: self.state(id) == state, f"{id} is {state}")

    def wait_point(self, point: str) -> None:
        self.wait_for(lambda: self.reached(point), f"{point} is reached")

    def logs(self) -> str:
        """The end of each log, for a failing test."""
        return "\n".join(
            f"--- {process.log.name}\n" + "\n".join(process.said.splitlines()[-25:])
            for process in self.processes
        )


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """Seconds since the block was entered."""
    began_s = time.monotonic()
    yield lambda: time.monotonic() - began_s
