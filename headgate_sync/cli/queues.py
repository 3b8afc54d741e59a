"""`headgate stats` and `headgate queue`."""

from __future__ import annotations

from contextlib import suppress

import click

from headgate_sync.cli import output
from headgate_sync.cli.bulk import follow, wait_option
from headgate_sync.cli.control import ControlClient, Json
from headgate_sync.cli.errors import missing
from headgate_sync.cli.session import (
    Command,
    Group,
    Session,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.cli.text import drain, span
from headgate_sync.cli.values import DURATION
from headgate_sync.errors import HeadgateError
from headgate_sync.loggers import visible

BACKLOG: output.Columns = {
    "queue": "queue",
    "unfinished": "unfinished_jobs",
    "oldest": "oldest_available_ms",
    "in/s": "arrival_rate",
    "out/s": "drain_rate",
    "time to drain": lambda q: drain(q["time_to_drain_ms"]),
    "paused": "paused",
}
_QUEUES: output.Columns = BACKLOG | {
    "weight": "weight",
    "limit": "max_unfinished_jobs",
    "bytes": "memory_bytes",
}


def _states(queue: Json) -> str:
    sign = "≥ " if queue["count_is_approximate"] else ""
    return ", ".join(f"{s['state']} {sign}{s['count']}" for s in queue["by_state"])


_PARTITIONS: output.Columns = {
    "partition": "partition_key",
    "waiting": "waiting",
    "running": "inflight",
    "credit": "deficit",
    "noisy": "noisy",
    "quantum": "quantum_override",
}


def _named(control: ControlClient, name: str) -> Json:
    for queue in control.queues():
        if queue["queue"] == name:
            return queue
    raise missing("queue", name)


def _tell_if_empty(control: ControlClient, name: str) -> None:
    """Say so when there is nothing in a queue that was just steered: a slip, maybe."""
    with suppress(HeadgateError):  # what was asked for is done
        if not any(state["count"] for state in control.counts(name)["counts"]):
            click.echo(f"headgate: queue {visible(name)} holds no jobs", err=True)


_SEMANTICS: output.Columns = {
    "level": "level",
    "name": "id",
    "memory": lambda row: _kept(row["memory"]),
    "postgres": lambda row: _kept(row["postgres"]),
    "statement": "statement",
}


def _kept(told: bool | str) -> str:
    return told if isinstance(told, str) else ("yes" if told else "no")


@click.command(cls=Command)
@click.option(
    "--semantics", is_flag=True, help="What is promised instead, and what not."
)
@pass_session
def stats(session: Session, semantics: bool) -> None:
    """Show every queue's backlog, and how many workers serve it."""
    control = session.connect()
    if semantics:
        output.items(session, control.semantics(), _SEMANTICS)
        return
    cover = {
        q["queue"]: q["live_workers"] - q["late_workers"]
        for q in control.cluster()["queues"]
    }
    found = [q | {"live_workers": cover.get(q["queue"], 0)} for q in control.queues()]
    output.items(session, found, BACKLOG | {"workers": "live_workers"})


@click.group(cls=Group)
def queue() -> None:
    """Queues: backlog, pause, weight, limit."""


@queue.command("ls")
@pass_session
def ls(session: Session) -> None:
    """List all queues."""
    output.items(session, session.connect().queues(), _QUEUES)


@queue.command()
@click.argument("name")
@pass_session
def inspect(session: Session, name: str) -> None:
    """Show one queue with its states and partitions."""
    control = session.connect()
    found = _named(control, name)
    partitions = control.partitions(name)
    if session.form() != "table":
        output.record(session, found | {"partitions": partitions})
        return
    output.record(session, found, _QUEUES | {"states": _states})
    if partitions:
        click.echo()
        output.items(session, partitions, _PARTITIONS)


@queue.command()
@click.argument("name")
@click.option("--since", type=DURATION, default="1h", show_default=True)
@click.option("--bucket", type=DURATION, default="5m", show_default=True)
@pass_session
def history(session: Session, name: str, since: int, bucket: int) -> None:
    """Show what happened to a queue, by stretches of time."""
    control = session.connect()
    found = control.history(name, max(0, control.now_ms() - since), bucket)
    columns: output.Columns = {
        "from": "at_ms",
        "arrived": "arrived",
        "completed": "completed",
        "failed": "failed",
        "retried": "retried",
        "sent away": "admission_rejections",
        "mean latency": _latency,
    }
    output.items(session, found, columns)


def _latency(bucket: Json) -> str:
    count = bucket["latency_count"]
    return span(bucket["latency_ms_sum"] // count if count else None)


@queue.command()
@click.argument("name")
@pass_session
def pause(session: Session, name: str) -> None:
    """Let no more jobs of a queue start; producers and running jobs go on."""
    control = session.connect()
    control.pause_queue(name, True)
    _tell_if_empty(control, name)
    output.record(session, {"queue": name, "paused": True})


@queue.command()
@click.argument("name")
@pass_session
def resume(session: Session, name: str) -> None:
    """Let jobs of a queue start again."""
    session.connect().pause_queue(name, False)
    output.record(session, {"queue": name, "paused": False})


@queue.command()
@click.argument("name")
@click.argument("weight", type=int)
@pass_session
def weight(session: Session, name: str, weight: int) -> None:
    """Set a queue's share of admissions, 1 or more."""
    control = session.connect()
    control.weigh_queue(name, weight)
    _tell_if_empty(control, name)
    output.record(session, {"queue": name, "weight": weight})


@queue.command()
@click.argument("name")
@click.argument("most", metavar="N|none")
@pass_session
def limit(session: Session, name: str, most: str) -> None:
    """Bound a queue's unfinished jobs; 0 closes it, `none` lifts the bound."""
    if most != "none" and not (most.isascii() and most.isdigit()):
        raise click.BadParameter("expected a number or none", param_hint="'N|none'")
    bound = None if most == "none" else int(most)
    control = session.connect()
    control.limit_queue(name, bound)
    _tell_if_empty(control, name)
    output.record(session, {"queue": name, "max_unfinished_jobs": bound})


@queue.command()
@click.argument("name")
@click.argument("partition")
@click.argument("share", metavar="N|none")
@pass_session
def quantum(session: Session, name: str, partition: str, share: str) -> None:
    """Give a partition a share of its own, 1 or more; `none` takes it away."""
    if share != "none" and not (share.isascii() and share.isdigit()):
        raise click.BadParameter("expected a number or none", param_hint="'N|none'")
    wanted = None if share == "none" else int(share)
    session.connect().set_quantum(name, partition, wanted)
    output.record(
        session, {"queue": name, "partition_key": partition, "quantum": wanted}
    )


@queue.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Cancel and delete its jobs first.")
@wait_option
@yes_option
@pass_session
def rm(session: Session, name: str, force: bool, wait: bool, yes: bool) -> None:
    """Remove what is kept of a queue: settings, limit, counters."""
    confirm(f"delete queue {name}" + (" with all its jobs" if force else ""), yes)
    control = session.connect()
    operation_id = control.delete_queue(name, force=force)
    if operation_id is None:
        output.record(session, {"queue": name, "deleted": True})
    else:
        follow(session, control, control.operation(operation_id), wait=wait)


@queue.command("sample-memory")
@click.option("--jobs", type=int, default=100, show_default=True, help="Per queue.")
@pass_session
def sample_memory(session: Session, jobs: int) -> None:
    """Estimate the stored bytes of the queues that were not sampled for longest."""
    sampled = session.connect().sample_memory(jobs)
    output.record(session, {"sampled_queues": sampled})
