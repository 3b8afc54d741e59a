"""What a deploy script does with an application, for any command line."""

from __future__ import annotations

import sys
from pathlib import Path

from headgate_sync.client.schedules import SyncReport
from headgate_sync.errors import ConfigurationError
from headgate_sync.worker.__main__ import load_app


def sync_schedules(
    app: str, *, prune: bool = False, prefix: str | None = None
) -> SyncReport:
    """Write the schedules that an application declares, as its workers would.

    Args:
        app: `module:attribute`, looked for in the working directory too.
        prune: also delete schedules below `prefix` that are not declared any more.
        prefix: beginning of ids.

    Raises:
        ConfigurationError: there is no such application, or no prefix to prune below.
        AppFailed: importing it failed.
        StoreError: the database did not take them.
    """
    if prune and not prefix:
        raise ConfigurationError("--prune needs --prefix: not every schedule may go")
    if prefix and not prune:
        raise ConfigurationError("--prefix belongs to --prune")
    here = str(Path.cwd())
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    with load_app(app) as facade:
        return facade.sync_schedules(delete_missing=prune, prefix=prefix)
