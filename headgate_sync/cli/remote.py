"""`HttpControl`: the commands over the HTTP control API."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from headgate_sync.cli.control import Json
from headgate_sync.envelope import check_text
from headgate_sync.errors import ConfigurationError, HeadgateError

TIMEOUT_S = 30
MAX_ANSWER_BYTES = 8 * 1024 * 1024
PAGE = 200
_ABSENT = (404, 501)
_BELOW = "/api/v1"


class HttpFailed(HeadgateError):
    """The API did not do what was asked.

    Attributes:
        status: of its answer; None when there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status

    def __str__(self) -> str:
        return self.message


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: the token must not travel to another address."""

    def redirect_request(self, *_: Any) -> None:
        return None


class HttpControl:
    """`ControlClient` over HTTP; one request at a time, nothing is repeated.

    Args:
        url: what the API is mounted at, with `/api/v1` or without.
        token: sent as a bearer token.

    Raises:
        ConfigurationError: the address or the token cannot be used.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            usable = False
        if not usable or parts.username is not None or parts.query or parts.fragment:
            raise ConfigurationError(
                "--api needs an address such as https://host/headgate, "
                "without user, query and fragment"
            )
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ConfigurationError("the token has characters that no header may have")
        self._base = url.rstrip("/").removesuffix(_BELOW) + _BELOW
        self._token = token
        self._opener = urllib.request.build_opener(_NoRedirect)

    def now_ms(self) -> int:
        return int(self.cluster()["now_ms"])

    def semantics(self) -> list[Json]:
        return _list(self._get("meta")["semantics"])

    # Queues.

    def queues(self) -> list[Json]:
        return self._pages("queues")

    def history(self, queue: str, since_ms: int, bucket_ms: int) -> list[Json]:
        query = {"since_ms": since_ms, "bucket_ms": bucket_ms}
        return _list(self._get(f"queues/{_in(queue)}/history", query))

    def partitions(self, queue: str) -> list[Json]:
        return self._pages("partitions", queue=queue)

    def pause_queue(self, queue: str, paused: bool) -> None:
        self._send("POST", f"queues/{_in(queue)}/{'pause' if paused else 'resume'}")

    def weigh_queue(self, queue: str, weight: int) -> None:
        self._send("PUT", f"queues/{_in(queue)}", {"weight": weight})

    def limit_queue(self, queue: str, most: int | None) -> None:
        path = f"queues/{_in(queue)}/enqueue-limit"
        if most is None:
            self._send("DELETE", path)
        else:
            self._send("PUT", path, {"max_unfinished_jobs": most})

    def delete_queue(self, queue: str, *, force: bool) -> str | None:
        query = {"force": "true"} if force else {}
        answer, _ = self._call("DELETE", f"queues/{_in(queue)}", query=query)
        return None if answer is None else str(_object(answer)["operation_id"])

    def sample_memory(self, limit: int) -> int:
        path = "queues/actions/sample-memory"
        return int(
            _object(self._send("POST", path, {"limit": limit}))["sampled_queues"]
        )

    # Jobs.

    def counts(self, queue: str | None) -> Json:
        return _object(self._get("jobs/counts", {"queue": queue}))

    def jobs(
        self,
        query: str | None,
        *,
        fields: Mapping[str, Any],
        cursor: str | None,
        limit: int,
    ) -> Json:
        for tag in (*fields.get("tags_all", ()), *fields.get("tags_any", ())):
            if "," in tag:
                raise ConfigurationError("the API cannot be asked for a tag with comma")
        asked = {
            name: ",".join(value) if isinstance(value, list | tuple) else value
            for name, value in fields.items()
        }
        return _object(
            self._get("jobs", {"q": query, "cursor": cursor, "limit": limit, **asked})
        )

    def job(self, job_id: str, *, payload: bool) -> Json:
        query = {"include_payload": "true"} if payload else {}
        found = _object(self._get(f"jobs/{_in(job_id)}", query))
        if found.get("id") != job_id:  # an id such as `counts` names another route
            raise HttpFailed("the answer is not that job")
        return found

    def part(self, job_id: str, what: str) -> Json | None:
        try:
            return _object(self._get(f"jobs/{_in(job_id)}/{what}"))
        except HttpFailed as failed:
            if failed.status in _ABSENT:
                return None
            raise

    def explain(self, job_id: str) -> Json:
        return _object(self._get(f"jobs/{_in(job_id)}/admission"))

    def steer(self, job_id: str, verb: str) -> None:
        if verb == "delete":
            self._send("DELETE", f"jobs/{_in(job_id)}")
        else:
            self._send("POST", f"jobs/{_in(job_id)}/{verb}")

    def reschedule(self, job_id: str, at_ms: int) -> None:
        path = f"jobs/{_in(job_id)}/reschedule"
        self._send("POST", path, {"scheduled_at_ms": at_ms})

    def replay(self, job_id: str, fields: Mapping[str, Any]) -> Json:
        return _object(self._send("POST", f"jobs/{_in(job_id)}/replay", fields))

    def enqueue(self, kind: str, payload: bytes, fields: Mapping[str, Any]) -> Json:
        body = {"kind": kind, "payload": _base64(payload), **fields}
        if "unique_key" in body:
            body["unique_key"] = _base64(body["unique_key"])
        return _object(self._send("POST", "jobs", body))

    # Operations.

    def start_operation(
        self, action: str, selector: Mapping[str, Any], *, dry_run: bool
    ) -> Json:
        body = {"action": action, "selector": dict(selector), "dry_run": dry_run}
        return _object(self._send("POST", "jobs/bulk", body))

    def operation(self, operation_id: str) -> Json:
        return _object(self._get(f"operations/{_in(operation_id)}"))

    def carry_on(self) -> int:
        return 0  # the workers behind the API do

    # Limits.

    def rate_classes(self) -> list[Json]:
        return _list(self._get("rate-classes"))

    def set_rate_class(self, name: str, fields: Mapping[str, Any]) -> None:
        self._send("PUT", f"rate-classes/{_in(name)}", fields)

    def pause_rate_class(self, name: str, delay_ms: int, reason: str) -> None:
        body = {"delay_ms": delay_ms, "reason": reason}
        self._send("POST", f"rate-classes/{_in(name)}/pause", body)

    def resume_rate_class(self, name: str) -> None:
        self._send("POST", f"rate-classes/{_in(name)}/resume")

    def delete_rate_class(self, name: str) -> int:
        _, headers = self._call("DELETE", f"rate-classes/{_in(name)}")
        return int(headers.get("x-waiting-jobs", 0))

    def ceilings(self) -> list[Json]:
        return _list(self._get("concurrency-limits"))

    def set_ceiling(self, name: str, fields: Mapping[str, Any]) -> None:
        self._send("PUT", f"concurrency-limits/{_in(name)}", fields)

    def delete_ceiling(self, name: str) -> None:
        self._send("DELETE", f"concurrency-limits/{_in(name)}")

    def set_quantum(self, queue: str, partition_key: str, quantum: int | None) -> None:
        body = {"queue": queue, "partition_key": partition_key, "quantum": quantum}
        self._send("PUT", "partitions", body)

    def quarantine(self) -> list[Json]:
        return self._pages("quarantine")

    def release(self, fingerprint: str) -> int:
        _, headers = self._call("DELETE", f"quarantine/{_in(fingerprint)}")
        return int(headers.get("x-released-jobs", 0))

    # Schedules.

    def schedules(self) -> list[Json]:
        return self._pages("periodic")

    def set_schedule(
        self, schedule_id: str, payload: bytes, fields: Mapping[str, Any]
    ) -> None:
        body = {"payload": _base64(payload), **fields}
        self._send("PUT", f"periodic/{_in(schedule_id)}", body)

    def pause_schedule(self, schedule_id: str, paused: bool) -> None:
        verb = "pause" if paused else "resume"
        self._send("POST", f"periodic/{_in(schedule_id)}/{verb}")

    def delete_schedule(self, schedule_id: str) -> None:
        self._send("DELETE", f"periodic/{_in(schedule_id)}")

    def run_schedule(self, schedule_id: str) -> Json:
        return _object(self._send("POST", f"periodic/{_in(schedule_id)}/run"))

    def schedule_events(
        self, schedule_id: str, *, cursor: str | None, limit: int
    ) -> Json:
        path = f"periodic/{_in(schedule_id)}/enqueue-events"
        return _object(self._get(path, {"limit": limit, "cursor": cursor}))

    # Workers.

    def workers(self) -> list[Json]:
        return self._pages("workers")

    def cluster(self) -> Json:
        return _object(self._get("cluster"))

    def signal(self, worker_id: str, command: str | None) -> None:
        self._send("POST", f"workers/{_in(worker_id)}/signal", {"command": command})

    # The wire.

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        return self._call("GET", path, query=query or {})[0]

    def _pages(self, path: str, **query: Any) -> list[Json]:
        found: list[Json] = []
        cursor: str | None = None
        while True:
            asked = {**query, "limit": PAGE, "cursor": cursor}
            answer, headers = self._call("GET", path, query=asked)
            found += _list(answer)
            cursor = headers.get("x-next-cursor")
            if cursor is None:
                return found

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Any:
        return self._call(method, path, body=body)[0]

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Mapping[str, str]]:
        """Make one request.

        Returns:
            The JSON of the answer, None for one without a body, and its headers.

        Raises:
            HttpFailed: no answer, or one that says no.
            InvalidRequest: a value that no address can carry; nothing is sent.
        """
        asked = {k: v for k, v in (query or {}).items() if v is not None}
        for name, value in asked.items():
            check_text(name, str(value))
        url = f"{self._base}/{path}" + (f"?{urlencode(asked)}" if asked else "")
        headers = {"Accept": "application/json", "Cache-Control": "no-cache"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if method != "GET":
            headers["Idempotency-Key"] = f"headgate-{uuid.uuid4().hex}"
            if body is not None or method != "DELETE":
                headers["Content-Type"] = "application/json"
                data = json.dumps(body or {}).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return _json(_read(answer)), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise HttpFailed(
                f"no answer from {self._base}, the API of --api or HEADGATE_API: {why}"
            ) from None


def _in(name: str) -> str:
    """A name as one segment of a path."""
    return quote(check_text("the name", name), safe="")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _read(answer: Any) -> bytes:
    data: bytes = answer.read(MAX_ANSWER_BYTES + 1)
    if len(data) > MAX_ANSWER_BYTES:
        raise HttpFailed(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return data


def _json(data: bytes) -> Any:
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        raise HttpFailed("the answer is no JSON: is --api the control API?") from None


def _object(answer: Any) -> Json:
    if not isinstance(answer, dict):
        raise HttpFailed("the answer is no JSON object: is --api the control API?")
    return answer


def _list(answer: Any) -> list[Json]:
    if not isinstance(answer, list) or not all(isinstance(x, dict) for x in answer):
        raise HttpFailed("the answer is no list of objects: is --api the control API?")
    return answer


def _refusal(error: urllib.error.HTTPError) -> HttpFailed:
    """What the API said, with the facts that stand beside its message."""
    try:
        said = _object(_json(_read(error)))
        message = str(said.pop("error", error.reason))
        facts = "".join(f", {name}={value}" for name, value in said.items())
    except (HttpFailed, OSError, http.client.HTTPException):
        message, facts = str(error.reason), ""
        if error.code == 404:  # of another program, and not about a job
            return HttpFailed(f"404: {message}: is --api the control API?")
    if error.code == 401:
        facts += "; is HEADGATE_TOKEN set?"
    return HttpFailed(f"{error.code}: {message}{facts}", error.code)
