"""A server that restarts, dies or throws its clients out: told plainly, then over."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import closing, contextmanager, suppress

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool

from headgate_sync.errors import (
    BackendError,
    IdConflict,
    InvalidRequest,
    LeaseRejected,
    StoreUnavailable,
)
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.postgres.database import is_alive
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.backends import SCHEMA
from tests.builders import admit, claim_one, counts, enqueue, envelope, state_of
from tests.postgres.proxy import proxy_to
from tests.servers import own_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    """A durable server of this module's own."""
    with own_server() as running:
        yield running


@pytest.fixture
def schema(server):
    """An empty schema."""
    migrate_up(server.conninfo, SCHEMA)
    yield SCHEMA
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(
            sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(SCHEMA))
        )


@contextmanager
def pooled(server, size=4, **options):
    with ConnectionPool(
        server.conninfo, min_size=size, max_size=size, open=True, timeout=10
    ) as pool:
        pool.wait()
        store = PgStore(pool, SCHEMA, **{"pool_timeout_ms": 10_000, **options})
        try:
            yield store
        finally:
            store.close()


@pytest.fixture
def store(server, schema):
    with pooled(server) as opened:
        yield opened


def terminate_all(server):
    """End all sessions and wait for their end."""
    server.terminate_backends()
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        for _ in range(10_000):
            [[left]] = connection.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ).fetchall()
            if not left:
                return
    raise TimeoutError("sessions outlive their termination")


DISTURBANCES = {
    "fast restart": lambda server: server.restart("fast"),
    "crash": lambda server: server.restart("kill"),
    "terminated sessions": terminate_all,
}

UNDER_USE = {
    **DISTURBANCES,
    "terminated sessions": lambda server: server.terminate_backends(),
}


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_idle_connections_that_died_are_replaced_unseen(server, store, disturb):
    enqueue(store, "a")
    claim = claim_one(store)
    assert store.renew([claim.lease_ref], lease_ms=60_000) == []
    disturb(server)
    for _ in range(6):
        assert store.renew([claim.lease_ref], lease_ms=60_000) == []
        assert store.promote_due(10) == 0
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert state_of(store, "a") is State.COMPLETED


def test_a_connection_is_dead_with_the_last_word_of_its_server(server):
    """Its stream may end much later, on a machine that has other things to do."""
    with proxy_to(server.conninfo) as proxy:
        proxy.lingers = True
        with psycopg.connect(proxy.conninfo, autocommit=True) as connection:
            assert is_alive(connection)
            server.terminate_backends()
            assert select.select([connection], [], [], 10)[0]
            assert not is_alive(connection)


def test_what_a_server_says_of_itself_is_no_last_word(server):
    """A setting that was reloaded is told to every session, and notices go on."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        told = []
        connection.add_notice_handler(lambda said: told.append(said.message_primary))
        connection.execute("LISTEN something")
        with psycopg.connect(server.conninfo, autocommit=True) as other:
            other.execute("NOTIFY something")
        assert select.select([connection], [], [], 10)[0]
        assert is_alive(connection)
        connection.execute("DO $$ BEGIN RAISE NOTICE 'as before'; END $$")
        assert told == ["as before"]


@pytest.mark.parametrize("disturb", UNDER_USE.values(), ids=UNDER_USE)
def test_work_goes_on_and_nothing_is_lost_or_done_twice(server, store, disturb):
    """Every call is repeated after an outage, as a worker would repeat it."""
    names = [f"a{number:03}" for number in range(240)]
    outages = []

    def sure(call):
        while True:
            try:
                return call()
            except StoreUnavailable as error:
                outages.append(error)

    def produce(part):
        for name in names[part::2]:
            sure(lambda name=name: enqueue(store, name))

    done = []

    def work():
        while len(done) < len(names):
            for claim in sure(lambda: admit(store, capacity=5)).claims:
                acknowledge(claim)
            sure(lambda: store.reclaim_expired(100))
            sure(lambda: store.promote_due(100))

    def acknowledge(claim):
        try:
            sure(lambda: store.ack(claim.lease_ref, Outcome.SUCCESS))
        except LeaseRejected:
            return  # the admission was repeated, and its first answer was lost
        done.append(claim.envelope.id)

    threads = [threading.Thread(target=produce, args=(part,)) for part in range(2)]
    threads += [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    rounds = 0
    while any(thread.is_alive() for thread in threads) and rounds < 3:
        disturb(server)
        orphaned(server)
        rounds += 1
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(done) == names
    assert counts(store) == {"completed": len(names)}
    assert all(error.retryable for error in outages)


def orphaned(server):
    """End the leases of claims whose answer was lost, instead of waiting for them."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(
            sql.SQL(
                "UPDATE {}.headgate_job SET lease_expires_at_ms = 1,"
                " max_attempts = max_attempts WHERE state = 'running'"
                " AND claimed_at_ms < {}.headgate_now_ms() - 1000"
            ).format(sql.Identifier(SCHEMA), sql.Identifier(SCHEMA))
        )


