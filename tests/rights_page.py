"""Renders the rights of the roles in `docs/security.md`: `python -m tests.rights_page`.

What stands outside of the two marks is written by hand.
"""

from __future__ import annotations

from pathlib import Path

from headgate_sync.postgres import manifest
from headgate_sync.postgres.roles import ROLES, hidden, rights

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- rights: begin -->\n", "<!-- rights: end -->\n"
WORDS = {"SELECT": "read", "INSERT": "add", "UPDATE": "change", "DELETE": "delete"}


def _cell(role: str, table: str) -> str:
    words = []
    for right in rights():
        if (right.role, right.kind, right.name) != (role, "TABLE", table):
            continue
        word = WORDS[right.privilege]
        if right.privilege == "SELECT" and right.columns:
            word += f" (not {', '.join(hidden(role, table))})"
        elif right.columns and len(right.columns) <= 3:
            word += f" ({', '.join(right.columns)})"
        elif right.columns:
            word += f" ({len(right.columns)} columns)"
        words.append(word)
    return ", ".join(words) or "–"


def render() -> str:
    """The table between the marks."""
    lines = [f"| table | {' | '.join(ROLES)} |", "|---" * (len(ROLES) + 1) + "|"]
    for table in sorted(manifest.columns()):
        cells = (_cell(role, table) for role in ROLES)
        lines.append(f"| `{table.removeprefix('headgate_')}` | {' | '.join(cells)} |")
    counts = (
        str(sum((r.role, r.kind) == (role, "FUNCTION") for r in rights()))
        for role in ROLES
    )
    lines.append(f"| functions | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def split() -> tuple[str, str, str]:
    """The page before, between and after the marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    between, _, after = rest.partition(END)
    return before + BEGIN, between, END + after


if __name__ == "__main__":
    head, _, tail = split()
    PAGE.write_text(head + render() + tail)
