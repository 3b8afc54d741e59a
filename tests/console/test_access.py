"""Who sees which page and which action, and how the console fits into other apps."""

from __future__ import annotations

import json
import re
import threading
from queue import SimpleQueue
from typing import Any
from urllib.request import urlopen

import flask
import pytest
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from headgate_sync import Headgate, MemStore
from headgate_sync.api import ApiConfig, RateLimit, TokenAuth
from headgate_sync.api.config import LiveUpdates
from headgate_sync.console import ConsoleConfig, create_app
from headgate_sync.console.pages import PAGES
from headgate_sync.console.server import serve
from headgate_sync.console.text import instant
from headgate_sync.errors import ConfigurationError
from headgate_sync.identity import Identity
from headgate_sync.lifecycle import State
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.postgres.store import PgStore
from headgate_sync.schedule import Schedule
from headgate_sync.store import Store
from headgate_sync.workers import WorkerMeta
from tests.builders import START_MS, bring_to, enqueue, steer
from tests.console.pages import Document, look

TOKEN, READ_TOKEN = "t" * 20, "r" * 20
KEY = {"Idempotency-Key": "k1"}


def fill(store: Store, clock: Any) -> None:
    """One of everything that an action could be offered for."""
    bring_to(store, clock, "dead", State.QUARANTINED, payload=b"dead")
    enqueue(store, "a", "b", partition_key="p", rate_class="api")
    inspect = steer(store)
    inspect.upsert_rate_class(
        RateClassConfig(name="api", limit=1, window_ms=1000, burst=1)
    )
    inspect.upsert_concurrency_limit(Ceiling(name="c", queue="q", max_concurrent=1))
    inspect.upsert_schedule(
        Schedule(id="s", kind="k", spec="@daily", next_run_ms=START_MS)
    )
    inspect.heartbeat_worker(
        WorkerMeta(
            worker_id="w",
            host="h",
            pid=1,
            queues=("q",),
            concurrency=1,
            started_at_ms=1,
        )
    )


def addresses() -> list[str]:
    named = {"queue": "queue?name=q", "job": "job?id=a"}
    return [f"/{named.get(page.path, page.path)}" for page in PAGES]


def offers(client: Client, address: str, **headers: Any) -> set[str]:
    """Everything on a page that would change something."""
    response = client.get(address, **headers)
    assert response.status_code == 200, response.text
    text = response.text
    found = set(re.findall(r'data-(act|bulk|selection|open|fill)="', text))
    found |= {"checkbox"} if 'type="checkbox"' in text else set()
    return found | ({"dialog"} if text.count("<dialog") > 1 else set())


# Reading only


def test_a_read_only_console_offers_no_action_and_the_api_refuses_it(
    open_console, store, clock
):
    fill(store, clock)
    full, reading = open_console(), open_console(read_only=True, rate_limit=None)
    for address in addresses():
        assert offers(reading, address) == set(), address
        page = look(reading, address)
        assert "read-only" in page.text
        assert page.settings["readOnly"] is True
    assert offers(full, "/jobs") >= {"selection", "checkbox"}
    assert offers(full, "/limits") >= {"act", "open", "dialog"}
    refused = reading.post("/api/v1/queues/q/pause", headers=KEY)
    assert (refused.status_code, refused.json) == (403, {"error": "read-only mode"})
    assert full.post("/api/v1/queues/q/pause", headers=KEY).status_code == 204


def test_a_read_token_sees_pages_without_actions(open_console, store, clock):
    fill(store, clock)
    client = open_console(authenticate=TokenAuth(TOKEN, READ_TOKEN), rate_limit=None)
    for address in addresses():
        assert offers(client, address, auth=("x", READ_TOKEN)) == set()
    assert "act" in offers(client, "/queues", auth=("x", TOKEN))
    refused = client.post("/api/v1/jobs/a/cancel", headers=KEY, auth=("x", READ_TOKEN))
    assert refused.status_code == 403


def test_nobody_sees_a_page_without_a_token(open_console, store):
    enqueue(store, "geheim")
    client = open_console(authenticate=TokenAuth(TOKEN))
    for address in (*addresses(), "/nowhere"):
        response = client.get(address)
        assert response.status_code == 401
        assert "Basic" in response.headers["WWW-Authenticate"]
        assert "geheim" not in response.text
    assert client.get("/", auth=("x", "wrong" * 5)).status_code == 401


