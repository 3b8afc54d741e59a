"""How a worker is doing, without asking the store."""

from __future__ import annotations

import json

from attrs import asdict, frozen

from headgate_sync.errors import StoreConflict, StoreUnavailable
from headgate_sync.worker.loops import LoopHealth

NEVER_S = float("inf")
OVERDUE_INTERVALS = 3


class Pulse:
    """When one kind of store call went well last, and whether it should have since.

    Written by one thread; its fields may be read by any.

    Args:
        interval_s: how often the call is made while there is a reason for it.
    """

    __slots__ = ("away", "expected_s", "interval_s", "ok_s")

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.ok_s: float | None = None
        self.expected_s = NEVER_S
        self.away = False

    def expect(self, now_s: float) -> None:
        """There is a reason for the call from now on, if there was none before."""
        if self.expected_s == NEVER_S:
            self.expected_s = now_s

    def rest(self) -> None:
        """There is no reason for the call: nobody waits for it to go well."""
        self.expected_s = NEVER_S
        self.away = False

    def good(self, now_s: float) -> None:
        """The call went well."""
        self.ok_s = now_s
        self.away = False

    def failed(self, error: BaseException) -> None:
        """The call raised; transactions that collide are no outage."""
        self.away = isinstance(error, StoreUnavailable) and not isinstance(
            error, StoreConflict
        )

    def age_ms(self, now_s: float) -> int | None:
        """Milliseconds since the call went well; None for never."""
        return None if self.ok_s is None else int((now_s - self.ok_s) * 1000)

    def overdue(self, now_s: float) -> bool:
        """The call is wanted, and has not gone well for three of its intervals."""
        since_s = max(self.expected_s, self.ok_s or 0.0)
        return now_s - since_s > OVERDUE_INTERVALS * self.interval_s


@frozen(kw_only=True)
class Health:
    """How a worker is doing; no I/O stands behind it.

    Attributes:
        status: "starting", "running", "quiet", "restarting", "terminating" or
            "failing", where a service loop could not be revived.
        healthy: every loop is alive and, unless the store is unavailable, none of its
            calls is overdue by three intervals. An outage is not unhealthy: a restart
            would not help, and would cost what runs.
        ready: the store knows the worker.
        in_flight: slots taken.
        capacity: slots: one per handler thread, and those of `prefetch`.
        last_admit_ok_ms, last_renew_ok_ms, last_beat_ok_ms: age of the last good call;
            None for never.
        store: "ok" or "unavailable".
        duties: names of the duties held.
        threads: the service loops by name, and the sweeps as "duty-" and their name.
    """

    status: str
    healthy: bool
    ready: bool
    worker_id: str
    in_flight: int
    capacity: int
    last_admit_ok_ms: int | None
    last_renew_ok_ms: int | None
    last_beat_ok_ms: int | None
    store: str
    duties: tuple[str, ...]
    threads: dict[str, LoopHealth]

    def to_json(self) -> str:
        """One line, with neither a payload nor the id of a job."""
        return json.dumps(asdict(self), sort_keys=True)


class Pulses:
    """The store calls by which a worker's health is judged.

    Args:
        beat_s: seconds between two beats.
        poll_s: longest wait between two admits.
    """

    def __init__(self, *, beat_s: float, poll_s: float) -> None:
        # A database that hangs without a word is noticed by the beat, whose calls have
        # a limit. An admit that hangs in it must not look like a worker's own fault
        # before that.
        self.admit = Pulse(max(poll_s, beat_s))
        self.renew = Pulse(beat_s)
        self.beat = Pulse(beat_s)

    @property
    def away(self) -> bool:
        """The newest word of some call is that the database does not answer."""
        return self.admit.away or self.renew.away or self.beat.away

    def overdue(self, now_s: float) -> bool:
        """Some call is overdue."""
        return any(p.overdue(now_s) for p in (self.admit, self.renew, self.beat))
