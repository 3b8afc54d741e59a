"""Answers under the caller's key, in memory."""

from __future__ import annotations

from itertools import islice

from attrs import frozen

from headgate_sync.idempotency import (
    ABANDONED_MS,
    MAX_LAPSED,
    ClaimStatus,
    KeyClaim,
    StoredAnswer,
    check_claim,
    check_key,
    check_route,
)
from headgate_sync.memory.state import KeyRow, Rows
from headgate_sync.validation import check_type


@frozen
class MemIdempotency:
    """`Idempotency` over the rows."""

    _rows: Rows

    def claim_key(
        self, route: str, key: str, request_sha256: str, ttl_ms: int
    ) -> KeyClaim:
        """Begin a request, or learn what became of it."""
        check_claim(route, key, request_sha256, ttl_ms)
        keys = self._rows.idempotency
        with self._rows.lock:
            now_ms = self._rows.clock.now_ms()
            self._remove_lapsed(now_ms)
            row = keys.get((route, key))
            if row is None or row.expires_at_ms <= now_ms:
                keys.pop((route, key), None)
                row = keys[route, key] = KeyRow(
                    request_sha256, now_ms, now_ms, now_ms + ttl_ms
                )
                return _started(row)
            if row.request_sha256 != request_sha256:
                return KeyClaim(status=ClaimStatus.OTHER)
            if row.answer is not None:
                return KeyClaim(status=ClaimStatus.ANSWERED, answer=row.answer)
            if now_ms - row.claimed_at_ms <= ABANDONED_MS:
                return KeyClaim(status=ClaimStatus.BUSY)
            row.claimed_at_ms = now_ms
            return _started(row)

    def finish_key(
        self, route: str, key: str, claim: KeyClaim, answer: StoredAnswer
    ) -> bool:
        """Keep the answer of a begun request; false when somebody took it over."""
        check_type("answer", answer, StoredAnswer)
        with self._rows.lock:
            row = self._held(route, key, claim)
            if row is None:
                return False
            row.answer = answer
            return True

    def drop_key(self, route: str, key: str, claim: KeyClaim) -> None:
        """Forget a begun request that came to nothing."""
        with self._rows.lock:
            if self._held(route, key, claim) is not None:
                del self._rows.idempotency[route, key]

    def _held(self, route: str, key: str, claim: KeyClaim) -> KeyRow | None:
        check_route(route)
        check_key(key)
        check_type("claim", claim, KeyClaim)
        row = self._rows.idempotency.get((route, key))
        if (
            row is None
            or row.answer is not None
            or row.claimed_at_ms != claim.claimed_at_ms
        ):
            return None
        return row

    def _remove_lapsed(self, now_ms: int) -> None:
        keys = self._rows.idempotency
        # In the order of their claims, which is that of their ends or nearly so.
        for name, row in list(islice(keys.items(), MAX_LAPSED)):
            if row.expires_at_ms > now_ms:
                return
            del keys[name]


def _started(row: KeyRow) -> KeyClaim:
    return KeyClaim(
        status=ClaimStatus.STARTED,
        created_at_ms=row.created_at_ms,
        claimed_at_ms=row.claimed_at_ms,
    )
