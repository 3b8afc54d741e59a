"""The WSGI application: pages, their assets, and the control API below them."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from attrs import evolve, frozen
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headgate_sync.api import ApiConfig, ControlApi
from headgate_sync.api.answers import HttpError
from headgate_sync.api.app import WITHIN
from headgate_sync.api.auth import check_access, identified
from headgate_sync.api.routing import BASE
from headgate_sync.app import Headgate
from headgate_sync.console import assets, charts, text, views
from headgate_sync.console.config import ConsoleConfig
from headgate_sync.console.pages import BY_PATH, PAGES, Missing, Page
from headgate_sync.console.reader import Reader, Refused
from headgate_sync.identity import Identity
from headgate_sync.loglines import LEVELS
from headgate_sync.store import Store

logger = logging.getLogger(__name__)

CSP = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", CSP),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)
_SHELL = ("Cache-Control", "no-cache")
_KEPT = ("Cache-Control", "public, max-age=31536000, immutable")
_STATIC = "/static/"
_ROBOTS = b"User-agent: *\nDisallow: /\n"
_PASSED_ON = ("www-authenticate", "retry-after")
# Set by the console for its own calls; no header of a request can become this name.
_KNOWN = "headgate_sync.console.identity"
# Set by the script for a few seconds when somebody acts, who then sees what came of it,
# whichever process answers.
_ACTED = "headgate-acted=1"
_UNSAFE = str.maketrans({c: f"\\u{ord(c):04x}" for c in "&<>\u2028\u2029"})

_EXPLAINED = {
    400: ("That cannot be shown", "The address names something that cannot exist."),
    401: ("Who are you?", "The console needs to know who looks."),
    403: ("Not for you", "Whoever runs this console keeps this page from you."),
    404: (
        "Not found",
        "If it was a job: a finished one is kept no longer than its retention says.",
    ),
    405: ("That cannot be done here", "Pages are only read."),
    429: ("Too many requests", "Wait a moment; the page will come back."),
    503: (
        "The store does not answer",
        "Nothing is lost: jobs are kept in the database, and the page looks again.",
    ),
}


@frozen(kw_only=True)
class _Reply:
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...]


class Console:
    """A WSGI callable over a store; see `create_app`."""

    def __init__(self, store: Store | Headgate, config: ConsoleConfig) -> None:
        self._config = config
        self._api = ControlApi(store, _reusing(config.api))
        self._assets = {asset.name: asset for asset in assets.load().values()}
        self._templates = _templates()

    def close(self) -> None:
        """End the streams and the thread behind them; the store stays open."""
        self._api.close()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer one request."""
        path = environ.get("PATH_INFO", "")
        if path == BASE or path.startswith(BASE + "/"):
            return self._api(environ, start_response)
        reply = self._replied(environ, path)
        reason = HTTPStatus(reply.status).phrase
        length = ("Content-Length", str(len(reply.body)))
        start_response(f"{reply.status} {reason}", [*reply.headers, length])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [reply.body]

    def _replied(self, environ: dict[str, Any], path: str) -> _Reply:
        if path.startswith(_STATIC):
            return self._asset(path.removeprefix(_STATIC))
        if path == "/robots.txt":
            return _plain(200, _ROBOTS)
        if path == "":
            where = quote(environ.get("SCRIPT_NAME", "").encode("latin-1")) + "/"
            return _plain(308, b"", ("Location", where))
        shown = _Shown(self._config, environ)
        try:
            return self._page(shown, path)
        except Refused as refused:
            return self._error(
                shown, refused.status, refused.message, headers=refused.headers
            )
        except Missing as missing:
            return self._error(shown, 400, f"missing query parameter `{missing}`")
        except Exception:
            error_id = secrets.token_hex(8)
            logger.exception("error %s of the console", error_id)
            return self._error(shown, 500, f"internal error {error_id}")

    def _page(self, shown: _Shown, path: str) -> _Reply:
        page = BY_PATH.get(path.removeprefix("/"))
        reader = Reader(self._api, shown.environ)
        # Whoever looks passes the same door as every caller of the API, guesses of a
        # token and floods of requests included.
        shown.meta, shown.now_ms = reader.get("meta"), reader.now_ms
        shown.identity = identified(self._config.api, shown.environ)
        shown.environ[_KNOWN] = shown.identity
        shown.environ[WITHIN] = True
        if page is None:
            return self._error(shown, 404, "There is no such page")
        if shown.environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return self._error(shown, 405, "method not allowed", allow="GET, HEAD")
        reader = Reader(self._api, shown.environ)
        reader.now_ms = shown.now_ms
        context = page.build(reader, shown.query)
        shown.now_ms = reader.now_ms
        return self._rendered(shown, page, page.template, context)

    def _error(
        self,
        shown: _Shown,
        status: int,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        allow: str | None = None,
    ) -> _Reply:
        title, hint = _EXPLAINED.get(status, ("Something broke", "The log says more."))
        context = {
            "message": message,
            "hint": hint,
            "status": status,
            "headline": title,
        }
        passed = tuple(
            (name.title(), value)
            for name, value in (headers or {}).items()
            if name in _PASSED_ON
        )
        allowed = () if allow is None else (("Allow", allow),)
        return self._rendered(
            shown, None, "error.html", context, more=(*passed, *allowed)
        )

    def _rendered(
        self,
        shown: _Shown,
        page: Page | None,
        template: str,
        context: Mapping[str, Any],
        *,
        more: tuple[tuple[str, str], ...] = (),
    ) -> _Reply:
        names = {**shown.names(), "page": page, "pages": PAGES, **context}
        body = self._templates.get_template(template).render(names)
        headers = (
            ("Content-Type", "text/html; charset=utf-8"),
            _SHELL,
            *_HEADERS,
            *more,
        )
        encoded = body.encode("utf-8", "replace")
        return _Reply(status=context.get("status", 200), body=encoded, headers=headers)

    def _asset(self, name: str) -> _Reply:
        asset = self._assets.get(name)
        if asset is None:
            return _plain(404, b"not found")
        kind = ("Content-Type", asset.content_type)
        return _Reply(status=200, body=asset.body, headers=(kind, _KEPT, *_HEADERS))


