"""What every command does, over the database and over HTTP."""

from __future__ import annotations

import base64
import json

import pytest

from headgate_sync.cli.direct import DirectControl
from headgate_sync.envelope import fingerprint
from headgate_sync.lease import LeaseRef
from headgate_sync.lifecycle import Outcome
from headgate_sync.memory.store import MemStore
from headgate_sync.schedule import Schedule
from headgate_sync.schedules import MAX_SCHEDULES
from headgate_sync.search import JobFilter
from headgate_sync.semantics import LEVELS, SEMANTICS
from headgate_sync.workers import WorkerMeta
from tests.builders import claim_one, enqueue, envelope, steer
from tests.cli.conftest import Run, invoke, told


def take(pg) -> LeaseRef:
    """Admit one job of queue `q`; the lease of it."""
    return claim_one(pg).lease_ref


def archive(pg, job_id: str) -> None:
    """Enqueue a job and let it fail for good."""
    pg.enqueue([envelope(job_id)])
    pg.ack(take(pg), Outcome.SKIP, error="no")


# Jobs


def test_jobs_are_listed_page_by_page_newest_first(run, pg):
    pg.enqueue([envelope("a"), envelope("b")])
    pg.enqueue([envelope("c")])
    first = told(run("job", "ls", "--limit", "2"))
    assert len(first["jobs"]) == 2
    assert first["jobs"][0]["id"] == "c"
    second = told(run("job", "ls", "--limit", "2", "--cursor", first["next_cursor"]))
    assert [job["id"] for job in second["jobs"]] == ["a"]
    assert second["next_cursor"] is None


def test_a_query_and_the_options_must_all_hold(run, pg):
    pg.enqueue([envelope("a", queue="mail", tags=["x", "y"]), envelope("b")])
    for words in (["queue:mail"], ["--queue", "mail"], ["--tag", "x", "--tag", "y"]):
        [found] = told(run("job", "ls", *words))["jobs"]
        assert found["id"] == "a"
    [found] = told(run("job", "ls", "--any-tag", "y", "--any-tag", "z"))["jobs"]
    assert found["id"] == "a"
    assert told(run("job", "ls", "queue:mail", "--state", "archived"))["jobs"] == []


def test_a_wrong_query_or_cursor_is_an_error_that_names_it(run, pg):
    assert "unknown search field `bogus`" in run("job", "ls", "bogus:x", code=1).stderr
    done = run("job", "ls", "priority:x", code=1)
    assert "priority `x` is not a number" in done.stderr
    assert "bad cursor" in run("job", "ls", "--cursor", "x1", code=1).stderr


def test_a_payload_is_shown_only_when_it_is_asked_for(run, pg):
    pg.enqueue([envelope("a", payload=b"secret", headers={"k": "hidden"})])
    encoded = base64.b64encode(b"secret").decode()
    for words in (
        ["job", "ls"],
        ["job", "show", "a"],
        ["-o", "table", "job", "show", "a"],
    ):
        text = run(*words).output
        assert "secret" not in text
        assert encoded not in text
        assert "hidden" not in text
    found = told(run("job", "show", "a", "--payload"))
    assert (found["payload"], found["payload_encoding"]) == ("secret", "utf-8")
    assert found["metadata"] == {"k": "hidden"}


def test_a_payload_that_is_no_text_is_shown_in_base64(run, pg):
    pg.enqueue([envelope("a", payload=b"\xff\x00")])
    found = told(run("job", "show", "a", "--payload"))
    assert (found["payload"], found["payload_encoding"]) == ("/wA=", "base64")


