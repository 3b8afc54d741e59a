"""`Envelope`: what a producer hands in and a claim hands out.

A value that exists is valid: the constructor checks every rule about one job and fills
the defaults that need no clock. Rules about a batch are in `validation`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from attrs import Attribute, field, fields, frozen

from headgate_sync.errors import InvalidRequest
from headgate_sync.loggers import visible

DEFAULT_QUEUE = "default"
DEFAULT_MAX_ATTEMPTS = 25
DEFAULT_SCHEMA_VERSION = 1
DEFAULT_WEIGHT = 1

MAX_KIND_BYTES = 128
MAX_IDENTIFIER_BYTES = 255
MAX_PAYLOAD_BYTES = 1_048_576
MAX_UNIQUE_KEY_BYTES = 1024
MAX_HEADERS = 128
MAX_HEADERS_BYTES = 65_536
MAX_TAGS = 32
MAX_TAG_BYTES = 64
MAX_INT32 = 2_147_483_647
MAX_INT64 = 9_223_372_036_854_775_807
MAX_RELATIVE_MS = 31_536_000_000_000  # a thousand years

UNIQUE_REPLACE_PAYLOAD = 1
UNIQUE_REPLACE_SCHEDULED_AT = 2
UNIQUE_REPLACE_PRIORITY = 4
UNIQUE_REPLACE_MAX_ATTEMPTS = 8
UNIQUE_REPLACE_ALL = 15

_WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
_KIND_REST = _WORD | frozenset(b"-[]<>/.:+")


def fingerprint(kind: str, payload: bytes) -> str:
    """Content identity of a job: 32 hex digits over kind and payload.

    The first 16 bytes of SHA-256 over both parts, each behind its length as 32-bit
    little-endian, so that no two (kind, payload) pairs run together.
    """
    name = kind.encode()
    digest = hashlib.sha256(struct.pack("<I", len(name)))
    digest.update(name)
    digest.update(struct.pack("<I", len(payload)))
    digest.update(payload)
    return digest.hexdigest()[:32]


def effective_unique_key(kind: str, key: bytes, *, exclude_kind: bool) -> bytes:
    """The form in which a unique key is stored: scoped to the kind, or global."""
    if exclude_kind:
        return b"\x01G" + key
    name = kind.encode()
    return b"\x01K" + struct.pack(">I", len(name)) + name + key


def lane_key(
    queue: str, partition_key: str, rate_class: str, sticky_worker: str
) -> int:
    """The signed 64-bit name of a lane; producers compute it, so they look up nothing.

    The first 8 bytes, big-endian, of SHA-256 over the four fields, each behind its
    length as 32-bit big-endian. Readers compare the fields too: names may collide.
    """
    digest = hashlib.sha256()
    for text in (queue, partition_key, rate_class, sticky_worker):
        raw = text.encode()
        digest.update(struct.pack(">I", len(raw)) + raw)
    return int.from_bytes(digest.digest()[:8], "big", signed=True)


@lru_cache(maxsize=1024)  # a program enqueues few kinds, each of them often
def _is_kind(kind: str) -> bool:
    raw = kind.encode("utf-8", "surrogatepass")
    return (
        1 <= len(raw) <= MAX_KIND_BYTES
        and raw[0] in _WORD
        and all(byte in _KIND_REST for byte in raw)
    )


def check_kind(kind: str) -> None:
    """Check a kind, or an alias of one.

    Raises:
        InvalidRequest: the text names the kind and the whole rule.
    """
    if not isinstance(kind, str) or not _is_kind(kind):
        raise InvalidRequest(
            f"invalid kind `{visible(str(kind))}`: 1-{MAX_KIND_BYTES} characters, "
            "first [A-Za-z0-9_], rest [A-Za-z0-9_] or one of -[]<>/.:+"
        )


def check_text(name: str, value: object) -> str:
    """Refuse what a text column cannot hold: other types, NUL, lone surrogates.

    Raises:
        InvalidRequest: the text names the field.
    """
    if type(value) is not str:
        raise InvalidRequest(f"{name} must be str, got {type(value).__name__}")
    if "\0" in value:
        raise InvalidRequest(f"{name} must not contain NUL (U+0000)")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} must not contain a lone surrogate") from None
    return value


def _size(text: str) -> int:
    """Length in bytes."""
    return len(text) if text.isascii() else len(text.encode())


def check_identifier(name: str, value: str, *, ascii_only: bool = False) -> None:
    """Check the length of a name in bytes (and that it is ASCII).

    Raises:
        InvalidRequest: the text names the field and the limit.
    """
    if ascii_only and not value.isascii():
        raise InvalidRequest(
            f"{name} must be ASCII, at most {MAX_IDENTIFIER_BYTES} bytes"
        )
    size = _size(value)
    if size > MAX_IDENTIFIER_BYTES:
        raise InvalidRequest(
            f"{name} has {size} bytes, the limit is {MAX_IDENTIFIER_BYTES}"
        )


def _check_is_int(name: str, value: object) -> None:
    if type(value) is not int:
        raise InvalidRequest(f"{name} must be int, got {type(value).__name__}")


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Check type and range of an integer; a bool is none.

    Raises:
        InvalidRequest: the text names field, value and range.
    """
    _check_is_int(name, value)
    assert isinstance(value, int)
    if not low <= value <= high:
        # Python refuses to write very long numbers as text.
        bits = value.bit_length()
        told = str(value) if bits <= 128 else f"a number of {bits} bits"
        raise InvalidRequest(f"{name} is {told}, allowed is {low} to {high}")
    return value


