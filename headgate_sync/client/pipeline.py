"""What stands between an enqueue and the store: middleware, authorizer, circuit, hooks.

The order is fixed: middleware as registered, then that of global plugins, then that of
the plugins whose kinds are in the batch; the authorizer, once per job; the circuit; the
insert hooks around one store call. A client with none of them has no pipeline at all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Protocol

from attrs import define, evolve, field, frozen

from headgate_sync.callables import is_asynchronous
from headgate_sync.client.circuit import CircuitBreaker
from headgate_sync.envelope import Envelope, check_kind, check_text, fingerprint
from headgate_sync.errors import (
    DuplicateJob,
    EnqueueForbidden,
    IdConflict,
    InvalidRequest,
)
from headgate_sync.identity import Authorization, Authorizer, Identity, Source
from headgate_sync.validation import check_iterable, listed, validate_enqueue

Operation = Literal["direct", "transactional"]


@define
class EnqueueRequest:
    """One enqueue on its way to the store; what middleware may look at and change.

    The jobs are immutable: a middleware puts changed ones (`attrs.evolve`) into
    `batch`, and the caller's objects stay as they were. A fingerprint that is left as
    it was follows a changed payload.

    Attributes:
        operation: how the jobs will be written; changing it changes nothing.
        source: "library", or "http" for the control API.
        identity: who enqueues, as the application said.
    """

    batch: list[Envelope]
    operation: Operation
    source: Source
    identity: Identity | None


Proceed = Callable[[EnqueueRequest], None]
Middleware = Callable[[EnqueueRequest, Proceed], None]
Write = Callable[[Sequence[Envelope]], None]


def enqueue_middleware(
    function: Callable[[EnqueueRequest], Generator[EnqueueRequest | None, None, None]],
) -> Middleware:
    """Make a middleware of a generator function that yields where the jobs are sent.

    It yields the request, or nothing for the one it got. What the store raises comes
    out of the `yield`; to yield once more is to try again, to return without a yield
    drops the jobs.

    Raises:
        InvalidRequest: no generator function.
    """
    if not inspect.isgeneratorfunction(function):
        raise InvalidRequest(
            "enqueue_middleware needs a function with a yield, got "
            f"{getattr(function, '__qualname__', type(function).__name__)}"
        )

    @functools.wraps(function)
    def run(request: EnqueueRequest, proceed: Proceed) -> None:
        steps = function(request)
        raised: BaseException | None = None
        while True:
            try:
                passed = next(steps) if raised is None else steps.throw(raised)
            except StopIteration:
                return
            finally:
                raised = None  # or this frame and the error keep each other alive
            try:
                proceed(request if passed is None else passed)
            except BaseException as error:
                raised = error

    return run


@frozen(kw_only=True)
class InsertAttempt:
    """One call of the store, as its observers see it; immutable through and through."""

    batch: tuple[Envelope, ...]
    operation: Operation
    source: Source
    identity: Identity | None


@frozen(kw_only=True)
class InsertOutcome:
    """How a call of the store ended.

    Attributes:
        result: "succeeded" (new rows or identical replays, which look alike),
            "duplicate", "id_conflict" or "rejected".
        existing_id: of a duplicate, the holder of the unique key.
        job_id: of an id conflict.
        error: what was raised; None after a success.
    """

    result: Literal["succeeded", "duplicate", "id_conflict", "rejected"]
    existing_id: str | None = None
    job_id: str | None = None
    error: BaseException | None = None


class InsertHook(Protocol):
    """Observes store calls on the caller's thread; must be quick."""

    def begin(self, attempt: InsertAttempt) -> None:
        """Called before the store; an exception keeps the call from being made."""
        ...

    def end(self, attempt: InsertAttempt, outcome: InsertOutcome) -> None:
        """Called once for each `begin` that returned, in the same order.

        An exception reaches the caller although the result may be durable.
        """
        ...


def _checked_middleware(given: Iterable[Middleware]) -> tuple[Middleware, ...]:
    made = listed("middleware", given)
    for middleware in made:
        if not callable(middleware):
            raise InvalidRequest(
                f"middleware must be callable, got {type(middleware).__name__}"
            )
        if inspect.isgeneratorfunction(middleware):
            # Called like a plain one it would run nothing and drop every job.
            raise InvalidRequest(
                f"middleware {middleware.__qualname__} has a yield: "
                "decorate it with @enqueue_middleware"
            )
        _refuse_async("middleware", middleware)
    return made


