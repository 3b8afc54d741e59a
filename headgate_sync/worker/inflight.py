"""The table of attempts that this worker holds; a slot is an entry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from headgate_sync.attempt import LiveAttempt
from headgate_sync.cancel import CancelReason
from headgate_sync.lease import LeaseRef


class InFlight:
    """All attempts of one worker, by lease.

    A slot is free again when the handler's thread has returned *and* the attempt's ack
    is on its way to the store, so that the next claims are fetched meanwhile. An
    attempt whose lease is lost keeps its slot until the thread returns: handing the
    slot out earlier would run more handlers than there are threads. Leases are held
    until their acks are concluded, never more than twice as many as there are slots.

    Args:
        capacity: number of slots.
        freed: called, outside of the lock, when something happened that somebody waits
            for.

    Attributes:
        hungry: somebody waits for slots.
        unfilled: somebody has slots left over, and an ack may let more work run.
        draining: somebody waits for the end of every attempt.
    """

    def __init__(self, capacity: int, freed: Callable[[], None]) -> None:
        self.capacity = capacity
        self._freed = freed
        # Guards the table and the shared fields of its attempts. Never held across a
        # store call, a log call or user code.
        self.lock = threading.Lock()
        self._attempts: dict[LeaseRef, LiveAttempt] = {}
        self._airborne = 0  # of those, how many hold no slot any more
        self.hungry = False
        self.unfilled = False
        self.draining = False

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def taken(self) -> int:
        """Slots whose handler runs or whose ack waits to be sent."""
        with self.lock:  # an attempt that leaves changes both numbers
            return len(self._attempts) - self._airborne

    @property
    def free(self) -> int:
        """Slots that can be filled."""
        unheld = 2 * self.capacity - len(self._attempts)
        return min(self.capacity - self.taken, unheld)

    def add(self, attempts: Iterable[LiveAttempt]) -> None:
        """Take slots for fresh claims, before they are handed to a thread."""
        with self.lock:
            for attempt in attempts:
                self._attempts[attempt.lease] = attempt

    def attempts(self) -> list[LiveAttempt]:
        """Everything held now."""
        with self.lock:
            return list(self._attempts.values())

    def settle(self, attempt: LiveAttempt) -> bool:
        """Claim the right to decide the outcome; True for exactly one caller."""
        with self.lock:
            if attempt.settled:
                return False
            attempt.settled = True
            return True

    def finish(self, attempt: LiveAttempt, *, acks: bool) -> bool:
        """The handler's thread is done with the attempt.

        Args:
            acks: an ack follows, if the caller may decide.

        Returns:
            Whether the caller decides the outcome; then it must send the announced ack.
        """
        with self.lock:
            attempt.returned = True
            decides = not attempt.settled
            attempt.settled = True
            if decides and not acks:
                attempt.concluded = True
                attempt.renewing = False
            freed = self._free_if_over(attempt)
        if freed:
            self._freed()
        return decides

    def take_off(self, attempts: Iterable[LiveAttempt]) -> None:
        """The acks of these are on their way, for the first time or again."""
        with self.lock:
            for attempt in attempts:
                if attempt.returned and not attempt.airborne:
                    attempt.airborne = True
                    self._airborne += 1
        if self.hungry:
            self._freed()

    def touch_down(self, attempt: LiveAttempt) -> None:
        """Take the slot back: a handler thread has more to do for the attempt."""
        with self.lock:
            if attempt.airborne:
                attempt.airborne = False
                self._airborne -= 1

    def conclude(self, attempts: Sequence[LiveAttempt]) -> None:
        """No ack of these is under way any more, and no lease to be renewed."""
        freed = False
        with self.lock:
            for attempt in attempts:
                attempt.concluded = True
                attempt.renewing = False
                freed |= self._free_if_over(attempt)
        if freed:
            self._freed()

    def _free_if_over(self, attempt: LiveAttempt) -> bool:
        """Drop an attempt that is over; True when somebody may wait for that."""
        if not (attempt.returned and attempt.concluded):
            return self.draining
        if self._attempts.pop(attempt.lease, None) is not None and attempt.airborne:
            self._airborne -= 1
        return self.hungry or self.unfilled or self.draining

    def confirm(self, attempts: Iterable[LiveAttempt], due_s: float) -> None:
        """The store confirmed these leases; they are good until `due_s`."""
        with self.lock:
            for attempt in attempts:
                attempt.lease_due_s = max(due_s, attempt.extended_due_s)
                attempt.doubtful = False

    def lose(self, attempts: Iterable[LiveAttempt]) -> list[LiveAttempt]:
        """The store reported these leases lost.

        Returns:
            Those whose handlers must stop. Where the outcome is decided already, or a
            commit is under way, the answer to that decides and not the heartbeat's.
        """
        with self.lock:
            lost = [
                attempt
                for attempt in attempts
                if attempt.renewing
                and not (attempt.settled or attempt.completing or attempt.in_doubt)
            ]
            for attempt in lost:
                attempt.renewing = False
        for attempt in lost:
            attempt.cancel(CancelReason.LEASE_LOST)
        return lost
