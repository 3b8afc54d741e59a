"""The standalone server of the console, under the same rules as that of the API."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from attrs import evolve

from headgate_sync.api.config import Authenticate
from headgate_sync.api.server import DEFAULT_THREADS, Address, serve_made
from headgate_sync.app import Headgate
from headgate_sync.console.app import create_app
from headgate_sync.console.config import ConsoleConfig
from headgate_sync.store import Store


def serve(
    store: Store | Headgate,
    *,
    address: str | None = None,
    auth: str | Authenticate | None = None,
    read_only: bool | None = None,
    title: str | None = None,
    config: ConsoleConfig | None = None,
    socket_mode: int = 0o600,
    threads: int = DEFAULT_THREADS,
    environ: Mapping[str, str] = os.environ,
    listening: Callable[[Address], object] | None = None,
    stop: SimpleQueue[object] | None = None,
) -> int:
    """Serve the console, and the API below it, until SIGTERM or SIGINT.

    Args:
        store: what is looked at and steered; it stays open.
        address: `host:port` or `unix:/path`; None is HEADGATE_API_ADDR, else
            127.0.0.1:8091.
        auth: a hook or `module:callable`; None is the one of the configuration, else
            the tokens of the environment.
        read_only: None is HEADGATE_READ_ONLY, else what the configuration says.
        title: shown on every page; None is that of the configuration.
        config: further settings.
        socket_mode: of a Unix socket.
        threads: most requests at the same time; streams get half of them at most.
        environ: of the process.
        listening: called with the address once connections are taken.
        stop: anything put into it ends the server, as a signal does.

    Returns:
        The exit code, 0.

    Raises:
        ConfigurationError: the address cannot be used, or others could reach it and no
            hook asks who they are.
    """
    settings = ConsoleConfig() if config is None else config
    named = settings.title if title is None else title
    return serve_made(
        lambda api: create_app(store, evolve(settings, api=api, title=named)),
        settings.api,
        name="console",
        address=address,
        auth=auth,
        read_only=read_only,
        socket_mode=socket_mode,
        threads=threads,
        environ=environ,
        listening=listening,
        stop=stop,
    )
