"""Processes that a handler forks, and that leave its code."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import NoReturn


class ForksEndHere:
    """Ends a process that was forked inside of the block where it leaves the block."""

    __slots__ = ("_pid",)

    def __enter__(self) -> None:
        self._pid = os.getpid()

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if os.getpid() != self._pid:
            _end(error)


def _end(error: BaseException | None) -> NoReturn:
    """End a process that the handler forked, as the interpreter ends one.

    Its one thread would go on as the worker's: with the job, and with the connections,
    of its parent.

    Args:
        error: what it left the handler with; None for a return.
    """
    status = 1
    with suppress(Exception):  # standard error may be closed
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            status = error.code or 0
        elif isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        elif error is not None:
            traceback.print_exception(error)
        else:
            print(
                "a process that a handler forked returned from the handler: it is "
                "ended here; end it with os._exit()",
                file=sys.stderr,
            )
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)
