"""Run one server until its last owner is gone.

This file is run by path as a process of its own, with `python -I -S`, so that it starts
in a few milliseconds, whatever the package around it imports or the caller's
environment says. It uses the standard library alone.

The server is a child of this process. That makes its end an event instead of something
to be guessed from a process id in a file, and leaves no zombie that would look alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import locale
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

OWNERS = "owners.lock"  # shared by each owner; this process waits to hold it alone
START = "start.lock"  # held alone by whoever starts or removes the server
SUPERVISOR = "supervisor.lock"  # held alone by this process while it lives
SERVER = "server.lock"  # held by this process and inherited by all of the server's
PGDATA = "data"
LOG = "server.log"
STATE = "server.json"

READY = b"ready\n"
SUPERUSER = "postgres"
LOCALES = ("C.UTF-8", "C")  # the first where it exists; the encoding is UTF-8 anyway
PORT = 5432  # only a part of the socket's name: nothing listens on TCP
SOCKET_NAME = f".s.PGSQL.{PORT}"
# What a socket address holds, without the final zero byte.
SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107

READY_WITHIN_S = 60
STOP_WITHIN_S = 30
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Plan(NamedTuple):
    """What a starter asks for; travels as JSON in the argument of the process.

    Attributes:
        directory: absolute; holds the locks, the log and the data.
        binaries: the directory of `postgres` and `initdb`.
        version: theirs.
        account: user and group id to run the server as; None for the present user.
        settings: server settings, on top of the data directory's configuration.
    """

    directory: str
    binaries: str
    version: str
    account: tuple[int, int] | None
    settings: dict[str, str]

    def path(self, *names: str) -> Path:
        """Return the path of one of the files named above."""
        return Path(self.directory, *names)


class State(NamedTuple):
    """What a running server tells those who join; a file beside the data."""

    socket_directory: str
    version: str
    settings: dict[str, str]

    @property
    def socket_path(self) -> Path:
        """Where the server listens."""
        return Path(self.socket_directory, SOCKET_NAME)


def read_state(directory: Path) -> State | None:
    """Return what the server of a directory said last; None if it said nothing."""
    try:
        text = (directory / STATE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return State(**json.loads(text))


def accepts(socket_path: Path) -> bool:
    """True if a process listens on the socket."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(os.fspath(socket_path))
        except OSError:
            return False
        return True


def supervise(plan: Plan) -> None:
    """Start the server, report that it is ready, stop it after its last owner."""
    fcntl.flock(open_lock(plan.path(SUPERVISOR)), fcntl.LOCK_EX)
    server_lock = take_server_lock(plan)
    clear_leftovers(plan)
    lc_all = first_locale(LOCALES)
    if not plan.path(PGDATA).exists():
        initialise(plan, lc_all)
    socket_directory = make_socket_directory(plan)
    server = launch(plan, lc_all, socket_directory, server_lock)
    # A shutdown of the machine sends SIGTERM to everyone. The server itself would take
    # that as a request to wait for its clients; SIGINT makes it end them.
    signal.signal(signal.SIGTERM, lambda *_: server.send_signal(signal.SIGINT))
    wait_until_ready(plan, server)
    write_state(plan, State(socket_directory, plan.version, plan.settings))
    report_ready()
    threading.Thread(
        target=stop_after_last_owner, args=(plan, server), daemon=True
    ).start()
    server.wait()
    forget_state(plan)


def take_server_lock(plan: Plan) -> int:
    """Stop a server whose supervisor was killed; return the lock its processes held.

    The lock tells whether one of them lives. The process id in the server's own file
    may by now belong to a stranger, so it is used only while the server answers, and
    with the rights of the account that could have written anything into that file.
    """
    fd = open_lock(plan.path(SERVER))
    deadline = time.monotonic() + STOP_WITHIN_S
    while not try_lock(fd):
        if answers(plan):
            stop = ("stop", f"--pgdata={plan.path(PGDATA)}", "--mode=fast")
            spawn(plan, "C", "pg_ctl", *stop).wait()
        if time.monotonic() > deadline:
            fail("processes of an earlier server on these data do not end")
        time.sleep(_POLL_S)
    return fd


def open_lock(path: Path) -> int:
    """Open a lock file; closing it, or the end of this process, releases it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def try_lock(fd: int) -> bool:
    """Hold a lock alone if nobody holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def answers(plan: Plan) -> bool:
    """True if a server on these data listens, by whatever means it was started."""
    lines = read_pid_file(plan)
    return len(lines) > 4 and accepts(Path(lines[4], f".s.PGSQL.{lines[3]}"))


def clear_leftovers(plan: Plan) -> None:
    """Remove what a killed server left, which would keep the next one from starting.

    The server takes its old process id file for a living server if any process has
    that id now, which is likely in a container. The server lock, held here, proves that
    none of ours lives; a listening socket would betray one started by other means.
    """
    if answers(plan):
        fail(f"a server that was started by other means uses {plan.path(PGDATA)}")
    for name in ("postmaster.pid", SOCKET_NAME, f"{SOCKET_NAME}.lock"):
        plan.path(PGDATA, name).unlink(missing_ok=True)
    forget_state(plan)