def test_a_job_is_shown_with_what_its_handler_left(run, pg):
    from headgate_sync.lease import JobResult, ProgressUpdate

    pg.enqueue([envelope("a", retention_ms=60_000)])
    lease = take(pg)
    pg.progress.write_job_progress(
        lease, ProgressUpdate(current=42, total=100, message="frame 420")
    )
    pg.outputs.write_job_output(lease, JobResult(schema_version=7, data=b"\0\xff"))
    found = told(run("job", "show", "a"))
    assert found["progress"]["current"] == 42
    assert found["progress"]["message"] == "frame 420"
    assert found["output"]["schema_version"] == 7
    assert "bytes" not in found["output"]
    assert found["result"] is None
    assert found["checkpoint"]["completed_steps"] == []
    shown = told(run("job", "show", "a", "--payload"))
    assert (shown["output"]["bytes"], shown["output"]["bytes_encoding"]) == (
        "AP8=",
        "base64",
    )


def test_a_job_shows_the_traceback_of_its_newest_attempt_below_the_table(run, pg):
    pg.enqueue([envelope("a")])
    error = 'ValueError: bad\n\nTraceback:\n  File "a.py", line 1\x1b[31m'
    pg.ack(take(pg), Outcome.SKIP, error=error)
    shown = run("job", "show", "a", "-o", "table").stdout
    assert "  ValueError: bad  " in shown
    assert shown.endswith('\nTraceback:\n  File "a.py", line 1\\x1b[31m\n')


def test_an_archived_job_is_retried_and_shows_its_attempts(run, pg):
    archive(pg, "a")
    found = told(run("job", "show", "a"))
    assert found["state"] == "archived"
    assert [one["error"] for one in found["errors"]] == ["no"]
    assert told(run("job", "retry", "a")) == {"id": "a", "done": "retried"}
    assert pg.inspect.get_job("a").state == "available"


def test_a_verb_that_the_state_does_not_allow_is_an_error(run, pg):
    pg.enqueue([envelope("a")])
    done = run("job", "retry", "a", code=1)
    assert "operator_retry is not defined from available" in done.stderr


def test_cancelling_takes_a_running_job_from_its_worker(run, pg):
    pg.enqueue([envelope("a")])
    lease = take(pg)
    run("job", "cancel", "a", "--yes")
    assert pg.inspect.get_job("a").state == "cancelled"
    assert pg.renew([lease], lease_ms=1_000) == [lease]


def test_a_retry_whose_unique_key_was_taken_names_the_holder(run, pg):
    pg.enqueue([envelope("a", unique_key=b"k")])
    pg.ack(take(pg), Outcome.SKIP, error="no")
    pg.enqueue([envelope("holder", unique_key=b"k")])
    assert "holder" in run("job", "retry", "a", code=1).stderr
    assert pg.inspect.get_job("a").state == "archived"


def test_jobs_are_promoted_rescheduled_and_deleted(run, pg):
    pg.enqueue([envelope("p", pending=True)])
    run("job", "promote", "p")
    assert pg.inspect.get_job("p").state == "available"
    pg.enqueue([envelope("s", scheduled_at_ms=5_000_000)])
    assert (
        told(run("job", "reschedule", "s", "6000000"))["scheduled_at_ms"] == 6_000_000
    )
    run("job", "reschedule", "s", "1970-01-01T02:00:00+00:00")
    assert pg.inspect.get_job("s").scheduled_at_ms == 7_200_000
    run("job", "delete", "p", "--yes")
    assert pg.inspect.get_job("p") is None


@pytest.mark.parametrize(
    "words",
    [
        ["show"],
        ["explain"],
        ["retry"],
        ["promote"],
        ["cancel", "--yes"],
        ["delete", "--yes"],
        ["replay"],
    ],
)
def test_a_job_that_does_not_exist_is_exit_code_3(run, words):
    verb, *rest = words
    done = run("job", verb, "nobody/at:all", *rest, code=3)
    assert done.stderr.startswith("headgate: ")
    assert done.stderr.count("\n") == 1


def test_a_replay_makes_a_new_job_and_a_named_one_only_once(run, pg):
    pg.enqueue([envelope("a", payload=b"p")])
    made = told(run("job", "replay", "a", "--queue", "other", "--new-id", "b"))
    assert made == {"id": "b", "replay_of": "a"}
    assert told(run("job", "replay", "a", "--queue", "other", "--new-id", "b")) == made
    job = pg.inspect.get_job("b", include_payload=True)
    assert (job.queue, job.payload, job.replay_of) == ("other", b"p", "a")


