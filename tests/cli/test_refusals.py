"""Exit codes, guards, and servers that do not answer as they should."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import click
import pytest

from headgate_sync.cli.main import headgate
from headgate_sync.cli.remote import MAX_ANSWER_BYTES
from tests.builders import envelope
from tests.cli.conftest import invoke, told

GUARDED = [
    ["job", "cancel", "a"],
    ["job", "delete", "a"],
    ["queue", "rm", "q", "--force"],
    ["bulk", "cancel", "--queue", "q", "--apply"],
    ["bulk", "delete", "--queue", "q", "--apply"],
    ["rate", "rm", "r"],
    ["limit", "rm", "l"],
    ["cron", "rm", "s"],
    ["worker", "signal", "w", "terminate"],
    ["worker", "signal", "w", "restart"],
]


@pytest.mark.parametrize("words", GUARDED, ids=" ".join)
def test_without_a_terminal_a_destructive_command_needs_yes(run, pg, words):
    pg.enqueue([envelope("a")])
    done = run(*words, code=4)
    assert "confirm with --yes" in done.stderr
    assert pg.inspect.get_job("a").state == "available"
    assert pg.inspect.get_operation("any") is None


@pytest.mark.parametrize("words", [["jobs"], ["history"]])
def test_trimming_needs_yes_too(clean, words):
    invoke("trim", *words, "--older-than", "1d", "--url", "postgresql://x", code=4)


def test_removing_the_development_database_needs_yes(clean):
    assert "--yes" in invoke("embedded", "rm", code=4).stderr


@pytest.mark.parametrize(
    "words",
    [
        ["job"],
        ["nonsense"],
        ["job", "ls", "--limit", "0"],
        ["job", "ls", "--limit", "201"],
        ["job", "reschedule", "a", "tomorrow"],
        ["job", "reschedule", "a", "2030-01-01T00:00:00"],
        ["job", "reschedule", "a", "99999999999999999999"],
        ["job", "enqueue", "k", "--payload", "@/no/such/file"],
        ["queue", "history", "q", "--since", "90"],
        ["queue", "limit", "q", "few"],
        ["rate", "set", "r", "--limit", "1"],
        ["rate", "set", "r", "--limit", "1", "--window", "1s", "--also", "x"],
        ["rate", "set", "r", "--limit", "1", "--window", "1s", "--also", "1/0s"],
        ["rate", "pause", "r", "--reason", "why"],
        ["limit", "set", "l", "--max", "1", "--scope", "galaxy"],
        ["worker", "signal", "w", "dance"],
        ["migrate", "down"],
        ["stats", "--output", "xml"],
        ["stats", "--api", "ftp://host"],
        ["stats", "--api", "http://user:secret@host"],
        ["stats", "--api", "http://[bad"],
        ["stats", "--api", "http://127.0.0.1:1", "--token", "a\nb"],
        ["stats", "--api", "http://127.0.0.1:1", "--url", "postgresql://x"],
        ["stats"],
        ["stats", "--url", "postgres//user:secret@host/db"],
        ["migrate", "status", "--url", "postgresql://user:secret@[host/db"],
        ["demo", "--url", "postgresql://host/db"],
    ],
    ids=" ".join,
)
def test_a_mistake_in_the_call_is_exit_code_2_and_says_no_secret(clean, words):
    done = invoke(*words, code=2)
    assert done.stderr
    assert "secret" not in done.output


def leaves(group=headgate, words=()):
    """Every command below a group, as it is called."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from leaves(command, (*words, name))
        else:
            yield (*words, name)


NOWHERE = {
    "database": ["--database-url", "postgresql://127.0.0.1:1/none"],
    "http": ["--api", "http://127.0.0.1:1"],
    "neither": [],
}


@pytest.mark.parametrize("mode", NOWHERE)
@pytest.mark.parametrize("words", list(leaves()), ids=" ".join)
def test_every_command_tells_a_wrong_option_in_a_line_and_where_its_help_is(
    clean, words, mode
):
    done = invoke(*NOWHERE[mode], *words, "--nonsense", code=2)
    told, hint = done.stderr.splitlines()
    assert told.startswith("headgate: No such option '--nonsense'")
    assert hint == f"Try 'headgate {' '.join(words)} --help' for help."
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["jobs", "ls"], "No such command 'jobs'. Did you mean 'job'?"),
        (["--nonsense", "stats"], "No such option '--nonsense'"),
        (["stats", "more"], "unexpected extra argument (more)"),
        (["job", "show"], "Missing argument 'ID'"),
        (["job", "ls", "--limit", "x\ny"], "'x\\ny' is not a valid integer range"),
        (["stats", "\x1b[31m"], r"argument (\x1b[31m)"),
        (["worker", "signal", "w"], "Choose from: quiet, resume, restart"),
        (["bulk", "retry"], "give --queue, --state, --kind, --partition or"),
        (["bulk", "delete", "--apply", "--yes"], "which jobs?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named_in_one_line(clean, words, says):
    told, hint = invoke(*words, code=2).stderr.splitlines()
    assert told.startswith("headgate: ")
    assert says in told
    assert hint.startswith("Try 'headgate")


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--files", "/no/such/folder"],
        ["embedded", "status"],
        ["worker", "check", "/no/such/file"],
        ["cron", "sync", "app:hg"],
        ["migrate", "up"],
        ["vacuum"],
        ["console", "--app", "nowhere:hg"],
    ],
    ids=" ".join,
)
def test_no_command_ignores_an_api_that_it_does_not_use(
    clean, monkeypatch, database_url, words
):
    monkeypatch.setenv("HEADGATE_DATABASE_URL", database_url)
    done = invoke("--api", "http://127.0.0.1:1", *words, code=2)
    assert "no --api" in done.stderr


