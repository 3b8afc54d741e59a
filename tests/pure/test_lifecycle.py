"""The table of transitions, told a second time, and what is read off it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import product

import pytest
from attrs import asdict, frozen
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import (
    ACKABLE,
    EVICTABLE,
    STORED,
    TERMINAL,
    TRANSITIONS,
    UNFINISHED,
    WAITING,
    Event,
    Guard,
    Outcome,
    State,
    find_transition,
    next_state,
    refused,
    sources_of,
    states_sql,
    target_sql,
)

# source, event, target, guard. Rows of one source and event are tried in this order.
TABLE = """
pending      operator_promote     available
scheduled    schedule_due         available
available    admitted             running
running      success              completed    retention_ms > 0
running      success              deleted
running      retry                retryable    attempt + 1 < max_attempts
running      retry                archived
running      skip                 archived
running      revoke               deleted
running      snooze               scheduled
running      undecodable          undecodable
running      rate_limited         available
running      lease_lost           retryable    crash_attempt + 1 < crash_limit
running      lease_lost           quarantined
retryable    backoff_due          available
running      checkpoint_stale     undecodable
archived     operator_retry       available
cancelled    operator_retry       available
undecodable  operator_retry       available
quarantined  operator_release     available
pending      operator_cancel      cancelled
scheduled    operator_cancel      cancelled
available    operator_cancel      cancelled
running      operator_cancel      cancelled
retryable    operator_cancel      cancelled
completed    retention_lapsed     deleted      retention_ms > 0
archived     retention_lapsed     deleted      retention_ms > 0
cancelled    retention_lapsed     deleted      retention_ms > 0
undecodable  retention_lapsed     deleted      retention_ms > 0
pending      quarantine_sweep     quarantined
scheduled    quarantine_sweep     quarantined
available    quarantine_sweep     quarantined
retryable    quarantine_sweep     quarantined
available    saturation_discard   archived
available    saturation_cancel    cancelled
running      displaced            cancelled
scheduled    debounced            scheduled
available    debounced            scheduled
retryable    debounced            scheduled
pending      operator_delete      deleted
scheduled    operator_delete      deleted
available    operator_delete      deleted
retryable    operator_delete      deleted
completed    operator_delete      deleted
archived     operator_delete      deleted
cancelled    operator_delete      deleted
quarantined  operator_delete      deleted
undecodable  operator_delete      deleted
pending      schedule_pending     scheduled
scheduled    operator_reschedule  scheduled
retryable    operator_reschedule  retryable
pending      edit_payload         pending
scheduled    edit_payload         scheduled
available    edit_payload         available
retryable    edit_payload         retryable
completed    edit_payload         completed
archived     edit_payload         archived
cancelled    edit_payload         cancelled
quarantined  edit_payload         quarantined
undecodable  edit_payload         undecodable
"""
ROWS = [tuple(line.split(maxsplit=3)) for line in TABLE.strip().splitlines()]
DEFINED = {(State(row[0]), Event(row[1])) for row in ROWS}


@frozen(kw_only=True)
class Fields:
    """What guards read."""

    attempt: int = 0
    max_attempts: int = 25
    crash_attempt: int = 0
    crash_limit: int = 3
    retention_ms: int = 0


counts = st.integers(0, 2**31 - 2)
some_fields = st.builds(
    Fields,
    attempt=counts,
    max_attempts=counts,
    crash_attempt=counts,
    crash_limit=counts,
    retention_ms=counts,
)


def test_the_table_has_exactly_these_rows():
    written = [
        (t.source.value, t.event.value, t.target.value)
        + ((t.when.sql(),) if t.when is not None else ())
        for t in TRANSITIONS
    ]
    assert written == ROWS


def test_every_state_and_event_occurs():
    assert {t.event for t in TRANSITIONS} == set(Event)
    assert {t.source for t in TRANSITIONS} == STORED
    assert {t.target for t in TRANSITIONS} == set(State)


def test_only_admission_starts_an_attempt():
    starts = {(t.source, t.event) for t in TRANSITIONS if t.target is State.RUNNING}
    assert starts == {(State.AVAILABLE, Event.ADMITTED)}


def test_time_alone_moves_neither_a_pending_nor_a_running_job():
    by_time = {Event.SCHEDULE_DUE, Event.BACKOFF_DUE, Event.RETENTION_LAPSED}
    moved = {t.source for t in TRANSITIONS if t.event in by_time}
    assert moved == {State.SCHEDULED, State.RETRYABLE} | EVICTABLE


def test_a_quarantined_job_is_left_only_by_an_operator():
    ways = {t.event for t in TRANSITIONS if t.source is State.QUARANTINED}
    assert ways == {Event.OPERATOR_RELEASE, Event.OPERATOR_DELETE, Event.EDIT_PAYLOAD}


def test_the_sets_of_states_part_the_stored_ones():
    assert WAITING | {State.RUNNING} == UNFINISHED
    assert EVICTABLE | {State.QUARANTINED} == TERMINAL
    assert UNFINISHED.isdisjoint(TERMINAL)
    assert UNFINISHED | TERMINAL == STORED == set(State) - {State.DELETED}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:3]))
def test_each_row_is_taken_where_its_guard_holds(row):
    source, event, target = State(row[0]), Event(row[1]), State(row[2])
    guarded = len(row) == 4
    fits = Fields(attempt=0, crash_attempt=0, retention_ms=1)
    fails = Fields(attempt=24, crash_attempt=2, retention_ms=0)
    alone = sum(other[:2] == row[:2] for other in ROWS) == 1
    job = fits if guarded or alone else fails
    found = find_transition(source, event, job)
    assert (found.source, found.event, found.target) == (source, event, target)
    assert next_state(source, event, job) is target


@pytest.mark.parametrize(
    ("event", "fields", "target"),
    [
        (Event.RETRY, Fields(attempt=0, max_attempts=1), State.ARCHIVED),
        (Event.RETRY, Fields(attempt=0, max_attempts=2), State.RETRYABLE),
        (Event.RETRY, Fields(attempt=23, max_attempts=25), State.RETRYABLE),
        (Event.RETRY, Fields(attempt=24, max_attempts=25), State.ARCHIVED),
        (Event.RETRY, Fields(attempt=30, max_attempts=25), State.ARCHIVED),
        (Event.LEASE_LOST, Fields(crash_attempt=0, crash_limit=1), State.QUARANTINED),
        (Event.LEASE_LOST, Fields(crash_attempt=1, crash_limit=3), State.RETRYABLE),
        (Event.LEASE_LOST, Fields(crash_attempt=2, crash_limit=3), State.QUARANTINED),
        (Event.SUCCESS, Fields(retention_ms=0), State.DELETED),
        (Event.SUCCESS, Fields(retention_ms=1), State.COMPLETED),
    ],
)
def test_guards_decide_at_their_boundary(event, fields, target):
    assert next_state(State.RUNNING, event, fields) is target


@pytest.mark.parametrize("state", sorted(EVICTABLE))
def test_without_retention_a_finished_job_never_lapses(state):
    with pytest.raises(InvalidRequest):
        next_state(state, Event.RETENTION_LAPSED, Fields(retention_ms=0))


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in product(State, Event) if pair not in DEFINED],
    ids=lambda value: value.value,
)
def test_every_other_pair_is_refused(state, event):
    text = refused(event, state).message
    with pytest.raises(InvalidRequest) as raised:
        next_state(state, event, Fields())
    assert raised.value.message == text
    with pytest.raises(InvalidRequest) as raised:
        target_sql(event, state)
    assert raised.value.message == text


def test_a_refusal_names_event_and_states():
    error = refused(Event.OPERATOR_RETRY, State.COMPLETED)
    assert error.message == (
        "operator_retry is not defined from completed, "
        "only from archived, cancelled, undecodable"
    )


def test_a_refusal_says_what_to_do():
    retrying = refused(Event.OPERATOR_RETRY, State.QUARANTINED)
    assert retrying.message == "cannot retry a quarantined job; release its fingerprint"
    deleting = refused(Event.OPERATOR_DELETE, State.RUNNING)
    assert deleting.message == "cannot delete a running job; cancel it first"
    editing = refused(Event.EDIT_PAYLOAD, State.RUNNING)
    assert editing.message == "cannot edit a running job's payload"


def test_each_outcome_is_an_event_of_a_running_job():
    for outcome in Outcome:
        assert State.RUNNING in sources_of(outcome.event)
        assert outcome.event.value == outcome.value
    assert set(Outcome) - ACKABLE == {Outcome.LEASE_LOST}


def test_sources_are_told_in_the_order_of_the_table():
    assert sources_of(Event.DEBOUNCED) == (
        State.SCHEDULED,
        State.AVAILABLE,
        State.RETRYABLE,
    )
    assert sources_of(Event.SUCCESS) == (State.RUNNING,)


def test_a_guard_knows_only_its_operators():
    with pytest.raises(ValueError, match="op"):
        Guard("attempt", "!=", 0)


_RETRY = "CASE WHEN attempt + 1 < max_attempts"
_CRASH = "CASE WHEN crash_attempt + 1 < crash_limit"
_KEPT = "CASE WHEN retention_ms > 0"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Event.SKIP, "'archived'"),
        (Event.REVOKE, "'deleted'"),
        (Event.RETRY, f"{_RETRY} THEN 'retryable' ELSE 'archived' END"),
        (Event.SUCCESS, f"{_KEPT} THEN 'completed' ELSE 'deleted' END"),
        (Event.LEASE_LOST, f"{_CRASH} THEN 'retryable' ELSE 'quarantined' END"),
    ],
)
def test_targets_are_written_as_sql(event, text):
    assert target_sql(event) == text


@pytest.mark.parametrize("event", [Event.RETRY, Event.SUCCESS, Event.LEASE_LOST])
@given(fields=some_fields)
def test_sql_and_python_lead_to_the_same_state(event, fields):
    values = asdict(fields)
    columns = ", ".join(f":{name} AS {name}" for name in values)
    query = f"SELECT {target_sql(event)} FROM (SELECT {columns})"
    with closing(sqlite3.connect(":memory:")) as database:
        (reached,) = database.execute(query, values).fetchone()
    assert reached == next_state(State.RUNNING, event, fields).value


def test_states_are_written_as_sql_in_the_order_of_their_declaration():
    assert (
        states_sql(frozenset({State.RUNNING, State.PENDING})) == "'pending', 'running'"
    )
    assert states_sql((State.RUNNING, State.PENDING)) == "'pending', 'running'"
