"""The standalone server, over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from queue import SimpleQueue

import pytest

from headgate_sync import MemStore
from headgate_sync.api import ApiConfig, LiveUpdates, server
from headgate_sync.api.server import is_loopback, read_address, serve
from headgate_sync.console.server import serve as serve_console
from headgate_sync.errors import ConfigurationError
from headgate_sync.identity import Identity
from tests.builders import enqueue

TOKEN = "t" * 16
WAIT_S = 20


class Running:
    """A server in a thread of the test."""

    def __init__(self, store, serve=serve, **options):
        self._stop, ready = SimpleQueue(), SimpleQueue()
        self.codes = []

        def run():
            code = serve(
                store,
                **{"address": "127.0.0.1:0", "environ": {}, **options},
                listening=ready.put,
                stop=self._stop,
            )
            self.codes.append(code)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self.address = ready.get(timeout=WAIT_S)

    def __enter__(self):
        return self

    def tell_to_end(self):
        self._stop.put(None)

    def __exit__(self, *raised):
        self.tell_to_end()
        self._thread.join(WAIT_S)
        assert self.codes == [0]

    def connect(self):
        return socket.create_connection(
            (self.address.host, self.address.port), timeout=WAIT_S
        )

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(
            self.address.host, self.address.port, timeout=WAIT_S
        )
        connection.request(method, f"/api/v1{path}", body, headers or {})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer, data


def everything(connection):
    data = b""
    while more := connection.recv(65_536):
        data += more
    return data


def test_it_answers_and_ends_when_it_is_told_to():
    store = MemStore()
    enqueue(store, "a/b")
    with Running(store) as running:
        answer, data = running.request("GET", "/jobs/a%2Fb")
        assert answer.status == 200
        assert json.loads(data)["id"] == "a/b"
        assert "Werkzeug" not in str(answer.headers)
        assert "Python" not in str(answer.headers)


def test_many_clients_at_once_are_answered():
    with Running(MemStore(), threads=4) as running:
        found = []

        def ask():
            found.append(running.request("GET", "/jobs")[0].status)

        threads = [threading.Thread(target=ask) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == [200] * 24


def test_a_body_that_is_too_large_gets_its_answer():
    """The answer comes before the body was read, and the client still sees it."""
    with Running(MemStore()) as running:
        headers = {"Content-Type": "application/json", "Idempotency-Key": "k"}
        answer, data = running.request("POST", "/jobs", b"x" * 4_000_000, headers)
        assert answer.status == 413
        assert json.loads(data) == {"error": "request body exceeds 2097152 bytes"}


def test_a_chunked_body_is_read_and_bounded():
    with Running(MemStore(), config=ApiConfig(max_body_bytes=100)) as running:
        for size, status in ((10, b"400"), (1000, b"413")):
            with running.connect() as connection:
                connection.sendall(
                    b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nIdempotency-Key: k\r\n"
                    b"Connection: close\r\n"
                    b"Transfer-Encoding: chunked\r\n\r\n"
                    + b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n"
                )  # fmt: skip
                assert everything(connection).startswith(b"HTTP/1.1 " + status)


def test_a_body_that_ends_early_creates_nothing():
    store = MemStore()
    body = json.dumps({"kind": "k", "payload": "", "queue": "q"}).encode()
    with Running(store) as running, running.connect() as connection:
        connection.sendall(
            b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (len(body) + 1) + body
        )
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection) == b""
    assert store.inspect.list_jobs().jobs == ()


@pytest.mark.parametrize(
    "framing",
    [b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked, gzip",
     b"Transfer-Encoding: xchunked", b"Content-Length: 3\r\nContent-Length: 30",
     b"Content-Length: +3"],
)  # fmt: skip
def test_a_body_of_doubtful_length_is_refused(framing):
    """A proxy in front might see another request in the same bytes."""
    with Running(MemStore()) as running, running.connect() as connection:
        connection.sendall(
            b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\n"
            b"Content-Type: application/json\r\n" + framing + b"\r\n\r\n{}x"
        )
        answer = everything(connection)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 501"))
        assert answer.count(b"HTTP/1.") == 1


def test_a_connection_serves_many_requests():
    with Running(MemStore()) as running:
        connection = http.client.HTTPConnection(
            running.address.host, running.address.port, timeout=WAIT_S
        )
        connection.connect()
        mine = connection.sock
        for _ in range(3):
            connection.request("GET", "/api/v1/jobs")
            assert connection.getresponse().read()
            assert connection.sock is mine
        connection.close()


# What a client may send before it falls silent.
HALF_A_HEADER = b"GET /api/v1/jobs HTTP/1.1\r\nHost:"
NO_BODY = (
    b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\n"
    b"Content-Length: 9\r\n\r\n"
)
ANSWERED = b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [HALF_A_HEADER, NO_BODY, b""])
def test_a_slow_client_does_not_hold_a_thread(sent):
    with Running(MemStore(), threads=1) as running, running.connect() as slow:
        slow.sendall(sent)
        assert running.request("GET", "/healthz")[0].status == 200


class Steps:
    """The server's clock, which a test may put forward."""

    def __init__(self):
        self._ahead_s = 0.0

    def advance(self, seconds):
        self._ahead_s += seconds

    def monotonic(self):
        return time.monotonic() + self._ahead_s


