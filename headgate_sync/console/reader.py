"""Reading from the control API inside the process, in the name of who asks."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from headgate_sync.api import ControlApi
from headgate_sync.api.routing import BASE

# What a page can do without: not allowed, not there, or not kept by this store.
_WITHOUT = frozenset({403, 404, 501})
_LEFT_OUT = ("CONTENT_LENGTH", "CONTENT_TYPE", "HTTP_IDEMPOTENCY_KEY", "RAW_URI")


class Refused(Exception):
    """The API did not answer what was asked.

    Attributes:
        status: of its answer.
        message: written for the reader of a page.
        headers: of its answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers


class Reader:
    """Sends GET requests to the API as the browser would, with the same environment.

    Args:
        api: the WSGI application below the same mount.
        environ: of the request for the page: address, headers and identity are those
            of whoever looks.
    """

    def __init__(self, api: ControlApi, environ: dict[str, Any]) -> None:
        self._api = api
        self._environ = {k: v for k, v in environ.items() if k not in _LEFT_OUT}
        self._headers: dict[str, str] = {}
        self.now_ms = 0
        """Store time of the newest answer."""

    def get(self, *segments: str, **query: object) -> Any:
        """The JSON that a path answers; None as a parameter leaves it out.

        Raises:
            Refused: any status but 200.
        """
        asked = {name: _text(v) for name, v in query.items() if v is not None}
        path = BASE + "".join(f"/{quote(segment, safe='')}" for segment in segments)
        plain = BASE + "".join(f"/{segment}" for segment in segments)
        mount = self._environ.get("SCRIPT_NAME", "")
        told: dict[str, Any] = {}

        def start_response(status: str, headers: list[tuple[str, str]]) -> None:
            told["status"] = int(status.partition(" ")[0])
            self._headers = {name.lower(): value for name, value in headers}

        environ = {
            **self._environ,
            "REQUEST_METHOD": "GET",
            "PATH_INFO": plain.encode().decode("latin-1"),
            "REQUEST_URI": quote(mount.encode("latin-1")) + path,
            "QUERY_STRING": urlencode(asked),
            "wsgi.input": io.BytesIO(),
        }
        body = json.loads(b"".join(self._api(environ, start_response)))
        if told["status"] != 200:
            raise Refused(told["status"], body["error"], self._headers)
        # An answer that others share may be older than the one before.
        told_ms = int(self._headers.get("x-store-now-ms", 0))
        self.now_ms = max(self.now_ms, told_ms)
        return body

    def maybe(self, *segments: str, **query: object) -> Any:
        """The same, or None for what is not allowed, not there or not supported.

        Raises:
            Refused: any other trouble.
        """
        try:
            return self.get(*segments, **query)
        except Refused as refused:
            if refused.status in _WITHOUT:
                return None
            raise

    @property
    def next_cursor(self) -> str | None:
        """Where the list that was read last goes on; None at its end."""
        return self._headers.get("x-next-cursor")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
