"""Producers whose transaction is prepared first and committed by a second step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.builders import envelope
from tests.scenarios.gate import ack_all, admit, fill, ids
from tests.servers import own_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_server(max_prepared_transactions="4") as server:
        migrate_up(server.conninfo)
        yield server.conninfo


@pytest.fixture
def store(url: str) -> Iterator[Any]:
    with contextlib.closing(PgStore.connect(url)) as store:
        yield store


@pytest.fixture
def producer(url: str) -> Iterator[psycopg.Connection[Any]]:
    with contextlib.closing(psycopg.connect(url)) as connection:
        yield connection


def enqueue_prepared(store: PgStore, producer: Any, name: str) -> None:
    producer.tpc_begin(name)
    tx = store.transactional.join(producer)
    store.transactional.enqueue_tx(tx, [envelope(name, partition_key=name)])
    producer.tpc_prepare()


def test_what_was_prepared_long_ago_is_heard_after_its_commit(store, producer):
    """Admissions look only at news since a horizon, which it holds back."""
    fill(store, "first", 40)
    ack_all(store, admit(store, 1))
    enqueue_prepared(store, producer, "late")
    for _ in range(20):  # past the rounds in which bounds follow
        ack_all(store, admit(store, 1))
    producer.tpc_commit()
    assert "late" in ids(admit(store, 19))


def test_a_server_refuses_to_prepare_what_would_wake_a_worker(store, producer):
    """It cannot keep a notification; the transaction is rolled back as a whole."""
    ack_all(store, admit(store))
    assert ids(admit(store)) == []
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
        enqueue_prepared(store, producer, "refused")
    assert store.inspect.get_job("refused") is None
