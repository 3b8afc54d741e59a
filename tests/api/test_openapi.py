"""The description is the table of routes, and what it says is true."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headgate_sync import MemStore
from headgate_sync.api.openapi import document
from headgate_sync.api.routes import ROUTES
from tests.api import page
from tests.api.caller import app_of, caller, job_body
from tests.builders import enqueue, envelope


def test_the_description_is_the_table_of_routes(api):
    described = api.get("/openapi.json").json
    found = {
        (method.upper(), path)
        for path, methods in described["paths"].items()
        for method in methods
    }
    assert found == {(route.method, route.path) for route in ROUTES}
    assert len(found) == len(ROUTES)


def test_the_description_names_every_parameter_field_and_status():
    paths = document(ROUTES, "/x")["paths"]
    for route in ROUTES:
        told = paths[route.path][route.method.lower()]
        places = {(one["name"], one["in"]) for one in told["parameters"]}
        wanted = {(one.name, "query") for one in route.query}
        wanted |= {(name, "path") for name in route.variables}
        wanted |= {("Idempotency-Key", "header")} if route.mutates else set()
        assert places == wanted
        assert str(route.status) in told["responses"]
        assert ("requestBody" in told) == (route.body is not None)


def test_every_operation_has_a_name_of_its_own():
    paths = document(ROUTES, "/x")["paths"]
    names = [
        one["operationId"] for methods in paths.values() for one in methods.values()
    ]
    assert len(set(names)) == len(names)


def _filled() -> MemStore:
    store = MemStore()
    enqueue(store, "a", "b", rate_class="r", partition_key="p")
    store.enqueue([envelope("c", pending=True), envelope("d", delay_ms=60_000)])
    return store


_app = app_of(_filled())
schema = schemathesis.openapi.from_wsgi("/api/v1/openapi.json", _app)
schema.config.generation.update(
    modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
)


@schema.exclude(path="/events").parametrize()
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_no_request_breaks_it_and_every_answer_is_as_described(case):
    case.call_and_validate(
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ]
    )


@pytest.mark.parametrize("path", ["/jobs/a", "/jobs/a?include_payload=true"])
def test_a_job_has_all_the_fields_that_are_described(path):
    described = caller(_filled()).get("/openapi.json").json["components"]["schemas"]
    name = "JobWithPayload" if "?" in path else "Job"
    found = caller(_filled()).get(path).json
    assert set(found) == set(described[name]["properties"])


def described(api, path, answer):
    """What the document says of an answer: names of headers, and fields of the body."""
    told = api.get("/openapi.json").json
    response = told["paths"][path]["post"]["responses"][str(answer.status_code)]
    parts = response["content"]["application/json"]["schema"]["allOf"]
    shapes = [
        told["components"]["schemas"][part["$ref"].rpartition("/")[2]]
        if "$ref" in part
        else part
        for part in parts
    ]
    fields = {name for shape in shapes for name in shape["properties"]}
    return {name.lower() for name in response["headers"]}, fields


@pytest.mark.parametrize("drops", [False, True])
def test_what_an_enqueue_sends_is_described(drops):
    drop = [lambda request, proceed: None] if drops else []
    api = caller(MemStore(), enqueue_middleware=drop)
    first, again = (api.post("/jobs", job_body(), key="K") for _ in range(2))
    assert first.status_code == again.status_code == (200 if drops else 201)
    headers, fields = described(api, "/jobs", again)
    plain = {
        "content-type",
        "content-length",
        "cache-control",
        "x-content-type-options",
    }
    sent = {name.lower() for name, _ in again.headers} - plain
    assert sent == headers == {"x-store-now-ms", "idempotency-replayed"}
    assert set(again.json) == fields == {*first.json, "replayed"}


def test_the_page_of_the_api_is_fresh():
    assert page.PAGE.read_text() == page.render(), "run python -m tests.api.page"
