"""Loggers whose handlers cannot fail the code that logs, and lines nobody can forge."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from headgate_sync.errors import AttemptCancelled

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class GuardedLogger(_Adapter):
    """A logger that prints what a handler raises, as the handlers of Python do.

    Where a worker writes a line it is about to settle a job, or to go on with a loop
    that everything relies on; a log server that is away must not keep it from that.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log, and go on whatever comes of it."""
        if not self.isEnabledFor(level):
            return
        try:
            # One level up: the caller is where the line says it comes from.
            stacklevel = kwargs.pop("stacklevel", 1) + 1
            super().log(level, msg, *args, stacklevel=stacklevel, **kwargs)
        except (KeyboardInterrupt, AttemptCancelled):
            raise  # meant for this thread, and only came meanwhile
        except BaseException:
            if logging.raiseExceptions and sys.stderr is not None:
                _print_error()

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add nothing."""
        return msg, kwargs


def guarded(name: str) -> GuardedLogger:
    """The logger of a module on which a worker relies."""
    return GuardedLogger(logging.getLogger(name), None)


def _print_error() -> None:
    try:
        traceback.print_exc(file=sys.stderr)
    except Exception:
        return  # nobody is left to tell


def visible(text: str) -> str:
    r"""The text with everything that could steer a terminal written out, as `\x1b`.

    That are control characters, line ends, marks that change the direction of writing
    and lone surrogates; letters of every script stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


class OneLine(logging.Formatter):
    """Writes what the package logs on one line, which no name can forge or steer.

    Ids, queues and workers may have any name. Tracebacks keep their lines, and what
    others log stays as it is.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of a record, made visible when it is one of the package's."""
        line = super().formatMessage(record)
        return visible(line) if record.name.startswith("headgate_sync") else line
