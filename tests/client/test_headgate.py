"""The facade: lazy, bound once, over any store, closed by its owner."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import attrs
import pytest
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool

from headgate_sync.app import Headgate
from headgate_sync.context import JobContext
from headgate_sync.embedded import remove
from headgate_sync.errors import (
    ConfigurationError,
    DuplicateJob,
    InvalidRequest,
    NotFound,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.lifecycle import State
from headgate_sync.memory.store import MemStore
from headgate_sync.options import TaskOptions
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from headgate_sync.settings import Settings
from tests.servers import reachable_directory

NOWHERE = "postgresql://nobody:hunter2@127.0.0.1:1/none"


@pytest.fixture
def hg():
    return Headgate(MemStore(), defaults=TaskOptions(queue="q"))


def tasks_of(hg):
    @hg.task("order:ship", unique="{order_id}")
    def ship(ctx: JobContext, order_id: int) -> None: ...

    return ship


def flask_app(**config):
    """The two things of a Flask application that the facade touches."""
    return SimpleNamespace(config=config, extensions={})


# Enqueueing


def test_every_way_to_enqueue_stores_the_same_job(hg):
    ship = tasks_of(hg)
    handles = [
        ship.enqueue(1),
        ship.using(priority=0).enqueue(order_id=2),
        hg.enqueue(ship, 3),
        hg.enqueue(ship, order_id=4),
        hg.enqueue(ship.using(tags=["x"]), 5),
        hg.enqueue(ship.job(6)),
        hg.enqueue_many([ship.job(7)])[0],
        hg.enqueue_or_join(ship, 8),
        ship.enqueue_or_join(9),
        next(hg.enqueue_chunks([ship.job(10)]))[0],
        ship.using(priority=0).enqueue_or_join(11),
    ]
    assert {handle.queue for handle in handles} == {"q"}
    found = [hg.store.inspect.get_job(h.id, include_payload=True) for h in handles]
    assert [job.payload for job in found] == [
        b'{"order_id":%d}' % n for n in range(1, 12)
    ]


def test_keywords_after_a_class_are_options(hg):
    @hg.task("mail")
    @attrs.frozen
    class Mail:
        to: str

    @hg.handler(Mail)
    def deliver(job: Mail) -> None: ...

    job = hg.get(hg.enqueue(Mail("ada"), delay="5m", priority=3).id)
    assert (job.state, job.priority) == (State.SCHEDULED, 3)
    with pytest.raises(InvalidRequest, match="belong to a function task only"):
        hg.enqueue(Mail("ada"), 5)
    assert hg.registry.resolve("mail").name.endswith("deliver")


def test_the_second_of_one_key_raises_or_joins(hg):
    ship = tasks_of(hg)
    first = ship.enqueue(1)
    with pytest.raises(DuplicateJob) as caught:
        ship.enqueue(1)
    assert caught.value.existing_id == first.id
    joined = ship.enqueue_or_join(1)
    assert (joined.id, joined.joined) == (first.id, True)


def test_jobs_can_be_looked_at_and_cancelled(hg):
    handle = tasks_of(hg).enqueue(1)
    hg.cancel(handle.id)
    assert hg.get(handle.id).state == State.CANCELLED
    assert hg.get("nope") is None
    with pytest.raises(NotFound):
        hg.cancel("nope")


def test_an_included_registry_enqueues_through_the_facade(hg):
    registry = Registry()

    @registry.task("early")
    def early() -> None: ...

    hg.include(registry)
    assert hg.get(early.enqueue().id).kind == "early"
    other = Headgate(MemStore())
    other.include(registry)
    with pytest.raises(ConfigurationError, match="task early belongs to 2 facades"):
        early.enqueue()
    assert hg.get(hg.enqueue(early).id) is not None
    assert other.get(other.enqueue(early).id) is not None


def test_declarations_of_handlers_and_upcasters_reach_the_registry(hg):
    @hg.task("work", version=2)
    def work(value: int) -> None: ...

    @hg.upcaster(work, 1)
    def from_1(data: bytes) -> dict[str, int]:
        return {"value": len(data)}

    hg.raw_handler("raw")(lambda envelope: None)
    assert work.decode(1, b"xxx") == {"value": 3}
    assert hg.registry.kinds() == {"work", "raw"}


# Binding


def test_an_unbound_facade_takes_declarations_and_names_the_ways_out():
    hg = Headgate()
    ship = tasks_of(hg)
    for use in (lambda: ship.enqueue(1), lambda: hg.store, lambda: hg.worker()):
        with pytest.raises(
            ConfigurationError, match=r"connect\(url\).*init_app.*HEADGATE_DATABASE_URL"
        ):
            use()
    hg.connect(MemStore())
    ship.enqueue(1)
    with pytest.raises(ConfigurationError, match="bound to a database already"):
        hg.connect(MemStore())


@pytest.mark.parametrize("source", [3, object(), b"postgresql://x"])
def test_a_source_of_another_type_is_refused(source):
    with pytest.raises(ConfigurationError, match="expected a database URL, a psycopg"):
        Headgate(source)


def test_after_close_every_use_is_refused_and_close_is_fine():
    hg = Headgate(MemStore())
    ship = tasks_of(hg)
    with hg:
        ship.enqueue(1)
    hg.close()
    for use in (lambda: ship.enqueue(2), lambda: hg.get("x"), lambda: hg.connect("x")):
        with pytest.raises(ConfigurationError, match="headgate is closed"):
            use()


def test_a_missing_variable_is_an_error_at_the_first_use_only():
    hg = Headgate.from_env({})
    with pytest.raises(
        ConfigurationError,
        match="HEADGATE_DATABASE_URL or DATABASE_URL, or HEADGATE_EMBEDDED=1",
    ):
        hg.enqueue_many([])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DATABASE_URL": "postgresql://b"}, Settings(url="postgresql://b")),
        (
            {
                "HEADGATE_DATABASE_URL": "postgresql://a",
                "DATABASE_URL": "postgresql://b",
            },
            Settings(url="postgresql://a"),
        ),
        (
            {"DATABASE_URL": "postgresql+psycopg://b/x"},
            Settings(url="postgresql://b/x"),
        ),
        (
            {
                "HEADGATE_DATABASE_URL": "host=x dbname=y",
                "HEADGATE_SCHEMA": "jobs",
                "HEADGATE_LISTEN_URL": "postgres://direct",
                "HEADGATE_POOL_SIZE": "9",
                "HEADGATE_EMBEDDED": "1",
            },
            Settings(
                url="host=x dbname=y",
                schema="jobs",
                listen_url="postgres://direct",
                pool_size=9,
            ),
        ),
        ({"HEADGATE_EMBEDDED": "1"}, Settings(embedded=True)),
        ({"HEADGATE_EMBEDDED": "0"}, Settings()),
        ({"HEADGATE_DATABASE_URL": ""}, Settings()),
    ],
)
def test_the_environment_is_read(environ, expected):
    assert Settings.read(environ.get) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADGATE_POOL_SIZE", "0"),
        ("HEADGATE_POOL_SIZE", "many"),
        ("HEADGATE_EMBEDDED", "yes"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(name, value):
    with pytest.raises(ConfigurationError, match=f"{name} is '{value}'"):
        Headgate.from_env({name: value})


def test_a_password_is_never_shown():
    settings = Settings(url=NOWHERE, listen_url=NOWHERE)
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in repr(Headgate(NOWHERE))


def test_arguments_win_over_variables(monkeypatch):
    monkeypatch.setenv("HEADGATE_DATABASE_URL", NOWHERE)
    hg = Headgate.from_env(schema="mine", pool_size=2)
    hg.init_app(flask_app())
    with pytest.raises(ConfigurationError):
        hg.init_app(flask_app(HEADGATE_SCHEMA="theirs"))


# Flask configuration


def test_an_application_binds_by_its_configuration(monkeypatch):
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("HEADGATE_DATABASE_URL", NOWHERE)
    hg = Headgate()
    app = flask_app()
    hg.init_app(app)
    assert app.extensions["headgate"] is hg
    hg.init_app(flask_app(HEADGATE_POOL_SIZE=4))
    for different in (
        {"HEADGATE_DATABASE_URL": "postgresql://other"},
        {"HEADGATE_SCHEMA": "other"},
        {"HEADGATE_POOL_SIZE": 5},
    ):
        with pytest.raises(
            ConfigurationError, match="bound to another database, or in"
        ):
            hg.init_app(flask_app(**different))


def test_a_source_given_in_code_stands_unless_the_application_names_another():
    hg = Headgate(MemStore())
    hg.init_app(flask_app())
    with pytest.raises(ConfigurationError):
        hg.init_app(flask_app(HEADGATE_DATABASE_URL=NOWHERE))
    by_url = Headgate("postgresql://a/b")
    by_url.init_app(flask_app(DATABASE_URL="postgresql+psycopg://a/b"))
    with pytest.raises(ConfigurationError):
        by_url.init_app(flask_app(HEADGATE_DATABASE_URL=NOWHERE))


# Overriding


def test_an_override_swaps_the_store_for_all_threads():
    hg = Headgate(NOWHERE)
    ship = tasks_of(hg)
    with hg.override(MemStore()) as store:
        thread = threading.Thread(target=ship.enqueue, args=(1,))
        thread.start()
        thread.join()
        ship.enqueue(2)
        assert store.inspect.counts().counts == {State.AVAILABLE: 2}
        assert hg.store is store
        with pytest.raises(InvalidRequest, match="another override is active"):
            hg.override(MemStore()).__enter__()
    with hg.override(MemStore()):
        assert hg.inspect.counts().counts == {}


def test_a_transaction_in_an_override_is_refused_or_passed_by():
    hg = Headgate()
    ship = tasks_of(hg)
    with hg.override(MemStore()), pytest.raises(Unsupported):
        ship.enqueue(1, tx=object())
    with hg.override(MemStore(), tx="immediate") as store:
        ship.enqueue(1, tx=object())
        assert store.inspect.counts().counts == {State.AVAILABLE: 1}


def test_a_facade_works_inside_an_override_without_a_database_of_its_own():
    hg = Headgate()
    ship = tasks_of(hg)
    with hg.override(MemStore()):
        ship.enqueue(1)
    with pytest.raises(ConfigurationError):
        ship.enqueue(1)


# Laziness


def test_importing_a_program_connects_nothing_and_starts_no_thread():
    script = f"""
