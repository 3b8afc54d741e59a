"""Stylesheet, script and icon: named by their content, so that browsers keep them."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from attrs import frozen

_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@frozen(kw_only=True)
class Asset:
    """A file that a page loads; `name` changes with its content."""

    name: str
    content_type: str
    body: bytes


@cache
def load() -> dict[str, Asset]:
    """The assets by the names of their files."""
    found = {}
    for file in resources.files("headgate_sync.console.static").iterdir():
        stem, _, suffix = file.name.rpartition(".")
        if suffix not in _TYPES:
            continue
        body = file.read_bytes()
        digest = hashlib.sha256(body).hexdigest()[:16]
        found[file.name] = Asset(
            name=f"{stem}-{digest}.{suffix}", content_type=_TYPES[suffix], body=body
        )
    return found
