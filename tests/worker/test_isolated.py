"""Attempts in processes of their own, with real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from headgate_sync.cancel import CancelReason
from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.worker import ExitStatus, IsolatedProcess
from headgate_sync.worker.isolated import MAX_CHILD_OUTPUT_BYTES
from tests.builders import envelope, job, state_of, steer
from tests.worker import isolated_app
from tests.worker.rig import PATIENCE_S, Bench, wait_for, working

SUCCESS = 'print(\'HEADGATE/1 {"version":1,"outcome":"success"}\')\n'
PYTHONPATH = {"PYTHONPATH": str(isolated_app.ROOT)}


def script(text: str, **options: Any) -> IsolatedProcess:
    """A process that is a few lines of Python, in an interpreter that starts fast."""
    command = (sys.executable, "-I", "-S", "-c", textwrap.dedent(text))
    return IsolatedProcess(command=command, **options)


def put(store: Any, id: str = "a", **fields: Any) -> None:
    store.enqueue([envelope(id, **{"kind": "k", "payload": b"{}", **fields})])


def registry_of(process: IsolatedProcess) -> Registry:
    registry = Registry()

    @registry.task("k")
    @attrs.frozen
    class Work:
        pass

    registry.isolated(Work, process)
    return registry


def run(store: Any, process: IsolatedProcess, **fields: Any) -> None:
    put(store, **fields)
    bench = Bench(store, registry_of(process), now_s=time.monotonic)
    bench.run_next()


def first_line(store: Any, id: str = "a") -> str:
    return (job(store, id).errors[-1].error or "").partition("\n")[0]


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that waits for its parent has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


# The protocol


def test_the_last_answer_among_other_lines_counts(store: Any) -> None:
    run(
        store,
        script(
            """
            print("working")
            print('HEADGATE/1 {"version":1,"outcome":"skip","error":"not this one"}')
            print('HEADGATE/1 {"version":1,"outcome":"success"}')
            print("bye")
            """
        ),
    )
    assert state_of(store, "a") is State.COMPLETED


def test_a_process_reads_what_its_job_is(store: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    run(
        store,
        script(
            f"import sys\nopen({str(seen)!r}, 'w').write(sys.stdin.read())\n{SUCCESS}"
        ),
        payload=b"\x00\xff",
        partition_key="p",
        rate_class="c",
        weight=3,
        max_attempts=7,
        deadline_ms=2**50,
    )
    assert json.loads(seen.read_text()) == {
        "version": 1,
        "job_id": "a",
        "kind": "k",
        "schema_version": 1,
        "payload_base64": "AP8=",
        "queue": "q",
        "partition_key": "p",
        "rate_class": "c",
        "weight": 3,
        "attempt": 0,
        "crash_attempt": 0,
        "max_attempts": 7,
        "fence": 1,
        "deadline_ms": 2**50,
    }


@pytest.mark.parametrize(
    ("answer", "state", "attempt"),
    [
        ({"outcome": "skip", "error": "no user"}, State.ARCHIVED, 0),
        ({"outcome": "revoke"}, State.DELETED, None),
        ({"outcome": "snooze", "delay_ms": 5_000}, State.SCHEDULED, 0),
        ({"outcome": "rate_limited"}, State.AVAILABLE, 0),
        ({"outcome": "undecodable", "error": "what is this"}, State.UNDECODABLE, 0),
        ({"outcome": "retry", "error": "busy", "delay_ms": 70_000}, State.RETRYABLE, 1),
        ({"outcome": "retry"}, State.RETRYABLE, 1),
    ],
)
def test_every_outcome_can_be_answered(
    store: Any, answer: Any, state: State, attempt: int | None
) -> None:
    line = "HEADGATE/1 " + json.dumps({"version": 1, **answer})
    run(store, script(f"print({line!r})"))
    assert state_of(store, "a") is state
    if attempt is not None:
        assert job(store, "a").attempt == attempt
    if answer.get("outcome") == "retry" and "delay_ms" in answer:
        assert first_line(store) == "busy"
        wait_ms = job(store, "a").scheduled_at_ms - steer(store).store_now_ms()
        assert wait_ms == 70_000


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "ended without a line HEADGATE/1"),
        ("HEADGATE/1 {", "gave a malformed answer"),
        ("HEADGATE/1 []", "gave a malformed answer"),
        ("HEADGATE/1 {}", "gave a malformed answer"),
        ('HEADGATE/1 {"version":2,"outcome":"success"}', "unsupported version 2"),
        ('HEADGATE/1 {"version":true,"outcome":"success"}', "unsupported version True"),
        ('HEADGATE/1 {"version":1,"outcome":"great"}', "gave a malformed answer"),
        ('HEADGATE/1 {"version":1,"outcome":["retry"]}', "gave a malformed answer"),
        ('HEADGATE/1 {"version":1,"outcome":"snooze"}', "gave a malformed answer"),
        ('HEADGATE/1 {"version":1,"outcome":"retry","error":5}', "malformed answer"),
        ('HEADGATE/1 {"version":1,"outcome":"retry","delay_ms":-1}', "malformed"),
        ("HEADGATE/1 " + "[" * 20_000, "gave a malformed answer"),
    ],
)
def test_what_is_no_answer_is_a_failed_attempt(
    store: Any, line: str, text: str
) -> None:
    run(store, script(f"print({line!r})"))
    assert text in first_line(store)
    assert (state_of(store, "a"), job(store, "a").attempt) == (State.RETRYABLE, 1)


def test_an_exit_status_fails_the_attempt_whatever_was_answered(store: Any) -> None:
    run(store, script(SUCCESS + "import sys; sys.exit('  no luck  ')"))
    assert first_line(store) == (
        "isolated process ended with exit status 1; stderr: no luck"
    )


def test_a_segmentation_fault_is_a_failed_attempt_and_no_crash(store: Any) -> None:
    run(store, script(f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"))
    assert "was ended by signal 11" in first_line(store)
    assert (job(store, "a").attempt, job(store, "a").crash_attempt) == (1, 0)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_too_much_output_ends_the_process(store: Any, stream: str) -> None:
    run(
        store,
        script(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"),
    )
    assert f"wrote over 65536 bytes to {stream}" in first_line(store)
    assert len(job(store, "a").errors[-1].error or "") < 8_192


def test_exactly_as_much_output_as_allowed_is_fine(store: Any) -> None:
    line = 'HEADGATE/1 {"version":1,"outcome":"success"}'
    fill = MAX_CHILD_OUTPUT_BYTES - len(line) - 2
    run(store, script(f"print('x' * {fill}); print({line!r})"))
    assert state_of(store, "a") is State.COMPLETED


@pytest.mark.parametrize("reads", [True, False])
def test_a_large_payload_does_not_block(store: Any, reads: bool) -> None:
    text = "import sys\nassert len(sys.stdin.read()) > 1_300_000\n" if reads else ""
    run(store, script(text + SUCCESS), payload=b"x" * 1_000_000)
    assert state_of(store, "a") is State.COMPLETED


def test_the_environment_is_what_was_listed(store: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET", "x")
    text = "import os; assert set(os.environ) <= {'GIVEN', 'LC_CTYPE'}, os.environ\n"
    run(store, script(text + SUCCESS, env={"GIVEN": "1"}))
    assert state_of(store, "a") is State.COMPLETED
    text = "import os; assert os.environ['SECRET'] == 'x' and os.environ['PATH']\n"
    run(store, script(text + SUCCESS, inherit_env=True), id="b")
    assert state_of(store, "b") is State.COMPLETED


def test_a_program_that_does_not_exist_is_a_failed_attempt(store: Any) -> None:
    run(store, IsolatedProcess(command=("/nowhere/at-all",)))
    assert "/nowhere/at-all cannot be started" in first_line(store)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"command": "echo hello"}, "sequence of texts"),
        ({"command": ()}, "name an executable"),
        ({"command": ("x",), "env": {"A": 1}}, "env must hold texts"),
        ({"command": ("x",), "kill_grace": 5}, "kill_grace"),
    ],
)
def test_a_bad_process_is_refused_at_its_making(options: Any, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        IsolatedProcess(**options)


# Killing


def pid_of(path: Path) -> int:
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"), "it runs")
    return int(path.read_text())


def sleeper(tmp_path: Path, ignoring: bool = False) -> str:
    """A process with a child in its group; both sleep and note their numbers."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if ignoring else ""
    return (
        "import os, signal, time\n"
        + ignore
        + f"name = {str(tmp_path)!r} + ('/child' if os.fork() == 0 else '/parent')\n"
        "open(name, 'w').write(f'{os.getpid()}\\n')\n"
        "time.sleep(60)\n"
    )


