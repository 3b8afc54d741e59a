"""What handlers log is kept with their attempt, in bounds, whatever it is."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.context import JobContext
from headgate_sync.lifecycle import State
from headgate_sync.loglines import (
    LOG_CAP_REACHED,
    MAX_LOG_FIELDS,
    MAX_LOG_KEY_BYTES,
    MAX_LOG_LINE_BYTES,
    MAX_LOG_LINES,
    MAX_LOG_VALUE_BYTES,
    PREFIX,
    UNSUPPORTED_VALUE,
    LogLine,
    read_line,
)
from headgate_sync.registry import Registry
from headgate_sync.signals import RateLimited, Skip, Snooze
from headgate_sync.worker.logs import LogCapture
from tests.builders import START_MS, envelope, job, state_of
from tests.worker.rig import Bench, Gate, wait_for, working

APP = logging.getLogger("app.shop")


@pytest.fixture(autouse=True)
def _loud() -> Iterator[None]:
    """The application's own setting, without which INFO never leaves its logger."""
    for logger in (APP, logging.getLogger("headgate.job")):
        logger.setLevel(logging.DEBUG)
    yield
    for logger in (APP, logging.getLogger("headgate.job")):
        logger.setLevel(logging.NOTSET)


def put(store: Any, *ids: str, **fields: Any) -> None:
    for id in ids:
        store.enqueue([envelope(id, **{"kind": "k", "payload": b"{}", **fields})])


def run(store: Any, handler: Callable[..., Any], id: str = "a", **config: Any) -> Bench:
    """Run one job with the capture of a worker."""
    registry = Registry()
    registry.task("k")(handler)
    bench = Bench(store, registry, **config)
    put(store, id)
    bench.runner.capture.install()
    try:
        bench.run_next()
    finally:
        bench.runner.capture.uninstall()
    return bench


def kept(store: Any, id: str = "a") -> list[LogLine]:
    return [read_line(line) for line in job(store, id).errors[-1].logs]


def test_a_hundred_lines_are_kept_and_one_says_that_there_were_more(
    store: Any,
) -> None:
    def handler() -> None:
        for number in range(250):
            APP.info("line %d", number)

    run(store, handler)
    lines = job(store, "a").errors[-1].logs
    assert len(lines) == MAX_LOG_LINES + 1
    assert read_line(lines[99]).message == "line 99"
    assert lines[100] == LOG_CAP_REACHED == "... log cap reached (100 lines/attempt)"
    assert job(store, "a").errors[-1].outcome == "success"


