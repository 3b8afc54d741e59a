"""What the end of an attempt means."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import tenacity

from headgate_sync.attempt import LiveAttempt, Settlement
from headgate_sync.cancel import CancelReason
from headgate_sync.errors import (
    AttemptCancelled,
    AttemptTimeout,
    ExtractionError,
    LeaseLost,
    MalformedPayload,
    ShutdownRequested,
    StaleCheckpoint,
    UnknownSchemaVersion,
)
from headgate_sync.lease import MAX_ERROR_BYTES, Claim, JobResult
from headgate_sync.lifecycle import Outcome
from headgate_sync.memory.store import MemStore
from headgate_sync.signals import Control, RateLimited, Revoke, Skip, Snooze
from headgate_sync.worker.outcomes import (
    Judge,
    RetryInfo,
    SpinWatch,
    Verdict,
    error_text,
    policy_delay_ms,
)
from tests.builders import envelope
from tests.worker.rig import Steps

JUDGE = Judge(retry=None, is_failure=lambda error: True)


def an_attempt(**fields: Any) -> LiveAttempt:
    claim = Claim(
        envelope=envelope("a", **fields),
        lease_id="l",
        fence=1,
        expires_at_ms=2_000_000,
        claimed_at_ms=1_000_000,
    )
    steps = Steps()
    return LiveAttempt(
        claim, MemStore(), lease_due_s=steps() + 30, returned_s=steps(), now_s=steps
    )


def cancelled(reason: CancelReason, **fields: Any) -> LiveAttempt:
    attempt = an_attempt(**fields)
    attempt.cancel(reason)
    return attempt


def raised(error: BaseException, attempt: LiveAttempt | None = None) -> Verdict | None:
    try:
        raise error
    except BaseException as caught:
        return JUDGE.raised(attempt or an_attempt(), caught)


def facts(verdict: Verdict | None) -> tuple[Outcome, str | None, int | None] | None:
    """Outcome, first line of the error, delay."""
    if verdict is None:
        return None
    first = None if verdict.error is None else verdict.error.partition("\n")[0]
    return verdict.outcome, first, verdict.delay_ms


def test_a_return_is_a_success_with_or_without_a_result() -> None:
    result = JobResult(1, b"x")
    assert JUDGE.returned(an_attempt(), None) == Verdict(outcome=Outcome.SUCCESS)
    with_result = JUDGE.returned(an_attempt(), result)
    assert with_result == Verdict(outcome=Outcome.SUCCESS, result=result)


@pytest.mark.parametrize(
    ("signal", "rate_class", "expected"),
    [
        (Skip("no such user"), "", (Outcome.SKIP, "no such user", None)),
        (Revoke(), "", (Outcome.REVOKE, None, None)),
        (Snooze("5m"), "", (Outcome.SNOOZE, None, 300_000)),
        (
            Snooze(timedelta(microseconds=400)),
            "",
            (Outcome.RETRY, "handler bug: snooze duration rounds to zero", None),
        ),
        (RateLimited(), "", (Outcome.RATE_LIMITED, None, None)),
        (RateLimited(), "smtp", (Outcome.RATE_LIMITED, None, None)),
        (RateLimited("7s"), "smtp", (Outcome.RATE_LIMITED, None, 7_000)),
        (RateLimited("7s"), "", (Outcome.SNOOZE, None, 7_000)),
    ],
)
def test_a_signal_says_what_happens_to_the_job(
    signal: Control, rate_class: str, expected: Any
) -> None:
    assert facts(raised(signal, an_attempt(rate_class=rate_class))) == expected


@pytest.mark.parametrize(
    "error",
    [
        MalformedPayload("no JSON"),
        UnknownSchemaVersion(4),
        StaleCheckpoint("a", "b"),
    ],
)
def test_what_cannot_be_read_is_undecodable(error: Exception) -> None:
    verdict = raised(error)
    assert verdict is not None
    assert verdict.outcome is Outcome.UNDECODABLE


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError("x"), "ValueError: x"),
        (
            ExtractionError("parameter", "n"),
            (
                "headgate_sync.errors.ExtractionError: "
                "cannot fill a handler parameter (parameter): n"
            ),
        ),
        (SystemExit(1), "panic: SystemExit: 1"),
        (KeyboardInterrupt(), "panic: KeyboardInterrupt: "),
        (GeneratorExit(), "panic: GeneratorExit: "),
        (MemoryError("full"), "panic: MemoryError: full"),
        (RecursionError("deep"), "panic: RecursionError: deep"),
        (
            AttemptTimeout("mine"),
            "headgate_sync.errors.AttemptTimeout: mine",
        ),
    ],
)
def test_every_other_exception_is_a_failed_attempt(
    error: BaseException, summary: str
) -> None:
    assert facts(raised(error)) == (Outcome.RETRY, summary, None)


@pytest.mark.parametrize(
    "error", [ValueError("x"), LeaseLost(), Skip("x"), SystemExit()]
)
def test_after_a_lost_lease_nothing_is_acked(error: BaseException) -> None:
    attempt = cancelled(CancelReason.LEASE_LOST)
    assert raised(error, attempt) is None
    assert JUDGE.returned(attempt, None) is None


@pytest.mark.parametrize("error", [ValueError("x"), LeaseLost(), Skip("x")])
def test_after_a_doubtful_lease_an_exception_hands_the_job_back(
    error: BaseException,
) -> None:
    attempt = cancelled(CancelReason.LEASE_EXPIRED)
    expected = (Outcome.RATE_LIMITED, "released: lease not confirmed", None)
    assert facts(raised(error, attempt)) == expected


def test_after_a_doubtful_lease_a_return_is_left_to_the_fence() -> None:
    verdict = JUDGE.returned(cancelled(CancelReason.LEASE_EXPIRED), None)
    assert facts(verdict) == (Outcome.SUCCESS, None, None)


def test_a_handler_that_the_shutdown_stopped_costs_no_attempt() -> None:
    attempt = cancelled(CancelReason.SHUTDOWN)
    expected = (Outcome.RATE_LIMITED, "released: worker shutdown", None)
    assert facts(raised(ShutdownRequested(), attempt)) == expected
    assert facts(raised(ValueError("x"), attempt)) == expected
    assert facts(JUDGE.returned(attempt, None)) == (Outcome.SUCCESS, None, None)


def test_a_signal_counts_also_after_a_cancellation() -> None:
    for reason in (CancelReason.SHUTDOWN, CancelReason.TIMEOUT):
        expected = (Outcome.SKIP, "done with it", None)
        assert facts(raised(Skip("done with it"), cancelled(reason))) == expected


def test_a_timed_out_attempt_names_its_limit_and_keeps_the_cause() -> None:
    verdict = raised(ValueError("cut"), cancelled(CancelReason.TIMEOUT, timeout_ms=100))
    assert facts(verdict) == (Outcome.RETRY, "attempt timed out after 100ms", None)
    assert verdict is not None
    assert "ValueError: cut" in (verdict.error or "")


def test_an_attempt_that_the_deadline_cut_is_given_up() -> None:
    attempt = cancelled(CancelReason.TIMEOUT, timeout_ms=9_000, deadline_ms=1_000_250)
    verdict = raised(ValueError("cut"), attempt)
    assert facts(verdict) == (Outcome.SKIP, "attempt timed out after 250ms", None)
    assert verdict is not None
    assert verdict.reason_code == "deadline_exceeded"


@pytest.mark.parametrize("settlement", list(Settlement))
def test_a_job_that_its_handler_settled_itself_gets_no_ack(
    settlement: Settlement,
) -> None:
    attempt = an_attempt()
    attempt.finished = settlement
    assert JUDGE.returned(attempt, None) is None
    assert raised(ValueError("after it"), attempt) is None


def test_an_exception_that_is_no_failure_hands_the_job_back() -> None:
    def only_values(error: Exception) -> bool:
        return isinstance(error, ValueError)

    judge = Judge(retry=None, is_failure=only_values)
    back = judge.raised(an_attempt(), KeyError("x"))
    assert facts(back) == (Outcome.RATE_LIMITED, None, None)
    failed = judge.raised(an_attempt(), ValueError("x"))
    assert failed is not None
    assert failed.outcome is Outcome.RETRY
    own = judge.raised(an_attempt(), KeyError("x"), is_failure=lambda error: True)
    assert own is not None
    assert own.outcome is Outcome.RETRY
    panic = judge.raised(an_attempt(), SystemExit(1))
    assert panic is not None
    assert panic.outcome is Outcome.RETRY


def test_a_broken_failure_test_counts_the_attempt(caplog: Any) -> None:
    def broken(error: Exception) -> bool:
        raise ZeroDivisionError

    verdict = Judge(retry=None, is_failure=broken).raised(an_attempt(), ValueError("x"))
    assert verdict is not None
    assert verdict.outcome is Outcome.RETRY
    assert "is_failure failed" in caplog.text


# Error texts


def test_an_error_text_shows_the_handlers_frames_and_its_causes_only() -> None:
    secret = "payload of a customer"

    def handler() -> None:
        kept = secret  # a local variable, which must not show
        try:
            raise KeyError("a")
        except KeyError as error:
            raise ValueError(f"b{len(kept)}") from error

    try:
        handler()
    except ValueError as error:
        text = error_text(error)
    first, blank, *rest = text.split("\n")
    assert first == "ValueError: b21"
    assert blank == ""
    trace = "\n".join(rest)
    assert "KeyError: 'a'" in trace
    assert "direct cause" in trace
    assert "in handler" in trace
    assert "customer" not in trace
    assert "headgate_sync/" not in trace


def test_an_error_text_fits_and_keeps_its_end() -> None:
    try:
        raise ValueError("ä" * 9_000)
    except ValueError as error:
        text = error_text(error)
    assert len(text.encode()) <= MAX_ERROR_BYTES
    assert len(text.partition("\n")[0].encode()) <= 2_048
    assert text.endswith("ä")


@pytest.mark.parametrize("text", ["a\0b", "lone \ud800 half", "two\nlines"])
def test_an_error_text_can_always_be_stored(text: str) -> None:
    stored = error_text(ValueError(text))
    assert "\0" not in stored
    stored.encode()
    assert stored.partition("\n")[0].startswith("ValueError: ")


def test_an_exception_that_cannot_say_itself_still_has_a_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert "(no text: RuntimeError)" in error_text(Mute())


# Retry policies


def info(attempt: int = 1, error: BaseException | None = None) -> RetryInfo:
    return RetryInfo(
        job_id="a",
        kind="k",
        queue="q",
        attempt=attempt,
        crash_attempt=0,
        max_attempts=25,
        error=error or ValueError("x"),
    )


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        (tenacity.wait_fixed(3), [3, 3, 3, 3]),
        (tenacity.wait_exponential(multiplier=1, max=3600), [1, 2, 4, 8]),
        (tenacity.wait_incrementing(1, 2), [1, 3, 5, 7]),
        (
            tenacity.wait_chain(*map(tenacity.wait_fixed, (1, 5, 30))),
            [1, 5, 30, 30],
        ),
        (tenacity.wait_fixed(1) + tenacity.wait_fixed(2), [3, 3, 3, 3]),
    ],
)
def test_a_tenacity_wait_is_a_retry_policy(wait: Any, seconds: list[int]) -> None:
    delays = [policy_delay_ms(wait, info(attempt)) for attempt in (1, 2, 3, 4)]
    assert delays == [second * 1000 for second in seconds]


def test_a_tenacity_wait_may_look_at_the_exception() -> None:
    wait = tenacity.wait_exception(lambda error: 4 if "slow" in str(error) else 2)
    assert policy_delay_ms(wait, info(error=ValueError("slow down"))) == 4_000
    assert policy_delay_ms(wait, info()) == 2_000


def test_a_tenacity_wait_stays_within_its_cap_for_thousands_of_attempts() -> None:
    wait = tenacity.wait_exponential_jitter(1, 3600, 2, 0)
    assert policy_delay_ms(wait, info(2_000)) == 3_600_000


def delay_of(policy: Any, error: Exception | None = None, **fields: Any) -> int | None:
    verdict = JUDGE.raised(an_attempt(**fields), error or ValueError("x"), retry=policy)
    assert verdict is not None
    assert verdict.outcome is Outcome.RETRY
    return verdict.delay_ms


def test_a_policy_gets_the_count_with_this_failure_and_may_say_text() -> None:
    assert delay_of(lambda info: f"{info.attempt * 10}s", attempt=2) == 30_000
    assert delay_of(lambda info: timedelta(days=30)) == 86_400_000


def test_a_delay_that_grew_beyond_all_durations_is_a_day() -> None:
    doubling, busy = tenacity.wait_exponential(multiplier=1), ValueError("busy")
    busy.retry_after = timedelta.max  # type: ignore[attr-defined]
    for policy in (doubling, lambda info: timedelta.max):
        assert delay_of(policy, attempt=60, max_attempts=100) == 86_400_000
    assert delay_of(None, busy) == 86_400_000


@pytest.mark.parametrize(
    "policy",
    [lambda info: 1 / 0, lambda info: "0ms", lambda info: 5, tenacity.wait_none()],
    ids=["raises", "zero", "bare number", "no wait"],
)
def test_a_policy_that_gives_no_delay_leaves_it_to_the_store(
    policy: Any, caplog: Any
) -> None:
    assert delay_of(policy) is None
    assert "the retry policy failed" in caplog.text


def test_the_handlers_policy_comes_before_the_workers() -> None:
    judge = Judge(retry=lambda info: "9s", is_failure=lambda error: True)
    attempt = an_attempt()
    worker = judge.raised(attempt, ValueError("x"))
    handler = judge.raised(attempt, ValueError("x"), retry=lambda info: "2s")
    assert worker is not None
    assert handler is not None
    assert (worker.delay_ms, handler.delay_ms) == (9_000, 2_000)


def test_an_exception_that_says_when_to_come_back_wins_over_the_policy() -> None:
    error = ValueError("busy")
    error.retry_after = timedelta(seconds=42)  # type: ignore[attr-defined]
    assert delay_of(lambda info: "2s", error) == 42_000


@pytest.mark.parametrize("after", [17, "soon", timedelta(0), None])
def test_another_libraries_retry_after_is_not_mistaken_for_ours(after: Any) -> None:
    error = ValueError("busy")
    error.retry_after = after  # type: ignore[attr-defined]
    assert delay_of(lambda info: "2s", error) == 2_000


def test_a_cancellation_without_a_token_is_an_ordinary_failure() -> None:
    verdict = raised(AttemptCancelled("by hand"))
    assert facts(verdict) == (
        Outcome.RETRY,
        "headgate_sync.errors.AttemptCancelled: by hand",
        None,
    )


# Hand-backs


def test_a_job_that_is_handed_back_without_end_is_reported_once_a_minute(
    caplog: Any,
) -> None:
    steps = Steps()
    watch = SpinWatch(steps)
    for _ in range(10):
        watch.handed_back(envelope("spinner"))
    assert "spinner" not in caplog.text
    for count in range(11, 31):
        watch.handed_back(envelope("spinner"))
        assert caplog.text.count("job spinner") == 1, count
    watch.handed_back(envelope("calm"))
    assert caplog.text.count("job spinner") == 1
    steps.advance(61)
    for _ in range(30):
        watch.handed_back(envelope("spinner"))
    assert caplog.text.count("job spinner") == 2
    assert "calm" not in caplog.text


def test_only_a_release_that_the_handler_wanted_without_delay_is_hot() -> None:
    hot = raised(RateLimited())
    assert hot is not None
    assert hot.hot
    for verdict in (
        raised(RateLimited("1s"), an_attempt(rate_class="c")),
        raised(ValueError(), cancelled(CancelReason.SHUTDOWN)),
        raised(ValueError("x")),
    ):
        assert verdict is not None
        assert not verdict.hot