def test_a_time_out_ends_the_whole_group_at_once(store: Any, tmp_path: Path) -> None:
    put(store, timeout_ms=700)
    with working(store, registry_of(script(sleeper(tmp_path)))):
        pids = [pid_of(tmp_path / name) for name in ("parent", "child")]
        wait_for(lambda: state_of(store, "a") is State.RETRYABLE, "it timed out")
        began_s = time.monotonic()
        wait_for(lambda: all(map(gone, pids)), "both are gone")
        assert time.monotonic() - began_s < 1.0
    assert first_line(store) == "attempt timed out after 700ms"
    assert (job(store, "a").attempt, job(store, "a").crash_attempt) == (1, 0)


@pytest.mark.parametrize("reason", list(CancelReason))
def test_every_cancellation_ends_the_process(
    store: Any, tmp_path: Path, reason: CancelReason
) -> None:
    put(store, timeout_ms=60_000)
    bench = Bench(store, registry_of(script(sleeper(tmp_path))), now_s=time.monotonic)
    (attempt,) = bench.admit()
    thread = threading.Thread(target=bench.run, args=(attempt,))
    thread.start()
    pids = [pid_of(tmp_path / name) for name in ("parent", "child")]
    attempt.cancel(reason)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    wait_for(lambda: all(map(gone, pids)), "both are gone")
    lost = reason is CancelReason.LEASE_LOST
    assert (state_of(store, "a") is State.RUNNING) == lost


