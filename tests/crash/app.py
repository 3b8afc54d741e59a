"""The application that the worker processes of these tests run."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import resource
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import psutil
import psycopg

from headgate_sync.app import Headgate
from headgate_sync.context import JobContext
from headgate_sync.postgres.store import PgStore
from headgate_sync.worker import IsolatedProcess, loops

QUEUE = "crash"
URL = os.environ["HEADGATE_DATABASE_URL"]
POINT = os.environ.get("CRASH_POINT", "")

MEMORY_LIMIT = os.environ.get("CRASH_MEMORY_LIMIT", "")
BREAKS = os.environ.get("CRASH_BREAKS", "")

hg = Headgate.from_env()
if MEMORY_LIMIT:
    hg.configure_worker(
        memory_limit_bytes=int(MEMORY_LIMIT), memory_check_interval="500ms"
    )


def _insert(statement: str, values: tuple[Any, ...]) -> None:
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute(statement, values)


def note_run(ctx: JobContext) -> None:
    """Note that the handler was entered, outside of any transaction of the job."""
    row = (ctx.job_id, ctx.lease.fence, os.getpid())
    _insert("INSERT INTO public.run VALUES (%s, %s, %s)", row)


def stay(point: str) -> None:
    """Say that a point is reached, and never leave it."""
    _insert("INSERT INTO public.reached VALUES (%s, %s)", (point, os.getpid()))
    threading.Event().wait()


@hg.task("effect", queue=QUEUE, retention="1h")
def effect(ctx: JobContext, at: str = "") -> None:
    """Write one row in the commit that completes the job; stay at a point at first."""
    note_run(ctx)
    first = ctx.crash_attempt == 0
    if first and at == "handler":
        stay("handler")

    def write(tx: Any) -> None:
        tx.connection.execute(
            "INSERT INTO public.effect VALUES (%s, %s)", (ctx.job_id, ctx.lease.fence)
        )
        if first and at == "transaction":
            stay("transaction")

    ctx.once(write)
    if first and at == "committed":
        stay("committed")


@hg.task("plain", queue=QUEUE, retention="1h")
def plain(ctx: JobContext) -> None:
    """Nothing but its run."""
    note_run(ctx)


@hg.task("dies", queue=QUEUE, retention="1h")
def dies(ctx: JobContext, how: str, seconds: float = 0) -> None:
    """End the process in a way that no handler can see, after some time."""
    note_run(ctx)
    threading.Event().wait(seconds)
    if how == "exit":
        os._exit(1)
    elif how == "abort":
        os.abort()
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


@hg.task("waits", queue=QUEUE, retention="1h")
def waits(ctx: JobContext, seconds: float, obeys: bool = True) -> None:
    """Work for a time; stop when told to, or not."""
    note_run(ctx)
    if obeys:
        ctx.sleep(seconds)
    else:
        threading.Event().wait(seconds)


@hg.task("awaits", queue=QUEUE, retention="1h")
def awaits(ctx: JobContext, point: str) -> None:
    """Work until the test has reached a point."""
    note_run(ctx)
    with psycopg.connect(URL, autocommit=True) as connection:
        asked = "SELECT 1 FROM public.reached WHERE point = %s"
        while not connection.execute(asked, (point,)).fetchall():
            ctx.sleep(0.05)


@hg.task("forks", queue=QUEUE, retention="1h")
def forks(ctx: JobContext) -> None:
    """End a process of its own as `multiprocessing` does."""
    note_run(ctx)
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=_say_and_stay, args=(there,))
    child.start()
    here.recv()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM


@hg.task("leaves", queue=QUEUE, retention="1h")
def leaves(ctx: JobContext) -> None:
    """Leave a process behind that has whatever the worker has open."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=_say_and_stay, args=(there,))
    child.start()
    here.recv()
    _insert("INSERT INTO public.reached VALUES (%s, %s)", ("leaves", child.pid))
    note_run(ctx)


def _say_and_stay(pipe: Any) -> None:
    pipe.send("up")
    threading.Event().wait()


@hg.task("closes", queue=QUEUE, retention="1h")
def closes(ctx: JobContext) -> None:
    """Close what the worker needs, as the end of a script does."""
    note_run(ctx)
    hg.close()


@hg.task(
    "apart",
    queue=QUEUE,
    retention="1h",
    isolated=IsolatedProcess.python("tests.crash.app:hg", inherit_env=True),
)
def apart(ctx: JobContext) -> None:
    """Never end, in a process of its own."""
    note_run(ctx)
    threading.Event().wait()


