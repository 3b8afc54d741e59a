"""A network that a test can break: a relay between clients and the server."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.servers import reachable_directory

CHUNK_BYTES = 65_536


class Proxy:
    """Passes bytes both ways until it is told otherwise.

    Attributes:
        conninfo: leads to the server through here.
        silent: swallow everything in both directions, as a dead network does.
        lingers: hold back from clients that the server has hung up.
        answers: called with what the server sent; returns what is passed on.
        accepted: how many connections came so far.
    """

    def __init__(self, conninfo: str, directory: Path) -> None:
        params = conninfo_to_dict(conninfo)
        port = str(params.get("port") or 5432)
        self._server = f"{params['host']}/.s.PGSQL.{port}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / f".s.PGSQL.{port}"))
        self._listener.listen(64)
        self.conninfo = make_conninfo(conninfo, host=str(directory))
        self.silent = False
        self.lingers = False
        self.answers: Callable[[bytes], bytes] = bytes
        self.accepted = 0
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break all connections of this moment."""
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop, and wait for the threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in [*self._sockets, self._listener]:
            end.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            self.accepted += 1
            try:
                server.connect(self._server)
            except OSError:  # it is away, which the client may see, too
                client.close()
                server.close()
                continue
            self._sockets += [client, server]
            thread = threading.Thread(target=self._relay, args=(client, server))
            self._threads.append(thread)
            thread.start()

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        ends = {client: server, server: client}
        with contextlib.suppress(OSError):
            while not self._closed:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(CHUNK_BYTES)
                    if not data:
                        if end is server and self.lingers:
                            select.select([client], [], [])
                        return self._end(client, server)
                    if self.silent:
                        continue
                    ends[end].sendall(self.answers(data) if end is server else data)
        return self._end(client, server)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy_to(conninfo: str) -> Iterator[Proxy]:
    """Yield a proxy to the server of a conninfo, which must name a unix socket."""
    with reachable_directory() as directory:
        proxy = Proxy(conninfo, directory)
        try:
            yield proxy
        finally:
            proxy.close()


def without_messages(kind: bytes, data: bytes) -> bytes:
    """Remove the messages of one type from whole messages of the server."""
    kept = b""
    while data:
        (length,) = struct.unpack_from(">I", data, 1)
        if data[:1] != kind:
            kept += data[: length + 1]
        data = data[length + 1 :]
    return kept