@pytest.mark.parametrize("grace", ["20s", "365000d"])
def test_a_grace_lets_a_process_say_goodbye(
    store: Any, tmp_path: Path, grace: str
) -> None:
    text = f"""
        import signal, sys, time
        def end(*_):
            open({str(tmp_path / "said")!r}, "w").write("goodbye")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        with open({str(tmp_path / "up")!r}, "w") as up:
            up.write("1\\n")  # a signal in a destructor would raise into nothing
        time.sleep(60)
    """
    put(store, timeout_ms=60_000)
    registry = registry_of(script(text, kill_grace=grace))
    bench = Bench(store, registry, now_s=time.monotonic)
    (attempt,) = bench.admit()
    thread = threading.Thread(target=bench.run, args=(attempt,))
    thread.start()
    pid_of(tmp_path / "up")
    attempt.cancel(CancelReason.TIMEOUT)
    thread.join(PATIENCE_S)
    assert (tmp_path / "said").read_text() == "goodbye"
    assert first_line(store) == "attempt timed out after 60000ms"


def test_an_answer_within_the_grace_counts(store: Any, tmp_path: Path) -> None:
    """The work is done: to run it again would be worse."""
    text = f"""
        import signal, sys, time
        def end(*_):
            print('HEADGATE/1 {{"version":1,"outcome":"success"}}')
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        with open({str(tmp_path / "up")!r}, "w") as up:
            up.write("1\\n")  # a signal in a destructor would raise into nothing
        time.sleep(60)
    """
    put(store, timeout_ms=60_000)
    registry = registry_of(script(text, kill_grace="20s"))
    bench = Bench(store, registry, now_s=time.monotonic)
    (attempt,) = bench.admit()
    thread = threading.Thread(target=bench.run, args=(attempt,))
    thread.start()
    pid_of(tmp_path / "up")
    attempt.cancel(CancelReason.TIMEOUT)
    thread.join(PATIENCE_S)
    assert state_of(store, "a") is State.COMPLETED


def test_a_process_that_ignores_the_grace_is_killed_after_it(
    store: Any, tmp_path: Path
) -> None:
    registry = registry_of(script(sleeper(tmp_path, ignoring=True), kill_grace="100ms"))
    put(store, timeout_ms=60_000)
    bench = Bench(store, registry, now_s=time.monotonic)
    (attempt,) = bench.admit()
    thread = threading.Thread(target=bench.run, args=(attempt,))
    thread.start()
    pids = [pid_of(tmp_path / name) for name in ("parent", "child")]
    attempt.cancel(CancelReason.TIMEOUT)
    thread.join(PATIENCE_S)
    wait_for(lambda: all(map(gone, pids)), "both are gone")


def test_no_grace_outlasts_the_worker(store: Any, tmp_path: Path) -> None:
    """Its job is handed back, and must not run twice from then on."""
    process = script(sleeper(tmp_path, ignoring=True), kill_grace="1h")
    put(store)
    with working(
        store, registry_of(process), shutdown_timeout="50ms", cancel_grace="50ms"
    ) as worker:
        pids = [pid_of(tmp_path / name) for name in ("parent", "child")]
    wait_for(lambda: all(map(gone, pids)), "both are gone")
    assert worker.exit_status == ExitStatus(10, 1, 0)
    assert state_of(store, "a") is State.AVAILABLE


