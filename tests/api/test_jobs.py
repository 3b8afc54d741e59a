"""Jobs over HTTP: what is shown, what is taken in, and the verbs."""

from __future__ import annotations

import json

import pytest
from attrs import evolve

from headgate_sync.app import Headgate
from headgate_sync.envelope import MAX_PAYLOAD_BYTES, fingerprint
from headgate_sync.errors import BackendError
from headgate_sync.identity import Identity
from headgate_sync.lease import Checkpoint, JobResult, ProgressUpdate
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.loglines import PREFIX, LogLine
from headgate_sync.registry import Registry
from tests.api.caller import b64, caller, job_body
from tests.builders import (
    bring_to,
    claim_one,
    enqueue,
    envelope,
    job,
    run_one,
    state_of,
    steer,
)


def test_a_payload_is_shown_only_when_it_is_asked_for(api, store):
    store.enqueue([envelope("a", payload=b"secret", headers={"k": "v"})])
    for answer in (api.get("/jobs"), api.get("/jobs/a")):
        assert b"secret" not in answer.data
        assert b"c2VjcmV0" not in answer.data
        assert b"metadata" not in answer.data
    found = api.get("/jobs/a?include_payload=true").json
    assert (found["payload"], found["metadata"]) == ("c2VjcmV0", {"k": "v"})


def test_a_payload_may_be_redacted(store):
    store.enqueue([envelope("a", payload=b"secret"), envelope("b", payload=b"secret")])
    seen = []

    def redact(found):
        seen.append((found.id, found.payload))
        return b"***" if found.id == "a" else None

    api = caller(store, redact_payload=redact)
    assert api.get("/jobs/a?include_payload=1").json["payload"] == b64(b"***")
    assert api.get("/jobs/b?include_payload=1").json["payload"] is None
    assert seen == [("a", b"secret"), ("b", b"secret")]


def test_a_redaction_that_fails_shows_nothing(store, caplog):
    store.enqueue([envelope("a", payload=b"secret")])

    def redact(found):
        raise ValueError("no")

    answer = caller(store, redact_payload=redact).get("/jobs/a?include_payload=1")
    assert answer.status_code == 500
    assert set(answer.json) == {"error", "error_id"}
    assert answer.json["error_id"] in caplog.text


def test_a_job_is_shown_whole(api, store, clock):
    store.enqueue([envelope("a", tags=("x",), partition_key="p", priority=3)])
    claim = claim_one(store)
    store.ack(claim.lease_ref, Outcome.RETRY, error="boom", logs=["one"], delay_ms=5)
    found = api.get("/jobs/a").json
    assert found["tags"] == ["x"]
    assert found["state"] == "retryable"
    assert found["periodic_origin"] is None
    assert found["orphaned"] is False
    [entry] = found["errors"]
    assert entry["error"] == "boom"
    assert entry["attempt"] == 1
    assert entry["crash_attempt"] is None
    assert entry["logs"] == [
        {
            "level": "info",
            "message": "one",
            "at_ms": None,
            "fields": {},
            "truncated": False,
        }
    ]


def test_a_line_of_a_log_is_shown_in_its_parts(api, store):
    line = LogLine(level="warn", message="slow", at_ms=5, fields={"n": 1, "x": None})
    forged = PREFIX + '{"at_ms":5,"fields":{"n":NaN},"level":"info","message":"m",'
    store.ack(
        run_one(store, "a").lease_ref,
        Outcome.RETRY,
        error="boom",
        logs=[line.encode(), forged + '"truncated":false}'],
        delay_ms=5,
    )
    [entry] = api.get("/jobs/a").json["errors"]
    assert entry["logs"][0] == {
        "level": "warn",
        "message": "slow",
        "at_ms": 5,
        "fields": {"n": 1, "x": None},
        "truncated": False,
    }
    assert entry["logs"][1]["fields"] == {"n": "nan"}


def test_the_list_is_paged_and_a_bad_cursor_is_refused(api, store):
    enqueue(store, "a", "b", "c")
    first = api.get("/jobs?limit=2").json
    assert [one["id"] for one in first["jobs"]] == ["c", "b"]
    second = api.get(f"/jobs?limit=2&cursor={first['next_cursor']}").json
    assert [one["id"] for one in second["jobs"]] == ["a"]
    assert second["next_cursor"] is None
    assert second["count_is_approximate"] is False
    answer = api.get("/jobs?cursor=x1")
    assert (answer.status_code, answer.json) == (400, {"error": "bad cursor"})


