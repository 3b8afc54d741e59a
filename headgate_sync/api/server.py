"""The standalone server of the control API, safe to start without thinking."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from attrs import evolve, frozen

from headgate_sync.api.answers import HttpError, of_http_error
from headgate_sync.api.app import create_app
from headgate_sync.api.auth import READ_TOKEN, TOKEN, TokenAuth
from headgate_sync.api.config import ApiConfig, Authenticate
from headgate_sync.app import Headgate
from headgate_sync.errors import ConfigurationError, MissingExtra
from headgate_sync.store import Store

try:
    from waitress import wasyncore
    from waitress.channel import HTTPChannel
    from waitress.server import create_server
except ModuleNotFoundError as error:
    raise MissingExtra(
        "the standalone server needs waitress: pip install 'headgate_sync[api]'"
    ) from error

logger = logging.getLogger(__name__)

ADDRESS = "HEADGATE_API_ADDR"
READ_ONLY = "HEADGATE_READ_ONLY"
DEFAULT_ADDRESS = "127.0.0.1:8091"
DEFAULT_THREADS = 32
# A request has to arrive within this time as a whole, however small its pieces are; and
# so long may a client take nothing of its answer, or say nothing after it.
PATIENCE_S = 30.0
MAX_CONNECTIONS = 1_000
MAX_HEADER_BYTES = 65_536
# What is read of a body beyond what the application takes, so that its sender gets to
# see the answer that says so.
SPARE_BODY_BYTES = 8_388_608
# Bodies are kept before anybody is asked who sends them.
MAX_ARRIVING_BYTES = 67_108_864
# So much of an answer may wait for its client before its thread waits as well.
MAX_UNSENT_BYTES = 1_048_576
# How long requests that are being answered have when the server ends.
DRAIN_S = 10.0
_TURN_S = 0.2
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@frozen(kw_only=True)
class Address:
    """Where a server listens: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""
    mode: int = 0o600

    @property
    def is_private(self) -> bool:
        """Only this machine, or only this user, reaches it."""
        if self.path:
            return not self.mode & _OTHERS_WRITE
        return is_loopback(self.host)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone, as far as its text says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_address(text: str, *, socket_mode: int = 0o600) -> Address:
    """Read `host:port`, `[::1]:port` or `unix:/path`.

    Raises:
        ConfigurationError: none of them.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise ConfigurationError(f"address is {text!r}, expected unix:/path")
        return Address(path=path, mode=socket_mode)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    good = colon and port.isascii() and port.isdigit() and int(port) <= 65_535
    if not good or (":" in host and not bracketed):
        raise ConfigurationError(
            f"address is {text!r}, expected host:port or unix:/path"
        )
    return Address(host=host, port=int(port))


def hook_of(
    auth: str | Authenticate | None, environ: Mapping[str, str] = os.environ
) -> Authenticate | None:
    """The hook that a command line or the environment asks for.

    Args:
        auth: `module:callable`, a hook, or None for the tokens of the environment.
        environ: of the process.

    Raises:
        ConfigurationError: there is no such hook, or a token is too short.
    """
    if auth is None:
        return TokenAuth.from_env(environ)
    if not isinstance(auth, str):
        return auth
    module_name, _, attribute = auth.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(f"auth is {auth!r}, expected module:callable")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"auth is {auth!r}: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"auth is {auth!r}, which cannot be called")
    hook: Authenticate = found
    return hook


def check_exposure(address: Address, *, authenticated: bool) -> None:
    """Refuse to let others in whom nobody asks who they are.

    Raises:
        ConfigurationError: the address is not private and there is no hook.
    """
    if not authenticated and not address.is_private:
        raise ConfigurationError(
            f"{address} can be reached by others: set {TOKEN} or {READ_TOKEN}, or give "
            "an authentication hook with --auth module:callable"
        )


def serve(
    store: Store | Headgate,
    *,
    address: str | None = None,
    auth: str | Authenticate | None = None,
    read_only: bool | None = None,
    config: ApiConfig | None = None,
    socket_mode: int = 0o600,
    threads: int = DEFAULT_THREADS,
    environ: Mapping[str, str] = os.environ,
    listening: Callable[[Address], object] | None = None,
    stop: SimpleQueue[object] | None = None,
) -> int:
    """Serve the control API until SIGTERM or SIGINT.

    Args:
        store: what is looked at and steered; it stays open.
        address: `host:port` or `unix:/path`; None is HEADGATE_API_ADDR, else
            127.0.0.1:8091.
        auth: a hook or `module:callable`; None is the one of the configuration, else
            the tokens of the environment.
        read_only: None is HEADGATE_READ_ONLY, else what the configuration says.
        config: further settings.
        socket_mode: of a Unix socket.
        threads: most requests at the same time; streams get half of them at most.
        environ: of the process.
        listening: called with the address once connections are taken.
        stop: anything put into it ends the server, as a signal does.

    Returns:
        The exit code, 0.

    Raises:
        ConfigurationError: the address cannot be used, or others could reach it and no
            hook asks who they are.
    """
    return serve_made(
        lambda settings: create_app(store, settings),
        ApiConfig() if config is None else config,
        name="control API",
        address=address,
        auth=auth,
        read_only=read_only,
        socket_mode=socket_mode,
        threads=threads,
        environ=environ,
        listening=listening,
        stop=stop,
    )


class Served(Protocol):
    """A WSGI application that holds something until it is closed."""

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer a request."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


def serve_made(
    make: Callable[[ApiConfig], Served],
    settings: ApiConfig,
    *,
    name: str,
    address: str | None,
    auth: str | Authenticate | None,
    read_only: bool | None,
    socket_mode: int,
    threads: int,
    environ: Mapping[str, str],
    listening: Callable[[Address], object] | None,
    stop: SimpleQueue[object] | None,
) -> int:
    """Serve what is made of the settings that these arguments lead to; see `serve`.

    Args:
        make: called once the address is known to be safe.
        settings: of the API, which the arguments complete.
        name: what it is, for the log.
    """
    hook = hook_of(auth, environ) if auth is not None else settings.authenticate
    hook = hook_of(None, environ) if hook is None else hook
    if read_only is None:
        read_only = settings.read_only or _flag(environ, READ_ONLY)
    at = read_address(
        address or environ.get(ADDRESS) or DEFAULT_ADDRESS, socket_mode=socket_mode
    )
    check_exposure(at, authenticated=hook is not None)
    # Streams hold threads, and must leave some to everybody else.
    streams = min(settings.live.max_streams, threads // 2)
    app = make(
        evolve(
            settings,
            authenticate=hook,
            read_only=read_only,
            live=evolve(settings.live, max_streams=streams),
        )
    )
    try:
        return _serve_app(
            app,
            at,
            name=name,
            authenticated=hook is not None,
            body_bytes=settings.max_body_bytes,
            threads=threads,
            listening=listening,
            stop=stop,
        )
    finally:
        app.close()


def _serve_app(
    app: Served,
    address: Address,
    *,
    name: str,
    authenticated: bool,
    body_bytes: int,
    threads: int = DEFAULT_THREADS,
    listening: Callable[[Address], object] | None = None,
    stop: SimpleQueue[object] | None = None,
) -> int:
    """Serve at an address that was found safe, until a signal or `stop`."""
    guarded: Any = app if authenticated or address.path else _OwnHost(app)
    ending: SimpleQueue[object] = SimpleQueue() if stop is None else stop
    server = _Server(address, guarded, threads, body_bytes)
    path = Path(address.path) if address.path else None
    try:
        with _signals_to(ending):
            at = address
            if not address.path:
                at = evolve(address, port=server.port)
            logger.info(
                "the %s listens on %s%s", name, "" if address.path else "http://", at
            )
            if listening is not None:
                listening(at)
            while ending.empty():
                server.turn()
            if path is not None:  # while it is ours: a successor may make it anew
                path.unlink(missing_ok=True)
                path = None
            server.refuse()
            app.close()  # ends the streams
            if not server.drain(DRAIN_S):
                logger.warning("some requests took too long and are cut off")
    finally:
        server.close()
        if path is not None:
            path.unlink(missing_ok=True)
    return 0


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ConfigurationError(f"{name} is {text!r}, expected 0 or 1")
    return text == "1"


class _signals_to:
    """Within the block SIGTERM and SIGINT put something into a queue."""

    def __init__(self, queue: SimpleQueue[object]) -> None:
        self._queue = queue
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self._queue.put(number)


class _OwnHost:
    """Answers only requests that name this machine.

    A page of the Internet can let its own name point here and is then, for a browser,
    of the same origin as this server. Without a hook nothing else would stop it.
    """

    def __init__(self, app: Served) -> None:
        self._app = app

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        host: str = environ.get("HTTP_HOST", "")
        name = host.rpartition(":")[0] if not host.endswith("]") else host
        name = name if host.rpartition(":")[2].isdigit() else host
        if is_loopback(name.strip("[]")):
            return self._app(environ, start_response)
        answer = of_http_error(HttpError(403, "this server has another name"))
        body = answer.body or b""
        start_response(
            "403 Forbidden",
            [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
            ],
        )
        return [body]


class _Channel(HTTPChannel):  # type: ignore[misc]  # its package has no types
    """A connection, which knows for how long it has been its client's turn."""

    _arriving: object = None  # the request that had not arrived at the last look
    _arriving_since_s = 0.0
    _activity: float | None = None  # at the last look, by a clock that may be set
    _idle_since_s = 0.0

    @property
    def is_done(self) -> bool:
        """Nothing is being answered and all answers are sent."""
        return not self.requests and not self.total_outbufs_len

    def is_hung(self) -> bool:
        """It is the client's turn, and the client has had its time.

        To be looked at often, and by one thread.
        """
        now_s = time.monotonic()
        if self.requests:
            self._arriving = None  # what comes behind them is not read meanwhile
            if not self.total_outbufs_len:
                self._activity = None
                return False
        elif self.request is not self._arriving:
            self._arriving, self._arriving_since_s = self.request, now_s
        if self._activity != self.last_activity:
            self._activity, self._idle_since_s = self.last_activity, now_s
        if self._arriving is not None and now_s - self._arriving_since_s > PATIENCE_S:
            return True
        return now_s - self._idle_since_s > PATIENCE_S

    @property
    def arrived_bytes(self) -> int:
        """How much there is of a body that has not arrived as a whole."""
        return 0 if self.request is None else int(self.request.body_bytes_received)


