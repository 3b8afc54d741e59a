"""Layers import downwards only, and each third-party package has its place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headgate_sync

PACKAGE = Path(headgate_sync.__file__).parent
VALUES, RULES, PORTS, STORES, RUNTIME, EDGES = range(1, 7)

# A package stands for everything in it; the longest name that fits decides.
LAYERS = {
    "errors": 0,
    "codec": VALUES,
    "callables": VALUES,
    "cron": VALUES,
    "durations": VALUES,
    "envelope": VALUES,
    "identity": VALUES,
    "forks": VALUES,
    "ids": VALUES,
    "lease": VALUES,
    "lifecycle": VALUES,
    "loggers": VALUES,
    "loglines": VALUES,
    "pages": VALUES,
    "schedule": VALUES,
    "scalars": VALUES,
    "search": VALUES,
    "semantics": VALUES,
    "signals": VALUES,
    "templates": VALUES,
    "tracing": VALUES,
    "backlog": RULES,
    "operations": RULES,
    "explanation": RULES,
    "policy": RULES,
    "retry": RULES,
    "validation": RULES,
    "idempotency": PORTS,
    "inspection": PORTS,
    "policies": PORTS,
    "schedules": PORTS,
    "store": PORTS,
    "telemetry": PORTS,
    "workers": PORTS,
    "memory": STORES,
    "postgres": STORES,
    "attempt": RUNTIME,
    "binder": RUNTIME,
    "binding": RUNTIME,
    "cancel": RUNTIME,
    "client": RUNTIME,
    "context": RUNTIME,
    "declared": RUNTIME,
    "events": RUNTIME,
    "forms": RUNTIME,
    "extensions": RUNTIME,
    "handlers": RUNTIME,
    "injection": RUNTIME,
    "interrupt": RUNTIME,
    "once": RUNTIME,
    "options": RUNTIME,
    "parameters": RUNTIME,
    "progress_reports": RUNTIME,
    "registry": RUNTIME,
    "request": RUNTIME,
    "steps": RUNTIME,
    "task": RUNTIME,
    "tracked": RUNTIME,
    "worker": RUNTIME,
    "": EDGES,  # the package's own names
    "__main__": EDGES,
    "api": EDGES,
    "console": EDGES,
    "app": EDGES,
    "cli": EDGES,
    "demo": EDGES,
    "deploy": EDGES,
    "embedded": EDGES,
    "labels": EDGES,
    "metrics": EDGES,
    "otel": EDGES,
    "progress": EDGES,
    "runtime": EDGES,
    "schema_commands": EDGES,
    "settings": EDGES,
    "testing": EDGES,
    "worker.__main__": EDGES,
    "worker.child": EDGES,
}
DRIVER = {"psycopg", "psycopg_pool"}
OWN = {
    "cli": {"click", "textual"},
    "postgres": DRIVER,
    "cron": {"cronsim"},
    "metrics": {"prometheus_client"},
    "otel": {"opentelemetry"},
    "testing": {"pytest"},
}
OUTSIDE = {
    0: set(),
    VALUES: {"attrs"},
    RULES: {"attrs"},
    PORTS: {"attrs"},
    STORES: {"attrs"},
    RUNTIME: {"attrs", "cattrs", "tenacity"},
    EDGES: {
        "attrs",
        "tenacity",
        "flask",
        "flask_sqlalchemy",
        "rich",
        "sqlalchemy",
        "jinja2",
        "markupsafe",
        "waitress",
        "werkzeug",
        *DRIVER,
    },
}
EXTRAS = {
    *("click", "django", "flask", "opentelemetry", "prometheus_client", "pytest"),
    *("jinja2", "rich", "sqlalchemy", "textual", "waitress", "werkzeug"),
}


def home(module: str) -> str:
    """The entry of the table that a module falls under."""
    parts = module.split(".")
    while parts and ".".join(parts) not in LAYERS:
        parts.pop()
    return ".".join(parts)


def modules() -> Iterator[tuple[str, Path]]:
    """Every module by its name within the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all imports, also those inside functions and type checks."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "headgate_sync":
                yield from (f"headgate_sync.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def fault(module: str, imported: str) -> str | None:
    """What is wrong with an import, if anything."""
    own, top = home(module), imported.split(".")[0]
    layer = LAYERS[own]
    if imported == "headgate_sync.__version__" and layer == EDGES:
        return None
    if top != "headgate_sync":
        allowed = OUTSIDE[layer] | OWN.get(own, set())
        if top in sys.stdlib_module_names or top in allowed:
            return None
        return f"{module} imports {top}"
    target = home(imported.removeprefix("headgate_sync").removeprefix("."))
    reach = {STORES: PORTS, RUNTIME: PORTS}.get(layer, layer)
    if own == target or LAYERS[target] <= reach:
        return None
    if layer == RUNTIME and LAYERS[target] == RUNTIME:
        return None
    return f"{module} (layer {layer}) imports {imported} (layer {LAYERS[target]})"


def test_every_module_has_a_layer():
    homeless = [
        name for name, _ in modules() if name.split(".")[0] and home(name) == ""
    ]
    assert homeless == []


def test_every_entry_of_the_table_exists():
    names = {name for name, _ in modules()}
    assert {name for name in LAYERS if name and name not in names} == set()


def test_layers_import_downwards_only():
    faults = [
        fault(name, imported) for name, path in modules() for imported in imports(path)
    ]
    assert [text for text in faults if text] == []


def test_importing_the_package_and_the_client_loads_no_extra():
    program = (
        "import sys, headgate_sync, headgate_sync.client;"
        "from headgate_sync import Headgate;"
        f"print(sorted({EXTRAS!r} & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("metrics", "prometheus_client", "metrics"),
        ("otel", "opentelemetry", "otel"),
        ("api", "werkzeug", "api"),
        ("console", "jinja2", "console"),
    ],
)
def test_a_module_whose_extra_is_missing_names_it(module, package, extra):
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from headgate_sync.errors import ConfigurationError\n"
        "try:\n"
        f"    import headgate_sync.{module}\n"
        "except ConfigurationError as error:\n"
        "    print(isinstance(error, ImportError), error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith("True ")
    assert f"pip install 'headgate_sync[{extra}]'" in told.stdout


def test_a_producer_loads_nothing_of_the_worker():
    program = (
        "import sys\n"
        "from headgate_sync import Headgate, MemStore\n"
        "hg = Headgate(MemStore())\n"
        "@hg.task('a')\n"
        "def f(x: int) -> None: ...\n"
        "f.enqueue(1)\n"
        "worker = {'asyncio', 'concurrent.futures', 'headgate_sync.worker', "
        "'tenacity'}\n"
        "print(sorted(worker & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "[]"
