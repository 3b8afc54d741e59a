"""Idempotency keys over HTTP: what is repeated, and what is run again."""

from __future__ import annotations

import threading

import pytest

from headgate_sync.errors import StoreUnavailable
from headgate_sync.idempotency import ABANDONED_MS
from headgate_sync.identity import Identity
from headgate_sync.lifecycle import Outcome
from tests.api.caller import Caller, b64, caller, job_body
from tests.builders import claim_one, counts, enqueue, steer


def test_the_same_request_makes_one_job_and_is_answered_alike(api, store):
    first = api.post("/jobs", job_body(), key="K")
    second = api.post("/jobs", job_body(), key="K")
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.json == {**first.json, "replayed": True}
    assert second.headers["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first.headers
    assert counts(store) == {"available": 1}


def test_a_repeat_makes_no_job_after_the_first_is_done_and_gone(api, store):
    first = api.post("/jobs", job_body(), key="K")
    claim = claim_one(store)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert counts(store) == {}
    assert api.post("/jobs", job_body(), key="K").json["id"] == first.json["id"]
    assert counts(store) == {}


def test_another_request_under_the_key_is_refused(api, store):
    api.post("/jobs", job_body(), key="K")
    assert api.delete("/queues/q", key="K").status_code == 400
    for answer in (
        api.post("/jobs", job_body(queue="other"), key="K"),
        api.delete("/queues/q?force=true", key="K"),
    ):
        assert answer.status_code == 422
        assert answer.json == {
            "error": "idempotency key was used for a different request"
        }
    assert counts(store) == {"available": 1}


def test_a_key_belongs_to_the_sender(store):
    api = caller(store, authenticate=lambda environ: Identity(environ["HTTP_WHO"]))
    api.post("/jobs", job_body(), key="K", headers={"Who": "anna"})
    answer = api.post("/jobs", job_body(), key="K", headers={"Who": "berta"})
    assert answer.status_code == 422
    assert b"id" not in answer.json


def test_a_key_belongs_to_the_path_with_its_values(api, store):
    enqueue(store, "a", "b")
    for job_id in ("a", "b"):
        assert api.post(f"/jobs/{job_id}/cancel", key="K").status_code == 204
    assert counts(store) == {"cancelled": 2}


def test_a_repeated_verb_is_answered_as_the_first_was(api, store):
    enqueue(store, "a")
    assert api.post("/jobs/a/cancel", key="K").status_code == 204
    again = api.post("/jobs/a/cancel", key="K")
    assert (again.status_code, again.data) == (204, b"")
    assert "Content-Type" not in again.headers
    assert api.post("/jobs/a/cancel").status_code == 400


def test_headers_belong_to_the_answer(api, store):
    enqueue(store, "a", rate_class="r")
    api.put("/rate-classes/r", {"limit": 1, "window_ms": 1})
    for _ in range(2):
        answer = api.delete("/rate-classes/r", key="K")
        assert answer.headers["x-waiting-jobs"] == "1"


def test_a_refusal_is_repeated_too(api, store):
    answer = api.post("/jobs/a/cancel", key="K")
    assert answer.status_code == 404
    enqueue(store, "a")
    again = api.post("/jobs/a/cancel", key="K")
    assert (again.status_code, again.json) == (404, answer.json)


def test_what_may_succeed_later_is_run_again(api, store):
    steer(store).set_enqueue_limit("q", 0)
    assert api.post("/jobs", job_body(), key="K").status_code == 429
    steer(store).set_enqueue_limit("q", None)
    assert api.post("/jobs", job_body(), key="K").status_code == 201


def test_an_outage_is_not_kept(store):
    down = [True]

    def fail(request, proceed):
        if down[0]:
            raise StoreUnavailable("no route to host")
        proceed(request)

    api = caller(store, enqueue_middleware=[fail])
    answer = api.post("/jobs", job_body(), key="K")
    assert answer.status_code == 503
    assert answer.json == {"error": "store unavailable: no route to host"}
    down[0] = False
    assert api.post("/jobs", job_body(), key="K").status_code == 201


def test_a_request_that_is_wrong_leaves_its_key_free(api):
    assert api.post("/jobs", {}, key="K").status_code == 422
    assert api.post("/jobs", job_body(), key="K").status_code == 201


def test_a_key_whose_request_still_runs_is_busy(store):
    inside, go_on = threading.Event(), threading.Event()

    def wait(request, proceed):
        inside.set()
        assert go_on.wait(10)
        proceed(request)

    api = caller(store, enqueue_middleware=[wait])
    answers = []

    def first():
        answers.append(Caller(api.app).post("/jobs", job_body(), key="K"))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    answer = api.post("/jobs", job_body(), key="K")
    go_on.set()
    thread.join()
    assert answer.status_code == 409
    assert answer.json == {"error": "request with this idempotency key is in progress"}
    assert answer.headers["Retry-After"] == "1"
    assert answers[0].status_code == 201
    assert api.post("/jobs", job_body(), key="K").json["replayed"] is True


class Killed(BaseException):
    """What ends a process in the middle of a request."""


@pytest.mark.parametrize("before", [True, False])
def test_a_request_that_was_killed_makes_one_job_all_the_same(store, clock, before):
    kill = [True]

    def die(request, proceed):
        if not (kill[0] and before):
            proceed(request)
        if kill[0]:
            raise Killed

    api = caller(store, enqueue_middleware=[die])
    with pytest.raises(Killed):
        api.post("/jobs", job_body(), key="K")
    kill[0] = False
    assert api.post("/jobs", job_body(), key="K").status_code == 409
    clock.advance_ms(ABANDONED_MS + 1)
    answer = api.post("/jobs", job_body(), key="K")
    assert answer.status_code == 201
    assert counts(store) == {"available": 1}
    assert api.post("/jobs", job_body(), key="K").json["id"] == answer.json["id"]


class Dying:
    """A store whose process ends right after an operation was noted."""

    def __init__(self, store):
        self._store = store
        self.kill = True

    def __getattr__(self, name):
        return getattr(self._store, name)

    @property
    def inspect(self):
        return DyingInspect(self._store.inspect, self)


class DyingInspect:
    def __init__(self, inspect, owner):
        self._inspect = inspect
        self._owner = owner

    def __getattr__(self, name):
        return getattr(self._inspect, name)

    def create_operation(self, request):
        self._inspect.create_operation(request)
        if self._owner.kill:
            raise Killed


def test_an_operation_that_was_cut_off_is_made_once(store, clock, backend):
    enqueue(store, "a")
    dying = Dying(store)
    api = caller(dying)
    body = {"action": "cancel", "selector": {"queue": "q"}}
    with pytest.raises(Killed):
        api.post("/jobs/bulk", body, key="K")
    dying.kill = False
    clock.advance_ms(ABANDONED_MS + 1)
    answer = api.post("/jobs/bulk", body, key="K")
    assert answer.status_code == 202
    assert api.get(f"/operations/{answer.json['id']}").json == answer.json
    while store.inspect.run_pending_operations(10):
        pass
    assert api.get(f"/operations/{answer.json['id']}").json["affected"] == 1


def test_an_answer_is_kept_for_a_day(api, store, clock):
    first = api.post("/jobs", job_body(), key="K").json
    clock.advance_ms(86_400_000 - 1)
    assert api.post("/jobs", job_body(), key="K").json["replayed"] is True
    clock.advance_ms(1)
    second = api.post("/jobs", job_body(), key="K").json
    assert second["id"] != first["id"]
    assert counts(store) == {"available": 2}


@pytest.mark.parametrize("key", ["a b", "ä", "x" * 256, "\t"])
def test_a_key_that_is_none_is_refused(api, key):
    answer = api.post("/jobs", job_body(), key=key)
    assert answer.status_code == 400
    assert "visible ASCII" in answer.json["error"]


def test_a_very_long_path_has_a_key_of_its_own(api, store):
    name = "%F0%9F%98%80" * 300
    for number in range(2):
        answer = api.post(f"/quarantine/{name}{number}", key="K")
        assert answer.status_code == 405
        answer = api.delete(f"/quarantine/{name}{number}", key="K")
        assert answer.status_code == 404
        assert answer.json["error"].endswith(f"{number} is not quarantined")


def test_the_payload_of_a_job_is_not_kept_with_its_key(api, backend):
    api.post("/jobs", job_body(payload=b64(b"canary-payload")), key="K")
    image = backend.image()
    kept = image.get("idempotency", image.get("headgate_idempotency"))
    assert kept
    assert "canary" not in repr(kept)
