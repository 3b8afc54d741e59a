"""`Batch`: many jobs of one script, sent in chunks and followed to their ends."""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from attrs import evolve

from headgate_sync.client.batch_following import Ended, Following
from headgate_sync.client.batch_sending import Sender, Unsent, blamed
from headgate_sync.client.batch_values import BatchItem, BatchProgress, BatchSummary
from headgate_sync.client.building import request_of
from headgate_sync.client.client import Client
from headgate_sync.client.waiting import (
    Completion,
    Pace,
    Reader,
    inspection_of,
    reader_of,
)
from headgate_sync.durations import duration_ms
from headgate_sync.envelope import MAX_INT32, Envelope, check_int, check_text
from headgate_sync.errors import (
    BatchTimeout,
    HeadgateError,
    InvalidRequest,
    JobFailed,
)
from headgate_sync.ids import UlidGenerator
from headgate_sync.inspection import MAX_JOBS, Inspect
from headgate_sync.lease import JobResult
from headgate_sync.lifecycle import State
from headgate_sync.options import UNSET, CallOptions, make_options
from headgate_sync.request import JobRequest
from headgate_sync.task import BoundTask, FunctionTask, Task
from headgate_sync.validation import MAX_BATCH_JOBS

MAX_BATCH_ID_BYTES = 58
TELL_INTERVAL_S = 0.1

_ID = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_BATCH_ID_BYTES}}}")
_new_id = UlidGenerator()


