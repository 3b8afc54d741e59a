"""Values by type: what a worker shares with its handlers, and attempts with nobody."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from headgate_sync.errors import InvalidRequest

T = TypeVar("T")


class Extensions:
    """One value per type. Any thread may use it; the values guard themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the map, not the values
        self._values: dict[type, Any] = {}

    def set(self, value: object, as_type: type | None = None) -> None:
        """Keep a value under its exact type, or under another one that it has.

        Raises:
            InvalidRequest: the value is no instance of `as_type`.
        """
        kind = as_type or type(value)
        if not isinstance(kind, type) or not isinstance(value, kind):
            raise InvalidRequest(
                f"extension of type {type(value).__name__} is no {kind!r}"
            )
        with self._lock:
            self._values[kind] = value

    def copy(self) -> Extensions:
        """The same values in a map of its own."""
        made = Extensions()
        with self._lock:
            made._values.update(self._values)
        return made

    def get(self, kind: type[T]) -> T | None:
        """The value under this exact type, or None."""
        with self._lock:
            return self._values.get(kind)