def test_the_search_text_wins_over_the_parameters(api, store):
    store.enqueue(
        [
            envelope("a", kind="p4:search", queue="p4-q", priority=7),
            envelope("b", tags=("x", "y")),
            envelope("c", tags=("x",)),
        ]
    )

    def found(query):
        return {one["id"] for one in api.get(f"/jobs?{query}").json["jobs"]}

    assert found("q=queue:p4-q priority:7") == {"a"}
    assert found("q=kind:p4:search") == {"a"}
    assert found("q=queue:p4-q&queue=other") == {"a"}
    assert found("tags_all=x,y") == {"b"}
    assert found("tags_any=y,z") == {"b"}
    assert found("q=tag:x") == {"b", "c"}
    for text, told in (
        ("bogus:x", "unknown search field `bogus`, did you mean kind:bogus:x?"),
        ("priority:x", "priority `x` is not a number"),
    ):
        answer = api.get(f"/jobs?q={text}")
        assert (answer.status_code, answer.json) == (400, {"error": told})


def test_states_are_counted(api, store, clock):
    enqueue(store, "a", "b")
    bring_to(store, clock, "c", State.PENDING)
    answer = api.get("/jobs/counts?queue=q").json
    assert answer == {
        "counts": [
            {"state": "available", "count": 2},
            {"state": "pending", "count": 1},
        ],
        "count_is_approximate": False,
    }


def test_every_field_of_a_job_arrives(api, store):
    answer = api.post(
        "/jobs",
        job_body(
            id="a",
            schema_version=3,
            priority=-2,
            partition_key="p",
            rate_class="r",
            weight=4,
            unique_key=b64(b"u\x00"),
            unique_exclude_kind=True,
            tags=["x"],
            sticky_worker="w1",
            max_attempts=7,
            retention_ms=60_000,
            scheduled_at_ms=9_000_000,
            timeout_ms=5_000,
            deadline_ms=99_000_000,
            headers={"k": "v"},
            unknown="ignored",
        ),
    )
    assert (answer.status_code, answer.json) == (201, {"id": "a"})
    found = job(store, "a")
    assert found.fingerprint == fingerprint("tk:msg", b"ok")
    assert found.payload == b"ok"
    assert found.headers == {"k": "v"}
    names = ("schema_version", "priority", "partition_key", "rate_class", "weight",
        "tags", "sticky_worker", "max_attempts", "retention_ms", "scheduled_at_ms",
        "state", "queue", "timeout_ms", "deadline_ms")  # fmt: skip
    assert [getattr(found, name) for name in names] == [
        3, -2, "p", "r", 4, ("x",), "w1", 7, 60_000, 9_000_000, "scheduled", "q",
        5_000, 99_000_000,
    ]  # fmt: skip
    other = api.post("/jobs", job_body(kind="other", unique_key=b64(b"u\x00"),
        unique_exclude_kind=True))  # fmt: skip
    assert other.status_code == 409
    assert other.json == {
        "error": "duplicate unique key",
        "existing_id": "a",
        "replaced": False,
    }


def test_a_job_may_wait_for_a_promotion(api, store):
    assert api.post("/jobs", job_body(id="a", pending=True)).status_code == 201
    assert state_of(store, "a") is State.PENDING
    assert api.post("/jobs/a/promote").status_code == 204
    assert state_of(store, "a") is State.AVAILABLE


@pytest.mark.parametrize(
    ("fields", "status", "told"),
    [
        ({"payload": "###"}, 400, "payload must be base64"),
        ({"payload": "YQ"}, 400, "payload must be base64"),
        ({"payload": "YQ==ü"}, 400, "payload must be base64"),
        (
            {"unique_replace": 1},
            400,
            "unique_replace requires caller-supplied unique_key",
        ),
        ({"weight": 0}, 400, "weight must be >= 1"),
        ({"max_attempts": 0}, 400, "max_attempts must be >= 1"),
        ({"tags": ["x", "x"]}, 400, "tags must not repeat"),
        ({"queue": "x" * 256}, 400, "queue has 256 bytes, the limit is 255"),
        ({"queue": "a\x00b"}, 400, "queue must not contain NUL (U+0000)"),
        ({"partition_key": "\ud800"}, 400, None),
        ({"kind": "\ud800"}, 400, None),
        ({"id": ""}, 201, None),
        ({"priority": 2**40}, 400, None),
        ({"priority": True}, 422, None),
        ({"weight": 1.5}, 422, None),
    ],
)
def test_a_job_that_cannot_be_is_refused(api, backend, fields, status, told):
    answer = api.post("/jobs", data=json.dumps(job_body(**fields)),
        content_type="application/json")  # fmt: skip
    assert answer.status_code == status
    if told is not None:
        assert answer.json == {"error": told}
    if status != 201:
        assert backend.snapshot().jobs == {} or not backend.snapshot().jobs


