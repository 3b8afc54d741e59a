"""Who sends a request: the hook, the shipped tokens, and what an identity may do."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Mapping
from typing import Any

from headgate_sync.api.answers import HttpError
from headgate_sync.api.config import ApiConfig
from headgate_sync.errors import ConfigurationError
from headgate_sync.identity import Identity

IDENTITY = "headgate.identity"
ACCESS = "access"
READ = "read"
TOKEN = "HEADGATE_API_TOKEN"
READ_TOKEN = "HEADGATE_API_READ_TOKEN"
MIN_TOKEN_BYTES = 16

READING = frozenset({"GET", "HEAD", "OPTIONS"})
# A browser says where a request comes from; whoever says nothing is no browser of the
# last years, or reached us by typing the address.
_OWN_SITE = frozenset({"same-origin", "none"})


class TokenAuth:
    """Lets whoever knows a token in; a hook for `ApiConfig.authenticate`.

    Taken as `Authorization: Bearer T`, and as the password of HTTP Basic, with any user
    name, for browsers.

    Args:
        token: may do everything; at least 16 bytes. None lets nobody.
        read_token: may only look.

    Raises:
        ConfigurationError: no token, or one that is too short or not ASCII.
    """

    # Chromium reads no further than the first: with the other order it asks nobody.
    challenge = 'Basic realm="headgate", charset="UTF-8", Bearer realm="headgate"'

    def __init__(self, token: str | None, read_token: str | None = None) -> None:
        self._known: list[tuple[bytes, Identity]] = []
        for name, text, identity in (
            (TOKEN, token, Identity("token")),
            (READ_TOKEN, read_token, Identity("read-token", {ACCESS: READ})),
        ):
            if text is None:
                continue
            if (
                len(text) < MIN_TOKEN_BYTES
                or not text.isascii()
                or text.split() != [text]
            ):
                raise ConfigurationError(
                    f"{name} must be at least {MIN_TOKEN_BYTES} ASCII characters "
                    "without blanks"
                )
            self._known.append((text.encode(), identity))
        if not self._known:
            raise ConfigurationError(f"no token: set {TOKEN} or {READ_TOKEN}")
        if len({known for known, _ in self._known}) < len(self._known):
            raise ConfigurationError(f"{TOKEN} and {READ_TOKEN} must differ")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> TokenAuth | None:
        """The hook that the environment asks for, or None.

        Raises:
            ConfigurationError: a token is too short.
        """
        token, read_token = environ.get(TOKEN), environ.get(READ_TOKEN)
        if token is None and read_token is None:
            return None
        return cls(token, read_token)

    def __call__(self, environ: dict[str, Any]) -> Identity | None:
        """The identity of the token in a request, or None."""
        sent = _credential(environ.get("HTTP_AUTHORIZATION", ""))
        found = None
        for known, identity in self._known:  # all of them: the time tells nothing
            if hmac.compare_digest(known, sent):
                found = identity
        return found


def _credential(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value.encode("latin-1", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def identified(config: ApiConfig, environ: dict[str, Any]) -> Identity | None:
    """Who sends a request; None for somebody whom nobody named.

    Raises:
        HttpError: 401, the hook does not know them.
        TypeError: the hook, or the application in front, named no `Identity`.
    """
    hook = config.authenticate
    found = environ.get(IDENTITY) if hook is None else hook(environ)
    if isinstance(found, Identity):
        return found
    if found is not None:
        raise TypeError(f"expected an Identity or None, got {type(found).__name__}")
    if hook is None:
        return None
    challenge = getattr(hook, "challenge", 'Bearer realm="headgate"')
    raise HttpError(
        401, "authentication required", headers={"WWW-Authenticate": challenge}
    )


def check_access(
    config: ApiConfig, identity: Identity | None, method: str, path_template: str
) -> None:
    """Refuse what an identity may not do.

    Raises:
        HttpError: 403.
    """
    hook = config.authorize
    if hook is not None and hook(identity, method, path_template) is not True:
        raise HttpError(403, "forbidden")
    if method in READING:
        return
    reads = identity is not None and identity.attributes.get(ACCESS) == READ
    if config.read_only or reads:
        raise HttpError(403, "read-only mode")


def check_site(environ: Mapping[str, Any]) -> None:
    """Refuse what a page of another site makes a browser send.

    Raises:
        HttpError: 403.
    """
    site = environ.get("HTTP_SEC_FETCH_SITE")
    if site is not None and site not in _OWN_SITE:
        raise HttpError(403, "requests from other sites are refused")
