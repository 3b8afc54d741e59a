"""Waiting for wake-ups: who is woken, what is kept, and how it ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from headgate_sync.errors import ConfigurationError, InvalidRequest, StoreUnavailable
from headgate_sync.postgres.listener import Listener, channel_of
from headgate_sync.postgres.store import PgStore
from tests.builders import enqueue
from tests.concurrency.threads import outcome_of
from tests.postgres.proxy import proxy_to
from tests.postgres.watching import until

LONG_MS = 20_000
SOON_S = 20


@pytest.fixture
def listener(database_url, postgres) -> Iterator[Listener]:
    """A listener that has told its first waiter to ask now."""
    made = Listener(database_url)
    assert made.wait_wakeup(["q"], LONG_MS) == ""
    yield made
    made.close()


def notify(admin, *queues, channel="headgate_wakeup"):
    for queue in queues:
        admin.execute("SELECT pg_notify(%s, %s)", [channel, queue])


def listener_sessions(admin):
    """The states of the sessions that listen."""
    return admin.execute(
        "SELECT pid, state FROM pg_stat_activity"
        " WHERE query ~ 'pg_backend_pid|pg_listening_channels'"
        " AND pid <> pg_backend_pid() AND datname = current_database()"
    ).fetchall()


def test_an_enqueue_wakes_who_waits_for_its_queue(listener, postgres):
    store = postgres.open_store()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(listener.wait_wakeup, ["nq"], LONG_MS)
        n = 0
        while not waiting.done():
            n += 1
            enqueue(store, f"n{n}", queue="nq")
        assert waiting.result() == "nq"


def test_a_store_with_an_address_to_listen_to_notifies(pool, database_url, postgres):
    store = PgStore(pool, listen=database_url)
    assert store.notifying.wait_wakeup(["q"], LONG_MS) == ""
    enqueue(store, "a")
    assert store.notifying.wait_wakeup(["q"], LONG_MS) == "q"
    store.close()


def test_nothing_heard_is_none_at_the_time_out(listener):
    before = time.monotonic()
    assert listener.wait_wakeup(["q"], 50) is None
    assert time.monotonic() - before >= 0.05
    assert listener.wait_wakeup(["q"], 0) is None


def test_only_the_named_queues_wake(listener, admin):
    listener.wait_wakeup(["q", "p"], 0)
    notify(admin, "other", "q")
    assert listener.wait_wakeup(["q", "p"], LONG_MS) == "q"
    notify(admin, "other", "p")
    assert listener.wait_wakeup(["q", "p"], LONG_MS) == "p"
    assert listener.wait_wakeup(["q", "p"], 20) is None


def test_no_name_waits_for_any_queue(listener, admin):
    listener.wait_wakeup([], 0)
    notify(admin, "whatever")
    assert listener.wait_wakeup([], LONG_MS) == "whatever"


def test_signals_between_two_calls_are_kept_once_per_queue(listener, admin):
    listener.wait_wakeup(["a", "b"], 0)
    notify(admin, "a", "b", "a", "other", "b")
    heard = [listener.wait_wakeup(["a", "b"], LONG_MS) for _ in range(2)]
    assert sorted(heard) == ["a", "b"]


def test_too_many_signals_are_one_request_to_ask(listener, admin):
    listener.wait_wakeup([], 0)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(listener.wait_wakeup, ["last"], 0).result(SOON_S)
        notify(admin, *[f"q{n}" for n in range(65)], "last")
        # Signals come in order, so the others have been put by now.
        assert (
            threads.submit(listener.wait_wakeup, ["last"], LONG_MS).result() == "last"
        )
    assert listener.wait_wakeup([], LONG_MS) == ""
    assert listener.wait_wakeup([], 50) is None


def test_every_waiting_thread_is_woken(listener, admin):
    gate = threading.Barrier(5)

    def wait():
        listener.wait_wakeup(["q"], 0)
        gate.wait(SOON_S)
        return listener.wait_wakeup(["q"], LONG_MS)

    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(wait) for _ in range(4)]
        gate.wait(SOON_S)
        notify(admin, "q")
        assert [future.result(SOON_S) for future in waiting] == ["q"] * 4
    assert listener.wait_wakeup(["q"], LONG_MS) == "q"


def test_a_thread_that_ended_leaves_nothing_behind(listener):
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            threads.submit(listener.wait_wakeup, ["q"], 1).result(SOON_S)
    gc.collect()
    waiters = [o for o in gc.get_objects() if type(o).__name__ == "_Waiter"]
    assert len(waiters) == 1


def test_hostile_names_are_only_names(listener, admin):
    for name in ("'; DROP TABLE x; --", "ü" * 127, "\n", "a b", "%s", "{}"):
        listener.wait_wakeup([name], 0)
        notify(admin, name)
        assert listener.wait_wakeup([name], LONG_MS) == name


@pytest.mark.parametrize(
    ("queues", "timeout_ms"),
    [
        ("q", 5),
        (b"q", 5),
        ([5], 5),
        (["nul\0"], 5),
        (["q"], -1),
        (["q"], 1.5),
        (["q"], True),
        (["q"], 10**18),
    ],
)
def test_malformed_arguments_are_refused(listener, queues, timeout_ms):
    with pytest.raises(InvalidRequest):
        listener.wait_wakeup(queues, timeout_ms)


@pytest.mark.parametrize(
    "options", [{"probe_ms": 0}, {"answer_ms": -1}, {"reconnect_ms": 0.5}]
)
def test_malformed_options_are_refused(database_url, options):
    with pytest.raises(InvalidRequest):
        Listener(database_url, **options)
    with pytest.raises(ConfigurationError):
        Listener(database_url, "x" * 64)
    for address in ("password=secret nonsense", "postgresql://u:top@secret@host/x"):
        with pytest.raises(ConfigurationError, match="for wake-ups") as malformed:
            Listener(address)
        assert "secret" not in str(malformed.value)
        assert malformed.value.__cause__ is None


# Life


def test_nothing_is_started_before_the_first_wait(database_url, admin):
    until(lambda: listener_sessions(admin) == [], "the end of earlier sessions")
    threads = threading.active_count()
    listener = Listener(database_url)
    assert threading.active_count() == threads
    assert listener_sessions(admin) == []
    assert not listener.listening
    listener.close()
    with pytest.raises(StoreUnavailable):
        listener.wait_wakeup(["q"], 0)


def test_waiters_are_told_once_to_ask_when_listening_begins(database_url, postgres):
    with proxy_to(database_url) as proxy:
        proxy.silent = True
        listener = Listener(proxy.conninfo, answer_ms=200, reconnect_ms=10)
        gate = threading.Barrier(4)

        def wait(queue):
            answers = [listener.wait_wakeup([queue], 0)]
            gate.wait(SOON_S)
            answers.append(listener.wait_wakeup([queue], LONG_MS))
            answers.append(listener.wait_wakeup([queue], 20))
            return answers

        with ThreadPoolExecutor(3) as threads:
            waiting = [threads.submit(wait, queue) for queue in "abc"]
            gate.wait(SOON_S)
            proxy.silent = False
            answers = [future.result(SOON_S) for future in waiting]
        assert answers == [[None, "", None]] * 3
        assert listener.listening
        listener.close()


def test_closing_wakes_every_waiter_and_ends_the_thread(database_url, admin):
    listener = Listener(database_url)
    assert listener.wait_wakeup(["q"], LONG_MS) == ""
    started = threading.Barrier(3)

    def wait():
        started.wait(SOON_S)
        return outcome_of(
            lambda: listener.wait_wakeup(["x"], LONG_MS), StoreUnavailable
        )

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(wait) for _ in range(2)]
        started.wait(SOON_S)
        before = time.monotonic()
        listener.close()
        for future in waiting:
            # Who came after the close is refused.
            answer = future.result(SOON_S)
            assert answer == "" or isinstance(answer, StoreUnavailable)
        assert time.monotonic() - before < LONG_MS / 2000
    with pytest.raises(StoreUnavailable):
        listener.wait_wakeup(["q"], 0)
    listener.close()
    assert "headgate-listener" not in [t.name for t in threading.enumerate()]
    until(lambda: listener_sessions(admin) == [], "the end of the session")


def test_a_listener_does_not_keep_its_process_alive(database_url):
    program = textwrap.dedent(
        """
        import sys
        from headgate_sync.postgres.listener import Listener

        listener = Listener(sys.argv[1])
        assert listener.wait_wakeup(["q"], 20_000) == ""
        """
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, database_url],
        timeout=SOON_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_forked_child_listens_on_its_own(listener, admin, database_url):
    """Neither end of the parent's connection is touched by the child."""
    (parents,) = until(
        lambda: len(found := listener_sessions(admin)) == 1 and found,
        "the end of earlier sessions",
    )
    child = os.fork()
    if child == 0:
        heard = [listener.wait_wakeup(["q"], LONG_MS)]
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("SELECT pg_notify('headgate_wakeup', 'q')")
        heard.append(listener.wait_wakeup(["q"], LONG_MS))
        listener.close()
        os._exit(0 if heard == ["", "q"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert listener.wait_wakeup(["q"], LONG_MS) == "q"
    assert listener_sessions(admin) == [parents]


def test_a_child_that_never_waits_leaves_the_parent_listening(listener, admin):
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    notify(admin, "q")
    assert listener.wait_wakeup(["q"], LONG_MS) == "q"


def test_the_listening_session_is_idle_outside_a_transaction(listener, admin):
    ((_, state),) = until(
        lambda: len(found := listener_sessions(admin)) == 1 and found,
        "the end of earlier sessions",
    )
    assert state == "idle"


def test_the_channel_is_that_of_the_schema(database_url, admin, postgres):
    listener = Listener(database_url, "Other Schema")
    assert listener.wait_wakeup([], LONG_MS) == ""
    notify(admin, "no")
    notify(admin, "yes", channel=channel_of("Other Schema"))
    assert listener.wait_wakeup([], LONG_MS) == "yes"
    listener.close()


def test_a_closed_listener_can_be_collected(database_url):
    listener = Listener(database_url)
    listener.wait_wakeup(["q"], LONG_MS)
    listener.close()
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