def test_a_kind_that_is_none_is_told_by_the_rule_of_kinds(api):
    answer = api.post("/jobs", job_body(kind="no blanks"))
    assert answer.status_code == 400
    assert answer.json["error"].startswith("invalid kind `no blanks`: 1-128 characters")


def test_the_largest_payload_fits_and_a_larger_one_is_refused(api, store):
    most = b64(b"x" * MAX_PAYLOAD_BYTES)
    assert api.post("/jobs", job_body(id="a", payload=most)).status_code == 201
    answer = api.post("/jobs", job_body(payload=b64(b"x" * (MAX_PAYLOAD_BYTES + 1))))
    assert answer.status_code == 400
    assert "1048577" in answer.json["error"]


def test_refusals_of_the_store_have_statuses_of_their_own(api, store, clock):
    steer(store).set_enqueue_limit("full", 0)
    answer = api.post("/jobs", job_body(queue="full"))
    assert answer.status_code == 429
    assert answer.json == {
        "error": "enqueue backpressure",
        "queue": "full",
        "limit": 0,
        "current": 0,
        "incoming": 1,
    }
    enqueue(store, "a")
    answer = api.post("/jobs", job_body(id="a", kind="other"))
    assert answer.status_code == 409
    assert answer.json["error"].startswith("id conflict: job a exists")
    store.inspect.delete_job("a")
    bring_to(store, clock, "b", State.QUARANTINED)
    answer = api.post("/jobs", job_body())
    assert answer.status_code == 423
    assert answer.json == {
        "error": "fingerprint is quarantined",
        "fingerprint": fingerprint("tk:msg", b"ok"),
    }


def test_what_was_replaced_is_told_with_the_refusal(api, store):
    api.post("/jobs", job_body(id="a", unique_key=b64(b"u")))
    body = job_body(payload=b64(b"new"), unique_key=b64(b"u"), unique_replace=1)
    answer = api.post("/jobs", body)
    assert answer.status_code == 409
    assert answer.json["existing_id"] == "a"
    assert answer.json["replaced"] is True
    assert job(store, "a").payload == b"new"


def test_the_authorizer_is_asked_with_the_identity_and_after_middleware(store):
    asked = []

    def rule(authorization, envelope):
        asked.append((authorization.source, authorization.identity, envelope.queue))
        return envelope.queue != "forbidden"

    def reroute(request, proceed):
        request.batch = [evolve(job, queue="forbidden") for job in request.batch]
        proceed(request)

    anna = Identity("anna")
    api = caller(
        store,
        enqueue_authorizer=rule,
        enqueue_middleware=[reroute],
        authenticate=lambda environ: anna,
    )
    answer = api.post("/jobs", job_body(queue="q"))
    assert answer.status_code == 403
    assert answer.json == {"error": "enqueue forbidden", "kind": "tk:msg"}
    assert asked == [("http", anna, "forbidden")]
    assert api.get("/jobs").json["jobs"] == []


def test_a_dropped_job_is_said_to_be_dropped(store):
    api = caller(store, enqueue_middleware=[lambda request, proceed: None])
    answer = api.post("/jobs", job_body(id="a"))
    assert (answer.status_code, answer.json) == (200, {"id": "a", "dropped": True})
    assert api.get("/jobs/a").status_code == 404


@pytest.mark.parametrize("path", ["", "/admission", "/checkpoint"])
def test_a_job_that_is_not_there(api, path):
    answer = api.get(f"/jobs/nobody{path}")
    assert (answer.status_code, answer.json) == (404, {"error": "no such job"})


@pytest.mark.parametrize("what", ["result", "output", "progress"])
def test_a_value_that_is_not_there(api, store, what):
    enqueue(store, "a")
    for job_id in ("a", "nobody"):
        answer = api.get(f"/jobs/{job_id}/{what}")
        assert answer.status_code == 404
        assert answer.json == {"error": f"no {what} for job"}


