"""Who may do what, where a request may come from, and what is told to whom."""

from __future__ import annotations

import base64
import logging

import pytest

from headgate_sync.api import ApiConfig, RateLimit, TokenAuth, create_app
from headgate_sync.api.auth import IDENTITY
from headgate_sync.api.limiter import MAX_SENDERS, Limiter
from headgate_sync.errors import ConfigurationError, InvalidRequest
from headgate_sync.identity import Identity
from tests.api.caller import Caller, b64, caller, job_body
from tests.builders import enqueue, envelope

TOKEN, READ_TOKEN = "t" * 16, "r" * 16


@pytest.fixture
def guarded(store) -> Caller:
    return caller(store, authenticate=TokenAuth(TOKEN, READ_TOKEN))


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def basic(token, user="anybody"):
    text = base64.b64encode(f"{user}:{token}".encode()).decode()
    return {"Authorization": f"Basic {text}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("x" * 16),
        bearer(""),
        bearer(TOKEN[:-1]),
        bearer(TOKEN + "t"),
        basic("x" * 16),
        basic(""),
        {"Authorization": TOKEN},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic dA=="},
        {"Authorization": f"Digest {TOKEN}"},
        bearer("ä" * 16),
    ],
)
def test_whoever_knows_no_token_is_not_let_in(guarded, headers):
    answer = guarded.get("/jobs", headers=headers)
    assert answer.status_code == 401
    assert answer.json == {"error": "authentication required"}
    assert answer.headers["WWW-Authenticate"].startswith("Basic realm=")
    assert guarded.post("/jobs", job_body(), headers=headers).status_code == 401
    assert guarded.get("/nothing", headers=headers).status_code == 401
    assert guarded.get("/openapi.json", headers=headers).status_code == 401
    assert guarded.get("/events", headers=headers).status_code == 401


@pytest.mark.parametrize("headers", [bearer(TOKEN), basic(TOKEN), basic(TOKEN, "")])
def test_the_token_opens_everything(guarded, headers):
    assert guarded.get("/jobs", headers=headers).status_code == 200
    assert guarded.post("/jobs", job_body(), headers=headers).status_code == 201


@pytest.mark.parametrize("headers", [bearer(READ_TOKEN), basic(READ_TOKEN)])
def test_the_read_token_only_looks(guarded, store, headers):
    enqueue(store, "a")
    assert guarded.get("/jobs", headers=headers).status_code == 200
    answer = guarded.post("/jobs/a/retry", headers=headers)
    assert (answer.status_code, answer.json) == (403, {"error": "read-only mode"})


def test_health_needs_no_token(guarded):
    assert guarded.get("/healthz").data == b"ok"
    assert guarded.get("/readyz").data == b"ready"


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "ä" * 16, "x" * 10 + " " * 6])
def test_a_weak_token_is_refused_at_the_start(token):
    with pytest.raises(ConfigurationError, match="HEADGATE_API_TOKEN"):
        TokenAuth(token)
    with pytest.raises(ConfigurationError, match="HEADGATE_API_READ_TOKEN"):
        TokenAuth.from_env({"HEADGATE_API_READ_TOKEN": token})


def test_tokens_must_differ_and_one_must_be_there():
    with pytest.raises(ConfigurationError, match="differ"):
        TokenAuth(TOKEN, TOKEN)
    with pytest.raises(ConfigurationError, match="no token"):
        TokenAuth(None)
    assert TokenAuth.from_env({}) is None


def test_a_read_token_alone_lets_nobody_write(store):
    api = caller(store, authenticate=TokenAuth(None, READ_TOKEN))
    assert api.get("/jobs", headers=bearer(READ_TOKEN)).status_code == 200
    assert api.post("/jobs", job_body(), headers=bearer(READ_TOKEN)).status_code == 403


def test_an_identity_of_the_application_in_front_is_taken(store):
    seen = []
    api = caller(
        store,
        authorize=lambda who, method, path: seen.append((who, method, path)) is None,
    )
    anna = Identity("anna", {"access": "read"})
    answer = api.get("/jobs/x", environ_overrides={IDENTITY: anna})
    assert answer.status_code == 404
    assert seen == [(anna, "GET", "/jobs/{id}")]
    answer = api.post("/jobs", job_body(), environ_overrides={IDENTITY: anna})
    assert answer.status_code == 403


@pytest.mark.parametrize("found", ["anna", True, {"subject": "anna"}])
def test_what_is_no_identity_lets_nobody_in(store, caplog, found):
    api = caller(store, authenticate=lambda environ: found)
    answer = api.get("/jobs")
    assert answer.status_code == 500
    assert answer.json["error"] == "internal error"
    assert (
        caller(store).get("/jobs", environ_overrides={IDENTITY: found}).status_code
        == 500
    )


def test_a_request_header_names_nobody(store):
    seen = []
    api = caller(store, authorize=lambda who, method, path: seen.append(who) is None)
    api.get("/jobs", headers={"headgate.identity": "root", "X-Forwarded-User": "root"})
    assert seen == [None]


@pytest.mark.parametrize("said", [False, None, "yes", 1])
def test_anything_but_true_forbids(store, said):
    api = caller(store, authorize=lambda who, method, path: said)
    answer = api.get("/jobs")
    assert (answer.status_code, answer.json) == (403, {"error": "forbidden"})


