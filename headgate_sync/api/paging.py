"""Pages of the control lists, whose cursor travels in a header."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from headgate_sync.api.answers import Answer, HttpError, as_json
from headgate_sync.api.shapes import INTEGER, Given, Out, listed
from headgate_sync.inspection import MAX_PAGE

NEXT = "x-next-cursor"
PAGED = (
    Given(
        "limit",
        INTEGER,
        default=MAX_PAGE,
        limits={"minimum": 1, "maximum": MAX_PAGE},
    ),
    Given("cursor", meaning=f"the header {NEXT} of the page before"),
)
PAGED_HEADERS = {NEXT: "where the next page begins; absent at the end"}


def limit_of(query: dict[str, Any] | Any, most: int = MAX_PAGE) -> int:
    """The size of a page.

    Raises:
        HttpError: 400, out of range.
    """
    limit: int = query["limit"]
    if not 1 <= limit <= most:
        raise HttpError(400, f"limit must be between 1 and {most}")
    return limit


def cursor_of(query: Any) -> str | None:
    """The place behind which a page begins, or None for the first.

    Raises:
        HttpError: 400, no cursor of a page.
    """
    text: str | None = query["cursor"]
    if text is None:
        return None
    try:
        padded = text + "=" * (-len(text) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise HttpError(400, "bad cursor") from None


def page(out: Out, values: Sequence[Any], next_place: str | None) -> Answer:
    """A list, and in a header where it goes on.

    A place may be any text, and headers may not: it is sent as base64.
    """
    headers = {}
    if next_place is not None:
        sent = base64.urlsafe_b64encode(next_place.encode()).decode().rstrip("=")
        headers[NEXT] = sent
    return as_json(listed(out).write(values), headers=headers)


def offset_of(query: Any) -> int:
    """The place in a list that is read as a whole.

    Raises:
        HttpError: 400, no cursor of a page.
    """
    text = cursor_of(query)
    if text is None:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise HttpError(400, "bad cursor")
    return int(text)


def slice_page(out: Out, values: Sequence[Any], query: Any) -> Answer:
    """A page of a list that was read as a whole."""
    start, limit = offset_of(query), limit_of(query)
    end = start + limit
    return page(out, values[start:end], str(end) if end < len(values) else None)
