"""What `headgate migrate` prints: one function per command, one line per fact."""

from __future__ import annotations

from collections.abc import Iterator

from headgate_sync.errors import ConfigurationError
from headgate_sync.postgres import migrate, roles
from headgate_sync.postgres.ledger import versions


def up(
    url: str,
    schema: str,
    *,
    target: int | None = None,
    max_steps: int | None = None,
    dry_run: bool = False,
) -> Iterator[str]:
    """Apply versions; see `migrate_up`."""
    steps = migrate.migrate_up(
        url, schema, target=target, max_steps=max_steps, dry_run=dry_run
    )
    tail = " dry_run=true" if dry_run else ""
    for step in steps:
        yield f"up {step}{tail}"
    if not steps:
        yield "no-op: already at target version"
    if not dry_run and migrate.validity(url, schema).is_current:
        yield f"schema {schema} is current"


def down(
    url: str,
    schema: str,
    *,
    target: int = 0,
    max_steps: int | None = None,
    dry_run: bool = False,
) -> Iterator[str]:
    """Take versions back; see `migrate_down`. The caller has asked for confirmation."""
    steps = migrate.migrate_down(
        url, schema, target=target, max_steps=max_steps, dry_run=dry_run
    )
    tail = " dry_run=true" if dry_run else ""
    for step in steps:
        yield f"down {step}{tail}"
    if not steps:
        yield "no-op: already at target version"
    if not dry_run and migrate.validity(url, schema).current == 0:
        yield f"schema {schema} holds no tables of headgate any more"


def validate(url: str, schema: str) -> Iterator[str]:
    """Check ledger and manifest; see `migrate.validate`."""
    found = migrate.validate(url, schema)
    yield f"ok backend=postgres current={found.current} latest={found.latest}"
    if not found.is_current:
        yield "programs of this release refuse it until `headgate migrate up`"


def version(url: str, schema: str) -> Iterator[str]:
    """Tell at which version a schema is."""
    found = migrate.validity(url, schema)
    yield f"current={found.current} latest={found.latest}"


def get(schema: str, number: int, direction: str = "up") -> Iterator[str]:
    """The text of a version, as it would be run in a schema.

    Raises:
        ConfigurationError: no such version.
    """
    if not 1 <= number <= len(versions()):
        raise ConfigurationError(
            f"version {number}: this release has versions 1 to {len(versions())}"
        )
    text = versions()[number - 1].text(direction).rstrip("\n")
    yield migrate.render(text, schema).decode()


def adopt(url: str, schema: str, *, version: int) -> Iterator[str]:
    """Take tables over; see `migrate.adopt`. The caller has asked for confirmation."""
    migrate.adopt(url, schema, version=version)
    yield f"adopted version={version}"


def grants(url: str | None, schema: str, *, role: str, as_role: str) -> Iterator[str]:
    """The statements that let a role act as one of ours; with a URL they are run too.

    Raises:
        ConfigurationError: no such role.
    """
    statements = [f"{text};" for text in roles.grants(role, as_role, schema)]
    if url is not None:
        migrate.grant(url, schema, role=role, as_role=as_role)
    yield from statements
