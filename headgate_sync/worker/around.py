"""What an application has around its handlers: context managers made for each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from headgate_sync.callables import is_asynchronous
from headgate_sync.errors import InvalidRequest
from headgate_sync.injection import Dependencies

Around = Callable[[], AbstractContextManager[object]]
"""Makes what one call runs inside of; `current_jobs` says whose call it is."""


def check_around(around: Sequence[Around]) -> tuple[Around, ...]:
    """The value of the setting, as far as it can be told without a call.

    Raises:
        InvalidRequest: not a sequence, or one of them cannot be called, or not without
            arguments, or is no plain function.
    """
    if isinstance(around, str | bytes) or not isinstance(around, Sequence):
        raise InvalidRequest(f"around must be a sequence of callables, got {around!r}")
    for make in around:
        if not callable(make):
            raise InvalidRequest(f"around: {make!r} is not callable")
        if inspect.isgeneratorfunction(make):
            raise InvalidRequest(
                f"around: {make!r} lacks the decorator contextlib.contextmanager"
            )
        if is_asynchronous(make):
            raise InvalidRequest(f"around: {make!r} is asynchronous")
        if not _takes_nothing(make):
            raise InvalidRequest(f"around: {make!r} cannot be called without arguments")
    return tuple(around)


def _takes_nothing(make: Around) -> bool:
    try:
        signature = inspect.signature(make)
    except ValueError:  # a builtin that does not say
        return True
    try:
        signature.bind()
    except TypeError:
        return False
    return True


def enter_around(around: Sequence[Around], entered: Dependencies) -> None:
    """Make and enter them in order; what is entered when one fails is left later.

    Raises:
        BaseException: what one of them raised.
        InvalidRequest: one did not return a context manager.
    """
    for make in around:
        manager = make()
        if not isinstance(manager, AbstractContextManager):
            raise InvalidRequest(
                f"around: {make!r} returned {manager!r}, expected a context manager"
            )
        entered.enter(manager)
