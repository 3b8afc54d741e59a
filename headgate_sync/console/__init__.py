"""The web console: pages for looking at jobs and queues and for steering them."""

from __future__ import annotations

from headgate_sync.errors import MissingExtra

try:
    import jinja2 as jinja2
    import werkzeug as werkzeug
except ModuleNotFoundError as error:
    raise MissingExtra(
        "the console needs jinja2 and werkzeug: pip install 'headgate_sync[console]'"
    ) from error

from headgate_sync.console.app import Console, create_app
from headgate_sync.console.config import ConsoleConfig

__all__ = ["Console", "ConsoleConfig", "create_app"]
