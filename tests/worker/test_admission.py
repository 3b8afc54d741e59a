"""When the worker asks for work: on stepped time, against a real store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.attempt import LiveAttempt
from headgate_sync.errors import BackendError, StoreUnavailable
from headgate_sync.lease import AdmissionBatch
from headgate_sync.policy import Poll
from headgate_sync.worker.admission import GATHER_MS, Admission
from tests.builders import QUEUE, WORKER, enqueue
from tests.worker.rig import START_S, Bench, Steps, Tap

NO_JITTER = Poll(jitter=0.0)


class Asking:
    """An admission over a tapped store, stepped from one due instant to the next."""

    def __init__(
        self,
        store: Any,
        *,
        notified: bool = False,
        uniform: Callable[[], float] = lambda: 0.0,
        **config: Any,
    ) -> None:
        self.tap = Tap(store)
        self.steps = Steps()
        config = {"poll": NO_JITTER, "capacity": 4, **config}
        self.bench = Bench(self.tap, now_s=self.steps, **config)
        self.fed: list[LiveAttempt] = []
        self.admission = Admission(
            self.tap,
            self.bench.config,
            self.bench.inflight,
            WORKER,
            self._take,
            now_s=self.steps,
            notified=notified,
            uniform=uniform,
        )

    def _take(self, attempts: list[LiveAttempt]) -> None:
        self.bench.inflight.add(attempts)
        self.fed += attempts

    def poll(self) -> int:
        """Go to the due instant and ask; returns the milliseconds since the start."""
        due_s = self.admission.due()
        assert due_s < float("inf"), "nothing is due"
        self.steps.at_s = max(self.steps.at_s, due_s)
        at_ms = self.steps.passed_ms
        self.admission.step()
        return at_ms

    @property
    def due_ms(self) -> int:
        return round((self.admission.due() - START_S) * 1000)

    def finish(self, count: int = 1) -> None:
        for attempt in self.fed[:count]:
            self.bench.inflight.finish(attempt, acks=False)
        del self.fed[:count]
        self.admission.slot_freed()


def test_an_idle_worker_asks_at_once_and_then_less_and_less_often(store: Any) -> None:
    asking = Asking(store)
    polls = [asking.poll() for _ in range(8)]
    assert polls == [0, 100, 300, 700, 1500, 3100, 5100, 7100]
    assert asking.tap.count("admit") == 8


def test_jitter_only_shortens_a_wait_and_does_not_add_up(store: Any) -> None:
    asking = Asking(store, poll=Poll(jitter=0.2), uniform=lambda: 0.5)
    polls = [asking.poll() for _ in range(4)]
    assert polls == [0, 90, 270, 630]


def test_work_after_a_long_idle_time_brings_back_the_short_wait(store: Any) -> None:
    asking = Asking(store)
    for _ in range(8):
        asking.poll()
    enqueue(store, "a")
    at_ms = asking.poll()
    assert [a.lease.job_id for a in asking.fed] == ["a"]
    assert asking.due_ms == at_ms + 50


def test_a_request_asks_for_the_free_slots_and_a_full_worker_for_nothing(
    store: Any,
) -> None:
    enqueue(store, "a", "b", "c")
    asking = Asking(store)
    asking.poll()
    enqueue(store, "d", "e")
    asking.poll()
    assert [request.capacity for request in asking.tap.given("admit")] == [4, 1]
    asking.admission.step()
    assert asking.tap.count("admit") == 2
    assert asking.admission.due() == float("inf")


def test_a_full_answer_is_followed_by_the_next_question_at_once(store: Any) -> None:
    enqueue(store, *"abcdef")
    asking = Asking(store)
    at_ms = asking.poll()
    assert asking.due_ms == at_ms
    asking.poll()
    asking.steps.advance(1.0)
    asking.finish(2)
    assert asking.due_ms == 1000
    asking.poll()
    assert [request.capacity for request in asking.tap.given("admit")] == [4, 2]
    assert len(asking.fed) == 4


def test_a_job_that_ends_lets_a_worker_with_slots_left_over_ask_again(
    store: Any,
) -> None:
    """A ceiling or a partition may have waited for just that job."""
    asking = Asking(store)
    enqueue(store, "a", "b")
    asking.poll()
    assert asking.due_ms == 50
    asking.steps.advance(0.010)
    asking.finish(1)
    assert asking.due_ms == 10


def test_a_job_that_ends_while_the_store_is_asked_is_not_overheard(store: Any) -> None:
    asking = Asking(store)
    enqueue(store, "a")
    asking.poll()

    def ends_meanwhile(real: Any, request: Any) -> Any:
        answer = real(request)
        asking.finish(1)
        return answer

    asking.tap.around["admit"] = ends_meanwhile
    assert asking.poll() == 50
    assert asking.due_ms == 50


@pytest.mark.parametrize(
    "error",
    [StoreUnavailable("away"), BackendError("refused")],
    ids=["away", "refused"],
)
def test_an_error_of_the_store_counts_as_an_empty_answer(
    store: Any, error: Exception
) -> None:
    asking = Asking(store)
    asking.tap.fail("admit", *[error] * 7)
    assert [asking.poll() for _ in range(7)] == [0, 100, 300, 700, 1500, 3100, 5100]
    enqueue(store, "a")
    asking.poll()
    assert [a.lease.job_id for a in asking.fed] == ["a"]


def test_a_fault_of_the_loop_itself_cannot_lose_a_claim(store: Any) -> None:
    enqueue(store, "a")

    def break_down() -> float:
        raise RuntimeError("no chance left")

    asking = Asking(store, uniform=break_down)
    with pytest.raises(RuntimeError, match="no chance"):
        asking.poll()
    assert [a.lease.job_id for a in asking.fed] == ["a"]


def test_being_woken_for_something_else_never_postpones_a_due_question(
    store: Any,
) -> None:
    asking = Asking(store)
    for _ in range(6):
        asking.poll()
    due_ms = asking.due_ms
    for _ in range(19):
        asking.steps.advance(0.1)
        asking.admission.step()
    assert asking.tap.count("admit") == 6
    assert asking.due_ms == due_ms == 5100


def test_a_notice_makes_the_question_due_now(store: Any) -> None:
    asking = Asking(store)
    for _ in range(6):
        asking.poll()
    asking.steps.advance(0.5)
    asking.admission.notice()
    assert asking.due_ms == asking.steps.passed_ms
    enqueue(store, "a")
    at_ms = asking.poll()
    assert len(asking.fed) == 1
    assert asking.due_ms == at_ms + 50


def test_notices_right_after_one_in_vain_wait_for_the_end_of_a_short_pause(
    store: Any,
) -> None:
    asking = Asking(store, uniform=lambda: 0.2)
    asking.poll()
    asking.admission.notice()
    at_ms = asking.poll()
    asking.steps.advance(0.001)
    asking.admission.notice()
    asking.admission.notice()
    assert asking.due_ms == at_ms + 30  # between half and all of 50 ms
    enqueue(store, "a")
    asking.poll()
    assert len(asking.fed) == 1


def test_a_worker_that_fell_asleep_looks_once_more_before_it_sleeps(
    store: Any,
) -> None:
    asking = Asking(store, notified=True)
    assert [asking.poll() for _ in range(4)] == [0, 0, 200, 600]
    enqueue(store, *"abc")
    assert asking.poll() == 1400
    assert [asking.poll() for _ in range(3)] == [1450, 1550, 1750]


def test_a_worker_that_was_full_looks_once_more_when_it_is_not(store: Any) -> None:
    asking = Asking(store, notified=True, capacity=2)
    enqueue(store, *"abc")
    assert asking.poll() == 0
    asking.finish(2)
    assert [asking.poll() for _ in range(4)] == [0, 0, 100, 300]
    assert asking.tap.given("admit")[1].capacity == 2


def test_an_answer_of_a_store_too_busy_to_note_the_sleeper_is_not_the_last(
    store: Any,
) -> None:
    asking = Asking(store, notified=True)
    busy = AdmissionBatch((), retry_after_ms=7)
    asking.tap.around["admit"] = lambda real, request: busy
    assert [asking.poll() for _ in range(2)] == [0, 7]
    asking.tap.around.clear()
    assert [asking.poll() for _ in range(2)] == [14, 14]


def test_jobs_that_are_signalled_in_quick_succession_are_fetched_together(
    store: Any,
) -> None:
    asking = Asking(store, notified=True)
    for _ in range(3):
        asking.poll()
    enqueue(store, "a")
    asking.steps.advance(0.050)
    asking.admission.notice()
    at_ms = asking.poll()
    for id in "bc":
        enqueue(store, id)
        asking.admission.notice()
    assert asking.due_ms == at_ms + GATHER_MS
    asking.poll()
    assert len(asking.fed) == 3


def test_a_dry_rate_class_is_asked_again_when_it_reopens(store: Any) -> None:
    asking = Asking(store)
    asking.tap.around["admit"] = lambda real, request: AdmissionBatch(
        (), retry_after_ms=7
    )
    assert [asking.poll() for _ in range(3)] == [0, 7, 14]


def test_a_quiet_worker_asks_for_nothing_until_it_is_loud_again(store: Any) -> None:
    asking = Asking(store)
    asking.poll()
    asking.admission.quiet = True
    asking.admission.notice()
    asking.admission.slot_freed()
    assert asking.admission.step() == float("inf")
    asking.steps.advance(60)
    asking.admission.quiet = False
    assert asking.poll() == 60_000


def test_every_question_has_a_lease_id_of_its_own_also_after_a_restart(
    store: Any,
) -> None:
    first, second = Asking(store), Asking(store)
    for asking in (first, second):
        asking.poll()
        asking.poll()
    ids = [r.lease_id for a in (first, second) for r in a.tap.given("admit")]
    assert len(set(ids)) == 4
    for lease_id in ids:
        worker, nonce, number = lease_id.split(":")
        assert worker == WORKER
        assert len(nonce) == 8
        assert int(nonce, 16) >= 0
        assert number in {"1", "2"}


def test_a_request_carries_the_worker_its_queues_and_its_lease(store: Any) -> None:
    asking = Asking(store, lease="7s", quantum=3)
    asking.poll()
    (request,) = asking.tap.given("admit")
    assert (request.worker, request.queues) == (WORKER, (QUEUE,))
    assert (request.lease_ms, request.quantum) == (7_000, 3)


def test_a_lease_counts_from_the_asking_and_not_from_the_answer(store: Any) -> None:
    enqueue(store, "a")
    asking = Asking(store)

    def slowly(admit: Any, request: Any) -> Any:
        batch = admit(request)
        asking.steps.advance(7)
        return batch

    asking.tap.around["admit"] = slowly
    asking.poll()
    (attempt,) = asking.fed
    assert attempt.lease_due_s == START_S + 30
