"""The applications of the page, on worker processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headgate_sync.lifecycle import State
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.builders import envelope, job, state_of
from tests.postgres.watching import end_sessions
from tests.servers import django_database, new_database, sqlalchemy_url
from tests.test_docs import ROOT, blocks
from tests.worker.rig import wait_for

SETTINGS = """
DATABASES = {"default": {
    "CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True,
    "OPTIONS": {"application_name": "django"}, **%r,
}}
INSTALLED_APPS = ["django.contrib.sessions"]
USE_TZ = True
"""


@pytest.fixture
def url(server_url: str) -> Iterator[str]:
    """A database with the tables of the queue."""
    with new_database(server_url) as made:
        migrate_up(made)
        yield made


@pytest.fixture
def store(url: str) -> Iterator[Any]:
    opened = PgStore.connect(url)
    yield opened
    opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the modules of the page whose first line names a file."""
    for block in blocks(ROOT / "docs" / "around.md"):
        if named := re.match(r"# (\S+\.py)\n", block):
            path = tmp_path / named[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
    return tmp_path


@contextmanager
def worker(folder: Path, app: str, url: str, **environ: str) -> Iterator[None]:
    """A process with one thread, which has to end well."""
    environment = {
        **os.environ,
        "HEADGATE_DATABASE_URL": url,
        "PYTHONPATH": str(ROOT),
        **environ,
    }
    command = [sys.executable, "-m", "headgate_sync.worker", app]
    options = ["--threads", "1", "--log-level", "warning"]
    process = subprocess.Popen([*command, *options], cwd=folder, env=environment)
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def put(store: Any, id: str, kind: str, payload: bytes = b"{}", **fields: Any) -> None:
    fields = {"kind": kind, "payload": payload, "retention_ms": 60_000, **fields}
    store.enqueue([envelope(id, **fields)])


def completes(store: Any, id: str) -> None:
    """Wait until a job has run, for the first time."""
    waits = (State.AVAILABLE, State.RUNNING)
    wait_for(lambda: state_of(store, id) not in waits, "the job has run")
    assert state_of(store, id) is State.COMPLETED, job(store, id).errors


def test_a_worker_of_flask_gives_each_job_a_session_of_its_own(
    folder: Path, url: str, store: Any
) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE cart (id int, reminders int NOT NULL)")
        connection.execute("INSERT INTO cart VALUES (7, 0)")
        for id in ("a", "b"):
            put(store, id, "cart:remind", b'{"cart_id":7}', queue="mail")
        with worker(
            folder, "shop:jobs", url, FLASK_SQLALCHEMY_DATABASE_URI=sqlalchemy_url(url)
        ):
            for id in ("a", "b"):
                completes(store, id)
        assert connection.execute("SELECT reminders FROM cart").fetchall() == [(2,)]


def test_a_worker_of_django_replaces_a_connection_that_the_server_has_ended(
    folder: Path, url: str, store: Any
) -> None:
    (folder / "mysite" / "settings.py").write_text(SETTINGS % django_database(url))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE django_session (session_key varchar(40) PRIMARY KEY, "
            "session_data text NOT NULL, expire_date timestamptz NOT NULL)"
        )
        with worker(folder, "mysite.worker:jobs", url):
            for id in ("a", "b", "c"):  # one more than the handler threads of one slot
                connection.execute(
                    "INSERT INTO django_session VALUES (%s, '', '2020-01-01')", [id]
                )
                put(store, id, "sessions:clear", queue="default")
                completes(store, id)
                kept = connection.execute(
                    "SELECT pid FROM pg_stat_activity "
                    "WHERE application_name = 'django' AND datname = current_database()"
                ).fetchall()
                [(pid,)] = kept  # the thread has kept one
                end_sessions(connection, pid)
        assert store.results.read_result("c").data == b"1"
