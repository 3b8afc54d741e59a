"""Functions whose body does not run when they are called."""

from __future__ import annotations

import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TypeVar

from headgate_sync.errors import InvalidRequest

T = TypeVar("T")


def is_asynchronous(function: object) -> bool:
    """Whether a call gives a coroutine or an asynchronous generator, as far as is told.

    An object is asked for its `__call__`.
    """
    return any(
        test(each)
        for each in (function, getattr(type(function), "__call__", None))  # noqa: B004
        for test in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    )


def check_ran(what: str, value: T) -> T:
    """The value of a call, unless it says that the function's body has not run.

    Work that is booked as done must have been done, whatever the function was wrapped
    in: that is known of its value only.

    Raises:
        InvalidRequest: it is a coroutine or a generator.
    """
    if isinstance(value, CoroutineType):
        value.close()  # else the interpreter warns that nobody awaited it
    elif not isinstance(value, AsyncGeneratorType | GeneratorType):
        return value
    raise InvalidRequest(
        f"{what}: the function gave a {type(value).__name__}, so it has not run; "
        "give a plain function, not async def and not a generator"
    )
