"""A module whose annotations name what only a type checker imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decimal import Decimal as Money

    from headgate_sync.context import JobContext


def pay(amount: Money) -> None: ...


def run(ctx: JobContext) -> None: ...
