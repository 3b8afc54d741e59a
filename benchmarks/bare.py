"""The bare limit: the same work on a plain table, one statement each and no policy.

The table is what one would write first for a queue on PostgreSQL: a handful of columns,
one partial index beside the primary key, the payload as JSON.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg

PAYLOAD = b'{"order_id":4711,"tenant":"acme","note":"' + b"x" * 160 + b'"}'
TEXT = PAYLOAD.decode()

_TABLE = """
DROP TABLE IF EXISTS bare_job;
CREATE TABLE bare_job (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue text NOT NULL DEFAULT 'bench', part text NOT NULL DEFAULT '',
  state smallint NOT NULL DEFAULT 0, priority smallint NOT NULL DEFAULT 0,
  scheduled_at timestamptz NOT NULL DEFAULT now(), attempt integer NOT NULL DEFAULT 0,
  payload jsonb NOT NULL DEFAULT '{}', worker text, lease uuid,
  lease_until timestamptz);
CREATE INDEX bare_ready ON bare_job (queue, priority, scheduled_at, id) WHERE state = 0;
"""

INSERT = "INSERT INTO bare_job (payload) VALUES (%s::jsonb)"

_INSERT_MANY = """
INSERT INTO bare_job (payload)
SELECT payload::jsonb FROM unnest(%b::text[]) AS payload
"""

_FILL = """
INSERT INTO bare_job (scheduled_at, payload)
SELECT now() - interval '1 hour' + number * interval '1 us', %s::jsonb
FROM generate_series(1, %s) AS number
"""

_CLAIM = """
UPDATE bare_job SET state = 1, attempt = attempt + 1, worker = %s,
  lease_until = now() + interval '30 s' WHERE id = ANY (ARRAY (
    SELECT id FROM bare_job
    WHERE queue = 'bench' AND state = 0 AND scheduled_at <= now()
    ORDER BY priority, scheduled_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING *
"""

_ACK = "DELETE FROM bare_job WHERE id = ANY (%b::bigint[]) AND state = 1"


class Bare:
    """One connection and the plain table."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.connection: psycopg.Connection[Any] = psycopg.connect(url, autocommit=True)

    def reset(self) -> None:
        """An empty table."""
        self.connection.execute(_TABLE)

    def fill(self, rows: int) -> None:
        """A table with that many available rows, analysed."""
        self.reset()
        self.connection.execute(_FILL, (TEXT, rows))
        self.connection.execute("VACUUM ANALYZE bare_job")

    def insert_one(self) -> None:
        """One row, one commit."""
        self.connection.execute(INSERT, (TEXT,))

    def insert_many(self, rows: int) -> None:
        """Many rows, one statement, one commit."""
        self.connection.execute(_INSERT_MANY, ([TEXT] * rows,))

    def claim(self, rows: int) -> list[int]:
        """Claim up to that many rows; returns their ids."""
        return [
            row[0] for row in self.connection.execute(_CLAIM, ("w", rows)).fetchall()
        ]

    def ack(self, ids: list[int]) -> None:
        """Finish claimed rows."""
        self.connection.execute(_ACK, (ids,))

    def drain(self, *, threads: int, batch: int) -> float:
        """Claim and ack everything with handler threads; returns seconds.

        One thread claims, the handlers take rows from one queue and hand them to
        another, one thread acks what is there: the least that a thread pool can do.
        """
        work: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[int | None] = queue.SimpleQueue()

        def handle() -> None:
            while (row := work.get()) is not None:
                done.put(row)

        def settle() -> None:
            with contextlib.closing(Bare(self._url)) as bare:
                ending = False
                while not ending:
                    ids = [done.get()]
                    with contextlib.suppress(queue.Empty):
                        while len(ids) < batch:
                            ids.append(done.get_nowait())
                    ending = None in ids
                    bare.ack([row for row in ids if row is not None])

        handlers = [threading.Thread(target=handle) for _ in range(threads)]
        acker = threading.Thread(target=settle)
        started = time.perf_counter()
        for thread in (*handlers, acker):
            thread.start()
        while ids := self.claim(batch):
            for row in ids:
                work.put(row)
        for _ in handlers:
            work.put(None)
        for thread in handlers:
            thread.join()
        done.put(None)
        acker.join()
        return time.perf_counter() - started

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


@contextlib.contextmanager
def bare(url: str) -> Iterator[Bare]:
    """A `Bare` for the length of the block."""
    with contextlib.closing(Bare(url)) as opened:
        yield opened
