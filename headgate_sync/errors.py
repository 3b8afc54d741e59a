"""Every exception of the package: one tree under `HeadgateError`.

Facts are attributes; the message is built from them. Match on the class and read the
attributes, never the text. `retryable` is true only where repeating the same call with
the same arguments can succeed.
"""

from __future__ import annotations

from typing import Any, ClassVar


def _restored(
    kind: type[HeadgateError], arguments: tuple[object, ...], facts: dict[str, object]
) -> HeadgateError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(facts)
    return error


class HeadgateError(Exception):
    """Root of all errors that this package raises on purpose."""

    retryable: ClassVar[bool] = False
    #: Place of the job to blame, where a batch script sent it.
    item_index: int | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are copied by calling their class with `args`, which fails where a
        # fact is a keyword; an error raised in a child process must reach its parent.
        return _restored, (type(self), self.args, self.__dict__)


# What a store raises.


class StoreError(HeadgateError):
    """Base of everything that a store call raises."""


class DuplicateJob(StoreError):
    """The unique key is held by another job.

    Attributes:
        existing_id: id of the holder. A throttle key may name a job whose row is gone.
        replaced: the request asked to replace or debounce, and the holder was changed.
    """

    def __init__(self, existing_id: str, *, replaced: bool = False) -> None:
        super().__init__(existing_id, replaced)
        self.existing_id = existing_id
        self.replaced = replaced

    def __str__(self) -> str:
        done = "was changed as requested" if self.replaced else "is unchanged"
        return f"unique key is held by job {self.existing_id}, which {done}"


class IdConflict(StoreError):
    """The id belongs to a job of other content, or stands twice in one batch."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return (
            f"id conflict: job {self.job_id} exists with other content, "
            "or stands twice in this batch"
        )


class FingerprintQuarantined(StoreError):
    """Jobs of this content killed their workers; none is taken in until released."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.fingerprint = fingerprint

    def __str__(self) -> str:
        return (
            f"fingerprint {self.fingerprint} is quarantined, as jobs of this content "
            "killed their workers; release it first"
        )


class Backpressure(StoreError):
    """The queue holds as many unfinished jobs as its limit allows.

    Attributes:
        limit: the configured number of unfinished jobs.
        current: unfinished jobs at the decision.
        incoming: jobs of the refused batch for this queue.
    """

    def __init__(self, queue: str, *, limit: int, current: int, incoming: int) -> None:
        super().__init__(queue, limit, current, incoming)
        self.queue = queue
        self.limit = limit
        self.current = current
        self.incoming = incoming

    def __str__(self) -> str:
        return (
            f"queue {self.queue} is full: limit {self.limit}, "
            f"current {self.current}, incoming {self.incoming}"
        )


class LeaseRejected(StoreError):
    """The caller does not hold the job any more and must stop working on it.

    Attributes:
        missing: the row is gone altogether.
    """

    def __init__(self, job_id: str, *, missing: bool = False) -> None:
        super().__init__(job_id, missing)
        self.job_id = job_id
        self.missing = missing

    def __str__(self) -> str:
        why = "the job is gone" if self.missing else "the lease is not held"
        return f"lease rejected for job {self.job_id}: {why}; stop the work"


class NotFound(StoreError):
    """A control call names something that does not exist."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.message = what

    @classmethod
    def job(cls, job_id: str) -> NotFound:
        """No job has this id."""
        return cls(f"job {job_id} does not exist")

    @classmethod
    def schedule(cls, schedule_id: str) -> NotFound:
        """No schedule has this id."""
        return cls(f"schedule {schedule_id} does not exist")

    @classmethod
    def quarantine(cls, fingerprint: str) -> NotFound:
        """Nothing is quarantined under this fingerprint."""
        return cls(f"fingerprint {fingerprint} is not quarantined")

    @classmethod
    def worker(cls, worker_id: str) -> NotFound:
        """No worker has this id."""
        return cls(f"worker {worker_id} does not exist")


class InvalidRequest(StoreError, ValueError):
    """The call breaks a rule; nothing was written. The text names field and limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SpecError(InvalidRequest):
    """A schedule's spec is none, names an unknown zone, or never fires."""


class StoreUnavailable(StoreError):
    """The database did not answer or refused service; what happened is not known."""

    retryable = True

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StoreConflict(StoreUnavailable):
    """Concurrent transactions collided and the store's own tries are used up."""

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class StoreClosed(StoreUnavailable):
    """This program has closed the store, or the pool below it."""

    retryable = False


def may_pass(error: BaseException) -> bool:
    """Whether the same call may be answered later: an outage, but no closed store."""
    return isinstance(error, StoreUnavailable) and error.retryable


