"""Every page over both stores: what it shows, and what it does with hostile text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headgate_sync.console.pages import PAGES
from headgate_sync.lease import Checkpoint, ProgressUpdate
from headgate_sync.lifecycle import STORED, Outcome, State
from headgate_sync.loglines import LEVELS, LogLine
from headgate_sync.policy import BudgetConfig, Ceiling, RateClassConfig
from headgate_sync.schedule import Schedule
from headgate_sync.store import Store
from headgate_sync.workers import WorkerMeta
from tests.builders import (
    START_MS,
    bring_to,
    claim_one,
    enqueue,
    envelope,
    set_rate_limit,
    steer,
)
from tests.console.hostile import EVIL, HOSTILE, SCRIPT, spread
from tests.console.pages import look
from tests.contract.test_schedules import schedule

ADDRESSES = [
    "/queue?name=q",
    "/job?id=a",
    *(f"/{page.path}" for page in PAGES if page.path not in ("queue", "job")),
]


def beat(store: Store, **fields: Any) -> None:
    """Let a worker tell of itself."""
    values = {
        "worker_id": "w-1",
        "host": "h",
        "pid": 1,
        "queues": ("q",),
        "concurrency": 8,
        "started_at_ms": 1,
        **fields,
    }
    steer(store).heartbeat_worker(WorkerMeta(**values))


# What is shown


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_page_can_be_opened_with_and_without_work(console, store, address):
    empty = console.get(address)
    assert empty.status_code == (404 if address.startswith("/job?") else 200)
    enqueue(store, "a", "b", partition_key="p")
    beat(store)
    filled = console.get(address)
    assert filled.status_code == 200
    assert filled.text.rstrip().endswith("</html>")


def test_every_page_is_reached_from_the_navigation(console):
    links = look(console, "/").links
    for page in PAGES:
        assert (f"/{page.path}" in links) == (page.within is None)


def test_the_overview_leads_with_time_to_drain(console, store):
    enqueue(store, "a", "b", "c")
    text = look(console, "/").text
    assert "Worst time to drain ∞ growing: q" in text
    assert "Unfinished work 3 jobs in 1 queue" in text


def test_the_overview_shows_the_tightest_budget_of_a_class(console, store):
    steer(store).upsert_rate_class(
        RateClassConfig(
            name="api",
            limit=100,
            window_ms=1_000,
            burst=100,
            further=(BudgetConfig(limit=5, window_ms=3_600_000, burst=5),),
        )
    )
    enqueue(store, "a", rate_class="api")
    claim_one(store)
    text = look(console, "/").text
    assert "4 of 5 tokens" in text
    assert "of 100 tokens" not in text


def test_a_queue_that_drains_says_how_long_it_takes(console, store, clock):
    enqueue(store, *(f"j{n}" for n in range(6)))
    clock.advance_ms(120_000)
    for _ in range(3):
        store.ack(claim_one(store).lease_ref, Outcome.SUCCESS)
    [stats] = steer(store).queue_stats()
    assert stats.time_to_drain_ms is not None
    text = look(console, "/queue", name="q").text
    assert re.search(r"Time to drain \d+ m( \d+ s)? to drain", text)


def test_a_queue_without_a_worker_needs_attention(console, store):
    enqueue(store, "a")
    assert "q has 1 unfinished job and no live worker" in look(console, "/").text
    beat(store)
    assert "no live worker" not in look(console, "/").text


@pytest.mark.parametrize("path", ["/", "/queues", "/queue"])
def test_a_missing_worker_is_a_fault_only_where_work_waits(console, store, path):
    """An empty queue needs nobody."""
    query = {"name": "q"} if path == "/queue" else {}
    steer(store).set_queue_weight("q", 2)
    text = look(console, path, **query).text
    assert "no worker" not in text
    assert "0 workers" in text
    enqueue(store, "a")
    assert "no worker" in look(console, path, **query).text
    beat(store)
    assert "no worker" not in look(console, path, **query).text


def test_a_schedule_whose_queue_nobody_serves_is_marked_unless_it_is_paused(
    console, store
):
    steer(store).upsert_schedule(schedule("s", queue="q"))
    assert "no worker" in look(console, "/periodic").text
    steer(store).set_schedule_paused("s", True)
    assert "no worker" not in look(console, "/periodic").text
    steer(store).set_schedule_paused("s", False)
    beat(store)
    assert "no worker" not in look(console, "/periodic").text


def test_a_dead_worker_does_not_count_as_serving(console, store, clock):
    enqueue(store, "a")
    beat(store)
    clock.advance_ms(120_000)
    page = look(console, "/")
    assert "no live worker" in page.text
    assert "1 worker late and probably dead" in page.text
    assert "late" in look(console, "/workers").text


def test_empty_admits_are_a_fault_only_beside_jobs_that_could_run(console, store):
    """A job of a later instant is none that limits hold back."""
    beat(store, polls=100, empty_polls=95)
    store.enqueue([envelope("later", delay_ms=60_000)])
    assert "of admits found nothing" not in look(console, "/").text
    enqueue(store, "now")
    told = "95% of admits found nothing beside 2 unfinished jobs: look at limits"
    assert told in look(console, "/").text


@pytest.mark.parametrize("state", sorted(STORED))
def test_a_job_can_be_opened_in_every_state(console, store, clock, state):
    bring_to(store, clock, "a", State(state))
    page = look(console, "/job", id="a")
    assert state in page.text
    assert page.settings["readOnly"] is False


@pytest.mark.parametrize(
    ("state", "verbs"),
    [
        (State.AVAILABLE, {"cancel", "replay"}),
        (State.PENDING, {"cancel", "promote", "replay"}),
        (State.SCHEDULED, {"cancel", "replay", "reschedule"}),
        (State.RETRYABLE, {"cancel", "replay", "reschedule"}),
        (State.RUNNING, {"cancel", "replay"}),
        (State.ARCHIVED, {"retry", "replay"}),
        (State.CANCELLED, {"retry", "replay"}),
        (State.UNDECODABLE, {"retry", "replay"}),
        (State.COMPLETED, {"replay"}),
        (State.QUARANTINED, {"replay"}),
    ],
)
def test_a_job_offers_the_verbs_that_its_state_allows(
    console, store, clock, state, verbs
):
    bring_to(store, clock, "a", state)
    page = look(console, "/job", id="a")
    assert {path.rpartition("/")[2] for path in page.paths("POST")} == verbs
    running = state is State.RUNNING
    assert page.paths("DELETE") == (set() if running else {"/jobs/a"})
    assert page.paths("PUT") == (set() if running else {"/jobs/a/payload"})


def test_a_waiting_job_says_what_it_waits_for(console, store, clock):
    enqueue(store, "a")
    assert "No live worker serves its queue" in look(console, "/job", id="a").text
    beat(store)
    assert "It is the next of its partition" in look(console, "/job", id="a").text
    steer(store).set_queue_paused("q", True)
    assert "Its queue is paused" in look(console, "/job", id="a").text


def test_a_job_pinned_to_a_worker_that_is_away_says_so(console, store, clock):
    store.enqueue([envelope("a", sticky_worker="gpu-1")])
    text = look(console, "/job", id="a").text
    assert "The worker it is pinned to is away Worker gpu-1 is unknown" in text
    beat(store, worker_id="gpu-1")
    assert "only worker gpu-1 may take it" in look(console, "/job", id="a").text
    clock.advance_ms(600_000)
    assert "Worker gpu-1 was last seen 10 m ago" in look(console, "/job", id="a").text


def test_each_level_of_a_log_has_a_look_of_its_own(console, store):
    enqueue(store, "a")
    lines = [LogLine(level=level, message="m", at_ms=1).encode() for level in LEVELS]
    store.ack(claim_one(store).lease_ref, Outcome.RETRY, logs=lines)
    page = look(console, "/job", id="a")
    classes = {value for tag, name, value in page.attributes if name == "class"}
    assert classes >= {f"v-{level}" for level in LEVELS}
    style = next(v for t, n, v in page.attributes if v.endswith(".css"))
    known = re.findall(r"\.v-(\w+)", console.get(style).text)
    assert set(known) == {"warn", "error"}


def test_every_link_of_a_hostile_name_leads_to_a_page(console, store, clock):
    spread(store, clock, EVIL)
    roads = {"/"}
    for address in (*ADDRESSES[2:], "/periodic?events=s-0"):
        roads |= {link for link in look(console, address).links if link[0] == "/"}
    for text in EVIL:
        roads |= set(look(console, "/queue", name=text).links)
        roads |= set(look(console, "/job", id=text).links)
    gone = [
        road
        for road in sorted(roads)
        if not road.startswith("#") and console.get(road).status_code != 200
    ]
    assert gone == []


def test_one_of_something_is_told_in_the_singular(console, store, clock):
    bring_to(store, clock, "dead", State.QUARANTINED, payload=b"dead")
    set_rate_limit(store, "api", limit=1, window_ms=60_000, burst=1)
    enqueue(store, "a", "b", rate_class="api")
    steer(store).upsert_concurrency_limit(
        Ceiling(name="each", queue="q", scope="partition", max_concurrent=1)
    )
    store.ack(claim_one(store).lease_ref, Outcome.SKIP, error="x", logs=["one line"])
    texts = [look(console, f"/job?id={id}").text for id in ("dead", "a", "b")]
    texts += [look(console, path).text for path in ("/", "/rate-classes", "/limits")]
    text = " ".join(texts)
    assert "1 log line " in text
    assert "0 of 1 token " in text
    assert "of 1 partition full" in text
    assert "1 fingerprint in quarantine: its jobs" in text
    assert not re.findall(r"\b1 (?:\w+ )?(?:crashes|leases|lines|jobs|tokens)\b", text)


def test_a_job_behind_a_rate_class_is_told_its_tokens_and_time(console, store):
    set_rate_limit(store, "api", limit=1, window_ms=60_000, burst=1)
    enqueue(store, "a", "b", rate_class="api")
    claim_one(store)
    text = look(console, "/job", id="b").text
    assert "Its rate class is out of tokens" in text
    assert "earliest in" in text


def test_a_job_that_can_never_fit_its_class_is_told_so(console, store):
    set_rate_limit(store, "api", limit=1, window_ms=60_000, burst=1)
    enqueue(store, "a", rate_class="api", weight=5)
    text = look(console, "/job", id="a").text
    assert "It weighs more than its rate class ever has" in text


def test_a_job_behind_a_full_ceiling_names_it(console, store):
    steer(store).upsert_concurrency_limit(
        Ceiling(name="narrow", queue="q", max_concurrent=1, scope="queue")
    )
    enqueue(store, "a", "b")
    claim_one(store)
    text = look(console, "/job", id="b").text
    assert "A ceiling is full" in text
    assert "1 of 1 jobs run under ceiling narrow" in text
    assert "1 of 1 running" in look(console, "/limits").text


def test_progress_attempts_and_logs_are_on_the_page_of_the_job(console, store):
    enqueue(store, "a")
    claim = claim_one(store)
    assert store.progress is not None
    store.progress.write_job_progress(
        claim.lease_ref, ProgressUpdate(current=42, total=100, message="frame 42")
    )
    assert "42 % 42 of 100 frame 42" in look(console, "/job", id="a").text
    store.ack(
        claim.lease_ref,
        Outcome.RETRY,
        error="Traceback: it broke",
        error_code="BROKE",
        logs=["first line"],
    )
    text = look(console, "/job", id="a").text
    assert "retry · BROKE" in text
    assert "Traceback: it broke" in text
    assert "first line" in text


def test_a_crashed_job_is_marked_and_its_quarantine_is_listed(console, store, clock):
    bring_to(store, clock, "a", State.QUARANTINED, kind="mail:welcome")
    assert "orphaned" in look(console, "/job", id="a").text
    assert "It is in quarantine" in look(console, "/job", id="a").text
    page = look(console, "/quarantine")
    assert "mail:welcome" in page.text
    assert len(page.paths("DELETE")) == 1
    assert "Quarantine 1" in look(console, "/").text


def test_rate_classes_show_their_tokens_and_who_waits(console, store):
    steer(store).upsert_rate_class(
        RateClassConfig(name="api", limit=10, window_ms=60_000, burst=20)
    )
    enqueue(store, "a", "b", rate_class="api")
    text = look(console, "/rate-classes").text
    assert "20 of 20 tokens" in text
    assert "10 per minute" in text
    assert "2 waiting" in text


def test_an_overspent_rate_class_shows_less_than_nothing(console, store):
    set_rate_limit(store, "api", limit=10, window_ms=60_000, burst=10)
    enqueue(store, "a", rate_class="api")
    store.ack(claim_one(store).lease_ref, Outcome.SUCCESS, actual_weight=25)
    assert "-15 of 10 tokens" in look(console, "/rate-classes").text


def test_partitions_show_who_waits_and_who_is_noisy(console, store):
    store.enqueue(
        [
            *(envelope(f"a{n}", partition_key="acme") for n in range(30)),
            envelope("b", partition_key="globex"),
            envelope("c", partition_key="hooli"),
        ]
    )
    text = look(console, "/partitions", queue="q").text
    assert re.search(r"acme noisy 30", text)
    assert "globex 1" in text


def test_schedules_show_their_ticks_when_asked(console, store):
    steer(store).upsert_schedule(
        Schedule(id="daily", kind="k", spec="@daily", next_run_ms=START_MS + 3_600_000)
    )
    page = look(console, "/periodic", events="daily")
    assert "in 1 h" in page.text
    assert "Ticks of daily" in page.text
    assert "/periodic/daily/run" in page.paths("POST")


def test_a_workers_buttons_follow_its_state(console, store):
    beat(store, status="quiet", duties_active=False)
    page = look(console, "/workers")
    sent = [act["body"]["command"] for act in page.acts]
    assert sent == ["resume", "restart", "terminate", "resign"]
    steer(store).signal_worker("w-1", "restart")
    told = look(console, "/workers")
    assert "→ restart" in told.text
    assert told.acts[-1]["body"] == {"command": None}


# Looking for jobs


def test_a_search_finds_what_it_names(console, store):
    enqueue(store, "a", kind="mail:welcome", tags=["eu"])
    enqueue(store, "b", kind="export:csv")
    assert "mail:welcome" in look(console, "/jobs", q="tag:eu").text
    found = look(console, "/jobs", q="export").text
    assert "export:csv" in found
    assert "mail:welcome" not in found


def test_a_search_that_means_nothing_is_told_why(console):
    page = look(console, "/jobs", status=400, q="bogus:x")
    assert "unknown search field `bogus`" in page.text


def test_pages_of_jobs_lead_forth_and_back(console, store):
    enqueue(store, *(f"j{n:03d}" for n in range(120)))
    seen, address = [], "/jobs"
    for _ in range(3):
        page = look(console, address)
        seen.append(sorted(set(re.findall(r"j\d{3}", page.text))))
        onward = [link for link in page.links if "cursor=" in link]
        address = onward[-1]
    assert [len(ids) for ids in seen] == [50, 50, 20]
    assert len(set().union(*seen)) == 120
    third = look(console, onward[0])
    assert sorted(set(re.findall(r"j\d{3}", third.text))) == seen[1]


def test_a_verb_on_all_that_match_needs_what_a_selector_can_say(console, store):
    enqueue(store, "a", tags=["eu"])

    def offered(**query: str) -> bool:
        return '"selector"' in str(
            [
                v
                for _, n, v in look(console, "/jobs", **query).attributes
                if n == "data-bulk"
            ]
        )

    assert not offered()
    assert offered(queue="q")
    assert offered(q="state:available kind:tk:msg")
    assert not offered(queue="q", q="tag:eu")
    assert not offered(queue="q", q="tk")
    assert not offered(q="kind:tk:msg")


# What must not happen


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(console, store, text):
    store.enqueue([envelope("a", queue=text, partition_key=text, tags=["<b>"])])
    claim = claim_one(store, queues=[text])
    store.ack(claim.lease_ref, Outcome.RETRY, error=text, logs=[text], delay_ms=60_000)
    steer(store).upsert_rate_class(
        RateClassConfig(name=text, limit=1, window_ms=1, burst=1)
    )
    steer(store).upsert_concurrency_limit(
        Ceiling(name=text, queue=text, max_concurrent=1)
    )
    beat(store, host=text, queues=(text,))
    tags = set()
    for address, query in (
        ("/", {}),
        ("/queues", {}),
        ("/queue", {"name": text}),
        ("/jobs", {"queue": text}),
        ("/job", {"id": "a"}),
        ("/rate-classes", {}),
        ("/limits", {}),
        ("/partitions", {"queue": text}),
        ("/workers", {}),
    ):
        page = look(console, address, **query)
        tags |= set(page.tags)
        assert page.tags.count("script") == 2, address
        assert not [n for _, n, _ in page.attributes if n.startswith("on")]
        response = console.get(address, query_string=query)
        for mark in "\u202e\u2066\u0007\u001b\u007f":
            assert mark not in re.sub(
                r'data-\w+="[^"]*"|value="[^"]*"', "", response.text
            )
    assert "img" not in tags
    queue = look(console, "/queue", name=text)
    assert any(text == act.get("typed") for act in queue.acts)


@pytest.mark.parametrize("text", [SCRIPT, HOSTILE[1], HOSTILE[4]])
def test_hostile_text_stays_text_in_every_other_field(console, store, text):
    """Ids, workers, tags, progress, steps, pauses, schedules, log fields."""
    name = text.encode("ascii", "ignore").decode()
    store.enqueue(
        [
            envelope(
                text, partition_key=text, rate_class=text, tags=["<b>&amp;"],
                sticky_worker=name, fingerprint=text,
            )
        ]
    )  # fmt: skip
    beat(store, worker_id=name, host=text)
    claim = claim_one(store, worker=name)
    assert store.progress is not None
    store.progress.write_job_progress(
        claim.lease_ref, ProgressUpdate(current=1, total=2, message=text)
    )
    steps = Checkpoint(
        completed_steps=(text,), in_progress_step="x" + text, step_set_hash="h"
    )
    store.checkpoint(claim.lease_ref, steps)
    line = {"level": text, "message": text, "at_ms": 1, "fields": {text: text}}
    store.ack(
        claim.lease_ref,
        Outcome.RETRY,
        error=text,
        logs=[json.dumps(line)],
        delay_ms=60_000,
    )
    steer(store).pause_rate_class(text, 60_000, text)
    steer(store).upsert_schedule(
        Schedule(
            id="s", kind="k", spec="@daily", next_run_ms=1, queue=text,
            partition_key=text, rate_class=text, sticky_worker=name,
        )
    )  # fmt: skip
    replayed = steer(store).replay_job(text, new_id=f"2{text}")
    tags = set()
    for address, query in (
        ("/jobs", {}),
        ("/jobs", {"q": f"id:{text}"}),
        ("/job", {"id": text}),
        ("/job", {"id": replayed}),
        ("/rate-classes", {}),
        ("/periodic", {"events": "s"}),
        ("/workers", {}),
        ("/quarantine", {}),
    ):
        page = look(console, address, **query)
        tags |= set(page.tags)
        assert page.tags.count("script") == 2, address
        assert not [n for _, n, _ in page.attributes if n.startswith("on")]
        shown = re.sub(
            r'data-\w+="[^"]*"|value="[^"]*"',
            "",
            console.get(address, query_string=query).text,
        )
        assert not re.search("[\u202e\u2066\u0007\u001b\u007f]", shown), address
    assert tags.isdisjoint({"img", "b-evil", "iframe"})


def test_what_an_address_says_is_no_markup(console):
    for address in ("/queue", "/job", "/jobs", "/partitions", "/periodic", "/nowhere"):
        query = dict.fromkeys(("name", "id", "q", "queue", "events", "range"), SCRIPT)
        response = console.get(address, query_string=query)
        assert "<script>alert" not in response.text
        assert response.status_code in (200, 400, 404)


@pytest.mark.parametrize("address", [*ADDRESSES, "/nowhere"])
def test_no_page_lets_foreign_code_run(console, store, address):
    enqueue(store, "a")
    response = console.get(address)
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'self'; script-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-cache"
    page = look(console, address, status=response.status_code)
    assert not [a for a in page.attributes if a[1] == "style"]
    assert [a for a in page.attributes if a[0] == "script" and a[1] == "src"]
    loaded = [
        v for t, n, v in page.attributes if n == "src" or (t, n) == ("link", "href")
    ]
    assert all(value.startswith("/static/") for value in loaded)


def test_no_page_shows_a_payload_or_a_header(console, store):
    secret = b'{"card": "4111-1111"}'
    store.enqueue([envelope("a", payload=secret, headers={"token": "geheim"})])
    for address in ADDRESSES:
        text = console.get(address).text
        assert "4111" not in text
        assert "geheim" not in text
        assert "eyJjYXJk" not in text


def test_the_number_of_reads_does_not_grow_with_queues_and_jobs(
    open_console, store, monkeypatch
):
    """A page asks the API for a bounded number of things, whatever there is."""
    for number in range(40):
        enqueue(store, *(f"{number}-{n}" for n in range(3)), queue=f"q{number:02d}")
    console = open_console(rate_limit=None)
    asked = asked_of_api(console, monkeypatch)
    for address in ("/", "/queues", "/queue?name=q01", "/jobs", "/limits", "/workers"):
        asked.clear()
        assert console.get(address).status_code == 200
        assert len(asked) <= 30, f"{address}: {len(asked)}"


def asked_of_api(console: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every path that pages ask the API for from now on."""
    api = console.application._api
    asked: list[str] = []

    def noting(environ: Any, start_response: Any) -> Any:
        asked.append(environ["PATH_INFO"])
        return api(environ, start_response)

    monkeypatch.setattr(console.application, "_api", noting)
    return asked


