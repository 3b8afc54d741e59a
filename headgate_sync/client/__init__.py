"""Enqueueing: typed jobs, the caller's transactions, follow-up jobs of handlers."""

from __future__ import annotations

from headgate_sync.client.bound import JobClient
from headgate_sync.client.client import Client
from headgate_sync.request import JobHandle, JobRequest

__all__ = ["Client", "JobClient", "JobHandle", "JobRequest"]
