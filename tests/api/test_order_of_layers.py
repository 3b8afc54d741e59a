"""What is refused, by which layer, and in which order."""

from __future__ import annotations

import json

import pytest

from headgate_sync.api import RateLimit
from headgate_sync.api.routes import ROUTES
from headgate_sync.identity import Identity
from tests.api.caller import BASE, Caller, caller, job_body
from tests.api.test_every_field import body_of, path_of

MUTATING = [route for route in ROUTES if route.mutates]
WITH_BODY = [route for route in ROUTES if route.body is not None]
GUARDED = [route for route in ROUTES if route.guarded]
LOOKING = [route for route in ROUTES if not route.mutates]


def ids(routes):
    return [f"{route.method} {route.path}" for route in routes]


@pytest.mark.parametrize("route", MUTATING, ids=ids(MUTATING))
def test_a_change_without_a_key_is_refused(memory, route):
    api = caller(memory.make_store())
    answer = api.send(route.method, path_of(route), key=None, json={})
    assert answer.status_code == 400
    assert answer.json == {
        "error": "Idempotency-Key header is required on every mutating request"
    }


@pytest.mark.parametrize("route", MUTATING, ids=ids(MUTATING))
def test_a_change_is_refused_in_read_only_mode(memory, route):
    api = caller(memory.make_store(), read_only=True)
    answer = api.send(route.method, path_of(route), key=None)
    assert (answer.status_code, answer.json) == (403, {"error": "read-only mode"})


@pytest.mark.parametrize("route", MUTATING, ids=ids(MUTATING))
def test_a_body_that_is_too_large_is_refused(memory, route):
    api = caller(memory.make_store(), max_body_bytes=10)
    answer = api.send(route.method, path_of(route), data=b"x" * 11)
    assert answer.status_code == 413
    assert answer.json == {"error": "request body exceeds 10 bytes"}


@pytest.mark.parametrize("route", WITH_BODY, ids=ids(WITH_BODY))
def test_a_body_of_another_type_is_refused(memory, route):
    api = caller(memory.make_store())
    answer = api.send(
        route.method, path_of(route), data=b"{}", content_type="text/plain"
    )
    assert answer.status_code == 415
    assert answer.json == {"error": "expected Content-Type: application/json"}


@pytest.mark.parametrize("route", WITH_BODY, ids=ids(WITH_BODY))
@pytest.mark.parametrize(
    "text", ["{", "", "NaN", "[" * 100_000, '{"a":1e', "1" * 5000, "\xff"]
)
def test_a_body_that_is_no_json_is_refused(memory, route, text):
    api = caller(memory.make_store())
    answer = api.send(
        route.method,
        path_of(route),
        data=text.encode("latin-1"),
        content_type="application/json",
    )
    assert (answer.status_code, answer.json) == (400, {"error": "bad json"})


@pytest.mark.parametrize("route", WITH_BODY, ids=ids(WITH_BODY))
@pytest.mark.parametrize("text", ["[]", "1", '"a"', "null"])
def test_a_body_that_is_no_object_is_refused(memory, route, text):
    api = caller(memory.make_store())
    answer = api.send(
        route.method, path_of(route), data=text, content_type="application/json"
    )
    assert answer.status_code == 422


@pytest.mark.parametrize("route", WITH_BODY, ids=ids(WITH_BODY))
def test_a_field_that_is_missing_is_named(memory, route):
    required = [one.name for one in route.body if one.required]
    answer = caller(memory.make_store()).send(route.method, path_of(route), json={})
    if required:
        assert answer.status_code == 422
        assert answer.json == {"error": f"missing field `{required[0]}`"}
    else:
        assert answer.status_code != 422


@pytest.mark.parametrize("route", WITH_BODY, ids=ids(WITH_BODY))
def test_a_field_of_another_type_is_named(memory, route):
    api = caller(memory.make_store())
    for one in route.body:
        good = {
            other.name: None if other.nullable else {"string": "QQ==", "integer": 1,
            "array": [], "object": {}}[other.kind.schema["type"]]
            for other in route.body
            if other.required
        }  # fmt: skip
        answer = api.send(route.method, path_of(route), json={**good, one.name: [[1]]})
        assert answer.status_code == 422, one.name
        assert f"`{one.name}`" in answer.json["error"]