import socket, sys, threading
def refuse(*args): raise AssertionError("a socket")
socket.socket.connect = refuse
from headgate_sync.app import Headgate
hg = Headgate.from_env({{"HEADGATE_DATABASE_URL": "{NOWHERE}"}})
@hg.task("work", partition="{{a}}")
def work(a: int) -> None: ...
hg2 = Headgate("{NOWHERE}")
assert threading.active_count() == 1
assert "psycopg" not in sys.modules
assert "sqlalchemy" not in sys.modules and "django" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_plain_enqueue_loads_nothing_of_what_it_does_not_use():
    script = """
import sys
from headgate_sync import Headgate, MemStore
hg = Headgate(MemStore())
@hg.task("work")
def work(a: int) -> None: ...
work.enqueue(1)
hg.enqueue_many([work.job(2)])
loaded = {name.rpartition(".")[2] for name in sys.modules if "headgate_sync" in name}
assert not loaded & {"pipeline", "circuit", "waiting", "batch", "progress", "worker"}
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_arguments_are_checked_before_anything_is_opened():
    hg = Headgate()
    ship = tasks_of(hg)
    for use in (lambda: ship.enqueue("x"), lambda: hg.enqueue(ship, "x")):
        with pytest.raises(InvalidRequest, match="order_id: expected int, got str"):
            use()


def test_the_first_enqueue_meets_a_dead_database():
    store = PgStore.connect(NOWHERE, pool_timeout_ms=100)
    with pytest.raises(StoreUnavailable):
        tasks_of(Headgate(store)).enqueue(1)
    store.close()


# With PostgreSQL


@pytest.fixture
def url(postgres, database_url):
    return database_url


def test_a_url_is_enough(url, postgres):
    with Headgate(url) as hg:
        handle = tasks_of(hg).enqueue(1)
        assert hg.get(handle.id).state == State.AVAILABLE


def test_threads_that_come_first_together_open_one_store(url):
    with Headgate(url) as hg:
        barrier = threading.Barrier(8)
        found = []

        def use():
            barrier.wait()
            found.append(hg.store)

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len({id(store) for store in found}) == 1


def test_an_embedded_server_is_found_or_started_and_migrated_by_itself():
    with reachable_directory() as folder:
        with Headgate.embedded(folder / "data") as hg:
            assert hg.get(tasks_of(hg).enqueue(1).id).state == State.AVAILABLE
        with Headgate.embedded(folder / "data") as again:
            assert again.inspect.counts().counts == {State.AVAILABLE: 1}
        remove(folder / "data")


def test_the_environment_may_ask_for_the_embedded_server(monkeypatch):
    with reachable_directory() as folder:
        monkeypatch.setenv("HEADGATE_EMBEDDED_DIR", str(folder / "data"))
        with Headgate.from_env({"HEADGATE_EMBEDDED": "1"}) as hg:
            tasks_of(hg).enqueue(1)
        remove(folder / "data")


def test_a_database_without_the_tables_names_the_command(url):
    with (
        Headgate(url, schema="nothing_here") as hg,
        pytest.raises(
            ConfigurationError, match=r"nothing_here .*`headgate migrate up`"
        ),
    ):
        tasks_of(hg).enqueue(1)


def test_a_lent_pool_is_used_and_never_closed(url):
    with ConnectionPool(url, min_size=1, max_size=2, open=True) as pool:
        hg = Headgate(pool)
        tasks_of(hg).enqueue(1)
        hg.close()
        with pool.connection() as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_closing_ends_every_session_of_the_facade(url, admin):
    hg = Headgate(make_conninfo(url, application_name="headgate-closing"))
    tasks_of(hg).enqueue(1)
    assert sessions(admin, "headgate-closing") == 1
    hg.close()
    assert sessions(admin, "headgate-closing") == 0


def sessions(connection, name):
    """Sessions of that name, once the server has noticed which ones ended."""
    count = 1
    for _ in range(100):
        row = connection.execute(
            "SELECT count(*), pg_sleep(0.01) FROM pg_stat_activity "
            "WHERE application_name = %s",
            [name],
        ).fetchone()
        count = row[0]
        if count == 0:
            break
    return count


def test_two_applications_share_one_pool(url, monkeypatch):
    monkeypatch.setenv("HEADGATE_DATABASE_URL", url)
    hg = Headgate()
    ship = tasks_of(hg)
    for n in range(2):
        hg.init_app(flask_app())
        ship.enqueue(n)
    store = hg.store
    hg.init_app(flask_app())
    assert hg.store is store
    hg.close()


def run_script(script):
    """Run a program in which every warning is an error and nothing may be said."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_exit_handlers_and_threads_that_outlive_main_can_still_enqueue(url, postgres):
    run_script(f"""
import atexit, threading
atexit.register(lambda: (work.enqueue(3), work.enqueue(4)))
from headgate_sync.app import Headgate
hg = Headgate({url!r})
@hg.task("work")
def work(n: int) -> None: ...
work.enqueue(1)
def outlive():
    threading.main_thread().join()
    work.enqueue(2)
threading.Thread(target=outlive).start()
""")
    assert len(postgres.snapshot().jobs) == 4


