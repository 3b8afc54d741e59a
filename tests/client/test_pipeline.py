"""Middleware, authorizer, circuit and hooks around the one store call."""

from __future__ import annotations

import gc
from contextlib import suppress
from datetime import timedelta

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.app import Headgate
from headgate_sync.client import Client
from headgate_sync.client.circuit import CircuitBreaker, CircuitState
from headgate_sync.client.pipeline import (
    EnqueueRequest,
    InsertAttempt,
    Plugin,
    enqueue_middleware,
)
from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.errors import (
    BackendError,
    CircuitRejected,
    DuplicateJob,
    EnqueueForbidden,
    IdConflict,
    InvalidRequest,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.identity import Authorization, Identity, enqueue_identity
from headgate_sync.memory.store import MemStore
from headgate_sync.options import Unique
from headgate_sync.registry import Registry
from tests.builders import admit, counts, envelope, envelopes, job
from tests.worker.rig import Tap

registry = Registry()


@registry.task("mail", queue="q")
def mail(to: str) -> None: ...


@registry.task("bill", queue="q", unique="{order_id}")
def bill(order_id: int) -> None: ...


class Trail:
    """What happened, in order."""

    def __init__(self):
        self.steps = []

    def middleware(self, name, *, times=1):
        def run(request, proceed):
            self.steps.append(f"{name}.before")
            try:
                for _ in range(times):
                    proceed(request)
            finally:
                self.steps.append(f"{name}.after")

        return run

    def hook(self, name):
        return Hook(self, name)

    def authorizer(self, asked, job):
        self.steps.append(f"authorize {job.kind}")
        return True

    def store(self, store):
        tapped = Tap(store)

        def around(real, batch):
            self.steps.append("store")
            return real(batch)

        tapped.around["enqueue"] = around
        return tapped


class Hook:
    def __init__(self, trail, name):
        self.trail, self.name = trail, name
        self.attempts, self.outcomes = [], []

    def begin(self, attempt):
        self.trail.steps.append(f"{self.name}.begin")
        self.attempts.append(attempt)

    def end(self, attempt, outcome):
        self.trail.steps.append(f"{self.name}.end")
        self.outcomes.append(outcome)


@pytest.fixture
def trail():
    return Trail()


# The order


def test_everything_runs_in_its_fixed_order_and_unwinds_in_reverse(store, trail):
    breaker = CircuitBreaker()
    client = Client(
        trail.store(store),
        middleware=[trail.middleware("A"), trail.middleware("B")],
        plugins=[
            Plugin(
                "scoped",
                kinds={"mail"},
                middleware=[trail.middleware("S")],
                insert_hooks=[trail.hook("hs")],
            ),
            Plugin(
                "global",
                middleware=[trail.middleware("G")],
                insert_hooks=[trail.hook("hg")],
            ),
        ],
        authorizer=trail.authorizer,
        circuit_breaker=breaker,
        insert_hooks=[trail.hook("h")],
    )
    client.enqueue(mail.job("ada"))
    assert trail.steps == [
        "A.before", "B.before", "G.before", "S.before", "authorize mail",
        "h.begin", "hg.begin", "hs.begin", "store", "h.end", "hg.end", "hs.end",
        "S.after", "G.after", "B.after", "A.after",
    ]  # fmt: skip
    assert counts(store) == {"available": 1}


def test_an_error_of_the_store_unwinds_the_same_way_unchanged(store, trail):
    tapped = trail.store(store)
    error = StoreUnavailable("away")
    tapped.fail("enqueue", error)
    client = Client(tapped, middleware=[trail.middleware("A"), trail.middleware("B")])
    with pytest.raises(StoreUnavailable) as caught:
        client.enqueue(mail.job("ada"))
    assert caught.value is error
    assert trail.steps == ["A.before", "B.before", "B.after", "A.after"]


names = st.lists(st.sampled_from("abcdef"), max_size=6)


@given(
    standalone=names,
    plugins=st.lists(
        st.tuples(st.sampled_from([None, "mail", "bill", "none"]), names), max_size=4
    ),
    kinds=st.lists(st.sampled_from(["mail", "bill"]), min_size=1, max_size=4),
    form=st.sampled_from(["plain", "generator"]),
)
def test_each_middleware_sees_each_job_exactly_once_and_in_order(
    standalone, plugins, kinds, form
):
    """The chain is its parts in their order, whatever they are and however written."""
    seen, left, stored = [], [], MemStore()

    def middleware(name):
        def plain(request, proceed):
            seen.append((name, [job.id for job in request.batch]))
            proceed(request)
            left.append(name)

        def generator(request):
            seen.append((name, [job.id for job in request.batch]))
            yield
            left.append(name)

        return plain if form == "plain" else enqueue_middleware(generator)

    installed = [
        Plugin(
            "p",
            kinds=None if scope is None else {scope},
            middleware=[middleware((scope, place, n)) for place, n in enumerate(parts)],
        )
        for scope, parts in plugins
    ]
    client = Client(
        stored, middleware=[middleware(name) for name in standalone], plugins=installed
    )
    ids = [str(number) for number in range(len(kinds))]
    client.enqueue_many(
        [Envelope(id=id, kind=kind) for id, kind in zip(ids, kinds, strict=True)]
    )
    expected = [
        *standalone,
        *((s, i, n) for s, p in plugins if s is None for i, n in enumerate(p)),
        *((s, i, n) for s, p in plugins if s in kinds for i, n in enumerate(p)),
    ]
    assert seen == [(name, ids) for name in expected]
    assert left == expected[::-1]
    assert [job.id for job in stored.all_enqueued()] == ids


# Middleware


def test_a_change_reaches_authorizer_and_row_and_never_the_caller(store):
    seen = []

    def stamp(request, proceed):
        request.batch = [
            attrs.evolve(job, headers={**job.headers, "tenant": "t1"})
            for job in request.batch
        ]
        proceed(request)

    def authorizer(asked, job):
        seen.append(dict(job.headers))
        return True

    headers = {"own": "x"}
    given = [envelope("a", headers=headers), envelope("b")]
    Client(store, middleware=[stamp], authorizer=authorizer).enqueue_many(given)
    assert seen == [{"own": "x", "tenant": "t1"}, {"tenant": "t1"}]
    assert dict(job(store, "a").headers) == {"own": "x", "tenant": "t1"}
    assert headers == {"own": "x"}
    assert [dict(e.headers) for e in given] == [{"own": "x"}, {}]


def test_not_calling_on_drops_the_job_and_runs_nothing_deeper(store, trail):
    breaker = CircuitBreaker()

    def veto(request, proceed):
        pass

    client = Client(
        trail.store(store),
        middleware=[trail.middleware("A"), veto],
        authorizer=trail.authorizer,
        circuit_breaker=breaker,
        insert_hooks=[trail.hook("h")],
    )
    handle = client.enqueue(mail.job("ada"))
    assert handle.dropped
    assert [h.dropped for h in client.enqueue_many([mail.job("b")])] == [True]
    assert trail.steps == ["A.before", "A.after"] * 2
    assert counts(store) == {}


def test_calling_on_twice_is_a_retry_with_its_own_hooks_and_one_row(store, trail):
    tapped = Tap(store)
    tapped.fail("enqueue", StoreUnavailable("away"))
    hook = trail.hook("h")

    def retry(request, proceed):
        with suppress(StoreUnavailable):
            proceed(request)
            return
        proceed(request)

    client = Client(tapped, middleware=[retry], insert_hooks=[hook])
    handle = client.enqueue(mail.job("ada"))
    assert not handle.dropped
    assert [o.result for o in hook.outcomes] == ["rejected", "succeeded"]
    assert trail.steps == ["h.begin", "h.end"] * 2
    assert counts(store) == {"available": 1}


def test_a_swallowed_refusal_is_told_as_a_job_that_is_not_there(store):
    def forgiving(request, proceed):
        with suppress(DuplicateJob):
            proceed(request)

    client = Client(store, middleware=[forgiving])
    first = client.enqueue(bill.job(1))
    assert (first.dropped, client.enqueue(bill.job(1)).dropped) == (False, True)


def test_the_operation_is_told_and_cannot_be_switched(store):
    seen = []

    def switch(request, proceed):
        seen.append(request.operation)
        request.operation = "transactional"
        proceed(request)

    hook = Hook(Trail(), "h")
    Client(store, middleware=[switch], insert_hooks=[hook]).enqueue(mail.job("a"))
    assert seen == ["direct"]
    assert hook.attempts[0].operation == "direct"
    assert counts(store) == {"available": 1}


def test_an_absent_and_an_empty_unique_key_stay_apart(store):
    def copy(request, proceed):
        request.batch = [attrs.evolve(job) for job in request.batch]
        proceed(request)

    client = Client(store, middleware=[copy])
    client.enqueue_many([envelope("a", unique_key=None), envelope("b", unique_key=b"")])
    keys = {c.envelope.id: c.envelope.unique_key for c in admit(store).claims}
    assert keys == {"a": None, "b": b""}


def test_a_changed_payload_takes_its_fingerprint_along(store):
    def change(request, proceed):
        request.batch = [attrs.evolve(job, payload=b"new") for job in request.batch]
        proceed(request)

    def own(request, proceed):
        request.batch = [attrs.evolve(job, fingerprint="mine") for job in request.batch]
        proceed(request)

    client = Client(store, middleware=[change])
    client.enqueue(envelope("a"))
    assert job(store, "a").fingerprint == fingerprint("tk:msg", b"new")
    Client(store, middleware=[own, change]).enqueue(envelope("b"))
    Client(store, middleware=[change, own]).enqueue(envelope("c"))
    assert [job(store, id).fingerprint for id in "bc"] == ["mine", "mine"]


def test_what_middleware_takes_out_or_renames_is_told_by_the_handles(store):
    def filtered(request, proceed):
        request.batch = [job for job in request.batch if job.id != "b"]
        proceed(request)

    def renamed(request, proceed):
        request.batch = [
            attrs.evolve(job, id=f"x-{job.id}", queue="moved") for job in request.batch
        ]
        proceed(request)

    handles = Client(store, middleware=[filtered]).enqueue_many(envelopes("a", "b"))
    assert [(h.id, h.dropped) for h in handles] == [("a", False), ("b", True)]
    (handle,) = Client(store, middleware=[renamed]).enqueue_many(envelopes("c"))
    assert (handle.id, handle.queue) == ("x-c", "moved")


def test_what_middleware_makes_is_checked_like_any_batch(store):
    def breaking(request, proceed):
        request.batch = [*request.batch, *request.batch]
        proceed(request)

    def other(request, proceed):
        request.batch = ["job"]
        proceed(request)

    def lost(request, proceed):
        proceed(None)

    for middleware, error in (
        (breaking, IdConflict),
        (other, InvalidRequest),
        (lost, InvalidRequest),
    ):
        with pytest.raises(error):
            Client(store, middleware=[middleware]).enqueue(envelope("a"))
    assert counts(store) == {}


def test_the_generator_form_gets_errors_at_its_yield_and_may_try_again(store):
    steps = []

    @enqueue_middleware
    def retry(request):
        """Try twice."""
        try:
            steps.append("first")
            yield request
        except StoreUnavailable:
            steps.append("second")
            yield
        steps.append("after")

    tapped = Tap(store)
    tapped.fail("enqueue", StoreUnavailable("away"))
    client = Client(tapped, middleware=[retry])
    client.enqueue(envelope("a"))
    assert steps == ["first", "second", "after"]
    client.enqueue(envelope("b"))
    assert steps[3:] == ["first", "after"]
    error = BackendError("odd")
    tapped.fail("enqueue", error)
    with pytest.raises(BackendError) as caught:
        client.enqueue(envelope("c"))
    assert caught.value is error
    assert (retry.__name__, retry.__doc__) == ("retry", "Try twice.")


def test_errors_that_pass_a_generator_leave_no_garbage(store):
    @enqueue_middleware
    def watch(request):
        try:
            yield
        finally:
            pass

    class Large(LookupError):
        pass

    def refuse(asked, job):
        raise Large

    client = Client(store, middleware=[watch], authorizer=refuse)
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            with suppress(Large):
                client.enqueue(mail.job("a"))
        left = [o for o in gc.get_objects() if type(o) is Large]
    finally:
        gc.enable()
    assert left == []


def test_a_generator_that_returns_without_a_yield_drops_the_job(store):
    @enqueue_middleware
    def veto(request):
        if request.batch[0].kind != "mail":
            yield

    assert Client(store, middleware=[veto]).enqueue(mail.job("a")).dropped
    assert counts(store) == {}


def not_awaited():
    async def middleware(request, proceed):
        proceed(request)

    return middleware


class Awaited:
    async def __call__(self, proceed):
        proceed()


def undecorated(request):
    yield


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"middleware": [3]}, "middleware must be callable, got int"),
        ({"middleware": [undecorated]}, "decorate it with @enqueue_middleware"),
        ({"middleware": [not_awaited()]}, "not async def"),
        ({"authorizer": "all"}, "authorizer must be callable, got str"),
        ({"authorizer": not_awaited()}, "not async def"),
        ({"authorizer": Awaited()}, "not async def"),
        ({"circuit_breaker": True}, "must be a CircuitBreaker, got bool"),
        ({"insert_hooks": [object()]}, "insert hook object lacks the method begin"),
        ({"plugins": ["mail"]}, "plugins must hold Plugin, got str"),
    ],
)
def test_what_is_no_part_is_refused_when_the_client_is_made(parts, fault):
    for make in (
        lambda: Client(MemStore(), **parts),
        lambda: Headgate(**parts),
        lambda: Headgate.from_env({}, **parts),
    ):
        with pytest.raises(InvalidRequest, match=fault):
            make()