def check_bytes(name: str, value: object) -> None:
    """Refuse anything but bytes.

    Raises:
        InvalidRequest: the text names the field.
    """
    if type(value) is not bytes:
        raise InvalidRequest(f"{name} must be bytes, got {type(value).__name__}")


def _check_payload_size(payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(
            f"payload has {len(payload)} bytes, the limit is {MAX_PAYLOAD_BYTES}"
        )


def check_payload(payload: bytes, schema_version: int, fingerprint: str) -> None:
    """Check the three fields that an edit of a stored job replaces together.

    Raises:
        InvalidRequest: the text names field and limit.
    """
    check_bytes("payload", payload)
    check_int("schema_version", schema_version, 1, MAX_INT32)
    check_identifier("fingerprint", check_text("fingerprint", fingerprint))
    _check_payload_size(payload)


def _freeze_headers(value: object) -> Mapping[str, str]:
    if value is _NO_HEADERS:
        return _NO_HEADERS
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"headers must be a mapping, got {type(value).__name__}")
    for key, text in value.items():
        check_text("headers", key)
        check_text("headers", text)
    return MappingProxyType(dict(value)) if value else _NO_HEADERS


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def _sorted_tags(value: object) -> tuple[str, ...]:
    """Check and sort, so that a sent and a stored value are equal."""
    if value == ():
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise InvalidRequest(
            f"tags must be a sequence of str, got {type(value).__name__}"
        )
    tags = tuple(check_text("tags", tag) for tag in value)
    return tuple(sorted(tags))


def headers_json(headers: Mapping[str, str]) -> str:
    """Headers as stored: JSON with sorted keys and no blanks."""
    if not headers:
        return "{}"
    return json.dumps(
        dict(headers), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )


def _normal_queue(queue: str) -> str:
    return DEFAULT_QUEUE if queue == "" else queue


def _normal_version(version: int) -> int:
    return DEFAULT_SCHEMA_VERSION if version == 0 and type(version) is int else version


def _normal_weight(weight: int) -> int:
    return DEFAULT_WEIGHT if weight == 0 and type(weight) is int else weight


def _normal_attempts(count: int) -> int:
    return DEFAULT_MAX_ATTEMPTS if count == 0 and type(count) is int else count


