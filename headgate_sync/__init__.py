"""A synchronous, thread-based job queue on PostgreSQL."""

from __future__ import annotations

__version__ = "0.1.0"
