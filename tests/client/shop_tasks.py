"""Tasks at module level, as programs have them."""

from __future__ import annotations

from headgate_sync.context import JobContext
from headgate_sync.registry import Registry

registry = Registry()


@registry.task("receipt:send", queue="mail", partition="{tenant}", unique="{order_id}")
def send_receipt(ctx: JobContext | None, order_id: int, tenant: str = "acme") -> str:
    """Send a receipt."""
    return f"{tenant}:{order_id}"