class Batch:
    """Jobs of one script; made by `Headgate.batch`.

    Used as a context manager it sends the rest at the end of the block. It is not one
    transaction: what was sent stays sent. Each job has the id `{batch}:{key}` and the
    tag `batch:{batch}`, so a script that is started again under the same id sends
    nothing twice and sees how the earlier jobs ended, while their rows are kept.

    One thread may send while others iterate.

    Args:
        client: sends the jobs.
        id, chunk_size, keep, patience, window: see `Headgate.batch`.
        progress: gets each `BatchProgress`.
        options: of jobs whose call sets none.
        pace: the time; tests step another one.
    """

    def __init__(
        self,
        client: Client,
        id: str | None = None,
        *,
        chunk_size: int = 500,
        progress: Callable[[BatchProgress], object] | None = None,
        keep: timedelta | str = "1h",
        patience: timedelta | str = "1m",
        window: int | None = None,
        options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        check_int("chunk_size", chunk_size, 1, MAX_BATCH_JOBS)
        if window is not None:
            check_int("window", window, 1, MAX_INT32)
        if id is not None and not (isinstance(id, str) and _ID.fullmatch(id)):
            raise InvalidRequest(
                f"batch id is {id!r}, expected 1 to {MAX_BATCH_ID_BYTES} "
                "of [A-Za-z0-9_.:-]"
            )
        if progress is not None and not callable(progress):
            raise InvalidRequest(
                f"progress must be a bool or callable, got {type(progress).__name__}"
            )
        self.id = id or _new_id()
        self._client = client
        self._keep_ms = duration_ms("keep", keep, minimum_ms=0)
        self._options = make_options(CallOptions, "batch", options or {})
        self._refuse_own(self._options)
        self._progress = progress
        self._told_due_s = float("-inf")
        self._told_reason = ""
        self._inspect: Inspect = inspection_of(client.store)
        patience_ms = duration_ms("patience", patience)
        self._patience_s = patience_ms / 1000
        self._following = Following(
            self._inspect,
            pace=pace or Pace(),
            patience_ms=patience_ms,
            bus=client.event_bus,
        )
        identity = self._options.identity
        self._sender = Sender(
            client,
            self._following,
            chunk_size=chunk_size,
            window=window,
            patience_ms=patience_ms,
            identity=None if identity is UNSET else identity,
            cancelled=lambda: self._cancelled,
            tell=self._tell,
        )
        self._telling = threading.Lock()  # one caller of `progress` at a time
        self._sending = threading.Lock()  # one sender at a time; held across its calls
        self._cancelled = False
        self._block: int | None = None  # the thread whose block is open
        self._count = 0
        self._keys: dict[int, str] = {}  # by index, of the jobs that were given one
        self._named: set[str] = set()  # the same keys
        self._kinds = array("I")  # by index: place in the next field
        self._tasks: list[tuple[str, Task | None]] = []
        self._places: dict[tuple[str, Task | None], int] = {}
        self._readers: dict[int, Reader] = {}

    # Sending.

    def enqueue(self, job: Any, /, *args: Any, **keywords: Any) -> None:
        """Add a job, as `Headgate.enqueue` takes it; see `add` for the errors."""
        if isinstance(job, FunctionTask | BoundTask):
            if "tx" in keywords:
                raise InvalidRequest(
                    "a batch takes no tx: it is sent in calls of its own"
                )
            self._add(lambda: (job.job(*args, **keywords), {}), None)
            return
        if args:
            raise InvalidRequest(
                "positional arguments after the job belong to a function task only"
            )
        self._add(lambda: (job, keywords), None)

    def add(self, job: Any, /, *, key: str | None = None) -> None:
        """Add a job; it is sent with its chunk.

        Args:
            job: `task.job(...)`, an instance of a payload class, or an `Envelope`,
                whose id gives way to that of the batch.
            key: the job's name within the batch, so that a script that runs again may
                add its jobs in another order; None is the running number.

        Raises:
            InvalidRequest, IdConflict, FingerprintQuarantined, EnqueueForbidden: a job
                was refused: `item_index` tells which, and those before it were sent.
            StoreUnavailable: an outage longer than the patience; nothing is lost, call
                `flush` to go on.
        """
        self._add(lambda: (job, {}), key)

    def flush(self) -> None:
        """Send what is buffered.

        Raises:
            HeadgateError: as `add`.
        """
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        self._sender.flush()
        if self._sender.crossed:
            self._cancel_sent()  # what was under way when it was cancelled

    def _add(
        self, make: Callable[[], tuple[Any, Mapping[str, Any]]], key: str | None
    ) -> None:
        with self._sending:
            if self._cancelled:
                raise InvalidRequest(f"batch {self.id} is cancelled")
            index = self._count
            self._count += 1
            self._kinds.append(0)
            try:
                envelope = self._envelope(*make(), index, key)
            except HeadgateError as refusal:
                self._flush()
                blamed(refusal, index)
                raise
            self._sender.put(Unsent(index, envelope, envelope.size_bytes))
            if self._cancelled:
                self._flush()

    def _envelope(
        self, job: Any, options: Mapping[str, Any], index: int, key: str | None
    ) -> Envelope:
        self._check_key(index, key)
        job_id = f"{self.id}:{index if key is None else key}"
        tag = f"batch:{self.id}"
        task: Task | None = None
        if isinstance(job, Envelope):
            given = self._client.envelope(job, **options)
            envelope = evolve(
                given,
                id=job_id,
                tags=(*given.tags, tag),
                retention_ms=max(given.retention_ms, self._keep_ms),
            )
        else:
            request = request_of(job, options)
            self._refuse_own(request.options, identity=True)
            task = request.task
            if (task.kind, task) not in self._places:
                task.check_templates(self._options)
            request = evolve(request, options=_under(request, self._options))
            envelope = self._client.member(
                request, id=job_id, tag=tag, keep_ms=self._keep_ms
            )
        kind = (envelope.kind, task)
        if kind not in self._places:
            self._places[kind] = len(self._tasks)
            self._tasks.append(kind)
        self._kinds[index] = self._places[kind]
        if key is not None:
            self._keys[index] = key
            self._named.add(key)
        return envelope

    def _check_key(self, index: int, key: str | None) -> None:
        if key is not None and not check_text("key", key):
            raise InvalidRequest("key must not be empty")
        name = str(index) if key is None else key
        if name in self._named or (key is not None and self._is_number(key, index)):
            raise InvalidRequest(f"key {name!r} stands twice in batch {self.id}")

    def _is_number(self, key: str, index: int) -> bool:
        """Whether an earlier job without a key has this one as its number."""
        number = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
        return 0 <= number < index and number not in self._keys and str(number) == key

    def _refuse_own(self, options: CallOptions, *, identity: bool = False) -> None:
        if options.id not in (UNSET, None):
            raise InvalidRequest("a batch names its jobs: give them a key, no id")
        if identity and options.identity not in (UNSET, None):
            raise InvalidRequest("the identity of a batch is given to hg.batch(...)")

    def __enter__(self) -> Self:
        self._block = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.flush()
            else:
                with self._sending:
                    dropped = self._sender.drop()
                self._note(error, f"{dropped} buffered jobs were dropped")
        except KeyboardInterrupt as stop:
            with self._sending:
                dropped = self._sender.drop()
            self._note(stop, f"{dropped} buffered jobs were dropped")
            raise
        finally:
            with self._following.changed:
                self._block = None
                self._following.changed.notify_all()
            self._tell(resting=True)

    def _note(self, error: BaseException, *more: str) -> None:
        text = f"batch {self.id}: {self.sent} jobs were sent and go on"
        error.add_note("; ".join((text, *more)))

    # Following.

    @property
    def sent(self) -> int:
        """How many jobs are in the store."""
        return self._following.sent

    @property
    def failed(self) -> list[BatchItem]:
        """Those that are over and did not succeed, so far, in the order of the jobs."""
        with self._following.changed:
            ended = sorted(self._following.failed.values(), key=lambda e: e.index)
        return [self._item(one) for one in ended]

    def as_completed(
        self, timeout: timedelta | str | None = None
    ) -> Iterator[BatchItem]:
        """Yield each job once, in the order in which they are seen to end.

        Several iterations, one after another or in several threads, share the jobs.
        While another thread's block is open it waits for more; on the thread of the
        block it sends what is buffered, and ends with what was sent so far.

        Args:
            timeout: of the whole iteration.

        Raises:
            BatchTimeout: the jobs go on, and another iteration may follow.
            StoreUnavailable: an outage longer than the patience; as above.
        """
        until_s = self._until(timeout)
        self._send_rest()
        return self._iterate(until_s)

    def _iterate(self, until_s: float) -> Iterator[BatchItem]:
        following = self._following
        try:
            with following.listening():
                while True:
                    ended = following.next_ended()
                    if ended is not None:
                        yield self._item(ended)
                        continue
                    if not self._await(until_s, lambda: bool(following.untaken)):
                        return
        except KeyboardInterrupt as stop:
            self._note(stop)
            raise
        finally:
            self._tell(resting=True)

    def wait(self, timeout: timedelta | str | None = None) -> BatchSummary:
        """Wait until every job is over; no result is read.

        Raises:
            BatchTimeout, StoreUnavailable: as `as_completed`.
        """
        until_s = self._until(timeout)
        self._send_rest()
        try:
            with self._following.listening():
                while self._await(until_s, lambda: False):
                    pass
        except KeyboardInterrupt as stop:
            self._note(stop)
            raise
        finally:
            self._tell(resting=True)
        return self._summary()

    def results(
        self,
        timeout: timedelta | str | None = None,
        *,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Wait for all, and read what their handlers returned, in order of the jobs.

        One read per job. Jobs that were refused are left out; one whose row is gone
        counts as done and has no value.

        Args:
            timeout: of the waiting.
            return_exceptions: put a `JobFailed` in the place of a job that failed.

        Raises:
            JobFailed: the first that did not succeed.
            BatchTimeout, StoreUnavailable: as `as_completed`.
        """
        self.wait(timeout)
        values: list[Any] = []
        for index in range(self._count):
            if not self._following.is_over(index):
                continue
            failed = self._following.failed.get(index)
            ended = failed or Ended(index, State.COMPLETED, None)
            completion = self._item(ended).completion
            if completion.succeeded:
                values.append(completion.value)
            elif return_exceptions:
                values.append(JobFailed(completion))
            else:
                raise JobFailed(completion)
        return values

    def cancel(self) -> int:
        """Cancel what is not over, and take no more jobs; callable from any thread.

        Jobs that others enqueued and that were only joined go on.

        Returns:
            How many jobs were cancelled.
        """
        with self._following.changed:
            self._cancelled = True
            self._following.changed.notify_all()
        return self._cancel_sent()

    def _cancel_sent(self) -> int:
        own_ids = self._following.own_ids()
        count = sum(
            self._inspect.cancel_jobs(own_ids[start : start + MAX_JOBS])
            for start in range(0, len(own_ids), MAX_JOBS)
        )
        self._following.look_soon()
        return count

    # How it stands.

    def _until(self, timeout: timedelta | str | None) -> float:
        if timeout is None:
            return float("inf")
        timeout_ms = duration_ms("timeout", timeout)
        return self._following.pace.now_s() + timeout_ms / 1000

    def _send_rest(self) -> None:
        if self._block in (None, threading.get_ident()):
            self.flush()

    def _await(self, until_s: float, enough: Callable[[], bool]) -> bool:
        """Wait for news; False when there is nothing left to wait for.

        Raises:
            BatchTimeout: `until_s` came first.
        """
        following = self._following
        with following.changed:
            if enough():
                return True
            others = self._block not in (None, threading.get_ident())
            if not others and not following.outstanding and not len(self._sender):
                return False
            unsent = not others and not following.outstanding
            if following.pace.now_s() >= until_s:
                raise BatchTimeout(
                    following.some_id() or self.id, following.outstanding
                )
        if unsent:
            self.flush()  # added by the body of the loop
            return True
        following.turn(until_s, lambda: enough() or self._is_settled(others))
        self._tell()
        return True

    def _is_settled(self, others: bool) -> bool:
        """Whether a block that was open elsewhere has ended meanwhile."""
        return others and self._block is None

    def _item(self, ended: Ended) -> BatchItem:
        index = ended.index
        job_id = self._following.ids.get(index) or self._own_id(index)
        completion: Completion[Any] = Completion(
            job_id=job_id,
            state=ended.state,
            error=ended.error,
            load=lambda: self._load(job_id) if ended.succeeded else None,
            read=lambda result: self._reader(index)(result),
        )
        return BatchItem(
            index=index,
            key=self._keys.get(index, str(index)),
            job_id=job_id,
            completion=completion,
        )

    def _own_id(self, index: int) -> str:
        return f"{self.id}:{self._keys.get(index, index)}"

    def _load(self, job_id: str) -> JobResult | None:
        results = self._client.store.results
        if results is None:
            return None
        pace = self._following.pace
        return pace.sit_out(
            lambda: results.read_result(job_id), pace.now_s() + self._patience_s
        )

    def _reader(self, index: int) -> Reader:
        place = self._kinds[index]
        if place not in self._readers:
            kind, task = self._tasks[place]
            self._readers[place] = reader_of(kind, task, self._client.registry)
        return self._readers[place]

    def _summary(self) -> BatchSummary:
        following = self._following
        with following.changed:
            seconds = following.last_s - (following.first_s or 0.0)
            done = following.done
            return BatchSummary(
                total=following.sent,
                by_state={str(s): count for s, count in following.by_state.items()},
                seconds=seconds,
                rate=done / seconds if seconds > 0 else 0.0,
            )

    def _tell(self, *, resting: bool = False) -> None:
        if self._progress is None:
            return
        now_s = self._following.pace.now_s()
        reason = self._sender.waiting_for
        if not resting and now_s < self._told_due_s and reason == self._told_reason:
            return
        if not self._telling.acquire(blocking=resting):
            return  # another thread is telling the same
        try:
            self._told_due_s = now_s + TELL_INTERVAL_S
            self._told_reason = reason
            self._progress(self._standing(now_s, resting))
        finally:
            self._telling.release()

    def _standing(self, now_s: float, resting: bool) -> BatchProgress:
        following = self._following
        with following.changed:
            passed_s = now_s - (
                now_s if following.first_s is None else following.first_s
            )
            rate = following.done / passed_s if passed_s > 0 else 0.0
            return BatchProgress(
                batch_id=self.id,
                sent=following.sent,
                done=following.done,
                failed=len(following.failed),
                buffered=len(self._sender),
                rate=rate,
                left_seconds=following.outstanding / rate if rate else None,
                waiting_for=self._sender.waiting_for,
                resting=resting,
            )


def _under(request: JobRequest, base: CallOptions) -> CallOptions:
    """The options of a request, and those of the batch where it has none."""
    own = request.options
    if not base.given:
        return own
    if not own.given:
        return base
    values = {**base.given, **own.given}
    for one, other in (("delay", "run_at"), ("run_at", "delay")):
        if one in own.given and other not in own.given:
            values.pop(other, None)
    return CallOptions(**values)
