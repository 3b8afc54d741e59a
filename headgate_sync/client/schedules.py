"""`Schedules`: jobs that come again, from the producer's side."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from headgate_sync.cron import next_after, validate
from headgate_sync.declared import Declared
from headgate_sync.durations import instant_ms
from headgate_sync.envelope import MAX_INT64, Envelope, check_text
from headgate_sync.errors import InvalidRequest, NotFound, Unsupported
from headgate_sync.identity import Identity
from headgate_sync.ids import UlidGenerator
from headgate_sync.inspection import Inspect
from headgate_sync.options import (
    UNSET,
    CallOptions,
    envelope_fields,
    make_options,
    merged,
    unique_of,
)
from headgate_sync.pages import Page
from headgate_sync.request import JobHandle, JobRequest, identity_of
from headgate_sync.schedule import (
    OnMissed,
    Schedule,
    ScheduleDef,
    ScheduleEvent,
    check_no_zone,
    check_schedule_id,
)
from headgate_sync.schedules import DEFAULT_SCHEDULE_EVENTS, MAX_SCHEDULES
from headgate_sync.templates import parse_template
from headgate_sync.validation import check_type

if TYPE_CHECKING:
    from headgate_sync.client.client import Client

logger = logging.getLogger(__name__)

DEFAULT_SCHEDULES = 100
MAX_RUN_KEY_BYTES = 255

_new_id = UlidGenerator()


@frozen(kw_only=True)
class SyncReport:
    """What a sync did, by id of the schedule."""

    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


class Schedules:
    """The schedules of a client's store.

    Every call raises `Unsupported` over a store without inspection.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def upsert(
        self,
        id: str,
        job: Any,
        spec: str | timedelta,
        *,
        on_missed: str = OnMissed.SKIP,
        backfill_limit: int = 0,
        paused: bool | None = None,
        start_at: datetime | None = None,
        identity: Identity | None = None,
        **options: Any,
    ) -> Schedule:
        """Create a schedule, or replace the one of this id.

        With the spec that is stored, the next tick stays where it is, so that a deploy
        neither moves nor drops one. Another spec, also another zone, starts afresh.

        Args:
            id: 1 to 128 characters of `[A-Za-z0-9_.:-]`.
            job: `task.job(...)`, an instance of a payload class, an `Envelope`, or the
                kind of a job without payload.
            spec: see `cron.validate`.
            on_missed: "skip", "run_once" or "backfill".
            backfill_limit: most ticks that "backfill" fires at once.
            paused: None keeps what an operator set.
            start_at: the first tick of a new spec; else it is computed from store time.
                Where the spec has none then, it is one only of a schedule that never
                fired, and else the spec's next tick is the first.
            identity: who asks for it, as for `Client.enqueue`.
            **options: those of `CallOptions` that a schedule can give to each job.

        Raises:
            SpecError: the spec cannot be used; nothing was written.
            InvalidRequest: another argument cannot; nothing was written.
            EnqueueForbidden: the authorizer refused its jobs; nothing was written.
        """
        definition = self.define(
            job, spec, on_missed=on_missed, backfill_limit=backfill_limit, **options
        )
        return self.put(
            id,
            definition,
            paused=paused,
            start_at=start_at,
            identity=identity_of(job) if identity is None else identity,
        )

    def put(
        self,
        id: str,
        definition: ScheduleDef,
        *,
        paused: bool | None = None,
        start_at: datetime | None = None,
        identity: Identity | None = None,
    ) -> Schedule:
        """`upsert` of what `define` made, or a program by itself.

        Raises:
            InvalidRequest: a bad id or instant; nothing was written.
            EnqueueForbidden: the authorizer refused its jobs; nothing was written.
        """
        check_schedule_id(id)
        check_type("definition", definition, ScheduleDef)
        start_ms = None if start_at is None else instant_ms("start_at", start_at)
        self._client.authorize([definition.preview(id)], identity=identity)
        inspect = self._inspect
        if start_ms is None:
            start_ms = next_after(definition.spec, inspect.store_now_ms())
        return inspect.upsert_schedule(
            Schedule.of(id, definition, next_run_ms=start_ms, paused=paused)
        )

    def define(
        self,
        job: Any,
        spec: str | timedelta,
        *,
        on_missed: str = OnMissed.SKIP,
        backfill_limit: int = 0,
        **options: Any,
    ) -> ScheduleDef:
        """What `upsert` would store; nothing is sent.

        Raises:
            SpecError, InvalidRequest: as `upsert`.
        """
        check_no_zone(options)
        own_id = options.get("id")
        if isinstance(job, JobRequest) and job.options.id is not UNSET:
            own_id = own_id or job.options.id
        if own_id is not None:
            raise InvalidRequest(
                f"a schedule cannot carry the option id, got {own_id!r}"
            )
        return ScheduleDef.from_envelope(
            self._of_kind(job, options)
            if isinstance(job, str)
            else self._client.envelope(job, **options),
            spec=validate(spec),
            on_missed=on_missed,
            backfill_limit=backfill_limit,
        )

    def get(self, id: str) -> Schedule | None:
        """One schedule, or None."""
        return self._inspect.get_schedule(id)

    def list(
        self,
        *,
        limit: int = DEFAULT_SCHEDULES,
        cursor: str | None = None,
        include_payload: bool = True,
    ) -> Page[Schedule]:
        """Schedules by id, up to 10,000 at once.

        Without payload the ones listed have an empty one and no headers: they are for
        looking at, with the rights of a reader.
        """
        found = self._inspect.list_schedules(
            limit, cursor, include_payload=include_payload
        )
        return Page(tuple(found), found[-1].id if len(found) == limit else None)

    def pause(self, id: str) -> None:
        """Let no tick fire until `resume`; `NotFound` without the schedule."""
        self._inspect.set_schedule_paused(id, True)

    def resume(self, id: str) -> None:
        """Let it fire again; what became due meanwhile is fired as `on_missed` says."""
        self._inspect.set_schedule_paused(id, False)

    def delete(self, id: str) -> None:
        """Remove a schedule; its jobs and events stay. `NotFound` without it."""
        self._inspect.delete_schedule(id)

    def run_now(
        self, id: str, *, idempotency_key: str, identity: Identity | None = None
    ) -> JobHandle:
        """Enqueue the schedule's job once more, now; its ticks are left alone.

        Unlike a tick it passes through the middleware, the authorizer and the insert
        hooks of the client.

        Args:
            id: of the schedule, which may be paused.
            idempotency_key: 1 to 255 bytes. While the job of a key is unfinished, the
                same key gives the handle of that job, with `joined`.
            identity: who asks for it, as for `Client.enqueue`.

        Raises:
            NotFound: there is no such schedule.
            StoreError: as `Client.enqueue`.
        """
        key = check_text("idempotency_key", idempotency_key)
        if not 1 <= len(key.encode()) <= MAX_RUN_KEY_BYTES:
            raise InvalidRequest(
                f"idempotency_key has {len(key.encode())} bytes, "
                f"allowed are 1 to {MAX_RUN_KEY_BYTES}"
            )
        schedule = self.get(id)
        if schedule is None:
            raise NotFound.schedule(id)
        return self._client.enqueue_or_join(
            schedule.envelope(id=_new_id(), unique_key=f"schedrun:{id}:{key}".encode()),
            identity=identity,
        )

    def events(
        self,
        id: str,
        *,
        limit: int = DEFAULT_SCHEDULE_EVENTS,
        cursor: str | None = None,
    ) -> Page[ScheduleEvent]:
        """What became of the newest 100 ticks, newest first; also after a delete."""
        before = None if cursor is None else _event_id(cursor)
        found = self._inspect.list_schedule_events(id, before, limit)
        return Page(
            tuple(found), str(found[-1].event_id) if len(found) == limit else None
        )

    def sync(
        self,
        specs: Mapping[str, ScheduleDef],
        *,
        delete_missing: bool = False,
        prefix: str | None = None,
        identity: Identity | None = None,
    ) -> SyncReport:
        """Bring schedules to what a program declares; equal ones are not written.

        A pause that an operator set stays, and so does the next tick of a spec that is
        stored already.

        Args:
            specs: definitions by id.
            delete_missing: delete the schedules below `prefix` that are not in `specs`.
            prefix: beginning of ids; needed for `delete_missing`.
            identity: who asks for it, as for `Client.enqueue`.

        Raises:
            InvalidRequest: a bad id, or no prefix where one is needed; nothing was
                written.
            EnqueueForbidden: the authorizer refused the jobs of one; nothing was
                written.
        """
        check_type("specs", specs, Mapping)
        for id, definition in specs.items():
            check_schedule_id(id)
            check_type("definition", definition, ScheduleDef)
        previews = [definition.preview(id) for id, definition in specs.items()]
        self._client.authorize(previews, identity=identity)
        return self._sync(specs, delete_missing=delete_missing, prefix=prefix)

    def _sync(
        self,
        specs: Mapping[str, ScheduleDef],
        *,
        delete_missing: bool = False,
        prefix: str | None = None,
    ) -> SyncReport:
        if delete_missing and not prefix:
            raise InvalidRequest("delete_missing needs a prefix of ids, not all go")
        inspect, done = self._inspect, SyncReport()
        now_ms = inspect.store_now_ms()
        for id, definition in specs.items():
            known = inspect.get_schedule(id)
            if known is not None and known.same_definition(definition):
                done = evolve(done, unchanged=(*done.unchanged, id))
                continue
            if known is not None and known.spec != definition.spec:
                logger.warning(
                    "schedule %s: spec `%s` replaces `%s`",
                    id,
                    definition.spec,
                    known.spec,
                )
            anchor_ms = next_after(definition.spec, now_ms)
            inspect.upsert_schedule(Schedule.of(id, definition, next_run_ms=anchor_ms))
            if known is None:
                done = evolve(done, created=(*done.created, id))
            else:
                done = evolve(done, changed=(*done.changed, id))
        if delete_missing and prefix:
            done = evolve(done, deleted=self._delete_others(inspect, specs, prefix))
        return done

    def apply(self, declared: Mapping[str, Declared], **arguments: Any) -> SyncReport:
        """`sync` for the schedules that a registry declares.

        They are code of this program, like its handlers, and nobody's request: the
        authorizer is not asked.
        """
        return self._sync(
            {
                id: self.define(
                    one.job(),
                    one.spec,
                    on_missed=one.on_missed,
                    backfill_limit=one.backfill_limit,
                    **one.options,
                )
                for id, one in declared.items()
            },
            **arguments,
        )

    def _delete_others(
        self, inspect: Inspect, specs: Mapping[str, ScheduleDef], prefix: str
    ) -> tuple[str, ...]:
        gone: tuple[str, ...] = ()
        cursor = None
        while True:
            page = inspect.list_schedules(MAX_SCHEDULES, cursor, include_payload=False)
            for schedule in page:
                if schedule.id.startswith(prefix) and schedule.id not in specs:
                    try:
                        inspect.delete_schedule(schedule.id)
                    except NotFound:
                        continue  # somebody else did
                    gone = (*gone, schedule.id)
            if len(page) < MAX_SCHEDULES:
                return gone
            cursor = page[-1].id

    def _of_kind(self, kind: str, options: Mapping[str, Any]) -> Envelope:
        label = f"kind {kind}"
        registry = self._client.registry
        if registry is not None and registry.reads_payload(kind):
            raise InvalidRequest(
                f"{label} is that of a task, which cannot read the empty payload of a "
                "job by kind; give a job of it, task.job(...)"
            )
        made = make_options(CallOptions, label, options)
        values = merged((made, self._client.defaults))
        fields = envelope_fields(values)
        for option, name in (("partition", "partition_key"), ("rate_class",) * 2):
            text = values.get(option)
            if callable(text):
                raise InvalidRequest(f"{label}: {option} must be text without payload")
            if text is not None:
                fields[name] = parse_template(text).render({})
        if unique_of(values.get("unique")) is not None:
            fields["unique_key"] = b"unique"
        return Envelope(id="schedule", kind=kind, **fields)

    @property
    def _inspect(self) -> Inspect:
        inspect = self._client.store.inspect
        if inspect is None:
            raise Unsupported("inspect")
        return inspect


def _event_id(cursor: str) -> int:
    if not (isinstance(cursor, str) and cursor.isascii() and cursor.isdigit()):
        raise InvalidRequest(f"cursor is {cursor!r}, expected one of an earlier page")
    if len(cursor) > len(str(MAX_INT64)):
        raise InvalidRequest("cursor is none of an earlier page")
    return int(cursor)