def test_a_job_is_enqueued_from_text_file_or_standard_input(run, pg, tmp_path):
    (tmp_path / "body").write_bytes(b"\xff\x00file")
    for given, stdin, payload in (
        ("text", None, b"text"),
        (f"@{tmp_path / 'body'}", None, b"\xff\x00file"),
        ("@-", "typed", b"typed"),
    ):
        words = ["job", "enqueue", "p4:search", "--payload", given]
        words += ["--queue", "mail", "--priority", "7", "--tag", "eu"]
        made = told(run(*words, stdin=stdin))
        job = pg.inspect.get_job(made["id"], include_payload=True)
        assert (job.kind, job.payload) == ("p4:search", payload)
        assert (job.queue, job.priority, job.tags) == ("mail", 7, ("eu",))
        assert job.fingerprint == fingerprint("p4:search", payload)


def test_an_enqueue_that_is_refused_says_why(run, pg):
    words = ["job", "enqueue", "k", "--payload", "x", "--unique-key", "one"]
    run(*words, "--id", "first")
    assert "first" in run(*words, code=1).stderr
    pg.inspect.set_enqueue_limit("full", 0)
    run("job", "enqueue", "k", "--payload", "x", "--queue", "full", code=1)
    assert "weight" in run(*words[:5], "--weight", "-1", code=1).stderr


def test_an_empty_id_is_refused_before_anything_is_made(run, pg):
    run("job", "enqueue", "k", "--payload", "x", "--id", "a")
    run("job", "enqueue", "k", "--payload", "x", "--id", "", code=1)
    done = run("job", "replay", "a", "--new-id", "", code=1)
    assert done.stderr == "headgate: id must not be empty\n"
    assert [found.id for found in pg.inspect.list_jobs(JobFilter()).jobs] == ["a"]


@pytest.mark.parametrize("option", ["--weight", "--max-attempts", "--schema-version"])
def test_a_zero_that_was_typed_is_refused_and_not_read_as_the_default(run, pg, option):
    name = option.removeprefix("--").replace("-", "_")
    words = ["job", "enqueue", "k", "--payload", "x", option, "0"]
    assert f"{name} must be >= 1" in run(*words, code=1).stderr
    words = ["cron", "set", "s", "--kind", "k", "--spec", "@daily", option, "0"]
    assert f"{name} is 0, allowed is 1 to" in run(*words, code=1).stderr
    assert pg.inspect.list_jobs().jobs == ()
    assert pg.inspect.list_schedules() == []


def test_explain_names_what_blocks_a_job(run, pg):
    pg.enqueue([envelope("a", queue="q"), envelope("b", scheduled_at_ms=1_007_000)])
    assert told(run("job", "explain", "a"))["admissible"] is True
    pg.inspect.set_queue_paused("q", True)
    found = told(run("job", "explain", "a"))
    assert (found["blocked_by"], found["estimated_admission_ms"]) == (
        "queue_paused",
        None,
    )
    assert told(run("job", "explain", "b"))["estimated_admission_ms"] == 7_000


def test_jobs_are_counted_by_state(run, pg):
    pg.enqueue([envelope("a"), envelope("b", queue="r")])
    assert told(run("job", "counts", "q"))["counts"] == [
        {"state": "available", "count": 1}
    ]
    assert told(run("job", "counts"))["counts"] == [{"state": "available", "count": 2}]


# Bulk


def test_bulk_only_estimates_unless_it_is_told_to_apply(run, pg):
    for name in "abc":
        archive(pg, name)
    found = told(run("bulk", "retry", "--state", "archived"))
    assert (found["status"], found["total_estimated"], found["affected"]) == (
        "completed",
        3,
        0,
    )
    assert pg.inspect.counts().counts == {"archived": 3}


