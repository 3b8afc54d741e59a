"""Live updates: one thread hears the signals of the store and tells all who look."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from headgate_sync.api.config import LiveUpdates
from headgate_sync.api.forks import afresh_in_child
from headgate_sync.errors import HeadgateError
from headgate_sync.store import Notifying

logger = logging.getLogger(__name__)

EVERYTHING = "*"
MAX_NAMES = 64
REMEMBERED = 1_024
RETRY_MS = 2_000
SLICE_S = 1.0


class Stream:
    """An open event stream: an iterable of chunks that a server sends as they come.

    The server calls `close` when the client is gone, whether or not anything was sent.
    """

    def __init__(self, hub: Hub, until_s: float) -> None:
        self._hub = hub
        self.until_s = until_s
        self.names: set[str] = set()  # guarded by the hub's lock
        self._started = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> bytes:
        """Wait for the next chunk; ends the stream when its time is over."""
        if not self._started:
            self._started = True
            return f"retry: {RETRY_MS}\n\n".encode()
        queues = self._hub.next_of(self)
        if queues is None:
            self.close()
            raise StopIteration
        if not queues:
            return b": hb\n\n"
        data = json.dumps({"queues": queues}, separators=(",", ":"))
        return f"event: queue_activity\ndata: {data}\n\n".encode()

    def close(self) -> None:
        """Leave the hub; twice is fine."""
        self._hub.leave(self)


class Hub:
    """Fans the store's signals out to open streams and to polls.

    A signal is a hint that something changed in a queue: it may come late or for
    nothing. The store gives none for a queue whose workers are all busy, so everybody
    is told to look at everything now and then.

    Args:
        settings: of streams.
        find: called on the hub's thread for the signals of the store, or None.
        now_s: a clock that never steps back, in seconds.
    """

    def __init__(
        self,
        settings: LiveUpdates,
        find: Callable[[], Notifying | None],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._find = find
        self._now_s = now_s
        self.start_afresh()
        afresh_in_child(self)

    def start_afresh(self) -> None:
        """Forget the streams and the thread of a parent process."""
        self._changed = threading.Condition()  # its lock guards the fields below
        self._streams: set[Stream] = set()
        # No two processes count alike, so that the number of another one reads as
        # "too old" and never as "nothing new". It stays exact in a browser's number.
        self._seq = time.time_ns() // 1_000_000 * 1_000
        self._recent: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._oldest = self._seq
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def publish(self, queues: Iterable[str]) -> None:
        """Tell everybody that something may have changed in these queues."""
        with self._changed:
            for queue in queues:
                self._seq += 1
                if len(self._recent) == REMEMBERED:
                    self._oldest = self._recent[0][0]
                self._recent.append((self._seq, queue))
                for stream in self._streams:
                    if len(stream.names) >= MAX_NAMES or queue == EVERYTHING:
                        stream.names = {EVERYTHING}
                    elif EVERYTHING not in stream.names:
                        stream.names.add(queue)
            self._changed.notify_all()

    def poll(self, since: int | None) -> tuple[int, list[str]]:
        """What may have changed since a number that an earlier poll returned."""
        self._ensure_thread()
        with self._changed:
            if since is None or not self._oldest <= since <= self._seq:
                return self._seq, [EVERYTHING]
            names = {queue for seq, queue in self._recent if seq > since}
            return self._seq, [EVERYTHING] if EVERYTHING in names else sorted(names)

    def open(self) -> Stream | None:
        """Open a stream; None when there are as many as may be."""
        self._ensure_thread()
        now_s = self._now_s()
        with self._changed:
            # A server that forgot to close a stream must not use a place up for ever.
            self._streams = {one for one in self._streams if one.until_s > now_s}
            if len(self._streams) >= self._settings.max_streams:
                return None
            stream = Stream(self, now_s + self._settings.max_life_ms / 1000)
            self._streams.add(stream)
            return stream

    def leave(self, stream: Stream) -> None:
        """Forget a stream."""
        with self._changed:
            self._streams.discard(stream)

    def next_of(self, stream: Stream) -> list[str] | None:
        """Names for a stream; none after a silence, None at its end."""
        quiet_s = self._settings.heartbeat_ms / 1000
        with self._changed:
            beat_s = min(self._now_s() + quiet_s, stream.until_s)
            while not stream.names:
                if stream not in self._streams or self._closing.is_set():
                    return None
                left_s = beat_s - self._now_s()
                if left_s <= 0:
                    return None if self._now_s() >= stream.until_s else []
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            # A burst becomes one event.
            gathered_s = self._now_s() + self._settings.coalesce_ms / 1000
            while (left_s := gathered_s - self._now_s()) > 0:
                if self._closing.is_set():
                    return None
                self._changed.wait(left_s)
            names, stream.names = stream.names, set()
        return sorted(names)

    def close(self) -> None:
        """End all streams and the thread."""
        self._closing.set()
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(2 * SLICE_S)

    def _ensure_thread(self) -> None:
        with self._changed:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="headgate-api-live", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        tick_s = self._settings.tick_ms / 1000
        next_tick_s = self._now_s() + tick_s
        while not self._closing.is_set():
            left_s = next_tick_s - self._now_s()
            if left_s <= 0:
                self.publish([EVERYTHING])
                next_tick_s += tick_s
                continue
            queue = self._hear(min(left_s, tick_s))
            if queue is not None:
                self.publish([queue or EVERYTHING])

    def _hear(self, wait_s: float) -> str | None:
        """Wait for one signal, or for the time without any."""
        # A listener cannot be interrupted: short waits keep the end of a process short.
        slice_s = min(wait_s, SLICE_S)
        try:
            notifying = self._find()
            if notifying is not None:
                return notifying.wait_wakeup((), max(1, round(slice_s * 1000)))
        except HeadgateError as error:
            logger.debug("no signals: %s", error)
        except Exception:
            logger.exception("the thread of live updates failed and goes on")
        self._closing.wait(slice_s)
        return None