class BackendError(StoreError):
    """The database refused a statement for a reason that has no class of its own."""

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.sqlstate = sqlstate

    @property
    def lacks_right(self) -> bool:
        """Whether the role of the connection may not do that."""
        return self.sqlstate == "42501"


# What clients, workers and command lines raise.


class ConfigurationError(HeadgateError):
    """The program is set up wrongly; command lines end with exit code 2."""


class MissingExtra(ConfigurationError, ImportError):
    """A module needs a package that comes with an extra; the text names the extra."""


class Unsupported(HeadgateError):
    """This store lacks the capability, or the handle's driver cannot be joined."""

    def __init__(self, capability: str, detail: str = "") -> None:
        super().__init__(capability, detail)
        self.capability = capability
        self.detail = detail

    def __str__(self) -> str:
        return self.detail or f"not supported by this store: {self.capability}"


class EnqueueForbidden(HeadgateError):
    """The authorizer refused a job of this kind, or a middleware dropped a job that the
    caller was going to wait for; nothing of the batch was written."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind

    def __str__(self) -> str:
        return f"enqueueing jobs of kind {self.kind} is not allowed here"


class CircuitRejected(HeadgateError):
    """The circuit breaker lets no call through, after the store did not answer.

    Attributes:
        state: "open" or "half_open".
        retry_after_ms: until the next try is let through; 0 while others try.
    """

    retryable = True

    def __init__(self, state: str, retry_after_ms: int) -> None:
        super().__init__(state, retry_after_ms)
        self.state = state
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        when = f"try again in {self.retry_after_ms} ms"
        if self.state == "half_open":
            when = "others are trying it"
        return f"the store did not answer, the circuit is {self.state}: {when}"


class WaitTimeout(HeadgateError):
    """A job was not finished in time; it goes on."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"job {self.job_id} is not finished; it goes on"


class BatchTimeout(WaitTimeout):
    """Jobs of a batch were not finished in time; they go on.

    Attributes:
        job_id: one of them.
        outstanding: how many.
    """

    def __init__(self, job_id: str, outstanding: int) -> None:
        super().__init__(job_id)
        self.args = (job_id, outstanding)
        self.outstanding = outstanding

    def __str__(self) -> str:
        return (
            f"{self.outstanding} jobs are not finished, as job {self.job_id}; "
            "they go on"
        )


class JobFailed(HeadgateError):
    """A job that somebody waited for did not succeed.

    Attributes:
        completion: how it ended; see `headgate_sync.client.waiting.Completion`.
    """

    def __init__(self, completion: Any) -> None:
        super().__init__(completion)
        self.completion = completion

    def __str__(self) -> str:
        ended = self.completion
        why = f": {ended.error}" if ended.error else ""
        return f"job {ended.job_id} ended {ended.state}{why}"


class CodecError(HeadgateError):
    """A stored payload cannot become the handler's value; the job is undecodable."""


class MalformedPayload(CodecError):
    """The bytes are not a payload of the version they claim."""


class UnknownSchemaVersion(CodecError):
    """No upcaster leads from the stored version to the present one."""

    def __init__(self, version: int, detail: str = "") -> None:
        super().__init__(version, detail)
        self.version = version
        self.detail = detail

    def __str__(self) -> str:
        return self.detail or f"no way to read schema version {self.version}"


class StaleCheckpoint(HeadgateError):
    """The recorded steps are not those of the present code; the job is undecodable."""

    def __init__(self, expected: str, got: str, detail: str = "") -> None:
        super().__init__(expected, got, detail)
        self.expected = expected
        self.got = got
        self.detail = detail

    def __str__(self) -> str:
        return self.detail or (
            f"checkpoint expects step {self.expected!r}, "
            f"the handler entered {self.got!r}"
        )


class TrackedClosed(HeadgateError):
    """The handler has returned; no further thread can belong to its attempt."""


class ExtractionError(HeadgateError):
    """A handler parameter could not be filled; the handler was not entered."""

    def __init__(self, category: str, detail: str) -> None:
        super().__init__(category, detail)
        self.category = category
        self.detail = detail

    def __str__(self) -> str:
        return f"cannot fill a handler parameter ({self.category}): {self.detail}"


# What ends a running attempt from outside. Not `Exception`, so that a handler's
# `except Exception` cannot swallow it.


class AttemptCancelled(BaseException):
    """The running attempt must stop now."""


class LeaseLost(AttemptCancelled):
    """Another worker, or an operator, took the job away."""


class AttemptTimeout(AttemptCancelled):
    """The attempt ran longer than its timeout."""


class ShutdownRequested(AttemptCancelled):
    """The worker ends and its grace period is over."""