@pytest.mark.parametrize("route", GUARDED, ids=ids(GUARDED))
@pytest.mark.parametrize("name", ["nonsense", ""])
def test_a_parameter_that_no_route_declares_is_refused(memory, route, name):
    """A filter that is misspelt would otherwise show, or change, everything."""
    path = path_of(route)
    mark = "&" if "?" in path else "?"
    body = None if route.body is None else body_of(route)
    api = caller(memory.make_store())
    answer = api.send(route.method, f"{path}{mark}{name}=x", json=body)
    assert answer.status_code == 400
    allowed = ", ".join(one.name for one in route.query)
    assert answer.json == {
        "error": f"unknown query parameter `{name}`, "
        + (f"allowed: {allowed}" if allowed else "none is allowed")
    }


def test_a_probe_may_add_a_parameter_of_its_own(api):
    for path in ("/healthz", "/readyz"):
        assert api.get(f"{path}?probe=7").status_code == 200


def test_a_misspelt_filter_is_told_before_a_parameter_that_is_missing(api):
    answer = api.get("/partitions?queu=q")
    assert answer.json["error"].startswith("unknown query parameter `queu`")


def test_a_missing_parameter_and_a_bad_one_are_named(api):
    answer = api.get("/partitions")
    assert answer.status_code == 400
    assert answer.json == {"error": "missing query parameter `queue`"}
    answer = api.get("/jobs?limit=x")
    assert answer.json == {"error": "invalid query parameter `limit`"}
    for text in ("1.5", "9" * 30, "", "１"):
        assert api.get(f"/jobs?limit={text}").status_code == 400
    answer = api.get("/jobs/a?include_payload=maybe")
    assert answer.json == {"error": "invalid query parameter `include_payload`"}
    answer = api.get("/jobs?queue=%ff")
    assert (answer.status_code, answer.json) == (400, {"error": "invalid query string"})


@pytest.mark.parametrize("limit", [0, -1, 201, 10**15])
@pytest.mark.parametrize(
    "path", ["/queues", "/partitions?queue=q", "/quarantine", "/periodic", "/workers"]
)
def test_control_lists_refuse_a_page_out_of_range(api, path, limit):
    mark = "&" if "?" in path else "?"
    answer = api.get(f"{path}{mark}limit={limit}")
    assert answer.status_code == 400
    assert answer.json == {"error": "limit must be between 1 and 200"}


@pytest.mark.parametrize(
    "path", ["/queues", "/partitions?queue=q", "/quarantine", "/periodic", "/workers"]
)
@pytest.mark.parametrize("cursor", ["!", "a", "w6Q=x", "_w", "JzsgRFJPUA"])
def test_a_cursor_of_no_page_is_refused_or_finds_nothing(api, path, cursor):
    mark = "&" if "?" in path else "?"
    answer = api.get(f"{path}{mark}cursor={cursor}")
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        assert answer.json == []


def test_an_unknown_path_and_a_method_that_is_not_there(api):
    assert api.get("/nothing").json == {"error": "not found"}
    assert api.get("/nothing").status_code == 404
    assert api.get("/").status_code == 404
    assert api.client.get("/api/v2/jobs").status_code == 404
    assert api.client.get("/").status_code == 404
    answer = api.send("PATCH", "/jobs", key=None)
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "GET, HEAD, OPTIONS, POST"


def test_without_a_path_the_key_still_comes_first(api):
    assert api.post("/nothing", key=None).status_code == 400
    assert api.post("/nothing").status_code == 404


def test_read_only_mode_covers_paths_that_do_not_exist(memory):
    api = caller(memory.make_store(), read_only=True)
    assert api.post("/nothing", key=None).status_code == 403
    assert api.send("PATCH", "/jobs", key=None).status_code == 403


def test_read_only_mode_lets_looking_through(store):
    api = caller(store, read_only=True)
    assert api.post("/jobs", job_body()).json == {"error": "read-only mode"}
    assert api.get("/jobs").status_code == 200
    assert api.send("HEAD", "/healthz").status_code == 200
    assert api.send("OPTIONS", "/jobs").status_code == 204


@pytest.mark.parametrize("route", LOOKING, ids=ids(LOOKING))
def test_head_is_get_without_a_body(memory, route):
    api = caller(memory.make_store())
    answer = api.send("HEAD", path_of(route) + "?queue=q")
    other = api.get(path_of(route) + "?queue=q")
    assert answer.data == b""
    assert answer.status_code == other.status_code
    assert answer.headers["Content-Type"] == other.headers["Content-Type"]
    other.close()
    api.app.close()


def test_options_say_what_is_there(api):
    answer = api.send("OPTIONS", "/queues/q")
    assert answer.status_code == 204
    assert answer.headers["Allow"] == "DELETE, GET, HEAD, OPTIONS, PUT"
    assert "Content-Type" not in answer.headers


