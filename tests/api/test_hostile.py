"""Texts that are code somewhere else are data here."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from urllib.parse import quote

import pytest

import headgate_sync
from tests.api.caller import b64, job_body
from tests.builders import counts, enqueue, job

NASTY = [
    "'; DROP TABLE headgate.headgate_job; --",
    "' OR '1'='1",
    '"',
    "%",
    "_",
    "\\",
    "%(queue)s",
    "{schema}",
    "$$; SELECT 1; $$",
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "..",
    "a\r\nX-Injected: yes",
    "\u202e\u0000".replace("\u0000", ""),
    "😀",
    "%00",
    "' || pg_sleep(10) || '",
]


@pytest.mark.parametrize("text", NASTY)
def test_a_nasty_name_is_a_name(api, store, text):
    """As queue, partition, class and id of a job, and in every list and path."""
    enqueue(store, "other")
    quoted = quote(text, safe="")
    ascii_only = text.encode("ascii", "ignore").decode().strip() or "x"
    body = job_body(
        id=text,
        queue=text,
        partition_key=text,
        rate_class=text,
        tags=[ascii_only[:64]],
        unique_key=b64(text.encode()),
    )
    answer = api.post("/jobs", body)
    assert (answer.status_code, answer.json) == (201, {"id": text})
    assert job(store, text).queue == text
    assert api.get(f"/jobs/{quoted}").json["partition_key"] == text
    found = api.get(f"/jobs?queue={quoted}&partition_key={quoted}").json["jobs"]
    assert [one["id"] for one in found] == [text]
    assert api.get(f"/jobs/counts?queue={quoted}").json["counts"] == [
        {"state": "available", "count": 1}
    ]
    [partition] = api.get(f"/partitions?queue={quoted}").json
    assert partition["partition_key"] == text
    queue_page = api.get("/queues?limit=1")
    assert "X-Injected" not in queue_page.headers
    rate_class = {"limit": 1, "window_ms": 1}
    assert api.put(f"/rate-classes/{quoted}", rate_class).json["name"] == text
    limit = {"queue": text, "max_concurrent": 1}
    assert api.put(f"/concurrency-limits/{quoted}", limit).json["queue"] == text
    assert api.post(f"/queues/{quoted}/pause").status_code == 204
    assert api.get(f"/jobs/{quoted}/admission").json["blocked_by"] == "queue_paused"
    bulk = {"action": "cancel", "selector": {"queue": text, "partition_key": text}}
    assert api.post("/jobs/bulk", bulk).status_code == 202
    for _ in range(3):
        store.inspect.run_pending_operations(10)
    assert counts(store) == {"available": 1, "cancelled": 1}
    assert api.delete(f"/jobs/{quoted}").status_code == 204


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize(
    "path",
    [
        "/jobs?q={}", "/jobs?kind={}", "/jobs?state={}", "/jobs?tags_all={}",
        "/jobs?cursor={}", "/queues?cursor={}", "/quarantine?cursor={}",
        "/periodic?cursor={}", "/workers?cursor={}", "/periodic/{}/enqueue-events",
        "/periodic/a/enqueue-events?cursor={}", "/operations/{}",
        "/queues/{}/history", "/jobs/{}/result", "/jobs/{}/checkpoint",
    ],
)  # fmt: skip
def test_a_nasty_filter_finds_nothing_and_breaks_nothing(api, store, path, text):
    enqueue(store, "other")
    answer = api.get(path.format(quote(text, safe="")))
    assert answer.status_code in (200, 400, 404)
    assert answer.headers["Content-Type"] == "application/json"
    assert "X-Injected" not in answer.headers
    if answer.status_code == 200:
        assert b"other" not in answer.data
    assert counts(store) == {"available": 1}


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("name", ["PUT /periodic/{}", "DELETE /quarantine/{}",
    "POST /workers/{}/signal", "DELETE /periodic/{}"])  # fmt: skip
def test_a_nasty_id_of_a_change_breaks_nothing(api, name, text):
    method, path = name.split(" ")
    body = {"kind": "k", "spec": "@every:60000", "command": "quiet"}
    options = {} if method == "DELETE" else {"json": body}
    answer = api.send(method, path.format(quote(text, safe="")), **options)
    if name == "PUT /periodic/{}" and re.fullmatch(r"[\w.:-]+", text, re.ASCII):
        assert answer.json["id"] == text
    else:
        assert answer.status_code in (400, 404)
        assert "error" in answer.json


def test_markup_cannot_leave_the_json_it_is_in(api, store):
    enqueue(store, "</script><script>alert(1)</script>")
    answer = api.get("/jobs")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_nul_is_refused_by_name(api):
    for path in ("/jobs/a%00b", "/jobs?queue=a%00b", "/queues/a%00b/history"):
        answer = api.get(path)
        assert answer.status_code == 400
        assert "NUL" in answer.json["error"]


def test_no_statement_is_built_from_text_in_the_api():
    """SQL lives in files of the store; here there is none to build."""
    folder = Path(headgate_sync.__file__).parent / "api"
    verbs = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE FROM|DROP)\b")
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not verbs.search(node.value), f"{path.name}: {node.value}"
