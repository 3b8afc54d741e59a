"""The command line of a worker: every mistake is one line and exit code 2."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate_sync.app import Headgate
from headgate_sync.errors import ConfigurationError
from headgate_sync.loggers import OneLine
from headgate_sync.registry import Registry
from headgate_sync.worker import WorkerConfig
from headgate_sync.worker.__main__ import AppFailed, load_app, longest_stop_s, main

ROOT = Path(__file__).parents[2]

MODULE = """
from headgate_sync.app import Headgate
from headgate_sync.registry import Registry

hg = Headgate("postgresql://127.0.0.1:1/none?connect_timeout=1")
unbound = Headgate()
registry = Registry()
number = 7

class Holder:
    hg = hg

def make():
    return hg

def make_number():
    return 7

def fail():
    raise LookupError("inside the application")

def with_argument(settings):
    return hg

@Registry().task("k")
def task(n: int = 0) -> None: ...
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: Any) -> Iterator[str]:
    """The name of an importable module, in the working directory."""
    name = f"app_{os.getpid()}_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_dependency\n")
    (tmp_path / f"{name}_raises.py").write_text("raise LookupError('at import')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield name
    for module in [m for m in sys.modules if m.startswith(name)]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("{app}", "expected module:attribute"),
        (":hg", "expected module:attribute"),
        ("{app}:", "expected module:attribute"),
        ("no_such_module_at_all:hg", "no module named no_such_module_at_all"),
        ("{app}.inner:hg", "no module named {app}.inner"),
        ("{app}:nothing", "has no attribute nothing"),
        ("{app}:number", "is a int, expected a Headgate"),
        ("{app}:make_number", "is a int, expected a Headgate"),
        ("{app}:Holder", "is a type, expected a Headgate"),
        ("{app}:with_argument", "is a function, expected a Headgate"),
        ("{app}:task", "is a FunctionTask, expected a Headgate"),
    ],
)
def test_what_is_no_application_is_said_in_one_line(
    app: str, name: str, text: str, capsys: Any
) -> None:
    assert main([name.format(app=app)]) == 2
    said = capsys.readouterr().err
    assert text.format(app=app) in said
    assert said.startswith("headgate worker: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("{app}_broken:hg", "No module named 'no_such_dependency'"),
        ("{app}_raises:hg", "LookupError: at import"),
        ("{app}:fail", "LookupError: inside the application"),
    ],
)
def test_what_the_application_raises_keeps_its_traceback(
    app: str, name: str, text: str, capsys: Any
) -> None:
    assert main([name.format(app=app)]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert "Traceback" in said


def test_an_application_is_a_facade_a_factory_or_a_registry(
    app: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HEADGATE_DATABASE_URL", "postgresql://127.0.0.1:1/none")
    module = __import__(app)
    assert load_app(f"{app}:hg") is module.hg
    assert load_app(f"{app}:Holder.hg") is module.hg
    assert load_app(f"{app}:make") is module.hg
    module.registry.task("k")(lambda: None)
    facade = load_app(f"{app}:registry")
    assert isinstance(facade, Headgate)
    assert facade.registry.kinds() == {"k"}
    assert isinstance(module.registry, Registry)
    with pytest.raises(ConfigurationError):
        load_app(f"{app}:number")
    with pytest.raises(AppFailed):
        load_app(f"{app}:fail")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--queues", ","], "at least one queue"),
        (["--threads", "0"], "--threads is 0"),
        (["--prefetch", "-1"], "--prefetch is -1"),
        (["--threads", "9999", "--prefetch", "2"], "--prefetch is 2, allowed is 0 to"),
        (["--lease", "30"], "--lease is '30'"),
        (["--lease", "10d"], "--lease is '10d', the limit is 86400000 ms"),
        (["--worker-id", "x" * 201], "--worker-id is 'xxx"),
        (["--connect-timeout", "soon"], "--connect-timeout"),
        (["--shutdown-timeout", "-1s"], "--shutdown-timeout"),
    ],
)
def test_a_setting_out_of_range_is_said_in_one_line(
    app: str, arguments: list[str], text: str, capsys: Any
) -> None:
    """Before the database is asked, which does not answer here."""
    arguments = [f"{part}" for part in arguments]
    if arguments[1].startswith("-"):
        arguments = ["=".join(arguments)]
    assert main([f"{app}:hg", *arguments]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{app}:hg", "--bogus"], "unrecognized arguments: --bogus"),
        (["{app}:hg", "--threads", "many"], "--threads: invalid int value: 'many'"),
        ([], "required: APP"),
    ],
)
def test_a_mistyped_command_line_is_said_in_one_line_and_a_hint(
    app: str, arguments: list[str], text: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([argument.format(app=app) for argument in arguments])
    assert ended.value.code == 2
    said, hint = capsys.readouterr().err.splitlines()
    assert said.startswith("headgate worker: ")
    assert text in said
    assert hint == "Try 'python -m headgate_sync.worker --help' for help."


def test_a_facade_without_a_database_is_said_in_one_line(app: str, capsys: Any) -> None:
    assert main([f"{app}:unbound"]) == 2
    said = capsys.readouterr().err
    assert "has no database yet" in said
    assert said.count("\n") == 1


def run(app: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headgate_sync.worker", app, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    "address",
    ["u:secret@127.0.0.1:1,127.0.0.1:2/x", "127.0.0.1:1/x?password=s%65cret",
     "u:top@secret@127.0.0.1:1/x"],
)  # fmt: skip
def test_a_worker_shows_no_password_when_nobody_answers(
    app: str, monkeypatch: Any, address: str
) -> None:
    monkeypatch.setenv("HEADGATE_DATABASE_URL", f"postgresql://{address}")
    done = run(
        *("headgate_sync.app:Headgate.from_env", "--queues", "q"),
        *("--connect-timeout", "300ms", "--log-level", "debug"),
    )
    assert done.returncode == 2
    assert "headgate worker: " in done.stderr
    assert "cret" not in done.stdout + done.stderr


def test_a_database_that_does_not_answer_is_said_in_one_line(app: str) -> None:
    done = run(f"{app}:hg", "--connect-timeout", "300ms")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    lines = [li for li in done.stderr.splitlines() if li.startswith("headgate worker:")]
    assert len(lines) == 1
    assert "Connection refused" in lines[0]  # the cause, and not that a pool is empty
    assert done.stderr.splitlines()[-1] == lines[0]


def test_a_database_without_the_tables_is_said_in_one_line(
    app: str, tmp_path: Path, database_url: str
) -> None:
    (tmp_path / f"{app}_empty.py").write_text(
        "from headgate_sync.app import Headgate\n"
        f"hg = Headgate({database_url!r}, schema='nothing_here')\n"
    )
    done = run(f"{app}_empty:hg")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "migrate up" in done.stderr.splitlines()[-1]


def test_the_help_names_every_option_and_exit_code(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for option in (
        "--queues",
        "--threads",
        "--prefetch",
        "--worker-id",
        "--lease",
        "--shutdown-timeout",
        "--no-duties",
        "--connect-timeout",
        "--log-level",
        "exit codes: 0 drained",
    ):
        assert option in said


def test_logging_is_set_up_only_where_nobody_did(
    app: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    main([f"{app}:unbound", "--log-level", "debug"])
    assert len(root.handlers) == 1
    assert isinstance(root.handlers[0].formatter, OneLine)
    assert root.level == logging.DEBUG
    kept = list(root.handlers)
    main([f"{app}:unbound", "--log-level", "error"])
    assert root.handlers == kept
    assert root.level == logging.DEBUG
    # The application says it when it is imported.
    monkeypatch.setattr(root, "handlers", [])
    (tmp_path / f"{app}_logs.py").write_text(
        f"import logging\nlogging.basicConfig(level='ERROR')\nfrom {app} import *\n"
    )
    main([f"{app}_logs:unbound", "--log-level", "debug"])
    assert len(root.handlers) == 1
    assert not isinstance(root.handlers[0].formatter, OneLine)
    assert root.level == logging.ERROR


@pytest.mark.parametrize(
    ("timeout", "seconds"), [("25s", 35), ("22s", 32), ("1s", 7), ("0s", 5)]
)
def test_a_stop_has_an_end_that_can_be_told(timeout: str, seconds: int) -> None:
    assert longest_stop_s(WorkerConfig(shutdown_timeout=timeout)) == seconds