def test_an_ack_whose_session_is_ended_is_unknown_and_may_be_sent_again(server, store):
    enqueue(store, "a")
    ref = claim_one(store).lease_ref
    raised = []

    def ack():
        try:
            store.ack_batch([Ack(lease=ref, outcome=Outcome.SUCCESS)])
        except StoreUnavailable as error:
            raised.append(error)

    with psycopg.connect(server.conninfo) as other:
        other.execute(
            sql.SQL("SELECT FROM {}.headgate_job FOR UPDATE").format(
                sql.Identifier(SCHEMA)
            )
        )
        waiting = threading.Thread(target=ack)
        waiting.start()
        terminate_waiting(server)
        waiting.join()
    assert len(raised) == 1
    assert state_of(store, "a") is State.RUNNING
    store.ack(ref, Outcome.SUCCESS)
    assert state_of(store, "a") is State.COMPLETED


def terminate_waiting(server):
    """End the session that waits for a row lock, as soon as there is one."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        for _ in range(10_000):
            ended = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock'"
            ).fetchall()
            if ended:
                return
    raise TimeoutError("nobody waits for a lock")


def test_an_ack_whose_answer_was_lost_is_recognised(server, store):
    enqueue(store, "a", "b", retention_ms=0)
    enqueue(store, "c")
    claims = {claim.envelope.id: claim for claim in admit(store).claims}
    acks = [
        Ack(lease=claims["a"].lease_ref, outcome=Outcome.SUCCESS),
        Ack(lease=claims["c"].lease_ref, outcome=Outcome.RETRY, delay_ms=1),
    ]
    assert store.ack_batch(acks) == [None, None]
    server.restart("kill")
    again = store.ack_batch(acks)
    assert isinstance(again[0], LeaseRejected)
    assert again[0].missing
    assert again[1] is None


def test_while_the_server_is_away_only_rules_are_told_apart(server, schema):
    with pooled(server, size=1, pool_timeout_ms=200) as store:
        enqueue(store, "a")
        ref = claim_one(store).lease_ref
        server.stop("fast")
        try:
            for call in (
                lambda: enqueue(store, "b"),
                lambda: admit(store),
                lambda: store.ack(ref, Outcome.SUCCESS),
                lambda: store.renew([ref], lease_ms=1_000),
                lambda: store.reclaim_expired(1),
                lambda: store.duty_tick("w", ["d"], 1_000),
                lambda: store.inspect.get_job("a"),
            ):
                with pytest.raises(StoreUnavailable):
                    call()
            with pytest.raises(InvalidRequest):
                store.renew([ref], lease_ms=0)
            with pytest.raises(InvalidRequest):
                store.ack(ref, Outcome.SNOOZE)
            with pytest.raises(IdConflict):
                store.enqueue([envelope("c"), envelope("c")])
            assert store.renew([], lease_ms=1_000) == []
        finally:
            server.start()
        until_it_answers(lambda: store.ack(ref, Outcome.SUCCESS))
        assert counts(store) == {"completed": 1}


def test_a_sweep_that_was_cut_off_is_finished_by_the_next_one(server, store):
    enqueue(store, *[f"a{number}" for number in range(50)], fingerprint="f")
    admit(store, capacity=50, lease_ms=1)
    raised = []

    def reclaim():
        try:
            store.reclaim_expired(30)
        except StoreUnavailable as error:
            raised.append(error)

    with psycopg.connect(server.conninfo) as other:
        # The sweep waits before its end: another session may be about to write there.
        other.execute(
            sql.SQL("LOCK TABLE {}.headgate_inbox IN SHARE MODE").format(
                sql.Identifier(SCHEMA)
            )
        )
        sweeping = threading.Thread(target=reclaim)
        sweeping.start()
        terminate_waiting(server)
        sweeping.join()
    assert len(raised) == 1
    assert counts(store) == {"running": 50}
    assert len(store.reclaim_expired(30)) == 30
    assert len(store.reclaim_expired(30)) == 20


def test_a_store_connects_when_it_is_first_used(server, schema):
    server.stop("fast")
    store = PgStore.connect(server.conninfo, SCHEMA, pool_timeout_ms=200)
    with pytest.raises(StoreUnavailable):
        enqueue(store, "a")
    server.start()
    until_it_answers(lambda: enqueue(store, "a"))
    assert claim_one(store).envelope.id == "a"
    store.close()
    with pytest.raises(StoreUnavailable):
        enqueue(store, "b")


def until_it_answers(call):
    """Repeat a call until the pool has connected; each try waits for it a while."""
    for _ in range(100):
        with suppress(StoreUnavailable):
            return call()
    return call()


@pytest.mark.parametrize(
    ("part", "value", "cause"),
    [
        ("port", "1", "Is the server running"),
        ("dbname", "nowhere", 'database "nowhere" does not exist'),
        ("user", "nobody_here", 'role "nobody_here" does not exist'),
    ],
)
def test_who_waits_for_a_connection_in_vain_is_told_why(server, part, value, cause):
    address = make_conninfo(server.conninfo, **{part: value})
    with closing(PgStore.connect(address, pool_timeout_ms=2_000)) as store:
        with pytest.raises(StoreUnavailable, match=cause) as caught:
            enqueue(store, "a")
        assert str(caught.value).startswith("no connection within 2 s: ")
        assert "\n" not in str(caught.value)


def test_a_server_that_takes_connections_and_says_nothing_is_told_from_a_full_pool():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        closing(
            PgStore.connect(
                f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/x",
                pool_timeout_ms=500,
            )
        ) as store,
        pytest.raises(StoreUnavailable, match="s: the server does not answer"),
    ):
        enqueue(store, "a")


def test_a_schema_that_is_gone_is_told_with_what_makes_one(server, schema):
    with closing(PgStore.connect(server.conninfo, schema)) as store:
        enqueue(store, "a")
        rename = sql.SQL("ALTER SCHEMA {} RENAME TO {}")
        names = sql.Identifier(schema), sql.Identifier("elsewhere")
        with psycopg.connect(server.conninfo, autocommit=True) as admin:
            admin.execute(rename.format(*names))
            try:
                with pytest.raises(BackendError, match="headgate migrate up") as caught:
                    enqueue(store, "b")
            finally:
                admin.execute(rename.format(*reversed(names)))
        assert "handed over" not in str(caught.value)


def test_a_pool_that_is_used_up_says_so(server, schema):
    options = {"pool_size": 1, "pool_timeout_ms": 500}
    with (
        closing(PgStore.connect(server.conninfo, schema, **options)) as store,
        store.transactional.transaction(),
        pytest.raises(StoreUnavailable, match="all 1 of the pool are in use"),
    ):
        enqueue(store, "a")


@pytest.mark.parametrize("options", ["", "-c statement_timeout=60s"])
def test_a_standby_is_an_outage_that_says_what_it_is(options):
    """Also where a session's settings ask for a transaction with settings of its own,
    which a standby refuses to begin."""
    with own_server() as server:
        migrate_up(server.conninfo)
        server.stop("fast")
        (server.pgdata / "standby.signal").touch()
        server.start()
        url = make_conninfo(server.conninfo, options=options)
        telling = r"^the server takes no writes, as a standby .* of the primary"
        with closing(PgStore.connect(url)) as store:
            assert store.inspect.get_job("a") is None
            with pytest.raises(StoreUnavailable, match=telling):
                enqueue(store, "a")
            with pytest.raises(StoreUnavailable, match=telling):
                admit(store)