def test_output_progress_checkpoint_and_result_are_shown(api, store):
    claim = run_one(store, "a")
    lease = claim.lease_ref
    store.outputs.write_job_output(lease, JobResult(7, bytes([0, 255])))
    store.progress.write_job_progress(
        lease, ProgressUpdate(42, 100, "encoding frame 420")
    )
    store.checkpoint(
        lease,
        Checkpoint(
            completed_steps=("one", "two"),
            cursor_step="three",
            cursor=b'{"offset":42}',
            schema_version=1,
            step_set_hash="h",
        ),
    )
    output = api.get("/jobs/a/output").json
    assert (output["bytes"], output["schema_version"]) == ("AP8=", 7)
    progress = api.get("/jobs/a/progress").json
    assert progress["fence"] >= 1
    assert [progress[n] for n in ("current", "total", "message")] == [
        42, 100, "encoding frame 420",
    ]  # fmt: skip
    kept = api.get("/jobs/a/checkpoint").json
    assert kept["cursor"] == "eyJvZmZzZXQiOjQyfQ=="
    assert kept["last_completed_step"] == "two"
    store.results.ack_success_with_result(lease, JobResult(2, b"done"))
    assert api.get("/jobs/a/result").json == {
        "schema_version": 2,
        "bytes": b64(b"done"),
    }


def test_a_paused_queue_is_named_as_the_reason(api, store):
    enqueue(store, "a")
    api.post("/queues/q/pause")
    found = api.get("/jobs/a/admission").json
    assert found["job_id"] == "a"
    assert found["admissible"] is False
    assert found["blocked_by"] == "queue_paused"
    assert found["estimated_admission_ms"] is None
    assert found["live_workers"] == 0


def test_a_paused_class_is_named_as_the_reason(api, store):
    enqueue(store, "a", rate_class="r")
    body = {"limit": 5, "window_ms": 1000, "paused": True}
    assert api.put("/rate-classes/r", body).status_code == 200
    found = api.get("/jobs/a/admission").json
    assert found["blocked_by"] == "rate_class"
    assert found["estimated_admission_ms"] is None


def test_verbs_follow_the_table(api, store, clock):
    bring_to(store, clock, "a", State.COMPLETED)
    for verb in ("cancel", "retry"):
        answer = api.post(f"/jobs/a/{verb}")
        assert answer.status_code == 400
        assert answer.json["error"].startswith(
            f"operator_{verb} is not defined from completed, only from "
        )
    for verb in ("cancel", "retry", "promote"):
        answer = api.post(f"/jobs/nobody/{verb}")
        assert answer.status_code == 404
        assert answer.json == {"error": "job nobody does not exist"}
    assert api.delete("/jobs/a").status_code == 204
    assert api.delete("/jobs/a").status_code == 404
    run_one(store, "b")
    assert api.delete("/jobs/b").status_code == 400
    assert api.post("/jobs/b/cancel").status_code == 204
    assert api.post("/jobs/b/retry").status_code == 204
    assert state_of(store, "b") is State.AVAILABLE


def test_a_retry_whose_key_is_taken_is_refused(api, store, clock):
    bring_to(store, clock, "a", State.ARCHIVED, unique_key=b"k")
    enqueue(store, "b", unique_key=b"k", payload=b"other")
    answer = api.post("/jobs/a/retry")
    assert answer.status_code == 409
    assert answer.json["existing_id"] == "b"
    assert state_of(store, "a") is State.ARCHIVED


def test_a_job_is_rescheduled(api, store, clock):
    bring_to(store, clock, "a", State.SCHEDULED)
    answer = api.post("/jobs/a/reschedule", {"scheduled_at_ms": 5_000_000})
    assert answer.status_code == 204
    assert job(store, "a").scheduled_at_ms == 5_000_000
    answer = api.post("/jobs/a/reschedule", {"scheduled_at_ms": -1})
    assert answer.status_code == 400


def test_a_job_is_replayed_under_an_id_of_ones_own(api, store, clock):
    bring_to(store, clock, "a", State.ARCHIVED)
    answer = api.post("/jobs/a/replay", {"id": "b", "queue": "r"})
    assert (answer.status_code, answer.json) == (201, {"id": "b", "replay_of": "a"})
    assert (job(store, "b").queue, job(store, "b").replay_of) == ("r", "a")
    assert api.post("/jobs/nobody/replay", {}).status_code == 404


def test_an_edited_payload_has_the_fingerprint_of_its_content(api, store):
    store.enqueue([envelope("a", schema_version=4)])
    answer = api.put("/jobs/a/payload", {"payload": b64(b"new")})
    assert answer.status_code == 204
    found = job(store, "a")
    assert found.payload == b"new"
    assert found.fingerprint == fingerprint("tk:msg", b"new")
    assert found.schema_version == 4
    assert api.put("/jobs/nobody/payload", {"payload": ""}).status_code == 404
    bad = api.put("/jobs/a/payload", {"payload": "", "schema_version": 0})
    assert bad.status_code == 400
    claim_one(store)
    assert api.put("/jobs/a/payload", {"payload": ""}).status_code == 400