def test_guesses_of_a_token_are_counted_on_pages_too(open_console):
    client = open_console(
        authenticate=TokenAuth(TOKEN), rate_limit=RateLimit(per_second=1, burst=3)
    )
    answers = [client.get("/", auth=("x", "guess" * 5)).status_code for _ in range(5)]
    assert answers == [401, 401, 401, 429, 429]


def test_the_hook_is_asked_for_a_page_and_not_for_each_of_its_parts(open_console):
    asked = []

    def authenticate(environ: dict[str, Any]) -> Identity:
        asked.append(environ["PATH_INFO"])
        return Identity("ada")

    client = open_console(authenticate=authenticate)
    assert "ada" in look(client, "/").text
    assert len(asked) == 2


def test_only_what_the_authorizer_allows_is_offered(open_console, store):
    enqueue(store, "a")

    def authorize(identity: Identity | None, method: str, path: str) -> bool:
        return method == "GET" or path == "/queues/{queue}/pause"

    page = look(open_console(authorize=authorize), "/queues")
    assert [act["path"] for act in page.acts] == ["/queues/q/pause"]


def test_a_page_that_is_not_allowed_says_so(open_console):
    def authorize(identity: Identity | None, method: str, path: str) -> bool:
        return path != "/workers"

    client = open_console(authorize=authorize)
    assert "Not for you" in look(client, "/workers", status=403).text
    assert look(client, "/").text


def test_a_part_that_is_not_allowed_is_left_out(open_console, store):
    enqueue(store, "a")

    def authorize(identity: Identity | None, method: str, path: str) -> bool:
        return path not in ("/cluster", "/rate-classes", "/quarantine", "/partitions")

    assert "q" in look(open_console(authorize=authorize), "/").text


def test_the_identity_of_the_application_in_front_is_used(open_console, store, clock):
    fill(store, clock)
    client = open_console(rate_limit=None)
    reader = Identity("ada", {"access": "read"})
    overrides = {"environ_overrides": {"headgate.identity": reader}}
    assert offers(client, "/jobs", **overrides) == set()
    assert "ada" in client.get("/jobs", **overrides).text


def test_no_header_makes_somebody_known(open_console):
    client = open_console(authenticate=TokenAuth(TOKEN))
    for name in ("Headgate_Sync.Console.Identity", "Headgate.Identity"):
        assert client.get("/", headers={name: "ada"}).status_code == 401


# Errors


def test_a_page_that_is_not_there_is_not_found(console):
    assert "There is no such page" in look(console, "/nowhere", status=404).text
    assert "no such job" in look(console, "/job", status=404, id="x").text


@pytest.mark.parametrize("address", ["/nowhere", "/job?id=x", "/queue"])
def test_an_error_tells_the_time_of_the_store_too(console, store, clock, address):
    text = Document(console.get(address)).text
    assert f"store time {instant(clock.now_ms())}" in text


def test_a_page_without_its_name_is_refused(console):
    assert "missing query parameter `name`" in look(console, "/queue", status=400).text
    assert "missing query parameter `id`" in look(console, "/job", status=400).text


@pytest.mark.parametrize(
    "address",
    [
        "/jobs?cursor=x",
        "/queues?cursor=%00",
        "/quarantine?cursor=x",
        "/job?id=" + "x" * 5000,
        "/queue?name=%00",
        "/queue?name=" + "x" * 300,
        "/jobs?q=%ff%fe",
        "/jobs?state=nope",
        "/periodic?events=%20",
        "/jobs?trail=..&cursor=1",
        "/?range=1y",
    ],
)
def test_no_address_breaks_a_page(console, address):
    response = console.get(address)
    assert response.status_code in (200, 400, 404)
    assert response.text.rstrip().endswith("</html>")


def test_pages_are_only_read(console):
    response = console.post("/queues", data={"a": "b"})
    assert response.status_code == 405
    assert response.headers["Allow"] == "GET, HEAD"
    assert console.head("/queues").data == b""


