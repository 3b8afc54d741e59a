"""What the demo finds out about one Python file; pure but for reading the file."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from attrs import frozen


@frozen(kw_only=True)
class FileFacts:
    """Facts of one file.

    Attributes:
        sha256: hex digest of the bytes.
        size_bytes: length of the file.
        lines: number of line ends.
        parsed: whether this Python can parse it; without, the counts below are 0.
        functions, classes, imports: definitions and import statements, nested ones too.
    """

    sha256: str
    size_bytes: int
    lines: int
    parsed: bool
    functions: int
    classes: int
    imports: int


def read_facts(path: Path) -> FileFacts:
    """Hash, parse and count a file.

    Raises:
        OSError: the file cannot be read.
    """
    raw = path.read_bytes()
    try:
        nodes = list(ast.walk(ast.parse(raw)))
    except (SyntaxError, ValueError, RecursionError):
        nodes = []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return FileFacts(
        sha256=hashlib.sha256(raw).hexdigest(),
        size_bytes=len(raw),
        lines=raw.count(b"\n"),
        parsed=bool(nodes),
        functions=sum(isinstance(node, functions) for node in nodes),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        imports=sum(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes),
    )


def python_files(folder: Path) -> list[Path]:
    """Every `.py` file below a folder, sorted; links are not followed out of it."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if path.is_file() and "site-packages" not in path.parts
    )
