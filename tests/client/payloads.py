"""Classes and strategies for payload values of every kind."""

from __future__ import annotations

import dataclasses
import enum
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NotRequired, TypedDict
from uuid import UUID

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.StrEnum):
    FAST = "fast"
    SAFE = "safe"


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


@attrs.frozen
class Address:
    street: str
    number: int = 1
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal
    next: Line | None = None


@attrs.frozen
class Tree:
    value: int
    children: tuple[Tree, ...] = ()


class Shipping(TypedDict):
    carrier: str
    weight: NotRequired[float]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
OFFSETS = st.integers(-14 * 60, 14 * 60).map(lambda m: timezone(timedelta(minutes=m)))
MILLISECONDS = st.integers(-(10**14), 10**14).map(lambda ms: timedelta(milliseconds=ms))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
    ),
    max_leaves=5,
)
ADDRESSES = st.builds(
    Address,
    street=TEXT,
    number=st.integers(),
    tags=st.lists(TEXT, max_size=2).map(tuple),
)
PRICES = st.decimals(allow_nan=False, allow_infinity=False)
LINES = st.builds(
    Line, TEXT, PRICES, st.none() | st.builds(Line, TEXT, PRICES, st.none())
)
TREES = st.recursive(
    st.builds(Tree, st.integers()),
    lambda inner: st.builds(
        Tree, st.integers(), st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=4,
)
SHIPPINGS = st.fixed_dictionaries({"carrier": TEXT}, optional={"weight": FLOATS})

SCALARS: list[tuple[Any, SearchStrategy[Any]]] = [
    (None, st.none()),
    (bool, st.booleans()),
    (int, st.integers()),
    (float, FLOATS),
    (str, TEXT),
    (bytes, st.binary(max_size=20)),
    (datetime, st.datetimes(timezones=OFFSETS)),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, MILLISECONDS),
    (UUID, st.uuids()),
    (Decimal, PRICES),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (Mode, st.sampled_from(Mode)),
    (Access, st.sampled_from([Access(0), Access.READ, Access.READ | Access.WRITE])),
    (
        Literal["a", 1, True, None, Color.RED],
        st.sampled_from(["a", 1, True, None, Color.RED]),
    ),
    (int | float, st.integers() | FLOATS),
    (int | str | None, st.integers() | TEXT | st.none()),
    (Address | Line | None, ADDRESSES | LINES | st.none()),
    (
        Literal["all"] | tuple[int, ...],
        st.just("all") | st.lists(st.integers(), max_size=3).map(tuple),
    ),
    (Any, PLAIN),
    (Address, ADDRESSES),
    (Line, LINES),
    (Tree, TREES),
    (Shipping, SHIPPINGS),
]


def _containers(
    annotation: Any, values: SearchStrategy[Any]
) -> SearchStrategy[tuple[Any, Any]]:
    """The annotation itself, or a container of it, each with a value."""
    listed = st.lists(values, max_size=3)
    made: list[tuple[Any, SearchStrategy[Any]]] = [
        (annotation, values),
        (list[annotation], listed),
        (tuple[annotation, ...], listed.map(tuple)),
        (tuple[annotation, int], st.tuples(values, st.integers())),
        (dict[str, annotation], st.dictionaries(TEXT, values, max_size=3)),
        (dict[str, list[annotation]], st.dictionaries(TEXT, listed, max_size=2)),
    ]
    if annotation not in (Any, Shipping):
        made += [
            (set[annotation], listed.map(set)),
            (frozenset[annotation], listed.map(frozenset)),
        ]
    return st.one_of(
        [st.tuples(st.just(wanted), strategy) for wanted, strategy in made]
    )


TYPED_VALUES = st.sampled_from(SCALARS).flatmap(lambda pair: _containers(*pair))
