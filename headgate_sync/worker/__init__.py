"""Worker processes: `python -m headgate_sync.worker module:attribute`."""

from __future__ import annotations

from headgate_sync.worker.config import HandBack, WorkerConfig
from headgate_sync.worker.health import Health
from headgate_sync.worker.isolated import IsolatedProcess
from headgate_sync.worker.loops import LoopHealth
from headgate_sync.worker.outcomes import RetryInfo
from headgate_sync.worker.shutdown import ExitStatus
from headgate_sync.worker.worker import Worker

__all__ = [
    "ExitStatus",
    "HandBack",
    "Health",
    "IsolatedProcess",
    "LoopHealth",
    "RetryInfo",
    "Worker",
    "WorkerConfig",
]
