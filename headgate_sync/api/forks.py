"""What an object of a parent process must forget in a forked child."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Afresh(Protocol):
    """Holds locks, threads or connections."""

    def start_afresh(self) -> None:
        """Forget them: they are the parent's."""
        ...


_objects: WeakSet[Afresh] = WeakSet()


def afresh_in_child(one: Afresh) -> None:
    """Let an object start afresh in every forked child, before anything else runs."""
    _objects.add(one)


def _in_child() -> None:
    for one in list(_objects):
        one.start_afresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
