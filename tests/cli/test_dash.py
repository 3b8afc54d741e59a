"""The terminal dashboard, driven by its keys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import select
import signal
import sys
import time
from typing import Any

import pytest
from textual.widgets import DataTable, Static

from headgate_sync.cli.dashboard import Dashboard
from headgate_sync.cli.direct import DirectControl
from headgate_sync.cli.remote import HttpControl
from headgate_sync.memory.store import MemStore
from headgate_sync.workers import WorkerMeta
from tests.builders import envelope
from tests.cli.conftest import invoke
from tests.cli.test_processes import COMMAND, on_terminal
from tests.cli.test_text import HOSTILE

NEVER_MS = 3_600_000


def cells(app: Dashboard, name: str) -> list[list[str]]:
    table: DataTable[Any] = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(n)] for n in range(table.row_count)]


def test_it_shows_what_is_there_and_pauses_the_queue_under_the_cursor():
    store = MemStore()
    store.enqueue([envelope("a", queue="mail"), envelope("b", queue=HOSTILE)])
    store.inspect.heartbeat_worker(
        WorkerMeta(
            worker_id="w",
            host="h",
            pid=1,
            queues=("mail",),
            concurrency=4,
            started_at_ms=1,
            inflight=3,
        )
    )

    async def use() -> None:
        app = Dashboard(DirectControl(store), NEVER_MS)
        async with app.run_test(size=(160, 40)) as pilot:

            async def settle() -> None:
                await app.workers.wait_for_complete()
                await pilot.pause()

            await settle()
            first, second = cells(app, "queues")
            assert first[0].startswith(r"a\x1b[31m")
            assert second[:2] == ["mail", "1"]
            assert cells(app, "workers")[0][4] == "3/4"
            assert "busy 3 of 4" in str(app.query_one("#totals", Static).render())
            await pilot.press("down", "p")
            await settle()
            await settle()
            assert store.inspect.queue_stats(queues=["mail"])[0].paused
            assert not store.inspect.queue_stats(queues=[HOSTILE])[0].paused
            assert cells(app, "queues")[1][6] == "yes"
            store.enqueue([envelope("c", queue="a-new-one")])  # comes in front
            await pilot.press("r")
            await settle()
            await pilot.press("p")  # the cursor went with its queue
            await settle()
            await settle()
            assert not store.inspect.queue_stats(queues=["mail"])[0].paused
            await pilot.press("q")

    asyncio.run(use())


def test_an_outage_is_told_and_the_last_look_stays():
    async def use() -> None:
        app = Dashboard(HttpControl("http://127.0.0.1:1"), NEVER_MS)
        async with app.run_test() as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            told = str(app.query_one("#totals", Static).render())
            assert told.startswith("not up to date: no answer from")

    asyncio.run(use())


def test_it_needs_a_terminal(clean):
    assert "needs a terminal" in invoke("dash", code=2).stderr


def test_on_a_terminal_it_ends_with_its_key(pg, environment):
    code, shown = on_terminal(["dash"], b"q", environment)
    assert (code, "unfinished" in shown) == (0, True)


@pytest.mark.parametrize("by", ["the key", "the signal"])
def test_ctrl_c_and_sigterm_end_it_and_give_the_terminal_back(by, pg, environment):
    pid, screen = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*COMMAND, "dash"], environment)
    shown = b""
    told = None
    late = time.monotonic() + 30
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([screen], [], [], 10)[0]:
            shown += os.read(screen, 65_536)
            if told is None and b"unfinished" in shown:
                told = by
                if by == "the key":
                    os.write(screen, b"\x03")
                else:
                    os.kill(pid, signal.SIGTERM)
            if time.monotonic() > late:
                os.kill(pid, signal.SIGKILL)
                break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(screen)
    assert (code, b"\x1b[?1049l" in shown) == (0, True)


def test_without_its_extra_it_says_so_and_help_goes_on(environment):
    program = (
        "import sys; sys.modules['textual'] = None;"
        "from headgate_sync.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    code, shown = on_terminal(["dash"], b"", environment, ["-c", program])
    assert (code, "headgate_sync[dash]" in shown) == (2, True)
    code, shown = on_terminal(["--help"], b"", environment, ["-c", program])
    assert (code, "dash" in shown) == (0, True)
