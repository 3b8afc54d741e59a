"""Roles of a real server: each can do all that it may, and nothing that it must not."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from contextlib import ExitStack, contextmanager, nullcontext

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from werkzeug.test import Client

from headgate_sync import Headgate
from headgate_sync.api import ApiConfig, create_app
from headgate_sync.api.routes import ROUTES
from headgate_sync.console import ConsoleConfig
from headgate_sync.console import create_app as create_console
from headgate_sync.console.pages import PAGES
from headgate_sync.context import JobContext
from headgate_sync.errors import BackendError, ConfigurationError, DuplicateJob
from headgate_sync.lease import Checkpoint, JobResult, LeaseRef, ProgressUpdate
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.operations import BulkRequest
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.postgres import manifest, roles
from headgate_sync.postgres.migrate import grant, migrate_down, migrate_up
from headgate_sync.postgres.roles import HIDDEN, MIGRATOR, ROLES, STATEMENTS, rights
from headgate_sync.postgres.sql import statement_names
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from headgate_sync.schedule import Schedule, ScheduleEvent
from headgate_sync.worker import Worker, WorkerConfig
from headgate_sync.worker.__main__ import make_worker, parser
from headgate_sync.workers import WorkerMeta
from tests import rights as drawing
from tests import rights_page
from tests.as_roles import drop_roles, make_roles, pools_of
from tests.builders import admit, claim_one, enqueue, envelope
from tests.cli.conftest import VARIABLES, invoke, served
from tests.manifest_file import newest_schema
from tests.servers import new_database
from tests.worker.rig import wait_for

SCHEMA = "headgate"
NOT_ALLOWED = "42501"


@pytest.fixture(scope="module")
def url(server_url):
    """A database whose schema nobody but its owner may use without a grant."""
    with new_database(server_url) as made:
        migrate_up(made)
        yield made


@pytest.fixture(scope="module")
def owner(url):
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def logins(owner):
    names = make_roles(owner, SCHEMA)
    yield names
    drop_roles(owner, names)


@pytest.fixture(scope="module")
def stores(url, logins):
    """A store for each role."""
    with pools_of(url, logins) as pools:
        made = {role: PgStore(pool, SCHEMA) for role, pool in pools.items()}
        yield made
        for store in made.values():
            store.close()


@pytest.fixture
def queue():
    return f"q{uuid.uuid4().hex}"


@contextmanager
def refused():
    """What the server must refuse for want of a right."""
    with pytest.raises(BackendError) as raised:
        yield raised
    assert raised.value.sqlstate == NOT_ALLOWED
    assert "CONTEXT" not in str(raised.value)


def test_every_statement_belongs_to_a_role():
    assert MIGRATOR.union(*STATEMENTS.values()) == set(statement_names())
    assert not MIGRATOR & set().union(*STATEMENTS.values())


def test_the_rights_are_those_that_the_statements_need(owner):
    with newest_schema(owner) as schema:
        assert drawing.render(owner, schema) == roles.FILE.read_text()


def test_the_page_shows_the_rights():
    assert rights_page.split()[1] == rights_page.render()


@pytest.mark.parametrize("role", ["", "a\0b"])
def test_what_cannot_be_a_role_of_the_server_gets_no_statements(url, role):
    with pytest.raises(ConfigurationError, match="cannot be a role"):
        list(roles.grants(role, "reader", SCHEMA))
    with pytest.raises(ConfigurationError, match="cannot be a role"):
        grant(url, SCHEMA, role=role, as_role="reader")


def test_nothing_is_granted_that_does_not_exist():
    tables = manifest.columns()
    for right in rights():
        assert right.role in ROLES
        if right.kind == "TABLE":
            assert set(right.columns) <= set(tables[right.name])
        elif right.kind == "FUNCTION":
            assert right.name in manifest.functions()


def privileges(role, table):
    return {
        right.privilege: right.columns
        for right in rights()
        if (right.role, right.kind, right.name) == (role, "TABLE", table)
    }


def test_the_rights_keep_the_roles_apart():
    policies = ("headgate_rate_class", "headgate_ceiling", "headgate_budget")
    assert all(
        right.privilege == "SELECT"
        for right in rights()
        if right.role == "reader" and right.kind == "TABLE"
    )
    for table in policies:
        assert privileges("producer", table) == {}
    assert privileges("worker", "headgate_ceiling").keys() == {"SELECT"}
    assert "limit_tokens" not in privileges("worker", "headgate_budget")["UPDATE"]
    assert privileges("worker", "headgate_enqueue_policy")["UPDATE"] == ("lock_right",)
    assert privileges("producer", "headgate_enqueue_policy") == {
        "SELECT": (),
        "UPDATE": ("lock_right",),
    }
    assert set(privileges("worker", "headgate_schedule")["UPDATE"]) == {
        "last_enqueued_ms",
        "next_run_ms",
    }
    assert "fence" not in privileges("operator", "headgate_job")["UPDATE"]
    assert "DELETE" not in privileges("producer", "headgate_job")
    for role in ROLES:
        assert privileges(role, "headgate_grant") == {}
        assert privileges(role, "headgate_schema_migration") == {"SELECT": ()}


# What the server itself says of each right


def may(connection, login, table, privilege, column):
    [[answer]] = connection.execute(
        "SELECT has_column_privilege(%s, %s, %s, %s)",
        [login, f"{SCHEMA}.{table}", column, privilege],
    ).fetchall()
    return answer


@pytest.mark.parametrize("role", ROLES)
def test_the_server_grants_each_right_of_the_table_and_no_other(owner, logins, role):
    for table, columns in manifest.columns().items():
        given = privileges(role, table)
        for privilege in ("SELECT", "INSERT", "UPDATE"):
            named = given.get(privilege)
            allowed = set() if named is None else set(named or columns)
            found = {
                column
                for column in columns
                if may(owner, logins[role], table, privilege, column)
            }
            assert found == allowed, (table, privilege)
        for privilege in ("DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"):
            [[found]] = owner.execute(
                "SELECT has_table_privilege(%s, %s, %s)",
                [logins[role], f"{SCHEMA}.{table}", privilege],
            ).fetchall()
            assert found == (privilege in given), (table, privilege)
    [[creates]] = owner.execute(
        "SELECT has_schema_privilege(%s, %s, 'CREATE')", [logins[role], SCHEMA]
    ).fetchall()
    assert not creates


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_run_its_functions_and_no_other(owner, logins, role):
    callable_ = {
        name
        for (name,) in owner.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = %s::regnamespace"
            " AND has_function_privilege(%s, oid, 'EXECUTE')",
            [SCHEMA, logins[role]],
        )
    }
    assert callable_ == {
        right.name
        for right in rights()
        if (right.role, right.kind) == (role, "FUNCTION")
    }


@pytest.mark.parametrize("role", HIDDEN)
def test_hidden_columns_cannot_be_read(url, logins, role):
    with psycopg.connect(make_conninfo(url, user=logins[role]), autocommit=True) as us:
        for table, columns in HIDDEN[role].items():
            for column in columns:
                read = sql.SQL("SELECT {} FROM {}").format(
                    sql.Identifier(column), sql.Identifier(SCHEMA, table)
                )
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    us.execute(read)


# What the stores of the roles do


def test_a_producer_enqueues_in_every_form(url, logins, stores, queue):
    producer = stores["producer"]
    enqueue(producer, f"{queue}1", queue=queue)
    producer.enqueue([envelope(id=f"{queue}{n}", queue=queue) for n in (2, 3)])
    stores["operator"].inspect.set_enqueue_limit(queue, 100)
    enqueue(producer, f"{queue}4", queue=queue, tags=("a", "b"), delay_ms=1_000)
    enqueue(producer, f"{queue}5", queue=queue, unique_key=queue.encode())
    with pytest.raises(DuplicateJob):
        enqueue(producer, f"{queue}6", queue=queue, unique_key=queue.encode())
    with psycopg.connect(make_conninfo(url, user=logins["producer"])) as own:
        handle = producer.transactional.join(own)
        producer.transactional.enqueue_tx(
            handle, [envelope(id=f"{queue}7", queue=queue)]
        )
    assert stores["reader"].inspect.unfinished(queue) == 6


def test_a_producer_can_neither_claim_nor_settle_nor_steer(stores, queue):
    producer = stores["producer"]
    enqueue(producer, queue, queue=queue)
    with refused():
        admit(producer, queues=(queue,))
    inspect = stores["producer"].inspect
    for steer in (
        lambda: inspect.delete_job(queue),
        lambda: inspect.operator_cancel(queue),
        lambda: inspect.set_queue_paused(queue, True),
        lambda: inspect.set_enqueue_limit(queue, 1),
        lambda: inspect.upsert_rate_class(rate_class(queue)),
        lambda: inspect.quarantine_release("f"),
        lambda: producer.results.read_result(queue),
        lambda: producer.outputs.read_output(queue),
        lambda: producer.evict_retained(1),
        lambda: producer.claim_duty("d", "me", 1_000),
    ):
        with refused():
            steer()


def rate_class(name):
    return RateClassConfig(name=name, limit=5, window_ms=1_000, burst=5)


@pytest.mark.parametrize("role", ["producer", "operator", "reader", "worker"])
def test_a_worker_begins_with_the_rights_of_a_worker_only(stores, role):
    hg, arguments = Headgate(stores[role]), parser().parse_args(["shop:hg"])
    with nullcontext() if role == "worker" else refused():
        make_worker(hg, arguments)


def test_a_worker_runs_jobs_from_enqueue_to_result(stores, queue):
    worker = stores["worker"]
    stores["operator"].inspect.upsert_rate_class(rate_class(queue))
    for name in ("a", "b", "c"):
        enqueue(
            stores["producer"],
            f"{queue}{name}",
            queue=queue,
            rate_class=queue,
            retention_ms=60_000,
        )
    claims = [claim_one(worker, queues=(queue,)) for _ in range(3)]
    leases = [claim.lease_ref for claim in claims]
    assert worker.renew(leases, lease_ms=60_000) == []
    worker.checkpoint(leases[0], Checkpoint(completed_steps=("s",)))
    worker.outputs.write_job_output(leases[0], JobResult(schema_version=1, data=b"o"))
    worker.progress.write_job_progress(leases[0], ProgressUpdate(current=1, total=2))
    worker.results.ack_success_with_result(
        leases[0], JobResult(schema_version=1, data=b"r")
    )
    assert worker.results.read_result(f"{queue}a").data == b"r"
    worker.ack(leases[1], Outcome.RETRY)
    worker.ack(leases[2], Outcome.RATE_LIMITED, delay_ms=60_000)
    assert worker.duty_tick("me", ["sweep"], 60_000)
    worker.reclaim_expired(10)
    worker.promote_due(10)
    worker.evict_retained(10)
    worker.maintenance.gate_fold(100)
    worker.maintenance.gate_reconcile(100)
    worker.maintenance.prune_effects(1_000, 10)
    worker.inspect.quarantine_sweep(10)
    worker.inspect.run_pending_operations(10)
    with worker.transactional.transaction() as tx:
        assert worker.transactional.claim_effect(tx, queue)
    enqueue(worker, f"{queue}d", queue=queue)


def test_a_whole_worker_lives_on_the_rights_of_its_role(stores, queue, caplog):
    registry, ended = Registry(), threading.Event()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        with ctx.step("first"):
            ctx.report_progress(1, 2)
        assert ctx.once(lambda tx: ended.set())

    worker = Worker(
        stores["worker"],
        registry,
        WorkerConfig(
            queues=(queue,),
            capacity=2,
            worker_id=queue,
            duty_interval="100ms",
        ),
    )
    with caplog.at_level(logging.WARNING, "headgate_sync"), worker:
        enqueue(stores["producer"], queue, queue=queue, kind="k", payload=b"{}")
        assert ended.wait(20)
        wait_for(
            lambda: stores["reader"].inspect.get_job(queue).state == State.COMPLETED,
            "the end of the job",
        )
        assert [w.worker_id for w in stores["reader"].inspect.list_workers()] == [queue]
    assert [line.getMessage() for line in caplog.records] == []


def test_sweeps_archive_on_the_rights_of_their_roles(stores, owner, queue):
    """An operator sets the policy; worker and operator copy; the owner alone prunes."""
    worker, operator = stores["worker"], stores["operator"]
    operator.maintenance.set_archive_policy(queue, 1)
    assert queue in [p.queue for p in operator.maintenance.archive_policies()]
    for name, retention_ms in (("a", 1), ("b", 60_000)):
        enqueue(worker, f"{queue}{name}", queue=queue, retention_ms=retention_ms)
        claim = claim_one(worker, queues=(queue,))
        worker.ack(claim.lease_ref, Outcome.SUCCESS)
    wait_for(lambda: worker.evict_retained(1_000) > 0, "the end of the retention")
    cutoff_ms = operator.inspect.store_now_ms() + 1
    assert operator.inspect.archive_completed_older_than(cutoff_ms, 1_000) > 0
    copied = owner.execute(
        "SELECT id FROM headgate.headgate_job_archive WHERE queue = %s", [queue]
    )
    assert {f"{queue}a", f"{queue}b"} == {name for (name,) in copied}
    for role in ROLES:
        maintenance = stores[role].maintenance
        with refused():
            maintenance.prune_archive_month("202501")
        if role != "operator":
            with refused():
                maintenance.set_archive_policy(queue, 1)
            with refused():
                maintenance.clear_archive_policy(queue)
    operator.maintenance.clear_archive_policy(queue)


def test_a_worker_edits_no_policy_and_no_table(url, logins, stores, queue):
    inspect = stores["worker"].inspect
    ceiling = Ceiling(name=queue, scope="queue", queue=queue, max_concurrent=1)
    for edit in (
        lambda: inspect.upsert_rate_class(rate_class(queue)),
        lambda: inspect.upsert_concurrency_limit(ceiling),
        lambda: inspect.set_enqueue_limit(queue, 1),
        lambda: inspect.set_queue_paused(queue, True),
        lambda: inspect.set_partition_quantum(queue, "p", 2),
        lambda: inspect.quarantine_release("f"),
    ):
        with refused():
            edit()
    with psycopg.connect(
        make_conninfo(url, user=logins["worker"]), autocommit=True
    ) as us:
        for change in (
            "CREATE TABLE headgate.mine ()",
            "ALTER TABLE headgate.headgate_job ADD COLUMN mine text",
            "DROP FUNCTION headgate.headgate_now_ms()",
            "INSERT INTO headgate.headgate_grant VALUES ('me', 'operator')",
            "DELETE FROM headgate.headgate_schema_migration",
            "TRUNCATE headgate.headgate_job",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                us.execute(change)


def test_an_operator_steers_everything_and_claims_nothing(stores, queue):
    operator = stores["operator"]
    inspect = operator.inspect
    for name in ("a", "b", "c", "d"):
        enqueue(operator, f"{queue}{name}", queue=queue)
    inspect.operator_cancel(f"{queue}a")
    inspect.operator_retry(f"{queue}a")
    inspect.delete_job(f"{queue}b")
    inspect.edit_payload(f"{queue}c", b"new", schema_version=1, fingerprint="f")
    assert inspect.get_job(f"{queue}c", include_payload=True).payload == b"new"
    assert inspect.replay_job(f"{queue}d")
    inspect.set_queue_paused(queue, True)
    inspect.set_queue_paused(queue, False)
    inspect.set_queue_weight(queue, 3)
    inspect.set_enqueue_limit(queue, 9)
    inspect.set_enqueue_limit(queue, None)
    inspect.upsert_rate_class(rate_class(queue))
    inspect.pause_rate_class(queue, 1_000, "r")
    assert inspect.resume_rate_class(queue)
    inspect.upsert_concurrency_limit(
        Ceiling(name=queue, scope="queue", queue=queue, max_concurrent=1)
    )
    assert inspect.delete_concurrency_limit(queue)
    assert inspect.delete_rate_class(queue) is not None
    assert operator.results.read_result(f"{queue}a") is None
    assert operator.outputs.read_output(f"{queue}a") is None
    assert operator.progress.read_progress(f"{queue}a") is None
    assert inspect.delete_queue(queue, force=True) is not None
    with refused():
        admit(operator, queues=(queue,))
    with refused():
        operator.checkpoint(
            LeaseRef(job_id=queue, lease_id="x", fence=1),
            Checkpoint(completed_steps=("s",)),
        )


def test_a_reader_reads_all_but_payloads_and_writes_nothing(stores, queue):
    reader = stores["reader"]
    enqueue(stores["producer"], queue, queue=queue, tags=("t",))
    inspect = reader.inspect
    assert inspect.get_job(queue).state == State.AVAILABLE
    assert [job.id for job in inspect.get_jobs([queue])] == [queue]
    assert queue in [job.id for job in inspect.list_jobs().jobs]
    assert inspect.unfinished(queue) == 1
    inspect.counts(queue)
    inspect.queue_stats()
    inspect.history(queue, 0)
    inspect.partitions(queue)
    inspect.rate_classes()
    inspect.concurrency_limits()
    inspect.quarantine_list()
    inspect.distinct_kinds(10)
    inspect.explain_admission(queue)
    inspect.list_workers()
    inspect.cluster()
    reader.maintenance.index_health()
    with refused() as raised:
        inspect.get_job(queue, include_payload=True)
    assert "permission denied for table headgate_job" in str(raised.value)
    assert "headgate migrate grants" in str(raised.value)
    for write in (
        lambda: enqueue(reader, f"{queue}2", queue=queue),
        lambda: admit(reader, queues=(queue,)),
        lambda: inspect.delete_job(queue),
        lambda: inspect.read_checkpoint(queue),
        lambda: reader.promote_due(1),
    ):
        with refused():
            write()


# Every method of the inspection: what a reader may call, and with what.
READS = {
    "cluster": {},
    "concurrency_limits": {},
    "counts": {},
    "distinct_kinds": {"limit": 10},
    "explain_admission": {"job_id": "job"},
    "get_job": {"job_id": "job"},
    "get_jobs": {"ids": ["job"]},
    "get_operation": {"operation_id": "op"},
    "get_worker": {"worker_id": "w"},
    "history": {"queue": "seen", "since_ms": 0},
    "list_jobs": {},
    "list_schedule_events": {"schedule_id": "nightly"},
    "list_schedules": {"include_payload": False},
    "list_workers": {},
    "partitions": {"queue": "seen"},
    "quarantine_list": {},
    "queue_stats": {},
    "rate_classes": {},
    "store_now_ms": {},
    "unfinished": {"queue": "seen"},
}
# They show how time goes by.
TIMED = {"cluster", "get_worker", "list_workers", "queue_stats", "store_now_ms"}
CONTENTS = {
    "get_job": {"job_id": "job", "include_payload": True},
    "get_schedule": {"schedule_id": "nightly"},
    "list_schedules": {},
    "read_checkpoint": {"job_id": "job"},
}
STEERS = {
    "advance_schedule", "archive_completed_older_than", "cancel_jobs",
    "create_operation", "delete_concurrency_limit", "delete_job", "delete_queue",
    "delete_rate_class", "delete_schedule", "delete_terminal", "due_schedules",
    "edit_payload", "fire_ticks", "forget_worker", "heartbeat", "heartbeat_worker",
    "operator_cancel", "operator_retry", "pause_rate_class", "promote_job",
    "quarantine_release", "quarantine_sweep", "record_schedule_event", "replay_job",
    "reschedule_job", "resume_rate_class", "run_pending_operations",
    "sample_queue_memory", "schedule_pending", "set_enqueue_limit",
    "set_partition_quantum", "set_queue_paused", "set_queue_weight",
    "set_schedule_paused", "signal_worker", "trim_history",
    "upsert_concurrency_limit", "upsert_rate_class", "upsert_schedule",
}  # fmt: skip


@pytest.fixture(scope="module")
def furnished(owner, stores):
    """Something to see for every read."""
    inspect = stores["operator"].inspect
    owner.execute(
        "INSERT INTO headgate.headgate_quarantine VALUES ('f', 'k', 3, 1, 'p', 'r')"
    )
    enqueue(stores["producer"], "job", queue="seen", tags=("t",), partition_key="p")
    inspect.upsert_rate_class(rate_class("seen"))
    inspect.upsert_concurrency_limit(
        Ceiling(name="seen", scope="queue", queue="seen", max_concurrent=1)
    )
    inspect.upsert_schedule(
        Schedule(
            id="nightly",
            kind="k",
            spec="@daily",
            payload=b"secret",
            headers={"k": "secret"},
            next_run_ms=1,
        )
    )
    inspect.record_schedule_event(
        ScheduleEvent(
            schedule_id="nightly", tick_ms=1, job_id="", outcome="failed", reason="r"
        )
    )
    inspect.create_operation(BulkRequest(id="op", action="cancel", queue="none"))
    stores["worker"].inspect.heartbeat_worker(
        WorkerMeta(
            worker_id="w", host="h", pid=1, queues=("seen",), concurrency=1,
            started_at_ms=1,
        )
    )  # fmt: skip
    return stores


def test_a_reader_may_make_every_read_and_sees_what_is_there(furnished):
    reader = furnished["reader"].inspect
    names = {name for name in dir(type(reader)) if not name.startswith("_")}
    assert names == READS.keys() | CONTENTS.keys() | STEERS
    for name, given in READS.items():
        whole = getattr(furnished["operator"].inspect, name)
        seen = getattr(reader, name)(**given)
        assert seen or seen == 0, name
        if name not in TIMED:
            assert seen == whole(**given), name


def test_a_reader_is_refused_contents(furnished):
    for name, given in CONTENTS.items():
        with refused():
            getattr(furnished["reader"].inspect, name)(**given)


@pytest.mark.parametrize("over", ["database", "http"])
def test_a_command_line_shows_a_reader_a_job_without_its_contents(
    furnished, url, logins, over, monkeypatch
):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        where = ["--database-url", make_conninfo(url, user=logins["reader"])]
        if over == "http":
            app = create_app(furnished["reader"], ApiConfig(rate_limit=None))
            where = ["--api", stack.enter_context(served(app))]
        shown = invoke("job", "show", "job", "-o", "json", *where)
        found = json.loads(shown.stdout)
        assert (found["id"], found["progress"]) == ("job", None)
        for part in ("result", "output", "checkpoint"):
            assert list(found[part]) == ["refused"]
        assert "refused" in invoke("job", "show", "job", *where).stdout
        invoke("job", "show", "job", "--payload", *where, code=4)


def test_an_api_on_the_role_of_a_reader_shows_every_page(furnished, caplog):
    console = create_console(
        furnished["reader"],
        ConsoleConfig(api=ApiConfig(read_only=True, rate_limit=None)),
    )
    client, base = Client(console), "/api/v1"
    named = {"queue": "queue?name=seen", "job": "job?id=job"}
    more = [
        "periodic?events=nightly",
        "jobs?q=tag:t&queue=seen",
        "partitions?queue=seen",
    ]
    for page in [*(named.get(p.path, p.path) for p in PAGES), *more]:
        assert client.get(f"/{page}").status_code == 200, page
    values = {"queue": "seen", "id": "job"}
    for route in ROUTES:
        if route.method != "GET" or route.path == "/events":
            continue
        ids = {"/operations/{id}": "op", "/periodic/{id}/enqueue-events": "nightly"}
        path = route.path.format_map(values | {"id": ids.get(route.path, "job")})
        kept = route.path.endswith(("/result", "/output", "/checkpoint"))
        takes_queue = any(one.name == "queue" for one in route.query)
        filters = "?queue=seen" if takes_queue else ""
        status = client.get(f"{base}{path}{filters}").status_code
        if path.endswith("/progress"):
            assert status == 404
        else:
            assert status == (403 if kept else 200), path
    answer = client.get(f"{base}/jobs/job?include_payload=true")
    assert answer.status_code == 403
    assert answer.json == {"error": "the database role of this API may not do that"}
    assert "secret" not in client.get(f"{base}/periodic").text
    assert "lacks a right" not in answer.text
    console.close()


def test_the_rights_of_tables_hold_where_everybody_may_run_functions(
    owner, stores, queue
):
    every = sql.SQL("{} EXECUTE ON ALL FUNCTIONS IN SCHEMA headgate {} PUBLIC")
    owner.execute(every.format(sql.SQL("GRANT"), sql.SQL("TO")))
    try:
        enqueue(stores["producer"], queue, queue=queue)
        for role in ("producer", "operator", "reader"):
            with refused():
                admit(stores[role], queues=(queue,))
        for role in ("producer", "worker", "reader"):
            with refused():
                stores[role].inspect.upsert_rate_class(rate_class(queue))
        for role in ("producer", "reader"):
            with refused():
                stores[role].inspect.delete_job(queue)
    finally:
        owner.execute(every.format(sql.SQL("REVOKE"), sql.SQL("FROM")))
        for login, role in owner.execute(
            "SELECT role, as_role FROM headgate.headgate_grant"
        ).fetchall():
            grant(owner, role=login, as_role=role)


# Giving and giving again


def test_rights_are_given_again_with_each_version(owner, url):
    schema = f"hg_{uuid.uuid4().hex}"
    login = f"headgate_test_{uuid.uuid4().hex}"
    name = sql.Identifier(login)
    owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
    try:
        migrate_up(url, schema, target=1)
        grant(url, schema, role=login, as_role="worker")
        grant(url, schema, role=login, as_role="operator")
        migrate_up(url, schema)
        with pools_of(url, {"both": login}) as pools:
            store = PgStore(pools["both"], schema)
            enqueue(store, "a")
            store.ack(claim_one(store).lease_ref, Outcome.SUCCESS)
            store.inspect.set_queue_paused("q", True)
            store.close()
        migrate_down(url, schema)
        migrate_up(url, schema)
        with pools_of(url, {"both": login}) as pools, refused():
            enqueue(PgStore(pools["both"], schema), "a")
    finally:
        owner.execute(
            sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}; DROP SCHEMA {1} CASCADE").format(
                name, sql.Identifier(schema)
            )
        )


def test_a_role_that_is_gone_does_not_stop_an_upgrade(owner, url):
    schema = f"hg_{uuid.uuid4().hex}"
    login = f"headgate_test_{uuid.uuid4().hex}"
    owner.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(login)))
    migrate_up(url, schema, target=2)
    grant(url, schema, role=login, as_role="reader")
    owner.execute(
        sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(login))
    )
    assert migrate_up(url, schema)
    owner.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


def test_an_unknown_role_is_refused_on_either_side(url):
    with pytest.raises(ConfigurationError, match='must run: CREATE ROLE "no such"'):
        grant(url, role="no such", as_role="worker")
    with pytest.raises(ConfigurationError, match="none of producer, worker"):
        grant(url, role="postgres", as_role="migrator")
    with pytest.raises(ConfigurationError, match="run `headgate migrate up`"):
        grant(url, "nothing here", role="postgres", as_role="worker")


def test_the_printed_statements_give_what_is_given_directly(owner, url):
    login = f'headgate_test_{uuid.uuid4().hex} "x"'
    name = sql.Identifier(login)
    owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
    try:
        for text in roles.grants(login, "producer", SCHEMA):
            owner.execute(text.encode())
        with pools_of(url, {"producer": login}) as pools:
            enqueue(PgStore(pools["producer"], SCHEMA), uuid.uuid4().hex)
    finally:
        owner.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(name))
