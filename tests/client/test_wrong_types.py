"""Values of no sensible type: each call says so, in an error of the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from headgate_sync import testing
from headgate_sync.app import Headgate
from headgate_sync.client.pipeline import Plugin
from headgate_sync.errors import HeadgateError
from headgate_sync.memory.store import MemStore
from headgate_sync.options import Unique
from headgate_sync.postgres.store import PgStore
from headgate_sync.worker.config import WorkerConfig
from headgate_sync.worker.isolated import IsolatedProcess

WRONG = (
    *(None, 5, 3.5, True, "\ud800", "a\0", b"x", object(), [], [1], [None], {}),
    *({1: 2}, {"a"}, ("a",), float("nan"), -1, 2**70, lambda: None),
)
# Called by the package itself, with what it has checked; or not by keyword at all.
_INTERNAL = {
    *("apply", "batch_handler", "follow", "member", "reads_payload", "resolve"),
}
# They end the facade, or want a database.
_ELSEWHERE = {"close", "embedded", "connect", "from_env", "worker"}


def public(owner: object) -> dict[str, Callable[..., Any]]:
    """The calls of an object by name."""
    names = [name for name in dir(owner) if not name.startswith("_")]
    found = {name: getattr(owner, name) for name in names}
    return {
        name: call
        for name, call in found.items()
        if inspect.isroutine(call) and name not in _INTERNAL | _ELSEWHERE
    }


def wrongly(call: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """The call with what it needs wrong, then with one wrong option at a time."""
    parameters = list(inspect.signature(call).parameters.values())
    placed = [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    needed = sum(p.default is p.empty for p in placed)
    needed_names = [p.name for p in named if p.default is p.empty]
    optional = [
        p.name
        for p in (*placed, *named)
        if p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY
    ]
    for wrong in WRONG:
        yield partial(call, *[wrong] * needed, **dict.fromkeys(needed_names, wrong))
        for name in optional:
            given = {**dict.fromkeys(needed_names, "1ms"), name: wrong}
            yield partial(call, *["k"] * needed, **given)


def check(call: Callable[..., Any]) -> None:
    for attempt in wrongly(call):
        try:
            attempt()
        except HeadgateError:
            continue
        except Exception as error:
            error.add_note(f"from {attempt}")
            raise


@pytest.fixture
def hg() -> Headgate:
    made = Headgate(MemStore())

    @made.task("k", queue="q")
    def k(a: int = 1) -> None: ...

    return made


@pytest.mark.parametrize("part", ["", "client", "schedules", "registry"])
def test_calls_refuse_wrong_types_themselves(hg: Headgate, part: str) -> None:
    owner = getattr(hg, part) if part else hg
    calls = public(owner)
    assert len(calls) > 5
    for call in calls.values():
        check(call)


@pytest.mark.parametrize(
    "make",
    [PgStore, WorkerConfig, IsolatedProcess, Plugin, Unique, testing.resume_at_cursor],
)
def test_so_does_whatever_is_made(make: Callable[..., Any]) -> None:
    check(make)
