"""`JobFilter`, which jobs a list shall show, and the text that stands for one."""

from __future__ import annotations

import re
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from attrs import evolve, field, fields, frozen

from headgate_sync.envelope import (
    MAX_INT32,
    MAX_TAG_BYTES,
    MAX_TAGS,
    check_identifier,
    check_int,
    check_text,
)
from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import STORED

MAX_QUERY_BYTES = 4096
# A row's number in the order of insertion; what is larger is in no store.
_CURSOR = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII)
_FIELDS = {
    "id": "id",
    "queue": "queue",
    "state": "state",
    "kind": "kind",
    "partition": "partition_key",
    "rate_class": "rate_class",
    "fingerprint": "fingerprint",
}
_TAG_FIELDS = {"tag": "tags_all", "tag_any": "tags_any"}
_KNOWN = (*_FIELDS, *_TAG_FIELDS, "priority")


def _tags(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise InvalidRequest("tags must be a list of texts")
    for tag in value:
        size = len(check_text("tag", tag).encode())
        if size > MAX_TAG_BYTES:
            raise InvalidRequest(
                f"a tag has {size} bytes, the limit is {MAX_TAG_BYTES}"
            )
    unique = tuple(sorted(set(value)))
    if len(unique) > MAX_TAGS:
        raise InvalidRequest(f"tags has {len(unique)} entries, the limit is {MAX_TAGS}")
    return unique


def stored_text(value: Any) -> Any:
    """The text that stands for a member of an enumeration; other values as they are."""
    return value.value if isinstance(value, StrEnum) else value


@frozen(kw_only=True)
class JobFilter:
    """What a job must be to be listed; all that is given must hold, None asks nothing.

    Attributes:
        state: one of the ten stored states, as `State` or its text.
        kind_prefix: how the kind begins, letter by letter.
        tags_all: the job carries every one of them.
        tags_any: the job carries at least one of them.
    """

    queue: str | None = None
    state: str | None = field(default=None, converter=stored_text)
    kind: str | None = None
    kind_prefix: str | None = None
    partition_key: str | None = None
    id: str | None = None
    fingerprint: str | None = None
    rate_class: str | None = None
    priority: int | None = None
    tags_all: tuple[str, ...] = field(default=(), converter=_tags)
    tags_any: tuple[str, ...] = field(default=(), converter=_tags)

    def __attrs_post_init__(self) -> None:
        for attribute in fields(JobFilter):
            value = getattr(self, attribute.name)
            if value is None or attribute.name in ("tags_all", "tags_any"):
                continue
            if attribute.name == "priority":
                check_int("priority", value, -MAX_INT32 - 1, MAX_INT32)
            else:
                check_identifier(attribute.name, check_text(attribute.name, value))
        if self.state is not None and self.state not in STORED:
            known = ", ".join(sorted(STORED))
            raise InvalidRequest(f"state `{self.state}` is not one of {known}")


def parse_query(text: str, given: JobFilter | None = None) -> JobFilter:
    """Read a search such as `queue:mail state:archived tag:eu welcome`.

    Terms are separated by blanks and must all hold. A term is `field:value`, split at
    its first colon, or the beginning of a kind. Fields are id, queue, state, kind,
    partition, rate_class, fingerprint, priority, tag (each of them) and tag_any (one of
    them). The last of repeated fields counts, except for tags, which add up. There are
    no quotes: a value with a blank needs a `JobFilter`.

    Args:
        text: at most 4,096 bytes.
        given: a filter to start from; what the text names replaces what it has.

    Raises:
        InvalidRequest: an unknown field, a priority that is no number, or a value that
            no job can have.
    """
    size = len(check_text("q", text).encode())
    if size > MAX_QUERY_BYTES:
        raise InvalidRequest(f"q has {size} bytes, the limit is {MAX_QUERY_BYTES}")
    found: dict[str, Any] = {}
    tags: dict[str, Any] = {}
    for term in filter(None, text.split(" ")):
        name, colon, value = term.partition(":")
        if not colon:
            field, equals, wanted = term.partition("=")
            if equals and field in _KNOWN:  # no kind begins so
                raise InvalidRequest(
                    f"`{term}` is no beginning of a kind, "
                    f"did you mean {field}:{wanted}?"
                )
            found["kind_prefix"] = term
        elif name in _TAG_FIELDS:
            tags.setdefault(_TAG_FIELDS[name], []).append(value)
        elif name in _FIELDS:
            found[_FIELDS[name]] = value
        elif name == "priority":
            if not _NUMBER.fullmatch(value):
                raise InvalidRequest(f"priority `{value}` is not a number")
            found[name] = int(value)
        else:
            # A kind may hold colons itself; a word that is nearly a field is a slip.
            near = get_close_matches(name, _KNOWN, n=1, cutoff=0.75)
            meant = f"{near[0]}:{value}" if near else f"kind:{term}"
            raise InvalidRequest(
                f"unknown search field `{name}`, did you mean {meant}?"
            )
    return evolve(given or JobFilter(), **found, **tags)


def read_cursor(cursor: str | None, end: int) -> int:
    """The row number before which a page starts; `end` without a cursor.

    Raises:
        InvalidRequest: not what a page gave out.
    """
    if cursor is None:
        return end
    if not isinstance(cursor, str) or not _CURSOR.fullmatch(cursor):
        raise InvalidRequest("bad cursor")
    return min(int(cursor), end)
