"""What errors say, and that they travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from headgate_sync import errors
from headgate_sync.client.waiting import Completion
from headgate_sync.errors import (
    AttemptCancelled,
    AttemptTimeout,
    BackendError,
    Backpressure,
    BatchTimeout,
    CircuitRejected,
    CodecError,
    ConfigurationError,
    DuplicateJob,
    EnqueueForbidden,
    ExtractionError,
    FingerprintQuarantined,
    HeadgateError,
    IdConflict,
    InvalidRequest,
    JobFailed,
    LeaseLost,
    LeaseRejected,
    MalformedPayload,
    NotFound,
    ShutdownRequested,
    SpecError,
    StaleCheckpoint,
    StoreConflict,
    StoreError,
    StoreUnavailable,
    TrackedClosed,
    UnknownSchemaVersion,
    Unsupported,
    WaitTimeout,
)
from headgate_sync.lifecycle import State

TEXTS = [
    (DuplicateJob("a"), "unique key is held by job a, which is unchanged"),
    (
        DuplicateJob("a", replaced=True),
        "unique key is held by job a, which was changed as requested",
    ),
    (
        IdConflict("a"),
        "id conflict: job a exists with other content, or stands twice in this batch",
    ),
    (
        FingerprintQuarantined("f"),
        (
            "fingerprint f is quarantined, as jobs of this content killed their "
            "workers; release it first"
        ),
    ),
    (
        Backpressure("q", limit=25, current=24, incoming=2),
        "queue q is full: limit 25, current 24, incoming 2",
    ),
    (
        LeaseRejected("a"),
        "lease rejected for job a: the lease is not held; stop the work",
    ),
    (
        LeaseRejected("a", missing=True),
        "lease rejected for job a: the job is gone; stop the work",
    ),
    (NotFound.job("a"), "job a does not exist"),
    (NotFound.schedule("s"), "schedule s does not exist"),
    (SpecError("cron"), "cron"),
    (NotFound.quarantine("f"), "fingerprint f is not quarantined"),
    (InvalidRequest("no"), "no"),
    (StoreUnavailable("down"), "down"),
    (StoreConflict("again", sqlstate="40001"), "again"),
    (BackendError("odd", sqlstate="22003"), "odd"),
    (ConfigurationError("url"), "url"),
    (Unsupported("results"), "not supported by this store: results"),
    (Unsupported("results", "no"), "no"),
    (EnqueueForbidden("a"), "enqueueing jobs of kind a is not allowed here"),
    (
        CircuitRejected("open", 40),
        "the store did not answer, the circuit is open: try again in 40 ms",
    ),
    (
        CircuitRejected("half_open", 0),
        "the store did not answer, the circuit is half_open: others are trying it",
    ),
    (WaitTimeout("a"), "job a is not finished; it goes on"),
    (BatchTimeout("a", 3), "3 jobs are not finished, as job a; they go on"),
    (
        JobFailed(Completion(job_id="a", state=State.ARCHIVED, error="no")),
        "job a ended archived: no",
    ),
    (JobFailed(Completion(job_id="a", state=State.CANCELLED)), "job a ended cancelled"),
    (MalformedPayload("bad"), "bad"),
    (UnknownSchemaVersion(3), "no way to read schema version 3"),
    (
        StaleCheckpoint("fetch", "load"),
        "checkpoint expects step 'fetch', the handler entered 'load'",
    ),
    (StaleCheckpoint("a", "b", "the steps changed"), "the steps changed"),
    (TrackedClosed("job a: over"), "job a: over"),
    (
        ExtractionError("data", "no such thing"),
        "cannot fill a handler parameter (data): no such thing",
    ),
]


@pytest.mark.parametrize(
    ("error", "text"), TEXTS, ids=lambda value: type(value).__name__
)
def test_an_error_says_its_facts(error, text):
    assert str(error) == text


@pytest.mark.parametrize("error", [error for error, _ in TEXTS], ids=str)
def test_an_error_is_the_same_after_a_journey(error):
    error.add_note("seen in a child")
    for arrived in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(arrived) is type(error)
        assert vars(arrived) == vars(error)
        assert (str(arrived), arrived.args) == (str(error), error.args)


def test_only_an_outage_is_worth_the_same_call_again():
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, HeadgateError)
    ]
    retryable = {kind for kind in kinds if kind.retryable}
    assert retryable == {StoreUnavailable, StoreConflict, CircuitRejected}


def test_what_a_store_raises_has_one_root():
    assert issubclass(InvalidRequest, (StoreError, ValueError))
    for error, _ in TEXTS:
        assert isinstance(error, HeadgateError)
    outside = (
        ConfigurationError,
        Unsupported,
        CodecError,
        StaleCheckpoint,
        ExtractionError,
    )
    assert not any(issubclass(kind, StoreError) for kind in outside)


@pytest.mark.parametrize("kind", [LeaseLost, AttemptTimeout, ShutdownRequested])
def test_a_handler_does_not_swallow_the_end_of_its_attempt(kind):
    assert issubclass(kind, AttemptCancelled)
    assert not issubclass(kind, Exception)
