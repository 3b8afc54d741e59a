"""Answers under the caller's key, in the database."""

from __future__ import annotations

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
from headgate_sync.postgres.database import Database, Session
from headgate_sync.validation import check_type


class PgIdempotency:
    """`Idempotency` on the table of keys."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def claim_key(
        self, route: str, key: str, request_sha256: str, ttl_ms: int
    ) -> KeyClaim:
        """Begin a request, or learn what became of it."""
        check_claim(route, key, request_sha256, ttl_ms)

        def claim(session: Session) -> KeyClaim:
            started = session.rows(
                "claim_idempotency_key",
                route=route,
                key=key,
                request_sha256=request_sha256,
                ttl_ms=ttl_ms,
                abandoned_ms=ABANDONED_MS,
            )
            # After the claim, which may have waited: what skips locked rows waits for
            # nobody, so that two callers cannot wait for each other.
            session.rows("remove_idempotency_keys", max_keys=MAX_LAPSED)
            if started:
                created_at_ms, claimed_at_ms = started[0]
                return KeyClaim(
                    status=ClaimStatus.STARTED,
                    created_at_ms=created_at_ms,
                    claimed_at_ms=claimed_at_ms,
                )
            # The claim locked the row that kept it from being made, so it is there.
            [(kept_sha256, status, headers, body)] = session.rows(
                "read_idempotency_key", route=route, key=key
            )
            if kept_sha256 != request_sha256:
                return KeyClaim(status=ClaimStatus.OTHER)
            if status is None:
                return KeyClaim(status=ClaimStatus.BUSY)
            answer = StoredAnswer(status=status, headers=headers, body=body)
            return KeyClaim(status=ClaimStatus.ANSWERED, answer=answer)

        return self._db.run(claim)

    def finish_key(
        self, route: str, key: str, claim: KeyClaim, answer: StoredAnswer
    ) -> bool:
        """Keep the answer of a begun request; false when somebody took it over."""
        check_type("answer", answer, StoredAnswer)
        _check_claim(route, key, claim)
        rows = self._db.rows(
            "finish_idempotency_key",
            route=route,
            key=key,
            claimed_at_ms=claim.claimed_at_ms,
            status=answer.status,
            headers=answer.headers,
            body=answer.body,
        )
        return bool(rows)

    def drop_key(self, route: str, key: str, claim: KeyClaim) -> None:
        """Forget a begun request that came to nothing."""
        _check_claim(route, key, claim)
        self._db.rows(
            "drop_idempotency_key",
            route=route,
            key=key,
            claimed_at_ms=claim.claimed_at_ms,
        )


def _check_claim(route: str, key: str, claim: KeyClaim) -> None:
    check_route(route)
    check_key(key)
    check_type("claim", claim, KeyClaim)
