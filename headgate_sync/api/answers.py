"""Answers of the control API, and which error is answered how."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

from headgate_sync.errors import (
    BackendError,
    Backpressure,
    CircuitRejected,
    CodecError,
    ConfigurationError,
    DuplicateJob,
    EnqueueForbidden,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    LeaseRejected,
    NotFound,
    StoreUnavailable,
    Unsupported,
)

logger = logging.getLogger(__name__)

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


class HttpError(Exception):
    """A request that is answered with an error, which is written for its sender."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})
        self.facts = facts


@frozen(kw_only=True)
class Answer:
    """What is sent back.

    Attributes:
        body: None for a status without one.
        stream: chunks that are sent as they come, instead of a body.
    """

    status: int = 200
    body: bytes | None = None
    content_type: str | None = None
    headers: Mapping[str, str] = field(factory=dict)
    stream: Iterable[bytes] | None = None


def as_json(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Answer:
    """An answer of JSON."""
    # Escapes: a text that a store holds cannot break out of whatever shows the answer.
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Answer(
        status=status, body=body, content_type=JSON, headers=dict(headers or {})
    )


def no_content(**headers: str) -> Answer:
    """An answer that says nothing but that it is done."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status=204, headers=named)


def of_http_error(error: HttpError) -> Answer:
    """The envelope of an error."""
    return as_json(
        {"error": error.message, **error.facts},
        status=error.status,
        headers=error.headers,
    )


def of_error(error: Exception) -> HttpError:
    """What an exception of the package is answered with; 500 for any other.

    Nothing of the text of an unknown error is told: it may quote a statement, an
    address or a payload. It is logged under the id that the answer carries.
    """
    if isinstance(error, HttpError):
        return error
    for kind, make in _ANSWERS:
        if isinstance(error, kind):
            answer: HttpError | None = make(error)
            if answer is not None:
                return answer
    error_id = secrets.token_hex(8)
    logger.error("error %s of the control API", error_id, exc_info=error)
    return HttpError(500, "internal error", error_id=error_id)


def _backpressure(error: Any) -> HttpError:
    facts = {
        name: getattr(error, name) for name in ("queue", "limit", "current", "incoming")
    }
    return HttpError(429, "enqueue backpressure", **facts)


def _duplicate(error: Any) -> HttpError:
    return HttpError(
        409,
        "duplicate unique key",
        existing_id=error.existing_id,
        replaced=error.replaced,
    )


def _circuit(error: Any) -> HttpError:
    return HttpError(
        503,
        "enqueue circuit open",
        retry_after_ms=error.retry_after_ms,
        state=error.state,
        headers={"Retry-After": str(-(-error.retry_after_ms // 1000))},
    )


def _misconfigured(error: Any) -> HttpError:
    # The text may quote an address with its password; it is for whoever runs this.
    logger.error("the control API cannot use its store: %s", error)
    return HttpError(503, "store unavailable: it is set up wrongly, see the log")


def _quarantined(error: Any) -> HttpError:
    return HttpError(423, "fingerprint is quarantined", fingerprint=error.fingerprint)


def _backend(error: Any) -> HttpError | None:
    if not error.lacks_right:
        return None
    # Which table and which role is for whoever runs this.
    logger.info("a request needs a right that the store's role lacks: %s", error)
    return HttpError(403, "the database role of this API may not do that")


_ANSWERS: tuple[tuple[type[Exception], Any], ...] = (
    (InvalidRequest, lambda error: HttpError(400, error.message)),
    (DuplicateJob, _duplicate),
    (IdConflict, lambda error: HttpError(409, str(error))),
    (FingerprintQuarantined, _quarantined),
    (Backpressure, _backpressure),
    (NotFound, lambda error: HttpError(404, str(error))),
    (LeaseRejected, lambda error: HttpError(409, str(error))),
    (StoreUnavailable, lambda e: HttpError(503, f"store unavailable: {e}")),
    (ConfigurationError, _misconfigured),
    (EnqueueForbidden, lambda e: HttpError(403, "enqueue forbidden", kind=e.kind)),
    (CircuitRejected, _circuit),
    (Unsupported, lambda error: HttpError(501, str(error))),
    (CodecError, lambda error: HttpError(422, str(error))),
    (BackendError, _backend),
)