class _Server:
    """Waitress, turn by turn: one thread moves bytes, a pool answers whole requests."""

    def __init__(
        self, address: Address, app: Any, threads: int, body_bytes: int
    ) -> None:
        try:
            listen = _unix_listener if address.path else _tcp_listener
            listener = listen(address)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {address}: {error}") from error
        self._sockets: dict[int, Any] = {}
        with listener:  # the server works on a copy
            self._server = create_server(
                app,
                map=self._sockets,
                sockets=[listener.dup()],
                threads=threads,
                ident="headgate",
                connection_limit=_most_connections(),
                max_request_header_size=MAX_HEADER_BYTES,
                max_request_body_size=body_bytes + SPARE_BODY_BYTES,
                outbuf_high_watermark=MAX_UNSENT_BYTES,
                log_socket_errors=False,  # a client that went away is nothing to report
                clear_untrusted_proxy_headers=False,  # whom to trust the hook knows
            )
        self._server.channel_class = _Channel
        self._next_look_s = 0.0

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.effective_port)

    def turn(self) -> None:
        """Move what can be moved, waiting a moment when nothing can."""
        wasyncore.loop(timeout=_TURN_S, use_poll=True, map=self._sockets, count=1)
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _TURN_S
            self._hang_up(_Channel.is_hung)
            self._make_room()

    def refuse(self) -> None:
        """Take no more connections."""
        wasyncore.dispatcher.close(self._server)

    def drain(self, within_s: float) -> bool:
        """Answer what has arrived; false when that takes longer."""
        until_s = time.monotonic() + within_s
        while True:
            self._hang_up(lambda channel: channel.is_done)
            if not self._server.active_channels:
                return True
            if time.monotonic() >= until_s:
                return False
            self.turn()

    def close(self) -> None:
        """Cut what is left."""
        self._server.task_dispatcher.shutdown(timeout=1)
        wasyncore.close_all(self._sockets)

    def _make_room(self) -> None:
        arriving = sorted(self._server.active_channels.values(), key=_arrived)
        total = sum(map(_arrived, arriving))
        while total > MAX_ARRIVING_BYTES:
            largest = arriving.pop()
            total -= largest.arrived_bytes
            largest.handle_close()

    def _hang_up(self, on: Callable[[_Channel], bool]) -> None:
        for channel in list(self._server.active_channels.values()):
            if on(channel):
                channel.handle_close()


def _arrived(channel: _Channel) -> int:
    return channel.arrived_bytes


def _most_connections() -> int:
    """As many as leave descriptors for the database, and for bodies in files."""
    try:
        import resource
    except ModuleNotFoundError:  # a system without such a limit
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(16, (soft - 64) // 2))


def _tcp_listener(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _unix_listener(address: Address) -> socket.socket:
    path = Path(address.path)
    # A socket that a killed server left; anything else is not ours to remove.
    if path.is_socket():
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with probe, suppress(OSError):
            probe.connect(address.path)
            raise ConfigurationError(f"{address} is served by somebody else")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Nobody may connect between the birth of the file and its mode.
    before = os.umask(0o177)
    try:
        listener.bind(address.path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    path.chmod(address.mode)
    listener.listen(128)
    return listener
