"""Which admissions take the short road: those in which no policy can bind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from headgate_sync.policy import GATE_CONSTANTS
from tests.backends import PostgresBackend
from tests.builders import steer
from tests.postgres.visits import admit_rows, undone
from tests.scenarios.gate import ack_all, admit, ceiling, fill, rate_class, tokens

STRATEGIES = ("queue", "discard", "cancel_incoming", "cancel_running")
_WHOLE = "SELECT pg_stat_get_xact_function_calls(%s::regproc)"


@pytest.fixture
def store(postgres: PostgresBackend) -> Any:
    return postgres.make_store()


@pytest.fixture
def other(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A session that counts the calls of functions."""
    with psycopg.connect(database_url) as connection:
        connection.execute("SET track_functions = 'pl'")
        connection.commit()
        yield connection


def whole_decisions(connection: psycopg.Connection[Any], **asked: Any) -> int:
    """How often an admission went through the whole decision; it is undone."""
    with undone(connection):
        before = _calls(connection)
        admit_rows(connection, **asked)
        return _calls(connection) - before


def _calls(connection: psycopg.Connection[Any]) -> int:
    name = "headgate.headgate_admit_under_policies"
    row = connection.execute(_WHOLE, [name]).fetchone()
    return int((row and row[0]) or 0)


def roomy_class(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    fill(store, "job", 12, rate_class="c")


def class_that_is_not_configured(store: Any) -> None:
    fill(store, "job", 3, rate_class="c")


def classes_of_their_own(store: Any) -> None:
    for name in "abc":
        rate_class(store, name, "10/1000", 10)
        fill(store, name, 2, rate_class=name)
    fill(store, "none", 2)


def classes_in_one_partition(store: Any) -> None:
    fill(store, "a", 2, partition_key="p", rate_class="a")
    fill(store, "b", 2, partition_key="p")


def exits_of_a_class(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    fill(store, "job", 3, rate_class="c")
    ack_all(store, admit(store, 2))


def only_exits_of_a_class(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    fill(store, "job", 2, rate_class="c")
    ack_all(store, admit(store, 2))


def class_that_was_used_once(store: Any) -> None:
    fill(store, "then", 1, rate_class="c")
    ack_all(store, admit(store))
    fill(store, "now", 3)


def class_that_is_closed(store: Any) -> None:
    rate_class(store, "c", "1/1000", 1)
    fill(store, "dry", 3, rate_class="c")
    admit(store)
    fill(store, "job", 2)


def ceilings_with_room(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    ceiling(store, 10, "queue", name="all", scope="queue")
    ceiling(store, 10, "discard", name="class", scope="class", queue="", rate_class="c")
    for strategy in STRATEGIES:
        ceiling(store, 2, strategy, name=strategy, scope="partition")
    fill(store, "job", 2, rate_class="c")


SHORT: list[Callable[[Any], None]] = [
    roomy_class,
    class_that_is_not_configured,
    classes_of_their_own,
    classes_in_one_partition,
    exits_of_a_class,
    only_exits_of_a_class,
    class_that_was_used_once,
    class_that_is_closed,
    ceilings_with_room,
]


@pytest.mark.parametrize("prepare", SHORT)
def test_where_no_policy_binds_the_road_is_short(store, other, prepare):
    prepare(store)
    assert whole_decisions(other) == 0


def dry_class(store: Any) -> None:
    rate_class(store, "c", "9/1000", 9)
    fill(store, "job", 10, rate_class="c")


def weight_above_the_burst(store: Any) -> None:
    rate_class(store, "c", "9/1000", 9)
    fill(store, "job", 1, rate_class="c", weight=10)


def full_queue(store: Any) -> None:
    ceiling(store, 9, "queue", scope="queue")
    fill(store, "job", 1)


def full_class(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    ceiling(store, 1, "queue", scope="class", queue="", rate_class="c")
    fill(store, "job", 2, rate_class="c")


def full_partition(store: Any) -> None:
    ceiling(store, 1, "cancel_running", scope="partition")
    fill(store, "job", 2)


def own_work(store: Any) -> None:
    fill(store, "job", 1, sticky_worker="w")


WHOLE: list[Callable[[Any], None]] = [
    dry_class,
    weight_above_the_burst,
    full_queue,
    full_class,
    full_partition,
    own_work,
]


@pytest.mark.parametrize("prepare", WHOLE)
def test_where_a_policy_may_bind_the_whole_decision_is_taken(store, other, prepare):
    prepare(store)
    assert whole_decisions(other) == 1


def test_a_paused_class_is_met_once(store, other):
    fill(store, "job", 2, rate_class="c")
    admit(store, 1)
    rate_class(store, "c", "10/1000", 10)
    steer(store).pause_rate_class("c", 1000)
    fill(store, "free", 2)
    assert whole_decisions(other) == 1
    assert len(admit(store, 1)) == 1
    assert whole_decisions(other) == 0


def test_the_short_road_leaves_a_class_that_is_held_to_the_patient_one(
    store, postgres, other
):
    rate_class(store, "c", "10/1000", 10)
    fill(store, "job", 2, rate_class="c")
    with psycopg.connect(other.info.dsn) as holder:
        holder.execute("SELECT FROM headgate.headgate_rate_class FOR NO KEY UPDATE")
        assert whole_decisions(other, lock_wait_ms=1) == 1
    assert whole_decisions(other) == 0
    assert tokens(store, "c") == 10


def test_who_holds_a_class_waits_for_no_other(store, other):
    """Two that did could wait for each other."""
    for name in "ab":
        rate_class(store, name, "10/1000", 10)
        fill(store, name, 2, rate_class=name)
    with psycopg.connect(other.info.dsn) as holder:
        holder.execute(
            "SELECT FROM headgate.headgate_rate_class WHERE name = 'b'"
            " FOR NO KEY UPDATE"
        )
        other.execute("SET LOCAL statement_timeout = '10s'")
        *claims, facts = admit_rows(other, lock_wait_ms=60_000)
    assert [row["id"] for row in claims] == ["a-1", "a-2"]
    assert 1 <= facts["retry_after_ms"] <= GATE_CONSTANTS["busy_ms"]


def test_both_roads_write_the_same(store, postgres, other):
    """A queue more in the request takes the whole decision; the rows do not tell."""
    classes_of_their_own(store)
    ceilings_with_room(store)
    read = (
        "SELECT to_jsonb(t) - 'lease_id' FROM headgate.headgate_{} AS t"
        " ORDER BY to_jsonb(t)::text"
    )
    written = []
    for queues, calls in ((["q"], 0), (["q", "nowhere"], 1)):
        assert whole_decisions(other, queues=queues) == calls
        with undone(other):
            claims = [row["id"] for row in admit_rows(other, queues=queues)]
            written.append(
                [claims]
                + [
                    other.execute(read.format(name)).fetchall()
                    for name in (
                        *("job", "queue", "partition", "lane", "rate_class"),
                        *("budget", "inbox"),
                    )
                ]
            )
    assert written[0] == written[1]
