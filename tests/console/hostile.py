"""Texts that would break out of a page, and a store that has them in every field."""

from __future__ import annotations

from headgate_sync.lease import Checkpoint, JobResult, ProgressUpdate
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.loglines import LogLine
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.schedule import Schedule, ScheduleEvent, TickOutcome
from headgate_sync.store import Store
from tests.backends import Clock
from tests.builders import beat, bring_to, claim_one, envelope, run_one, steer

SCRIPT = "<script>alert(1)</script>\"'&"
HOSTILE = [
    SCRIPT,
    "</script><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "a" * 250,
    "\u202egnirts\u2066 \u0007\u001b[31m\u007f",
    "a/b?c=d#e %2F ..",
    "..",
]
# In a browser also those that load something, and one that no line takes in.
EVIL = [
    *HOSTILE,
    "<img src=//evil.example/x onerror=alert(1)>\u202e\u0007" + "w" * 180,
    "<svg onload=alert(1)><iframe src=//evil.example>",
    "'\"><b onmouseover=alert(1) style=position:fixed;inset:0>",
    "javascript:alert(1)//\n<link rel=stylesheet href=//evil.example/x.css>",
]


def spread(store: Store, clock: Clock, texts: list[str]) -> None:
    """Put each text into every field that can hold it, also as the id of a job."""
    inspect = steer(store)
    for place, text in enumerate(texts):
        _jobs(store, clock, place, text)
        inspect.upsert_rate_class(
            RateClassConfig(name=text, limit=1, window_ms=1_000, burst=1)
        )
        inspect.pause_rate_class(text, 60_000, text)
        inspect.upsert_concurrency_limit(
            Ceiling(name=text, queue=text, max_concurrent=1)
        )
        beat(store, _plain(text), host=text, queues=(text, "q"))
        _schedule(store, f"s-{place}", text)


def _plain(text: str) -> str:
    """As much of a text as the name of a worker may have."""
    return text.encode("ascii", "ignore").decode()


def _short(text: str) -> str:
    """As much of a text as a reason may have."""
    return text.encode()[:64].decode(errors="ignore")


def _jobs(store: Store, clock: Clock, place: int, text: str) -> None:
    """Jobs that killed workers, failed, were given up, run, and wait for a class."""
    worker = _plain(text)
    common = {
        "queue": text,
        "partition_key": text,
        "tags": [worker[:64], "<b>&amp;"],
        "headers": {text: text},
        "payload": text.encode(),
    }
    bring_to(
        store, clock, f"dead-{place}", State.QUARANTINED, fingerprint=text, **common
    )
    store.enqueue([envelope(text, sticky_worker=worker, **common)])
    claim = claim_one(store, queues=[text], worker=worker)
    assert store.progress is not None
    assert store.outputs is not None
    store.progress.write_job_progress(
        claim.lease_ref, ProgressUpdate(current=1, total=2, message=text)
    )
    store.outputs.write_job_output(
        claim.lease_ref, JobResult(schema_version=1, data=text.encode())
    )
    store.checkpoint(
        claim.lease_ref,
        Checkpoint(
            completed_steps=(text,),
            in_progress_step="x" + text,
            cursor_step=text,
            cursor=text.encode(),
            step_set_hash="h",
        ),
    )
    line = LogLine(level="warn", message=text, at_ms=1, fields={text[:64]: text})
    store.ack(
        claim.lease_ref,
        Outcome.RETRY,
        error=text,
        logs=[line.encode(), text],
        delay_ms=60_000,
    )
    claim = run_one(store, f"given-up-{place}", **common)
    store.ack(claim.lease_ref, Outcome.SKIP, reason_code=_short(text))
    store.enqueue([envelope(f"runs-{place}", **common)])
    claim_one(store, queues=[text], worker=worker)
    store.enqueue([envelope(f"waits-{place}", rate_class=text, **common)])


def _schedule(store: Store, id: str, text: str) -> None:
    inspect = steer(store)
    inspect.upsert_schedule(
        Schedule(
            id=id,
            kind="k",
            spec="@daily",
            next_run_ms=1,
            queue=text,
            partition_key=text,
            payload=text.encode(),
        )
    )
    inspect.record_schedule_event(
        ScheduleEvent(
            schedule_id=id,
            tick_ms=1,
            job_id=text,
            outcome=TickOutcome.FAILED,
            reason=_short(text),
        )
    )
