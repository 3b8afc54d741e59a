"""Own a development server: start it or join it, give it up, remove it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from headgate_sync.embedded import supervisor
from headgate_sync.embedded.binaries import (
    Account,
    Usable,
    choose_binaries,
    copy_binaries,
    find_binaries,
    run_as,
    server_account,
)
from headgate_sync.embedded.locks import FileLock
from headgate_sync.embedded.supervisor import Plan, State
from headgate_sync.errors import ConfigurationError

DIRECTORY_VARIABLE = "HEADGATE_EMBEDDED_DIR"
# Where root keeps the data when the server's account cannot enter root's home.
ROOT_DIRECTORY = Path("/var/lib/headgate_sync")

_DOOMED = ".removed-"  # ends the name of a directory that is being deleted
_TRIES = 10
_LOG_TAIL_BYTES = 4_000
_POLL_S = 0.02
# A supervisor bounds the start and the stop; this covers one after the other.
_WAIT_S = supervisor.READY_WITHIN_S + supervisor.STOP_WITHIN_S
# The socket and its name belong to this module: other values would hide the server.
_OWN_SETTINGS = frozenset(
    {"listen_addresses", "port", "unix_socket_directories", "unix_socket_permissions"}
)

logger = logging.getLogger("headgate_sync.embedded")


class EmbeddedServer:
    """This process's share in a server that runs while at least one process owns it.

    The ownership ends with `close` or with the process, however that ends; a detached
    process then stops the server. It belongs to the process that called `start`: a
    forked child owns nothing, and neither keeps the server nor takes it from its
    parent. A child that goes on using the database calls `start` itself.

    Attributes:
        data_dir: absolute; holds one directory for each major version of PostgreSQL.
        directory: that of the running version: data, locks and log.
        url: of the database `postgres`, for its superuser, over a local socket.
        version: of the running server, such as `15.18`.
    """

    def __init__(self, directory: Path, state: State, ownership: FileLock) -> None:
        self.data_dir = directory.parent
        self.directory = directory
        self.version = state.version
        host = quote(os.fsencode(state.socket_directory), safe="")
        self.url = (
            f"postgresql://{supervisor.SUPERUSER}@/postgres"
            f"?host={host}&port={supervisor.PORT}"
        )
        self._ownership = ownership

    @classmethod
    def start(
        cls,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """Own the server of a data directory, starting it unless it runs.

        Any number of processes and threads may call this at the same time. Without
        `data_dir` it is `HEADGATE_EMBEDDED_DIR`, else `headgate_sync` below
        `XDG_DATA_HOME` or `~/.local/share`, else, for a root whose home the server's
        account cannot enter, `/var/lib/headgate_sync`. As root the server runs as the
        account `postgres` or `nobody`, which is given the data and nothing else.

        Args:
            data_dir: made when it is missing; its parents keep their permissions.
            settings: server settings for as long as the server runs. A server that
                runs already must have been started with the same.
            environ: where the variables are looked up.

        Raises:
            ConfigurationError: no usable server is installed, the data directory
                cannot be used, the server runs with other settings, or it did not
                start; the text then ends with its log.
        """
        wanted = dict(settings or {})
        if refused := _OWN_SETTINGS & wanted.keys():
            raise ConfigurationError(
                f"the embedded server sets {', '.join(sorted(refused))} itself"
            )
        with _as_configuration_error("started"):
            account = server_account()
            base = data_directory(data_dir, environ, account)
            usable = choose_binaries(find_binaries(environ), account)
            directory = base / str(usable.major)
            state, ownership = _own(directory, usable, account, wanted)
        if wanted not in ({}, state.settings):
            ownership.close()
            raise ConfigurationError(
                f"the server in {directory} runs with other settings: {state.settings}"
            )
        return cls(directory, state, ownership)

    def close(self) -> None:
        """Give up this process's ownership; the last one stops the server.

        Returns at once. A second call, or one in a forked child, does nothing.
        """
        self._ownership.close()

    def remove(self) -> None:
        """Give up the ownership, then stop the server and delete its data.

        Raises:
            ConfigurationError: another process owns the server; nothing is deleted.
        """
        self.close()
        with _as_configuration_error("removed"):
            _remove_version(self.directory)
            _remove_if_empty(self.data_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def installed(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> list[tuple[Path, str | None]]:
    """The servers below a data directory, each with its version while it runs.

    Without `data_dir` it is the one that `EmbeddedServer.start` takes.

    Raises:
        ConfigurationError: the directory cannot be read.
    """
    with _as_configuration_error("found"):
        base = data_directory(data_dir, environ, server_account())
        found = sorted(base.iterdir()) if base.is_dir() else []
        states = [
            (path, supervisor.read_state(path)) for path in found if path.name.isdigit()
        ]
    return [
        (
            path,
            state.version if state and supervisor.accepts(state.socket_path) else None,
        )
        for path, state in states
    ]


def remove(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> Path | None:
    """Delete the data of all versions below a data directory that nobody owns.

    Without `data_dir` it is the one that `EmbeddedServer.start` takes. Other files in
    it are left alone, and it is removed when nothing is left.

    Returns:
        The data directory, or None if there was nothing to delete.

    Raises:
        ConfigurationError: a process owns a server there; its data are not deleted.
    """
    with _as_configuration_error("removed"):
        base = data_directory(data_dir, environ, server_account())
        found = sorted(base.iterdir()) if base.is_dir() else []
        versions = [path for path in found if path.name.isdigit()]
        doomed = [path for path in found if _DOOMED in path.name]
        for directory in versions:
            _remove_version(directory)
        for directory in doomed:
            # Left by a removal that was killed; one that goes on may be faster.
            shutil.rmtree(directory, ignore_errors=True)
        if not versions and not doomed:
            return None
        _remove_if_empty(base)
        return base


@contextlib.contextmanager
def _as_configuration_error(done: str) -> Iterator[None]:
    """Report what the system refuses as a fault of the set-up, which it is."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"the embedded server cannot be {done}: {error} "
            f"({DIRECTORY_VARIABLE} names another directory)"
        ) from error


