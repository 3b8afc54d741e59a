"""A PgBouncer of a test's own, which hands servers out per transaction."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.servers import WAIT_S, free_port, reachable_directory

SERVERS = 3
# Debian's package puts it where only root's path leads.
BINARY = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/bin")
_CONFIG = """\
[databases]
work = {target}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {servers}
max_client_conn = 100
query_wait_timeout = 20
"""


@contextmanager
def pgbouncer(database_url: str) -> Iterator[str]:
    """Yield the address of a database behind a pooler in transaction mode."""
    assert BINARY is not None
    target = conninfo_to_dict(database_url)
    known = {k: v for k, v in target.items() if k in _FORWARDED and v is not None}
    with reachable_directory() as directory:
        port = free_port()
        config = directory / "pgbouncer.ini"
        config.write_text(
            _CONFIG.format(
                target=" ".join(f"{k}='{v}'" for k, v in known.items()),
                port=port,
                servers=SERVERS,
            )
        )
        config.chmod(0o644)
        log = directory / "log"
        command = [BINARY, str(config)]
        if os.getuid() == 0:  # it refuses to run as root
            command[1:1] = ["-u", _account(str(known.get("host", "")))]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            url = make_conninfo(host="127.0.0.1", port=port, dbname="work", user="any")
            _wait_until_it_answers(url, process, log)
            yield url
        finally:
            process.terminate()
            process.wait(WAIT_S)


_FORWARDED = ("host", "port", "dbname", "user", "password")


def _account(host: str) -> str:
    """Who may run the pooler: the owner of the server's socket can reach it."""
    if host.startswith("/"):
        return pwd.getpwuid(Path(host).stat().st_uid).pw_name
    return "nobody"


def _wait_until_it_answers(
    url: str, process: subprocess.Popen[bytes], log: Path
) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()) from None
            time.sleep(0.02)
        else:
            return