def test_bulk_over_the_database_ends_without_any_worker(over_database, pg):
    for name in "abc":
        archive(pg, name)
    found = told(over_database("bulk", "retry", "--state", "archived", "--apply"))
    assert (found["status"], found["affected"]) == ("completed", 3)
    assert pg.inspect.counts().counts == {"available": 3}


def test_bulk_cancel_ends_what_is_not_finished(over_database, pg):
    enqueue(pg, "a", "b")
    done = over_database("bulk", "cancel", "--queue", "q", "--apply", "--yes")
    assert told(done)["affected"] == 2
    assert pg.inspect.counts().counts == {"cancelled": 2}


def test_bulk_can_be_left_to_itself_and_followed_later(run, pg):
    archive(pg, "a")
    words = ["bulk", "delete", "--kind", "tk:msg", "--apply", "--yes", "--no-wait"]
    found = told(run(*words))
    assert found["status"] == "pending"
    while pg.inspect.get_operation(found["id"]).status in ("pending", "running"):
        pg.inspect.run_pending_operations(10)
    assert told(run("bulk", "show", found["id"]))["status"] == "completed"


def test_bulk_without_any_selector_is_refused(run, pg):
    assert "which jobs? give --queue" in run("bulk", "retry", code=2).stderr
    run("bulk", "show", "no-such-operation", code=3)


# Queues


def test_queues_show_their_backlog(run, pg):
    pg.enqueue([envelope("a", queue="mail"), envelope("b", queue="mail")])
    [found] = told(run("queue", "ls"))
    assert (found["queue"], found["unfinished_jobs"], found["paused"]) == (
        "mail",
        2,
        False,
    )
    assert found["by_state"] == [{"state": "available", "count": 2}]
    [found] = told(run("stats"))
    assert (found["queue"], found["live_workers"]) == ("mail", 0)


def test_what_is_promised_is_told_instead(run):
    rows = told(run("stats", "--semantics"))
    assert [row["id"] for row in rows] == [row.id for row in SEMANTICS]
    assert {row["level"] for row in rows} == set(LEVELS)
    assert rows[0].keys() == {"id", "statement", "level", "memory", "postgres"}
    lines = run("-o", "table", "stats", "--semantics").stdout.splitlines()
    [line] = [line for line in lines if "several-processes" in line]
    assert line.split()[:4] == ["backend", "several-processes", "no", "yes"]


@pytest.mark.parametrize("words", [["pause"], ["weight", "2"], ["limit", "5"]])
def test_who_steers_an_empty_queue_is_told(run, pg, words):
    pg.enqueue([envelope("a", queue="mail")])
    verb, *more = words
    assert run("queue", verb, "mail", *more).stderr == ""
    done = run("queue", verb, "mial\x1b", *more)
    assert done.stderr == "headgate: queue mial\\x1b holds no jobs\n"
    assert told(done)["queue"] == "mial\x1b"


def test_a_queue_is_paused_weighed_and_limited(run, pg):
    pg.enqueue([envelope("a", queue="a/b c")])

    def queue():
        return told(run("queue", "inspect", "a/b c"))

    run("queue", "pause", "a/b c")
    run("queue", "weight", "a/b c", "3")
    run("queue", "limit", "a/b c", "10")
    run("queue", "quantum", "a/b c", "", "5")
    found = queue()
    assert (found["paused"], found["weight"], found["max_unfinished_jobs"]) == (
        True,
        3,
        10,
    )
    assert found["partitions"][0]["quantum_override"] == 5
    run("queue", "resume", "a/b c")
    run("queue", "limit", "a/b c", "none")
    run("queue", "quantum", "a/b c", "", "none")
    found = queue()
    assert (found["paused"], found["max_unfinished_jobs"]) == (False, None)
    assert found["partitions"][0]["quantum_override"] is None


def test_a_weight_of_nothing_is_refused_in_the_words_of_the_store(run, pg):
    assert "weight" in run("queue", "weight", "q", "0", code=1).stderr


