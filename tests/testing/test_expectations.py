"""What a test expects in a store, and what it is told when that is not there."""

from __future__ import annotations

import datetime
from typing import Any

import attrs
import pytest

from headgate_sync import Headgate, InvalidRequest
from headgate_sync.testing import (
    Enqueued,
    assert_enqueued,
    drain,
    find_enqueued,
    refute_enqueued,
)
from tests.builders import START_MS, enqueue


@pytest.fixture
def hg(store: Any) -> Headgate:
    return Headgate(store)


@pytest.fixture
def remind(hg: Headgate) -> Any:
    @hg.task("remind", partition="{user}")
    def remind(user: str, on: datetime.date, times: int = 1) -> None: ...

    return remind


DAY = datetime.date(2026, 5, 1)


def test_a_task_a_class_a_kind_and_a_matcher_find_jobs(hg, store, remind):
    @hg.task("mail")
    @attrs.frozen
    class Mail:
        to: str
        on: datetime.date = DAY

    remind.enqueue("ann", DAY)
    hg.enqueue(Mail("bob"))
    for where in (hg, store):
        assert [job.kind for job in assert_enqueued(where, remind)] == ["remind"]
        assert [job.kind for job in assert_enqueued(where, Mail)] == ["mail"]
        assert [job.kind for job in assert_enqueued(where, "mail")] == ["mail"]
        assert len(find_enqueued(where, Enqueued())) == 2
    assert_enqueued(hg, Mail, args={"to": "bob", "on": DAY})
    assert_enqueued(hg, Enqueued(Mail, count=1))
    assert_enqueued(hg, remind.using(priority=1))
    assert_enqueued(hg, "mail", args={"to": "bob", "on": "2026-05-01"})
    refute_enqueued(hg, Mail, args={"to": "eve"})
    refute_enqueued(hg, Mail, args={"subject": None})
    refute_enqueued(hg, "other")


def test_jobs_come_with_payload_and_oldest_first(hg, remind):
    for user in ("ann", "bob", "cid"):
        remind.enqueue(user, DAY)
    found = assert_enqueued(hg, remind, count=3)
    assert [job.partition_key for job in found] == ["ann", "bob", "cid"]
    assert b'"ann"' in (found[0].payload or b"")


def test_arguments_are_a_part_of_the_payload(hg, remind):
    remind.enqueue("ann", DAY, times=2)
    assert_enqueued(hg, remind, args={"user": "ann"})
    assert_enqueued(hg, remind, args={"on": DAY, "times": 2})
    refute_enqueued(hg, remind, args={"times": 1})
    remind.enqueue("bob", DAY)  # its default is not stored
    assert_enqueued(hg, remind, args={"user": "bob", "times": 1})
    refute_enqueued(hg, "remind", args={"times": 1})
    refute_enqueued(hg, remind, args={"user": "ann", "times": 3})
    refute_enqueued(hg, remind, args={"nothing": None})


def test_only_what_a_matcher_sets_is_compared(hg, remind):
    remind.using(queue="late", delay="5s").enqueue("ann", DAY)
    payload = {"user": "ann", "on": "2026-05-01"}
    (job,) = find_enqueued(hg, Enqueued("remind", payload=payload))
    for matching in (
        {"queue": "late"},
        {"scheduled_at_ms": START_MS + 5_000},
        {"partition_key": "ann"},
        {"payload": job.payload},
    ):
        assert_enqueued(hg, Enqueued("remind", **matching))
    for other in (
        {"queue": "default"},
        {"scheduled_at_ms": START_MS},
        {"partition_key": "bob"},
        {"payload": b"{}"},
        {"payload": {"user": "ann"}},
    ):
        refute_enqueued(hg, Enqueued("remind", **other))
    refute_enqueued(hg, Enqueued("remind", queue="late"), queue="default")


def test_a_count_is_exact(hg, remind):
    remind.enqueue("ann", DAY)
    with pytest.raises(
        AssertionError, match=r"expected 2 jobs of kind remind, found 1"
    ):
        assert_enqueued(hg, remind, count=2)
    with pytest.raises(AssertionError, match="expected 2 jobs"):
        assert_enqueued(hg, Enqueued("remind", count=2))
    assert assert_enqueued(hg, "nothing", count=0) == []


def test_every_state_counts_and_where_asks_for_more(hg, remind):
    remind.using(retention="1h").enqueue("ann", DAY)
    remind.enqueue("bob", DAY)
    drain(hg)
    (done,) = assert_enqueued(hg, remind, count=1)
    assert done.state == "completed"
    refute_enqueued(hg, remind, where=lambda job: job.state == "available")


def test_a_failure_says_that_the_store_is_empty(hg, remind):
    with pytest.raises(AssertionError) as failed:
        assert_enqueued(hg, remind, queue="mail", args={"user": "ann"})
    assert str(failed.value) == (
        "expected a job of kind remind, queue='mail', args={'user': 'ann'}, "
        "found none; the store is empty"
    )


def test_a_failure_lists_at_most_twenty_jobs(store, hg):
    enqueue(store, *(f"job-{n:02}" for n in range(20)), payload=b"x" * 200)
    with pytest.raises(AssertionError) as failed:
        assert_enqueued(hg, "remind")
    text = str(failed.value)
    assert text.count("\n  tk:msg queue='q' state=available id=job-") == 20
    assert "and more" not in text
    assert f"payload={'x' * 100}...\n" in text
    enqueue(store, "job-20")
    with pytest.raises(AssertionError) as failed:
        refute_enqueued(hg, "tk:msg")
    text = str(failed.value)
    assert text.startswith("expected no job of kind tk:msg, found 21; the store holds:")
    assert "id=job-20 partition_key='' scheduled_at_ms=1 payload=ok" in text
    assert "id=job-00" not in text
    assert text.endswith("and more; these are the newest 20")


def test_a_failure_shows_the_partition_and_the_instant_that_jobs_have(store, hg):
    enqueue(store, "a", partition_key="eu", scheduled_at_ms=7_000_000)
    with pytest.raises(AssertionError) as failed:
        assert_enqueued(hg, Enqueued("tk:msg", partition_key="us"))
    assert "partition_key='eu' scheduled_at_ms=7000000" in str(failed.value)


def test_all_pages_are_looked_at(store, hg):
    enqueue(store, *(f"job-{n}" for n in range(450)))
    assert len(assert_enqueued(hg, "tk:msg", count=450)) == 450
    assert_enqueued(hg, "tk:msg", where=lambda job: job.id == "job-0")


def test_a_payload_that_cannot_be_read_has_no_arguments(store, hg, remind):
    enqueue(store, "bad", kind="remind", payload=b"{")
    assert_enqueued(hg, remind)
    refute_enqueued(hg, remind, args={})
    refute_enqueued(hg, Enqueued(remind, payload={}))


def test_what_is_none_of_these_is_refused(hg):
    for what in (object(), int, 7):
        with pytest.raises(InvalidRequest, match="expected a task, a payload class"):
            assert_enqueued(hg, what)
    with pytest.raises(InvalidRequest, match="expected a Store or a Headgate"):
        assert_enqueued("store", "kind")