def _checked_hooks(given: Iterable[InsertHook]) -> tuple[InsertHook, ...]:
    made = listed("insert_hooks", given)
    for hook in made:
        for name in ("begin", "end"):
            method = getattr(hook, name, None)
            if not callable(method):
                raise InvalidRequest(
                    f"insert hook {type(hook).__name__} lacks the method {name}"
                )
            _refuse_async("insert hook", method)
    return made


def _refuse_async(what: str, function: object) -> None:
    if is_asynchronous(function):
        raise InvalidRequest(f"{what} must be a plain function, not async def")


def _checked_kinds(kinds: Iterable[str] | None) -> frozenset[str] | None:
    if kinds is None:
        return None
    if isinstance(kinds, str):
        raise InvalidRequest("kinds must be a set of kinds, got one text")
    check_iterable("kinds", kinds)
    made = frozenset(kinds)
    if not made:
        raise InvalidRequest("kinds is empty; None stands for all kinds")
    for kind in made:
        check_kind(kind)
    return made


@frozen
class Plugin:
    """Middleware and hooks that belong together.

    Attributes:
        kinds: None is all. A plugin with kinds is active while any job of the batch has
            one of them, and then sees the whole batch.
    """

    name: str
    kinds: frozenset[str] | None = field(
        default=None, converter=_checked_kinds, kw_only=True
    )
    middleware: tuple[Middleware, ...] = field(
        default=(), converter=_checked_middleware, kw_only=True
    )
    insert_hooks: tuple[InsertHook, ...] = field(
        default=(), converter=_checked_hooks, kw_only=True
    )

    def __attrs_post_init__(self) -> None:
        if not check_text("name", self.name).strip():
            raise InvalidRequest("the name of a plugin must not be blank")


@frozen
class _Scoped:
    """A middleware or a hook, with the kinds it is for."""

    kinds: frozenset[str] | None
    part: Any

    def wants(self, batch: Sequence[Envelope]) -> bool:
        return self.kinds is None or any(job.kind in self.kinds for job in batch)


