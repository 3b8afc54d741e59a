"""File locks that end with their process and that a fork does not leak."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

# Guards `_open_locks` and every change of a descriptor against a fork in between.
_guard = threading.Lock()
_open_locks: set[FileLock] = set()


class FileLock:
    """One open lock file; what is held ends when it is closed or the process ends.

    A forked child shares the parent's open file, and with it the lock: it would hold
    the lock for as long as it lives, and an unlock in it would take the lock from the
    parent. So the descriptor is closed in every forked child at once, which leaves the
    parent's lock alone, and a lock is given up by closing, never by unlocking. The
    descriptor is not inherited over `exec`.

    Raises:
        OSError: the file cannot be opened or locked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with _guard:
            self._fd = os.open(path, flags, 0o600)
            _open_locks.add(self)

    def share(self) -> None:
        """Hold the lock together with other sharers; waits for an exclusive holder."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def exclude(self) -> None:
        """Hold the lock alone; waits for all other holders."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def try_share(self) -> bool:
        """Share the lock unless someone holds it alone."""
        return self._try(fcntl.LOCK_SH)

    def try_exclude(self) -> bool:
        """Hold the lock alone unless someone holds it."""
        return self._try(fcntl.LOCK_EX)

    def is_current(self) -> bool:
        """True while the path still names the open file, which a removal ends."""
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._fd), named)

    def close(self) -> None:
        """Give up what is held; a second call does nothing."""
        with _guard:
            if self in _open_locks:
                _open_locks.remove(self)
                os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _try(self, operation: int) -> bool:
        try:
            fcntl.flock(self._fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _close_all_in_child() -> None:
    global _guard
    for lock in _open_locks:
        os.close(lock._fd)
    _open_locks.clear()
    # New, not released: a server that forks in C may have skipped the hook before.
    _guard = threading.Lock()


def _acquire_guard() -> None:
    _guard.acquire()


def _release_guard() -> None:
    _guard.release()


os.register_at_fork(
    before=_acquire_guard,
    after_in_parent=_release_guard,
    after_in_child=_close_all_in_child,
)
