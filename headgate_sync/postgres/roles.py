"""What each role may do in the schema, as data, and the grants that give it.

`STATEMENTS` says which statement files a role runs, `HIDDEN` which columns it must not
read. `rights.txt` holds the least rights that follow, by table, column and function;
`python -m tests.manifest_file` draws it up. No role is created here, no function runs
with the rights of its owner, and nothing is taken away from anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

from attrs import frozen
from psycopg import sql

from headgate_sync.errors import ConfigurationError
from headgate_sync.postgres import manifest
from headgate_sync.postgres.database import Session

FILE = resources.files("headgate_sync.postgres").joinpath("rights.txt")
ROLES = ("producer", "worker", "operator", "reader")

# At the start of every store: which version is there.
_START = {"schema_state", "ledger_rows"}
_PRODUCER = {
    *_START,
    "enqueue",
    "enqueue_alike",
    "enqueue_one",
    "enqueue_plain",
    "get_worker",
    "store_now",
}
_RESULTS = {"read_result", "read_output", "read_progress", "read_checkpoint"}
_READS = {
    "concurrency_limits",
    "counts",
    "crowded_partitions",
    "distinct_kinds",
    "estimate_operation",
    "explain_admission",
    "get_job",
    "get_jobs",
    "get_operation",
    "get_worker",
    "history",
    "index_health",
    "list_jobs",
    "list_schedule_events",
    "list_schedules",
    "list_workers",
    "partitions",
    "quarantine_list",
    "queue_names",
    "queue_stats",
    "rate_classes",
    "read_progress",
    "store_now",
    "table_names",
    "unfinished",
}
# Sweeps that a duty of the workers runs and an operator may run too.
_SWEEPS = {
    "create_queue_deletion",
    "delete_ended",
    "fail_operation",
    "gate_fold",
    "gate_reconcile",
    "open_operations",
    "prune_effects",
    "quarantine_sweep",
    "run_operation",
    "sample_queue_memory",
    "sleeper_sweep",
    "tally_fold",
    "trim_history",
    "write_queue_memory",
}
STATEMENTS: Mapping[str, frozenset[str]] = {
    "producer": frozenset(_PRODUCER),
    "worker": frozenset(
        {
            *_PRODUCER,
            *_RESULTS,
            *_SWEEPS - {"create_queue_deletion"},
            "ack",
            "admit",
            "advance_schedule",
            "append_schedule_event",
            "checkpoint",
            "claim_effect",
            "crowded_partitions",
            "distinct_kinds",
            "due_schedules",
            "duty_tick",
            "evict_retained",
            "forget_worker",
            "get_jobs",
            "get_schedule",
            "heartbeat_worker",
            "lock_due_schedule",
            "lock_schedule",
            "lock_schedule_name",
            "mark_holds",
            "promote_due",
            "reclaim_expired",
            "release_duty",
            "renew",
            "write_output",
            "write_progress",
        }
    ),
    "operator": frozenset(
        {
            *_PRODUCER,
            *_RESULTS,
            *_READS,
            *_SWEEPS,
            "advance_schedule",
            "append_schedule_event",
            "archive_policies",
            "cancel_jobs",
            "claim_idempotency_key",
            "clear_enqueue_limit",
            "create_operation",
            "delete_concurrency_limit",
            "delete_job",
            "delete_rate_class",
            "delete_schedule",
            "drop_idempotency_key",
            "due_schedules",
            "edit_payload",
            "finish_idempotency_key",
            "forget_queue",
            "get_job_payload",
            "get_schedule",
            "keep_job",
            "list_schedules_payload",
            "lock_due_schedule",
            "lock_schedule",
            "lock_schedule_name",
            "mark_replay",
            "operator_cancel",
            "operator_retry",
            "pause_rate_class",
            "promote_job",
            "quarantine_release",
            "read_idempotency_key",
            "remove_idempotency_keys",
            "reschedule_job",
            "resume_rate_class",
            "schedule_pending",
            "set_archive_policy",
            "set_enqueue_limit",
            "set_partition_quantum",
            "set_queue_paused",
            "set_queue_weight",
            "set_schedule_paused",
            "signal_worker",
            "upsert_concurrency_limit",
            "upsert_rate_class",
            "upsert_schedule",
        }
    ),
    "reader": frozenset({*_START, *_READS}),
}
MIGRATOR = frozenset(
    {
        "grant_create",
        "grant_drop",
        "grant_record",
        "grant_rows",
        "grantable",
        "ledger_append",
        "ledger_create",
        "ledger_drop",
        "ledger_lock",
        "ledger_remove",
        "ledger_schema",
        "manifest",
        "manifest_path",
        "prune_archive_month",
        "role_exists",
    }
)
# What a role must not read, by table; its rights to read the others name each column.
_ANSWERS = ("result", "output")
HIDDEN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "producer": {
        "headgate_job": _ANSWERS,
        "headgate_quarantine": ("sample_payload",),
    },
    "reader": {
        "headgate_job": (*_ANSWERS, "payload", "headers", "checkpoint", "cursor_data"),
        "headgate_quarantine": ("sample_payload",),
        "headgate_schedule": ("payload", "headers"),
    },
}


@frozen
class Right:
    """One privilege on one table, sequence or function.

    Attributes:
        kind: `TABLE`, `SEQUENCE` or `FUNCTION`.
        privilege: as the server calls it.
        columns: which columns of a table; empty for the whole table.
    """

    role: str
    kind: str
    name: str
    privilege: str
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        return f"{self.role} {self.kind} {self.name} {self.privilege}{columns}"

    @classmethod
    def read(cls, line: str) -> Right:
        """A right from its text."""
        head, _, tail = line.partition(" (")
        role, kind, name, privilege = head.split()
        columns = tuple(tail.rstrip(")").split(", ")) if tail else ()
        return cls(role, kind, name, privilege, columns)


@cache
def rights() -> tuple[Right, ...]:
    """Every right of every role in the newest version."""
    return tuple(map(Right.read, FILE.read_text("utf-8").splitlines()))


def check_role(role: str, as_role: str) -> None:
    """Check the name of a role of the server, and of one of ours.

    Raises:
        ConfigurationError: one of them is none.
    """
    if not role or "\0" in role:
        raise ConfigurationError(f"{role!r} cannot be a role of the server")
    if as_role not in ROLES:
        raise ConfigurationError(f"role {as_role!r} is none of {', '.join(ROLES)}")


def grants(
    role: str,
    as_role: str,
    schema: str,
    present: Mapping[str, tuple[str, ...]] | None = None,
) -> Iterator[str]:
    """The statements that let a role of the server act as one of ours.

    Args:
        role: of the server.
        as_role: `producer`, `worker`, `operator` or `reader`.
        present: what the schema has: tables with their columns, sequences and
            functions; None for the newest version.
    """
    check_role(role, as_role)
    names = {"schema": sql.Identifier(schema), "role": sql.Identifier(role)}
    yield _text(sql.SQL("GRANT USAGE ON SCHEMA {schema} TO {role}").format(**names))
    for right in rights():
        columns = right.columns
        if right.role != as_role:
            continue
        if present is not None:
            if right.name not in present:
                continue
            columns = tuple(name for name in columns if name in present[right.name])
        listed = sql.SQL(" ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, columns))
        )
        yield _text(
            sql.SQL(
                "GRANT {privilege}{columns} ON {kind} {schema}.{name} TO {role}"
            ).format(
                privilege=sql.SQL(right.privilege),
                columns=listed if columns else sql.SQL(""),
                kind=sql.SQL(right.kind),
                name=sql.Identifier(right.name),
                **names,
            )
        )


def give(session: Session, schema: str, role: str, as_role: str) -> None:
    """Give a role what one of ours needs of what is there, and record it.

    Raises:
        ConfigurationError: the server has no such role.
    """
    check_role(role, as_role)
    if not session.rows("role_exists", role=role)[0][0]:
        create = _text(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        raise ConfigurationError(
            f"the server has no role {role}; an administrator must run: {create}"
        )
    session.rows("grant_record", role=role, as_role=as_role)
    _give(session, schema, role, as_role)


def give_again(session: Session, schema: str) -> None:
    """Give the recorded roles what they need of what a version has brought."""
    for role, as_role in session.rows("grant_rows"):
        _give(session, schema, role, as_role)


def _give(session: Session, schema: str, role: str, as_role: str) -> None:
    rows = session.rows("grantable", schema_name=schema)
    present = {name: tuple(columns or ()) for name, columns in rows}
    for text in grants(role, as_role, schema, present):
        session.command(text.encode())


def hidden(as_role: str, table: str) -> tuple[str, ...]:
    """The columns of a table that a role must not read."""
    return HIDDEN.get(as_role, {}).get(table, ())


def readable(as_role: str, table: str) -> tuple[str, ...]:
    """The columns that a role may read where some are hidden from it, else none."""
    away = hidden(as_role, table)
    return tuple(
        name for name in manifest.columns()[table] if name not in away and away
    )


def _text(statement: sql.Composable) -> str:
    return statement.as_string(None)
