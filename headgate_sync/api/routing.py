"""Routes as data, and how a path finds one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes

from attrs import Factory, field, frozen

from headgate_sync.api.answers import Answer, HttpError
from headgate_sync.api.shapes import Given, Out
from headgate_sync.idempotency import MAX_ROUTE_BYTES, KeyClaim
from headgate_sync.identity import Identity
from headgate_sync.ids import encode_ulid

if TYPE_CHECKING:
    from headgate_sync.api.config import ApiConfig
    from headgate_sync.api.live import Hub
    from headgate_sync.api.source import Source
    from headgate_sync.inspection import Inspect

BASE = "/api/v1"
_ORIGIN = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://[^/]*")


@frozen(kw_only=True)
class Call:
    """A request that passed every check, on its way to the function of its route.

    Attributes:
        path, query, body: by name, of the types that the route declares.
        seed: of a request that changes something; equal for a repeat of it.
    """

    source: Source
    config: ApiConfig
    hub: Hub
    routes: tuple[Route, ...]
    mount: str
    method: str
    identity: Identity | None
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Mapping[str, Any]
    seed: Seed | None = None

    @property
    def inspect(self) -> Inspect:
        """The inspection of the store; `Unsupported` without one."""
        return self.source.inspect

    def new_id(self) -> str:
        """An id for what the request makes: the same when it was cut off and repeated.

        So the store recognises what the first try made.
        """
        assert self.seed is not None
        return self.seed.ulid()


@frozen
class Seed:
    """What a repeated request has in common with the first: route, key, its birth."""

    route: str
    key: str
    claim: KeyClaim

    def ulid(self) -> str:
        """An id that only this request has."""
        at_ms = self.claim.created_at_ms
        text = f"{self.route}\n{self.key}\n{at_ms}"
        digest = hashlib.sha256(text.encode()).digest()
        return encode_ulid(at_ms & (1 << 48) - 1, int.from_bytes(digest[:10], "big"))


@frozen(kw_only=True)
class Route:
    """One method of one path: what it takes, what it does, what it answers.

    Attributes:
        path: below the base; `{name}` stands for one segment, never an empty one.
        summary: one line for the documentation.
        answers: the type of a success; None has no body.
        also: further statuses of a success, with their types.
        media: another type than JSON.
        errors: statuses that are not those of every route.
        guarded: authentication and limits apply.
        reads_store: the answer carries the store's time.
        replays: a repeated answer says so in its body.
        shared: equal requests of one moment may get one answer: it is about the whole,
            and the same for everybody who may ask.
        segments: the parts of the path.
    """

    method: str
    path: str
    run: Callable[[Call], Answer]
    summary: str
    query: tuple[Given, ...] = ()
    body: tuple[Given, ...] | None = None
    status: int = 200
    answers: Out | None = None
    also: Mapping[int, Out | None] = field(factory=dict)
    headers: Mapping[str, str] = field(factory=dict)
    media: str = "application/json"
    errors: tuple[int, ...] = ()
    guarded: bool = True
    reads_store: bool = True
    replays: bool = False
    shared: bool = False
    segments: tuple[str, ...] = field(
        init=False,
        default=Factory(lambda self: tuple(self.path.split("/")[1:]), takes_self=True),
    )

    @property
    def variables(self) -> tuple[str, ...]:
        """The names in the path."""
        return tuple(s[1:-1] for s in self.segments if s.startswith("{"))

    @property
    def mutates(self) -> bool:
        """It changes something, and so needs a key."""
        return self.method not in ("GET", "HEAD", "OPTIONS")

    def match(self, segments: tuple[str, ...]) -> dict[str, str] | None:
        """The values of the path, or None for another path."""
        own = self.segments
        if len(own) != len(segments):
            return None
        values: dict[str, str] = {}
        for wanted, given in zip(own, segments, strict=True):
            if wanted.startswith("{"):
                if not given:
                    return None
                values[wanted[1:-1]] = given
            elif wanted != given:
                return None
        return values


@frozen
class Found:
    """What stands at a path: the route of the method, and all methods there are."""

    route: Route | None
    values: Mapping[str, str]
    template: str
    methods: tuple[str, ...]


class Router:
    """Finds routes; a path that is written out wins over one with a name in it."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        # By length and first segment, which is always written out.
        self._ordered: dict[tuple[int, str], list[Route]] = {}
        for route in sorted(self.routes, key=lambda route: len(route.variables)):
            key = len(route.segments), route.segments[0]
            self._ordered.setdefault(key, []).append(route)

    def find(self, method: str, segments: tuple[str, ...] | None) -> Found:
        """What a request means; HEAD is answered by GET."""
        wanted = "GET" if method == "HEAD" else method
        near = self._ordered.get((len(segments), segments[0]), ()) if segments else ()
        matches = [
            (route, values)
            for route in near
            if segments and (values := route.match(segments)) is not None
        ]
        if not matches:
            return Found(None, {}, "", ())
        methods = tuple(dict.fromkeys(route.method for route, _ in matches))
        for route, values in matches:
            if route.method == wanted:
                return Found(route, values, route.path, methods)
        return Found(None, {}, matches[0][0].path, methods)


def segments_of(environ: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The segments of a request below the base, each decoded once; None outside of it.

    Servers decode the path before they pass it on, and then a slash within a name looks
    like one between two. Where the server tells the path as it was sent, and it says
    the same otherwise, that is used.

    Raises:
        HttpError: 400, bytes that are no UTF-8.
    """
    mount = environ.get("SCRIPT_NAME", "")
    decoded = mount + environ.get("PATH_INFO", "")
    raw = environ.get("REQUEST_URI") or environ.get("RAW_URI") or ""
    raw = _ORIGIN.sub("", raw).partition("?")[0].partition("#")[0]
    if unquote_to_bytes(raw).decode("latin-1") == decoded:
        parts = [unquote_to_bytes(part) for part in raw.split("/")]
        parts = parts[mount.count("/") + 1 :]
    else:
        path = environ.get("PATH_INFO", "")
        parts = [part.encode("latin-1") for part in path.split("/")[1:]]
    try:
        texts = tuple(part.decode() for part in parts)
    except UnicodeDecodeError:
        raise HttpError(400, "the path is not UTF-8") from None
    base = tuple(BASE.split("/")[1:])
    return texts[len(base) :] if texts[: len(base)] == base else None


def route_key(method: str, segments: Iterable[str]) -> str:
    """A name for what is called, with the values of the path in it."""
    path = "/".join(quote(segment, safe="") for segment in segments)
    text = f"{method} /{path}"
    if len(text) > MAX_ROUTE_BYTES:
        return f"{method} {hashlib.sha256(path.encode()).hexdigest()}"
    return text