def test_the_first_use_of_all_may_be_in_an_exit_handler(url, postgres):
    run_script(f"""
import atexit
atexit.register(lambda: work.enqueue(1))
from headgate_sync.app import Headgate
hg = Headgate({url!r})
@hg.task("work")
def work(n: int) -> None: ...
""")
    assert len(postgres.snapshot().jobs) == 1


def test_a_worker_runs_what_the_facade_declares(url):
    done = threading.Event()
    with Headgate(url) as hg:

        @hg.task("work", queue="somewhere")
        def work(ctx: JobContext, n: int) -> None:
            done.set()

        work.enqueue(1)
        with hg.worker(threads=2, run_duties=False):
            assert done.wait(10)


def test_the_queues_of_a_worker_are_a_list_of_names(hg):
    with pytest.raises(InvalidRequest, match="queues must be a sequence"):
        hg.worker(queues="mail")


FORKING = """
import ctypes, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # the pool's threads, at the fork
from headgate_sync.app import Headgate
hg = Headgate({url!r}, pool_size={pool_size})
@hg.task("work")
def work(n: int) -> None: ...
work.enqueue(0)
def run(numbers):
    for n in numbers:
        work.enqueue(n)
children = []
for child in range(1, 5):
    pid = {fork}()
    if pid == 0:
        run(range(child * 1000, child * 1000 + {count}))
        if child == 4:
            os._exit(0)  # without any clean-up
        sys.exit()
    children.append(pid)
run(range(1, {count} + 1))
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0] * 4, codes
work.enqueue({count} + 1)
"""


