"""Answers that a crowd shares, and who is never given an old one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from headgate_sync.api.answers import Answer
from headgate_sync.api.config import ApiConfig, RateLimit
from headgate_sync.api.shared import CROWD, MAX_KEYS, SharedAnswers
from headgate_sync.console import ConsoleConfig, create_app
from headgate_sync.errors import InvalidRequest
from tests.api.caller import Caller, caller
from tests.builders import enqueue, steer


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Clock:
    return Clock()


@pytest.fixture
def shared(time: Clock) -> SharedAnswers:
    return SharedAnswers(1_000, now_s=time)


def numbered() -> Callable[[], Answer]:
    """Makes a new answer each time."""
    numbers = count(1)
    return lambda: Answer(body=b"%d" % next(numbers))


def bodies(shared: SharedAnswers, make: Callable[[], Answer], many: int) -> list[Any]:
    return [shared.get("k", make).body for _ in range(many)]


def test_whoever_looks_alone_always_sees_the_present(shared, time):
    make = numbered()
    assert bodies(shared, make, CROWD) == [b"1", b"2", b"3", b"4", b"5"]
    time.now_s += 1.1
    assert bodies(shared, make, CROWD) == [b"6", b"7", b"8", b"9", b"10"]


def test_a_crowd_shares_an_answer_until_its_moment_is_over(shared, time):
    make = numbered()
    bodies(shared, make, CROWD)
    time.now_s += 0.9
    assert bodies(shared, make, 20) == [b"5"] * 20
    assert shared.get("other", make).body == b"6"
    time.now_s += 0.1
    assert bodies(shared, make, 20) == [b"7"] * 20


def test_requests_that_come_while_an_answer_is_made_wait_for_it(shared, time):
    make, begun, go_on = numbered(), threading.Event(), threading.Event()
    bodies(shared, make, CROWD)
    time.now_s += 1

    def slow() -> Answer:
        begun.set()
        assert go_on.wait(20)
        return Answer(body=b"slow")

    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(shared.get, "k", slow)
        assert begun.wait(20)
        others = [pool.submit(shared.get, "k", make) for _ in range(8)]
        go_on.set()
        assert {one.result(20).body for one in [first, *others]} == {b"slow"}


def test_a_failure_is_told_to_who_waits_and_to_nobody_later(shared):
    bodies(shared, numbered(), CROWD)
    shared.forget()
    refused = Answer(status=503)
    assert shared.get("k", lambda: refused) is refused
    assert shared.get("k", numbered()).body == b"1"


def test_no_reading_from_before_a_change_is_given_after_it(shared):
    begun, go_on = threading.Event(), threading.Event()
    bodies(shared, numbered(), CROWD)
    shared.forget()

    def slow() -> Answer:
        begun.set()
        assert go_on.wait(20)
        return Answer(body=b"before the change")

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(shared.get, "k", slow)
        assert begun.wait(20)
        shared.forget()
        assert shared.get("k", lambda: Answer(body=b"after")).body == b"after"
        go_on.set()
        assert early.result(20).body == b"before the change"
    assert shared.get("k", numbered()).body == b"after"


def test_names_that_somebody_invents_are_not_kept_for_ever(shared):
    make = numbered()
    bodies(shared, make, CROWD)
    assert shared.holds("k")
    for name in range(MAX_KEYS):
        shared.get(name, make)
    assert not shared.holds("k")


# Over HTTP


@pytest.fixture
def crowded(store) -> Iterator[Caller]:
    """An API whose list of queues a crowd has just asked for."""
    enqueue(store, "a")
    api = caller(store, share_ms=60_000)
    for _ in range(CROWD):
        assert api.get("/queues").json[0]["unfinished_jobs"] == 1
    yield api
    api.app.close()


def test_a_crowd_gets_the_answer_of_a_moment_ago_with_its_instant(crowded, store):
    first = crowded.get("/queues")
    enqueue(store, "b")
    again = crowded.get("/queues")
    assert again.json == first.json
    assert again.headers["x-store-now-ms"] == first.headers["x-store-now-ms"]
    assert crowded.get("/queues?limit=3").json[0]["unfinished_jobs"] == 2
    head = crowded.send("HEAD", "/queues")
    assert (head.status_code, head.data) == (200, b"")


def test_a_change_is_seen_by_the_next_look(crowded):
    assert crowded.post("/queues/q/pause").status_code == 204
    assert crowded.get("/queues").json[0]["paused"] is True


def test_a_change_that_was_refused_is_followed_by_a_new_look_too(crowded, store):
    enqueue(store, "b")
    assert crowded.post("/jobs/none/cancel").status_code == 404
    assert crowded.get("/queues").json[0]["unfinished_jobs"] == 2


def test_whoever_asks_for_the_present_gets_it_and_shares_it(crowded, store):
    enqueue(store, "b")
    anew = crowded.get("/queues", headers={"Cache-Control": "no-cache"})
    assert anew.json[0]["unfinished_jobs"] == 2
    assert crowded.get("/queues").json[0]["unfinished_jobs"] == 2


def test_what_is_about_one_job_is_never_shared(store):
    enqueue(store, "a")
    api = caller(store, share_ms=60_000)
    for _ in range(2 * CROWD):
        assert api.get("/jobs/a").json["state"] == "available"
        assert len(api.get("/jobs").json["jobs"]) == 1
    steer(store).operator_cancel("a")
    assert api.get("/jobs/a").json["state"] == "cancelled"
    enqueue(store, "b")
    assert len(api.get("/jobs").json["jobs"]) == 2


def test_nothing_is_shared_where_it_is_switched_off(store):
    enqueue(store, "a")
    api = caller(store, share_ms=0)
    for _ in range(CROWD):
        api.get("/queues")
    enqueue(store, "b")
    assert api.get("/queues").json[0]["unfinished_jobs"] == 2
    with pytest.raises(InvalidRequest, match="share_ms"):
        ApiConfig(share_ms=-1)


def test_who_may_not_look_is_not_given_the_answer_of_others(store):
    enqueue(store, "a")
    may = [True]
    api = caller(store, share_ms=60_000, authorize=lambda *_: may[0])
    for _ in range(CROWD + 1):
        assert api.get("/queues").status_code == 200
    may[0] = False
    assert api.get("/queues").status_code == 403


# The console


def pages(store: Any, **api: Any) -> Caller:
    config = ApiConfig(share_ms=60_000, **api)
    return Caller(create_app(store, ConsoleConfig(api=config)))


def test_parts_of_a_page_that_others_read_cost_its_reader_nothing(store):
    enqueue(store, "a")
    console = pages(store, rate_limit=RateLimit(per_second=1, burst=400)).client
    shown = [console.get("/queues").status_code for _ in range(200)]
    assert set(shown) == {200}


def test_pages_whose_parts_are_read_for_them_alone_cost_what_they_read(store):
    enqueue(store, "a")
    console = pages(store, rate_limit=RateLimit(per_second=1, burst=100)).client
    fresh = {"Cache-Control": "no-cache"}
    shown = [console.get("/queues", headers=fresh).status_code for _ in range(200)]
    assert 429 in shown


def test_whoever_has_just_acted_sees_what_came_of_it(store):
    enqueue(store, "a")
    console = pages(store, rate_limit=None).client
    for _ in range(CROWD + 1):
        assert "Resume" not in console.get("/queues").text
    steer(store).set_queue_paused("q", True)  # as by another process
    assert "Resume" not in console.get("/queues").text
    console.set_cookie("other", "1")
    console.set_cookie("headgate-acted", "1")
    assert "Resume" in console.get("/queues").text