@pytest.mark.parametrize("address", ["/jobs", "/limits", "/partitions?queue=q"])
def test_a_page_that_offers_queues_by_name_asks_for_no_figures_of_them(
    console, store, monkeypatch, address
):
    enqueue(store, "a", queue="q")
    enqueue(store, "b", queue="other")
    asked = asked_of_api(console, monkeypatch)
    page = look(console, address)
    assert "/api/v1/queues" not in asked
    offered = [value for tag, name, value in page.attributes if tag == "option"]
    assert {"q", "other"} <= set(offered)


def test_a_ceiling_shows_how_full_it_is(console, store):
    for n in range(3):
        enqueue(store, f"p{n}", queue="q", partition_key=f"p{n}")
    for name, scope, most in (("whole", "queue", 5), ("each", "partition", 1)):
        steer(store).upsert_concurrency_limit(
            Ceiling(name=name, queue="q", scope=scope, max_concurrent=most)
        )
    claim_one(store)
    text = look(console, "/limits").text
    assert "1 of 5 running" in text
    assert "1 of 3 partitions full" in text


def test_a_page_of_queues_shows_fifty_and_leads_to_the_next(console, store):
    store.enqueue([envelope(f"{n:03}", queue=f"q{n:03}") for n in range(60)])
    first = look(console, "/queues")
    [onward] = [link for link in first.links if "cursor=" in link]
    seen = [
        set(re.findall(r"q\d{3}", page.text)) for page in (first, look(console, onward))
    ]
    assert [len(names) for names in seen] == [50, 10]
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("path", ["rate-classes", "limits"])
def test_a_page_of_limits_shows_a_hundred_and_leads_to_the_others(console, store, path):
    for number in range(120):
        name = f"c{number:03}"
        if path == "limits":
            ceiling = Ceiling(
                name=name, scope="class", rate_class="r", max_concurrent=9
            )
            steer(store).upsert_concurrency_limit(ceiling)
        else:
            set_rate_limit(store, name, 1, 1000, 1)

    def shown(address):
        text = look(console, address).text
        return {f"c{n:03}" for n in range(120) if f" c{n:03} " in text}

    first = shown(f"/{path}")
    assert len(first) == 100
    assert f"/{path}?cursor=100" in look(console, f"/{path}").links
    rest = shown(f"/{path}?cursor=100")
    assert (len(rest), len(first | rest)) == (20, 120)
    assert f"/{path}" in look(console, f"/{path}?cursor=100").links
    for cursor in ("x", "-1", "9" * 5000, "%D9%A3"):
        assert shown(f"/{path}?cursor={cursor}") == first
    assert shown(f"/{path}?cursor=999999999") == set()


def test_of_very_many_queues_the_workers_page_shows_those_without_a_worker_first(
    console, store
):
    store.enqueue([envelope(f"{n:03}", queue=f"q{n:03}") for n in range(205)])
    beat(store, queues=tuple(f"q{n:03}" for n in range(204)))
    page = look(console, "/workers")
    assert "q204 nobody" in page.text
    assert "q198 1" in page.text
    assert "q199 1" not in page.text
    assert "and 5 more" in page.text
