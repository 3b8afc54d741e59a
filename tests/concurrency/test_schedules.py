"""Many nodes on the same schedules: each tick once, the trail never too long."""

from __future__ import annotations

from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate_sync.cron import next_after
from headgate_sync.memory.store import MemStore
from headgate_sync.schedule import FireStatus
from headgate_sync.worker.scheduler import scheduler_sweep
from tests.builders import START_MS, counts, steer
from tests.concurrency.threads import together
from tests.contract.test_schedules import event, events, fire, known, schedule
from tests.worker.test_scheduler import InSteps


def test_five_nodes_sweeping_at_once_make_one_job_per_tick(store, clock):
    steer(store).upsert_schedule(schedule(next_run_ms=START_MS))
    for _ in range(40):
        together([lambda: scheduler_sweep(store) for _ in range(5)])
        clock.advance_ms(1_000)
    assert [e[0] for e in events(store)] == [START_MS + n * 1_000 for n in range(40)]
    assert {e[2] for e in events(store)} == {"enqueued"}
    assert counts(store) == {"available": 40}


def test_nodes_with_and_without_the_one_transaction_agree(store, clock):
    steer(store).upsert_schedule(schedule(next_run_ms=START_MS))
    nodes = [store, InSteps(store), InSteps(store), store]
    for _ in range(25):
        together([lambda node=node: scheduler_sweep(node) for node in nodes])
        clock.advance_ms(1_000)
    assert counts(store) == {"available": 25}
    assert {e[0] for e in events(store)} == {START_MS + n * 1_000 for n in range(25)}
    assert known(store).next_run_ms == START_MS + 25_000


def test_of_many_that_fire_one_tick_one_does(store):
    one = steer(store).upsert_schedule(schedule())
    for _ in range(20):
        tick = one.next_run_ms
        answers = together([lambda one=one: fire(store, one, one.next_run_ms)] * 8)
        statuses = [answer.status for answer in answers]
        assert statuses.count(FireStatus.FIRED) == 1
        assert statuses.count(FireStatus.LOST) == 7
        one = evolve(one, next_run_ms=tick + 1_000)


def test_two_that_record_together_leave_exactly_a_hundred_events(store):
    for id in ("s", "gone"):
        if id == "s":
            steer(store).upsert_schedule(schedule())

        def record(id=id):
            for tick_ms in range(1, 201):
                steer(store).record_schedule_event(event(tick_ms, id=id))

        together([record, record])
        assert len(steer(store).list_schedule_events(id, limit=100)) == 100
        oldest = steer(store).list_schedule_events(id, limit=100)[-1].event_id
        assert steer(store).list_schedule_events(id, oldest, 100) == []


def test_upserts_pauses_and_sweeps_do_not_deadlock_or_double(store, clock):
    ids = [f"s{n}" for n in range(6)]

    def deploy():
        for id in ids:
            steer(store).upsert_schedule(schedule(id, next_run_ms=START_MS))

    def operate():
        for id in ids[::-1]:
            steer(store).set_schedule_paused(id, True)
            steer(store).set_schedule_paused(id, False)

    deploy()
    for _ in range(10):
        together([deploy, operate, *[lambda: scheduler_sweep(store)] * 3])
        scheduler_sweep(store)
        clock.advance_ms(1_000)
    assert counts(store) == {"available": 60}


SPECS = (
    "@every:700", "@every:1000", "* * * * *", "*/7 * * * * *",
    "CRON_TZ=Europe/Berlin */20 * * * *",
)  # fmt: skip
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sweep", "steps", "advance", "back", "pause", "resume", "full",
                         "free", "upsert"]),
        st.integers(1, 90_000),
    ),
    min_size=5, max_size=30,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=STEPS,
    specs=st.lists(st.sampled_from(SPECS), min_size=1, max_size=3, unique=True),
    on_missed=st.sampled_from(["skip", "run_once", "backfill"]),
)
def test_two_stores_side_by_side_fire_the_same_ticks(postgres, steps, specs, on_missed):
    """And with a limit above what is due, no tick of the plan is lost or doubled."""
    stores = (MemStore(), postgres.make_store())
    now_ms, full, paused = START_MS, False, False

    def set_clock() -> None:
        stores[0].freeze_clock_at(now_ms)
        postgres.clock.freeze_at(now_ms)

    set_clock()

    def deploy() -> None:
        for n, spec in enumerate(specs):
            for store in stores:
                steer(store).upsert_schedule(
                    schedule(
                        f"s{n}", spec=spec, next_run_ms=next_after(spec, now_ms),
                        on_missed=on_missed, backfill_limit=1_000,
                    )
                )  # fmt: skip

    deploy()
    for what, amount in steps:
        if what in ("advance", "back"):
            now_ms = max(1, now_ms + (amount if what == "advance" else -amount // 3))
            set_clock()
        elif what == "upsert":
            deploy()
        for store in stores:
            if what == "sweep":
                scheduler_sweep(store)
            elif what == "steps":
                scheduler_sweep(InSteps(store))
            elif what in ("pause", "resume"):
                steer(store).set_schedule_paused("s0", what == "pause")
            elif what in ("full", "free"):
                steer(store).set_enqueue_limit("q", 0 if what == "full" else None)
        full = what == "full" or (full and what != "free")
        paused = what == "pause" or (paused and what != "resume")
    for store in stores:
        steer(store).set_enqueue_limit("q", None)
        steer(store).set_schedule_paused("s0", False)
        scheduler_sweep(store)
    for n in range(len(specs)):
        id = f"s{n}"
        assert events(stores[0], id) == events(stores[1], id)
        assert known(stores[0], id) == known(stores[1], id)
    jobs = [envelope.id for envelope in stores[0].all_enqueued()]
    assert jobs == sorted(postgres.snapshot().jobs)
    if on_missed == "backfill":
        wanted = set()
        for n, spec in enumerate(specs):
            at_ms = START_MS
            end_ms = known(stores[0], f"s{n}").next_run_ms
            while (at_ms := next_after(spec, at_ms)) < end_ms:
                wanted.add(f"sched-s{n}-{at_ms}")
        assert set(jobs) == wanted
