"""Collects what handlers log, attempt by attempt, through the standard library."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from headgate_sync.context import ATTEMPT_KEY, running_attempt
from headgate_sync.loglines import LogBuffer, LogLine

if TYPE_CHECKING:
    from headgate_sync.attempt import LiveAttempt

_OWN = "headgate_sync"
_LEVELS = (
    (logging.ERROR, "error"),
    (logging.WARNING, "warn"),
    (logging.INFO, "info"),
)
# What every record has, or this package adds; everything else came through `extra`.
_STANDARD = frozenset(
    {
        *vars(logging.makeLogRecord({})),
        *("message", "asctime", "taskName"),
        *(ATTEMPT_KEY, "headgate_job_id", "headgate_queue"),
    }
)


class LogCapture(logging.Handler):
    """A handler on the root logger that keeps records for the attempt they belong to.

    That is the attempt whose context variables the logging thread has. Records of other
    threads, of this package and of other workers' attempts are left alone.
    """

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._making = threading.Lock()  # makes the buffer of an attempt once

    def install(self) -> None:
        """Begin to listen."""
        logging.getLogger().addHandler(self)

    def uninstall(self) -> None:
        """Stop that."""
        logging.getLogger().removeHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Like `emit`, without the lock that makes handlers take turns."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, if it belongs to an attempt; never raises."""
        try:
            self._stand_in(record)
            attempt = getattr(record, ATTEMPT_KEY, None) or running_attempt()
            if attempt is None or attempt.capture is not self:
                return
            if record.name.partition(".")[0] == _OWN:
                return
            buffer = attempt.logs or self._make(attempt)
            if buffer.takes:
                buffer.add(_line(record, attempt.store_now_ms()).encode())
            else:
                buffer.drop()
        except Exception:
            self.handleError(record)

    def _stand_in(self, record: logging.LogRecord) -> None:
        """Print warnings of a program without logging, as without this handler."""
        last = logging.lastResort
        if last is None or record.levelno < last.level:
            return
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        last.handle(record)

    def _make(self, attempt: LiveAttempt) -> LogBuffer:
        with self._making:
            if attempt.logs is None:
                attempt.logs = LogBuffer()
                if attempt.context is None:  # the attempt has just ended
                    attempt.logs.close()
            return attempt.logs


def _line(record: logging.LogRecord, at_ms: int) -> LogLine:
    level = next((name for low, name in _LEVELS if record.levelno >= low), "debug")
    fields: dict[str, Any] = {
        key: value for key, value in vars(record).items() if key not in _STANDARD
    }
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        fields.setdefault("exception", f"{type(error).__qualname__}: {_text(error)}")
    try:
        message = record.getMessage()
    except Exception as error:
        message = f"{record.msg!s} (arguments: {type(error).__name__})"
    return LogLine(level=level, message=message, at_ms=at_ms, fields=fields)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(no text: {type(broken).__name__})"