def test_the_layers_come_in_their_order(memory):
    """A request that is wrong in every way is refused by the outermost layer first."""
    known = Identity("anna")
    store = memory.make_store()
    everything = {
        "json": None,
        "data": b"x" * 100,
        "content_type": "text/plain",
    }

    def refused(**config):
        api = caller(store, max_body_bytes=10, **config)
        key = config.pop("key", None)
        return api.post("/jobs?limit=x", key=key, **everything).status_code

    assert refused(authenticate=lambda environ: None, read_only=True) == 401
    assert refused(authenticate=lambda environ: known, read_only=True) == 403
    limited = caller(
        store, max_body_bytes=10, rate_limit=RateLimit(per_second=1, burst=1)
    )
    assert limited.post("/jobs", key=None, **everything).status_code == 400
    assert limited.post("/jobs", key=None, **everything).status_code == 429
    api = caller(store, max_body_bytes=10)
    assert api.post("/jobs", key="a b", **everything).status_code == 400
    assert api.post("/jobs", **everything).status_code == 413
    everything["data"] = b"x"
    assert api.post("/jobs", **everything).status_code == 415
    everything["content_type"] = "application/json"
    assert api.post("/jobs", **everything).status_code == 400
    everything["data"] = b"{}"
    assert api.post("/jobs", **everything).status_code == 422


def test_a_sender_who_sends_too_much_is_told_when_to_come_back(memory):
    api = caller(memory.make_store(), rate_limit=RateLimit(per_second=1, burst=2))
    assert api.get("/meta").status_code == 200
    assert api.get("/meta").status_code == 200
    answer = api.get("/meta")
    assert answer.status_code == 429
    assert answer.json["error"] == "too many requests"
    assert 0 < answer.json["retry_after_ms"] <= 1000
    assert answer.headers["Retry-After"] == "1"
    for _ in range(5):
        assert api.get("/healthz").status_code == 200
        assert api.get("/readyz").status_code == 200


def test_each_identity_has_a_rate_of_its_own(memory):
    api = caller(
        memory.make_store(),
        rate_limit=RateLimit(per_second=1, burst=1),
        authenticate=lambda environ: Identity(environ["HTTP_WHO"]),
    )
    for who in ("anna", "berta"):
        assert api.get("/meta", headers={"Who": who}).status_code == 200
        assert api.get("/meta", headers={"Who": who}).status_code == 429


def test_guesses_of_a_token_are_counted_too(memory):
    api = caller(
        memory.make_store(),
        rate_limit=RateLimit(per_second=1, burst=1),
        authenticate=lambda environ: None,
    )
    assert api.get("/meta").status_code == 401
    assert api.get("/meta").status_code == 429


def test_every_error_is_json_that_nobody_stores_or_sniffs(api):
    for answer in (
        api.get("/nothing"),
        api.get("/jobs?limit=x"),
        api.post("/jobs", key=None),
        api.post("/jobs", json={}),
        api.get("/jobs/nobody"),
    ):
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert set(json.loads(answer.data)) == {"error"}
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_the_default_body_limit_is_two_mebibytes(api):
    answer = api.post("/jobs", data=b"x" * 2_097_153, content_type="application/json")
    assert answer.status_code == 413
    assert answer.json == {"error": "request body exceeds 2097152 bytes"}


def test_an_answer_that_read_the_store_carries_its_time(api, clock):
    assert api.get("/jobs").headers["x-store-now-ms"] == str(clock.now_ms())
    assert api.post("/jobs", job_body()).headers["x-store-now-ms"]
    missing = api.get("/jobs/nobody")
    assert missing.status_code == 404
    assert missing.headers["x-store-now-ms"] == str(clock.now_ms())
    assert "x-store-now-ms" not in api.get("/healthz").headers


def test_it_works_below_any_prefix(memory):
    from flask import Flask
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    app = Flask("host")
    api = caller(memory.make_store())
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/ops": api.app})
    mounted = Caller(app)
    answer = mounted.client.get("/ops/api/v1/healthz")
    assert (answer.status_code, answer.data) == (200, b"ok")
    for path in ("a%2Fb", "a%252Fb"):
        answer = mounted.client.post(
            f"/ops/api/v1/queues/{path}/pause", headers={"Idempotency-Key": path}
        )
        assert answer.status_code == 204
    names = [queue["queue"] for queue in mounted.client.get(f"/ops{BASE}/queues").json]
    assert names == ["a%2Fb", "a/b"]
    servers = mounted.client.get(f"/ops{BASE}/openapi.json").json["servers"]
    assert servers == [{"url": "/ops/api/v1"}]