@pytest.fixture
def steps(monkeypatch):
    steps = Steps()
    monkeypatch.setattr(server, "time", steps)
    return steps


def step_until_closed(connection, steps):
    """Let time pass until the other side hangs up; returns what it sent."""
    data = b""
    connection.settimeout(0.05)
    for _ in range(100):
        steps.advance(5)
        with suppress(TimeoutError):
            if not (more := connection.recv(65_536)):
                return data
            data += more
    raise AssertionError("it is still connected")


@pytest.mark.parametrize("sent", [HALF_A_HEADER, NO_BODY, b"", ANSWERED])
def test_a_client_that_says_nothing_is_left(steps, sent):
    with Running(MemStore()) as running, running.connect() as silent:
        silent.sendall(sent)
        said = step_until_closed(silent, steps)
    assert said.endswith(b"ok" if sent == ANSWERED else b"")


def test_a_request_has_to_arrive_in_time_however_small_its_pieces_are(steps):
    with Running(MemStore()) as running, running.connect() as slow:
        slow.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nX: ")
        slow.settimeout(0.05)
        for _ in range(100):
            steps.advance(5)
            try:
                slow.sendall(b"x")
                if slow.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
        raise AssertionError("it may arrive for ever")


def test_a_client_that_does_not_read_is_left(monkeypatch):
    monkeypatch.setattr(server, "PATIENCE_S", 0.3)
    store = MemStore()
    enqueue(store, *(f"job-{number:0200}" for number in range(200)))
    config = ApiConfig(rate_limit=None)
    with (
        Running(store, threads=1, config=config) as running,
        running.connect() as deaf,
    ):
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line = b"GET /api/v1/jobs?limit=200 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        deaf.sendall(200 * line)
        # In turn with those, until the kernel takes no more of them.
        for _ in range(50):
            assert running.request("GET", "/healthz")[0].status == 200


def test_a_client_has_its_time_from_when_its_turn_begins(steps):
    channel = object.__new__(server._Channel)
    channel.request, channel.requests, channel.total_outbufs_len = None, [], 0
    channel.last_activity = 0.0

    def hung_after(seconds, **changes):
        for name, value in changes.items():
            setattr(channel, name, value)
        steps.advance(seconds)
        return channel.is_hung()

    assert not hung_after(0)
    assert not hung_after(29)
    assert not hung_after(0, request=object(), last_activity=1.0)
    assert not hung_after(29, last_activity=2.0)
    assert not hung_after(0, request=None, requests=["arrived"])
    assert not hung_after(1_000)  # the server's turn
    assert not hung_after(0, total_outbufs_len=9)  # begins to be sent
    assert not hung_after(29)
    assert not hung_after(29, total_outbufs_len=8, last_activity=3.0)
    assert hung_after(31)  # nothing more is taken
    channel.requests, channel.total_outbufs_len = [], 0
    assert not hung_after(0, last_activity=4.0)
    assert not hung_after(0, request=object())
    assert not hung_after(20, request=object(), last_activity=5.0)  # another one
    assert not hung_after(20, last_activity=6.0)
    assert hung_after(20, last_activity=7.0)  # which goes on for too long


def test_a_client_that_asks_all_the_time_is_served_all_the_time(steps):
    """Requests behind each other in one packet are not one that arrives for long."""
    line = b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Running(MemStore()) as running, running.connect() as connection:
        connection.sendall(line[:9])
        for _ in range(40):
            steps.advance(5)
            connection.sendall(line[9:] + line[:9])
            answer = b""
            while not answer.endswith(b"\r\n\r\nok"):
                answer += connection.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 200")


def test_bodies_of_strangers_take_no_more_room_than_there_is(monkeypatch):
    monkeypatch.setattr(server, "MAX_ARRIVING_BYTES", 100_000)
    head = (
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n"
    )
    with ExitStack() as stack, Running(MemStore()) as running:
        small, large = (stack.enter_context(running.connect()) for _ in range(2))
        small.sendall(head + b"\r\n" + b"x" * 40_000)
        large.sendall(head + b"\r\n" + b"x" * 80_000)
        with suppress(ConnectionResetError):
            assert large.recv(1) == b""
        small.sendall(b"x" * 160_000)
        assert small.recv(12) == b"HTTP/1.1 400"  # heard to its end


