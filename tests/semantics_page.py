"""Renders `docs/semantics.md` from the table: `python -m tests.semantics_page`."""

from __future__ import annotations

from pathlib import Path

from headgate_sync.semantics import SEMANTICS, Level

PAGE = Path(__file__).parents[1] / "docs" / "semantics.md"
HEAD = """\
# What is promised

Generated from `headgate_sync.semantics.SEMANTICS` by `python -m tests.semantics_page`;
a test fails when it is stale, and another when a test that is named here is gone or
does not run on a store that the row claims.
"""
PARTS: dict[Level, str] = {
    "guaranteed": """
## Guaranteed

By every store. Jobs of `MemStore` live as long as its process.

| name | what holds | memory | PostgreSQL | shown by |
|---|---|---|---|---|
""",
    "backend": """
## By store

| name | what holds | memory | PostgreSQL |
|---|---|---|---|
""",
    "not_promised": """
## Not promised

Write handlers and programs so that they do without.

| name | what may not be relied on |
|---|---|
""",
}


def _told(value: bool | str) -> str:
    return value if isinstance(value, str) else ("yes" if value else "no")


def _short(node: str) -> str:
    file, _, name = node.partition("::")
    place = file.removeprefix("tests/").removesuffix(".py")
    return f"`{place}`: {name.removeprefix('test_').replace('_', ' ')}"


def render() -> str:
    """The whole page."""
    text = HEAD
    for level, head in PARTS.items():
        text += head
        for row in SEMANTICS:
            if row.level != level:
                continue
            cells = [f"`{row.id}`", row.statement]
            if level != "not_promised":
                cells += [_told(row.memory), _told(row.postgres)]
            if level == "guaranteed":
                cells.append("; ".join(map(_short, row.tests)))
            text += f"| {' | '.join(cells)} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(render())