def _check_ascii_tags(tags: tuple[str, ...]) -> None:
    if len(tags) > MAX_TAGS:
        raise InvalidRequest(f"tags has {len(tags)} entries, the limit is {MAX_TAGS}")
    for tag in tags:
        if not tag.isascii() or not 1 <= len(tag) <= MAX_TAG_BYTES:
            raise InvalidRequest(
                f"tag {tag!r} must be 1 to {MAX_TAG_BYTES} ASCII bytes"
            )
    if len(set(tags)) != len(tags):
        raise InvalidRequest("tags must not repeat")


@frozen(kw_only=True)
class Envelope:
    """One job as a producer describes it, or as a claim returns it.

    Durations and instants are milliseconds; instants count from the epoch on the
    store's clock. A claim carries every stored field. The request-only fields
    (`unique_window_ms`, `unique_replace`, `unique_debounce_ms`, `unique_exclude_kind`,
    `delay_ms`, `deadline_in_ms`) come back as their defaults, `unique_key` comes back
    while it is a lifecycle key. Payload and headers are left out where it shows itself.

    Attributes:
        id: the caller's identity for the job and its first idempotency boundary.
        kind: dispatch key.
        payload: opaque bytes, at most 1 MiB.
        queue: "" reads as "default".
        partition_key: fairness group; "" is one shared group.
        rate_class: name of a fleet-wide budget; "" is not limited.
        weight: estimated cost in units of the rate class; 0 reads as 1.
        fingerprint: content identity; "" opts out of quarantine.
        priority: higher first, within one partition of one queue.
        attempt: failures that the handler returned; output only.
        crash_attempt: leases lost; output only.
        max_attempts: 0 reads as 25; 1 never retries.
        scheduled_at_ms: earliest instant to run; 0 is now.
        timeout_ms: limit of one attempt; 0 is none.
        deadline_ms: absolute limit over all attempts; 0 is none.
        retention_ms: how long a finished row is kept; 0 deletes it on success.
        unique_key: None opts out.
        unique_states: carried, never interpreted.
        unique_window_ms: 0 holds the key while the job lives, else for this long.
        unique_replace: bits of `UNIQUE_REPLACE_*` to apply to the key's holder.
        unique_debounce_ms: each duplicate moves the waiting holder this far ahead.
        unique_exclude_kind: the key is shared by all kinds.
        periodic_schedule_id, periodic_tick_ms: origin of a scheduled job, both or
            neither.
        headers: opaque text pairs.
        tags: at most 32 labels, kept sorted.
        pending: durable, but not to run until an operator promotes it.
        sticky_worker: only this worker may claim it; "" is anyone.
        delay_ms: like `scheduled_at_ms`, relative to store time.
        deadline_in_ms: like `deadline_ms`, relative to store time.
    """

    id: str
    kind: str
    schema_version: int = field(default=0, converter=_normal_version)
    payload: bytes = field(default=b"", repr=False)
    queue: str = field(default="", converter=_normal_queue)
    partition_key: str = ""
    rate_class: str = ""
    weight: int = field(default=0, converter=_normal_weight)
    fingerprint: str = ""
    priority: int = 0
    attempt: int = 0
    crash_attempt: int = 0
    max_attempts: int = field(default=0, converter=_normal_attempts)
    scheduled_at_ms: int = 0
    timeout_ms: int = 0
    deadline_ms: int = 0
    retention_ms: int = 0
    unique_key: bytes | None = None
    unique_states: int = 0
    unique_window_ms: int = 0
    unique_replace: int = 0
    unique_debounce_ms: int = 0
    unique_exclude_kind: bool = False
    periodic_schedule_id: str = ""
    periodic_tick_ms: int = 0
    headers: Mapping[str, str] = field(
        default=_NO_HEADERS, converter=_freeze_headers, repr=False
    )
    tags: tuple[str, ...] = field(default=(), converter=_sorted_tags)
    pending: bool = False
    sticky_worker: str = ""
    delay_ms: int = 0
    deadline_in_ms: int = 0

    def __attrs_post_init__(self) -> None:
        # Almost every job is short ASCII text and small numbers. One look at all of
        # them together then spares a look at each.
        texts: tuple[str, ...] = _texts_of(self)
        short = _are_short_ascii(texts)
        small = _are_within(_counts_of(self), MAX_INT32) and _are_within(
            _times_of(self), MAX_RELATIVE_MS
        )
        if not short:
            for name, text in zip(_TEXTS, texts, strict=True):
                check_text(name, text)
        if not small:
            self._check_columns()
        self._check_types()
        if not self.id:
            raise InvalidRequest("id must not be empty")
        check_kind(self.kind)
        if not short:
            for name in _IDENTIFIERS:
                check_identifier(name, getattr(self, name))
        self._check_sizes()
        if not small:
            for name, high in _TIMES.items():
                check_int(name, getattr(self, name), 0, high)
        self._check_uniqueness()
        if self.tags:
            _check_ascii_tags(self.tags)
        if self.pending or self.delay_ms or self.deadline_in_ms:
            self._check_schedule()
        if not short:
            check_identifier("sticky_worker", self.sticky_worker, ascii_only=True)
        if self.periodic_tick_ms < 0 or bool(self.periodic_schedule_id) != (
            self.periodic_tick_ms > 0
        ):
            raise InvalidRequest(
                "periodic_schedule_id and periodic_tick_ms go together: "
                f"{self.periodic_schedule_id!r}, {self.periodic_tick_ms}"
            )

    @classmethod
    def from_stored(cls, values: Iterable[object]) -> Envelope:
        """Rebuild a value from fields that a store took in.

        Nothing is checked or filled in: the constructor did both when the job came.

        Args:
            values: one per field, in the order of `field_names`.
        """
        envelope = object.__new__(cls)
        for write, value in zip(_WRITERS, values, strict=True):
            write(envelope, value)
        return envelope

    def _check_columns(self) -> None:
        for name, (low, high) in _COLUMNS.items():
            check_int(name, getattr(self, name), low, high)
        for name in _TIMES:
            _check_is_int(name, getattr(self, name))

    def _check_types(self) -> None:
        if type(self.pending) is not bool:
            raise InvalidRequest("pending must be bool")
        if type(self.unique_exclude_kind) is not bool:
            raise InvalidRequest("unique_exclude_kind must be bool")
        check_bytes("payload", self.payload)
        if self.unique_key is not None and type(self.unique_key) is not bytes:
            raise InvalidRequest("unique_key must be bytes or None")

    def _check_sizes(self) -> None:
        _check_payload_size(self.payload)
        if self.unique_key is not None and len(self.unique_key) > MAX_UNIQUE_KEY_BYTES:
            raise InvalidRequest(
                f"unique_key has {len(self.unique_key)} bytes, "
                f"the limit is {MAX_UNIQUE_KEY_BYTES}"
            )
        if len(self.headers) > MAX_HEADERS:
            raise InvalidRequest(
                f"headers has {len(self.headers)} entries, the limit is {MAX_HEADERS}"
            )
        size = self.headers_bytes if self.headers else 0
        if size > MAX_HEADERS_BYTES:
            raise InvalidRequest(
                f"headers has {size} bytes, the limit is {MAX_HEADERS_BYTES}"
            )

    def _check_uniqueness(self) -> None:
        if self.unique_debounce_ms and (not self.unique_key or self.unique_window_ms):
            raise InvalidRequest(
                "unique_debounce_ms needs a non-empty lifecycle unique_key "
                "(unique_window_ms 0)"
            )
        if self.unique_replace & ~UNIQUE_REPLACE_ALL:
            raise InvalidRequest(
                f"unique_replace has unknown bits: {self.unique_replace}, "
                f"known are {UNIQUE_REPLACE_ALL}"
            )
        if self.unique_replace and not self.unique_key:
            raise InvalidRequest("unique_replace needs a non-empty unique_key")

    def _check_schedule(self) -> None:
        excluded = (
            ("pending", self.pending, "scheduled_at_ms", self.scheduled_at_ms),
            ("pending", self.pending, "delay_ms", self.delay_ms),
            ("delay_ms", self.delay_ms, "scheduled_at_ms", self.scheduled_at_ms),
            ("delay_ms", self.delay_ms, "unique_debounce_ms", self.unique_debounce_ms),
            ("deadline_in_ms", self.deadline_in_ms, "deadline_ms", self.deadline_ms),
        )
        for one, one_set, other, other_set in excluded:
            if one_set and other_set:
                raise InvalidRequest(f"{one} excludes {other}")

    @property
    def headers_bytes(self) -> int:
        """Size of all header keys and values in bytes."""
        return sum(_size(key) + _size(text) for key, text in self.headers.items())

    @property
    def size_bytes(self) -> int:
        """What the job counts towards the size of a batch."""
        texts = _size("".join(_texts_of(self)))
        tags = sum(len(tag) for tag in self.tags)
        return (
            len(self.payload) + len(self.unique_key or b"") + texts + tags
            + self.headers_bytes
        )  # fmt: skip

    @property
    def effective_unique_key(self) -> bytes | None:
        """The stored form of the key, or None without one."""
        if self.unique_key is None:
            return None
        return effective_unique_key(
            self.kind, self.unique_key, exclude_kind=self.unique_exclude_kind
        )

    @property
    def lane_key(self) -> int:
        """The name of the job's lane."""
        return lane_key(
            self.queue, self.partition_key, self.rate_class, self.sticky_worker
        )


