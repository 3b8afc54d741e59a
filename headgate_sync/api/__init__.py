"""The control API: a WSGI application for looking at jobs and steering them."""

from __future__ import annotations

from headgate_sync.errors import MissingExtra

try:
    import werkzeug as werkzeug
except ModuleNotFoundError as error:
    raise MissingExtra(
        "the control API needs werkzeug: pip install 'headgate_sync[api]'"
    ) from error

from headgate_sync.api.app import ControlApi, create_app
from headgate_sync.api.auth import TokenAuth
from headgate_sync.api.config import ApiConfig, LiveUpdates, RateLimit

__all__ = [
    "ApiConfig", "ControlApi", "LiveUpdates", "RateLimit", "TokenAuth", "create_app",
]  # fmt: skip