def test_the_parts_of_a_facade_reach_every_road(store, trail):
    hg = Headgate(store, middleware=[trail.middleware("A")])
    hg.include(registry)
    hg.enqueue(mail, "a")
    hg.enqueue_many([mail.job("b")])
    list(hg.enqueue_chunks([mail.job("c")]))
    hg.enqueue_or_join(bill, 1)
    with hg.override(MemStore()):
        hg.enqueue(mail, "d")
    assert trail.steps == ["A.before", "A.after"] * 5


# The authorizer


def only(kind):
    return lambda asked, job: job.kind == kind


def test_one_denied_job_keeps_the_whole_batch_out(store):
    client = Client(store, authorizer=only("mail"))
    batch = [mail.job(str(n)) for n in range(99)]
    with pytest.raises(EnqueueForbidden) as caught:
        client.enqueue_many([*batch[:50], bill.job(1), *batch[50:]])
    assert caught.value.kind == "bill"
    assert counts(store) == {}


def test_a_denial_does_not_ask_the_circuit(store):
    breaker = CircuitBreaker(failure_threshold=1)
    tapped = Tap(store)
    tapped.fail("enqueue", StoreUnavailable("away"))
    client = Client(tapped, authorizer=only("mail"), circuit_breaker=breaker)
    with pytest.raises(StoreUnavailable):
        client.enqueue(mail.job("a"))
    before = breaker.snapshot()
    assert before.state is CircuitState.OPEN
    with pytest.raises(EnqueueForbidden):
        client.enqueue(bill.job(1))
    assert attrs.evolve(breaker.snapshot(), retry_after_ms=0) == attrs.evolve(
        before, retry_after_ms=0
    )
    with pytest.raises(CircuitRejected):
        client.enqueue(mail.job("a"))
    assert tapped.count("enqueue") == 1