def test_a_queue_that_does_not_exist_is_exit_code_3(run, pg):
    assert "nowhere" in run("queue", "inspect", "nowhere", code=3).stderr


def test_history_begins_so_long_ago(run, pg, postgres):
    pg.enqueue([envelope("a", queue="q")])
    postgres.clock.advance_ms(600_000)
    assert told(run("queue", "history", "q", "--since", "1m")) == []
    [bucket] = told(run("queue", "history", "q", "--since", "2h"))
    assert bucket["arrived"] == 1
    assert "bucket_ms" in run("queue", "history", "q", "--bucket", "5s", code=1).stderr


def test_a_queue_with_jobs_is_removed_only_by_force(run, pg):
    pg.enqueue([envelope("a", queue="q")])
    assert "force" in run("queue", "rm", "q", "--yes", code=1).stderr
    found = told(run("queue", "rm", "q", "--force", "--yes", "--no-wait"))
    assert found["id"].startswith("qdel-")
    while pg.inspect.get_operation(found["id"]).status in ("pending", "running"):
        pg.inspect.run_pending_operations(10)
    assert pg.inspect.get_job("a") is None


def test_an_empty_queue_is_removed_at_once(run, pg):
    pg.inspect.set_queue_weight("q", 2)
    assert told(run("queue", "rm", "q", "--yes")) == {"queue": "q", "deleted": True}
    assert told(run("queue", "ls")) == []


def test_the_memory_of_queues_is_sampled(run, pg):
    pg.enqueue([envelope("a", queue="q")])
    assert told(run("queue", "sample-memory")) == {"sampled_queues": 1}
    [found] = told(run("queue", "ls"))
    assert found["memory_bytes"] > 0


# Limits


def test_a_rate_class_is_set_with_further_budgets_and_keeps_them(run, pg):
    words = ["rate", "set", "mail", "--limit", "10", "--window", "1s"]
    found = told(run(*words, "--also", "100/1h", "--also", "5/1m/9"))
    assert [(b["limit"], b["window_ms"], b["burst"]) for b in found["budgets"]] == [
        (10, 1_000, 10),
        (100, 3_600_000, 100),
        (5, 60_000, 9),
    ]
    assert "  10, 100, 9  " in run("rate", "ls", "-o", "table").stdout
    assert len(told(run(*words, "--burst", "20"))["budgets"]) == 3
    assert len(told(run(*words, "--only"))["budgets"]) == 1
    run("rate", "set", "mail", "--limit", "1", "--window", "1s", "--burst", "0", code=1)


def test_a_rate_class_is_paused_for_a_time_and_until_it_is_resumed(run, pg):
    run("rate", "set", "mail", "--limit", "10", "--window", "1s")
    found = told(run("rate", "pause", "mail", "--for", "10m", "--reason", "429"))
    assert (found["paused_until_ms"], found["pause_reason"]) == (1_600_000, "429")
    assert told(run("rate", "pause", "mail"))["paused"] is True
    found = told(run("rate", "resume", "mail"))
    assert (found["paused"], found["paused_until_ms"]) == (False, None)
    assert [(b["limit"], b["window_ms"]) for b in found["budgets"]] == [(10, 1_000)]


def test_a_rate_class_is_removed_with_the_number_of_its_jobs(run, pg):
    run("rate", "set", "mail", "--limit", "10", "--window", "1s")
    pg.enqueue([envelope("a", rate_class="mail")])
    assert told(run("rate", "rm", "mail", "--yes"))["jobs_waiting"] == 1
    run("rate", "rm", "mail", "--yes", code=3)
    run("rate", "pause", "mail", code=3)
    assert told(run("rate", "ls")) == []


