"""The WSGI application: the layers that every request passes, outermost first."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from attrs import evolve
from werkzeug.exceptions import HTTPException
from werkzeug.wsgi import get_content_length, get_input_stream

from headgate_sync.api.answers import (
    Answer,
    HttpError,
    no_content,
    of_error,
    of_http_error,
)
from headgate_sync.api.auth import READING, check_access, check_site, identified
from headgate_sync.api.config import ApiConfig
from headgate_sync.api.limiter import Limiter
from headgate_sync.api.live import Hub
from headgate_sync.api.routes import ROUTES
from headgate_sync.api.routing import (
    Call,
    Found,
    Route,
    Router,
    Seed,
    route_key,
    segments_of,
)
from headgate_sync.api.shapes import read_body, read_query
from headgate_sync.api.shared import SharedAnswers
from headgate_sync.api.source import Source
from headgate_sync.app import Headgate
from headgate_sync.errors import StoreError
from headgate_sync.idempotency import ClaimStatus, StoredAnswer, check_key
from headgate_sync.identity import Identity
from headgate_sync.store import Store

logger = logging.getLogger(__name__)
access = logging.getLogger("headgate_sync.api.access")

_PIECE_BYTES = 65_536
# Set by the console for the reads of a page, which has passed the door itself; no
# header of a request can become this name.
WITHIN = "headgate_sync.api.within"
KEYED = frozenset({"POST", "PUT", "DELETE"})
_NO_STORE = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))
_REASONS = {
    200: "OK", 201: "Created", 202: "Accepted", 204: "No Content", 400: "Bad Request",
    401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    409: "Conflict", 413: "Content Too Large", 415: "Unsupported Media Type",
    422: "Unprocessable Content", 423: "Locked", 429: "Too Many Requests",
    500: "Internal Server Error", 501: "Not Implemented", 503: "Service Unavailable",
}  # fmt: skip


class ControlApi:
    """A WSGI callable over a store; see `create_app`."""

    def __init__(self, store: Store | Headgate, config: ApiConfig) -> None:
        self._config = config
        self._source = Source(store, config)
        self._router = Router(ROUTES)
        self._hub = Hub(config.live, lambda: self._source.store.notifying)
        self._shared = SharedAnswers(config.share_ms) if config.share_ms else None
        self._limiter = (
            None if config.rate_limit is None else Limiter(config.rate_limit)
        )
        if config.authenticate is None:
            logger.info(
                "the control API has no authentication hook: whoever reaches it may do "
                "everything, but for what an application in front of it refuses"
            )

    def close(self) -> None:
        """End the streams and the thread behind them; the store stays open."""
        self._hub.close()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer one request."""
        started_ns = time.monotonic_ns()
        request = _Request(environ)
        try:
            answer = self._answered(request)
        except Exception as error:
            answer = of_http_error(of_error(error))
        _log(request, answer.status, time.monotonic_ns() - started_ns)
        return _sent(answer, request.method, start_response)

    def _answered(self, request: _Request) -> Answer:
        segments = segments_of(request.environ)
        found = request.found = self._router.find(request.method, segments)
        route = found.route
        if route is None or route.guarded:
            self._let_in(request)
        body = b""
        if request.method in KEYED:
            self._check_key(request)
            body = _body_of(request.environ, self._config.max_body_bytes)
        if not found.methods:
            raise HttpError(404, "not found")
        if request.method == "OPTIONS":
            return no_content(Allow=_allow(found))
        if route is None:
            allow = {"Allow": _allow(found)}
            raise HttpError(405, "method not allowed", headers=allow)
        assert segments is not None
        call = Call(
            source=self._source,
            config=self._config,
            hub=self._hub,
            routes=self._router.routes,
            mount=request.environ.get("SCRIPT_NAME", ""),
            method=request.method,
            identity=request.identity,
            path=found.values,
            body=_fields_of(request.environ, route, body),
            # What a probe adds of its own must not make a good process look bad.
            query=read_query(_query_of(request.environ), route.query)
            if route.guarded
            else {},
        )
        if route.mutates:
            name = route_key(route.method, segments)
            answer = self._once(request, route, name, call, body)
            if self._shared is not None:
                self._shared.forget()
        elif route.shared and self._shared is not None:
            return self._shared.get(
                self._key_of(route, call.path, call.query),
                lambda: self._looked(route, call),
                anew=_wants_anew(request.environ),
            )
        elif route.reads_store:
            return self._looked(route, call)
        else:
            return route.run(call)
        return self._timed(answer)

    def _looked(self, route: Route, call: Call) -> Answer:
        """What a look answers, with the store's time, also to what is not there."""
        try:
            answer = route.run(call)
        except Exception as error:
            answer = of_http_error(of_error(error))
        return self._timed(answer)

    def _let_in(self, request: _Request) -> None:
        """Authentication, permission, and the sender's own rate."""
        address = f"address {request.environ.get('REMOTE_ADDR', '')}"
        try:
            request.identity = identified(self._config, request.environ)
        except HttpError:
            self._limit(address)  # guesses of a token are counted too
            raise
        check_access(
            self._config, request.identity, request.method, request.found.template
        )
        route = request.found.route
        if request.method not in READING or (route and route.path == "/events"):
            check_site(request.environ)
        identity = request.identity
        if not self._is_free(request):
            self._limit(address if identity is None else f"identity {identity.subject}")

    def _is_free(self, request: _Request) -> bool:
        """A part of a page that costs the store nothing costs its reader nothing."""
        found, environ = request.found, request.environ
        if self._shared is None or found.route is None or not found.route.shared:
            return False
        if WITHIN not in environ or _wants_anew(environ):
            return False
        try:
            query = read_query(_query_of(environ), found.route.query)
        except HttpError:
            return False  # and is refused as such
        return self._shared.holds(self._key_of(found.route, found.values, query))

    def _key_of(
        self, route: Route, path: Mapping[str, str], query: Mapping[str, Any]
    ) -> Hashable:
        # A test may put another store in the place of the application's for a while.
        store = id(self._source.store)
        asked = tuple(sorted(query.items()))
        return store, route.path, tuple(path.values()), asked

    def _limit(self, sender: str) -> None:
        wait_ms = 0 if self._limiter is None else self._limiter.take(sender)
        if wait_ms:
            seconds = str(-(-wait_ms // 1000))
            raise HttpError(
                429,
                "too many requests",
                retry_after_ms=wait_ms,
                headers={"Retry-After": seconds},
            )

    def _check_key(self, request: _Request) -> None:
        key = request.environ.get("HTTP_IDEMPOTENCY_KEY")
        if key is None:
            raise HttpError(
                400, "Idempotency-Key header is required on every mutating request"
            )
        request.key = check_key(key)

    def _once(
        self, request: _Request, route: Route, name: str, call: Call, body: bytes
    ) -> Answer:
        """Run a request that changes something, unless its key has an answer."""
        keys = self._source.idempotency
        sha256 = _request_sha256(request, body)
        ttl_ms = self._config.idempotency_ttl_ms
        claim = keys.claim_key(name, request.key, sha256, ttl_ms)
        if claim.status is ClaimStatus.OTHER:
            raise HttpError(422, "idempotency key was used for a different request")
        if claim.status is ClaimStatus.BUSY:
            raise HttpError(
                409,
                "request with this idempotency key is in progress",
                headers={"Retry-After": "1"},
            )
        if claim.answer is not None:
            return _replayed(claim.answer, route)
        try:
            answer = route.run(evolve(call, seed=Seed(name, request.key, claim)))
        except Exception as error:
            answer = of_http_error(of_error(error))
        try:
            # What may succeed in a moment is not kept: the same key must do it then.
            if answer.status >= 500 or answer.status == 429:
                keys.drop_key(name, request.key, claim)
            else:
                keys.finish_key(name, request.key, claim, _kept(answer))
        except StoreError as error:
            # The change is made, or the refusal is told; the key is free in a minute.
            logger.warning("could not keep the answer of %s: %s", name, error)
        return answer

    def _timed(self, answer: Answer) -> Answer:
        """The answer with the store's time: a reader need not trust its own clock."""
        if answer.status >= 500:
            return answer
        try:
            now_ms = self._source.inspect.store_now_ms()
        except StoreError:  # what was asked for is there all the same
            return answer
        headers = {**answer.headers, "x-store-now-ms": str(now_ms)}
        return evolve(answer, headers=headers)


class _Request:
    """What is known of a request so far, also when a layer refused it."""

    def __init__(self, environ: dict[str, Any]) -> None:
        self.environ = environ
        self.method: str = environ["REQUEST_METHOD"]
        self.found = Found(None, {}, "", ())
        self.identity: Identity | None = None
        self.key = ""


def _wants_anew(environ: Mapping[str, Any]) -> bool:
    return "no-cache" in environ.get("HTTP_CACHE_CONTROL", "").lower()


def _allow(found: Found) -> str:
    methods = {*found.methods, "OPTIONS"}
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


def _body_of(environ: dict[str, Any], limit: int) -> bytes:
    """The body, of which no more than the limit is ever read or kept."""
    announced = get_content_length(environ)
    if announced is not None and announced > limit:
        raise HttpError(413, f"request body exceeds {limit} bytes")
    body = bytearray()
    try:
        stream = get_input_stream(environ)
        while len(body) <= limit and (piece := stream.read(_PIECE_BYTES)):
            body += piece
    except (HTTPException, OSError):
        raise HttpError(400, "the request body ended early") from None
    if len(body) > limit:
        raise HttpError(413, f"request body exceeds {limit} bytes")
    if announced is not None and len(body) < announced:
        raise HttpError(400, "the request body ended early")
    return bytes(body)


def _fields_of(environ: dict[str, Any], route: Route, body: bytes) -> dict[str, Any]:
    if route.body is None:
        return {}
    media = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise HttpError(415, "expected Content-Type: application/json")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise HttpError(400, "bad json") from None
    if not isinstance(value, dict):
        raise HttpError(422, "invalid request body: expected an object")
    return read_body(value, route.body)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _query_of(environ: dict[str, Any]) -> Mapping[str, str]:
    """The parameters; of repeated ones the last counts."""
    raw = environ.get("QUERY_STRING", "")
    try:
        return dict(
            parse_qsl(
                raw.encode("latin-1").decode(),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=100,
            )
        )
    except ValueError:
        raise HttpError(400, "invalid query string") from None


def _request_sha256(request: _Request, body: bytes) -> str:
    """What makes two requests under one key the same; the sender is part of it."""
    identity = request.identity
    parts = (
        request.method,
        request.environ.get("QUERY_STRING", ""),
        "" if identity is None else identity.subject,
    )
    digest = hashlib.sha256(json.dumps(parts).encode())
    digest.update(body)
    return digest.hexdigest()


def _kept(answer: Answer) -> StoredAnswer:
    headers = json.dumps([answer.content_type, dict(answer.headers)])
    return StoredAnswer(status=answer.status, headers=headers, body=answer.body or b"")


def _replayed(kept: StoredAnswer, route: Route) -> Answer:
    content_type, headers = json.loads(kept.headers)
    body: bytes | None = kept.body if kept.status != 204 else None
    if route.replays and kept.status < 300:
        told = {**json.loads(kept.body), "replayed": True}
        body = json.dumps(told, separators=(",", ":")).encode()
    return Answer(
        status=kept.status,
        body=body,
        content_type=content_type,
        headers={**headers, "Idempotency-Replayed": "true"},
    )


def _sent(
    answer: Answer, method: str, start_response: Callable[..., Any]
) -> Iterable[bytes]:
    headers = [*answer.headers.items(), *_NO_STORE]
    if answer.content_type is not None:
        headers.append(("Content-Type", answer.content_type))
    if answer.body is not None:
        headers.append(("Content-Length", str(len(answer.body))))
    start_response(f"{answer.status} {_REASONS[answer.status]}", headers)
    if method == "HEAD":
        return []
    if answer.stream is not None:
        return answer.stream
    return [] if answer.body is None else [answer.body]


def _log(request: _Request, status: int, took_ns: int) -> None:
    """One line; a sender can smuggle neither a secret nor a line break into it.

    The parts of a page are one request to whoever reads the log.
    """
    level = logging.DEBUG if WITHIN in request.environ else logging.INFO
    if not access.isEnabledFor(level):
        return
    identity = request.identity
    access.log(
        level,
        "%s %s %d %d ms %s%s",
        request.method if request.method.isalpha() else "-",
        request.found.template or "-",
        status,
        took_ns // 1_000_000,
        "-" if identity is None else ascii(identity.subject),
        _limit_of(request.environ),
    )


def _limit_of(environ: Mapping[str, Any]) -> str:
    for pair in environ.get("QUERY_STRING", "").split("&"):
        name, _, value = pair.partition("=")
        if name == "limit" and value.isascii() and value.isdigit() and len(value) < 10:
            return f" limit={value}"
    return ""


def create_app(store: Store | Headgate, config: ApiConfig | None = None) -> ControlApi:
    """Make the control API, to be served alone or below a prefix of another app.

    Makes no connection and starts no thread before the first request. Beside a
    `Headgate` that was made from a URL it has a small pool of its own; a `Store` is
    used as it is.

    Args:
        store: what is looked at and steered.
        config: None is `ApiConfig()`: everybody who reaches it may use it.
    """
    return ControlApi(store, ApiConfig() if config is None else config)
