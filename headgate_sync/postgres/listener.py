"""Wake-ups: one connection that listens for all waiting threads of a store."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import select
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NoReturn
from weakref import WeakSet

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headgate_sync.envelope import (
    MAX_INT32,
    MAX_RELATIVE_MS,
    check_int,
    check_text,
)
from headgate_sync.errors import (
    InvalidRequest,
    StoreClosed,
)
from headgate_sync.loggers import guarded
from headgate_sync.postgres.database import DEFAULT_SCHEMA, read_address
from headgate_sync.postgres.sql import check_schema_name

log = guarded(__name__)

CHANNEL = "headgate_wakeup"
BUFFERED_NAMES = 64
PROBE_MS = 15_000
ANSWER_MS = 5_000
RECONNECT_MS = 1_000
RECONNECT_JITTER = 0.5
# A connection that does not hear other sessions will not learn it within a second.
DEAF_MS = 60_000
END_S = 1.0


def channel_of(schema: str) -> str:
    """The name of a schema's channel; the trigger on the inbox makes the same."""
    if schema == DEFAULT_SCHEMA:
        return CHANNEL
    return f"{CHANNEL}_{hashlib.sha256(schema.encode()).hexdigest()[:16]}"


class _Waiter:
    """What one thread waits for, and what came for it since it last took a signal.

    Used under the listener's lock.
    """

    def __init__(self, queues: frozenset[str], lock: threading.Lock) -> None:
        self.queues = queues
        self._woken = threading.Condition(lock)
        self._names: dict[str, None] = {}  # in order of arrival, each once
        self._ask_now = False

    def put(self, queue: str) -> None:
        """Add a signal of a queue."""
        if self.queues and queue not in self.queues:
            return
        if queue not in self._names and len(self._names) == BUFFERED_NAMES:
            self._ask_now = True
        else:
            self._names[queue] = None
        self._woken.notify()

    def put_ask_now(self) -> None:
        """Tell the thread to ask, whatever it waits for."""
        self._ask_now = True
        self._woken.notify()

    def take(self) -> str | None:
        """The next signal, or None."""
        if self._ask_now:
            self._ask_now = False
            self._names.clear()
            return ""
        for queue in self._names:
            del self._names[queue]
            return queue
        return None

    def wait(self, seconds: float) -> None:
        """Let the lock go until a signal may have come."""
        self._woken.wait(min(seconds, threading.TIMEOUT_MAX))


