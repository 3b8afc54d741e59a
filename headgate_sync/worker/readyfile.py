"""The ready file: liveness of a worker for a supervisor that can only look at files."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path

from headgate_sync.errors import ConfigurationError


class ReadyFile:
    """A file that exists while the worker takes jobs, and is written with every beat.

    Its modification time says that the worker lives, its one line how it is doing.

    Raises:
        ConfigurationError: the path cannot be written.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()  # the application may change its working directory
        self._path = path
        self._fresh = path.with_name(f".{path.name}.{os.getpid()}")
        self._lock = threading.Lock()  # guards the files, and the next field
        self._removed = False
        try:
            # Left by a process that was killed, it would say that this one is ready.
            path.unlink(missing_ok=True)
            self._fresh.touch()
            self._fresh.unlink()
        except OSError as error:
            raise ConfigurationError(
                f"the ready file {path} cannot be written: {error.strerror}"
            ) from error

    def write(self, line: str) -> None:
        """Replace the file, or make it; nothing after `remove`.

        Raises:
            OSError: not written.
        """
        with self._lock:
            if not self._removed:
                self._fresh.write_text(f"{line}\n")
                self._fresh.replace(self._path)

    def remove(self) -> None:
        """The worker takes no more jobs; a second call does nothing."""
        with self._lock:
            if not self._removed:
                self._removed = True
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)


def complaint(path: Path, *, max_age_ms: int) -> str | None:
    """What is wrong with the worker behind a ready file; None when it is well.

    Args:
        path: of the file.
        max_age_ms: the age from which on it counts as left by a dead process.
    """
    try:
        written_s = path.stat().st_mtime
        health = json.loads(path.read_text())
        healthy, status = bool(health["healthy"]), str(health["status"])
    except FileNotFoundError:
        return f"{path} does not exist: no worker is ready"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{path} is no ready file"
    age_ms = int((time.time() - written_s) * 1000)
    if age_ms > max_age_ms:
        return f"{path} was written {age_ms} ms ago, allowed are {max_age_ms}"
    if not healthy:
        return f"the worker says that it is unhealthy, status {status}"
    return None
