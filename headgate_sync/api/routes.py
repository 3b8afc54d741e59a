"""The table of routes."""

from __future__ import annotations

from headgate_sync.api import bulk, fleet, jobs, limits, periodic, queues, system
from headgate_sync.api.routing import Route

ROUTES: tuple[Route, ...] = (
    *system.ROUTES,
    *queues.ROUTES,
    *jobs.ROUTES,
    *bulk.ROUTES,
    *limits.ROUTES,
    *periodic.ROUTES,
    *fleet.ROUTES,
)
