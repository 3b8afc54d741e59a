"""The names a user imports: pinned, explained, and listed in the reference."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import headgate_sync

REFERENCE = Path(headgate_sync.__file__).parents[1] / "docs" / "reference.md"

PUBLIC = {
    # the three things most programs use
    "Headgate", "JobContext", "TaskOptions", "Unique",
    # what a handler asks for by annotation, or from inside
    "Attempt", "BatchJob", "Data", "Depends", "JobClient", "Meta", "Metadata",
    "TaskId", "WorkerInfo", "current_job", "current_jobs",
    # its parts
    "Client", "IsolatedProcess", "Registry", "Worker", "WorkerConfig",
    # what stands between an enqueue and the store, and what comes of a job
    "CircuitBreaker", "EnqueueRequest", "Identity", "Plugin", "enqueue_identity",
    "enqueue_middleware", "Batch", "BatchItem", "BatchProgress", "BatchSummary",
    "Completion", "BatchTimeout", "CircuitRejected", "EnqueueForbidden", "JobFailed",
    "WaitTimeout",
    # stores
    "Store", "MemStore", "PgStore",
    # values
    "Envelope", "JobHandle", "JobRequest", "Outcome", "State",
    # what handlers raise on purpose
    "RateLimited", "Revoke", "Skip", "Snooze",
    # what stores raise
    "BackendError", "Backpressure", "DuplicateJob", "FingerprintQuarantined",
    "HeadgateError", "IdConflict", "InvalidRequest", "LeaseRejected", "NotFound",
    "SpecError", "StoreClosed", "StoreConflict", "StoreError", "StoreUnavailable",
    # what programs raise
    "CodecError", "ConfigurationError", "ExtractionError", "MalformedPayload",
    "StaleCheckpoint", "TrackedClosed", "UnknownSchemaVersion", "Unsupported",
    # what ends a running attempt
    "AttemptCancelled", "AttemptTimeout", "LeaseLost", "ShutdownRequested",
}  # fmt: skip


def test_the_public_names_are_the_pinned_ones():
    assert set(headgate_sync.__all__) == PUBLIC
    assert sorted(headgate_sync.__all__) == sorted(set(headgate_sync.__all__))


def test_every_public_name_explains_itself():
    silent = []
    for name in PUBLIC:
        found = getattr(headgate_sync, name)
        # A class would otherwise show the text of its base.
        own = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
        if not own:
            silent.append(name)
    assert silent == []


def test_every_public_method_explains_itself():
    silent = []
    for name in PUBLIC:
        found = getattr(headgate_sync, name)
        for attribute, value in vars(found).items():
            method = value.fget if isinstance(value, property) else value
            if (
                inspect.isfunction(method)
                and not attribute.startswith("_")
                and not method.__doc__
            ):
                silent.append(f"{name}.{attribute}")
    assert silent == []


def test_every_public_name_has_a_line_in_the_reference():
    text = REFERENCE.read_text()
    missing = [name for name in sorted(PUBLIC) if not re.search(rf"`{name}\b", text)]
    assert missing == []


def test_the_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", headgate_sync.__version__)