class Pipeline:
    """The parts of one client, in their order; used by any thread.

    Args:
        authorizer: asked about each job in its final form; anything but True refuses
            the whole batch. None allows all.
        circuit_breaker: may be shared by several clients.
        middleware: the first is the outermost.
        insert_hooks: begun and ended in this order.
        plugins: those for all kinds come before those for some.

    Raises:
        InvalidRequest: a part that is none.
    """

    def __init__(
        self,
        *,
        authorizer: Authorizer | None = None,
        circuit_breaker: CircuitBreaker | None = None,
        middleware: Iterable[Middleware] = (),
        insert_hooks: Iterable[InsertHook] = (),
        plugins: Iterable[Plugin] = (),
    ) -> None:
        if authorizer is not None:
            if not callable(authorizer):
                raise InvalidRequest(
                    f"authorizer must be callable, got {type(authorizer).__name__}"
                )
            _refuse_async("authorizer", authorizer)
        if circuit_breaker is not None and not isinstance(
            circuit_breaker, CircuitBreaker
        ):
            raise InvalidRequest(
                "circuit_breaker must be a CircuitBreaker, got "
                f"{type(circuit_breaker).__name__}"
            )
        installed = tuple(plugins)
        for plugin in installed:
            if not isinstance(plugin, Plugin):
                raise InvalidRequest(
                    f"plugins must hold Plugin, got {type(plugin).__name__}"
                )
        ordered = sorted(installed, key=lambda plugin: plugin.kinds is not None)
        self._authorizer = authorizer
        self._circuit = circuit_breaker
        self._middleware = [
            *(_Scoped(None, part) for part in _checked_middleware(middleware)),
            *(_Scoped(p.kinds, part) for p in ordered for part in p.middleware),
        ]
        self._hooks = [
            *(_Scoped(None, part) for part in _checked_hooks(insert_hooks)),
            *(_Scoped(p.kinds, part) for p in ordered for part in p.insert_hooks),
        ]

    def send(
        self,
        request: EnqueueRequest,
        target: Callable[[], Write],
        final: list[Envelope],
    ) -> bool:
        """Pass a request through every part to the store.

        Args:
            request: its batch is changed only by middleware.
            target: finds the store call to make; raises when there is none.
            final: gets the jobs in the form in which the store was last asked for them.

        Returns:
            False when middleware dropped them all: the store has none.

        Raises:
            EnqueueForbidden: the authorizer refused a job; nothing was asked or done.
            CircuitRejected: the circuit is open.
            Exception: what a part or the store raised, unchanged.
        """
        given = {job.id: job for job in request.batch}
        operation = request.operation
        stored = False

        def innermost(passed: EnqueueRequest) -> None:
            nonlocal stored
            stored = False
            final[:] = _with_fingerprints(passed.batch, given)
            # The mode is the caller's, whatever middleware wrote into the request.
            self._write(evolve(passed, batch=final, operation=operation), target)
            stored = bool(final)

        self._step(0, innermost, request)
        return stored

    def authorize(self, request: EnqueueRequest) -> None:
        """Ask about each job.

        Raises:
            EnqueueForbidden: the first that is refused.
        """
        authorizer = self._authorizer
        if authorizer is None:
            return
        asked = Authorization(request.source, request.identity)
        for job in request.batch:
            # Not `if not`: whatever a rule forgot to return, or returned by mistake,
            # must not let a job through.
            if authorizer(asked, job) is not True:
                raise EnqueueForbidden(job.kind)

    def _step(self, place: int, innermost: Proceed, request: EnqueueRequest) -> None:
        if not isinstance(request, EnqueueRequest):
            raise InvalidRequest(
                "middleware must pass on an EnqueueRequest, got "
                f"{type(request).__name__}"
            )
        while place < len(self._middleware):
            scoped = self._middleware[place]
            place += 1
            if scoped.wants(request.batch):
                scoped.part(request, functools.partial(self._step, place, innermost))
                return
        innermost(request)

    def _write(self, request: EnqueueRequest, target: Callable[[], Write]) -> None:
        if not request.batch:
            return
        # Pure rules come first: a batch that breaks one says nothing about the store.
        validate_enqueue(request.batch)
        self.authorize(request)
        hooks = [hook.part for hook in self._hooks if hook.wants(request.batch)]
        with self._circuit.permit() if self._circuit is not None else nullcontext():
            write = target()
            if hooks:
                _observed(hooks, request, write)
            else:
                write(request.batch)


def _with_fingerprints(
    batch: Sequence[Envelope], given: dict[str, Envelope]
) -> list[Envelope]:
    """The batch with the fingerprints that middleware left stale or out."""
    final = []
    for job in batch:
        was = given.get(job.id) if isinstance(job, Envelope) else job
        if job is not was and (
            not job.fingerprint
            or (
                was is not None
                and job.fingerprint == was.fingerprint
                and (job.kind, job.payload) != (was.kind, was.payload)
            )
        ):
            job = evolve(job, fingerprint=fingerprint(job.kind, job.payload))
        final.append(job)
    return final


def _observed(
    hooks: Sequence[InsertHook], request: EnqueueRequest, write: Write
) -> None:
    """One store call between the two calls of each hook."""
    attempt = InsertAttempt(
        batch=tuple(request.batch),
        operation=request.operation,
        source=request.source,
        identity=request.identity,
    )
    begun: list[InsertHook] = []
    try:
        for hook in hooks:
            hook.begin(attempt)
            begun.append(hook)
        write(request.batch)
    except BaseException as error:
        _end(begun, attempt, _outcome(error))
        raise
    _end(begun, attempt, InsertOutcome(result="succeeded"))


def _end(
    hooks: Sequence[InsertHook], attempt: InsertAttempt, outcome: InsertOutcome
) -> None:
    """End every hook, also after one that fails; the first failure comes out."""
    failure: BaseException | None = None
    for hook in hooks:
        try:
            hook.end(attempt, outcome)
        except BaseException as error:
            failure = error if failure is None else failure
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # or this frame and the error keep each other alive


def _outcome(error: BaseException) -> InsertOutcome:
    if isinstance(error, DuplicateJob):
        return InsertOutcome(
            result="duplicate", existing_id=error.existing_id, error=error
        )
    if isinstance(error, IdConflict):
        return InsertOutcome(result="id_conflict", job_id=error.job_id, error=error)
    return InsertOutcome(result="rejected", error=error)