def test_a_line_carries_level_time_and_fields(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        bench.now_s.advance(1.5)  # type: ignore[attr-defined]
        APP.warning("slow", extra={"rows": 3, "who": "Ä", "share": 0.5, "ok": True})
        ctx.log.info("sent", extra={"bytes": 42, "to": object()})
        try:
            raise KeyError("x")
        except KeyError:
            APP.exception("failed")
        APP.critical("bad")
        APP.debug("too quiet")

    registry = Registry()
    registry.task("k")(handler)
    bench = Bench(store, registry)
    put(store, "a")
    bench.runner.capture.install()
    try:
        bench.run_next()
    finally:
        bench.runner.capture.uninstall()
    slow, sent, failed, bad = kept(store)
    assert slow == LogLine(
        level="warn",
        message="slow",
        at_ms=START_MS + 1_500,
        fields={"ok": True, "rows": 3, "share": 0.5, "who": "Ä"},
    )
    assert (sent.level, sent.fields) == ("info", {"bytes": 42, "to": UNSUPPORTED_VALUE})
    assert (failed.level, failed.fields) == ("error", {"exception": "KeyError: 'x'"})
    assert bad.level == "error"


def test_the_level_of_the_worker_decides_what_is_kept(store: Any) -> None:
    def handler() -> None:
        APP.debug("detail")

    run(store, handler, capture_log_level=logging.DEBUG)
    assert [(line.level, line.message) for line in kept(store)] == [("debug", "detail")]


def test_the_lines_of_two_attempts_never_mix(store: Any) -> None:
    gate = Gate()

    def handler(ctx: JobContext) -> None:
        for number in range(20):
            APP.info("%s %d", ctx.job_id, number)
            if number == 10:
                gate.hold()

    registry = Registry()
    registry.task("k")(handler)
    put(store, "a", "b")
    with working(store, registry):
        gate.wait(2)
        gate.open()
        wait_for(
            lambda: all(state_of(store, id) is State.COMPLETED for id in "ab"), "done"
        )
    for id in "ab":
        messages = [line.message for line in kept(store, id)]
        assert messages == [f"{id} {number}" for number in range(20)]


def test_an_attempt_without_a_line_leaves_no_entry(store: Any) -> None:
    run(store, lambda: None)
    assert job(store, "a").errors == ()


@pytest.mark.parametrize("signal", [Snooze("1m"), RateLimited()])
def test_an_attempt_that_counts_for_nothing_leaves_no_lines(
    store: Any, signal: Exception
) -> None:
    def handler() -> None:
        APP.info("x")
        raise signal

    run(store, handler)
    assert job(store, "a").errors == ()


@pytest.mark.parametrize("signal", [ValueError("no"), Skip("no")])
def test_an_attempt_that_failed_keeps_its_lines(store: Any, signal: Exception) -> None:
    def handler() -> None:
        APP.info("x")
        raise signal

    run(store, handler)
    assert [line.message for line in kept(store)] == ["x"]


def test_tracked_threads_are_heard_and_bare_threads_are_not(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.spawn(APP.info, "tracked").result(10)
        bare = threading.Thread(target=APP.info, args=("bare",))
        bare.start()
        bare.join()

    run(store, handler)
    assert [line.message for line in kept(store)] == ["tracked"]


def test_a_line_that_comes_after_the_end_vanishes(store: Any) -> None:
    late: list[Any] = []

    def handler(ctx: JobContext) -> None:
        ctx.log.info("in time")
        late.append(ctx.log)

    bench = run(store, handler)
    bench.runner.capture.install()
    try:
        late[0].info("late")
    finally:
        bench.runner.capture.uninstall()
    assert [line.message for line in kept(store)] == ["in time"]


def test_this_packages_own_lines_are_not_the_handlers(store: Any) -> None:
    def handler() -> None:
        logging.getLogger("headgate_sync.worker").warning("ours")
        logging.getLogger("headgate_sync").warning("ours")
        logging.getLogger("headgate_synced").warning("theirs")

    run(store, handler)
    assert [line.message for line in kept(store)] == ["theirs"]


def test_two_workers_of_one_process_keep_a_line_once(store: Any) -> None:
    other = LogCapture(logging.INFO)
    other.install()
    try:
        run(store, lambda: APP.info("x"))
    finally:
        other.uninstall()
    assert [line.message for line in kept(store)] == ["x"]


class Nasty:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_nothing_that_is_logged_fails_the_handler(store: Any) -> None:
    def handler() -> None:
        APP.info("%d", "no number")
        APP.info(Nasty())
        APP.info("%s", Nasty())
        APP.info("a\0b", extra={"x": "\0", "n": 10**5000})
        try:
            raise ValueError(Nasty())
        except ValueError:
            APP.exception("nasty")

    raising, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        run(store, handler)
    finally:
        logging.raiseExceptions = raising
    assert state_of(store, "a") is State.COMPLETED
    messages = [line.message for line in kept(store)]
    assert messages == [
        "%d (arguments: TypeError)",
        "%s (arguments: RuntimeError)",
        "a\ufffdb",
        "nasty",
    ]
    assert kept(store)[2].fields == {"n": UNSUPPORTED_VALUE, "x": "\ufffd"}


def test_a_program_without_logging_still_sees_its_warnings(capsys: Any) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    capture = LogCapture(logging.INFO)
    capture.install()
    try:
        logging.getLogger("bare.program").warning("look at this")
        logging.getLogger("bare.program").info("not at this")
    finally:
        capture.uninstall()
        root.handlers = before
    assert capsys.readouterr().err == "look at this\n"


def test_the_worker_takes_its_handler_away_again(store: Any) -> None:
    before = list(logging.getLogger().handlers)
    with working(store, Registry()):
        assert len(logging.getLogger().handlers) == len(before) + 1
    assert logging.getLogger().handlers == before


# The stored form


def size(text: str) -> int:
    return len(text.encode())


def test_a_long_message_is_cut_between_characters() -> None:
    text = LogLine(level="info", message="ä" * 4000, at_ms=5).encode()
    line = read_line(text)
    assert size(text) <= MAX_LOG_LINE_BYTES
    assert line.truncated
    assert set(line.message) == {"ä"}
    assert len(line.message) >= 500


def test_fields_go_before_the_message_does() -> None:
    fields = {f"k{number:02}": "x" * 200 for number in range(20)}
    line = read_line(LogLine(level="info", message="m" * 300, fields=fields).encode())
    assert line.truncated
    assert line.message == "m" * 300
    assert list(line.fields) == sorted(fields)[: len(line.fields)]
    assert 5 <= len(line.fields) < 20


def test_names_values_and_their_number_are_bounded() -> None:
    long = LogLine(level="info", message="m", fields={"k" * 300: "v" * 2000})
    ((key, value),) = read_line(long.encode()).fields.items()
    assert (len(key), len(str(value))) == (MAX_LOG_KEY_BYTES, MAX_LOG_VALUE_BYTES)
    many = LogLine(level="info", message="m", fields={f"{n:02}": n for n in range(40)})
    line = read_line(many.encode())
    assert (len(line.fields), line.truncated) == (MAX_LOG_FIELDS, True)


def test_what_no_database_can_store_is_replaced() -> None:
    name = os.fsdecode(b"\xff")
    line = LogLine(
        level="info", message=f"open {name}", fields={name: name, "f": 1e400}
    )
    read = read_line(line.encode())
    assert read.message == "open \ufffd"
    assert read.fields == {"\ufffd": "\ufffd", "f": UNSUPPORTED_VALUE}


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3000)
)


@given(
    message=st.text(st.characters(), max_size=5000),
    fields=st.dictionaries(st.text(max_size=200), SCALARS, max_size=40),
    level=st.sampled_from(["debug", "info", "warn", "error"]),
)
def test_whatever_is_logged_fits_and_can_be_read(
    message: str, fields: dict[str, Any], level: str
) -> None:
    text = LogLine(level=level, message=message, at_ms=7, fields=fields).encode()
    assert size(text) <= MAX_LOG_LINE_BYTES
    assert "\0" not in text
    line = read_line(text)
    assert (line.level, line.at_ms) == (level, 7)
    assert line.encode() == text


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "",
        PREFIX,
        PREFIX + "{}",
        PREFIX + "[1]",
        PREFIX + '{"level":"loud","message":"m"}',
        PREFIX + json.dumps({"level": "info", "message": "m"}),
        PREFIX + "[" * 100_000,
    ],
)
def test_what_is_no_line_of_ours_is_shown_as_it_is(text: str) -> None:
    assert read_line(text) == LogLine(level="info", message=text)
