"""The process of one isolated attempt: `python -m headgate_sync.worker.child APP`."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headgate_sync.attempt import LiveAttempt
from headgate_sync.binding import Binding
from headgate_sync.context import JobContext, make_current
from headgate_sync.envelope import Envelope
from headgate_sync.errors import ConfigurationError, Unsupported
from headgate_sync.injection import Given, WorkerInfo
from headgate_sync.lease import MAX_ERROR_BYTES, Claim, cut_text
from headgate_sync.signals import Control
from headgate_sync.worker.__main__ import load_app
from headgate_sync.worker.around import Around, enter_around
from headgate_sync.worker.isolated import ANSWER, VERSION
from headgate_sync.worker.outcomes import Judge, Verdict

_NO_LIMIT_MS = 2**53


class NoStore:
    """What stands for the store in here: the lease stays with the parent process."""

    results = outputs = progress = transactional = inspect = notifying = None
    maintenance = None

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(
            name, f"{name} is not available in an isolated process; its worker holds it"
        )


def attempt_of(request: dict[str, Any], producer: Any) -> LiveAttempt:
    """The attempt that the parent described."""
    envelope = Envelope(
        id=request["job_id"],
        kind=request["kind"],
        schema_version=request["schema_version"],
        payload=base64.b64decode(request["payload_base64"], validate=True),
        queue=request["queue"],
        partition_key=request["partition_key"],
        rate_class=request["rate_class"],
        weight=request["weight"],
        attempt=request["attempt"],
        crash_attempt=request["crash_attempt"],
        max_attempts=request["max_attempts"],
        deadline_ms=request["deadline_ms"],
    )
    claim = Claim(
        envelope=envelope,
        lease_id="isolated",
        fence=request["fence"],
        expires_at_ms=_NO_LIMIT_MS,
        claimed_at_ms=time.time_ns() // 1_000_000,
    )
    store: Any = NoStore()
    return LiveAttempt(
        claim,
        store,
        lease_due_s=float("inf"),
        returned_s=time.monotonic(),
        producer=producer,
    )


def perform(
    binding: Binding,
    attempt: LiveAttempt,
    worker: WorkerInfo,
    around: Sequence[Around],
) -> Verdict:
    """Run the handler and say how it ended."""
    context = JobContext(attempt, binding.steps)
    make_current(context)
    envelope = attempt.claim.envelope
    judge = Judge(retry=None, is_failure=lambda error: True)
    try:
        value = _value(binding, context, envelope, worker, around)
        if value is not None and not isinstance(value, Control):
            raise Unsupported("results", "an isolated handler cannot return a result")
    except BaseException as error:  # the boundary around user code
        value = error
    if isinstance(value, BaseException):
        verdict = judge.raised(
            attempt, value, retry=binding.retry, is_failure=binding.is_failure
        )
    else:
        verdict = judge.returned(attempt, None)
    assert verdict is not None, "nothing in here cancels or settles an attempt"
    return verdict


def _value(
    binding: Binding,
    context: JobContext,
    envelope: Envelope,
    worker: WorkerInfo,
    around: Sequence[Around],
) -> object:
    given = Given(context=context, envelope=envelope, worker=worker)
    try:
        enter_around(around, context.dependencies())
        arguments = binding.decode(envelope)
        value = binding.call(arguments, binding.inject(given))
        context.end_tracked(failed=False, patience_s=0.0)
    except BaseException as error:
        context.end_tracked(failed=True, patience_s=0.0)
        context.end_dependencies(error)
        raise
    context.end_dependencies(None)
    return value


def answer_of(verdict: Verdict) -> str:
    """The line that the parent reads."""
    answer = {
        "version": VERSION,
        "outcome": verdict.outcome.value,
        "error": cut_text(verdict.error or "", MAX_ERROR_BYTES),
        "delay_ms": verdict.delay_ms or 0,
    }
    return ANSWER + json.dumps(answer)


def end_with_worker() -> None:
    """End this process, and its group, when the worker has died.

    One that was killed can kill nobody any more. Its end of the pipe for the answer
    closes with it, which is an error on this end, whatever anybody waits for; or later,
    where a process that it forked has that end as well.
    """
    worker = os.getppid()
    answer = os.dup(sys.stdout.fileno())  # the handler may put something else there

    def watch() -> None:
        poll = select.poll()
        poll.register(answer, 0)
        while not poll.poll(1_000) and os.getppid() == worker:
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="headgate-worker", daemon=True).start()


def main(argv: list[str] | None = None) -> int:
    """Run the attempt that stands on standard input."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        raise ConfigurationError("expected one argument: module:attribute")
    request = json.load(sys.stdin.buffer)
    if request.get("version") != VERSION:
        raise ConfigurationError(f"unsupported version {request.get('version')!r}")
    end_with_worker()
    here = str(Path.cwd())
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    facade = load_app(arguments[0])
    facade.registry.check()
    attempt = attempt_of(request, lambda: facade.client)
    binding = facade.registry.resolve(request["kind"])
    if binding is None:
        raise ConfigurationError(f"no handler for kind {request['kind']}")
    worker = WorkerInfo(
        worker_id="isolated", queues=(attempt.claim.envelope.queue,), capacity=1
    )
    around = facade.worker_settings.get("around", ())
    verdict = perform(binding, attempt, worker, around)
    sys.stdout.flush()
    # On a line of its own, whatever the handler printed last.
    print("\n" + answer_of(verdict), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
