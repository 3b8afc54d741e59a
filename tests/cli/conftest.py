"""Every command is run over the database and over the HTTP API, on the same rows."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result
from werkzeug.serving import WSGIRequestHandler, make_server

from headgate_sync.cli.main import headgate
from headgate_sync.postgres.store import PgStore
from tests.backends import PostgresBackend

VARIABLES = (
    "HEADGATE_API",
    "HEADGATE_TOKEN",
    "HEADGATE_DATABASE_URL",
    "DATABASE_URL",
    "HEADGATE_SCHEMA",
    "HEADGATE_EMBEDDED",
)
Run = Callable[..., Result]


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Nothing: what a test asks for is no news."""


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an application that is served for the length of the block."""
    server = make_server("127.0.0.1", 0, app, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine names a database or an API."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pg(postgres: PostgresBackend) -> PgStore:
    """The store whose rows the commands see."""
    return postgres.make_store()


@pytest.fixture
def over_database(clean: None, pg: PgStore, database_url: str) -> Run:
    """Run a command on the database."""
    return lambda *words, **more: invoke(*words, "--database-url", database_url, **more)


@pytest.fixture
def over_http(clean: None, pg: PgStore) -> Iterator[Run]:
    """Run a command on an HTTP API over the same database."""
    api = pytest.importorskip("headgate_sync.api")
    with served(api.create_app(pg)) as url:
        yield lambda *words, **more: invoke(*words, "--api", url, **more)


@pytest.fixture(params=["over_database", "over_http"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a command, in either mode in turn; the exit code has to be 0 unless told."""
    found: Run = request.getfixturevalue(request.param)
    return found


def invoke(*words: str, code: int | None = 0, stdin: str | None = None) -> Result:
    """Run a command in this process; a code of None lets it end as it will."""
    done = CliRunner().invoke(headgate, words, input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert code is None or done.exit_code == code, done.output
    return done


def told(done: Result) -> Any:
    """The JSON that a command printed."""
    return json.loads(done.stdout)


@pytest.fixture
def environment(database_url):
    """The environment of a shell in which the database is named."""
    kept = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    return {**kept, "HEADGATE_DATABASE_URL": database_url, "TERM": "xterm"}
