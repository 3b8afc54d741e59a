"""The command line as a process: terminals, pipes, signals, and what is missing."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headgate_sync.__main__ import main
from headgate_sync.operations import BulkRequest
from tests.builders import envelope

COMMAND = [sys.executable, "-m", "headgate_sync"]


def on_terminal(words, typed, environment, program=("-m", "headgate_sync")):
    """Run a command on a terminal of its own; its exit code and all it showed."""
    pid, screen = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, *program, *words], environment)
    os.write(screen, typed)
    shown = b""
    while True:
        try:
            piece = os.read(screen, 65_536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(screen)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_somebody_at_a_terminal_is_asked_and_sees_tables(pg, environment):
    pg.enqueue([envelope("a")])
    code, shown = on_terminal(["job", "delete", "a"], b"n\n", environment)
    assert (code, "delete job a?" in shown) == (4, True)
    assert pg.inspect.get_job("a") is not None
    code, shown = on_terminal(["queue", "ls"], b"", environment)
    assert (code, "unfinished" in shown) == (0, True)
    code, shown = on_terminal(["job", "delete", "a"], b"y\n", environment)
    assert (code, "deleted" in shown) == (0, True)
    assert pg.inspect.get_job("a") is None


def test_a_pipe_gets_json_and_errors_go_elsewhere(pg, environment):
    done = subprocess.run(
        [*COMMAND, "queue", "ls"], env=environment, capture_output=True, check=True
    )
    assert (json.loads(done.stdout), done.stderr) == ([], b"")
    done = subprocess.run(
        [*COMMAND, "job", "show", "x"],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, b"")
    assert done.stderr == b"headgate: job x does not exist\n"


def test_a_reader_that_leaves_early_gets_no_traceback(pg, environment):
    pg.enqueue([envelope(f"j{n}", partition_key="p" * 200) for n in range(200)])
    with subprocess.Popen(
        [*COMMAND, "job", "ls", "--limit", "200"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_a_terminal_of_another_encoding_still_gets_its_table(pg, environment):
    pg.inspect.set_queue_weight("漢字", 2)
    done = subprocess.run(
        [*COMMAND, "-o", "table", "queue", "ls"],
        env={**environment, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, rb"\u6f22\u5b57" in done.stdout) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_following_of_an_operation_and_not_the_operation(
    pg, environment, admin, number
):
    pg.enqueue([envelope("a")])
    pg.inspect.create_operation(BulkRequest(id="op", action="delete", queue="q"))
    with admin.transaction():
        # Another session is busy with it: nothing can be carried on.
        admin.execute("SELECT * FROM headgate.headgate_operation FOR UPDATE")
        with subprocess.Popen(
            [*COMMAND, "bulk", "show", "op"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever started the tests in the background had it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert process.stderr.readline() == "0 of 1 jobs\n"
            process.send_signal(number)
            try:
                _, rest = process.communicate(timeout=20)
            finally:
                process.kill()
            code = process.returncode
    assert code == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in rest
    assert pg.inspect.get_operation("op").status == "pending"


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [("stats", "click", "cli"), ("stats", "rich", "cli"), ("api", "werkzeug", "api"),
     ("api", "waitress", "api"), ("console", "jinja2", "console")],
)  # fmt: skip
def test_a_missing_extra_is_named_in_one_line(command, missing, extra, environment):
    program = (
        f"import sys; sys.modules[{missing!r}] = None;"
        f"from headgate_sync.__main__ import main; sys.exit(main([{command!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert missing in done.stderr
    assert f"headgate_sync[{extra}]" in done.stderr


@pytest.mark.parametrize(
    "command", [["headgate_sync", "stats"], ["headgate_sync.worker", "jobs:hg"]]
)
def test_a_machine_without_libpq_is_told_so_in_one_line(command, environment, tmp_path):
    (tmp_path / "jobs.py").write_text(
        "from headgate_sync import Headgate\nhg = Headgate.from_env()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env={**environment, "PSYCOPG_IMPL": "absent"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "headgate_sync[binary]" in done.stderr


@pytest.mark.parametrize(
    "words", ["--help", "queue ls", "migrate list", "-o table stats"]
)
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(pg, words, buffered, environment):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *words.split()],
            env={**environment, "PYTHONUNBUFFERED": buffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left" in done.stderr


def test_a_fault_of_the_system_that_is_none_of_the_output_keeps_its_trace(monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr("headgate_sync.cli.main.headgate.main", denied)
    with pytest.raises(PermissionError):
        main([])


@pytest.mark.parametrize("words", ["--help", "queue ls", "-o table stats"])
def test_a_closed_output_is_no_fault(pg, words, environment):
    command = f"exec {sys.executable} -m headgate_sync {words} >&-"
    done = subprocess.run(
        ["sh", "-c", command], env=environment, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_loads_neither_the_driver_nor_the_server():
    program = (
        "import sys; from headgate_sync.cli.main import headgate;"
        "headgate.main(['--help'], standalone_mode=False);"
        "print({'psycopg', 'rich.table', 'headgate_sync.embedded'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")


def test_a_probe_needs_no_database_and_no_driver(tmp_path):
    done = subprocess.run(
        [*COMMAND, "worker", "check", str(tmp_path / "ready")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no worker is ready" in done.stderr
