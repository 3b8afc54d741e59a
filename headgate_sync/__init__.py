"""A synchronous, thread-based job queue on PostgreSQL.

Each name is loaded when it is first used, so that importing the package costs next to
nothing and a producer pays only for what it touches.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate_sync.app import Headgate as Headgate
    from headgate_sync.binding import BatchJob as BatchJob
    from headgate_sync.client import Client as Client
    from headgate_sync.client import JobClient as JobClient
    from headgate_sync.client.batch import Batch as Batch
    from headgate_sync.client.batch_values import BatchItem as BatchItem
    from headgate_sync.client.batch_values import BatchProgress as BatchProgress
    from headgate_sync.client.batch_values import BatchSummary as BatchSummary
    from headgate_sync.client.circuit import CircuitBreaker as CircuitBreaker
    from headgate_sync.client.pipeline import EnqueueRequest as EnqueueRequest
    from headgate_sync.client.pipeline import Plugin as Plugin
    from headgate_sync.client.pipeline import enqueue_middleware as enqueue_middleware
    from headgate_sync.client.waiting import Completion as Completion
    from headgate_sync.context import (
        JobContext as JobContext,
    )
    from headgate_sync.context import (
        current_job as current_job,
    )
    from headgate_sync.context import (
        current_jobs as current_jobs,
    )
    from headgate_sync.envelope import Envelope as Envelope
    from headgate_sync.errors import (
        AttemptCancelled as AttemptCancelled,
    )
    from headgate_sync.errors import (
        AttemptTimeout as AttemptTimeout,
    )
    from headgate_sync.errors import (
        BackendError as BackendError,
    )
    from headgate_sync.errors import (
        Backpressure as Backpressure,
    )
    from headgate_sync.errors import BatchTimeout as BatchTimeout
    from headgate_sync.errors import CircuitRejected as CircuitRejected
    from headgate_sync.errors import (
        CodecError as CodecError,
    )
    from headgate_sync.errors import (
        ConfigurationError as ConfigurationError,
    )
    from headgate_sync.errors import (
        DuplicateJob as DuplicateJob,
    )
    from headgate_sync.errors import EnqueueForbidden as EnqueueForbidden
    from headgate_sync.errors import (
        ExtractionError as ExtractionError,
    )
    from headgate_sync.errors import (
        FingerprintQuarantined as FingerprintQuarantined,
    )
    from headgate_sync.errors import (
        HeadgateError as HeadgateError,
    )
    from headgate_sync.errors import (
        IdConflict as IdConflict,
    )
    from headgate_sync.errors import (
        InvalidRequest as InvalidRequest,
    )
    from headgate_sync.errors import JobFailed as JobFailed
    from headgate_sync.errors import (
        LeaseLost as LeaseLost,
    )
    from headgate_sync.errors import (
        LeaseRejected as LeaseRejected,
    )
    from headgate_sync.errors import (
        MalformedPayload as MalformedPayload,
    )
    from headgate_sync.errors import (
        NotFound as NotFound,
    )
    from headgate_sync.errors import (
        ShutdownRequested as ShutdownRequested,
    )
    from headgate_sync.errors import (
        SpecError as SpecError,
    )
    from headgate_sync.errors import (
        StaleCheckpoint as StaleCheckpoint,
    )
    from headgate_sync.errors import (
        StoreClosed as StoreClosed,
    )
    from headgate_sync.errors import (
        StoreConflict as StoreConflict,
    )
    from headgate_sync.errors import (
        StoreError as StoreError,
    )
    from headgate_sync.errors import (
        StoreUnavailable as StoreUnavailable,
    )
    from headgate_sync.errors import (
        TrackedClosed as TrackedClosed,
    )
    from headgate_sync.errors import (
        UnknownSchemaVersion as UnknownSchemaVersion,
    )
    from headgate_sync.errors import (
        Unsupported as Unsupported,
    )
    from headgate_sync.errors import WaitTimeout as WaitTimeout
    from headgate_sync.identity import Identity as Identity
    from headgate_sync.identity import enqueue_identity as enqueue_identity
    from headgate_sync.injection import Attempt as Attempt
    from headgate_sync.injection import Data as Data
    from headgate_sync.injection import Depends as Depends
    from headgate_sync.injection import Meta as Meta
    from headgate_sync.injection import Metadata as Metadata
    from headgate_sync.injection import TaskId as TaskId
    from headgate_sync.injection import WorkerInfo as WorkerInfo
    from headgate_sync.lifecycle import Outcome as Outcome
    from headgate_sync.lifecycle import State as State
    from headgate_sync.memory.store import MemStore as MemStore
    from headgate_sync.options import TaskOptions as TaskOptions
    from headgate_sync.options import Unique as Unique
    from headgate_sync.postgres.store import PgStore as PgStore
    from headgate_sync.registry import Registry as Registry
    from headgate_sync.request import JobHandle as JobHandle
    from headgate_sync.request import JobRequest as JobRequest
    from headgate_sync.signals import (
        RateLimited as RateLimited,
    )
    from headgate_sync.signals import (
        Revoke as Revoke,
    )
    from headgate_sync.signals import (
        Skip as Skip,
    )
    from headgate_sync.signals import (
        Snooze as Snooze,
    )
    from headgate_sync.store import Store as Store
    from headgate_sync.worker import IsolatedProcess as IsolatedProcess
    from headgate_sync.worker import Worker as Worker
    from headgate_sync.worker import WorkerConfig as WorkerConfig

__version__ = "0.1.0"

# The same names as above, by module: what a type checker reads and what is loaded.
_HOMES = {
    "identity": (
        "Identity",
        "enqueue_identity",
    ),
    "client.waiting": ("Completion",),
    "client.pipeline": (
        "EnqueueRequest",
        "Plugin",
        "enqueue_middleware",
    ),
    "client.circuit": ("CircuitBreaker",),
    "client.batch": (
        "Batch",
        "BatchItem",
        "BatchProgress",
        "BatchSummary",
    ),
    "app": ("Headgate",),
    "binding": ("BatchJob",),
    "client": (
        "Client",
        "JobClient",
    ),
    "context": (
        "JobContext",
        "current_job",
        "current_jobs",
    ),
    "envelope": ("Envelope",),
    "errors": (
        "WaitTimeout",
        "JobFailed",
        "EnqueueForbidden",
        "CircuitRejected",
        "BatchTimeout",
        "AttemptCancelled",
        "AttemptTimeout",
        "BackendError",
        "Backpressure",
        "CodecError",
        "ConfigurationError",
        "DuplicateJob",
        "ExtractionError",
        "FingerprintQuarantined",
        "HeadgateError",
        "IdConflict",
        "InvalidRequest",
        "LeaseLost",
        "LeaseRejected",
        "MalformedPayload",
        "NotFound",
        "ShutdownRequested",
        "SpecError",
        "StaleCheckpoint",
        "StoreClosed",
        "StoreConflict",
        "StoreError",
        "StoreUnavailable",
        "TrackedClosed",
        "UnknownSchemaVersion",
        "Unsupported",
    ),
    "injection": (
        "Attempt",
        "Data",
        "Depends",
        "Meta",
        "Metadata",
        "TaskId",
        "WorkerInfo",
    ),
    "lifecycle": (
        "Outcome",
        "State",
    ),
    "memory.store": ("MemStore",),
    "options": (
        "TaskOptions",
        "Unique",
    ),
    "postgres.store": ("PgStore",),
    "registry": ("Registry",),
    "request": (
        "JobHandle",
        "JobRequest",
    ),
    "signals": (
        "RateLimited",
        "Revoke",
        "Skip",
        "Snooze",
    ),
    "store": ("Store",),
    "worker": (
        "IsolatedProcess",
        "Worker",
        "WorkerConfig",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
