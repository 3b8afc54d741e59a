"""A real gunicorn that forks its workers after the application was used once."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytest.importorskip("gunicorn")
pytest.importorskip("flask_sqlalchemy")

WORKERS = 4
ORDERS = 1_000
CLIENTS = 8

CONFIG = """
import json, os
import psycopg

preload_app = True
workers = {workers}
threads = 2
bind = "unix:{socket}"


def sessions():
    with psycopg.connect({url!r}) as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'shop-parent'"
        )
        return [row[0] for row in found]


def send(order_id):
    from headgate_sync.demo import shop

    return shop.send_receipt.enqueue(order_id=order_id, tenant="parent").id


def when_ready(server):
    server.report = {{"jobs": [send(-1)]}}
    os.environ["PGAPPNAME"] = "observer"
    server.report["before"] = sessions()
    os.environ["PGAPPNAME"] = "shop-child"


def on_exit(server):
    server.report["jobs"].append(send(-2))
    os.environ["PGAPPNAME"] = "observer"
    server.report["after"] = sessions()
    with open({report!r}, "w") as file:
        json.dump(server.report, file)
"""


@contextlib.contextmanager
def gunicorn(folder: Path, url: str) -> Iterator[str]:
    """Run the shop under gunicorn; yields the path of its socket."""
    path = str(folder / "shop.sock")
    config = folder / "gunicorn.conf.py"
    config.write_text(
        CONFIG.format(
            workers=WORKERS, socket=path, url=url, report=str(folder / "report.json")
        )
    )
    process = subprocess.Popen(
        [
            sys.executable,
            *("-m", "gunicorn", "--config", str(config)),
            "headgate_sync.demo.shop:create_app()",
        ],
        env={**os.environ, "HEADGATE_DATABASE_URL": url, "PGAPPNAME": "shop-parent"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    log = []
    try:
        booted = 0
        while booted < WORKERS:
            line = process.stderr.readline()
            log.append(line)
            assert line, "".join(log)
            booted += "Booting worker" in line
        yield path
    finally:
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0, "".join(log) + rest
        assert "Traceback" not in rest, rest


def order(path: str, tenant: str) -> tuple[int, Any]:
    """Post one order."""
    connection = http.client.HTTPConnection("localhost", timeout=60)
    with contextlib.closing(connection):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        body = json.dumps({"tenant": tenant, "item": "tea"})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/orders", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def broken_sessions(url: str) -> int:
    """Sessions of the database that ended without saying so, or were ended."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT sessions_abandoned + sessions_fatal + sessions_killed "
            "FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_preloaded_application_shares_no_connection_with_its_workers(
    postgres, database_url, tmp_path
):
    before = broken_sessions(database_url)
    with gunicorn(tmp_path, database_url) as path, ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda n: order(path, f"t{n % 7}"), range(ORDERS)))
    assert {status for status, _ in answers} == {201}
    report = json.loads((tmp_path / "report.json").read_text())

    stored = set(postgres.snapshot().jobs)
    assert stored == {answer["job"] for _, answer in answers} | set(report["jobs"])
    assert len(stored) == ORDERS + 2
    # The parent's second job went over the session of its first.
    assert report["before"]
    assert set(report["before"]) <= set(report["after"])
    assert broken_sessions(database_url) == before
