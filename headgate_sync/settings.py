"""Which database a program uses, as code, environment or Flask configuration say."""

from __future__ import annotations

import re
from collections.abc import Callable

from attrs import field, frozen

from headgate_sync.errors import ConfigurationError

DATABASE_URL = "HEADGATE_DATABASE_URL"
FALLBACK_URL = "DATABASE_URL"
EMBEDDED = "HEADGATE_EMBEDDED"
LISTEN_URL = "HEADGATE_LISTEN_URL"
SCHEMA = "HEADGATE_SCHEMA"
POOL_SIZE = "HEADGATE_POOL_SIZE"
VARIABLES = {
    DATABASE_URL: "url",
    FALLBACK_URL: "url",
    LISTEN_URL: "listen_url",
    SCHEMA: "schema",
    POOL_SIZE: "pool_size",
    EMBEDDED: "embedded",
}
DEFAULT_SCHEMA = "headgate"
DEFAULT_POOL_SIZE = 4

# `postgresql+psycopg://` is how SQLAlchemy names a driver, no part of the address.
_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+(?=://)")


def normal_url(url: object) -> str | None:
    """A URL or conninfo as the driver wants it; None for nothing."""
    return _DRIVER.sub(r"\1", str(url)) if url else None


@frozen(kw_only=True)
class Settings:
    """An address, and how to use it. Addresses hold passwords and are never printed.

    Attributes:
        url: None is "not said", which is an error at the first use unless `embedded`.
        schema: where the tables are.
        listen_url: for wake-ups, beside a transaction pooler; None is `url`.
        pool_size: most connections of the process.
        embedded: without a URL, find or start a development server.
        data_dir: of that server; None is its default.
        named_by: the variable that the URL was read from.
    """

    url: str | None = field(default=None, repr=False)
    schema: str = DEFAULT_SCHEMA
    listen_url: str | None = field(default=None, repr=False)
    pool_size: int = DEFAULT_POOL_SIZE
    embedded: bool = False
    data_dir: str | None = None
    named_by: str | None = field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        if type(self.pool_size) is not int or self.pool_size < 1:
            raise ConfigurationError(
                f"pool_size is {self.pool_size!r}, expected 1 or more"
            )

    @classmethod
    def read(cls, lookup: Callable[[str], object]) -> Settings:
        """Read the variables; a URL wins over the wish for an embedded server.

        Raises:
            ConfigurationError: one cannot be read; the text names it.
        """
        size = str(lookup(POOL_SIZE) or DEFAULT_POOL_SIZE)
        if not size.isdecimal() or int(size) < 1:
            raise ConfigurationError(
                f"{POOL_SIZE} is {size!r}, expected a number of 1 or more"
            )
        embedded = str(lookup(EMBEDDED) or "0")
        if embedded not in ("0", "1", "True"):
            raise ConfigurationError(f"{EMBEDDED} is {embedded!r}, expected 0 or 1")
        named_by = next(filter(lookup, (DATABASE_URL, FALLBACK_URL)), None)
        url = normal_url(named_by and lookup(named_by))
        return cls(
            url=url,
            schema=str(lookup(SCHEMA) or DEFAULT_SCHEMA),
            listen_url=normal_url(lookup(LISTEN_URL)),
            pool_size=int(size),
            embedded=url is None and embedded != "0",
            named_by=named_by,
        )
