"""Queues, limits, quarantine, schedules and workers over HTTP."""

from __future__ import annotations

import pytest

from headgate_sync.identity import Identity
from headgate_sync.lifecycle import State
from headgate_sync.workers import WorkerMeta
from tests.api.caller import b64, caller, job_body
from tests.builders import bring_to, counts, enqueue, job, steer


def worker(worker_id: str, **fields):
    values = {
        "worker_id": worker_id,
        "host": "h",
        "pid": 1,
        "queues": ("q",),
        "concurrency": 8,
        "started_at_ms": 1,
        **fields,
    }
    return WorkerMeta(**values)


# Queues


def test_a_queue_is_shown_with_its_backlog(api, store):
    enqueue(store, "a", "b")
    [queue] = api.get("/queues").json
    assert queue["queue"] == "q"
    assert queue["unfinished_jobs"] == 2
    assert queue["by_state"] == [{"state": "available", "count": 2}]
    assert queue["count_is_approximate"] is False
    assert queue["max_unfinished_jobs"] is None
    assert set(queue["quiet_groups"]) == {
        "arrival_rate", "drain_rate", "time_to_drain_ms", "oldest_available_ms",
        "noisy_partitions", "approximate",
    }  # fmt: skip


@pytest.mark.parametrize(
    "names", [["a", "b", "c", "d", "e"], ["ä/ö", "x y", "%2F", "'; DROP", "\u2028z"]]
)
def test_queues_are_paged_whatever_they_are_called(api, store, names):
    for name in names:
        steer(store).set_queue_paused(name, True)
    found, cursor = [], ""
    for _ in range(len(names) + 1):
        answer = api.get(f"/queues?limit=2{cursor}")
        found += [queue["queue"] for queue in answer.json]
        if "x-next-cursor" not in answer.headers:
            break
        cursor = f"&cursor={answer.headers['x-next-cursor']}"
    assert found == sorted(names, key=str.encode)


def test_a_queue_is_paused_resumed_weighted_and_limited(api, store):
    assert api.post("/queues/q/pause").status_code == 204
    assert api.post("/queues/q/pause").status_code == 204
    assert api.get("/queues").json[0]["paused"] is True
    assert api.post("/queues/q/resume").status_code == 204
    assert api.put("/queues/q", {"weight": 3}).json["weight"] == 3
    answer = api.put("/queues/q", {"weight": 0})
    assert answer.status_code == 400
    answer = api.put("/queues/q/enqueue-limit", {"max_unfinished_jobs": 0})
    assert answer.json["max_unfinished_jobs"] == 0
    assert api.post("/jobs", job_body()).status_code == 429
    assert api.delete("/queues/q/enqueue-limit").status_code == 204
    assert api.post("/jobs", job_body()).status_code == 201
    answer = api.put("/queues/q/enqueue-limit", {"max_unfinished_jobs": -1})
    assert answer.status_code == 400


def test_a_queue_with_jobs_is_removed_by_force_only(api, store):
    enqueue(store, "a")
    answer = api.delete("/queues/q")
    assert answer.status_code == 400
    assert answer.json == {"error": "queue is not empty; retry with force=true"}
    answer = api.delete("/queues/q?force=true")
    assert answer.status_code == 202
    assert answer.json["operation_id"].startswith("qdel-")
    for _ in range(5):
        store.inspect.run_pending_operations(100)
    assert counts(store) == {}
    assert api.delete("/queues/other").status_code == 204


def test_the_history_of_a_queue(api, store, clock):
    clock.freeze_at(120_000 * 1000)
    enqueue(store, "a")
    [bucket] = api.get("/queues/q/history").json
    assert bucket["arrived"] == 1
    assert api.get("/queues/q/history?bucket_ms=59999").status_code == 400


def test_memory_is_sampled_on_demand(api, store):
    enqueue(store, "a")
    answer = api.post("/queues/actions/sample-memory", {})
    assert answer.json == {"sampled_queues": 1}
    assert api.get("/queues").json[0]["memory_bytes"] > 0


