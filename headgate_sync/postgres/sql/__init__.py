"""The statements of the PostgreSQL store, one `.sql` file each, composed per store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

from psycopg import sql

from headgate_sync.errors import ConfigurationError
from headgate_sync.lifecycle import (
    EVICTABLE,
    TRANSITIONS,
    UNFINISHED,
    WAITING,
    Event,
    states_sql,
)
from headgate_sync.policy import GATE_CONSTANTS

MAX_SCHEMA_BYTES = 63

# Calls of functions, which plan their own statements and keep the plans. A plain
# statement is planned at each call: a kept plan may date from when the table was small.
PREPARED = frozenset(
    {
        "ack",
        "admit",
        "enqueue",
        "enqueue_alike",
        "enqueue_one",
        "enqueue_plain",
        "renew",
    }
)

# Whether the row `job` is what the filter of a list asks for; the arguments are those
# of the function in their order.
_MATCHES = (
    "{schema}.headgate_job_matches(job.queue, job.state, job.kind, job.partition_key,"
    " job.fingerprint, job.rate_class, job.priority, %(queue)s::text, %(state)s::text,"
    " %(kind)s::text, %(kind_prefix)s::text, %(partition_key)s::text,"
    " %(fingerprint)s::text, %(rate_class)s::text, %(priority)s::integer)"
)


def statement_names() -> list[str]:
    """The names of all statement files, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".sql") for f in files if f.name.endswith(".sql"))


@cache
def statement_source(name: str) -> str:
    """The text of one statement file, header included."""
    return resources.files(__name__).joinpath(f"{name}.sql").read_text("utf-8")


@cache
def fragments() -> Mapping[str, sql.Composable]:
    """What stands in the files for the rules of lifecycle and gate, by placeholder.

    `unfinished`, `waiting` and `evictable` are lists of states; `from_<event>` lists
    the states in which an event can happen, `to_<event>` is the state that it leads to,
    where that is one. The constants of the gate have their own names.
    """
    texts = {
        "unfinished": states_sql(UNFINISHED),
        "waiting": states_sql(WAITING),
        "evictable": states_sql(EVICTABLE),
        **{name: f"{value}::integer" for name, value in GATE_CONSTANTS.items()},
    }
    for event in Event:
        rows = [row for row in TRANSITIONS if row.event is event]
        texts[f"from_{event}"] = states_sql(frozenset(row.source for row in rows))
        targets = {row.target for row in rows}
        if len(targets) == 1:
            texts[f"to_{event}"] = states_sql(frozenset(targets))
    return {name: sql.SQL(text) for name, text in texts.items()}


def check_schema_name(schema: str) -> None:
    """Check the name of a schema.

    Raises:
        ConfigurationError: empty, with NUL or `$$`, which delimits the bodies of the
            schema's functions, or longer than 63 bytes, which the server would cut.
    """
    if type(schema) is not str or not schema or "\0" in schema or "$$" in schema:
        raise ConfigurationError(
            f"schema name {schema!r} must be text with neither NUL nor $$"
        )
    try:
        size = len(schema.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"schema name {schema!r} must not contain a lone surrogate"
        ) from None
    if size > MAX_SCHEMA_BYTES:
        raise ConfigurationError(
            f"schema name {schema!r} has {size} bytes, the limit is {MAX_SCHEMA_BYTES}"
        )


def quoted_schema(schema: str) -> sql.Composable:
    """The name as it stands in a statement with placeholders."""
    quoted = sql.Identifier(schema).as_string(None)
    return sql.SQL(quoted.replace("%", "%%"))


class Statements(Mapping[str, bytes]):
    """Statement texts for one schema, composed at first use."""

    def __init__(self, schema: str) -> None:
        check_schema_name(schema)
        self._schema = quoted_schema(schema)
        self._composed: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        text = self._composed.get(name)
        if text is None:
            source = sql.SQL(statement_source(name))
            matches = sql.SQL(_MATCHES).format(schema=self._schema)
            composed = source.format(
                schema=self._schema, matches=matches, **fragments()
            )
            text = self._composed[name] = composed.as_bytes(None)
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(statement_names())

    def __len__(self) -> int:
        return len(statement_names())