@pytest.mark.parametrize("verdict", [False, None, 1, "yes", object()])
def test_only_true_lets_a_job_through(store, verdict):
    with pytest.raises(EnqueueForbidden):
        Client(store, authorizer=lambda asked, job: verdict).enqueue(mail.job("a"))
    assert counts(store) == {}


def test_a_policy_that_needs_an_identity_refuses_without_one(store):
    asked = []

    def known(authorization, job):
        asked.append(authorization)
        return authorization.identity is not None

    client = Client(store, authorizer=known)
    with pytest.raises(EnqueueForbidden):
        client.enqueue(mail.job("a"))
    mailer, other = Identity("svc:mailer", {"team": "x"}), Identity("other")
    with enqueue_identity(mailer):
        client.enqueue(mail.job("a"))
        client.enqueue(mail.job("b"), identity=other)
        client.enqueue(mail.using(identity=other).job("c"))
        client.enqueue_many([mail.using(identity=other).job("d"), mail.job("e")])
        client.as_source("http").enqueue_or_join(bill.job(1))
    with pytest.raises(EnqueueForbidden):
        client.enqueue(mail.job("a"))
    library = [Authorization("library", i) for i in (None, mailer, *[other] * 4, None)]
    library.insert(6, Authorization("http", mailer))
    assert asked == library


