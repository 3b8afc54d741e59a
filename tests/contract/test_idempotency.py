"""Answers under the caller's key: run once, kept, taken over, forgotten."""

from __future__ import annotations

import threading

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.idempotency import ABANDONED_MS, ClaimStatus, StoredAnswer

ROUTE, KEY, TTL_MS = "POST /jobs", "k1", 86_400_000
ANSWER = StoredAnswer(status=201, headers='{"a":"b"}', body=b'{"id":"x"}\x00\xff')


def claim(store, *, route=ROUTE, key=KEY, sha="s1", ttl_ms=TTL_MS):
    return store.idempotency.claim_key(route, key, sha, ttl_ms)


def test_the_first_request_of_a_key_is_begun_and_a_second_is_told_that_it_runs(store):
    assert claim(store).status is ClaimStatus.STARTED
    assert claim(store).status is ClaimStatus.BUSY


def test_a_finished_request_is_answered_as_it_was(store):
    begun = claim(store)
    assert store.idempotency.finish_key(ROUTE, KEY, begun, ANSWER)
    again = claim(store)
    assert (again.status, again.answer) == (ClaimStatus.ANSWERED, ANSWER)


def test_another_request_under_the_key_is_told_so_while_it_runs_and_after(store):
    begun = claim(store)
    assert claim(store, sha="s2").status is ClaimStatus.OTHER
    store.idempotency.finish_key(ROUTE, KEY, begun, ANSWER)
    assert claim(store, sha="s2").status is ClaimStatus.OTHER


def test_the_key_of_another_route_is_another_key(store):
    claim(store)
    assert claim(store, route="POST /other").status is ClaimStatus.STARTED
    assert claim(store, key="k2").status is ClaimStatus.STARTED


def test_a_request_that_was_cut_off_is_begun_again_with_the_same_birth(store, clock):
    first = claim(store)
    clock.advance_ms(ABANDONED_MS)
    assert claim(store).status is ClaimStatus.BUSY
    clock.advance_ms(1)
    second = claim(store)
    assert second.status is ClaimStatus.STARTED
    assert second.created_at_ms == first.created_at_ms
    assert claim(store).status is ClaimStatus.BUSY


def test_whoever_was_taken_over_can_neither_finish_nor_drop(store, clock):
    first = claim(store)
    clock.advance_ms(ABANDONED_MS + 1)
    second = claim(store)
    assert not store.idempotency.finish_key(ROUTE, KEY, first, ANSWER)
    store.idempotency.drop_key(ROUTE, KEY, first)
    assert claim(store).status is ClaimStatus.BUSY
    assert store.idempotency.finish_key(ROUTE, KEY, second, ANSWER)


def test_a_dropped_request_may_be_sent_again(store):
    store.idempotency.drop_key(ROUTE, KEY, claim(store))
    assert claim(store, sha="s2").status is ClaimStatus.STARTED


def test_a_finished_request_cannot_be_dropped(store):
    begun = claim(store)
    store.idempotency.finish_key(ROUTE, KEY, begun, ANSWER)
    store.idempotency.drop_key(ROUTE, KEY, begun)
    assert claim(store).status is ClaimStatus.ANSWERED


def test_an_answer_lapses_and_its_key_is_free_for_any_request(store, clock):
    begun = claim(store)
    store.idempotency.finish_key(ROUTE, KEY, begun, ANSWER)
    clock.advance_ms(TTL_MS - 1)
    assert claim(store).status is ClaimStatus.ANSWERED
    clock.advance_ms(1)
    again = claim(store, sha="s2")
    assert again.status is ClaimStatus.STARTED
    assert again.created_at_ms == begun.created_at_ms + TTL_MS


def test_lapsed_answers_are_removed_by_later_claims(store, backend, clock):
    for number in range(150):
        claim(store, key=f"k{number}", ttl_ms=1_000)
    clock.advance_ms(1_000)
    claim(store, key="a")
    claim(store, key="b")
    assert kept_keys(backend) == {"a", "b"}


def kept_keys(backend):
    image = backend.image()
    if "idempotency" in image:
        return {key for _, key in image["idempotency"]}
    return {
        row["key"] if isinstance(row, dict) else row[2]
        for row in image["headgate_idempotency"]
    }


def test_of_many_threads_with_one_key_one_begins(store):
    found, barrier = [], threading.Barrier(8)

    def run():
        barrier.wait()
        found.append(claim(store).status)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [ClaimStatus.BUSY] * 7 + [ClaimStatus.STARTED]


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "ä", "a\n", None])
def test_a_key_that_no_header_can_carry_is_refused(store, key):
    with pytest.raises(InvalidRequest, match="visible ASCII"):
        claim(store, key=key)


@pytest.mark.parametrize("ttl_ms", [0, -1, True, "1"])
def test_a_time_that_is_none_is_refused(store, ttl_ms):
    with pytest.raises(InvalidRequest, match="ttl_ms"):
        claim(store, ttl_ms=ttl_ms)


@pytest.mark.parametrize("route", ["", "x" * 1025, "a\n", 7])
def test_a_route_that_is_none_is_refused(store, route):
    with pytest.raises(InvalidRequest, match="route"):
        claim(store, route=route)
