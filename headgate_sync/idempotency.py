"""`Idempotency`, the port for answers that are kept under the caller's key."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from attrs import frozen

from headgate_sync.envelope import MAX_RELATIVE_MS, check_int
from headgate_sync.errors import InvalidRequest
from headgate_sync.validation import check_name

MAX_KEY_CHARS = 255
MAX_ROUTE_BYTES = 1024
# A request that takes longer was cut off: no verb of the port runs for a minute.
ABANDONED_MS = 60_000
MAX_LAPSED = 100


@frozen(kw_only=True)
class StoredAnswer:
    """What a request was answered with.

    Attributes:
        status: of HTTP.
        headers: JSON text of the headers that belong to the answer.
        body: as it was sent.
    """

    status: int
    headers: str
    body: bytes


class ClaimStatus(StrEnum):
    """What a key stands for when a request comes with it."""

    STARTED = "started"
    ANSWERED = "answered"
    BUSY = "busy"
    OTHER = "other"


@frozen(kw_only=True)
class KeyClaim:
    """The answer of `claim_key`.

    Attributes:
        status: "started": the caller must run the request and finish or drop the claim;
            "answered": it ran, and `answer` is what came of it; "busy": somebody else
            runs it; "other": the key belongs to another request.
        created_at_ms: when the key was first seen; the same for whoever takes over.
        claimed_at_ms: names this claim among those of one key.
    """

    status: ClaimStatus
    created_at_ms: int = 0
    claimed_at_ms: int = 0
    answer: StoredAnswer | None = None


def check_key(key: object) -> str:
    """Check an idempotency key.

    Raises:
        InvalidRequest: not 1 to 255 visible ASCII characters.
    """
    if (
        not isinstance(key, str)
        or not 1 <= len(key) <= MAX_KEY_CHARS
        or any(not "!" <= character <= "~" for character in key)
    ):
        raise InvalidRequest(
            f"Idempotency-Key must be 1 to {MAX_KEY_CHARS} visible ASCII characters"
        )
    return key


def check_claim(route: str, key: str, request_sha256: str, ttl_ms: int) -> None:
    """Check the arguments of `claim_key`.

    Raises:
        InvalidRequest: the text names the argument.
    """
    check_route(route)
    check_key(key)
    check_name("request_sha256", request_sha256)
    check_int("ttl_ms", ttl_ms, 1, MAX_RELATIVE_MS)


def check_route(route: str) -> None:
    """Check the name of what is called: 1 to 1,024 visible ASCII characters.

    Raises:
        InvalidRequest: any other.
    """
    if (
        not isinstance(route, str)
        or not 1 <= len(route) <= MAX_ROUTE_BYTES
        or any(not " " <= character <= "~" for character in route)
    ):
        raise InvalidRequest(
            f"route must be 1 to {MAX_ROUTE_BYTES} printable ASCII characters"
        )


class Idempotency(Protocol):
    """Answers by route and key, for a limited time, so that a repeat runs nothing."""

    def claim_key(
        self, route: str, key: str, request_sha256: str, ttl_ms: int
    ) -> KeyClaim:
        """Begin a request, or learn what became of it.

        A request that was begun more than a minute ago, and neither finished nor
        dropped, was cut off, and is begun again. Answers that have lapsed are removed,
        up to 100 per call.

        Args:
            route: what is called, up to 1,024 printable ASCII characters.
            key: 1 to 255 visible ASCII characters.
            request_sha256: of all that makes two requests the same.
            ttl_ms: how long the answer is kept, from the first claim on.
        """
        ...

    def finish_key(
        self, route: str, key: str, claim: KeyClaim, answer: StoredAnswer
    ) -> bool:
        """Keep the answer of a begun request; false when somebody took it over."""
        ...

    def drop_key(self, route: str, key: str, claim: KeyClaim) -> None:
        """Forget a begun request that came to nothing, so that a repeat runs it."""
        ...