def test_a_name_with_slashes_and_signs_is_one_name(api, store):
    for name in (
        "a%2Fb",
        "a%252Fb",
        "%2E%2E",
        "..",
        "%F0%9F%98%80",
        "a%3Fb%23c",
        "%20",
    ):
        assert api.post(f"/queues/{name}/pause").status_code == 204, name
    names = {queue["queue"] for queue in api.get("/queues").json}
    assert names == {"a/b", "a%2Fb", "..", "😀", "a?b#c", " "}


@pytest.mark.parametrize(
    "path", ["/queues//pause", "/queues/a/b/pause", "/jobs/../queues", "/jobs/"]
)
def test_a_path_that_is_none_finds_nothing(api, path):
    assert api.post(path).status_code == 404


def test_a_path_that_is_no_text_is_refused(api):
    overrides = {"PATH_INFO": "/api/v1/jobs/\xff", "REQUEST_URI": "/api/v1/jobs/%FF"}
    answer = api.get("/jobs/x", environ_overrides=overrides)
    assert (answer.status_code, answer.json) == (
        400,
        {"error": "the path is not UTF-8"},
    )


def test_without_the_path_as_it_was_sent_the_decoded_one_counts(api, store):
    overrides = {"REQUEST_URI": "", "RAW_URI": ""}
    answer = api.post("/queues/a%20b/pause", environ_overrides=overrides)
    assert answer.status_code == 204
    overrides = {"REQUEST_URI": "/another/path", "RAW_URI": ""}
    assert api.post("/queues/c/pause", environ_overrides=overrides).status_code == 204
    overrides = {"REQUEST_URI": "http://host/api/v1/queues/d%2Fe/pause?x=1"}
    assert (
        api.post("/queues/d%2Fe/pause", environ_overrides=overrides).status_code == 204
    )
    assert [q["queue"] for q in api.get("/queues").json] == ["a b", "c", "d/e"]


# Limits


def test_rate_classes(api, store):
    answer = api.put("/rate-classes/r", {"limit": 5, "window_ms": 0})
    assert answer.status_code == 400
    assert "window_ms" in answer.json["error"]
    body = {
        "limit": 5,
        "window_ms": 1000,
        "further": [{"limit": 100, "window_ms": 60_000}],
    }
    made = api.put("/rate-classes/r", body).json
    assert (made["burst"], made["limit_per_window"], made["window_ms"]) == (5, 5, 1000)
    assert [budget["slot"] for budget in made["budgets"]] == [0, 1]
    assert made["budgets"][1]["burst"] == 100
    kept = api.put("/rate-classes/r", {"limit": 6, "window_ms": 1000}).json
    assert len(kept["budgets"]) == 2
    gone = {"limit": 6, "window_ms": 1000, "further": []}
    assert len(api.put("/rate-classes/r", gone).json["budgets"]) == 1
    enqueue(store, "a", rate_class="r")
    assert api.get("/rate-classes").json[0]["jobs_waiting"] == 1
    answer = api.delete("/rate-classes/r")
    assert (answer.status_code, answer.headers["x-waiting-jobs"]) == (204, "1")
    answer = api.delete("/rate-classes/r")
    assert answer.status_code == 404
    assert answer.json == {"error": "rate class r does not exist"}


def test_a_class_is_paused_for_a_time(api, store, clock):
    answer = api.post("/rate-classes/r/pause", {"delay_ms": 5_000, "reason": "429"})
    assert answer.json == {"paused_until_ms": clock.now_ms() + 5_000}
    [found] = api.get("/rate-classes").json
    assert found["pause_reason"] == "429"
    assert found["limit_per_window"] is None
    assert api.post("/rate-classes/r/resume").status_code == 204
    assert api.post("/rate-classes/none/resume").status_code == 404
    assert api.post("/rate-classes/r/pause", {"delay_ms": 0}).status_code == 400
    answer = api.post("/rate-classes/r/pause", {"delay_ms": 86_400_001})
    assert answer.status_code == 400