def test_identities_are_checked():
    client = Client(MemStore(), authorizer=lambda asked, job: True)
    for call in (
        lambda: client.enqueue(mail.job("a"), identity="ada"),
        lambda: mail.using(identity="ada"),
        lambda: enqueue_identity("ada").__enter__(),
        lambda: Identity(""),
        lambda: Identity("a", {"x": 3}),
        lambda: client.enqueue_many(
            [mail.using(identity=Identity(n)).job(n) for n in "ab"]
        ),
    ):
        with pytest.raises(InvalidRequest, match=r"identit|subject|attributes"):
            call()


def test_an_authorizer_can_be_asked_about_what_is_enqueued_later(store):
    client = Client(store, authorizer=only("mail"))
    client.authorize([client.envelope(mail.job("a"))])
    with pytest.raises(EnqueueForbidden):
        client.authorize([client.envelope(bill.job(1))])
    Client(store).authorize([client.envelope(bill.job(1))])
    assert counts(store) == {}


# The circuit


def test_an_open_circuit_spares_the_store_until_a_probe_succeeds(store):
    now = [0.0]
    breaker = CircuitBreaker(
        failure_threshold=2,
        recovery_timeout=timedelta(seconds=1),
        half_open_max_calls=1,
        clock=lambda: now[0],
    )
    tapped = Tap(store)
    tapped.fail("enqueue", *[StoreUnavailable("away")] * 2)
    clients = [Client(tapped, circuit_breaker=breaker) for _ in range(2)]
    for client in clients:
        with pytest.raises(StoreUnavailable):
            client.enqueue(mail.job("a"))
    for client in clients:
        with pytest.raises(CircuitRejected, match="try again in 1000 ms"):
            client.enqueue(mail.job("a"))
    assert tapped.count("enqueue") == 2
    now[0] = 1.0
    clients[1].enqueue(mail.job("a"))
    assert breaker.snapshot().state is CircuitState.CLOSED