def test_a_concurrency_limit_is_set_and_removed(run, pg):
    words = ["limit", "set", "one", "--queue", "q", "--scope", "queue"]
    found = told(run(*words, "--max", "3", "--when-full", "discard"))
    assert (found["max_concurrent"], found["on_saturated"]) == (3, "discard")
    assert told(run("limit", "ls")) == [found]
    run("limit", "set", "one", "--queue", "other", "--max", "3", code=1)
    run("limit", "rm", "one", "--yes")
    run("limit", "rm", "one", "--yes", code=3)


def test_a_fingerprint_is_released_once(run, pg, postgres):
    pg = postgres.make_store(crash_limit=1)
    pg.enqueue([envelope("a", fingerprint="f/1")])
    take(pg)
    postgres.clock.advance_ms(10_000_000)
    assert len(pg.reclaim_expired(10)) == 1
    [found] = told(run("quarantine", "ls"))
    assert found["fingerprint"] == "f/1"
    assert told(run("quarantine", "release", "f/1"))["released_jobs"] == 1
    assert (
        "f/1 is not quarantined" in run("quarantine", "release", "f/1", code=3).stderr
    )


# Schedules


def test_a_schedule_lives_from_set_to_rm(run, pg):
    words = ["cron", "set", "nightly", "--kind", "report", "--spec", "@every:3600000"]
    found = told(run(*words, "--payload", "body", "--queue", "q", "--tag", "eu"))
    assert (found["queue"], found["paused"], found["tags"]) == ("q", False, ["eu"])
    assert pg.inspect.get_schedule("nightly").payload == b"body"
    run("cron", "pause", "nightly")
    assert told(run("cron", "show", "nightly"))["paused"] is True
    run(*words)  # a pause that somebody set stays
    assert told(run("cron", "ls"))[0]["paused"] is True
    run("cron", "resume", "nightly")
    assert told(run("cron", "ls"))[0]["paused"] is False
    made = told(run("cron", "run", "nightly"))
    assert pg.inspect.get_job(made["id"]).kind == "report"
    assert told(run("cron", "events", "nightly"))["events"] == []
    run("cron", "rm", "nightly", "--yes")
    for words in (["show"], ["pause"], ["run"], ["rm", "--yes"]):
        run("cron", words[0], "nightly", *words[1:], code=3)


def test_all_schedules_are_told_also_beyond_one_call_of_the_store():
    store = MemStore()
    for number in range(MAX_SCHEDULES + 1):
        steer(store).upsert_schedule(
            Schedule(id=f"s{number}", kind="k", spec="@daily", next_run_ms=1)
        )
    assert len(DirectControl(store).schedules()) == MAX_SCHEDULES + 1


def test_a_spec_that_is_none_is_refused(run, pg):
    words = ["cron", "set", "x", "--kind", "k", "--spec", "nonsense"]
    assert "nonsense" in run(*words, code=1).stderr


# Workers


def beat(pg, name: str, **fields) -> str | None:
    """Let a worker beat once."""
    usual = {"host": "h", "pid": 1, "queues": ("q",), "started_at_ms": 1}
    return pg.inspect.heartbeat_worker(
        WorkerMeta(worker_id=name, **{**usual, **fields})
    )


def test_workers_are_listed_and_summed_up(run, pg):
    beat(pg, "w1", concurrency=8, inflight=6, polls=10, empty_polls=2)
    beat(pg, "w2", concurrency=2, queues=("q", "r"))
    pg.enqueue([envelope("a", queue="nobody")])
    first, second = told(run("worker", "ls"))
    assert (first["utilization"], first["empty_poll_ratio"]) == (0.75, 0.2)
    assert second["queues"] == ["q", "r"]
    found = told(run("cluster"))
    assert (found["capacity_total"], found["inflight_total"]) == (10, 6)
    assert found["utilization"] == 0.6
    assert found["workers"]["live"] == 2
    cover = {one["queue"]: one["live_workers"] for one in found["queues"]}
    assert cover == {"nobody": 0, "q": 2, "r": 1}


