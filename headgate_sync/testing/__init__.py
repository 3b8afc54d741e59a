"""What the tests of an application need: assertions, handlers run in place, stores.

Each name is loaded when it is first used: the pytest plugin is imported by every run of
pytest, also by those that never ask for a fixture.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate_sync.testing.clock import FakeClock as FakeClock
    from headgate_sync.testing.database import (
        PgTestStore as PgTestStore,
    )
    from headgate_sync.testing.database import (
        PostgresTestDatabase as PostgresTestDatabase,
    )
    from headgate_sync.testing.expectations import Enqueued as Enqueued
    from headgate_sync.testing.expectations import assert_enqueued as assert_enqueued
    from headgate_sync.testing.expectations import find_enqueued as find_enqueued
    from headgate_sync.testing.expectations import refute_enqueued as refute_enqueued
    from headgate_sync.testing.inline import enqueue_inline as enqueue_inline
    from headgate_sync.testing.running import Performed as Performed
    from headgate_sync.testing.running import drain as drain
    from headgate_sync.testing.running import perform_job as perform_job
    from headgate_sync.testing.single import resume_after as resume_after
    from headgate_sync.testing.single import resume_at_cursor as resume_at_cursor
    from headgate_sync.testing.single import run_handler as run_handler
    from headgate_sync.testing.stores import (
        assert_enqueue_backpressure as assert_enqueue_backpressure,
    )
    from headgate_sync.testing.stores import (
        assert_sticky_routing as assert_sticky_routing,
    )

_HOMES = {
    "clock": ("FakeClock",),
    "database": ("PgTestStore", "PostgresTestDatabase"),
    "expectations": (
        "Enqueued",
        "assert_enqueued",
        "find_enqueued",
        "refute_enqueued",
    ),
    "inline": ("enqueue_inline",),
    "running": ("Performed", "drain", "perform_job"),
    "single": ("resume_after", "resume_at_cursor", "run_handler"),
    "stores": ("assert_enqueue_backpressure", "assert_sticky_routing"),
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