def test_what_a_process_leaves_behind_is_ended_with_it(
    store: Any, tmp_path: Path
) -> None:
    text = f"""
        import os, time
        if os.fork() == 0:
            open({str(tmp_path / "left")!r}, "w").write(f"{{os.getpid()}}\\n")
            time.sleep(60)
        while not os.path.exists({str(tmp_path / "left")!r}):
            time.sleep(0.01)
    """
    run(store, script(textwrap.dedent(text) + SUCCESS))
    assert state_of(store, "a") is State.COMPLETED
    wait_for(lambda: gone(pid_of(tmp_path / "left")), "it is gone")


def test_a_runaway_in_a_session_of_its_own_does_not_hold_up_the_thread(
    store: Any, tmp_path: Path
) -> None:
    """It keeps the pipes open; what matters is the end of the process itself."""
    text = f"""
        import os, time
        if os.fork() == 0:
            os.setsid()
            open({str(tmp_path / "left")!r}, "w").write(f"{{os.getpid()}}\\n")
            time.sleep(60)
        while not os.path.exists({str(tmp_path / "left")!r}):
            time.sleep(0.01)
    """
    began_s = time.monotonic()
    run(store, script(textwrap.dedent(text) + SUCCESS))
    assert time.monotonic() - began_s < PATIENCE_S
    assert state_of(store, "a") is State.COMPLETED
    os.kill(pid_of(tmp_path / "left"), signal.SIGKILL)


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_no_descriptor_and_no_thread_is_left(store: Any) -> None:
    registry = registry_of(script(SUCCESS))
    bench = Bench(store, registry, now_s=time.monotonic)
    put(store, "first")
    bench.run_next()
    before = descriptors()
    for number in range(5):
        put(store, f"j{number}")
        bench.run_next()
    assert descriptors() == before
    wait_for(
        lambda: all("isolated" not in t.name for t in threading.enumerate()),
        "the waiting threads are gone",
    )


# Handlers of Python in a child


@pytest.fixture
def python() -> Callable[..., Bench]:
    """A bench whose tasks run in fresh interpreters."""

    def make(store: Any) -> Bench:
        process = IsolatedProcess.python(
            "tests.worker.isolated_app:registry", env=PYTHONPATH, cwd=isolated_app.ROOT
        )
        registry = Registry()

        @registry.task("iso", isolated=process, retention="1h")
        def iso(how: str = "", code: int = 0) -> None:
            raise AssertionError("ran in the worker")

        registry.isolated(isolated_app.Mail, process)
        return Bench(store, registry, now_s=time.monotonic)

    return make


def go(bench: Bench, store: Any, payload: Any, **fields: Any) -> None:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    put(store, **{"kind": "iso", "payload": data, **fields})
    bench.run_next()


@pytest.mark.parametrize(
    ("how", "state", "line"),
    [
        ("", State.COMPLETED, None),
        ("context", State.COMPLETED, None),
        ("skip", State.ARCHIVED, "no such user"),
        ("snooze", State.SCHEDULED, None),
        ("revoke", State.DELETED, None),
        ("rate_limited", State.AVAILABLE, None),
        ("no_failure", State.AVAILABLE, None),
        ("error", State.RETRYABLE, "ValueError: bad value"),
        ("later", State.RETRYABLE, "tests.worker.isolated_app.TooMany: slow down"),
        ("exit", State.RETRYABLE, "panic: SystemExit: 3"),
        ("spawn", State.RETRYABLE, "panic in tracked task: SystemExit: 5"),
    ],
)
def test_a_handler_ends_in_a_child_as_it_would_here(
    memory: Any, python: Any, how: str, state: State, line: str | None
) -> None:
    store = memory.make_store()
    go(python(store), store, {"how": how})
    assert state_of(store, "a") is state
    if line is not None:
        assert first_line(store) == line
    if how == "error":
        text = job(store, "a").errors[-1].error or ""
        assert "isolated_app.py" in text
        assert "in iso" in text
    if how == "later":
        wait_ms = job(store, "a").scheduled_at_ms - steer(store).store_now_ms()
        assert wait_ms == 90_000


