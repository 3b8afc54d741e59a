"""One job on its way in: what a producer asks for, and the answer it gets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import evolve, field, frozen

from headgate_sync.errors import InvalidRequest
from headgate_sync.identity import Identity
from headgate_sync.options import UNSET, CallOptions
from headgate_sync.templates import parse_template

if TYPE_CHECKING:
    from headgate_sync.client.waiting import Completion
    from headgate_sync.task import PayloadTask


@frozen(kw_only=True)
class JobHandle:
    """The answer to an enqueue.

    Attributes:
        id: of the job; of the one that was there, when `joined` or `replaced`.
        kind, queue: as requested.
        joined: the unique key was held, nothing was changed and this is the holder.
        replaced: the holder of the unique key was changed as the request asked.
        dropped: a middleware kept the job from the store; there is none.
    """

    id: str
    kind: str
    queue: str
    joined: bool = False
    replaced: bool = False
    dropped: bool = False


class Producer(Protocol):
    """Where a function task sends its jobs: a client, or the facade over one."""

    def enqueue(self, job: Any, /, *, tx: Any = None) -> JobHandle:
        """Put one job in."""
        ...

    def enqueue_or_join(self, job: Any, /, *, tx: Any = None) -> JobHandle:
        """Put one job in, or find the one that holds its unique key."""
        ...

    def enqueue_and_wait(self, job: Any, /, *, timeout: Any) -> Completion[Any]:
        """Put one job in and wait for its end."""
        ...


@frozen(kw_only=True)
class JobRequest:
    """One job, validated and encoded, that is not sent yet.

    Attributes:
        value: the payload as the producer gave it: arguments by name, or an instance.
        plain: the payload in plain values.
        data: the payload in bytes.
        options: those of this call.
    """

    task: PayloadTask
    value: Any = field(repr=False)
    plain: Mapping[str, Any] = field(repr=False)
    data: bytes = field(repr=False)
    options: CallOptions

    def render(self, option: str, text: str | Callable[..., str]) -> str:
        """Fill a template, or call a callable, with this payload.

        Raises:
            InvalidRequest: the payload has no usable value for it; the text names task,
                option and value.
        """
        label = f"{self.task.label}: {option}"
        if not isinstance(text, str):
            made = self.task.apply(text, self.value)
            if not isinstance(made, str):
                raise InvalidRequest(
                    f"{label} must be str, the callable returned {type(made).__name__}"
                )
            return made
        template = parse_template(text)
        try:
            return template.render(
                self.task.with_defaults(self.plain) if template.paths else {}
            )
        except InvalidRequest as error:
            raise InvalidRequest(f"{label}: {error.message}") from None

    def digest(self) -> bytes:
        """SHA-256 of the payload with its defaults filled in."""
        whole = self.task.with_defaults(self.plain)
        return hashlib.sha256(self.task.codec.encode(whole)).digest()


def with_options(request: JobRequest, options: CallOptions) -> JobRequest:
    """The request with further options that win over its own."""
    given = options.given
    if not given:
        return request
    own = request.options
    for one, other in (("delay", "run_at"), ("run_at", "delay")):
        if one in given:
            own = evolve(own, **{other: UNSET})
    made = evolve(own, **given)
    request.task.check_templates(made)
    return evolve(request, options=made)


def identity_of(job: Any) -> Identity | None:
    """The identity that a request itself carries, from `using(identity=...)`."""
    if isinstance(job, JobRequest):
        own = job.options.identity
        return None if own is UNSET else own
    return None