def test_no_command_ignores_a_database_that_it_does_not_use(clean):
    url = "postgresql://127.0.0.1:1/none"
    done = invoke("--database-url", url, "demo", "--files", "/no/such", code=2)
    assert "headgate demo takes no --database-url" in done.stderr
    done = invoke("console", "--app", "shop:hg", "--database-url", url, code=2)
    assert "an --app has a database of its own" in done.stderr


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("5", "'5' has 1 of 2 or 3 parts"),
        ("5/1m/9/9", "'5/1m/9/9' has 4 of 2 or 3 parts"),
        ("many/1h", "LIMIT is 'many', expected a whole number"),
        ("5/1x", "WINDOW is '1x', expected a duration"),
        ("5/0s", "WINDOW is '0s', the minimum is 1 ms"),
        ("5/1h/x", "BURST is 'x', expected a whole number"),
        ("5/1h/0", "burst is 0, allowed is 1 to"),
    ],
)
def test_a_further_budget_that_cannot_be_read_names_its_part_and_the_form(
    clean, typed, says
):
    done = invoke(
        "rate", "set", "r", "--limit", "1", "--window", "1s", "--also", typed, code=2
    )
    assert f"'--also': {says}" in done.stderr
    assert "LIMIT/WINDOW[/BURST], such as 1000/1h or 1000/1h/50" in done.stderr


ADDRESSES = {
    "url": "postgresql://u:secret@127.0.0.1:1/x",
    "several hosts": "postgresql://u:secret@127.0.0.1:1,127.0.0.1:2/x",
    "escaped": "postgresql://u:s%65cret@127.0.0.1:1/x",
    "keywords": "host=127.0.0.1 port=1 user=u dbname=x password=secret",
    "parameter": "postgresql://127.0.0.1:1/x?user=u&password=secret",
    "other parameter": "postgresql://u:secret@127.0.0.1:1/x?nonsense=1",
    "an @": "postgresql://u:top@secret@127.0.0.1:1/x",
    "a colon": "postgresql://u:top:secret@127.0.0.1:1/x",
    "a slash": "postgresql://u:top/secret@127.0.0.1:1/x",
    "a hash": "postgresql://u:top#secret@127.0.0.1:1/x",
    "a bad escape": "postgresql://u:%zzsecret@127.0.0.1:1/x",
    "an open quote": "host=127.0.0.1 port=1 password='secret",
    "another database": "mysql://u:secret@127.0.0.1:1/x",
}


@pytest.mark.parametrize("words", [["stats"], ["migrate", "up"]], ids=" ".join)
@pytest.mark.parametrize("url", ADDRESSES.values(), ids=ADDRESSES)
def test_no_address_shows_its_password_when_nobody_answers(
    clean, monkeypatch, words, url
):
    monkeypatch.setenv("HEADGATE_DATABASE_URL", url)
    done = invoke(*words, code=None)
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith("headgate: ")
    assert "cret" not in done.output