class Listener:
    """`Notifying` by LISTEN, on a connection of its own that is used for nothing else.

    A thread is started by the first `wait_wakeup`. It connects again for as long as it
    takes; meanwhile waiting threads see their time-outs. Whenever the channel is
    listened to anew, all of them are told to ask now, since signals may have been
    missed. A forked child starts afresh, without thread and connection.

    Args:
        conninfo: must not lead through a pooler that hands servers out per transaction.
        schema: of the store.
        probe_ms: silence after which the server is asked for a sign of life.
        answer_ms: how long the server may take for any answer before it counts as lost.
        reconnect_ms: least pause between two attempts to connect.

    Raises:
        ConfigurationError: the conninfo or the name of the schema is malformed.
    """

    def __init__(
        self,
        conninfo: str,
        schema: str = DEFAULT_SCHEMA,
        *,
        probe_ms: int = PROBE_MS,
        answer_ms: int = ANSWER_MS,
        reconnect_ms: int = RECONNECT_MS,
    ) -> None:
        check_schema_name(schema)
        check_int("probe_ms", probe_ms, 1, MAX_RELATIVE_MS)
        check_int("answer_ms", answer_ms, 1, MAX_RELATIVE_MS)
        check_int("reconnect_ms", reconnect_ms, 1, MAX_RELATIVE_MS)
        parts = read_address(conninfo, "the address for wake-ups")
        self._conninfo = make_conninfo(**{**parts, "client_encoding": "UTF8"})
        self._channel = channel_of(schema)
        self._probe_ms = probe_ms
        self._answer_ms = answer_ms
        self._reconnect_ms = reconnect_ms
        self._start_afresh()
        _listeners.add(self)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()  # guards the waiters and all fields below
        self._waiters: WeakSet[_Waiter] = WeakSet()
        self._of_thread = threading.local()
        self._thread: threading.Thread | None = None
        self._stop: _Stop | None = None
        self._listening = False
        self._closed = False

    @property
    def listening(self) -> bool:
        """Whether signals arrive; if not, waiting threads depend on their time-outs."""
        return self._listening

    def wait_wakeup(self, queues: Sequence[str], timeout_ms: int) -> str | None:
        """Wait for a signal on one of the queues (none named: any).

        Signals that come between two calls of a thread are kept for it while it names
        the same queues: up to 64 names, each once.

        Returns:
            The queue's name, "" when signals overflowed, may have been missed or will
            come no more (ask now), None at the time-out.

        Raises:
            InvalidRequest: an argument is malformed.
            StoreClosed: the listener was closed before the call.
        """
        check_int("timeout_ms", timeout_ms, 0, MAX_RELATIVE_MS)
        if isinstance(queues, str | bytes):
            raise InvalidRequest("queues must be a sequence of str, got one text")
        names = frozenset(check_text("queues", queue) for queue in queues)
        deadline = time.monotonic() + timeout_ms / 1000
        with self._lock:
            if self._closed:
                raise StoreClosed("the listener is closed")
            waiter = self._waiter_for(names)
            self._ensure_thread()
            while True:
                signal = waiter.take()
                if signal is not None:
                    return signal
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return None
                waiter.wait(remaining_s)

    def close(self) -> None:
        """Stop listening and wake every waiter."""
        with self._lock:
            self._closed = True
            self._tell_all_to_ask()
            thread, stop = self._thread, self._stop
            self._thread = self._stop = None
        if thread is not None and stop is not None:
            stop.set()
            thread.join(END_S)
            if thread.is_alive():  # only the resolution of a host name can hold it
                log.warning("thread %s did not end yet", thread.name)
            else:
                stop.release()

    def _waiter_for(self, queues: frozenset[str]) -> _Waiter:
        """The calling thread's own; it goes when the thread does."""
        waiter: _Waiter | None = getattr(self._of_thread, "waiter", None)
        if waiter is None or waiter.queues != queues:
            waiter = self._of_thread.waiter = _Waiter(queues, self._lock)
            self._waiters.add(waiter)
        return waiter

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._stop = _Stop()
            self._thread = threading.Thread(
                target=self._run,
                args=(self._stop,),
                name="headgate-listener",
                daemon=True,
            )
            self._thread.start()

    def _tell_all_to_ask(self) -> None:
        for waiter in list(self._waiters):
            waiter.put_ask_now()

    def _run(self, stop: _Stop) -> None:
        quiet = False  # an outage is reported once
        while True:
            pause_ms = self._reconnect_ms
            try:
                with _Link(self._conninfo, stop, self._answer_ms) as link:
                    if self._subscribe(link, stop):
                        quiet = False
                        self._relay(link)
                    else:
                        pause_ms = DEAF_MS
            except _Stopped:
                return
            except psycopg.Error as error:
                log.log(
                    logging.DEBUG if quiet else logging.WARNING,
                    "no wake-ups until the server answers, workers poll: %s",
                    " ".join(str(error).split()),
                )
                quiet = True
            except Exception:
                log.exception("the listener failed and starts again")
            finally:
                self._listening = False
            spread_ms = round(pause_ms * RECONNECT_JITTER * random.random())
            try:
                stop.wait(pause_ms + spread_ms)
            except _Stopped:
                return

    def _subscribe(self, link: _Link, stop: _Stop) -> bool:
        """Listen to the channel; False if the connection cannot hear other sessions.

        Behind a pooler that hands out servers per transaction LISTEN succeeds on a
        server that somebody else has by the next moment. Such a connection shows the
        process id of the pooler's making instead of the server's.
        """
        channel = sql.Identifier(self._channel).as_bytes(None)
        link.ask(b"LISTEN " + channel)
        pid = link.ask(b"SELECT pg_catalog.pg_backend_pid()")
        if int(pid or b"0") != link.backend_pid and not self._hears(stop, link):
            log.warning(
                "the connection for wake-ups leads through a pooler and hears nothing, "
                "workers poll; give it an address of the server itself"
            )
            return False
        log.info("listening on %s", self._channel)
        with self._lock:
            self._listening = True
            self._tell_all_to_ask()
        return True

    def _hears(self, stop: _Stop, link: _Link) -> bool:
        """Whether a notification of another session arrives."""
        with _Link(self._conninfo, stop, self._answer_ms) as other:
            other.ask(b"SELECT pg_catalog.pg_notify('%b', '')" % self._channel.encode())
            deadline = time.monotonic() + self._answer_ms / 1000
            while (remaining_s := deadline - time.monotonic()) > 0:
                if link.wait_input(round(remaining_s * 1000)) and any(
                    queue == "" for queue in link.signals()
                ):
                    return True
        return False

    def _relay(self, link: _Link) -> NoReturn:
        """Pass signals on until the connection is lost, which raises."""
        still_there = (
            b"SELECT 1 FROM pg_catalog.pg_listening_channels() AS channel (name)"
            b" WHERE channel.name OPERATOR(pg_catalog.=) '%b'" % self._channel.encode()
        )
        while True:
            for queue in link.signals():
                # The empty name is the question of a session whether it is heard.
                if queue:
                    with self._lock:
                        for waiter in list(self._waiters):
                            waiter.put(queue)
            if not link.wait_input(self._probe_ms) and not link.ask(still_there):
                raise psycopg.OperationalError("the subscription was lost")


