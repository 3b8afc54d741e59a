"""A private PostgreSQL server for development and tests, found or started on demand."""

from __future__ import annotations

import sys

from headgate_sync.errors import ConfigurationError

if sys.platform == "win32":
    raise ConfigurationError(
        "the embedded server needs file locks and sockets of a POSIX system: "
        "set HEADGATE_DATABASE_URL"
    )

from headgate_sync.embedded.binaries import Binaries, find_binaries
from headgate_sync.embedded.server import EmbeddedServer, installed, remove

__all__ = ["Binaries", "EmbeddedServer", "find_binaries", "installed", "remove"]
