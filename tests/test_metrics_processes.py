"""Metrics of several processes in one scrape: real workers, one of them killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from headgate_sync.metrics import StoreCollector, forget_dead_processes
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.builders import envelope
from tests.servers import new_database
from tests.test_metrics import at, samples
from tests.worker.rig import wait_for

ROOT = Path(__file__).parents[1]
JOBS = 20
# A job ends when both workers have begun one, so that neither does all of them.
APP = """
import os, threading
from pathlib import Path
from prometheus_client import CollectorRegistry
from headgate_sync import Headgate
from headgate_sync.metrics import PrometheusMetrics

hg = Headgate.from_env()
hg.configure_worker(telemetry=PrometheusMetrics(CollectorRegistry()))
began = Path("began")

@hg.task("k", queue="q")
def handler() -> None:
    (began / str(os.getpid())).touch()
    pause = threading.Event()
    for _ in range(2_000):
        if len(list(began.iterdir())) == 2:
            return
        pause.wait(0.01)
    raise AssertionError("the other worker never came")
"""


@contextmanager
def workers(folder: Path, url: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two worker processes over the application; killed at the end."""
    environment = {
        **os.environ,
        "HEADGATE_DATABASE_URL": url,
        "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"),
        "PYTHONPATH": f"{ROOT}:{folder}",
    }
    command = [sys.executable, "-m", "headgate_sync.worker", "shop:hg"]
    options = ["--queues", "q", "--threads", "1", "--log-level", "warning"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(2):
            started.append(  # noqa: PERF401 - one that started is ended in any case
                subprocess.Popen([*command, *options], cwd=folder, env=environment)
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_two_workers_are_one_scrape_and_a_killed_one_leaves_it(
    server_url: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    folder = tmp_path / "metrics"
    for name in ("metrics", "began"):
        (tmp_path / name).mkdir()
    scraped = CollectorRegistry()
    MultiProcessCollector(scraped, str(folder))  # type: ignore[no-untyped-call]
    with new_database(server_url) as url:
        migrate_up(url)
        store = PgStore.connect(url)
        StoreCollector(store, scraped)
        try:
            store.enqueue(
                [envelope(f"j{n}", kind="k", payload=b"{}") for n in range(JOBS)]
            )
            with workers(tmp_path, url) as (first, second):
                # The client's own reader fails on a file that was only just made.
                wait_for(
                    lambda: [f.stat().st_size > 0 for f in files(folder)] == [True] * 6,
                    "counters, gauges and histograms of both",
                )
                wait_for(
                    lambda: (
                        at(samples(scraped), "jobs_completed_total", kind="k") == JOBS
                    ),
                    "all jobs are counted",
                )
                check(tmp_path, scraped, {first.pid, second.pid})
                first.kill()
                first.wait()
                assert forget_dead_processes(folder) == [first.pid]
                assert gauges(scraped) == {str(second.pid)}
                second.send_signal(signal.SIGTERM)
                assert second.wait(30) == 0
                assert forget_dead_processes(folder) == [second.pid]
                assert forget_dead_processes(folder) == []
            found = samples(scraped)
        finally:
            store.close()
    assert gauges(scraped) == set()
    assert at(found, "jobs_completed_total", kind="k") == JOBS


def files(folder: Path) -> list[Path]:
    """What the processes share their metrics by."""
    return list(folder.glob("*.db"))


def gauges(registry: CollectorRegistry) -> set[str]:
    """Processes that show how much they can do."""
    return {
        dict(labels)["pid"]
        for name, labels in samples(registry)
        if name == "headgate_worker_capacity"
    }


def check(folder: Path, scraped: CollectorRegistry, pids: set[int]) -> None:
    both = {str(pid) for pid in pids}
    assert {path.name for path in (folder / "began").iterdir()} == both
    assert gauges(scraped) == both
    found = samples(scraped)
    assert at(found, "jobs_admitted_total", queue="q") == JOBS
    labels = {"queue": "q", "kind": "k", "outcome": "success"}
    assert at(found, "job_attempt_duration_seconds_count", **labels) == JOBS
    assert at(found, "job_attempt_duration_seconds_bucket", le="+Inf", **labels) == JOBS
    assert at(found, "store_up") == 1
