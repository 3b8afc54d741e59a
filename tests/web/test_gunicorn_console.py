"""API and console under a real gunicorn: several processes, forked early or late."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.builders import enqueue
from tests.web.test_gunicorn import broken_sessions

pytest.importorskip("gunicorn")

DOCS = Path(__file__).parents[2] / "docs"
WORKERS = 2

# Two mounts of one `Headgate`. Each answer says which process gave it.
APPLICATION = """
import os

from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.wrappers import Response

from headgate_sync import Headgate
from headgate_sync.api import ApiConfig, LiveUpdates
from headgate_sync.api import create_app as create_api
from headgate_sync.console import ConsoleConfig, create_app

settings = ApiConfig(rate_limit=None, live=LiveUpdates(tick_ms=300, max_streams=2))
hg = Headgate.from_env()
console = create_app(hg, ConsoleConfig(api=settings))
mounts = {"/ops": console, "/only": create_api(hg, settings)}
mounted = DispatcherMiddleware(Response("mine", 404), mounts)


def app(environ, start_response):
    def told(status, headers, *rest):
        return start_response(status, [*headers, ("X-Pid", str(os.getpid()))], *rest)

    return mounted(environ, told)
"""
# Besides what the documentation says: the parent has used everything before it forks.
CONFIG = """
bind = "unix:{socket}"
preload_app = {preload}


def when_ready(server):
    if preload_app:
        from werkzeug.test import Client

        from shop import app

        for path in ("/ops/", "/only/api/v1/queues", "/only/api/v1/events/poll"):
            assert Client(app).get(path).status_code == 200, path
"""


def documented() -> str:
    """The configuration that the page about deploying gives."""
    page = (DOCS / "deploy.md").read_text()
    [found] = re.findall(r"```python\n(# gunicorn\.conf\.py\n.*?)```", page, re.DOTALL)
    return str(found)


class Server:
    """A running gunicorn."""

    def __init__(self, path: str, process: subprocess.Popen[str]) -> None:
        self.path = path
        self.process = process

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(30)
        connection.sock.connect(self.path)
        return connection

    def ask(
        self, path: str, method: str = "GET", body: Any = None, **headers: str
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """One request over a connection of its own."""
        with contextlib.closing(self.connect()) as connection:
            sent = {name.replace("_", "-"): text for name, text in headers.items()}
            text = None if body is None else json.dumps(body)
            if text is not None:
                sent["Content-Type"] = "application/json"
            connection.request(method, path, text, sent)
            answer = connection.getresponse()
            data = answer.read()
            if answer.headers.get_content_type() == "application/json":
                return answer.status, json.loads(data), answer.headers
            return answer.status, data.decode(), answer.headers

    def by_each(self, ask: Callable[[], Any], within_s: float = 30) -> dict[str, Any]:
        """What each process answers; asks until all have."""
        found: dict[str, Any] = {}
        until_s = time.monotonic() + within_s
        while len(found) < WORKERS:
            assert time.monotonic() < until_s, "not every process answers"
            # At once: one process would take them all one after another.
            with ThreadPoolExecutor(8) as pool:
                for told in pool.map(lambda _: ask(), range(8)):
                    found.setdefault(told[2]["X-Pid"], told)
        return found


@pytest.fixture(params=[True, False], ids=["preloaded", "loaded by each"])
def server(request, postgres, database_url, tmp_path) -> Iterator[Server]:
    """The application under gunicorn, as the documentation says; stopped in the end."""
    path = str(tmp_path / "s.sock")
    (tmp_path / "shop.py").write_text(APPLICATION)
    settings = CONFIG.format(socket=path, preload=request.param)
    conf = tmp_path / "gunicorn.conf.py"
    conf.write_text(f"{documented()}\n{settings}\nworkers = {WORKERS}\nthreads = 12\n")
    before = broken_sessions(database_url)
    process = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", "--config", str(conf), "shop:app"],
        cwd=tmp_path,
        env={
            **os.environ,
            "HEADGATE_DATABASE_URL": database_url,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    log, booted = [], 0
    try:
        while booted < WORKERS:
            line = process.stderr.readline()
            log.append(line)
            assert line, "".join(log)
            booted += "Booting worker" in line
        yield Server(path, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(log) + rest
    assert "Traceback" not in rest, rest
    assert broken_sessions(database_url) == before


def test_api_and_console_work_in_every_process_and_end_in_order(server, postgres):
    store = postgres.open_store()
    enqueue(store, "a", queue="mail")
    looks(server)
    changes(server)
    assert len(postgres.snapshot().jobs) == 2
    streams(server)


def looks(server: Server) -> None:
    """Pages and lists of both mounts, each by each process."""
    pages = server.by_each(lambda: server.ask("/ops/job?id=a"))
    assert {page[0] for page in pages.values()} == {200}
    assert all("mail" in page[1] for page in pages.values())
    for mount in ("/ops", "/only"):
        lists = server.by_each(lambda m=mount: server.ask(f"{m}/api/v1/queues"))
        assert {told[1][0]["unfinished_jobs"] for told in lists.values()} == {1}
    assert server.ask("/ops/")[0] == 200
    assert server.ask("/")[:2] == (404, "mine")


def changes(server: Server) -> None:
    """One key is one change in all processes, and all see it."""
    job = {"kind": "k", "payload": "e30=", "queue": "mail"}

    def send() -> Any:
        return server.ask("/only/api/v1/jobs", "POST", job, Idempotency_Key="same")

    with ThreadPoolExecutor(16) as pool:
        told = [one for one in pool.map(lambda _: send(), range(16)) if one[0] != 409]
    settled = list(server.by_each(send).values())
    assert {one[0] for one in [*told, *settled]} == {201}
    assert len({one[1]["id"] for one in [*told, *settled]}) == 1
    assert {one[2]["Idempotency-Replayed"] for one in settled} == {"true"}

    done = server.ask("/ops/api/v1/queues/mail/pause", "POST", Idempotency_Key="p")
    assert done[0] == 204
    fresh = {"Cache_Control": "no-cache"}
    seen = server.by_each(lambda: server.ask("/ops/api/v1/queues", **fresh))
    assert all(told[1][0]["paused"] for told in seen.values())


def streams(server: Server) -> None:
    """They leave threads to others, and end with the server and not long after it."""
    with contextlib.ExitStack() as ending:

        def listen() -> http.client.HTTPResponse:
            connection = ending.enter_context(contextlib.closing(server.connect()))
            connection.request("GET", "/ops/api/v1/events")
            return connection.getresponse()

        opened: list[http.client.HTTPResponse] = []
        while len({stream.headers["X-Pid"] for stream in opened}) < WORKERS:
            with ThreadPoolExecutor(8) as pool:
                for answer in pool.map(lambda _: listen(), range(8)):
                    if answer.status == 200:
                        opened.append(answer)
                    else:
                        refused = (answer.status, answer.headers["Retry-After"])
                        assert refused == (503, "15")
        for stream in opened:
            assert stream.headers.get_content_type() == "text/event-stream"
            assert stream.readline() == b"retry: 2000\n"
            lines = iter(stream.readline, b"event: queue_activity\n")
            assert all(line in (b"\n", b": hb\n") for line in lines)
            assert stream.readline() == b'data: {"queues":["*"]}\n'
        pages = server.by_each(lambda: server.ask("/ops/queues"))
        assert {page[0] for page in pages.values()} == {200}

        server.process.send_signal(signal.SIGTERM)
        for stream in opened:
            stream.read()  # to its orderly end
        # Well before gunicorn would lose its patience.
        server.process.wait(15)