def test_a_worker_that_is_probably_dead_is_late_and_serves_nobody(run, pg, postgres):
    beat(pg, "dead", concurrency=1, beat_ms=1_000)
    postgres.clock.advance_ms(60_001)
    beat(pg, "well", concurrency=1, beat_ms=1_000, queues=("r",))
    pg.enqueue([envelope("a", queue="q"), envelope("b", queue="r")])
    told_of = run("-o", "table", "worker", "ls").stdout.splitlines()[1:]
    assert [line.split()[0] for line in told_of if "running, late" in line] == ["dead"]
    found = {one["queue"]: one["live_workers"] for one in told(run("stats"))}
    assert found == {"q": 0, "r": 1}


def test_a_worker_hears_the_last_thing_that_it_was_asked_to_do(run, pg):
    beat(pg, "w", concurrency=1)
    run("worker", "signal", "w", "quiet")
    run("worker", "signal", "w", "restart", "--yes")
    assert told(run("worker", "ls"))[0]["pending_command"] == "restart"
    run("worker", "signal", "w", "none")
    assert beat(pg, "w", concurrency=1) is None
    run("worker", "signal", "nobody", "quiet", code=3)
    run("worker", "signal", "w", "dance", code=2)


# Both modes tell the same.


@pytest.mark.parametrize(
    "words",
    [
        ["stats"],
        ["queue", "ls"],
        ["queue", "inspect", "q"],
        ["queue", "history", "q", "--since", "2h"],
        ["job", "ls"],
        ["job", "show", "a", "--payload"],
        ["job", "show", "done", "--payload"],
        ["job", "explain", "a"],
        ["job", "counts"],
        ["rate", "ls"],
        ["limit", "ls"],
        ["quarantine", "ls"],
        ["cron", "ls"],
        ["cron", "show", "s"],
        ["worker", "ls"],
        ["cluster"],
    ],
    ids=" ".join,
)
def test_database_and_api_print_the_same(over_database: Run, over_http: Run, pg, words):
    archive(pg, "done")
    pg.enqueue([envelope("a", queue="q", rate_class="c", headers={"k": "v"})])
    beat(pg, "w", concurrency=2)
    over_database("rate", "set", "c", "--limit", "5", "--window", "1s")
    over_database("limit", "set", "l", "--max", "1", "--queue", "q")
    over_database("cron", "set", "s", "--kind", "k", "--spec", "@every:3600000")
    for form in ("json", "jsonl", "table"):
        first, second = (one("-o", form, *words) for one in (over_database, over_http))
        if form == "table":  # the order of fields is that of the JSON
            assert sorted(first.stdout.split()) == sorted(second.stdout.split())
        elif form == "json":
            assert told(first) == told(second)
        else:
            lines = [map(json.loads, o.stdout.splitlines()) for o in (first, second)]
            assert list(lines[0]) == list(lines[1])


# The database alone


def test_indexes_are_listed_and_rebuilt(over_database, pg):
    found = told(over_database("indexes"))
    names = [one["name"] for one in found]
    assert "headgate_job_ready" in names
    over_database("reindex", "headgate_job_ready")
    assert "is not one of" in over_database("reindex", "pg_class", code=1).stderr


def test_vacuum_tells_of_every_table(over_database, pg):
    found = told(over_database("vacuum"))
    assert {"table": "headgate_job", "ok": True, "error": ""} in found


def test_an_archive_is_set_listed_cleared_and_pruned(over_database, pg, postgres):
    said = told(over_database("archive", "set", "mail", "90d"))
    assert said == {"queue": "mail", "retention_ms": 7_776_000_000}
    assert told(over_database("archive", "ls")) == [said]
    assert over_database("-o", "table", "archive", "ls").stdout.split() == [
        *("queue", "kept", "for"),
        *("mail", "90d"),
    ]
    over_database("archive", "set", "mail", "0s", code=2)
    over_database("archive", "clear", "mail")
    assert told(over_database("archive", "ls")) == []
    postgres.clock.freeze_at(1_738_368_000_000)
    assert told(over_database("archive", "prune", "202501", "--yes")) == {
        "month": "202501",
        "removed_copies": 0,
    }
    done = over_database("archive", "prune", "202502", "--yes", code=1)
    assert "archive partition is open" in done.stderr
    assert "--yes" in over_database("archive", "prune", "202501", code=4).stderr