def test_too_many_requests_are_told_when_to_come_back(open_console):
    client = open_console(rate_limit=RateLimit(per_second=1, burst=2))
    response = client.get("/")
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) >= 1


def test_an_outage_is_a_page_that_says_so():
    nowhere = "host=127.0.0.1 port=1 dbname=none connect_timeout=1"
    store = PgStore.connect(nowhere, pool_timeout_ms=100)
    try:
        app = create_app(store)
        page = look(Client(app), "/queues", status=503)
        assert "The store does not answer" in page.text
        app.close()
    finally:
        store.close()


# What surrounds the pages


def test_assets_are_kept_for_ever_and_a_missing_one_is_not_a_page(console):
    page = look(console, "/")
    loaded = [
        value
        for tag, name, value in page.attributes
        if value.startswith("/static/") and name in ("src", "href")
    ]
    assert len(loaded) == 3
    for address in loaded:
        response = console.get(address)
        assert response.status_code == 200
        assert re.search(r"-[0-9a-f]{16}\.(css|js|svg)$", address)
        assert "immutable" in response.headers["Cache-Control"]
    missing = console.get("/static/console-0000000000000000.js")
    assert (missing.status_code, missing.mimetype) == (404, "text/plain")
    assert console.get("/static/../app.py").status_code == 404


def test_robots_are_sent_away(console):
    assert console.get("/robots.txt").text == "User-agent: *\nDisallow: /\n"


def test_the_title_and_the_settings_cannot_break_out(open_console):
    evil = "</script><script>alert(1)</script>\u2028"
    client = open_console(title=evil)
    response = client.get("/", environ_overrides={"SCRIPT_NAME": "/" + "</script>"})
    assert "<script>alert" not in response.text
    assert response.text.count("</script>") == 2


def test_three_lines_put_it_into_a_flask_application():
    store = MemStore()
    enqueue(store, "a", queue="q/x")
    app = flask.Flask("shop")
    app.wsgi_app = DispatcherMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, {"/headgate": create_app(Headgate(store))}
    )
    client = app.test_client()
    moved = client.get("/headgate?x=1")
    assert (moved.status_code, moved.headers["Location"]) == (308, "/headgate/")
    page = look(client, "/headgate/")
    assert page.settings["apiBase"] == "/headgate/api/v1"
    for link in set(page.links):
        if not link.startswith("#"):
            assert link.startswith("/headgate/")
            assert client.get(link).status_code == 200, link
    assert look(client, "/headgate/queue?name=q%2Fx").paths("POST") == {
        "/queues/q%2Fx/pause"
    }
    answer = client.get("/headgate/api/v1/healthz")
    assert answer.text == "ok"


def test_streams_are_not_asked_for_where_there_are_none(open_console):
    client = open_console(live=LiveUpdates(max_streams=0))
    assert look(client, "/").settings["streams"] is False
    assert look(open_console(), "/").settings["streams"] is True


def test_settings_of_the_wrong_type_are_refused():
    with pytest.raises(TypeError):
        ConsoleConfig(api={"read_only": True})  # type: ignore[arg-type]
    assert ConsoleConfig().api == ApiConfig()


# Alone


def test_the_server_shows_pages_and_answers_the_api():
    at: SimpleQueue[Any] = SimpleQueue()
    stop: SimpleQueue[object] = SimpleQueue()
    told: list[int] = []

    def run() -> None:
        told.append(
            serve(
                MemStore(),
                address="127.0.0.1:0",
                title="staging",
                environ={"HEADGATE_READ_ONLY": "1"},
                listening=at.put,
                stop=stop,
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    try:
        base = f"http://{at.get(timeout=20)}"
        with urlopen(f"{base}/", timeout=20) as page:
            text = page.read().decode()
        assert "staging" in text
        assert "read-only" in text
        with urlopen(f"{base}/api/v1/meta", timeout=20) as meta:
            assert json.load(meta)["backend"] == "MemStore"
    finally:
        stop.put(None)
        thread.join(20)
    assert told == [0]


def test_the_server_does_not_open_itself_to_others_without_a_hook():
    with pytest.raises(ConfigurationError, match="can be reached by others"):
        serve(MemStore(), address="0.0.0.0:0", environ={})