def _own(
    directory: Path, usable: Usable, account: Account | None, settings: dict[str, str]
) -> tuple[State, FileLock]:
    """Take a share in the server of a directory, starting it if it does not run."""
    with _lock_start(directory, account):
        ownership = FileLock(directory / supervisor.OWNERS)
        try:
            ownership.share()  # waits while the last server is being stopped
            state = _running(directory)
            done = "joined" if state else "started"
            state = state or _launch(directory, usable, account, settings)
        except BaseException:
            ownership.close()
            raise
    logger.info("%s PostgreSQL %s in %s", done, state.version, directory)
    return state, ownership


def _lock_start(directory: Path, account: Account | None) -> FileLock:
    """Hold the right to start or remove the server; makes the directory."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            _make_directory(directory, 0o711 if account else 0o700)
            owner = directory.stat().st_uid
            if owner != os.geteuid():
                raise ConfigurationError(
                    f"{directory} belongs to user id {owner}: run as that user, "
                    f"or name another directory in {DIRECTORY_VARIABLE}"
                )
            starting = FileLock(directory / supervisor.START)
            starting.exclude()
            if starting.is_current():
                return starting
            starting.close()
    raise ConfigurationError(f"{directory} cannot be made, or is removed all the time")


def _running(directory: Path) -> State | None:
    """Return the state of the running server, or None when no supervisor lives.

    A supervisor without an answering server either starts it for a process that was
    killed meanwhile, or is about to end after its server did.
    """
    with FileLock(directory / supervisor.SUPERVISOR) as supervising:
        deadline = time.monotonic() + _WAIT_S
        while not supervising.try_exclude():
            state = supervisor.read_state(directory)
            if state and supervisor.accepts(state.socket_path):
                return state
            if time.monotonic() > deadline:
                tail = _log_tail(directory)
                raise ConfigurationError(
                    f"the server in {directory} does not answer:\n{tail}"
                )
            time.sleep(_POLL_S)  # what changes is in other processes: no event tells
    return None


def _launch(
    directory: Path, usable: Usable, account: Account | None, settings: dict[str, str]
) -> State:
    """Run a supervisor until it reports that the server is ready."""
    _warn_of_other_versions(directory)
    binaries = usable.binaries.directory
    if usable.needs_copy:
        binaries = copy_binaries(usable.binaries, directory)
    plan = Plan(
        directory=str(directory),
        binaries=str(binaries),
        version=usable.version,
        account=(account.uid, account.gid) if account else None,
        settings=settings,
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    log = os.open(plan.path(supervisor.LOG), flags, 0o600)
    try:
        # No descriptor of this process stays open in the detached one: an inherited
        # pipe would keep its reader waiting for as long as the server runs.
        started = subprocess.run(
            [
                _interpreter(),
                *("-I", "-S", supervisor.__file__),
                json.dumps(plan._asdict()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(log)
    state = supervisor.read_state(directory)
    if started.stdout != supervisor.READY or state is None:
        raise ConfigurationError(
            f"the server in {directory} did not start:\n{_log_tail(directory)}"
        )
    return state


def _interpreter() -> Path:
    """Return a Python; an application server may call itself `sys.executable`."""
    executable = Path(sys.executable or "")
    if executable.name.lower().startswith(("python", "pypy")):
        return executable
    return Path(sys.prefix, "bin", "python3")


def _log_tail(directory: Path) -> str:
    """Return the end of the present log; none of it is from earlier servers."""
    with (directory / supervisor.LOG).open("rb") as log:
        size_bytes = log.seek(0, os.SEEK_END)
        log.seek(max(0, size_bytes - _LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").strip()


def _warn_of_other_versions(directory: Path) -> None:
    """Say that an upgrade of PostgreSQL begins with empty data, when it does."""
    if (directory / supervisor.PGDATA).exists():
        return
    own = directory.name
    names = [path.name for path in directory.parent.iterdir()]
    if others := [name for name in names if name.isdigit() and name != own]:
        logger.warning(
            "%s begins empty: version %s cannot read the data of version %s beside it",
            directory,
            own,
            ", ".join(sorted(others)),
        )


def data_directory(
    data_dir: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    account: Account | None,
) -> Path:
    """Choose the data directory and check that the account can get to it."""
    if chosen := data_dir or environ.get(DIRECTORY_VARIABLE):
        base = Path(chosen).absolute()
        if account and not _can_enter(base, account):
            raise ConfigurationError(
                f"root's server runs as account {account.name}, which cannot enter "
                f"{base}: name a directory elsewhere"
            )
        return base
    try:
        home = environ.get("HOME") or Path.home()
    except RuntimeError as error:  # an account that is not in the user database
        raise ConfigurationError(
            f"the user has no home directory: set {DIRECTORY_VARIABLE}"
        ) from error
    shared = environ.get("XDG_DATA_HOME") or Path(home, ".local", "share")
    base = Path(shared, "headgate_sync").absolute()
    if account and not _can_enter(base, account):
        logger.info("account %s cannot enter %s", account.name, base)
        return ROOT_DIRECTORY
    return base


def _can_enter(path: Path, account: Account) -> bool:
    """Try whether the account gets to a path, or to where it will be made."""
    while not path.is_dir():
        path = path.parent
    return run_as(account, ["/bin/sh", "-c", 'cd -- "$0"', str(path)]).returncode == 0


def _make_directory(path: Path, mode: int) -> None:
    """Make a directory and its missing parents, all of one mode whatever the umask."""
    if not path.parent.is_dir():
        _make_directory(path.parent, mode)
    try:
        path.mkdir(mode)
    except FileExistsError:
        return
    path.chmod(mode)


def _remove_version(directory: Path) -> None:
    """Delete one version's directory once nobody owns its server."""
    with FileLock(directory / supervisor.START) as starting:
        starting.exclude()
        if not starting.is_current():
            return  # another process removed it
        with FileLock(directory / supervisor.OWNERS) as owners:
            # Held alone by a supervisor while it stops the server, else by owners.
            if not owners.try_exclude() and owners.try_share():
                raise ConfigurationError(
                    f"the server in {directory} is owned by a running process"
                )
        for name in (supervisor.SUPERVISOR, supervisor.SERVER):
            _wait_for_end(directory, name)
        # Renamed first: whoever starts meanwhile makes a new directory, instead of
        # working in one that is half deleted.
        doomed = directory.with_name(f"{directory.name}{_DOOMED}{os.getpid()}")
        directory.rename(doomed)
        shutil.rmtree(doomed)


def _wait_for_end(directory: Path, name: str) -> None:
    """Wait until no process holds the lock that lives as long as it does."""
    with FileLock(directory / name) as lock:
        deadline = time.monotonic() + _WAIT_S
        while not lock.try_exclude():
            if time.monotonic() > deadline:
                raise ConfigurationError(f"the server in {directory} does not stop")
            time.sleep(_POLL_S)


def _remove_if_empty(base: Path) -> None:
    try:
        base.rmdir()
    except OSError as error:  # another process was faster, or something is in it
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise
