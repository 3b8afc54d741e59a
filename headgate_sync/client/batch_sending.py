"""Sends the jobs of a batch in chunks, as fast as queues and database take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from attrs import frozen

from headgate_sync.client.batch_following import Following
from headgate_sync.client.client import Client
from headgate_sync.envelope import Envelope
from headgate_sync.errors import (
    Backpressure,
    CircuitRejected,
    DuplicateJob,
    EnqueueForbidden,
    FingerprintQuarantined,
    HeadgateError,
    IdConflict,
    InvalidRequest,
    StoreClosed,
    StoreUnavailable,
)
from headgate_sync.identity import Identity
from headgate_sync.request import JobHandle
from headgate_sync.validation import MAX_BATCH_BYTES

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


@frozen
class Unsent:
    """A job of the batch that the store has not got yet."""

    index: int
    envelope: Envelope
    size_bytes: int

    @property
    def alone(self) -> bool:
        """Whether it must be the only one of its call."""
        envelope = self.envelope
        return bool(envelope.unique_replace or envelope.unique_debounce_ms)


class Sender:
    """The buffer of a batch, emptied in order; one thread at a time may use it.

    Args:
        client: makes the calls.
        following: gets what was stored.
        chunk_size: most jobs of a call.
        window: most unfinished jobs of the batch; None is any number.
        patience_ms: how long an outage is waited out.
        identity: who enqueues.
        cancelled: whether the batch was cancelled, by any thread.
        tell: called when something changed, or is waited for.
    """

    def __init__(
        self,
        client: Client,
        following: Following,
        *,
        chunk_size: int,
        window: int | None,
        patience_ms: int,
        identity: Identity | None,
        cancelled: Callable[[], bool],
        tell: Callable[[], None],
    ) -> None:
        self._client = client
        self._following = following
        self._chunk_size = chunk_size
        self._window = window
        self._patience_s = patience_ms / 1000
        self._identity = identity
        self._cancelled = cancelled
        self._tell = tell
        self._buffer: deque[Unsent] = deque()
        self._bytes = 0
        self._fit = chunk_size  # how many the next call tries
        self._pause_s = FIRST_PAUSE_S
        self.waiting_for = ""
        self.crossed = False  # jobs were stored after the batch was cancelled

    def __len__(self) -> int:
        return len(self._buffer)

    def put(self, unsent: Unsent) -> None:
        """Take one more job, and send what makes a whole chunk.

        Raises:
            HeadgateError: see `flush`.
        """
        if self._bytes + unsent.size_bytes > MAX_BATCH_BYTES:
            self.flush()
        self._buffer.append(unsent)
        self._bytes += unsent.size_bytes
        if len(self._buffer) >= self._chunk_size:
            self.flush()

    def flush(self) -> None:
        """Send everything.

        Raises:
            StoreUnavailable: for longer than the patience; the buffer is kept.
            HeadgateError: one job was refused, and is not in the buffer any more; those
                before it were sent, `item_index` tells which it was.
        """
        while self._buffer and not self._cancelled():
            self._send_some()
        if self._cancelled():
            self.drop()

    def drop(self) -> int:
        """Forget what was not sent; returns how many."""
        dropped = len(self._buffer)
        self._buffer.clear()
        self._bytes = 0
        return dropped

    def _send_some(self) -> None:
        chunk = self._next_chunk()
        if not chunk:
            return  # cancelled while there was no room
        try:
            handles = self._call(chunk)
        except Backpressure as full:
            self._yield_to(chunk, full)
        except DuplicateJob as duplicate:
            if len(chunk) > 1:
                self._fit = len(chunk) // 2  # to find out whose key it is
            else:
                self._took(chunk, [_joined(chunk[0], duplicate.existing_id)])
                self._fit = 1  # the next one's key is likely to be held too
        except (
            IdConflict,
            FingerprintQuarantined,
            EnqueueForbidden,
            InvalidRequest,
        ) as refusal:
            if len(chunk) == 1:
                self._pop()
                raise blamed(refusal, chunk[0].index) from None
            self._fit = len(chunk) // 2
        else:
            self._took(chunk, handles)

    def _next_chunk(self) -> list[Unsent]:
        """The jobs of the next call; empty when the batch was cancelled meanwhile."""
        most = min(self._fit, len(self._buffer))
        while self._window is not None:
            room = self._window - self._following.own
            if room > 0:
                most = min(most, room)
                break
            if not self._wait_a_turn(float("inf"), "the window"):
                return []
        self.waiting_for = ""
        chunk: list[Unsent] = []
        for unsent in islice(self._buffer, most):
            if chunk and unsent.alone:
                break
            chunk.append(unsent)
            if unsent.alone:
                break
        return chunk

    def _call(self, chunk: Sequence[Unsent]) -> list[JobHandle]:
        """One call of the store, again and again in an outage."""
        since_s: float | None = None
        pause_s = FIRST_PAUSE_S
        envelopes = [unsent.envelope for unsent in chunk]
        while True:
            try:
                return self._client.enqueue_many(envelopes, identity=self._identity)
            except StoreClosed:
                raise
            except (StoreUnavailable, CircuitRejected):
                now_s = self._following.pace.now_s()
                since_s = now_s if since_s is None else since_s
                left_s = since_s + self._patience_s - now_s
                if left_s <= 0 or self._cancelled():
                    raise
            self._rest(min(pause_s, left_s), "the database")
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _yield_to(self, chunk: Sequence[Unsent], full: Backpressure) -> None:
        """Cut the next call to the room of a full queue, or wait for some."""
        fits = _fitting(chunk, full)
        if fits == len(chunk):
            # The queue of the jobs is not the one they say: middleware moved them.
            fits = len(chunk) // 2
        if fits:
            self._fit = fits
            return
        self._fit = 1
        self._rest(self._pause_s, f"room in {full.queue}")
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    def _rest(self, seconds: float, reason: str) -> None:
        """Wait so long, and look after the jobs that were sent meanwhile."""
        until_s = self._following.pace.now_s() + seconds
        while self._following.pace.now_s() < until_s:
            if not self._wait_a_turn(until_s, reason):
                return

    def _wait_a_turn(self, until_s: float, reason: str) -> bool:
        """Wait for news of jobs; False when the batch was cancelled."""
        self.waiting_for = reason
        self._tell()
        self._following.turn(until_s, self._cancelled)
        return not self._cancelled()

    def _took(self, chunk: Sequence[Unsent], handles: Sequence[JobHandle]) -> None:
        """Hand stored jobs over to be followed."""
        for unsent, handle in zip(chunk, handles, strict=True):
            self._pop()
            if handle.dropped:
                raise blamed(EnqueueForbidden(handle.kind), unsent.index)
            self._following.follow(
                unsent.index,
                handle.id,
                other=handle.id != unsent.envelope.id,
                joined=handle.joined or handle.replaced,
            )
        self.crossed = self.crossed or self._cancelled()
        self._fit = min(max(self._fit, len(chunk)) * 2, self._chunk_size)
        self._pause_s = FIRST_PAUSE_S
        self.waiting_for = ""
        self._tell()

    def _pop(self) -> None:
        self._bytes -= self._buffer.popleft().size_bytes


def blamed(error: HeadgateError, index: int) -> HeadgateError:
    """The error with the place of the job that it is about."""
    error.item_index = index
    error.add_note(f"item {index} of the batch")
    return error


def _joined(unsent: Unsent, holder: str) -> JobHandle:
    envelope = unsent.envelope
    return JobHandle(id=holder, kind=envelope.kind, queue=envelope.queue, joined=True)


def _fitting(chunk: Sequence[Unsent], full: Backpressure) -> int:
    """How many of the first jobs the queue that is full still has room for."""
    room = full.limit - full.current
    for place, unsent in enumerate(chunk):
        if unsent.envelope.queue == full.queue:
            if room <= 0:
                return place
            room -= 1
    return len(chunk)