@pytest.mark.parametrize("pool_size", [1, 4])
@pytest.mark.parametrize(
    "fork",
    # As uWSGI forks: without a word to Python.
    ["os.fork", pytest.param("ctypes.PyDLL(None).fork", id="untold")],
)
def test_a_fork_leaves_the_parents_sessions_alone(url, postgres, pool_size, fork):
    count = 50
    run_script(FORKING.format(url=url, pool_size=pool_size, count=count, fork=fork))
    assert len(postgres.snapshot().jobs) == 5 * count + 2


def test_what_stands_before_the_store_works_in_a_forked_child(url, postgres):
    run_script(f"""
import os
from headgate_sync import CircuitBreaker, Headgate, enqueue_middleware
@enqueue_middleware
def middleware(request):
    yield
hg = Headgate({url!r}, middleware=[middleware], circuit_breaker=CircuitBreaker())
@hg.task("work", retention="1d")
def work(n: int) -> None: ...
work.enqueue(1)
child = os.fork()
if child == 0:
    work.enqueue(2)
    with hg.batch("b") as batch:
        batch.enqueue(work, 3)
    hg.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
work.enqueue(4)
hg.close()
""")
    assert len(postgres.snapshot().jobs) == 4


def test_a_lent_pool_is_not_used_after_a_fork(url, postgres):
    run_script(f"""
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from psycopg_pool import ConnectionPool
from headgate_sync.app import Headgate
with ConnectionPool({url!r}, min_size=1, open=True) as pool:
    hg = Headgate(pool)
    @hg.task("work")
    def work(n: int) -> None: ...
    work.enqueue(1)
    child = os.fork()
    if child == 0:
        try:
            work.enqueue(2)
        except RuntimeError as error:
            os._exit(0 if "make it in the child" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    work.enqueue(3)
""")
    assert len(postgres.snapshot().jobs) == 2


def test_workers_are_configured_in_the_words_of_their_command():
    hg = Headgate(MemStore())
    hg.configure_worker(threads=3)
    assert hg.worker_config().capacity == 3
    assert hg.worker_config(threads=5).capacity == 5
    with pytest.raises(InvalidRequest, match=r"^threads is 0, allowed is 1 to"):
        hg.worker(threads=0)
    for make in (hg.worker, hg.configure_worker):
        with pytest.raises(InvalidRequest, match="no setting concurrency; there are"):
            make(concurrency=4)


def test_the_default_retry_policy_is_that_of_the_workers():
    def slowly(info: object) -> str:
        return "1h"

    hg = Headgate(MemStore(), defaults=TaskOptions(retry=slowly))
    assert hg.worker().config.retry is slowly
    hg.configure_worker(retry=None)
    assert hg.worker().config.retry is None
    assert hg.worker(retry=slowly).config.retry is slowly
