"""Attempts that run in a process of their own, which can be killed."""

from __future__ import annotations

import base64
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from attrs import field, frozen

from headgate_sync.attempt import AttemptFault, LiveAttempt
from headgate_sync.context import JobContext
from headgate_sync.durations import duration_ms
from headgate_sync.envelope import MAX_RELATIVE_MS
from headgate_sync.errors import InvalidRequest, MalformedPayload
from headgate_sync.lifecycle import Outcome
from headgate_sync.signals import RateLimited, Revoke, Skip, Snooze

MAX_CHILD_OUTPUT_BYTES = 65_536
ANSWER = "HEADGATE/1 "
VERSION = 1
OUTCOMES = (
    Outcome.SUCCESS,
    Outcome.RETRY,
    Outcome.SKIP,
    Outcome.REVOKE,
    Outcome.SNOOZE,
    Outcome.RATE_LIMITED,
    Outcome.UNDECODABLE,
)
_SHOWN_BYTES = 1500
_CHUNK_BYTES = 65_536
# A grandchild in a session of its own may keep the pipes open for ever.
_LAST_OUTPUT_S = 0.5
_LONGEST_WAIT_S = 3_600.0  # a selector cannot wait for more than 24 days


def _arguments(value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise InvalidRequest("command must be a sequence of texts, no shell reads it")
    try:
        return tuple(os.fspath(part) for part in value)
    except TypeError as fault:
        raise InvalidRequest(f"command must be a sequence of texts: {fault}") from None


@frozen(kw_only=True)
class IsolatedProcess:
    """How to start the process of one attempt.

    It contains failures and is no sandbox.

    Attributes:
        command: executable and arguments; no shell is involved.
        env: the environment. It is all there is, unless `inherit_env`.
        inherit_env: add to the worker's own environment instead.
        cwd: working directory; None is the worker's.
        kill_grace: how long the process group may react to SIGTERM before it is killed;
            0 kills at once. At the end of the worker it is `cancel_grace` at most.
    """

    command: tuple[str, ...] = field(converter=_arguments)
    env: Mapping[str, str] = field(factory=dict)
    inherit_env: bool = False
    cwd: str | Path | None = None
    kill_grace: timedelta | str | int = 0

    def __attrs_post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise InvalidRequest("command must name an executable")
        for name, value in self.env.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InvalidRequest("env must hold texts by name")
        _ = self.kill_grace_ms

    @classmethod
    def python(cls, app: str, **options: Any) -> IsolatedProcess:
        """Run the task's own handler in a fresh interpreter.

        Steps, progress, output, results and `once` are not available there. The child
        needs what its interpreter needs, as `PYTHONPATH`, in `env`.

        Args:
            app: module:attribute of a `Headgate` or `Registry`, as for a worker.
            **options: the attributes of this class, but for the command.
        """
        module, _, attribute = app.partition(":")
        if not module or not attribute:
            raise InvalidRequest(f"app is {app!r}, expected module:attribute")
        command = (sys.executable, "-m", "headgate_sync.worker.child", app)
        return cls(command=command, **options)

    @property
    def kill_grace_ms(self) -> int:
        """How long the process group may react to SIGTERM."""
        if self.kill_grace == 0 and type(self.kill_grace) is int:
            return 0
        return duration_ms("kill_grace", self.kill_grace, minimum_ms=0)

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the process."""
        return {**(os.environ if self.inherit_env else {}), **self.env}


class RemoteError(Exception):
    """Stands for what the process said about its failure, as the cause of ours."""


class ProcessFailed(AttemptFault):
    """The process of an attempt did not answer, or answered that it failed.

    Attributes:
        retry_after: delay that the answer asked for.
    """

    retry_after: timedelta | None = None


def request_of(attempt: LiveAttempt) -> bytes:
    """What the process reads from its standard input."""
    envelope = attempt.claim.envelope
    request = {
        "version": VERSION,
        "job_id": envelope.id,
        "kind": envelope.kind,
        "schema_version": envelope.schema_version,
        "payload_base64": base64.b64encode(envelope.payload).decode(),
        "queue": envelope.queue,
        "partition_key": envelope.partition_key,
        "rate_class": envelope.rate_class,
        "weight": envelope.weight,
        "attempt": envelope.attempt,
        "crash_attempt": envelope.crash_attempt,
        "max_attempts": envelope.max_attempts,
        "fence": attempt.lease.fence,
        "deadline_ms": envelope.deadline_ms,
    }
    return json.dumps(request, separators=(",", ":")).encode()


def run_isolated(
    process: IsolatedProcess, attempt: LiveAttempt, context: JobContext
) -> None:
    """Run one attempt in a process, and end its group with it.

    Raises:
        Control, MalformedPayload: what the process answered.
        ProcessFailed: it failed, or gave no valid answer; the text says how it ended.
        AttemptCancelled: the attempt was cancelled, and the process was killed before
            it could answer.
    """
    child = _Child(process)
    try:
        attempt.kill = child.kill
        context.on_cancel(child.cancel)
        child.run(request_of(attempt))
    finally:
        child.close()
        attempt.kill = None
    try:
        raise_answer(child)
    except ProcessFailed:
        context.check()  # that we killed it says more than that it failed
        raise


class _Child:
    """One process with its pipes, all of them served by the calling thread."""

    def __init__(self, process: IsolatedProcess) -> None:
        self._grace_s = process.kill_grace_ms / 1000
        self._wake_here, self._wake_there = socket.socketpair()
        self._wake_there.setblocking(False)
        try:
            self._process = subprocess.Popen(
                process.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=process.environment,
                cwd=process.cwd,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._wake_here.close()
            self._wake_there.close()
            raise ProcessFailed(
                f"isolated process: {process.command[0]} cannot be started: {error}"
            ) from error
        self._cancelled = self._ended = False
        self.out = bytearray()
        self.err = bytearray()
        self.overflow = ""

    @property
    def returncode(self) -> int:
        """The exit status, negative for a signal; known after `run`."""
        return self._process.returncode

    def cancel(self) -> None:
        """Ask for the end, from any thread; the thread in `run` sends the signals.

        So a signal can never reach a process that took over the number of this one.
        """
        self._cancelled = True
        self._wake()

    def kill(self) -> None:
        """Like `cancel`, without any grace, also for one that has begun."""
        self._grace_s = 0.0
        self.cancel()

    def _wake(self) -> None:
        # Full, so that a wake-up is under way already; or closed, for it is over.
        with suppress(OSError):
            self._wake_there.send(b"x")

    def run(self, request: bytes) -> None:
        """Feed and drain the process until it has ended, then kill what it left."""
        threading.Thread(
            target=self._wait, name="headgate-isolated", daemon=True
        ).start()
        pipes: dict[IO[bytes], bytearray] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_here, selectors.EVENT_READ)
            for pipe, kept in (
                (self._process.stdout, self.out),
                (self._process.stderr, self.err),
            ):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ)
                pipes[pipe] = kept
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            selector.register(self._process.stdin, selectors.EVENT_WRITE)
            self._serve(selector, pipes, memoryview(request))
            self._kill()  # what the process left behind in its group
            self._process.wait()
            self._drain(selector, pipes)

    def _wait(self) -> None:
        # Without reaping: until then the number belongs to this process.
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        self._ended = True
        self._wake()

    def _serve(
        self,
        selector: selectors.BaseSelector,
        pipes: Mapping[IO[bytes], bytearray],
        request: memoryview,
    ) -> None:
        cancelled_s: float | None = None
        while not self._ended:
            left_s = None
            if (self._cancelled or self.overflow) and cancelled_s is None:
                cancelled_s = time.monotonic()
                if self._grace_s:
                    self._signal(signal.SIGTERM)
            if cancelled_s is not None:
                left_s = cancelled_s + self._grace_s - time.monotonic()
                left_s = min(left_s, _LONGEST_WAIT_S)
                if left_s <= 0:
                    self._kill()
                    left_s = _LAST_OUTPUT_S  # until the end is reported
            for key, _ in selector.select(left_s):
                if key.fileobj is self._wake_here:
                    self._wake_here.recv(_CHUNK_BYTES)
                elif key.fileobj is self._process.stdin:
                    request = self._feed(selector, request)
                else:
                    self._read(selector, key.fileobj, pipes[key.fileobj])  # type: ignore[index]

    def _feed(
        self, selector: selectors.BaseSelector, request: memoryview
    ) -> memoryview:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            request = request[os.write(stdin.fileno(), request[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return request
        except OSError:
            request = request[:0]  # it does not want to read, and may still answer
        if not request:
            selector.unregister(stdin)
            stdin.close()
        return request

    def _read(
        self, selector: selectors.BaseSelector, pipe: Any, kept: bytearray
    ) -> bool:
        """Take what is there; True unless there is nothing more for now."""
        try:
            data = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            selector.unregister(pipe)
            return False
        room = MAX_CHILD_OUTPUT_BYTES - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.overflow = "stdout" if kept is self.out else "stderr"
        return True

    def _drain(
        self,
        selector: selectors.BaseSelector,
        pipes: Mapping[IO[bytes], bytearray],
    ) -> None:
        """Read what the process wrote before it ended."""
        for pipe, kept in pipes.items():
            if pipe in {key.fileobj for key in selector.get_map().values()}:
                while not self.overflow and self._read(selector, pipe, kept):
                    pass

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        # The group may be empty; on some systems that of ended processes is refused.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)

    def close(self) -> None:
        """Give everything back; the process has ended, or is killed now."""
        if self._process.returncode is None:
            self._kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._wake_here.close()
        self._wake_there.close()


def raise_answer(child: _Child) -> None:
    """Turn the answer of a process that has ended into what a handler would raise."""
    if child.overflow:
        raise _failed(
            child, f"wrote over {MAX_CHILD_OUTPUT_BYTES} bytes to {child.overflow}"
        )
    if child.returncode < 0:
        raise _failed(child, f"was ended by signal {-child.returncode}")
    if child.returncode:
        raise _failed(child, f"ended with exit status {child.returncode}")
    lines = child.out.decode(errors="replace").splitlines()
    answers = [line for line in lines if line.startswith(ANSWER)]
    if not answers:
        raise _failed(child, f"ended without a line {ANSWER.strip()}")
    try:
        answer = json.loads(answers[-1].removeprefix(ANSWER))
        version, outcome = answer["version"], answer.get("outcome")
        error, delay_ms = answer.get("error", ""), answer.get("delay_ms", 0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
        raise _failed(child, "gave a malformed answer") from fault
    if type(version) is not int or version != VERSION:
        raise _failed(child, f"answered in unsupported version {version!r}")
    if (
        outcome not in OUTCOMES
        or not isinstance(error, str)
        or type(delay_ms) is not int
        or not 0 <= delay_ms <= MAX_RELATIVE_MS
        or (outcome == Outcome.SNOOZE and not delay_ms)
    ):
        raise _failed(child, "gave a malformed answer")
    _raise_outcome(outcome, error, timedelta(milliseconds=delay_ms))


def _raise_outcome(outcome: str, error: str, delay: timedelta) -> None:
    if outcome == Outcome.SKIP:
        raise Skip(error)
    if outcome == Outcome.REVOKE:
        raise Revoke
    if outcome == Outcome.SNOOZE:
        raise Snooze(delay)
    if outcome == Outcome.RATE_LIMITED:
        raise RateLimited(delay or None)
    if outcome == Outcome.UNDECODABLE:
        raise MalformedPayload(error)
    if outcome == Outcome.RETRY:
        summary, _, details = error.partition("\n")
        failed = ProcessFailed(summary or "the isolated process asked for a retry")
        failed.retry_after = delay or None
        if details.strip():
            raise failed from RemoteError(details.strip("\n"))
        raise failed


def _failed(child: _Child, what: str) -> ProcessFailed:
    said = child.err.decode(errors="replace").strip()
    if len(said) > _SHOWN_BYTES:
        said = "..." + said[-_SHOWN_BYTES:]
    return ProcessFailed(
        f"isolated process {what}" + (f"; stderr: {said}" if said else "")
    )