@hg.task("hogs", queue=QUEUE, retention="1h")
def hogs(ctx: JobContext, obeys: bool) -> None:
    """Hold every connection of the application; let go when told to, or not."""
    note_run(ctx)
    pool = ctx._attempt.store._db.pool  # type: ignore[attr-defined]
    with ExitStack() as held:
        for _ in range(pool.max_size):
            held.enter_context(pool.connection(timeout=60))
        _insert("INSERT INTO public.reached VALUES (%s, %s)", ("hogs", os.getpid()))
        if obeys:
            ctx.sleep(600)
        else:
            threading.Event().wait(600)


@hg.task("silences", queue=QUEUE, retention="1h")
def silences(ctx: JobContext) -> None:
    """Keep the lock of the log for ever: no line is written any more."""
    note_run(ctx)
    for handler in logging.getLogger().handlers:
        handler.acquire()
    _insert("INSERT INTO public.reached VALUES (%s, %s)", ("silences", os.getpid()))
    threading.Event().wait(600)


@hg.task("holds", queue=QUEUE, retention="1h")
def holds(ctx: JobContext, seconds: float) -> None:
    """Work for a time, and note when that began and ended by the database's clock."""
    row = (ctx.job_id, os.getpid())
    _insert("INSERT INTO public.held VALUES (%s, %s, clock_timestamp(), NULL)", row)
    threading.Event().wait(seconds)
    _insert(
        "UPDATE public.held SET until = clock_timestamp()"
        " WHERE job = %s AND pid = %s AND until IS NULL",
        row,
    )


def _add() -> None:
    """In the interpreter, which hands itself on."""
    sum(number * number for number in range(100_000))


def _divide() -> None:
    """In C that lets no other thread run meanwhile."""
    divmod(_DIVIDEND, _DIVISOR)


def _digest() -> None:
    """In C beside other threads."""
    hashlib.sha256(_MEBIBYTES).digest()


_DIVIDEND, _DIVISOR = 7**40_000, 3**30_000
_MEBIBYTES = bytes(16 * 1024 * 1024)
_BUSY = {"adds": _add, "divides": _divide, "digests": _digest}


@hg.task("burns", queue=QUEUE, retention="1h")
def burns(ctx: JobContext, how: str, seconds: float) -> None:
    """Keep the processor busy, and never look up."""
    note_run(ctx)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        _BUSY[how]()


@hg.task("hungers", queue=QUEUE, retention="1h")
def hungers(ctx: JobContext) -> None:
    """Take all memory that a limit leaves to the process."""
    note_run(ctx)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, resource.RLIM_INFINITY))
    taken = []
    while True:
        taken.append(bytearray(2**22))


@hg.task("steps", queue=QUEUE, retention="1h")
def steps(ctx: JobContext, at: str) -> None:
    """Four parts that each leave a row; stay inside of one of them at first."""
    note_run(ctx)
    first = ctx.crash_attempt == 0

    def part(name: str) -> None:
        _insert("INSERT INTO public.part VALUES (%s, %s)", (name, ctx.lease.fence))
        if first and at == name:
            stay(name)

    ctx.step("a", part, "a")
    ctx.step("b", part, "b")
    for row in ctx.iterate(
        "rows", lambda done: range((done or 0) + 1, 21), cursor=lambda n: n, every=4
    ):
        part(f"row {row}")

    def invoice(tx: Any) -> None:
        tx.connection.execute(
            "INSERT INTO public.part VALUES (%s, %s)", ("invoice", ctx.lease.fence)
        )
        if first and at == "invoice":
            stay("invoice")

    ctx.step_once("invoice", invoice)
    part("after")


_ack_batch = PgStore.ack_batch


def _ack_with_points(self: PgStore, acks: Any) -> Any:
    if POINT == "before-ack":
        stay("before-ack")
    answers = _ack_batch(self, acks)
    if POINT == "after-ack":
        stay("after-ack")
    return answers


if POINT:
    PgStore.ack_batch = _ack_with_points  # type: ignore[method-assign]


def _broken(*args: Any, **keywords: Any) -> Any:
    raise RuntimeError("broken for ever")


if BREAKS:
    # The pauses between tries are shortened: their length is a test of its own.
    loops.LONGEST_PAUSE_S = 0.1
    setattr(PgStore, BREAKS, _broken)