@pytest.mark.parametrize(
    ("descriptors", "most"),
    [
        (64, 16),
        (256, 96),
        (1024, 480),
        (65_536, 1_000),
        (resource.RLIM_INFINITY, 1_000),
    ],
)
def test_connections_leave_descriptors_to_others(monkeypatch, descriptors, most):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (descriptors, -1))
    assert server._most_connections() == most


def test_a_server_that_ends_leaves_its_successor_the_socket(tmp_path):
    inside, go_on = threading.Event(), threading.Event()

    def slow(environ):
        inside.set()
        assert go_on.wait(WAIT_S)
        return Identity("anna")

    path = tmp_path / "api.sock"
    line = b"GET /api/v1/jobs HTTP/1.0\r\nHost: x\r\n\r\n"
    with ExitStack() as successor:
        with (
            Running(
                MemStore(),
                address=f"unix:{path}",
                config=ApiConfig(authenticate=slow),
            ) as old,
            socket.socket(socket.AF_UNIX) as connection,
        ):
            connection.connect(str(path))
            connection.sendall(line)
            assert inside.wait(WAIT_S)
            old.tell_to_end()
            while path.exists():
                time.sleep(0.01)
            successor.enter_context(Running(MemStore(), address=f"unix:{path}"))
            go_on.set()
            assert everything(connection).startswith(b"HTTP/1.0 200")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(line)
            assert everything(connection).startswith(b"HTTP/1.0 200")


def test_a_stream_sends_as_things_happen_and_leaves_when_the_client_does():
    config = ApiConfig(
        live=LiveUpdates(tick_ms=100, heartbeat_ms=50, max_streams=1, coalesce_ms=0)
    )
    with Running(MemStore(), config=config) as running:
        with running.connect() as connection:
            connection.sendall(
                b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            data = b""
            while data.count(b"queue_activity") < 2:
                data += connection.recv(65_536)
            assert b"text/event-stream" in data
            assert b"retry: 2000" in data
            assert running.request("GET", "/events")[0].status == 503
        until_s = time.monotonic() + WAIT_S  # a few heartbeats would do
        while time.monotonic() < until_s:
            with running.connect() as connection:
                connection.sendall(
                    b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
                )
                if connection.recv(12) == b"HTTP/1.1 200":
                    return
            time.sleep(0.02)
        raise AssertionError("the place of a client that is gone stayed taken")


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:8091", "127.0.0.1.evil.test", "", "[2001:db8::1]"]
)
def test_without_a_hook_only_requests_to_this_machine_are_answered(host):
    with Running(MemStore()) as running, running.connect() as connection:
        connection.sendall(
            f"GET /api/v1/jobs HTTP/1.1\r\nHost: {host}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        assert everything(connection).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8091", "[::1]:8091", "[::1]"])
