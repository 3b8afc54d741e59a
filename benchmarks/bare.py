"""The bare limit: the same work on a plain table, one statement each and no policy."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg

PAYLOAD = b'{"order_id":4711,"tenant":"acme","note":"' + b"x" * 160 + b'"}'

_TABLE = """
DROP TABLE IF EXISTS bare_job;
CREATE TABLE bare_job (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text NOT NULL,
  priority integer NOT NULL, scheduled_at_ms bigint NOT NULL, state text NOT NULL,
  attempt integer NOT NULL DEFAULT 0, worker text, lease_expires_at_ms bigint,
  payload bytea NOT NULL) WITH (fillfactor = 85);
CREATE INDEX bare_ready ON bare_job (queue, priority DESC, scheduled_at_ms, id)
  WHERE state = 'available';
"""

INSERT = """
INSERT INTO bare_job (queue, priority, scheduled_at_ms, state, payload)
VALUES ('bench', 0, 1, 'available', %s)
"""

_INSERT_MANY = """
INSERT INTO bare_job (queue, priority, scheduled_at_ms, state, payload)
SELECT 'bench', 0, 1, 'available', payload FROM unnest(%b::bytea[]) AS payload
"""

_FILL = """
INSERT INTO bare_job (queue, priority, scheduled_at_ms, state, payload)
SELECT 'bench', 0, number, 'available', %s FROM generate_series(1, %s) AS number
"""

_CLAIM = """
UPDATE bare_job SET state = 'running', attempt = attempt + 1, worker = 'w',
  lease_expires_at_ms = 1 WHERE id = ANY (ARRAY (
    SELECT id FROM bare_job WHERE queue = 'bench' AND state = 'available'
    ORDER BY priority DESC, scheduled_at_ms, id LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING id, queue, priority, scheduled_at_ms, attempt, payload
"""

_ACK = "DELETE FROM bare_job WHERE id = ANY (%b::bigint[]) AND state = 'running'"


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
        self.connection.execute(_FILL, (PAYLOAD, rows))
        self.connection.execute("VACUUM ANALYZE bare_job")

    def insert_one(self) -> None:
        """One row, one commit."""
        self.connection.execute(INSERT, (PAYLOAD,))

    def insert_many(self, rows: int) -> None:
        """Many rows, one statement, one commit."""
        self.connection.execute(_INSERT_MANY, ([PAYLOAD] * rows,))

    def claim(self, rows: int) -> list[int]:
        """Claim up to that many rows; returns their ids."""
        return [row[0] for row in self.connection.execute(_CLAIM, (rows,)).fetchall()]

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