_listeners: WeakSet[Listener] = WeakSet()


def _start_afresh_in_child() -> None:
    for listener in list(_listeners):
        listener._start_afresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_in_child)


class _Stopped(Exception):
    """The listener was closed."""


class _Stop:
    """An event that a thread can wait for together with a socket."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def set(self) -> None:
        """End all waiting, now and later."""
        os.write(self._write, b"\0")

    def release(self) -> None:
        """Free the file descriptors; nobody may wait any more."""
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_ms: int, fd: int = -1, events: int = 0) -> bool:
        """Wait for events of a file descriptor; False at the time-out.

        Raises:
            _Stopped: the event was set.
        """
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if fd >= 0:
            poll.register(fd, events)
        ready = dict(poll.poll(min(timeout_ms, MAX_INT32)))
        if self._read in ready:
            raise _Stopped
        return bool(ready)


class _Link:
    """A connection on which no wait outlasts its limit, whatever the network does.

    Args:
        conninfo: where to connect; of several hosts the first that answers is taken.
        stop: ends every wait.
        answer_ms: how long the server may take to accept and to answer.

    Raises:
        psycopg.OperationalError: by the constructor and every method: refused, lost, or
            silent for too long.
    """

    def __init__(self, conninfo: str, stop: _Stop, answer_ms: int) -> None:
        self._stop = stop
        self._answer_ms = answer_ms
        *others, last = _one_per_host(conninfo)
        for host in others:
            try:
                self._connect(host)
            except psycopg.OperationalError:
                continue
            return
        self._connect(last)

    def __enter__(self) -> _Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pgconn.finish()

    @property
    def backend_pid(self) -> int:
        """The process id that the server, or a pooler before it, gave."""
        return self._pgconn.backend_pid

    def ask(self, query: bytes) -> bytes | None:
        """Run a statement; returns the first value of its answer, if there is one."""
        pgconn = self._pgconn
        deadline = self._deadline()
        pgconn.send_query(query)
        while pgconn.flush():
            self._await(select.POLLIN | select.POLLOUT, deadline)
            pgconn.consume_input()
        value = None
        while True:
            while pgconn.is_busy():
                self._await(select.POLLIN, deadline)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                return value
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise psycopg.errors.error_from_result(result)
            if result.ntuples:
                value = result.get_value(0, 0)

    def wait_input(self, timeout_ms: int) -> bool:
        """Wait until the server sent something; False at the time-out."""
        if not self._stop.wait(timeout_ms, self._pgconn.socket, select.POLLIN):
            return False
        self._pgconn.consume_input()
        return True

    def signals(self) -> Iterator[str]:
        """The payloads of the notifications that have arrived."""
        while (notification := self._pgconn.notifies()) is not None:
            yield notification.extra.decode()

    def _connect(self, conninfo: str) -> None:
        self._pgconn = pgconn = pq.PGconn.connect_start(conninfo.encode())
        deadline = self._deadline()
        polled: int = pq.PollingStatus.WRITING
        try:
            while polled != pq.PollingStatus.OK:
                events = _AWAITED.get(polled)
                if events is None or pgconn.status == pq.ConnStatus.BAD:
                    raise psycopg.OperationalError(pgconn.get_error_message())
                self._await(events, deadline)
                polled = pgconn.connect_poll()
        except BaseException:
            pgconn.finish()
            raise
        pgconn.nonblocking = 1

    def _deadline(self) -> float:
        return time.monotonic() + self._answer_ms / 1000

    def _await(self, events: int, deadline: float) -> None:
        remaining_ms = round((deadline - time.monotonic()) * 1000)
        if remaining_ms <= 0 or not self._stop.wait(
            remaining_ms, self._pgconn.socket, events
        ):
            raise psycopg.OperationalError(
                f"the server did not answer within {self._answer_ms} ms"
            )


_AWAITED: dict[int, int] = {
    pq.PollingStatus.READING: select.POLLIN,
    pq.PollingStatus.WRITING: select.POLLOUT,
}


def _one_per_host(conninfo: str) -> list[str]:
    """Split a conninfo with several hosts: each then gets a limit of its own.

    The driver goes on to the next host only where one refuses, not where it is silent.
    """
    params = conninfo_to_dict(conninfo)
    lists = {
        name: str(params[name]).split(",")
        for name in ("host", "hostaddr", "port")
        if params.get(name)
    }
    hosts = max(len(lists.get("host", ())), len(lists.get("hostaddr", ())))
    if hosts < 2:
        return [conninfo]
    return [
        make_conninfo(
            conninfo,
            **{
                name: values[min(at, len(values) - 1)] for name, values in lists.items()
            },
        )
        for at in range(hosts)
    ]
