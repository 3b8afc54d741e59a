"""Lists of jobs: filters, pages and cursors, and text that means no good."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.inspection import MAX_PAGE
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.search import JobFilter, parse_query
from tests.builders import bring_to, enqueue, envelope, run_one, steer

HOSTILE = [
    "%",
    "_",
    "a%",
    "\\",
    "\\%",
    "'",
    "' OR 1=1 --",
    '"; DROP TABLE headgate.headgate_job; --',
    "$1",
    "$$",
    "{queue}",
    "%(queue)s",
    "a b",
    "é",
    "<script>alert(1)</script>",
]


def ids(page):
    return [job.id for job in page.jobs]


def listed(store, **wanted):
    return ids(steer(store).list_jobs(JobFilter(**wanted)))


def test_pages_show_the_newest_first_and_end_without_a_cursor(store):
    enqueue(store, "a")
    enqueue(store, "b")
    enqueue(store, "c")
    first = steer(store).list_jobs(JobFilter(), None, 2)
    second = steer(store).list_jobs(JobFilter(), first.next_cursor, 2)
    assert ids(first) == ["c", "b"]
    assert (ids(second), second.next_cursor) == (["a"], None)


def test_a_page_that_ends_with_the_last_job_is_followed_by_an_empty_one(store):
    enqueue(store, "a", "b")
    first = steer(store).list_jobs(limit=2)
    second = steer(store).list_jobs(None, first.next_cursor, 2)
    assert (ids(second), second.next_cursor) == ([], None)


def test_jobs_that_come_or_go_while_a_list_is_paged_disturb_nothing(store):
    enqueue(store, *"abcd")
    first = steer(store).list_jobs(limit=2)
    enqueue(store, "late")
    steer(store).delete_job("d")
    steer(store).delete_job("b")
    assert ids(steer(store).list_jobs(None, first.next_cursor, 2)) == ["a"]


@pytest.mark.parametrize(
    "cursor", ["x1", "", "-1", "+1", " 1", "1 ", "1_0", "0", "1.0", "١", "9" * 20, 7]
)
def test_a_forged_cursor_is_refused(store, cursor):
    with pytest.raises(InvalidRequest) as raised:
        steer(store).list_jobs(JobFilter(), cursor, 10)
    assert raised.value.message == "bad cursor"


def test_a_cursor_of_another_filter_is_only_a_place(store):
    enqueue(store, "a", kind="one")
    enqueue(store, "b", kind="two")
    enqueue(store, "c", kind="one")
    cursor = steer(store).list_jobs(JobFilter(kind="two"), None, 1).next_cursor
    assert ids(steer(store).list_jobs(JobFilter(kind="one"), cursor)) == ["a"]
    assert ids(steer(store).list_jobs(None, "9223372036854775807")) == ["c", "b", "a"]


def test_a_page_has_one_to_two_hundred_jobs(store):
    enqueue(store, *(str(n) for n in range(MAX_PAGE + 1)))
    assert len(steer(store).list_jobs(limit=0).jobs) == 1
    assert len(steer(store).list_jobs(limit=-5).jobs) == 1
    assert len(steer(store).list_jobs(limit=9_999).jobs) == MAX_PAGE


@pytest.mark.parametrize("limit", [True, 1.5, "7", None])
def test_a_limit_that_is_no_number_is_refused(store, limit):
    with pytest.raises(InvalidRequest, match="limit"):
        steer(store).list_jobs(limit=limit)


def test_tags_are_asked_for_together_or_one_of_them(store):
    enqueue(store, "both", tags=("a", "b"))
    enqueue(store, "one", tags=("a",))
    enqueue(store, "none")
    assert listed(store, tags_all=("a", "b")) == ["both"]
    assert listed(store, tags_any=("b", "z")) == ["both"]
    assert listed(store, tags_any=("a", "b")) == ["one", "both"]
    assert listed(store, tags_all=("a",), tags_any=("b", "z")) == ["both"]
    assert listed(store, tags_all=("z",)) == []


def test_every_field_of_a_filter_is_obeyed_alone_and_with_others(store, clock):
    bring_to(store, clock, "done", State.COMPLETED, kind="x:done", rate_class="c")
    enqueue(store, "other", queue="other", partition_key="p", priority=7)
    enqueue(store, "last", kind="x:last", fingerprint="f", priority=-7)
    assert listed(store, queue="other") == ["other"]
    assert listed(store, queue="q") == ["last", "done"]
    assert listed(store, state="completed") == ["done"]
    assert listed(store, state="available") == ["last", "other"]
    assert listed(store, queue="q", state="available") == ["last"]
    assert listed(store, kind="x:last") == ["last"]
    assert listed(store, kind_prefix="x:") == ["last", "done"]
    assert listed(store, partition_key="p") == ["other"]
    assert listed(store, partition_key="") == ["last", "done"]
    assert listed(store, id="done") == ["done"]
    assert listed(store, id="done", state="available") == []
    assert listed(store, fingerprint="f") == ["last"]
    assert listed(store, rate_class="c") == ["done"]
    assert listed(store, priority=7) == ["other"]
    assert listed(store, priority=-7, queue="q") == ["last"]
    assert listed(store) == ["last", "other", "done"]


def test_running_jobs_are_listed_in_the_order_of_the_others(store):
    enqueue(store, "b", "c", "d")
    run_one(store, "a", queue="r")
    run_one(store, "e", queue="s")
    assert listed(store, state="running") == ["e", "a"]
    assert listed(store, state="running", queue="r") == ["a"]
    assert listed(store, queue="r") == ["a"]
    assert listed(store) == ["e", "a", "d", "c", "b"]


def test_a_state_is_paged_through_over_many_queues(store):
    for n in range(30):
        enqueue(store, f"{n:02}a", f"{n:02}b", queue=f"q{n * 7 % 30}")
    expected = [f"{n:02}{c}" for n in reversed(range(30)) for c in "ba"]
    found, cursor = [], None
    while True:
        page = steer(store).list_jobs(JobFilter(state="available"), cursor, 7)
        found += ids(page)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == expected
    assert listed(store, state="available", kind_prefix="tk") == expected[:50]


def test_a_list_shows_no_payload_and_the_newest_entry_of_the_history_only(store, clock):
    claim = run_one(store, "a", payload=b"secret", headers={"h": "x"})
    store.ack(claim.lease_ref, Outcome.RETRY, error="one", delay_ms=1)
    clock.advance_ms(1)
    store.promote_due(1)
    claim = run_one(store, "b")
    [seen] = steer(store).list_jobs(JobFilter(id="a")).jobs
    assert (seen.payload, seen.headers) == (None, None)
    assert [entry.error for entry in seen.errors] == ["one"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_data_in_every_field(store, text):
    enqueue(store, "plain", partition_key="plain", tags=("plain",))
    enqueue(store, "odd", queue=text, partition_key=text, rate_class=text)
    for name in ("queue", "partition_key", "rate_class"):
        assert listed(store, **{name: text}) == ["odd"]
    for name in ("kind", "kind_prefix", "id", "fingerprint"):
        assert listed(store, **{name: text}) == []
    assert listed(store, tags_all=(text,)) == []
    assert listed(store, tags_any=(text,)) == []
    steer(store).counts(text)
    assert [q.queue for q in steer(store).queue_stats(queues=[text])] == [text]
    assert len(steer(store).partitions(text)) == 1
    assert len(steer(store).history(text, 0)) == 1
    assert steer(store).queue_stats(cursor=text) is not None


def test_a_prefix_is_no_pattern(store):
    enqueue(store, "a", kind="a_c")
    enqueue(store, "b", kind="abc")
    assert listed(store, kind_prefix="a_") == ["a"]
    assert listed(store, kind_prefix="%") == []
    assert listed(store, kind_prefix="") == ["b", "a"]


@pytest.mark.parametrize(
    "wanted",
    [
        {"queue": "nul\0"},
        {"kind_prefix": "lone\ud800"},
        {"partition_key": "x" * 256},
        {"state": "finished"},
        {"state": "deleted"},
        {"priority": 2**31},
        {"priority": True},
        {"priority": "7"},
        {"id": 7},
        {"tags_all": "text"},
        {"tags_any": ("x" * 65,)},
        {"tags_all": [str(n) for n in range(33)]},
        {"tags_any": [7]},
    ],
)
def test_a_filter_that_no_job_can_meet_is_refused(wanted):
    with pytest.raises(InvalidRequest):
        JobFilter(**wanted)


def test_a_search_finds_what_its_filter_finds(store):
    enqueue(store, "a", kind="p4:search", queue="p4-q", priority=7)
    enqueue(store, "b")
    assert ids(steer(store).list_jobs(parse_query("queue:p4-q priority:7"))) == ["a"]
    assert ids(steer(store).list_jobs(parse_query("kind:p4:search"))) == ["a"]
    assert ids(steer(store).list_jobs(parse_query("p4"))) == ["a"]
    assert ids(steer(store).list_jobs(parse_query(""))) == ["b", "a"]


def test_a_batch_script_reads_a_thousand_jobs_at_once(store):
    store.enqueue([envelope(str(n)) for n in range(997)])
    wanted = [str(n) for n in reversed(range(1000))]
    found = steer(store).get_jobs(wanted)
    assert [job.id for job in found] == [str(n) for n in reversed(range(997))]