def test_every_name_of_this_machine_is_known(host):
    with Running(MemStore()) as running, running.connect() as connection:
        connection.sendall(
            f"GET /api/v1/jobs HTTP/1.1\r\nHost: {host}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        assert everything(connection).startswith(b"HTTP/1.1 200")


def test_a_request_that_is_being_answered_is_answered_before_the_end():
    inside, go_on = threading.Event(), threading.Event()

    def slow(environ):
        if environ["PATH_INFO"].endswith("/jobs"):
            inside.set()
            assert go_on.wait(WAIT_S)
        return Identity("anna")

    found = []
    with Running(MemStore(), config=ApiConfig(authenticate=slow)) as running:
        ask = threading.Thread(
            target=lambda: found.append(running.request("GET", "/jobs")[0].status)
        )
        ask.start()
        assert inside.wait(WAIT_S)
        threading.Timer(0.3, go_on.set).start()
    ask.join(WAIT_S)
    assert found == [200]


@pytest.mark.parametrize("served", [serve, serve_console])
def test_streams_leave_threads_to_others(served):
    with (
        Running(MemStore(), served, threads=2) as running,
        running.connect() as connection,
    ):
        line = b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(line)
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert running.request("GET", "/events")[0].status == 503
        assert running.request("GET", "/jobs")[0].status == 200


@pytest.mark.parametrize("served", [serve, serve_console])
def test_the_end_of_the_server_ends_its_streams(served, caplog):
    with ExitStack() as open_at_the_end, Running(MemStore(), served) as running:
        connection = open_at_the_end.enter_context(running.connect())
        connection.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert "cut off" not in caplog.text


def test_a_unix_socket_is_for_its_owner(tmp_path):
    path = tmp_path / "api.sock"
    with Running(MemStore(), address=f"unix:{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /api/v1/healthz HTTP/1.0\r\nHost: x\r\n\r\n")
            assert everything(connection).endswith(b"ok")
        with pytest.raises(ConfigurationError, match="somebody else"):
            serve(MemStore(), address=f"unix:{path}", environ={})
    assert not path.exists()


def test_a_socket_that_others_can_write_needs_a_hook(tmp_path):
    address = f"unix:{tmp_path}/api.sock"
    with pytest.raises(ConfigurationError, match="can be reached by others"):
        serve(MemStore(), address=address, socket_mode=0o660, environ={})


def test_a_socket_file_that_a_killed_server_left_is_replaced(tmp_path):
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with Running(MemStore(), address=f"unix:{path}"):
        assert path.is_socket()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="cannot listen"):
        serve(MemStore(), address=f"unix:{path}", environ={})
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "[::]:0", ":0", "10.0.0.1:0", "example.test:0"]
)
def test_an_address_that_others_reach_needs_a_hook(address):
    with pytest.raises(ConfigurationError, match="can be reached by others"):
        serve(MemStore(), address=address, environ={})
    with pytest.raises(ConfigurationError, match="can be reached by others"):
        serve(MemStore(), environ={"HEADGATE_API_ADDR": address})


def test_with_a_token_any_address_will_do():
    environ = {"HEADGATE_API_TOKEN": TOKEN}
    with Running(MemStore(), address="0.0.0.0:0", environ=environ) as running:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": f"Bearer {TOKEN}"}, 200),
            ({"Authorization": f"Bearer {TOKEN}", "Host": "any.test"}, 200),
        ):
            assert running.request("GET", "/jobs", headers=headers)[0].status == status


def test_read_only_mode_comes_from_the_environment():
    with Running(MemStore(), environ={"HEADGATE_READ_ONLY": "1"}) as running:
        assert running.request("POST", "/jobs")[0].status == 403
    with pytest.raises(ConfigurationError, match="HEADGATE_READ_ONLY"):
        serve(MemStore(), environ={"HEADGATE_READ_ONLY": "yes"})


@pytest.mark.parametrize(
    "text",
    ["", "8091", "host", "host:", "host:99999", "::1:80", "unix:", "unix:x", "a:１"],
)
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ConfigurationError, match="address is"):
        read_address(text)


@pytest.mark.parametrize(
    "auth", ["x", "no_such_module:hook", "json:none", "json:__name__"]
)
def test_a_hook_that_is_not_there_is_refused(auth):
    with pytest.raises(ConfigurationError, match="auth is"):
        serve(MemStore(), auth=auth, environ={})


def test_a_port_that_is_taken_is_said_to_be():
    taken = pytest.raises(ConfigurationError, match="cannot listen")
    with Running(MemStore()) as running, taken:
        serve(MemStore(), address=str(running.address), environ={})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("LocalHost", True),
     ("0.0.0.0", False), ("", False), ("localhost.evil.test", False), ("0", False),
     ("127.1", False), ("::ffff:8.8.8.8", False)],
)  # fmt: skip
def test_which_hosts_are_this_machine(host, loopback):
    assert is_loopback(host) is loopback


# The command


def command(*arguments, **environ):
    return subprocess.Popen(
        [sys.executable, "-m", "headgate_sync", "api", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


def test_the_command_refuses_an_open_address_with_code_2():
    url = "postgresql://u:hunter2-canary@127.0.0.1:1/x"
    process = command(HEADGATE_API_ADDR="0.0.0.0:8091", HEADGATE_DATABASE_URL=url)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "can be reached by others" in err
    assert "hunter2" not in out + err


@pytest.mark.parametrize("place", ["the variable", "the option"])
def test_the_command_serves_until_a_signal(database_url, postgres, place):
    postgres.reset()
    words, named = ["--address", "127.0.0.1:0"], database_url
    if place == "the option":
        words += ["--database-url", database_url]
        named = "postgresql://127.0.0.1:1/none"
    process = command(*words, HEADGATE_DATABASE_URL=named)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listens on" in line:
                break
        assert "the control API listens on http://127.0.0.1:" in lines[-1]
        port = int(lines[-1].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        connection.request("GET", "/api/v1/readyz")
        assert connection.getresponse().read() == b"ready"
        connection.close()
    finally:
        process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, rest
    assert database_url not in "".join(lines) + rest
