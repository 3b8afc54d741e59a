"""The API over PostgreSQL: its own pool, a bound of statements, outages."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from headgate_sync.api import ApiConfig, create_app
from headgate_sync.app import Headgate
from headgate_sync.postgres import database
from headgate_sync.postgres.store import PgStore
from headgate_sync.semantics import SEMANTICS
from tests.api.caller import Caller, caller, job_body
from tests.builders import enqueue


@pytest.fixture
def facade(postgres, database_url):
    postgres.reset()
    with Headgate(database_url, pool_size=1) as made:
        yield made


def test_looking_takes_no_connection_of_the_application(facade):
    app = create_app(facade, ApiConfig(pool_size=1))
    api = Caller(app)
    with facade.store.transactional.transaction():  # the only connection it has
        assert api.get("/queues").status_code == 200
        assert api.post("/jobs", job_body()).status_code == 201
    app.close()


def test_the_pool_is_opened_at_the_first_request_and_closed_with_the_facade(
    facade, admin
):
    def open_connections():
        # Not the server's own processes, which come and go as they like.
        clients = (
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
        )
        return {pid for (pid,) in admin.execute(clients)}

    before = open_connections()
    app = create_app(facade)
    assert open_connections() <= before
    assert Caller(app).get("/jobs").status_code == 200
    assert open_connections() - before
    app.close()
    facade.close()
    assert Caller(app).get("/jobs").status_code == 503


def test_the_store_of_an_override_is_used(facade, memory):
    app = create_app(facade)
    other = memory.make_store()
    enqueue(other, "a")
    with facade.override(other):
        assert Caller(app).get("/jobs/a").status_code == 200
    assert Caller(app).get("/jobs/a").status_code == 404
    app.close()


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/queues", 8), ("/jobs", 8), ("/jobs/j1", 8), ("/jobs/counts", 8),
        ("/jobs/j1/admission", 12), ("/rate-classes", 8), ("/quarantine", 8),
        ("/partitions?queue=q1", 8), ("/workers", 8), ("/cluster", 8), ("/periodic", 8),
        ("/concurrency-limits", 8), ("/queues/q1/history", 8),
    ],
)  # fmt: skip
def test_looking_takes_a_fixed_number_of_statements(postgres, monkeypatch, path, most):
    store = postgres.make_store()
    for number in range(200):
        enqueue(store, f"j{number}", queue=f"q{number}")
    api = caller(store)
    api.get("/meta")
    seen = Counter()
    run = database.Session._run

    def counted(self, *given, **options):
        seen["statements"] += 1
        return run(self, *given, **options)

    monkeypatch.setattr(database.Session, "_run", counted)
    answer = api.get(path)
    assert answer.status_code == 200
    if path == "/queues":
        assert len(answer.json) == 200
    assert 0 < seen["statements"] <= most


def test_an_outage_is_told_and_health_is_not_touched_by_it():
    store = PgStore.connect(
        "host=127.0.0.1 port=1 dbname=x password=hunter2-canary connect_timeout=1",
        pool_timeout_ms=200,
    )
    api = caller(store)
    assert api.get("/healthz").data == b"ok"
    ready = api.get("/readyz")
    assert (ready.status_code, ready.json) == (503, {"error": "store unavailable"})
    for answer in (api.get("/jobs"), api.post("/jobs", job_body())):
        assert answer.status_code == 503
        assert answer.json["error"].startswith("store unavailable: ")
        assert "hunter2" not in answer.json["error"]
    store.close()


def test_a_schema_that_is_not_there_is_told_to_the_log(pool, postgres, caplog):
    api = caller(PgStore(pool, "no_such_schema"))
    assert api.get("/readyz").status_code == 503
    answer = api.get("/jobs")
    assert answer.status_code == 503
    told = "store unavailable: it is set up wrongly, see the log"
    assert answer.json == {"error": told}
    assert "migrate" in caplog.text


def test_an_override_that_comes_and_goes_opens_no_further_pool(facade, memory):
    app = create_app(facade)
    api = Caller(app)
    api.get("/jobs")
    before = len(facade._runtime._owned)
    for _ in range(3):
        with facade.override(memory.make_store()):
            api.get("/jobs")
        api.get("/jobs")
    assert len(facade._runtime._owned) == before
    app.close()


def test_a_forked_child_has_connections_and_streams_of_its_own(facade):
    app = create_app(facade)
    api = Caller(app)
    assert api.get("/jobs").status_code == 200
    assert api.get("/events").status_code == 200
    child = os.fork()
    if child == 0:
        try:
            good = api.get("/jobs").status_code == 200
            good = good and api.get("/events/poll").status_code == 200
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert api.get("/jobs").status_code == 200
    app.close()


def test_meta_names_the_schema(postgres):
    api = caller(postgres.make_store(), backend_name="production")
    found = api.get("/meta").json
    assert found["schema"] == "headgate"
    assert found["backend"] == "production"
    assert {"transactional", "inspect"} <= set(found["capabilities"])
    assert found["limits"] == {
        "max_page_size": 200,
        "approximate_count_threshold": 50_000,
    }


def test_meta_tells_what_is_promised(postgres):
    rows = caller(postgres.make_store()).get("/meta").json["semantics"]
    assert [row["id"] for row in rows] == [row.id for row in SEMANTICS]
    kept = {row["id"]: (row["level"], row["memory"], row["postgres"]) for row in rows}
    assert kept["several-processes"] == ("backend", False, True)
    assert kept["wake-up-notices"][2] == "with connection settings for LISTEN"
