"""The control API over each kind of store."""

from __future__ import annotations

import pytest

from headgate_sync.store import Store
from tests.api.caller import Caller, caller


@pytest.fixture
def api(store: Store) -> Caller:
    """The API with everything allowed."""
    return caller(store)