def test_refusals_do_not_open_the_circuit(store):
    breaker = CircuitBreaker(failure_threshold=1)
    client = Client(store, circuit_breaker=breaker)
    client.enqueue(bill.job(1))
    for job_ in (bill.job(1), bill.using(unique=Unique("x", replace="payload")).job(2)):
        with suppress(DuplicateJob):
            client.enqueue(job_)
    with pytest.raises(InvalidRequest):
        client.enqueue_many([mail.job("x")] * 1001)
    assert breaker.snapshot().state is CircuitState.CLOSED


# Insert hooks


def test_a_hook_can_change_nothing(store):
    class Meddling:
        def begin(self, attempt):
            with pytest.raises(attrs.exceptions.FrozenInstanceError):
                attempt.batch[0].queue = "other"
            with pytest.raises(TypeError):
                attempt.batch[0].headers["x"] = "y"
            with pytest.raises(TypeError):
                attempt.batch[0] = None

        def end(self, attempt, outcome):
            pass

    second = Hook(Trail(), "h2")
    client = Client(store, insert_hooks=[Meddling(), second])
    client.enqueue(envelope("a"))
    assert second.attempts == [
        InsertAttempt(
            batch=(envelope("a"),), operation="direct", source="library", identity=None
        )
    ]
    assert job(store, "a").queue == "q"


def test_outcomes_name_what_happened(store):
    hook = Hook(Trail(), "h")
    client = Client(store, insert_hooks=[hook])
    first = client.enqueue(bill.job(1))
    with pytest.raises(DuplicateJob):
        client.enqueue(bill.job(1))
    with pytest.raises(IdConflict):
        client.enqueue(bill.job(2), id=first.id)
    store.inspect.set_enqueue_limit("q", 1)
    with pytest.raises(Exception, match="is full"):
        client.enqueue(mail.job("a"))
    told = [(o.result, o.existing_id, o.job_id) for o in hook.outcomes]
    assert told == [
        ("succeeded", None, None),
        ("duplicate", first.id, None),
        ("id_conflict", None, first.id),
        ("rejected", None, None),
    ]