def test_concurrency_limits(api):
    made = api.put("/concurrency-limits/c", {"queue": "q", "max_concurrent": 2}).json
    assert made == {
        "name": "c", "scope": "partition", "queue": "q", "rate_class": "",
        "max_concurrent": 2, "on_saturated": "queue",
    }  # fmt: skip
    assert api.get("/concurrency-limits").json == [made]
    for body in (
        {"queue": "q", "max_concurrent": 0},
        {"max_concurrent": 1},
        {"queue": "q", "max_concurrent": 1, "scope": "world"},
        {"queue": "q", "max_concurrent": 1, "on_saturated": "explode"},
        {"queue": "other", "max_concurrent": 1},
    ):
        assert api.put("/concurrency-limits/c", body).status_code == 400
    assert api.delete("/concurrency-limits/c").status_code == 204
    assert api.delete("/concurrency-limits/c").status_code == 404


def test_partitions_and_their_quantum(api, store):
    for number in range(5):
        enqueue(store, f"j{number}", partition_key=f"p{number}")
    found, cursor = [], ""
    for _ in range(3):
        answer = api.get(f"/partitions?queue=q&limit=2{cursor}")
        found += [partition["partition_key"] for partition in answer.json]
        cursor = f"&cursor={answer.headers.get('x-next-cursor')}"
    assert found == ["p0", "p1", "p2", "p3", "p4"]
    assert "x-next-cursor" not in answer.headers
    body = {"queue": "q", "partition_key": "p0", "quantum": 7}
    assert api.put("/partitions", body).status_code == 204
    [first] = api.get("/partitions?queue=q&limit=1").json
    assert first["quantum_override"] == 7
    assert api.put("/partitions", {**body, "quantum": None}).status_code == 204
    assert api.put("/partitions", {**body, "quantum": 0}).status_code == 400
    assert (
        api.put("/partitions", {"queue": "q", "partition_key": ""}).status_code == 422
    )


def test_a_fingerprint_is_released_once(api, store, clock):
    bring_to(store, clock, "a", State.QUARANTINED)
    [entry] = api.get("/quarantine").json
    path = f"/quarantine/{entry['fingerprint']}"
    answer = api.delete(path)
    assert (answer.status_code, answer.headers["x-released-jobs"]) == (204, "1")
    answer = api.delete(path)
    assert answer.status_code == 404
    told = f"fingerprint {entry['fingerprint']} is not quarantined"
    assert answer.json == {"error": told}


def test_quarantine_is_paged(api, store, clock):
    for number in range(3):
        bring_to(store, clock, f"j{number}", State.QUARANTINED, payload=b"%d" % number)
    first = api.get("/quarantine?limit=2")
    rest = api.get(f"/quarantine?limit=2&cursor={first.headers['x-next-cursor']}")
    assert len({e["fingerprint"] for e in first.json + rest.json}) == 3


# Schedules


def test_a_schedule_from_birth_to_death(api, store):
    body = {"kind": "k", "spec": "@every:3600000", "payload": b64(b"p"), "tags": ["t"]}
    made = api.put("/periodic/s", body)
    assert made.status_code == 200
    assert made.json["paused"] is False
    assert b64(b"p").encode() not in made.data
    bad = api.put("/periodic/s", {**body, "spec": "nonsense"})
    assert bad.status_code == 400
    [listed] = api.get("/periodic").json
    assert listed == made.json
    first = api.post("/periodic/s/run", key="once")
    second = api.post("/periodic/s/run", key="once")
    assert (first.status_code, second.status_code) == (202, 202)
    assert second.json == {**first.json, "replayed": True}
    assert job(store, first.json["id"]).payload == b"p"
    assert counts(store) == {"available": 1}
    assert api.get("/periodic").json[0]["next_run_ms"] == made.json["next_run_ms"]
    assert api.post("/periodic/s/pause").status_code == 204
    assert api.put("/periodic/s", body).json["paused"] is True
    assert api.post("/periodic/s/resume").status_code == 204
    assert api.get("/periodic/s/enqueue-events").json == {
        "events": [],
        "next_cursor": None,
    }
    assert api.delete("/periodic/s").status_code == 204
    assert api.delete("/periodic/s").status_code == 404
    for verb in ("pause", "resume", "run"):
        assert api.post(f"/periodic/s/{verb}").status_code == 404


