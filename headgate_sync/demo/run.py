"""The main job: index Python files with workers of which one is killed.

Enqueues one job per file inside application transactions, runs two worker processes,
kills one with SIGKILL in the middle, starts a replacement, and compares what the jobs
wrote with a direct computation of the same files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from attrs import astuple, define, field, frozen
from psycopg import sql

from headgate_sync.demo.facts import python_files, read_facts
from headgate_sync.demo.progress import progress_bar
from headgate_sync.errors import ConfigurationError
from headgate_sync.ids import UlidGenerator
from headgate_sync.postgres.database import translate
from headgate_sync.postgres.migrate import migrate_up

if TYPE_CHECKING:
    from headgate_sync.app import Headgate
    from headgate_sync.inspection import JobSummary

_CHUNK = 250  # files per application transaction
_LEASE = "3s"
_THREADS = 4
_STALLED_S = 120
_SETTLED_S = 0.5  # much less than a lease


@frozen(kw_only=True)
class Report:
    """What came of the run.

    Attributes:
        runs: claims over all jobs; above `jobs` where attempts had to be repeated.
        crashes: leases that were lost and taken back.
        held_at_kill: jobs that the killed worker was running when it died.
    """

    files: int
    jobs: int
    runs: int
    crashes: int
    held_at_kill: int
    duplicates: int
    lost: int
    differing: int
    seconds: float
    exit_codes: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is lost, doubled or wrong and every crash was recovered."""
        exact = self.duplicates == self.lost == self.differing == 0
        recovered = self.crashes >= self.held_at_kill
        return (
            exact and recovered and self.jobs == self.files and not any(self.exit_codes)
        )

    def lines(self) -> list[str]:
        """The report as text, one fact a line."""
        verdict = "every row agrees with a direct computation" if self.ok else "FAILED"
        return [
            f"files              {self.files}",
            f"jobs               {self.jobs}",
            f"runs               {self.runs}",
            f"crashes recovered  {self.crashes}",
            f"duplicates         {self.duplicates}",
            f"lost               {self.lost}",
            f"differing rows     {self.differing}",
            f"jobs/s             {self.jobs / self.seconds:.0f}",
            verdict,
        ]


@define
class _Fleet:
    """The worker processes of one run, with one log file for all."""

    log: Path
    workers: dict[str, subprocess.Popen[bytes]] = field(factory=dict)
    started: int = 0

    def start_worker(self) -> str:
        """Start one more worker process; returns its worker id."""
        self.started += 1
        worker_id = f"demo-{os.getpid()}-{self.started}"
        command = [sys.executable, "-W", "ignore", "-m", "headgate_sync.worker"]
        command += ["headgate_sync.demo.indexer:hg", "--queues", "demo"]
        command += ["--threads", str(_THREADS), "--lease", _LEASE]
        command += ["--worker-id", worker_id]
        with self.log.open("ab") as log:
            self.workers[worker_id] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return worker_id

    def kill_running(self, held_by: Callable[[str], int]) -> tuple[str, int] | None:
        """SIGKILL a worker that is running jobs: no handler runs, its leases run out.

        Each is stopped while its jobs are counted, so that it cannot finish them first.

        Returns:
            The killed worker and how many jobs it left running; None if all were idle.
        """
        for worker_id, worker in self.workers.items():
            worker.send_signal(signal.SIGSTOP)
            if held_by(worker_id):
                worker.kill()
                worker.wait()
                del self.workers[worker_id]
                # What it had sent is carried out by the server all the same.
                time.sleep(_SETTLED_S)
                return worker_id, held_by(worker_id)
            worker.send_signal(signal.SIGCONT)
        return None

    def stop(self) -> tuple[int, ...]:
        """End the remaining workers politely and return their exit codes."""
        for worker in self.workers.values():
            worker.send_signal(signal.SIGTERM)
        codes = (worker.wait(timeout=60) for worker in self.workers.values())
        # One that was only just starting has no handler for the signal yet.
        return tuple(0 if code == -signal.SIGTERM else code for code in codes)

    def abandon(self) -> None:
        """Let no process outlive the demo."""
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.kill()
                worker.wait()

    def check_alive(self) -> None:
        """Raise if a worker ended on its own."""
        for worker_id, worker in self.workers.items():
            if worker.poll() is not None:
                tail = self.log.read_text(errors="replace").splitlines()[-5:]
                raise ConfigurationError(
                    f"{worker_id} ended with exit code {worker.returncode}:\n"
                    + "\n".join(tail)
                )


@contextmanager
def _application_tables(
    connection: psycopg.Connection[Any], run: str
) -> Iterator[None]:
    """The application's own tables, apart from the queue's; both gone afterwards."""
    application, files, index = _names(run)
    connection.execute(sql.SQL("CREATE SCHEMA {}").format(application))
    connection.execute(sql.SQL("CREATE TABLE {} (path text PRIMARY KEY)").format(files))
    connection.execute(
        sql.SQL(
            "CREATE TABLE {} (path text, sha256 text, size_bytes bigint, lines bigint,"
            " parsed boolean, functions bigint, classes bigint, imports bigint)"
        ).format(index)
    )
    try:
        yield
    finally:
        drop = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE")
        for schema in (application, sql.Identifier(run)):
            connection.execute(drop.format(schema))