def forget_state(plan: Plan) -> None:
    """Remove what told of a server that has ended, and its short socket directory."""
    if state := read_state(plan.path()):
        if Path(state.socket_directory) != plan.path(PGDATA):
            shutil.rmtree(state.socket_directory, ignore_errors=True)
        plan.path(STATE).unlink()


def read_pid_file(plan: Plan) -> list[str]:
    """Return the lines of the server's file: id first, port, socket, then status."""
    try:
        text = plan.path(PGDATA, "postmaster.pid").read_text(errors="surrogateescape")
    except FileNotFoundError:
        return []
    return text.splitlines()


def first_locale(names: Sequence[str]) -> str:
    """Return the first locale that the C library knows; changes this process's own."""
    for name in names:
        try:
            return locale.setlocale(locale.LC_ALL, name)
        except locale.Error:
            continue
    return fail(f"the C library knows none of the locales {', '.join(names)}")


def initialise(plan: Plan, lc_all: str) -> None:
    """Make the data directory in one step that a kill cannot leave half done."""
    partial = plan.path(f"{PGDATA}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(0o700)
    if plan.account:
        os.chown(partial, *plan.account)
    # Whoever can reach the socket is let in: it lies in a directory that only the
    # server's account and root can enter, and no network leads to it.
    initdb = spawn(
        plan,
        lc_all,
        "initdb",
        f"--pgdata={partial}",
        f"--username={SUPERUSER}",
        "--auth=trust",
        "--encoding=UTF8",
        f"--locale={lc_all}",
    )
    if initdb.wait() != 0:
        fail("initdb failed")
    partial.rename(plan.path(PGDATA))


def make_socket_directory(plan: Plan) -> str:
    """Return the data directory, or a short one where its path cannot be used.

    Clients take a comma for the end of the path. The short one is below `/tmp` itself:
    `TMPDIR` may be long or private as well.
    """
    path = os.fsencode(plan.path(PGDATA, SOCKET_NAME))
    if len(path) <= SOCKET_PATH_BYTES and b"," not in path:
        return os.fspath(plan.path(PGDATA))
    short = tempfile.mkdtemp(prefix="headgate-", dir="/tmp")
    if plan.account:
        os.chown(short, *plan.account)
    return short


def launch(
    plan: Plan, lc_all: str, socket_directory: str, server_lock: int
) -> subprocess.Popen[bytes]:
    """Start the server; each of its processes inherits the server lock."""
    quoted = socket_directory.replace('"', '""')
    settings = plan.settings | {
        "listen_addresses": "",
        "port": str(PORT),
        "unix_socket_directories": f'"{quoted}"',
        "unix_socket_permissions": "0700",
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    return spawn(
        plan,
        lc_all,
        "postgres",
        f"-D{plan.path(PGDATA)}",
        *options,
        keep=(server_lock,),
    )


def spawn(
    plan: Plan, lc_all: str, program: str, *arguments: str, keep: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Run a server program: as the account, logging, ending with this process."""
    uid, gid = plan.account or (None, None)
    # Variables such as PGPORT would change the server's settings.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
    return subprocess.Popen(
        [Path(plan.binaries, program), *arguments],
        cwd="/",
        env=environ | {"LC_ALL": lc_all},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,  # the log
        pass_fds=keep,
        preexec_fn=die_with_parent(),
        user=uid,
        group=gid,
        extra_groups=[] if plan.account else None,
    )


def die_with_parent() -> Callable[[], None] | None:
    """Return what makes the kernel interrupt a child when its parent is gone.

    Only Linux can. Elsewhere the next start stops a server that lost its supervisor.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))

    return ask


def wait_until_ready(plan: Plan, server: subprocess.Popen[bytes]) -> None:
    """Return when the server says in its file that it accepts connections."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=_POLL_S)
            fail("the server ended while it started")
        lines = read_pid_file(plan)
        if (
            len(lines) > 7
            and lines[0] == str(server.pid)
            and lines[7].strip() == "ready"
        ):
            return
    server.send_signal(signal.SIGINT)
    server.wait()
    fail(f"the server was not ready within {READY_WITHIN_S} s")


def write_state(plan: Plan, state: State) -> None:
    """Publish the state in one step, before anyone is told to read it."""
    partial = plan.path(f"{STATE}.partial")
    partial.write_text(json.dumps(state._asdict()), encoding="utf-8")
    partial.replace(plan.path(STATE))


def report_ready() -> None:
    """Tell the starter, which reads standard output to its end, and close that."""
    with contextlib.suppress(BrokenPipeError):  # the starter was killed: carry on
        os.write(1, READY)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def stop_after_last_owner(plan: Plan, server: subprocess.Popen[bytes]) -> None:
    """Wait until no process owns the server, then end it and its connections."""
    fcntl.flock(open_lock(plan.path(OWNERS)), fcntl.LOCK_EX)
    server.send_signal(signal.SIGINT)
    try:
        server.wait(timeout=STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        server.send_signal(signal.SIGQUIT)


def fail(reason: str) -> NoReturn:
    """End with the reason as the last line of the log."""
    raise SystemExit(f"headgate_sync: {reason}")


def main() -> None:
    """Detach from the starter, which waits only for the first of two processes."""
    if os.fork() != 0:
        os._exit(0)
    supervise(Plan(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
