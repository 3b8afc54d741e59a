"""A small shop: its order view enqueues the receipt in the request's own transaction.

    flask --app headgate_sync.demo.shop run
    python -m headgate_sync.worker headgate_sync.demo.shop:jobs --queues mail

Both use the database of `HEADGATE_DATABASE_URL`, or a private development server.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg
from flask import Flask, abort, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from headgate_sync.app import Headgate
from headgate_sync.context import JobContext
from headgate_sync.embedded import EmbeddedServer
from headgate_sync.errors import DuplicateJob, InvalidRequest
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.settings import Settings
from headgate_sync.store import TxHandle


class Base(DeclarativeBase):
    """Base of the shop's tables."""


db = SQLAlchemy(model_class=Base)
hg = Headgate()
servers: list[EmbeddedServer] = []  # owned while this process lives


class Order(db.Model):  # type: ignore[name-defined,misc]
    """What a customer asked for."""

    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    item: Mapped[str]
    asked: Mapped[int] = mapped_column(default=0)
    receipts: Mapped[int] = mapped_column(default=0)


@hg.task(
    "receipt:send", queue="mail", max_attempts=5, timeout="30s",
    partition="{tenant}", unique="{order_id}",
)  # fmt: skip
def send_receipt(ctx: JobContext, order_id: int, tenant: str) -> None:
    """Count a receipt, in one commit with the completion of the job."""

    def count(tx: TxHandle) -> None:
        db.session.get_one(Order, order_id).receipts += 1

    ctx.once(count, tx=db.session)


def create_order() -> tuple[dict[str, Any], int]:
    """Add an order; its receipt is enqueued if and only if the order is committed."""
    wanted = request.get_json()
    order = Order(tenant=wanted["tenant"], item=wanted["item"])
    db.session.add(order)
    db.session.flush()
    job = send_receipt.enqueue(order_id=order.id, tenant=order.tenant, tx=db.session)
    if wanted.get("fails"):
        abort(500)  # the session is rolled back, and with it the job
    db.session.commit()
    return {"id": order.id, "job": job.id}, 201


def ask_again(order_id: int) -> dict[str, Any]:
    """Count the question, and send a receipt unless one is on its way."""
    order = db.get_or_404(Order, order_id)
    order.asked += 1
    try:
        job = send_receipt.enqueue(
            order_id=order.id, tenant=order.tenant, tx=db.session
        )
        answer = {"job": job.id, "new": True}
    except DuplicateJob as duplicate:  # the transaction goes on
        answer = {"job": duplicate.existing_id, "new": False}
    db.session.commit()
    return answer


def show_order(order_id: int) -> dict[str, Any]:
    """Show an order."""
    order = db.get_or_404(Order, order_id)
    return {"id": order.id, "asked": order.asked, "receipts": order.receipts}


def refuse(error: InvalidRequest) -> tuple[dict[str, str], int]:
    """Answer a payload that is none of the task with what is wrong with it."""
    return {"error": error.message}, 400


def create_app(config: dict[str, Any] | None = None) -> Flask:
    """Make the application, its tables and those of the queue.

    Args:
        config: further configuration, such as `HEADGATE_DATABASE_URL`.
    """
    app = Flask(__name__)
    app.config.update(config or {})
    url = Settings.read(lambda name: app.config.get(name, os.environ.get(name))).url
    if url is None:
        servers.append(EmbeddedServer.start())
        url = servers[-1].url
        app.config["HEADGATE_DATABASE_URL"] = url
    migrate_up(url)
    hg.init_app(app)
    hg.configure_worker(around=[app.app_context])
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://"
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"creator": lambda: psycopg.connect(url)}
    db.init_app(app)
    app.post("/orders")(create_order)
    app.get("/orders/<int:order_id>")(show_order)
    app.post("/orders/<int:order_id>/receipt")(ask_again)
    app.register_error_handler(InvalidRequest, refuse)
    with app.app_context():
        db.create_all()
        # A server that forks its workers must not share these connections with them.
        db.engine.dispose()
    return app


def jobs() -> Headgate:
    """What a worker of the shop serves."""
    create_app()
    return hg