def test_an_edit_that_no_handler_could_read_is_refused(store):
    hg = Headgate(store)

    @hg.task("mail", queue="q")
    def mail(address: str) -> None: ...

    api = caller(hg)
    store.enqueue([envelope("a", kind="mail", payload=b'{"address":"x"}')])
    assert isinstance(hg.registry, Registry)
    for payload, version in ((b"{", 1), (b'{"address":1}', 1), (b"{}", 9)):
        body = {"payload": b64(payload), "schema_version": version}
        assert api.put("/jobs/a/payload", body).status_code == 422
    body = {"payload": b64(b'{"address":"y"}'), "schema_version": 1}
    assert api.put("/jobs/a/payload", body).status_code == 204


def test_a_verb_on_many_jobs_tells_what_became_of_each(api, store):
    enqueue(store, "a", "b")
    answer = api.post(
        "/jobs/actions", {"action": "delete", "ids": ["a", "b", "no-such-job"]}
    )
    assert answer.status_code == 200
    assert answer.json == {
        "succeeded": 2,
        "failed": [{"id": "no-such-job", "reason": "job no-such-job does not exist"}],
    }


class Faulty:
    """A store whose verb `delete` ends in a fault of its database."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    @property
    def inspect(self):
        return FaultyInspect(self._store.inspect)


class FaultyInspect(Faulty):
    def delete_job(self, job_id):
        raise BackendError(f"failing row contains ({job_id}, canary)", sqlstate="23514")


def test_a_fault_at_one_of_many_jobs_tells_nothing_but_its_number(store, caplog):
    enqueue(store, "a")
    body = {"action": "delete", "ids": ["a"]}
    answer = caller(Faulty(store)).post("/jobs/actions", body)
    [failed] = answer.json["failed"]
    words, _, number = failed["reason"].rpartition(" ")
    assert (failed["id"], words) == ("a", "internal error")
    assert number in caplog.text
    assert "canary" in caplog.text
    assert "canary" not in answer.text


def test_a_verb_on_too_many_jobs_and_an_unknown_one_are_refused(api, store):
    answer = api.post("/jobs/actions", {"action": "delete", "ids": ["x"] * 1001})
    assert answer.status_code == 400
    assert answer.json == {"error": "at most 1000 ids per call"}
    answer = api.post("/jobs/actions", {"action": "dance", "ids": []})
    assert (answer.status_code, answer.json) == (
        400,
        {"error": "unknown action `dance`"},
    )
    answer = api.post("/jobs/actions", {"action": "archive", "ids": ["a"]})
    assert answer.json["failed"] == [
        {"id": "a", "reason": "operator_archive is not in the transition table"}
    ]


def test_an_operation_on_many_jobs_is_carried_out_later(api, store, clock):
    for job_id in ("a", "b", "c"):
        bring_to(store, clock, job_id, State.ARCHIVED, payload=job_id.encode())
    body = {"action": "retry", "selector": {}}
    assert api.post("/jobs/bulk", body).json == {"error": "empty selector is rejected"}
    dry = {"action": "retry", "selector": {"queue": "q"}, "dry_run": True}
    answer = api.post("/jobs/bulk", dry)
    assert answer.status_code == 202
    told = [answer.json[n] for n in ("status", "total_estimated", "affected")]
    assert told == ["completed", 3, 0]
    answer = api.post("/jobs/bulk", {**dry, "dry_run": False})
    assert (answer.status_code, answer.json["status"]) == (202, "pending")
    operation_id = answer.json["id"]
    while store.inspect.run_pending_operations(100):
        pass
    store.inspect.run_pending_operations(100)
    done = api.get(f"/operations/{operation_id}").json
    assert (done["status"], done["affected"]) == ("completed", 3)
    answer = api.get("/operations/none")
    assert (answer.status_code, answer.json) == (404, {"error": "no such operation"})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"action": "archive", "selector": {"queue": "q"}}, 400),
        ({"action": "retry", "selector": {"quue": "q", "state": "archived"}}, 422),
        ({"action": "retry", "selector": None}, 422),
        ({"action": "retry", "selector": {"older_than_ms": "1"}}, 422),
        ({"action": "retry", "selector": {"older_than_ms": -1}}, 400),
        ({"action": "retry", "selector": {"state": "running"}}, 400),
    ],
)
def test_an_operation_that_may_mean_something_else_is_refused(api, body, status):
    assert api.post("/jobs/bulk", body).status_code == status