def test_trimming_archives_what_succeeded(over_database, pg, postgres, admin):
    over_database("archive", "set", "q", "1d")
    archive(pg, "failed")
    pg.enqueue([envelope("done", retention_ms=10_000_000)])
    pg.ack(take(pg), Outcome.SUCCESS)
    postgres.clock.advance_ms(3_600_000)
    states = ["--state", "archived", "--state", "completed"]
    words = ["trim", "jobs", "--yes", "--older-than", "30m", *states]
    assert told(over_database(*words)) == {"deleted_jobs": 2}
    copies = admin.execute("SELECT id FROM headgate.headgate_job_archive")
    assert copies.fetchall() == [("done",)]


def test_finished_jobs_are_trimmed_by_age_and_state(over_database, pg, postgres):
    archive(pg, "old")
    pg.enqueue([envelope("done", retention_ms=10_000_000)])
    pg.ack(take(pg), Outcome.SUCCESS)
    postgres.clock.advance_ms(3_600_000)
    words = ["trim", "jobs", "--yes", "--older-than"]
    assert told(over_database(*words, "2h")) == {"deleted_jobs": 0}
    assert (
        told(over_database("trim", "history", "--yes", "--older-than", "30m"))[
            "removed_attempts"
        ]
        >= 0
    )
    assert told(over_database(*words, "30m")) == {"deleted_jobs": 1}
    assert pg.inspect.get_job("old").state == "archived"
    found = told(over_database(*words, "30m", "--state", "archived"))
    assert found == {"deleted_jobs": 1}


def test_upkeep_does_not_go_over_http(clean):
    for words in (
        ["indexes"],
        ["vacuum"],
        ["archive", "ls"],
        ["trim", "jobs", "--older-than", "1d", "--yes"],
    ):
        done = invoke(*words, "--api", "http://127.0.0.1:1", code=2)
        assert "needs the database itself" in done.stderr


def test_the_terms_of_a_search_need_no_quotes(run, pg):
    enqueue(pg, "a", queue="mail")
    enqueue(pg, "b", queue="mail", kind="other")
    enqueue(pg, "c")
    found = told(run("job", "ls", "queue:mail", "state:available", "tk"))["jobs"]
    assert [one["id"] for one in found] == ["a"]


def test_a_table_leaves_out_a_checkpoint_without_steps(run, pg):
    enqueue(pg, "a")
    assert "checkpoint" not in run("job", "show", "a", "-o", "table").stdout
    assert told(run("job", "show", "a"))["checkpoint"] is not None


def test_a_queue_that_does_not_shrink_has_no_end(run, pg):
    enqueue(pg, "a")
    assert "∞" in run("stats", "-o", "table").stdout


def test_an_id_that_is_a_route_of_the_api_shows_nothing_else(over_http, pg):
    enqueue(pg, "counts")
    assert "not that job" in over_http("job", "show", "counts", code=1).stderr


@pytest.mark.parametrize(
    ("call", "undo", "words"),
    [
        (
            *("upsert_rate_class", "delete_rate_class"),
            ["rate", "set", "n", "--limit", "1", "--window", "1s"],
        ),
        (
            *("upsert_concurrency_limit", "delete_concurrency_limit"),
            ["limit", "set", "n", "--max", "1", "--queue", "q"],
        ),
    ],
)
def test_what_somebody_deleted_right_after_it_was_set_does_not_exist(
    run, pg, monkeypatch, call, undo, words
):
    whole = type(pg.inspect)
    real = getattr(whole, call)

    def set_and_deleted(self, given):
        real(self, given)
        getattr(self, undo)(given.name)

    monkeypatch.setattr(whole, call, set_and_deleted)
    assert " n does not exist" in run(*words, code=3).stderr
