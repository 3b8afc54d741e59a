"""Fixtures: a server for the run, a database per process of it, and the two stores.

Under xdist all processes share the server, and each has a database of its own. A test
starts from an empty schema whose clock stands at 1,000,000.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import hypothesis
import psycopg
import pytest
from psycopg_pool import ConnectionPool

from headgate_sync.errors import ConfigurationError
from headgate_sync.lifecycle import TRANSITIONS
from headgate_sync.store import CAPABILITIES, Store
from tests import testschema
from tests.backends import SCHEMA, Backend, Clock, MemoryBackend, PostgresBackend
from tests.servers import new_database, session_server

hypothesis.settings.register_profile(
    "dev", max_examples=30, stateful_step_count=40, deadline=None
)
hypothesis.settings.register_profile(
    "ci", max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
hypothesis.settings.register_profile(
    "long",
    max_examples=500,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or (
    "ci" if os.environ.get("CI") else "dev"
)
hypothesis.settings.load_profile(PROFILE)
TABLE = [f"{row.source} {row.event} {row.target}" for row in TRANSITIONS]


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist hand out files in their order, not those with the most tests first.

    The state machines, the longest of all and three in number, would come last.
    """
    if config.getoption("dist", None) == "loadfile":
        config.option.loadscopereorder = False


# The database


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A server that may create databases; without one CI fails and others skip."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(session_server())
        except ConfigurationError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no PostgreSQL server: {error}")
        yield url


@pytest.fixture(scope="session")
def database_url(server_url: str) -> Iterator[str]:
    """The conninfo of a database whose schema `headgate` is migrated and audited."""
    with new_database(server_url) as url:
        testschema.install(url, SCHEMA)
        yield url


@pytest.fixture(scope="session")
def pool(database_url: str) -> Iterator[ConnectionPool[Any]]:
    """A pool over the test database; 64 threads may wait for it."""
    with ConnectionPool(
        database_url, min_size=2, max_size=12, timeout=60, max_waiting=0, open=True
    ) as opened:
        yield opened


@pytest.fixture(scope="session")
def admin(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """An autocommit connection to the test database, for what no store call does."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


# The stores


@pytest.fixture
def memory() -> Iterator[MemoryBackend]:
    """The in-memory kind, empty."""
    backend = MemoryBackend()
    yield backend
    backend.audit()


@pytest.fixture
def postgres(
    pool: ConnectionPool[Any], admin: psycopg.Connection[Any]
) -> Iterator[PostgresBackend]:
    """The PostgreSQL kind, empty; its rows are audited after the test."""
    backend = PostgresBackend(pool, admin)
    backend.reset()
    yield backend
    backend.close()
    backend.audit()


@pytest.fixture(params=["memory", "postgres"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each kind of store in turn."""
    found: Backend = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def make_store(backend: Backend) -> Callable[..., Store]:
    """Make a store with options of its own; the backend is emptied first."""
    return backend.make_store


@pytest.fixture
def store(backend: Backend) -> Store:
    """An empty store with default options and without jitter."""
    return backend.make_store()


@pytest.fixture
def clock(backend: Backend) -> Clock:
    """The clock of `store`, standing at 1,000,000."""
    return backend.clock


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on one store and has a twin on the other."""
    marks = {"memory": pytest.mark.memstore, "postgres": pytest.mark.pgstore}
    for item in items:
        call = getattr(item, "callspec", None)
        backend = None if call is None else call.params.get("backend")
        if backend in marks:
            item.add_marker(marks[backend])


# Capabilities


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """On a store without a capability that the test needs, check that it says so."""
    marker = pyfuncitem.get_closest_marker("needs")
    if marker is None:
        return None
    fixtures: dict[str, Any] = pyfuncitem.funcargs
    backend, store = fixtures["backend"], fixtures["store"]
    unknown = set(marker.args) - set(CAPABILITIES)
    assert not unknown, f"not a capability: {unknown}"
    missing = [name for name in marker.args if getattr(store, name) is None]
    assert set(missing) == set(marker.args) & backend.lacks
    return True if missing else None


# Coverage of the table of transitions


def transitions_taken(terminalreporter: Any) -> Counter[str]:
    """How often the state machines of this run took each row of the table."""
    taken: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                taken.update(dict(report.user_properties).get("transitions", {}))
    return taken


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a long run of the state machines that left out a row of the table."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if PROFILE != "long" or exitstatus != 0 or reporter is None:
        return
    taken = transitions_taken(reporter)
    if taken and any(row not in taken for row in TABLE):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how often each row of the table was taken by the state machines."""
    taken = transitions_taken(terminalreporter)
    if not taken:
        return
    terminalreporter.section("state machines")
    terminalreporter.line(
        f"{taken.total()} transitions over {sum(row in taken for row in TABLE)}"
        f" of {len(TABLE)} rows of the table"
    )
    if PROFILE == "long":
        for row in TABLE:
            note = "" if row in taken else "  never taken: the run fails"
            terminalreporter.line(f"{taken[row]:8} {row}{note}")
