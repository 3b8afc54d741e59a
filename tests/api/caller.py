"""Calls the control API the way a program does, without a socket."""

from __future__ import annotations

import base64
import itertools
from typing import Any

from werkzeug.test import Client, TestResponse

from headgate_sync.api import ApiConfig, ControlApi, create_app
from headgate_sync.store import Store

BASE = "/api/v1"
_keys = itertools.count(1)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Caller:
    """Sends requests; what changes something gets a fresh key unless one is given."""

    def __init__(self, app: Any, **always: Any) -> None:
        self.app = app
        self.client = Client(app)
        self.always = always

    def get(self, path: str, **options: Any) -> TestResponse:
        return self.send("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> TestResponse:
        return self.send("POST", path, json=json, **options)

    def put(self, path: str, json: Any = None, **options: Any) -> TestResponse:
        return self.send("PUT", path, json=json, **options)

    def delete(self, path: str, **options: Any) -> TestResponse:
        return self.send("DELETE", path, **options)

    def send(
        self,
        method: str,
        path: str,
        *,
        key: str | None = "",
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> TestResponse:
        sent = {**self.always, **(headers or {})}
        if method not in ("GET", "HEAD", "OPTIONS") and key is not None:
            sent.setdefault("Idempotency-Key", key or f"key-{next(_keys)}")
        if options.get("json") is None:
            options.pop("json", None)
        return self.client.open(BASE + path, method=method, headers=sent, **options)


def caller(store: Store, **config: Any) -> Caller:
    """An API over a store, without a limit of its own unless one is given."""
    app = create_app(store, ApiConfig(**{"rate_limit": None, **config}))
    return Caller(app)


def app_of(store: Store, **config: Any) -> ControlApi:
    return create_app(store, ApiConfig(**{"rate_limit": None, **config}))


def job_body(**fields: Any) -> dict[str, Any]:
    return {"kind": "tk:msg", "payload": b64(b"ok"), "queue": "q", **fields}
