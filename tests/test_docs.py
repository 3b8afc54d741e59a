"""The documents are true: examples run, generated pages are fresh, limits are named."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headgate_sync
from headgate_sync.postgres.migrate import migrate_up
from tests import cli_page, lifecycle_page
from tests.servers import new_database

ROOT = Path(__file__).parents[1]
PACKAGE = Path(headgate_sync.__file__).parent
LIMITS = ROOT / "docs" / "limits.md"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Every block runs, in order and in one module per page, unless its first line says not.
BLOCK = re.compile(
    r"^```python *(?P<mark>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#\s]+)")
NAMED = re.compile(r"(MAX|MIN|DEFAULT)_[A-Z0-9_]+")
NOT_RUN = "not-run"

# What a page takes for granted, and what has to be true after its last line.
AROUND = {
    "README.md": (
        """
import os
import psycopg
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy

app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://"
app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {
    "creator": lambda: psycopg.connect(os.environ["HEADGATE_DATABASE_URL"])
}
db = SQLAlchemy(app)

class Order(db.Model):
    id = db.Column(db.Integer, primary_key=True)
    tenant = db.Column(db.String, nullable=False)
""",
        """
with app.app_context():
    db.create_all()
    answer = app.test_client().post("/orders", json={"tenant": "acme"})
    assert answer.status_code == 201, answer.text
    assert db.session.query(Order).count() == 1
    db.engine.dispose()
assert hg.inspect.counts("mail").counts == {"available": 1}
""",
    ),
    "docs/around.md": (
        """
import os
import django
from django.conf import settings
from tests.servers import django_database, sqlalchemy_url

url = os.environ["HEADGATE_DATABASE_URL"]
os.environ["FLASK_SQLALCHEMY_DATABASE_URI"] = sqlalchemy_url(url)
settings.configure(
    INSTALLED_APPS=["django.contrib.sessions"],
    DATABASES={"default": django_database(url)},
    USE_TZ=True,
)
django.setup()
from django.core.management import call_command

call_command("migrate", verbosity=0)
""",
        """
assert label.get() == "-"
assert hg.inspect.counts("default").counts == {"completed": 1}
with app.app_context():
    db.engine.dispose()
""",
    ),
    "docs/transactions.md": (
        """
import os
import django
from django.conf import settings
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Session
from tests.servers import django_database, sqlalchemy_url

url = os.environ["HEADGATE_DATABASE_URL"]
app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = sqlalchemy_url(url)
db = SQLAlchemy(app)

class Order(db.Model):
    id = db.Column(db.Integer, db.Identity(start=100), primary_key=True)
    item = db.Column(db.String, nullable=False)

with app.app_context():
    db.create_all()
    engine = db.engine

settings.configure(DATABASES={"default": django_database(url)}, USE_TZ=True)
django.setup()
from django.db import connection as django_connection, models, transaction

class Purchase(models.Model):
    id = models.AutoField(primary_key=True)
    item = models.TextField()

    class Meta:
        app_label = "shop"

with django_connection.schema_editor() as editor:
    editor.create_model(Purchase)
with django_connection.cursor() as cursor:
    # Ids of their own, as a receipt is unique by the id.
    cursor.execute("ALTER TABLE shop_purchase ALTER id RESTART WITH 200")
""",
        """
assert hg.inspect.counts("mail").counts == {"available": 3}
answer = app.test_client().post("/orders", json={"item": "chair"})
assert answer.status_code == 201, answer.text
assert hg.inspect.counts("mail").counts == {"available": 4}
with Session(engine) as session:
    assert [order.item for order in session.query(Order)] == ["lamp", "chair"]
assert Purchase.objects.count() == 1
engine.dispose()
django_connection.close()
hg.close()
""",
    ),
    # Its blocks are the tests of a user, so that pytest runs them once more.
    "docs/testing.md": (
        "",
        """
import os
import subprocess
import sys

if "HEADGATE_PAGE_IS_TESTED" not in os.environ:
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "headgate_sync.testing.plugin"]
        + ["-W", "error", "-p", "no:cacheprovider", __file__],
        env={
            **os.environ,
            "HEADGATE_PAGE_IS_TESTED": "1",
            "HEADGATE_TEST_PG": os.environ["HEADGATE_DATABASE_URL"],
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout
    assert " passed" in told.stdout and "skipped" not in told.stdout, told.stdout
""",
    ),
}


def blocks(page: Path) -> list[str]:
    """The code of a page that runs."""
    return [
        match["code"]
        for match in BLOCK.finditer(page.read_text())
        if match["mark"].strip() != NOT_RUN
    ]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=page_id)
def test_the_examples_of_a_page_run(page, server_url, tmp_path):
    before, after = AROUND.get(page_id(page), ("", ""))
    module = tmp_path / "page_under_test.py"
    module.write_text("\n".join([before, *blocks(page), after]))
    with new_database(server_url) as url:
        migrate_up(url)
        told = subprocess.run(
            [sys.executable, "-W", "error", "-c", "import page_under_test"],
            cwd=tmp_path,
            env={
                **os.environ,
                "HEADGATE_DATABASE_URL": url,
                "PYTHONPATH": str(ROOT),
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert told.returncode == 0, told.stderr


def test_marks_of_code_blocks_are_known():
    marks = {
        match["mark"].strip() for p in PAGES for match in BLOCK.finditer(p.read_text())
    }
    assert marks <= {"", NOT_RUN}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    targets = {match["target"] for match in LINK.finditer(page.read_text())}
    assert {t for t in targets if not (page.parent / t).exists()} == set()


def test_the_lifecycle_page_is_fresh():
    assert lifecycle_page.PAGE.read_text() == lifecycle_page.render(), (
        "stale: run python -m tests.lifecycle_page"
    )


def test_the_page_of_the_command_line_is_fresh():
    assert cli_page.PAGE.read_text() == cli_page.render(), (
        "stale: run python -m tests.cli_page"
    )


def limits() -> Iterator[tuple[str, str, object]]:
    """Public constants that bound or default something: module, name, value."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Name) and NAMED.fullmatch(target.id):
                    yield path.name, target.id, ast.unparse(node.value)


def test_every_limit_is_named_in_the_page_of_limits():
    text = LIMITS.read_text()
    assert {name for _, name, _ in limits() if f"`{name}`" not in text} == set()


def test_the_page_of_limits_names_only_limits_that_exist():
    known = {name for _, name, _ in limits()}
    named = {match[0] for match in NAMED.finditer(LIMITS.read_text())}
    assert named - known == set()


def test_plain_numbers_of_the_page_of_limits_are_those_of_the_code():
    rows = [row for row in LIMITS.read_text().splitlines() if row.startswith("|")]
    wrong = []
    for _, name, value in limits():
        row = next((row for row in rows if f"`{name}`" in row), None)
        if row is None:
            continue  # the test above tells
        number = str(value).replace("_", "")
        power = f"2^{(int(number) + 1).bit_length() - 1}" if number.isdigit() else ""
        if number.isdigit() and f"{int(number):,}" not in row and power not in row:
            wrong.append((name, value))
    assert wrong == []
