"""What a handler raises or returns to end its attempt neither done nor failed."""

from __future__ import annotations

from datetime import timedelta

from headgate_sync.durations import duration_ms
from headgate_sync.errors import InvalidRequest


class Control(Exception):
    """Base of the signals. None of them counts as a failure of the handler."""


class Snooze(Control):
    """Run the job again after a delay; no attempt is consumed.

    Attributes:
        delay_ms: 0 when the delay is below one millisecond; the worker then books a
            failed attempt, because such a job would spin.

    Raises:
        InvalidRequest: `delay` is a bare number or no duration.
    """

    def __init__(self, delay: timedelta | str) -> None:
        super().__init__(delay)
        below = isinstance(delay, timedelta) and delay < timedelta(milliseconds=1)
        self.delay_ms = 0 if below else duration_ms("delay", delay, minimum_ms=0)


class Skip(Control):
    """Give the job up for good: it is archived, and no attempt is consumed."""

    def __init__(self, reason: str) -> None:
        if not isinstance(reason, str):
            raise InvalidRequest(f"reason must be str, got {type(reason).__name__}")
        super().__init__(reason)
        self.reason = reason


class Revoke(Control):
    """Delete the job; no attempt is consumed and no history is kept."""


class RateLimited(Control):
    """The other side refuses more work: the job becomes available, nothing is consumed.

    With `retry_after` the job's whole rate class pauses for that long; a job without a
    class waits alone.

    Attributes:
        retry_after_ms: None without one.

    Raises:
        InvalidRequest: `retry_after` is a bare number, no duration or below 1 ms.
    """

    def __init__(self, retry_after: timedelta | str | None = None) -> None:
        super().__init__(retry_after)
        self.retry_after_ms = (
            None if retry_after is None else duration_ms("retry_after", retry_after)
        )