class _Shown:
    """One request for a page: who looks, at what, and what the templates may ask."""

    def __init__(self, config: ConsoleConfig, environ: dict[str, Any]) -> None:
        self._config = config
        self.environ = dict(environ)
        self.environ.pop(_KNOWN, None)
        if _ACTED in environ.get("HTTP_COOKIE", "").replace(" ", "").split(";"):
            self.environ["HTTP_CACHE_CONTROL"] = "no-cache"
        self.identity: Identity | None = None
        self.meta: Mapping[str, Any] | None = None
        self.now_ms = 0
        raw = environ.get("QUERY_STRING", "").encode("latin-1")
        pairs = parse_qsl(raw.decode("utf-8", "replace"), keep_blank_values=True)
        self.query = dict(pairs)
        self.root = quote(environ.get("SCRIPT_NAME", "").encode("latin-1"))

    def names(self) -> dict[str, Any]:
        """What every template sees."""
        read_only = self.meta is None or not self.may("POST", "/jobs/actions")
        settings = {
            "apiBase": self.root + BASE,
            "readOnly": read_only,
            "streams": self._config.api.live.max_streams > 0,
            "nowMs": self.now_ms,
        }
        return {
            "title": self._config.title,
            "root": self.root,
            "query": self.query,
            "meta": self.meta,
            "identity": self.identity,
            "read_only": read_only,
            "now_ms": self.now_ms,
            "may": self.may,
            "url": self.url,
            "here": self.here,
            "api": self.api_path,
            "ago": lambda at_ms: text.relative(at_ms, self.now_ms),
            "settings": _script_safe(settings),
        }

    def may(self, method: str, template: str) -> bool:
        """Whether who looks could do this; the API refuses it anyway if not."""
        try:
            check_access(self._config.api, self.identity, method, template)
        except HttpError:
            return False
        return True

    def url(self, page: str, **query: object) -> str:
        """The address of a page."""
        given = {k: v for k, v in query.items() if v not in (None, "")}
        asked = urlencode(given, errors="replace")
        return f"{self.root}/{page}" + (f"?{asked}" if asked else "")

    def here(self, page: str, **changes: object) -> str:
        """The address of this page with other parameters."""
        return self.url(page, **{**self.query, **changes})

    def api_path(self, *segments: str) -> str:
        """A path of the API below its base, for the script."""
        return "".join(
            f"/{quote(segment, safe='', errors='replace')}" for segment in segments
        )


def _reusing(config: ApiConfig) -> ApiConfig:
    """The same settings, asking the hook once for a page, not for each part."""
    hook = config.authenticate
    if hook is None:
        return config

    def authenticate(environ: dict[str, Any]) -> Identity | None:
        known: Identity | None = environ.get(_KNOWN)
        return hook(environ) if known is None else known

    challenge = getattr(hook, "challenge", None)
    if challenge is not None:
        authenticate.challenge = challenge  # type: ignore[attr-defined]
    return evolve(config, authenticate=authenticate)


def _script_safe(value: object) -> Markup:
    """JSON that may stand inside a script element."""
    return Markup(json.dumps(value).translate(_UNSAFE))


def _plain(status: int, body: bytes, *headers: tuple[str, str]) -> _Reply:
    kind = ("Content-Type", "text/plain; charset=utf-8")
    return _Reply(status=status, body=body, headers=(kind, _SHELL, *_HEADERS, *headers))


@cache
def _templates() -> Environment:
    """The templates, compiled once in a process: they know nothing of a console."""
    known = assets.load()
    made = Environment(
        loader=PackageLoader("headgate_sync.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        duration=text.duration,
        instant=text.instant,
        number=text.number,
        counted=text.counted,
        rate=text.rate,
        size=text.size,
        percent=text.percent,
        per=text.per,
        visible=text.visible,
        json=lambda value: json.dumps(value),
    )
    made.globals.update(
        asset=lambda name: known[name].name,
        drain=views.drain,
        state_counts=views.state_counts,
        figure=views.figure,
        ranges=list(charts.RANGES),
        log_levels=LEVELS,
    )
    return made


def create_app(store: Store | Headgate, config: ConsoleConfig | None = None) -> Console:
    """Make the console, with the control API below `/api/v1` of the same mount.

    Makes no connection and starts no thread before the first request. Can be served
    alone, or below any prefix of another application.

    Args:
        store: what is looked at and steered; beside a `Headgate` that was made from a
            URL the console has a small pool of its own.
        config: None is `ConsoleConfig()`: everybody who reaches it may use it.
    """
    return Console(store, ConsoleConfig() if config is None else config)
