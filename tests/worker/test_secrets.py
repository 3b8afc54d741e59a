"""What a worker says to its log and its sinks: no payload and no password."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from headgate_sync.context import JobContext
from headgate_sync.events import JobDeath
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from headgate_sync.signals import RateLimited, Skip, Snooze
from headgate_sync.telemetry import JobSpan
from tests.builders import envelope, job
from tests.worker.rig import wait_for, working

CARD = "4111-1111-1111-1111"
PASSWORD = "hunter2-canary"
WAYS = ["succeeds", "raises", "exits", "skips", "snoozes", "waits", "unkeepable"]
BAD = {
    "mistyped": f'{{"card":1,"how":"{CARD}"}}',
    "torn": f'{{"card":"{CARD}',
    "more": f'{{"card":"","how":"","extra":"{CARD}"}}',
}


@pytest.fixture(params=["memory", "with a password"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A store; where there are connections, they and the listener have a password."""
    if request.param == "memory":
        yield request.getfixturevalue("memory").make_store()
        return
    request.getfixturevalue("postgres")
    url = make_conninfo(request.getfixturevalue("database_url"), password=PASSWORD)
    made = PgStore.connect(url, listen=url)
    yield made
    made.close()


class Sink:
    """Keeps how everything shows itself that it is told."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.ended: set[str] = set()

    def on_event(self, event: Any) -> None:
        self.shown.append(repr(event))
        if isinstance(event, JobSpan):
            self.ended.add(event.job_id)

    def died(self, death: JobDeath) -> None:
        self.shown.append(repr(death))


def test_neither_payload_nor_password_is_shown_however_jobs_end(
    store: Any, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    registry, sink, shown = Registry(), Sink(), list[str]()

    @registry.task("k")
    def handler(ctx: JobContext, card: str, how: str) -> Any:
        shown.append(repr(ctx))
        if how == "raises":
            raise ValueError("refused")
        if how == "exits":
            raise SystemExit(1)
        signals = {
            "skips": Skip("no"),
            "snoozes": Snooze("1d"),
            "waits": RateLimited("1d"),
            "unkeepable": object(),
        }
        return signals.get(how)

    bodies = {how: f'{{"card":"{CARD}","how":"{how}"}}' for how in WAYS} | BAD
    jobs = [
        envelope(id, kind="k", payload=body.encode(), headers={"token": CARD})
        for id, body in bodies.items()
    ]
    jobs.append(envelope("unknown", kind="nobody", payload=CARD.encode()))
    shown += [repr(one) for one in jobs]
    store.enqueue(jobs)
    ids = {one.id for one in jobs}
    with working(store, registry, telemetry=sink, death_handlers=[sink.died]) as worker:
        wait_for(lambda: sink.ended >= ids, "all have ended")
        shown += [repr(worker), repr(worker.health()), repr(store)]
        shown += [repr(job(store, id).errors) for id in ids if id != "succeeds"]
    shown += [repr(worker.exit_status), *sink.shown]
    assert "ValueError: refused" in caplog.text
    assert any(text.startswith("JobDeath") for text in shown)
    for text in [caplog.text, *shown]:
        assert CARD not in text
        assert PASSWORD not in text
