"""Trace context in two headers of a job: read at dispatch, never a reason to fail."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@frozen(kw_only=True)
class TraceContext:
    """One parsed `traceparent` with the vendor state that came beside it."""

    trace_id: str
    span_id: str
    trace_flags: int
    trace_state: str = ""

    @property
    def sampled(self) -> bool:
        """Whether the producer recorded this trace."""
        return bool(self.trace_flags & 1)

    def to_traceparent(self) -> str:
        """The header it was read from."""
        return f"00-{self.trace_id}-{self.span_id}-{self.trace_flags:02x}"


def parse_traceparent(value: str, trace_state: str = "") -> TraceContext | None:
    """Read a `traceparent`; None for anything that is not exactly one of version 00.

    Source: W3C Trace Context, whose ids of only zeros are invalid.
    """
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    trace_id, span_id, flags = match.groups()
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(
        trace_id=trace_id,
        span_id=span_id,
        trace_flags=int(flags, 16),
        trace_state=trace_state,
    )


def trace_of(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace context of a job; None when absent or malformed."""
    return parse_traceparent(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, ""))


def inherited(headers: Mapping[str, str], parent: Mapping[str, str]) -> dict[str, str]:
    """Headers of a child job: its own, and the parent's valid trace if it has none."""
    child = dict(headers)
    if TRACEPARENT in child or TRACESTATE in child or trace_of(parent) is None:
        return child
    return child | {k: parent[k] for k in (TRACEPARENT, TRACESTATE) if k in parent}
