"""`Dashboard`: queues and workers on a terminal, as they change."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from headgate_sync.cli import output
from headgate_sync.cli.control import ControlClient, Json
from headgate_sync.cli.queues import BACKLOG
from headgate_sync.cli.workers import WORKERS, marked
from headgate_sync.errors import HeadgateError
from headgate_sync.loggers import visible

_QUEUES = BACKLOG | {"workers": "live_workers", "states": "states"}


class Dashboard(App[None]):
    """Looks at intervals, and pauses or resumes the queue under the cursor.

    Args:
        control: what is looked at; called from one thread at a time.
        every_ms: between two looks.
    """

    CSS = """
    #totals { height: 1; }
    #queues { height: 2fr; }
    #workers { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        # Textual only tells how to quit; the screen would take the key for a copy.
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("p", "pause", "Pause or resume the queue"),
        Binding("r", "look", "Look now"),
    ]

    def __init__(self, control: ControlClient, every_ms: int) -> None:
        super().__init__()
        self._control = control
        self._every_ms = every_ms
        self._busy = threading.Lock()  # held by the call that goes on
        self._paused: dict[str, bool] = {}  # of the queues shown

    def compose(self) -> ComposeResult:
        """One line of totals, the queues, the workers."""
        yield Static(Text("…"), id="totals")
        yield DataTable(id="queues", cursor_type="row")
        yield DataTable(id="workers", cursor_type="none")
        yield Footer()

    def on_mount(self) -> None:
        """Name the columns, and look for the first time."""
        # Ended by the signal itself, the process would leave the terminal as it is.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self._table("queues").add_columns(*_QUEUES)
        self._table("workers").add_columns(*WORKERS)
        self._table("queues").focus()
        self.set_interval(self._every_ms / 1000, self.action_look)
        self.action_look()

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)

    @work(thread=True)
    def action_look(self) -> None:
        """Look, unless the look before has not ended."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            found = self._look()
        except HeadgateError as error:
            self.call_from_thread(self._fail, error)
        else:
            self.call_from_thread(self._show, *found)
        finally:
            self._busy.release()

    def _look(self) -> tuple[list[Json], list[Json], Json]:
        cluster = self._control.cluster()
        cover = {q["queue"]: q["live_workers"] for q in cluster["queues"]}
        queues = [
            queue
            | {
                "live_workers": cover.get(queue["queue"], 0),
                "states": {one["state"]: one["count"] for one in queue["by_state"]},
            }
            for queue in self._control.queues()
        ]
        return queues, self._control.workers(), cluster

    @work(thread=True)
    def action_pause(self) -> None:
        """Let the queue under the cursor be skipped, or not."""
        table = self._table("queues")
        if not table.row_count:
            return
        name = str(table.coordinate_to_cell_key(table.cursor_coordinate)[0].value)
        with self._busy:
            try:
                self._control.pause_queue(name, not self._paused[name])
            except HeadgateError as error:
                self.call_from_thread(self._fail, error)
                return
        self.action_look()

    def _fail(self, error: HeadgateError) -> None:
        """Say that what is shown is old."""
        self.query_one("#totals", Static).update(
            Text(f"not up to date: {visible(str(error))}", style="bold red")
        )

    def _show(self, queues: list[Json], workers: list[Json], cluster: Json) -> None:
        fleet = cluster["workers"]
        totals = (
            f"workers {fleet['live']} live, {fleet['late']} late; "
            f"busy {cluster['inflight_total']} of {cluster['capacity_total']}; "
            f"unfinished {sum(queue['unfinished_jobs'] for queue in queues)}"
        )
        self.query_one("#totals", Static).update(Text(visible(totals)))
        self._paused = {queue["queue"]: queue["paused"] for queue in queues}
        self._fill("queues", "queue", queues, _QUEUES)
        shown = marked(workers, cluster["now_ms"])
        self._fill("workers", "worker_id", shown, WORKERS)

    def _fill(
        self, name: str, key: str, found: list[Json], columns: output.Columns
    ) -> None:
        """Replace the rows; the cursor stays on the item that it was on."""
        table = self._table(name)
        at: Any = None
        if table.row_count:
            at = table.coordinate_to_cell_key(table.cursor_coordinate)[0].value
        scrolled = table.scroll_offset
        table.clear()
        for item in found:
            cells = (Text(output.made(item, column)) for column in columns.values())
            table.add_row(*cells, key=item[key])
        for place, item in enumerate(found):
            if item[key] == at:
                table.move_cursor(row=place, scroll=False)
        table.scroll_to(*scrolled, animate=False)
