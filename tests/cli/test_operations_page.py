"""The commands of the page of operations can be typed as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import RateClassConfig
from headgate_sync.schedule import Schedule
from headgate_sync.workers import WorkerMeta
from tests.builders import claim_one, crash_until_quarantined, envelope, steer
from tests.cli.conftest import invoke

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_commands_of_the_page_run(clean, pg, postgres, database_url, monkeypatch):
    """In their order, over a fleet in which all that they name exists."""
    monkeypatch.setenv("HEADGATE_DATABASE_URL", database_url)
    text = PAGE.read_text()
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    commands = [shlex.split(line.partition("#")[0]) for line in lines]
    assert len(commands) > 30
    pg.enqueue([envelope("poison", kind="k", payload=b"poison", queue="mail")])
    crash_until_quarantined(pg, postgres.clock, claim_one(pg, queues=("mail",)))
    fingerprint = steer(pg).quarantine_list()[0].fingerprint
    for id in ("order-17", "order-18"):
        pg.enqueue([envelope(id, queue="mail", partition_key="acme")])
    pg.ack(claim_one(pg, queues=("mail",)).lease_ref, Outcome.SKIP, error="gave up")
    steer(pg).upsert_rate_class(
        RateClassConfig(name="smtp", limit=1, window_ms=1, burst=1)
    )
    steer(pg).upsert_schedule(
        Schedule(id="nightly", kind="k", spec="@daily", next_run_ms=1, queue="mail")
    )
    steer(pg).heartbeat_worker(
        WorkerMeta(
            worker_id="mail-1", host="h", pid=1, queues=("mail",), concurrency=1,
            started_at_ms=1,
        )
    )  # fmt: skip
    for program, *words in commands:
        assert program == "headgate"
        if "release" in words:
            words[-1] = fingerprint
        invoke(*words)
    assert steer(pg).get_job("order-17").state == "available"
    assert steer(pg).get_job("poison").state == "available"
