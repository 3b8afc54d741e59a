"""The store on PostgreSQL, and the only package that knows its driver."""

from __future__ import annotations

from headgate_sync.errors import MissingExtra

try:
    import psycopg as psycopg
except ImportError as error:  # of its own, too: it found no libpq
    raise MissingExtra(
        f"the driver psycopg cannot be loaded ({str(error).splitlines()[0]}): "
        "pip install 'headgate_sync[binary]', or install libpq"
    ) from error
