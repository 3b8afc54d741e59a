"""`ApiConfig`, the settings of the control API."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from headgate_sync.envelope import MAX_INT32, MAX_RELATIVE_MS, check_int
from headgate_sync.errors import InvalidRequest
from headgate_sync.identity import Authorizer, Identity
from headgate_sync.inspection import JobSummary

if TYPE_CHECKING:
    from headgate_sync.client.circuit import CircuitBreaker
    from headgate_sync.client.pipeline import InsertHook, Middleware, Plugin

Authenticate = Callable[[dict[str, Any]], Identity | None]
Authorize = Callable[[Identity | None, str, str], bool]


def _within(low: int, high: int) -> Any:
    def check(_: object, attribute: Any, value: int) -> None:
        check_int(attribute.name, value, low, high)

    return check


def _callable(_: object, attribute: Any, value: object) -> None:
    if value is not None and not callable(value):
        raise InvalidRequest(
            f"{attribute.name} must be callable, got {type(value).__name__}"
        )


def _of(*kinds: type) -> Any:
    def check(_: object, attribute: Any, value: object) -> None:
        if not isinstance(value, kinds):
            raise InvalidRequest(
                f"{attribute.name} must be {kinds[0].__name__}, "
                f"got {type(value).__name__}"
            )

    return check


@frozen(kw_only=True)
class RateLimit:
    """How many requests one identity, or one address without one, may send.

    Attributes:
        per_second: requests that are refilled.
        burst: requests that may come at once.
    """

    per_second: int = field(default=50, validator=_within(1, MAX_INT32))
    burst: int = field(default=100, validator=_within(1, MAX_INT32))


@frozen(kw_only=True)
class LiveUpdates:
    """How `/events` streams.

    Attributes:
        max_streams: open at the same time in this process; each holds a thread of the
            server. 0 leaves only the polling.
        max_life_ms: after which the server ends a stream and the browser opens another.
        heartbeat_ms: of silence before a sign of life, which also notices that a client
            is gone.
        coalesce_ms: how long names are gathered for one event.
        tick_ms: how often clients are told to look at everything, since a queue whose
            workers are all busy gives no signal.
    """

    max_streams: int = field(default=8, validator=_within(0, 10_000))
    max_life_ms: int = field(default=300_000, validator=_within(1, MAX_RELATIVE_MS))
    heartbeat_ms: int = field(default=15_000, validator=_within(1, MAX_RELATIVE_MS))
    coalesce_ms: int = field(default=200, validator=_within(0, 10_000))
    tick_ms: int = field(default=5_000, validator=_within(100, MAX_RELATIVE_MS))


@frozen(kw_only=True)
class ApiConfig:
    """Who may do what over HTTP, and within which limits.

    Attributes:
        authenticate: called with the WSGI environment of each request; None from it is
            answered with 401. Without a hook whoever reaches the application is let in,
            as the `Identity` in `environ["headgate.identity"]` if there is one.
        authorize: called with identity, method and the path as in the table of routes;
            anything but True is answered with 403.
        read_only: refuse everything that changes something.
        max_body_bytes: of a request.
        enqueue_authorizer, circuit_breaker, enqueue_middleware, insert_hooks, plugins:
            stand between an enqueue over HTTP and the store, as in a `Client`. With
            none of them those of the `Headgate` are used.
        redact_payload: called with a job whose payload was asked for; what it returns
            is shown instead, None shows none.
        backend_name: shown by `/meta`; None names the kind of store.
        rate_limit: None is no limit.
        live: how `/events` streams.
        idempotency_ttl_ms: how long an answer is repeated under its key.
        share_ms: how long one answer about the whole, such as the list of queues, is
            given to all while many ask for it; 0 reads the store for each. After a
            change that goes through this process, and for a request with
            `Cache-Control: no-cache`, it is read anew.
        pool_size: most connections of the API's own pool; a store or a pool that the
            caller made is used as it is.
    """

    authenticate: Authenticate | None = field(default=None, validator=_callable)
    authorize: Authorize | None = field(default=None, validator=_callable)
    read_only: bool = field(default=False, validator=_of(bool))
    max_body_bytes: int = field(default=2_097_152, validator=_within(1, MAX_INT32))
    enqueue_authorizer: Authorizer | None = field(default=None, validator=_callable)
    circuit_breaker: CircuitBreaker | None = None
    enqueue_middleware: tuple[Middleware, ...] = field(default=(), converter=tuple)
    insert_hooks: tuple[InsertHook, ...] = field(default=(), converter=tuple)
    plugins: tuple[Plugin, ...] = field(default=(), converter=tuple)
    redact_payload: Callable[[JobSummary], bytes | None] | None = field(
        default=None, validator=_callable
    )
    backend_name: str | None = field(default=None, validator=_of(str, type(None)))
    rate_limit: RateLimit | None = field(
        factory=RateLimit, validator=_of(RateLimit, type(None))
    )
    live: LiveUpdates = field(factory=LiveUpdates, validator=_of(LiveUpdates))
    idempotency_ttl_ms: int = field(
        default=86_400_000, validator=_within(1, MAX_RELATIVE_MS)
    )
    share_ms: int = field(default=1_000, validator=_within(0, 60_000))
    pool_size: int = field(default=2, validator=_within(1, 1_000))

    def parts(self) -> dict[str, Any]:
        """What stands between an enqueue and the store, as a `Pipeline` takes it."""
        given: dict[str, Any] = {
            "authorizer": self.enqueue_authorizer,
            "circuit_breaker": self.circuit_breaker,
            "middleware": self.enqueue_middleware,
            "insert_hooks": self.insert_hooks,
            "plugins": self.plugins,
        }
        return {name: part for name, part in given.items() if part}
