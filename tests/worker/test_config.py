"""Settings that exist are settings that work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.worker import HandBack, WorkerConfig
from headgate_sync.worker.config import make_worker_id


async def asynchronous(*given: object) -> None:
    """What a worker would call and never await."""


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = WorkerConfig()
    assert (config.queues, config.capacity, config.quantum) == (("default",), 16, 0)
    assert (config.lease_ms, config.shutdown_timeout_ms) == (30_000, 25_000)
    assert (config.cancel_grace_ms, config.stuck_threshold_ms) == (1_000, 10_000)
    assert (config.poll.floor_ms, config.poll.ceiling_ms) == (50, 2_000)
    assert (config.poll.multiplier, config.poll.jitter) == (2.0, 0.2)
    assert (config.duty_interval_ms, config.run_duties) == (1_000, True)
    assert (config.on_stuck, config.lease_expiry) == ("abandon", "cancel")
    assert config.catch_base_exceptions
    assert config.is_failure(ValueError())
    assert (config.unknown_kind.delay_ms, config.unknown_kind.max_claims) == (
        30_000,
        None,
    )


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("queues", (), "at least one queue"),
        ("queues", "mail", "one text"),
        ("queues", ("",), "empty name"),
        ("queues", ("x" * 256,), "queues has 256 bytes"),
        ("queues", tuple(f"q{n}" for n in range(257)), "queues has 257"),
        ("capacity", 0, "capacity is 0"),
        ("capacity", 10_001, "capacity is 10001"),
        ("capacity", True, "capacity must be int"),
        ("lease", "0ms", "lease"),
        ("lease", 30, "say the unit"),
        ("lease", "2d", "lease_ms"),
        ("quantum", -1, "quantum is -1"),
        ("shutdown_timeout", timedelta(seconds=-1), "shutdown_timeout"),
        ("stuck_threshold", "0s", "stuck_threshold"),
        ("duty_interval", "0s", "duty_interval"),
        ("worker_id", "", "worker_id"),
        ("worker_id", "x" * 201, "200 ASCII"),
        ("worker_id", "wörker", "200 ASCII"),
        ("on_stuck", "ignore", "abandon or hold"),
        ("lease_expiry", "ignore", "cancel or continue"),
        ("periodic_hooks", 5, "periodic_hooks must be a sequence"),
        ("periodic_hooks", (object(),), "object has no method begin"),
        ("death_handlers", 5, "death_handlers must be a sequence"),
        ("death_handlers", (5,), "death_handlers must be callable, got int"),
        ("death_handlers", (asynchronous,), "death_handlers must be a plain function"),
        ("stuck_handler", 5, "stuck_handler must be callable"),
        ("stuck_handler", asynchronous, "stuck_handler must be a plain function"),
        ("is_failure", None, "is_failure must be callable"),
        ("is_failure", asynchronous, "is_failure must be a plain function"),
        ("retry", "1s", "retry must be callable"),
        ("memory_sampler", 5, "memory_sampler must be callable"),
        ("event_bus", 5, "event_bus must be EventBus, got int"),
        ("unknown_kind", None, "unknown_kind must be HandBack, got NoneType"),
        ("poll", "50ms", "poll must be Poll, got str"),
        ("extensions", {}, "extensions must be Extensions, got dict"),
        ("run_duties", "no", "run_duties must be bool, got str"),
        ("async_cancel", "no", "async_cancel must be bool, got str"),
        ("sync_schedules", None, "sync_schedules must be bool"),
        ("catch_base_exceptions", 1, "catch_base_exceptions must be bool, got int"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(
    field: str, value: Any, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        WorkerConfig(**{field: value})


def test_a_drain_may_take_no_time_at_all() -> None:
    config = WorkerConfig(shutdown_timeout="0s", cancel_grace=timedelta(0))
    assert (config.shutdown_timeout_ms, config.cancel_grace_ms) == (0, 0)


@pytest.mark.parametrize(("delay", "max_claims"), [("0s", None), ("1s", 0), (5, None)])
def test_a_hand_back_without_delay_or_claims_is_refused(
    delay: Any, max_claims: Any
) -> None:
    with pytest.raises(InvalidRequest, match="unknown_kind"):
        HandBack(delay=delay, max_claims=max_claims)


def test_a_made_identity_is_fresh_and_leaves_room_for_lease_ids(
    monkeypatch: Any,
) -> None:
    assert make_worker_id() != make_worker_id()
    monkeypatch.setattr("socket.gethostname", lambda: "hö" + "x" * 300)
    made = make_worker_id()
    assert made.isascii()
    assert len(made) == 200
    WorkerConfig(worker_id=made)
