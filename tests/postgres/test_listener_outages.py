"""A listener that loses its server, its network or its place behind a pooler."""

from __future__ import annotations

import logging
import struct
import time

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from headgate_sync.postgres.listener import Listener
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.builders import enqueue
from tests.postgres.proxy import proxy_to, without_messages
from tests.postgres.watching import end_sessions, until
from tests.servers import own_server

LONG_MS = 20_000
QUICK = {"reconnect_ms": 50, "probe_ms": 50, "answer_ms": 500}


def notify(conninfo, queue):
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("SELECT pg_notify('headgate_wakeup', %s)", [queue])


def terminate_listeners(admin):
    """End the sessions of all listeners, and wait until they are gone."""
    pids = admin.execute(
        "SELECT pid FROM pg_stat_activity"
        " WHERE query ~ 'pg_backend_pid|pg_listening_channels' AND state = 'idle'"
        " AND pid <> pg_backend_pid() AND datname = current_database()"
    ).fetchall()
    end_sessions(admin, *[pid for (pid,) in pids])


def warnings_of(caplog):
    return [
        record
        for record in caplog.records
        if record.name == "headgate_sync.postgres.listener"
        and record.levelno >= logging.WARNING
    ]


def test_a_terminated_session_is_replaced_and_waiters_are_told_to_ask(
    database_url, admin, caplog
):
    listener = Listener(database_url, **QUICK)
    assert listener.wait_wakeup(["q"], LONG_MS) == ""
    for _ in range(3):
        terminate_listeners(admin)
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        notify(database_url, "q")
        assert listener.wait_wakeup(["q"], LONG_MS) == "q"
    listener.close()
    assert len(warnings_of(caplog)) == 3


def test_a_restarted_server_is_listened_to_again(caplog):
    """However long it takes, and with one warning per outage."""
    with own_server(fsync="off") as server:
        migrate_up(server.conninfo)
        listener = Listener(server.conninfo, **QUICK)
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        for mode in ("fast", "immediate"):
            server.stop(mode)
            until(lambda: not listener.listening, "the loss of the connection")
            assert listener.wait_wakeup(["q"], 500) is None
            server.start()
            assert listener.wait_wakeup(["q"], LONG_MS) == ""
            store = PgStore.connect(server.conninfo)
            before = time.monotonic()
            enqueue(store, mode)
            assert listener.wait_wakeup(["q"], LONG_MS) == "q"
            assert time.monotonic() - before < 5
            store.close()
        listener.close()
    assert len(warnings_of(caplog)) == 2


def test_an_unreachable_server_is_tried_without_hurry(tmp_path):
    listener = Listener(f"host={tmp_path} dbname=x", reconnect_ms=100)
    assert listener.wait_wakeup(["q"], 350) is None
    assert not listener.listening
    before = time.monotonic()
    listener.close()
    assert time.monotonic() - before < 1


def test_a_connection_that_fell_silent_is_found_and_replaced(database_url):
    """No end of the connection is told: only the missing answer tells."""
    with proxy_to(database_url) as proxy:
        listener = Listener(proxy.conninfo, **QUICK)
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        proxy.silent = True
        until(lambda: not listener.listening, "the discovery of the silence")
        notify(database_url, "q")
        assert listener.wait_wakeup(["q"], 100) is None
        proxy.silent = False
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        notify(database_url, "q")
        assert listener.wait_wakeup(["q"], LONG_MS) == "q"
        listener.close()


def test_a_server_that_never_answers_a_connection_is_given_up(database_url):
    with proxy_to(database_url) as proxy:
        proxy.silent = True
        listener = Listener(proxy.conninfo, **QUICK)
        assert listener.wait_wakeup(["q"], 100) is None
        until(lambda: proxy.accepted >= 3, "three attempts")
        before = time.monotonic()
        listener.close()
        assert time.monotonic() - before < 1


def test_a_silent_host_does_not_keep_the_next_one_from_being_tried(database_url, admin):
    with proxy_to(database_url) as silent, proxy_to(database_url) as good:
        silent.silent = True
        hosts = ",".join(
            psycopg.conninfo.conninfo_to_dict(proxy.conninfo)["host"]
            for proxy in (silent, good)
        )
        listener = Listener(make_conninfo(database_url, host=hosts), **QUICK)
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        notify(database_url, "q")
        assert listener.wait_wakeup(["q"], LONG_MS) == "q"
        listener.close()
        assert (silent.accepted, good.accepted) == (1, 1)


def test_a_quiet_connection_is_kept(database_url):
    """Probes answer themselves; nothing is replaced."""
    with proxy_to(database_url) as proxy:
        listener = Listener(proxy.conninfo, **QUICK)
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        assert listener.wait_wakeup(["q"], 400) is None
        assert listener.listening
        assert proxy.accepted == 1
        listener.close()


def test_a_lost_subscription_is_noticed(database_url, caplog):
    """A pooler may move the session to a server that listens to nothing."""
    with proxy_to(database_url) as proxy:
        listener = Listener(proxy.conninfo, **QUICK)
        assert listener.wait_wakeup(["q"], LONG_MS) == ""

        def to_nothing(data):
            return data.replace(b"SELECT 1\0", b"SELECT 0\0").replace(
                struct.pack(">cIHi1s", b"D", 11, 1, 1, b"1"), b""
            )

        proxy.answers = to_nothing
        until(lambda: not listener.listening, "the discovery")
        assert "subscription" in warnings_of(caplog)[0].getMessage()
        proxy.answers = bytes
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        listener.close()


def other_process_id(data):
    """Let the session show another process id, as poolers do."""
    at = data.find(b"K\0\0\0\x0c")
    if at < 0:
        at = data.find(b"K\0\0\0")
    return data if at < 0 else data[: at + 5] + b"\0\0\0\1" + data[at + 9 :]


def deaf(data):
    """What passes through a pooler that hands out servers per transaction."""
    return without_messages(b"A", other_process_id(data))


def test_a_connection_that_hears_no_other_session_says_so_and_polls(
    database_url, caplog
):
    with proxy_to(database_url) as proxy:
        proxy.answers = deaf
        listener = Listener(proxy.conninfo, **QUICK)
        assert listener.wait_wakeup(["q"], 100) is None
        until(lambda: warnings_of(caplog), "a warning")
        notify(database_url, "q")
        assert listener.wait_wakeup(["q"], 100) is None
        assert not listener.listening
        assert "pooler" in warnings_of(caplog)[0].getMessage()
        listener.close()


def test_a_pooler_that_keeps_the_session_together_is_as_good_as_the_server(
    database_url, caplog
):
    with proxy_to(database_url) as proxy:
        proxy.answers = other_process_id
        listener = Listener(proxy.conninfo, **QUICK)
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        assert listener.listening
        notify(database_url, "q")
        assert listener.wait_wakeup(["q"], LONG_MS) == "q"
        listener.close()
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 99]
)
def test_whatever_a_stranger_answers_the_listener_goes_on(database_url, answer):
    with proxy_to(database_url) as proxy:
        proxy.answers = lambda data: answer
        listener = Listener(proxy.conninfo, **QUICK)
        assert listener.wait_wakeup(["q"], 100) is None
        until(lambda: proxy.accepted >= 2, "a second attempt")
        proxy.answers = bytes
        assert listener.wait_wakeup(["q"], LONG_MS) == ""
        listener.close()
