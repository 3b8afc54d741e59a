"""What a test reads out of a page: its text, its links, what it would send."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

from werkzeug.test import Client, TestResponse


class Document(HTMLParser):
    """A page as a browser would take it apart.

    Attributes:
        text: what a reader sees, blanks run together.
        links: the targets of all links.
        acts: what buttons and forms would send; of a form with its `fields`.
        tags: the names of all elements.
        settings: what the script is told.
    """

    def __init__(self, response: TestResponse) -> None:
        super().__init__()
        self.links: list[str] = []
        self.acts: list[dict[str, Any]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self._parts: list[str] = []
        self._inside: list[str] = []
        self._form: dict[str, Any] | None = None
        self.feed(response.text)
        self.close()
        self.text = " ".join("".join(self._parts).split())
        self.settings = json.loads(next(filter(None, self.scripts), "null"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._parts.append(" ")
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if given.get("data-act"):
            self.acts.append(json.loads(given["data-act"] or ""))
            if tag == "form":
                self._form = self.acts[-1] | {"fields": []}
                self.acts[-1] = self._form
        if tag in ("input", "select", "textarea") and self._form is not None:
            self._form["fields"].append(given)
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = None
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts.append(data)
        else:
            self._parts.append(data)

    def paths(self, method: str) -> set[str]:
        """Where buttons and forms of a method would send to."""
        return {act["path"] for act in self.acts if act["method"] == method}


def look(client: Client, path: str, *, status: int = 200, **query: str) -> Document:
    """Open a page that answers with a status."""
    response = client.get(path, query_string=query or None)
    assert response.status_code == status, response.text
    return Document(response)
