"""Option texts with `{name}` parts that are filled from a job's payload."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from attrs import frozen

from headgate_sync.errors import InvalidRequest

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@frozen
class Template:
    """A parsed text: constants, and paths of names into the payload."""

    pieces: tuple[str | tuple[str, ...], ...]

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """The names it needs, each with the names of fields behind it."""
        return tuple(piece for piece in self.pieces if isinstance(piece, tuple))

    def render(self, plain: Mapping[str, Any]) -> str:
        """Fill in the values of an encoded payload.

        Raises:
            InvalidRequest: a value is absent, None, a float, a list or an object. Two
                jobs without a tenant must not share one group silently.
        """
        return "".join(
            piece if isinstance(piece, str) else _value(plain, piece)
            for piece in self.pieces
        )


def _value(plain: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = plain
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            raise InvalidRequest(f"{{{'.'.join(path)}}} is not in the payload")
        value = value[name]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, str):
        return value
    kind = "None" if value is None else type(value).__name__
    raise InvalidRequest(f"{{{'.'.join(path)}}} is {kind}, which names nothing")


@lru_cache(maxsize=1024)
def parse_template(text: str) -> Template:
    """Parse `{name}` and `{name.field}`; `{{` and `}}` are literal braces.

    Raises:
        InvalidRequest: anything else between braces, or a single brace.
    """
    pieces: list[str | tuple[str, ...]] = []
    for match in _PIECE.finditer(text):
        piece, path = match.group(), match.group(1)
        if path is not None:
            if not _PATH.fullmatch(path):
                raise InvalidRequest(
                    f"{piece} is no name: a template has {{name}} or {{name.field}}, "
                    "without format, index or call"
                )
            pieces.append(tuple(path.split(".")))
        elif piece in ("{", "}"):
            raise InvalidRequest(
                f"template {text!r} has a {piece} without its partner; one that is "
                "only a character is written twice"
            )
        else:
            pieces.append(piece[0] if piece in ("{{", "}}") else piece)
    return Template(tuple(pieces))