def unique_key_of(kind: str, effective: bytes | None) -> tuple[bytes | None, bool]:
    """Take a stored key apart into the caller's key and `unique_exclude_kind`."""
    if effective is None:
        return None, False
    if effective[:2] == b"\x01G":
        return effective[2:], True
    return effective[6 + len(kind.encode()) :], False


def _are_short_ascii(texts: tuple[object, ...]) -> bool:
    """Whether all are text without NUL that no limit of length can forbid."""
    if set(map(type, texts)) != {str}:
        return False
    joined = "".join(texts)  # type: ignore[arg-type]
    return (
        len(joined) <= MAX_IDENTIFIER_BYTES and joined.isascii() and "\0" not in joined
    )


def _are_within(numbers: tuple[Any, ...], high: int) -> bool:
    """Whether all are integers from 0 to a bound that is allowed for each of them."""
    return (
        set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) <= high
    )


_IDENTIFIERS = (
    "id",
    "queue",
    "partition_key",
    "rate_class",
    "fingerprint",
    "periodic_schedule_id",
)
_TEXTS = ("id", "kind", *_IDENTIFIERS[1:], "sticky_worker")
# Ranges of the columns; what is below 0 has another rule for the tick.
_COLUMNS = {
    "schema_version": (0, MAX_INT32),
    "weight": (0, MAX_INT32),
    "priority": (-MAX_INT32 - 1, MAX_INT32),
    "attempt": (0, MAX_INT32),
    "crash_attempt": (0, MAX_INT32),
    "max_attempts": (0, MAX_INT32),
    "unique_states": (-MAX_INT32 - 1, MAX_INT32),
    "unique_replace": (-MAX_INT32 - 1, MAX_INT32),
    "periodic_tick_ms": (-MAX_INT64 - 1, MAX_INT64),
}
# Upper bounds. Retention is added to an instant by an index, which must not overflow.
_TIMES = {
    "timeout_ms": MAX_INT64,
    "deadline_ms": MAX_INT64,
    "scheduled_at_ms": MAX_INT64,
    "retention_ms": MAX_RELATIVE_MS,
    "delay_ms": MAX_RELATIVE_MS,
    "deadline_in_ms": MAX_RELATIVE_MS,
    "unique_window_ms": MAX_RELATIVE_MS,
    "unique_debounce_ms": MAX_RELATIVE_MS,
}
_texts_of = attrgetter(*_TEXTS)
_counts_of = attrgetter(*(name for name in _COLUMNS if name != "periodic_tick_ms"))
_times_of = attrgetter("periodic_tick_ms", *_TIMES)


def field_names() -> tuple[str, ...]:
    """The names of all fields, in order."""
    attributes: tuple[Attribute[Any], ...] = fields(Envelope)
    return tuple(attribute.name for attribute in attributes)


_WRITERS = tuple(getattr(Envelope, name).__set__ for name in field_names())