def test_a_hook_that_fails_lets_nobody_in(store, caplog):
    def fail(*arguments):
        raise RuntimeError("secret-in-error")

    for config in ({"authenticate": fail}, {"authorize": fail}):
        answer = caller(store, **config).get("/jobs")
        assert answer.status_code == 500
        assert b"secret-in-error" not in answer.data
        assert answer.json["error_id"] in caplog.text


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "anything"])
def test_a_page_of_another_site_changes_nothing(api, store, site):
    enqueue(store, "a")
    answer = api.post("/jobs/a/cancel", headers={"Sec-Fetch-Site": site})
    assert answer.status_code == 403
    assert api.get("/jobs/a").json["state"] == "available"
    assert api.get("/events", headers={"Sec-Fetch-Site": site}).status_code == 403


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_page_of_the_own_site_may(api, store, site):
    enqueue(store, "a")
    answer = api.post("/jobs/a/cancel", headers={"Sec-Fetch-Site": site})
    assert answer.status_code == 204


def test_a_form_of_another_site_cannot_even_be_read(api, store):
    """What a plain form can send: no key, and one of three content types."""
    enqueue(store, "a")
    for media in (
        "application/x-www-form-urlencoded", "multipart/form-data", "text/plain",
    ):  # fmt: skip
        answer = api.post("/jobs", data=b"{}", content_type=media, key=None)
        assert answer.status_code == 400
        assert api.post("/jobs", data=b"{}", content_type=media).status_code == 415
    answer = api.send("OPTIONS", "/jobs", headers={"Origin": "https://evil.test"})
    assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]


def test_access_is_logged_without_anything_of_a_sender(api, store, caplog):
    caplog.set_level(logging.INFO, "headgate_sync")
    store.enqueue([envelope("a", payload=b"canary-payload")])
    api.get("/jobs?q=queue:canary-query&limit=7&cursor=5")
    api.get("/jobs/canary-path?include_payload=true")
    api.post("/jobs", job_body(payload=b64(b"canary-body")), key="canary-key")
    api.get("/meta?limit=1%0aforged")
    api.get("/meta?limit=canary-limit")
    assert "canary" not in caplog.text
    lines = [r.getMessage() for r in caplog.records if "access" in r.name]
    assert lines[0].startswith("GET /jobs 200 ")
    assert lines[0].endswith(" - limit=7")
    assert lines[1].startswith("GET /jobs/{id} 404 ")
    assert all("\n" not in line for line in lines)


def test_the_identity_is_logged_on_one_line(store, caplog):
    caplog.set_level(logging.INFO, "headgate_sync")
    api = caller(store, authenticate=lambda environ: Identity("a\nforged"))
    api.get("/jobs")
    [line] = [r.getMessage() for r in caplog.records if "access" in r.name]
    assert line.endswith("'a\\nforged'")


def test_an_unknown_error_tells_nothing(store, caplog):
    def fail(request, proceed):
        raise RuntimeError("canary password=hunter2")

    answer = caller(store, enqueue_middleware=[fail]).post("/jobs", job_body())
    assert answer.status_code == 500
    assert b"canary" not in answer.data
    assert set(answer.json) == {"error", "error_id"}
    assert answer.json["error_id"] in caplog.text


def test_without_a_hook_it_says_so_once(store, caplog):
    caplog.set_level(logging.INFO, "headgate_sync")
    app = create_app(store)
    Caller(app).get("/jobs")
    Caller(app).get("/jobs")
    assert caplog.text.count("no authentication hook") == 1
    caplog.clear()
    caller(store, authenticate=TokenAuth(TOKEN))
    assert "no authentication hook" not in caplog.text


@pytest.mark.parametrize(
    "setting",
    [
        {"authenticate": 1},
        {"authorize": "x"},
        {"read_only": 1},
        {"max_body_bytes": 0},
        {"pool_size": 0},
        {"rate_limit": 5},
        {"live": None},
        {"idempotency_ttl_ms": True},
        {"backend_name": 7},
        {"redact_payload": b""},
    ],
)
def test_a_setting_that_is_none_is_refused(setting):
    with pytest.raises(InvalidRequest, match=next(iter(setting))):
        ApiConfig(**setting)


def test_tokens_refill_with_time_up_to_the_burst():
    now = [0]
    limiter = Limiter(RateLimit(per_second=10, burst=2), now_ns=lambda: now[0])
    assert [limiter.take("a") for _ in range(3)] == [0, 0, 100]
    assert limiter.take("b") == 0
    now[0] += 99_999_999
    assert limiter.take("a") == 1
    now[0] += 1
    assert limiter.take("a") == 0
    now[0] += 10**12
    assert [limiter.take("a") for _ in range(3)] == [0, 0, 100]


def test_the_table_of_senders_does_not_grow_for_ever():
    limiter = Limiter(RateLimit(per_second=1, burst=1), now_ns=lambda: 0)
    for number in range(MAX_SENDERS + 10):
        limiter.take(str(number))
    assert len(limiter._buckets) == MAX_SENDERS
    assert limiter.take("0") == 0