def test_a_run_whose_job_a_middleware_dropped_is_said_to_be_dropped(store):
    api = caller(store, enqueue_middleware=[lambda request, proceed: None])
    api.put("/periodic/s", {"kind": "k", "spec": "@daily"})
    answer = api.post("/periodic/s/run", key="once")
    assert (answer.status_code, answer.json["dropped"]) == (200, True)
    assert api.get(f"/jobs/{answer.json['id']}").status_code == 404
    again = api.post("/periodic/s/run", key="once")
    assert again.json == {**answer.json, "replayed": True}


def test_schedules_are_paged(api, store):
    for number in range(3):
        api.put(f"/periodic/s{number}", {"kind": "k", "spec": "@every:60000"})
    first = api.get("/periodic?limit=2")
    rest = api.get(f"/periodic?limit=2&cursor={first.headers['x-next-cursor']}")
    assert [s["id"] for s in first.json + rest.json] == ["s0", "s1", "s2"]
    assert "x-next-cursor" not in rest.headers


@pytest.mark.parametrize("limit", [0, 101])
def test_events_have_a_page_size_of_their_own(api, limit):
    answer = api.get(f"/periodic/s/enqueue-events?limit={limit}")
    assert answer.json == {"error": "limit must be between 1 and 100"}


def test_the_authorizer_sees_what_a_schedule_will_enqueue(store):
    seen = []

    def rule(authorization, envelope):
        seen.append((authorization.source, authorization.identity, envelope))
        return False

    anna = Identity("anna")
    api = caller(store, enqueue_authorizer=rule, authenticate=lambda environ: anna)
    answer = api.put("/periodic/s", {"kind": "k", "spec": "@every:60000"})
    assert answer.status_code == 403
    assert answer.json == {"error": "enqueue forbidden", "kind": "k"}
    [(source, identity, envelope)] = seen
    assert (source, identity, envelope.id) == ("http", anna, "schedule:s")
    assert api.get("/periodic").json == []


# Workers


def test_the_cluster_is_a_ratio_of_sums(api, store):
    steer(store).heartbeat_worker(worker("a", inflight=6, polls=10, empty_polls=2))
    found = api.get("/cluster").json
    assert (found["utilization"], found["empty_poll_ratio"]) == (0.75, 0.2)
    steer(store).heartbeat_worker(worker("b", concurrency=2))
    found = api.get("/cluster").json
    assert found["capacity_total"] == 10
    assert found["inflight_total"] == 6
    assert found["utilization"] == 0.6
    assert found["workers"] == {"live": 2, "late": 0, "stale": 0, "total": 2}


def test_a_queue_that_nobody_serves_is_shown(api, store):
    enqueue(store, "a", queue="lonely")
    assert api.get("/cluster").json["queues"] == [
        {"queue": "lonely", "live_workers": 0, "late_workers": 0}
    ]
    steer(store).heartbeat_worker(worker("w", queues=("lonely",)))
    assert api.get("/cluster").json["queues"][0]["live_workers"] == 1
    assert api.get("/jobs/a/admission").json["live_workers"] == 1


def test_workers_are_paged_and_signalled(api, store):
    for name in ("a", "b", "c"):
        steer(store).heartbeat_worker(worker(name))
    first = api.get("/workers?limit=2")
    rest = api.get(f"/workers?limit=2&cursor={first.headers['x-next-cursor']}")
    assert [w["worker_id"] for w in first.json + rest.json] == ["a", "b", "c"]
    assert "x-next-cursor" not in rest.headers
    assert api.post("/workers/a/signal", {"command": "quiet"}).status_code == 204
    assert api.post("/workers/a/signal", {"command": "restart"}).status_code == 204
    assert api.get("/workers").json[0]["pending_command"] == "restart"
    assert api.post("/workers/a/signal", {"command": None}).status_code == 204
    assert api.get("/workers").json[0]["pending_command"] is None
    assert api.post("/workers/a/signal", {"command": "dance"}).status_code == 400
    assert api.post("/workers/x/signal", {"command": "quiet"}).status_code == 404
    assert api.post("/workers/a/signal", {}).status_code == 422
