"""Results, mid-run output and progress."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.lease import (
    MAX_PROGRESS_MESSAGE_BYTES,
    MAX_PROGRESS_TOTAL,
    MAX_RESULT_BYTES,
    JobOutput,
    JobProgress,
    JobResult,
    LeaseRef,
    ProgressUpdate,
)
from headgate_sync.lifecycle import Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    START_MS,
    claim_one,
    crash,
    enqueue,
    job,
    run_one,
    state_of,
    steer,
)

pytestmark = pytest.mark.needs("results", "outputs", "progress")
ALL_BYTES = bytes(range(256))


def turn_over(store, clock, claim):
    """Crash a claim and claim the job again."""
    crash(store, clock, claim)
    clock.advance_ms(1_000)
    store.promote_due(10)
    return claim_one(store)


def test_a_result_is_stored_with_the_completion(store):
    claim = run_one(store, "a")
    result = JobResult(7, b"\x00\x72\xff" + ALL_BYTES)
    store.results.ack_success_with_result(claim.lease_ref, result, logs=["l"])
    assert state_of(store, "a") is State.COMPLETED
    assert store.results.read_result("a") == result
    assert [entry.logs for entry in job(store, "a").errors] == [("l",)]


def test_an_empty_result_is_a_result(store):
    claim = run_one(store, "a")
    store.results.ack_success_with_result(claim.lease_ref, JobResult(1, b""))
    assert store.results.read_result("a") == JobResult(1, b"")


def test_readers_answer_none_without_a_job_or_a_value(store):
    run_one(store, "a")
    for id in ("a", "missing"):
        assert store.results.read_result(id) is None
        assert store.outputs.read_output(id) is None
        assert store.progress.read_progress(id) is None


def test_a_completion_without_a_result_has_none(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert store.results.read_result("a") is None


def test_only_the_present_holder_stores_a_result(backend, store, clock):
    first = run_one(store, "a")
    second = turn_over(store, clock, first)
    raised = unchanged_by(
        backend,
        lambda: store.results.ack_success_with_result(
            first.lease_ref, JobResult(1, b"old")
        ),
    )
    assert isinstance(raised, LeaseRejected)
    store.results.ack_success_with_result(second.lease_ref, JobResult(1, b"new"))
    assert store.results.read_result("a") == JobResult(1, b"new")


def test_a_result_goes_with_a_job_that_is_not_retained(store):
    claim = run_one(store, "a", retention_ms=0)
    store.results.ack_success_with_result(claim.lease_ref, JobResult(1, b"x"))
    assert store.results.read_result("a") is None
    assert state_of(store, "a") is State.DELETED


@pytest.mark.parametrize(
    ("version", "data"),
    [
        (0, b""),
        (-1, b""),
        (2**31, b""),
        (True, b""),
        (1, b"x" * (MAX_RESULT_BYTES + 1)),
        (1, "text"),
        (1, bytearray()),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_malformed_result_or_output_is_refused(backend, store, version, data):
    ref = run_one(store, "a").lease_ref
    for call in (
        lambda: store.results.ack_success_with_result(ref, JobResult(version, data)),
        lambda: store.outputs.write_job_output(ref, JobResult(version, data)),
    ):
        assert isinstance(unchanged_by(backend, call), InvalidRequest)
    assert state_of(store, "a") is State.RUNNING


def test_the_latest_output_is_visible_at_once_and_stays_after_a_failure(store):
    claim = run_one(store, "a")
    store.outputs.write_job_output(claim.lease_ref, JobResult(1, b"first"))
    written = store.outputs.write_job_output(
        claim.lease_ref, JobResult(2, b"\x00\x6f\xff")
    )
    expected = JobOutput(2, b"\x00\x6f\xff", 1, START_MS)
    assert written == expected
    assert store.outputs.read_output("a") == expected
    store.ack(claim.lease_ref, Outcome.RETRY)
    assert store.outputs.read_output("a") == expected


def test_an_output_says_which_claim_wrote_it_and_when(store, clock):
    first = run_one(store, "a")
    store.outputs.write_job_output(first.lease_ref, JobResult(1, b"old"))
    second = turn_over(store, clock, first)
    assert store.outputs.read_output("a").fence == 1
    store.outputs.write_job_output(second.lease_ref, JobResult(1, b"new"))
    assert store.outputs.read_output("a") == JobOutput(1, b"new", 2, clock.now_ms())


def test_the_old_holder_writes_neither_output_nor_progress(backend, store, clock):
    first = run_one(store, "a")
    second = turn_over(store, clock, first)
    store.outputs.write_job_output(second.lease_ref, JobResult(1, b"new"))
    store.progress.write_job_progress(second.lease_ref, ProgressUpdate(1, 2))
    for call in (
        lambda: store.outputs.write_job_output(first.lease_ref, JobResult(1, b"old")),
        lambda: store.progress.write_job_progress(
            first.lease_ref, ProgressUpdate(2, 2)
        ),
    ):
        raised = unchanged_by(backend, call)
        assert isinstance(raised, LeaseRejected)
        assert raised.missing is False


@pytest.mark.parametrize(
    "change",
    [
        lambda ref: LeaseRef(ref.job_id, "other", ref.fence),
        lambda ref: LeaseRef(ref.job_id, ref.lease_id, ref.fence + 1),
        lambda ref: LeaseRef(ref.job_id, ref.lease_id, ref.fence - 1),
    ],
    ids=["other lease", "next fence", "last fence"],
)
def test_a_foreign_lease_writes_nothing(backend, store, change):
    foreign = change(run_one(store, "a").lease_ref)
    for call in (
        lambda: store.outputs.write_job_output(foreign, JobResult(1, b"x")),
        lambda: store.progress.write_job_progress(foreign, ProgressUpdate(1, 2)),
        lambda: store.results.ack_success_with_result(foreign, JobResult(1, b"x")),
    ):
        raised = unchanged_by(backend, call)
        assert isinstance(raised, LeaseRejected)
        assert raised.missing is False


def test_nothing_is_written_for_a_job_that_is_gone(backend, store):
    ref = LeaseRef("gone", "lease", 1)
    for call in (
        lambda: store.outputs.write_job_output(ref, JobResult(1, b"x")),
        lambda: store.progress.write_job_progress(ref, ProgressUpdate(1, 2)),
        lambda: store.results.ack_success_with_result(ref, JobResult(1, b"x")),
    ):
        raised = unchanged_by(backend, call)
        assert isinstance(raised, LeaseRejected)
        assert raised.missing is True


def test_output_and_progress_stay_after_completion_and_go_with_the_row(store, clock):
    claim = run_one(store, "a", retention_ms=5)
    store.outputs.write_job_output(claim.lease_ref, JobResult(1, b"x"))
    store.progress.write_job_progress(claim.lease_ref, ProgressUpdate(7, 10, "most"))
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert store.outputs.read_output("a").data == b"x"
    assert store.progress.read_progress("a").current == 7, "nobody invents 100 %"
    clock.advance_ms(5)
    store.evict_retained(10)
    assert store.outputs.read_output("a") is None
    assert store.progress.read_progress("a") is None


def test_output_and_progress_go_at_the_ack_without_retention(store):
    claim = run_one(store, "a", retention_ms=0)
    store.outputs.write_job_output(claim.lease_ref, JobResult(1, b"x"))
    store.progress.write_job_progress(claim.lease_ref, ProgressUpdate(1, 1))
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert store.outputs.read_output("a") is None
    assert store.progress.read_progress("a") is None


def test_progress_is_visible_at_once_and_stays_after_a_failure(store):
    claim = run_one(store, "a")
    update = ProgressUpdate(7, 10, "encoding frame 700")
    expected = JobProgress(7, 10, "encoding frame 700", 1, START_MS)
    assert store.progress.write_job_progress(claim.lease_ref, update) == expected
    store.ack(claim.lease_ref, Outcome.RETRY)
    assert store.progress.read_progress("a") == expected


def test_progress_may_go_back_and_lose_its_message(store):
    claim = run_one(store, "a")
    store.progress.write_job_progress(claim.lease_ref, ProgressUpdate(7, 10, "x"))
    store.progress.write_job_progress(claim.lease_ref, ProgressUpdate(0, 3))
    found = store.progress.read_progress("a")
    assert (found.current, found.total, found.message) == (0, 3, None)


def test_the_largest_progress_is_exact(store):
    claim = run_one(store, "a")
    message = "é" * (MAX_PROGRESS_MESSAGE_BYTES // 2)
    update = ProgressUpdate(MAX_PROGRESS_TOTAL, MAX_PROGRESS_TOTAL, message)
    store.progress.write_job_progress(claim.lease_ref, update)
    found = store.progress.read_progress("a")
    assert (found.current, found.total, found.message) == (
        MAX_PROGRESS_TOTAL,
        MAX_PROGRESS_TOTAL,
        message,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 0),
        (11, 10),
        (-1, 10),
        (1, -1),
        (0, MAX_PROGRESS_TOTAL + 1),
        (1, 2, "x" * 513),
        (1, 2, "é" * 257),
        (1, 2, "nul\0"),
        (1, 2, "lone\ud800"),
        (1, 2, b"bytes"),
        (True, 2),
        (0.5, 2),
    ],
    ids=lambda arguments: str(arguments)[:24],
)
def test_malformed_progress_is_refused(backend, store, arguments):
    claim = run_one(store, "a")
    raised = unchanged_by(
        backend,
        lambda: store.progress.write_job_progress(
            claim.lease_ref, ProgressUpdate(*arguments)
        ),
    )
    assert isinstance(raised, InvalidRequest)


def test_writes_move_neither_job_nor_lease(store, clock):
    claim = run_one(store, "a")
    before = job(store, "a")
    clock.advance_ms(7)
    store.outputs.write_job_output(claim.lease_ref, JobResult(1, b"x"))
    store.progress.write_job_progress(claim.lease_ref, ProgressUpdate(1, 2))
    assert job(store, "a") == before


def test_large_values_are_exact(store):
    enqueue(store, "a")
    claim = claim_one(store)
    large = JobResult(1, ALL_BYTES * 40_960)
    store.outputs.write_job_output(claim.lease_ref, large)
    store.results.ack_success_with_result(claim.lease_ref, large)
    assert store.results.read_result("a") == large
    assert store.outputs.read_output("a").data == large.data
    assert steer(store).get_job("a").state == State.COMPLETED
