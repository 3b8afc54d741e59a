"""A Flask view whose job exists if and only if its order does."""

from __future__ import annotations

import threading

import pytest

from headgate_sync.lifecycle import State
from tests.builders import admit

shop = pytest.importorskip("headgate_sync.demo.shop")


@pytest.fixture
def app(postgres, database_url):
    """The shop over the test database, without orders."""
    app = shop.create_app({"HEADGATE_DATABASE_URL": database_url, "TESTING": True})
    app.config["PROPAGATE_EXCEPTIONS"] = False
    with app.app_context():
        shop.db.session.execute(shop.db.text("TRUNCATE shop_order RESTART IDENTITY"))
        shop.db.session.commit()
        yield app
        shop.db.session.remove()
        shop.db.engine.dispose()


@pytest.fixture
def browser(app):
    return app.test_client()


@pytest.fixture
def jobs(postgres):
    """The stored jobs by id, read past the application."""
    return lambda: postgres.snapshot().jobs


@pytest.fixture(scope="module", autouse=True)
def close_at_the_end():
    yield
    shop.hg.close()


def orders():
    rows = shop.db.session.execute(shop.db.select(shop.Order)).scalars().all()
    shop.db.session.rollback()
    return rows


ORDER = {"tenant": "acme", "item": "tea"}


def test_the_order_and_its_job_are_committed_together(browser, jobs, postgres):
    answer = browser.post("/orders", json=ORDER)
    assert answer.status_code == 201
    job = jobs()[answer.json["job"]]
    assert (job["queue"], job["partition_key"], job["state"]) == (
        "mail",
        "acme",
        State.AVAILABLE,
    )
    (claim,) = admit(postgres.open_store(), queues=["mail"]).claims
    assert claim.envelope.id == answer.json["job"]
    assert (
        claim.envelope.payload == b'{"order_id":%d,"tenant":"acme"}' % answer.json["id"]
    )


def test_a_view_that_fails_leaves_neither_order_nor_job(browser, jobs, postgres):
    answer = browser.post("/orders", json={**ORDER, "fails": True})
    assert answer.status_code == 500
    shop.db.session.rollback()
    assert orders() == []
    assert jobs() == {}
    assert postgres.open_store().inspect.unfinished("mail") == 0


def test_after_a_duplicate_the_view_goes_on_and_commits(browser, jobs):
    first = browser.post("/orders", json=ORDER).json
    again = browser.post(f"/orders/{first['id']}/receipt").json
    assert again == {"job": first["job"], "new": False}
    assert browser.get(f"/orders/{first['id']}").json["asked"] == 1
    assert len(jobs()) == 1


def test_a_payload_of_the_wrong_type_is_refused_and_nothing_is_written(
    browser, jobs, app
):
    with app.test_request_context():
        shop.db.session.add(shop.Order(tenant="acme", item="tea"))
        shop.db.session.flush()
        with pytest.raises(
            shop.InvalidRequest, match="order_id: expected int, got str"
        ):
            shop.send_receipt.enqueue(order_id="1", tenant="acme", tx=shop.db.session)
        shop.db.session.commit()
    assert len(orders()) == 1
    assert jobs() == {}


def test_two_applications_of_one_factory_share_the_facade(
    app, database_url, browser, jobs
):
    second = shop.create_app({"HEADGATE_DATABASE_URL": database_url})
    assert second.extensions["headgate"] is app.extensions["headgate"]
    browser.post("/orders", json=ORDER)
    second.test_client().post("/orders", json=ORDER)
    assert len(jobs()) == 2
    with second.app_context():
        shop.db.engine.dispose()


def test_the_worker_sends_each_receipt_once(browser, jobs):
    ids = [browser.post("/orders", json=ORDER).json["id"] for _ in range(5)]
    never = threading.Event()
    with shop.hg.worker(queues=["mail"], threads=2, run_duties=False):
        for _ in range(200):
            if not jobs():
                break
            never.wait(0.05)
    assert jobs() == {}
    assert [browser.get(f"/orders/{n}").json["receipts"] for n in ids] == [1] * 5