def _names(run: str) -> tuple[sql.Identifier, sql.Identifier, sql.Identifier]:
    application = f"{run}_app"
    return (
        sql.Identifier(application),
        sql.Identifier(application, "file"),
        sql.Identifier(application, "file_index"),
    )


def _enqueue(hg: Headgate, url: str, run: str, files: Sequence[Path]) -> list[str]:
    """Register files and enqueue their jobs, each chunk in one transaction."""
    from headgate_sync.demo.indexer import index_file

    insert = sql.SQL("INSERT INTO {} (path) VALUES (%s)").format(_names(run)[1])
    ids: list[str] = []
    with psycopg.connect(url) as connection, progress_bar("enqueue", len(files)) as bar:
        for start in range(0, len(files), _CHUNK):
            paths = [str(path) for path in files[start : start + _CHUNK]]
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany(insert, [(path,) for path in paths])
                jobs = [index_file.job(path=path) for path in paths]
                ids += [handle.id for handle in hg.enqueue_many(jobs, tx=connection)]
            bar.update(len(ids))
    return ids


def _summaries(hg: Headgate, ids: Sequence[str]) -> Iterator[JobSummary]:
    for start in range(0, len(ids), 1000):
        yield from hg.inspect.get_jobs(ids[start : start + 1000])


def _held_by(hg: Headgate, ids: Sequence[str], worker_id: str) -> int:
    return sum(job.claimed_by == worker_id for job in _summaries(hg, ids))


def _drain(fleet: _Fleet, hg: Headgate, ids: Sequence[str]) -> int:
    """Run the workers to the end and kill one on the way, from a third on.

    Returns:
        How many jobs the killed worker was running.
    """
    fleet.start_worker()
    fleet.start_worker()
    killed: tuple[str, int] | None = None
    done = 0
    moved_at = time.monotonic()
    with progress_bar("index", len(ids)) as bar:
        while done < len(ids):
            fleet.check_alive()
            counts = hg.inspect.counts("demo").counts
            if counts.get("completed", 0) > done:
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > _STALLED_S:
                raise ConfigurationError(
                    f"no job finished for {_STALLED_S} s: {dict(counts)}"
                )
            done = counts.get("completed", 0)
            bar.update(done)
            if not killed and len(ids) // 3 <= done < len(ids):
                killed = fleet.kill_running(partial(_held_by, hg, ids))
                if killed is not None:
                    victim, held = killed
                    bar.note(
                        f"{victim} killed with SIGKILL, jobs it was running: {held}"
                    )
                    fleet.start_worker()
            time.sleep(0.05)
    return killed[1] if killed else 0


def _compare(
    connection: psycopg.Connection[Any], run: str, files: Sequence[Path]
) -> tuple[int, int, int]:
    """Compare the table with a direct computation: duplicates, lost, differing."""
    select = sql.SQL(
        "SELECT path, sha256, size_bytes, lines, parsed, functions, classes, imports"
        " FROM {}"
    ).format(_names(run)[2])
    rows = connection.execute(select).fetchall()
    stored = {path: facts for path, *facts in rows}
    differing = 0
    with progress_bar("compare", len(files)) as bar:
        for number, path in enumerate(files, 1):
            found = stored.get(str(path))
            differing += found is not None and found != list(astuple(read_facts(path)))
            bar.update(number)
    lost = sum(str(path) not in stored for path in files)
    return len(rows) - len(stored), lost, differing


def _report(
    connection: psycopg.Connection[Any], url: str, run: str, files: Sequence[Path]
) -> Report:
    from headgate_sync.demo.indexer import hg

    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "workers.log"
        stack.callback(hg.close)
        fleet = _Fleet(log)
        stack.callback(fleet.abandon)
        ids = _enqueue(hg, url, run, files)
        started = time.monotonic()
        held = _drain(fleet, hg, ids)
        seconds = time.monotonic() - started
        exit_codes = fleet.stop()
        jobs = list(_summaries(hg, ids))
        duplicates, lost, differing = _compare(connection, run, files)
        return Report(
            files=len(files),
            jobs=len(jobs),
            runs=sum(job.fence for job in jobs),
            crashes=sum(job.crash_attempt for job in jobs),
            held_at_kill=held,
            duplicates=duplicates,
            lost=lost,
            differing=differing,
            seconds=seconds,
            exit_codes=exit_codes,
        )


def run_demo(url: str, folder: Path | None = None) -> Report:
    """Run the whole story in fresh schemas of the database and clean up after it.

    Args:
        url: a database in which schemas may be created.
        folder: whose `.py` files to index; None is Python's standard library.

    Raises:
        ConfigurationError: no files, or the workers cannot do their work.
        StoreUnavailable: the database does not answer.
    """
    root = (folder or Path(sysconfig.get_path("stdlib"))).resolve()
    files = python_files(root)
    if not files:
        raise ConfigurationError(f"no .py files below {root}")
    run = f"headgate_demo_{UlidGenerator()().lower()}"
    os.environ["HEADGATE_DATABASE_URL"] = url
    os.environ["HEADGATE_SCHEMA"] = os.environ["HEADGATE_DEMO_RUN"] = run
    try:
        opened = psycopg.connect(url, autocommit=True, connect_timeout=10)
    except psycopg.Error as error:
        raise translate(error) from error
    with opened as connection, _application_tables(connection, run):
        migrate_up(url, schema=run)
        print(f"indexing {len(files)} files below {root}", file=sys.stderr)
        return _report(connection, url, run, files)
