"""`Page`: a part of a list, and where the next part begins."""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import frozen

T = TypeVar("T")


@frozen
class Page(Generic[T]):
    """A part of a list.

    Attributes:
        items: in the order of the list.
        next_cursor: what to ask for the next part with; None when the page was not
            full, so that nothing follows.
    """

    items: tuple[T, ...]
    next_cursor: str | None = None