def test_a_hook_that_fails_before_the_call_prevents_it_and_ends_the_begun(store, trail):
    class Failing(Hook):
        def begin(self, attempt):
            raise LookupError("no")

    first, failing = trail.hook("first"), Failing(trail, "failing")
    client = Client(store, insert_hooks=[first, failing, trail.hook("third")])
    with pytest.raises(LookupError, match="no"):
        client.enqueue(mail.job("a"))
    assert trail.steps == ["first.begin", "first.end"]
    assert first.outcomes[0].result == "rejected"
    assert counts(store) == {}


def test_a_hook_that_fails_after_the_call_is_heard_and_the_job_stays(store, trail):
    class Failing(Hook):
        def end(self, attempt, outcome):
            super().end(attempt, outcome)
            raise LookupError("late")

    client = Client(store, insert_hooks=[Failing(trail, "a"), trail.hook("b")])
    with pytest.raises(LookupError, match="late"):
        client.enqueue(mail.job("x"))
    assert trail.steps == ["a.begin", "b.begin", "a.end", "b.end"]
    assert counts(store) == {"available": 1}


def test_without_an_attempt_no_hook_is_called(trail):
    hook = trail.hook("h")
    breaker = CircuitBreaker(failure_threshold=1)
    client = Client(
        MemStore(),
        insert_hooks=[hook],
        authorizer=only("mail"),
        circuit_breaker=breaker,
    )
    with pytest.raises(EnqueueForbidden):
        client.enqueue(bill.job(1))
    with pytest.raises(Unsupported):
        client.enqueue(mail.job("a"), tx=object())
    with pytest.raises(InvalidRequest):
        client.enqueue_many([mail.job("x")] * 1001)
    with suppress(StoreUnavailable), breaker.permit():
        raise StoreUnavailable("away")
    with pytest.raises(CircuitRejected):
        client.enqueue(mail.job("a"))
    assert client.enqueue_many([]) == []
    assert trail.steps == []


# Plugins


def test_a_scoped_plugin_sees_the_whole_batch_when_one_job_is_of_its_kinds(store):
    seen = []

    def look(request, proceed):
        seen.append([job.kind for job in request.batch])
        proceed(request)

    hook = Hook(Trail(), "h")
    plugin = Plugin("mail", kinds={"mail"}, middleware=[look], insert_hooks=[hook])
    client = Client(store, plugins=[plugin])
    client.enqueue_many([mail.job("a"), bill.job(1)])
    client.enqueue(bill.job(2))
    assert seen == [["mail", "bill"]]
    assert [[job.kind for job in a.batch] for a in hook.attempts] == seen


def test_scope_is_judged_when_the_request_arrives(store):
    def become(kind):
        def run(request, proceed):
            request.batch = [attrs.evolve(job, kind=kind) for job in request.batch]
            proceed(request)

        return run

    hook = Hook(Trail(), "h")
    seen = []

    def look(request, proceed):
        seen.append(request.batch[0].kind)
        proceed(request)

    client = Client(
        store,
        middleware=[become("bill")],
        plugins=[
            Plugin("of mail", kinds={"mail"}, middleware=[look], insert_hooks=[hook]),
            Plugin("of bill", kinds={"bill"}, middleware=[look, become("mail")]),
        ],
    )
    client.enqueue(mail.job("a"))
    assert seen == ["bill"]
    assert len(hook.attempts) == 1


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("", None),
        ("  ", None),
        ("x", set()),
        ("x", {"bad kind"}),
        ("x", "mail"),
        (3, None),
    ],
)
def test_a_plugin_that_means_nothing_is_refused(name, kinds):
    with pytest.raises(InvalidRequest):
        Plugin(name, kinds=kinds)


def test_a_request_is_what_middleware_may_change():
    request = EnqueueRequest([], "direct", "library", None)
    request.batch = [envelope("a")]
    assert request.batch[0].id == "a"