@pytest.mark.parametrize(
    ("payload", "line"),
    [
        (b"{}", "OSError: of the scope"),
        (b'{"fails":true}', "ValueError: of the handler"),
    ],
)
def test_what_is_around_handlers_is_around_them_in_the_child(
    memory: Any, payload: bytes, line: str
) -> None:
    store, entered = memory.make_store(), []
    registry = Registry()

    @registry.task(
        "scoped",
        isolated=IsolatedProcess.python(
            "tests.worker.isolated_app:hg", env=PYTHONPATH, cwd=isolated_app.ROOT
        ),
    )
    def scoped(fails: bool = False) -> None: ...

    @contextmanager
    def scope() -> Iterator[None]:
        entered.append(1)
        yield

    put(store, kind="scoped", payload=payload)
    Bench(store, registry, now_s=time.monotonic, around=[scope]).run_next()
    assert first_line(store) == line
    assert entered == []  # here nothing of the handler runs


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"payload": b"\xff"}, State.UNDECODABLE),
        ({"payload": b'{"nope":1}'}, State.UNDECODABLE),
        ({"payload": b'{"how":"die","code":7}'}, State.RETRYABLE),
        ({"kind": "mail", "payload": b'{"to":"ada"}'}, State.COMPLETED),
        ({"kind": "mail", "payload": b'{"to":"nobody"}'}, State.ARCHIVED),
    ],
)
def test_a_child_reads_its_own_payload(
    memory: Any, python: Any, fields: Any, state: State
) -> None:
    store = memory.make_store()
    go(python(store), store, **{"payload": b"", **fields})
    assert state_of(store, "a") is state
    assert job(store, "a").crash_attempt == 0


def test_a_child_whose_application_is_wrong_says_so(memory: Any) -> None:
    store = memory.make_store()
    process = IsolatedProcess.python(
        "tests.worker.nowhere:hg", env=PYTHONPATH, cwd=isolated_app.ROOT
    )
    run(store, process)
    assert "ended with exit status 1" in first_line(store)
    assert "no module named tests.worker.nowhere" in (
        job(store, "a").errors[-1].error or ""
    )


def test_what_a_process_cannot_do_is_refused_at_the_declaration() -> None:
    process = script(SUCCESS)
    registry = Registry()
    registry.task("r", isolated=process)(answers)
    with pytest.raises(InvalidRequest, match="returns a result"):
        registry.check()

    registry = Registry()

    @registry.task("m")
    @attrs.frozen
    class Mail:
        to: str

    registry.batch_handler(Mail, max_size=2, max_delay="1s")(lambda jobs: [])
    with pytest.raises(InvalidRequest, match="batch handler cannot be isolated"):
        registry.isolated(Mail, process)
    with pytest.raises(InvalidRequest, match="no task with a payload"):
        registry.isolated(int, process)
    with pytest.raises(InvalidRequest, match="module:attribute"):
        IsolatedProcess.python("app")
    other: Any = "app:hg"
    for declare in (
        lambda: registry.task("t", isolated=other)(lambda: None),
        lambda: registry.isolated(registry.task("u")(lambda: None), other),
    ):
        with pytest.raises(InvalidRequest, match="isolated must be IsolatedProcess"):
            declare()
    assert "t" not in registry.kinds()


def test_the_handler_of_a_class_may_be_isolated_where_it_is_declared(
    store: Any,
) -> None:
    registry = Registry()
    called = []

    @registry.task("k", retention="1h")
    @attrs.frozen
    class Letter:
        to: str

    handler = registry.handler(Letter, isolated=script(SUCCESS))
    handler(lambda job: called.append(job))
    put(store)
    Bench(store, registry, now_s=time.monotonic).run_next()
    assert state_of(store, "a") is State.COMPLETED
    assert called == []
    with pytest.raises(InvalidRequest, match="is isolated already"):
        registry.isolated(Letter, script(SUCCESS))


def test_a_handler_is_isolated_once_and_by_a_process_only() -> None:
    registry = Registry()

    @registry.task("m")
    @attrs.frozen
    class Mail:
        to: str

    other: Any = "app:hg"
    with pytest.raises(InvalidRequest, match="isolated must be IsolatedProcess"):
        registry.handler(Mail, isolated=other)
    registry.isolated(Mail, script(SUCCESS))
    with pytest.raises(InvalidRequest, match="is isolated already"):
        registry.handler(Mail, isolated=script(SUCCESS))(lambda job: None)
    with pytest.raises(InvalidRequest, match="batch handler cannot be isolated"):
        registry.batch_handler(Mail, max_size=2, max_delay="1s")(lambda jobs: [])
    registry.handler(Mail)(lambda job: None)  # the refused ones were not kept


def answers() -> int:
    """A handler with a result."""
    return 1


def test_an_isolated_task_travels_with_its_registry(store: Any) -> None:
    outer = Registry()
    outer.include(registry_of(script(SUCCESS)))
    put(store)
    Bench(store, outer, now_s=time.monotonic).run_next()
    assert state_of(store, "a") is State.COMPLETED