def test_the_demo_does_not_quote_an_address_that_is_none(clean, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres//user:secret@host/db")
    assert "secret" not in invoke("demo", code=2).output


@pytest.mark.parametrize("words", [["stats"], ["migrate", "up"]])
@pytest.mark.parametrize("named_by", ["HEADGATE_DATABASE_URL", "DATABASE_URL"])
def test_a_database_that_does_not_answer_is_exit_code_1_and_who_named_it_is_told(
    clean, monkeypatch, words, named_by
):
    monkeypatch.setenv(named_by, "postgresql://127.0.0.1:1/none")
    done = invoke(*words, code=1)
    assert done.stderr.startswith(f"headgate: cannot use the database of {named_by}: ")
    assert done.stderr.count("\n") == 1


def test_the_option_is_told_where_it_named_the_database(clean, monkeypatch):
    monkeypatch.setenv("HEADGATE_DATABASE_URL", "postgresql://127.0.0.1:2/none")
    done = invoke("stats", "--url", "postgresql://127.0.0.1:1/none", code=1)
    assert "cannot use the database of --database-url: " in done.stderr
    assert "port 1 failed" in done.stderr


@pytest.mark.parametrize("words", [["stats"], ["migrate", "up"], ["vacuum"]])
def test_without_any_database_a_line_says_what_to_set(clean, words):
    [told] = invoke(*words, code=2).stderr.splitlines()
    for name in (
        "--database-url",
        "HEADGATE_DATABASE_URL",
        "DATABASE_URL",
        "HEADGATE_EMBEDDED=1",
        "HEADGATE_API",
    ):
        assert name in told


def test_an_api_that_does_not_answer_says_what_named_it(clean):
    [told] = invoke("stats", "--api", "http://127.0.0.1:1", code=1).stderr.splitlines()
    assert "no answer from http://127.0.0.1:1/api/v1, the API of --api or" in told


def test_a_variable_that_cannot_be_read_is_named(clean, monkeypatch):
    monkeypatch.setenv("HEADGATE_EMBEDDED", "maybe")
    [told] = invoke("stats", code=2).stderr.splitlines()
    assert told == "headgate: HEADGATE_EMBEDDED is 'maybe', expected 0 or 1"


def test_a_schema_without_tables_names_the_command_that_makes_them(clean, database_url):
    done = invoke("stats", "--url", database_url, "--schema", "nowhere", code=2)
    assert "headgate migrate up" in done.stderr


def test_an_option_behind_the_command_wins_over_the_environment(
    clean, monkeypatch, pg, database_url
):
    monkeypatch.setenv("HEADGATE_API", "http://127.0.0.1:1")
    assert told(invoke("queue", "ls", "--url", database_url)) == []
    invoke("queue", "ls", code=1)
    monkeypatch.delenv("HEADGATE_API")
    monkeypatch.setenv("HEADGATE_DATABASE_URL", database_url)
    assert told(invoke("queue", "ls")) == []
    assert told(invoke("--schema", "headgate", "queue", "ls")) == []


# Servers that are not what they should be.


@contextmanager
def answering(
    status: int, body: bytes, **headers: str
) -> Iterator[tuple[str, list[str]]]:
    """A server with one answer to everything; its address and what it was told."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            heard.append(f"{self.command} {self.path}\n{self.headers}")
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", heard
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "code", "says"),
    [
        (403, b'{"error": "read-only mode"}', 4, "403: read-only mode"),
        (404, b'{"error": "no such job"}', 3, "404: no such job"),
        (404, b"<html>", 1, "404: Not Found: is --api the control API?"),
        (401, b'{"error": "authentication required"}', 1, "is HEADGATE_TOKEN set?"),
        (409, b'{"error": "dup", "existing_id": "x"}', 1, "409: dup, existing_id=x"),
        (500, b"<html>\x1b[31m", 1, "500: Internal Server Error"),
        (503, b'{"error": "a\\u001b[31mb"}', 1, r"a\x1b[31mb"),
        (302, b"", 1, "302"),
        (200, b"<html>", 1, "is --api the control API?"),
        (200, b"[]", 1, "is --api the control API?"),
        (200, b"", 1, "is --api the control API?"),
        (200, b'"' + b"x" * MAX_ANSWER_BYTES + b'"', 1, "more than"),
    ],
)
def test_every_answer_ends_in_one_line_and_its_exit_code(
    clean, status, body, code, says
):
    with answering(status, body) as (url, _):
        done = invoke("job", "explain", "a", "--api", url, code=code)
    assert says in done.stderr
    assert done.stderr.rstrip("\n").isprintable()


def test_a_token_does_not_follow_a_redirect(clean):
    with (
        answering(200, b"[]") as (other, heard),
        answering(307, b"", Location=f"{other}/api/v1/rate-classes") as (url, first),
    ):
        done = invoke("rate", "ls", "--api", url, "--token", "t0p", code=1)
    assert "307" in done.stderr
    assert heard == []
    assert "Bearer t0p" in first[0]


def test_looking_sends_no_key_and_changing_one_that_is_new_each_time(
    clean, monkeypatch
):
    monkeypatch.setenv("HEADGATE_TOKEN", "from-the-environment")
    with answering(204, b"") as (url, heard):
        monkeypatch.setenv("HEADGATE_API", f"{url}/ops/")
        invoke("queue", "resume", "a/b")
        invoke("queue", "resume", "a/b")
    keys = [one.split("Idempotency-Key: ")[1].split("\n")[0] for one in heard]
    assert len(set(keys)) == 2
    assert heard[0].startswith("POST /ops/api/v1/queues/a%2Fb/resume ".rstrip())
    assert "Bearer from-the-environment" in heard[0]
    with answering(200, b"[]") as (url, heard):
        invoke("rate", "ls", "--api", f"{url}/api/v1/")
    assert "Idempotency-Key" not in heard[0]
    assert heard[0].startswith("GET /api/v1/rate-classes\n")


def test_a_server_that_hangs_up_is_exit_code_1(clean):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)

        thread = threading.Thread(target=hang_up)
        thread.start()
        done = invoke("rate", "ls", "--api", f"http://127.0.0.1:{port}", code=1)
        thread.join()
    assert "no answer" in done.stderr
