"""Writes the table of routes in `docs/api.md`; run as `python -m tests.api.page`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headgate_sync.api.openapi import document
from headgate_sync.api.routes import ROUTES
from headgate_sync.api.routing import BASE

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- routes: begin -->\n", "<!-- routes: end -->\n"


def _taken(operation: dict[str, Any]) -> str:
    names = [
        f"`{one['name']}`" + ("" if one["required"] else "?")
        for one in operation["parameters"]
        if one["in"] == "query"
    ]
    body = operation.get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        required = schema.get("required", [])
        fields = [
            f"`{name}`" + ("" if name in required else "?")
            for name in schema["properties"]
        ]
        names.append("body: " + ", ".join(fields))
    return ", ".join(names)


def table() -> str:
    """The routes, one line each, from the OpenAPI document."""
    rows = "| method and path | takes | answers | |\n|---|---|---|---|\n"
    for path, methods in document(ROUTES, BASE)["paths"].items():
        for method, operation in methods.items():
            good = ", ".join(s for s in operation["responses"] if s < "300")
            rows += (
                f"| {method.upper()} `{path}` | {_taken(operation)} | {good} "
                f"| {operation['summary']} |\n"
            )
    return rows


def render() -> str:
    """The page with a fresh table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(render())
