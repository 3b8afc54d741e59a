"""Who enqueues: set by the embedding application, looked at by its authorizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal

from attrs import field, frozen

from headgate_sync.envelope import Envelope, check_text
from headgate_sync.errors import InvalidRequest

Source = Literal["library", "http"]
LIBRARY: Source = "library"


def _frozen(attributes: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(attributes, Mapping):
        raise InvalidRequest(
            f"attributes must be a mapping, got {type(attributes).__name__}"
        )
    for key, value in attributes.items():
        check_text("attributes", key)
        check_text("attributes", value)
    return MappingProxyType(dict(attributes))


@frozen
class Identity:
    """A subject, as the application names it, with what its rules need to know."""

    subject: str
    attributes: Mapping[str, str] = field(factory=dict, converter=_frozen)

    def __attrs_post_init__(self) -> None:
        if not check_text("subject", self.subject):
            raise InvalidRequest("subject must not be empty")


@frozen
class Authorization:
    """What an authorizer is asked about beside the job.

    Attributes:
        source: "library" for a call of the program, "http" for the control API.
        identity: None when the application set none.
    """

    source: Source
    identity: Identity | None


Authorizer = Callable[[Authorization, Envelope], bool]

_current: ContextVar[Identity | None] = ContextVar("headgate_sync_identity")


def current_identity() -> Identity | None:
    """The identity of the innermost `enqueue_identity` block of this context."""
    return _current.get(None)


@contextmanager
def enqueue_identity(identity: Identity | None) -> Iterator[None]:
    """Enqueue as this identity within the block; an argument `identity` still wins.

    Raises:
        InvalidRequest: no `Identity`.
    """
    token = _current.set(check_identity(identity))
    try:
        yield
    finally:
        _current.reset(token)


def check_identity(identity: object) -> Identity | None:
    """Refuse what is no identity; None is "not said".

    Raises:
        InvalidRequest: the text names the type.
    """
    if identity is None or isinstance(identity, Identity):
        return identity
    raise InvalidRequest(f"identity must be an Identity, got {type(identity).__name__}")
