"""How a command ends: which error is which exit code, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from headgate_sync.cli.remote import HttpFailed
from headgate_sync.errors import (
    BackendError,
    ConfigurationError,
    EnqueueForbidden,
    HeadgateError,
    NotFound,
    StoreClosed,
    StoreConflict,
    StoreUnavailable,
)
from headgate_sync.loggers import visible

FAILED, USAGE, NOT_FOUND, REFUSED = 1, 2, 3, 4
INTERRUPTED = 130


class Failed(click.ClickException):
    """The end of a command; its text may hold what a terminal must not be sent.

    Args:
        message: what went wrong.
        exit_code: of the process.
        lines: line ends of the message are its own, and are kept.
    """

    def __init__(
        self, message: str, exit_code: int = FAILED, *, lines: bool = False
    ) -> None:
        super().__init__(message)
        self._parts = message.splitlines() if lines else [message]
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        """Print `headgate:` and the message."""
        told = "\n".join(map(visible, self._parts))
        click.echo(f"headgate: {told}", file=file, err=True)


@contextmanager
def mistakes_told() -> Iterator[None]:
    """Tell a mistake in the call as any other error, and where its help is.

    Raises:
        Failed: there was one.
    """
    try:
        yield
    except click.UsageError as error:
        # A noun alone is answered with its commands.
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            raise
        told = " ".join(error.format_message().split())
        path = "headgate" if error.ctx is None else error.ctx.command_path
        hint = f"Try '{path} --help' for help."
        raise Failed(f"{told}\n{hint}", USAGE, lines=True) from None


def exit_code(error: HeadgateError) -> int:
    """1 for what went wrong, 2 for the set-up, 3 for nothing there, 4 for refused."""
    if isinstance(error, HttpFailed):
        return {403: REFUSED, 404: NOT_FOUND}.get(error.status or 0, FAILED)
    if isinstance(error, BackendError):
        return REFUSED if error.lacks_right else FAILED
    if isinstance(error, ConfigurationError):
        return USAGE
    if isinstance(error, NotFound):
        return NOT_FOUND
    return REFUSED if isinstance(error, EnqueueForbidden) else FAILED


def fail(error: HeadgateError, named_by: str | None = None) -> NoReturn:
    """End the command as this error asks for.

    Args:
        error: what a command raised.
        named_by: what the database was taken from, to be looked at when it is silent.
    """
    told = str(error)
    met = isinstance(error, StoreConflict | StoreClosed)
    if isinstance(error, StoreUnavailable) and not met and named_by is not None:
        told = f"cannot use the database of {named_by}: {told}"
    # What is wrong with a set-up may end with the log of a server.
    lines = isinstance(error, ConfigurationError)
    raise Failed(told, exit_code(error), lines=lines) from error


def missing(what: str, name: str) -> Failed:
    """The end of a command that names what does not exist."""
    return Failed(f"{what} {name} does not exist", NOT_FOUND)
