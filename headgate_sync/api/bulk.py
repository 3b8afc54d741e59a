"""Routes for verbs on many jobs, and the operations behind them."""

from __future__ import annotations

from typing import Any

from headgate_sync.api.answers import Answer, HttpError, as_json, of_error
from headgate_sync.api.routing import Call, Route
from headgate_sync.api.shapes import (
    BOOLEAN,
    INTEGER,
    OUT_BOOLEAN,
    OUT_INTEGER,
    OUT_TEXT,
    TEXTS,
    Given,
    listed,
    object_kind,
    shape,
)
from headgate_sync.errors import BackendError, StoreError, StoreUnavailable
from headgate_sync.inspection import MAX_JOBS
from headgate_sync.operations import BulkAction, BulkRequest

OPERATION = shape(
    "Operation",
    id=OUT_TEXT,
    status=OUT_TEXT,
    affected=OUT_INTEGER,
    total_estimated=OUT_INTEGER,
    dry_run=OUT_BOOLEAN,
    error=OUT_TEXT,
)
_FAILED = shape("FailedAction", id=OUT_TEXT, reason=OUT_TEXT)
_DONE = shape("Actions", succeeded=OUT_INTEGER, failed=listed(_FAILED))
_VERBS = {
    "retry": "operator_retry",
    "cancel": "operator_cancel",
    "delete": "delete_job",
    "promote": "promote_job",
}
# Known by name and refused for each job: nothing archives on an operator's word.
ARCHIVE = "archive"
_NO_ARCHIVE = "operator_archive is not in the transition table"


def _actions(call: Call) -> Answer:
    action, ids = call.body["action"], call.body["ids"]
    if action not in _VERBS and action != ARCHIVE:
        raise HttpError(400, f"unknown action `{action}`")
    if len(ids) > MAX_JOBS:
        raise HttpError(400, f"at most {MAX_JOBS} ids per call")
    succeeded = 0
    failed: list[dict[str, str]] = []
    for place, job_id in enumerate(ids):
        try:
            if action == ARCHIVE:
                raise HttpError(400, _NO_ARCHIVE)
            getattr(call.inspect, _VERBS[action])(job_id)
        except StoreUnavailable as outage:
            if not succeeded and not failed:
                raise
            reason = f"store unavailable: {outage}"
            failed += [{"id": left, "reason": reason} for left in ids[place:]]
            break
        except BackendError as fault:  # its text may quote a statement or a row
            told = of_error(fault)
            reason = " ".join([told.message, *told.facts.values()])
            failed.append({"id": job_id, "reason": reason})
        except (StoreError, HttpError) as refusal:
            failed.append({"id": job_id, "reason": str(refusal)})
        else:
            succeeded += 1
    return as_json(_DONE.write({"succeeded": succeeded, "failed": failed}))


def _bulk(call: Call) -> Answer:
    request = BulkRequest(
        id=call.new_id(),
        action=call.body["action"],
        dry_run=call.body["dry_run"],
        **call.body["selector"],
    )
    # A repeat of a request that was cut off finds what the first try made.
    made = call.inspect.get_operation(request.id)
    if made is None:
        call.inspect.create_operation(request)
        made = call.inspect.get_operation(request.id)
    assert made is not None
    return as_json(OPERATION.write(made), status=202)


def _operation(call: Call) -> Answer:
    found = call.inspect.get_operation(call.path["id"])
    if found is None:
        raise HttpError(404, "no such operation")
    return as_json(OPERATION.write(found))


_SELECTOR = object_kind(
    Given("queue"),
    Given("state"),
    Given("kind"),
    Given("partition_key"),
    Given("older_than_ms", INTEGER),
    strict=True,
)
_ACTIONS: list[Any] = [*_VERBS, ARCHIVE]

ROUTES = (
    Route(
        method="POST",
        path="/jobs/actions",
        run=_actions,
        summary="A verb on up to 1,000 jobs, each by itself",
        body=(
            Given("action", required=True, limits={"enum": _ACTIONS}),
            Given("ids", TEXTS, required=True, limits={"maxItems": MAX_JOBS}),
        ),
        answers=_DONE,
    ),
    Route(
        method="POST",
        path="/jobs/bulk",
        run=_bulk,
        summary="A verb on all jobs that a selector names, carried out by workers",
        body=(
            Given(
                "action", required=True, limits={"enum": [str(a) for a in BulkAction]}
            ),
            Given("selector", _SELECTOR, required=True, meaning="must not be empty"),
            Given("dry_run", BOOLEAN, default=False, meaning="only estimate"),
        ),
        status=202,
        answers=OPERATION,
    ),
    Route(
        method="GET",
        path="/operations/{id}",
        run=_operation,
        summary="How far an operation has come",
        answers=OPERATION,
        errors=(404,),
    ),
)
