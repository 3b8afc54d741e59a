"""What the dashboard and the alerts ask is answered by a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import start_http_server

from headgate_sync.lifecycle import Outcome
from headgate_sync.memory.store import MemStore
from headgate_sync.metrics import PrometheusMetrics, StoreCollector
from tests.builders import claim_one, enqueue
from tests.servers import WAIT_S, free_port
from tests.test_grafana import FOLDER, expressions, rules
from tests.test_metrics import EVERY_EVENT

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed"
)
# The store answers and drains; all else that the alerts tell of has happened.
SILENT = {"HeadgateBacklogDoesNotShrink", "HeadgateStoreDown"}


class Prometheus:
    """A server of a test's own, which scrapes one target many times a second."""

    def __init__(self, folder: Path, target: int) -> None:
        self.base = f"http://127.0.0.1:{(port := free_port())}"
        config = {
            "global": {
                **dict.fromkeys(("scrape_interval", "scrape_timeout"), "100ms"),
                "evaluation_interval": "200ms",
            },
            "rule_files": [str(FOLDER / "alerts.yaml")],
            "scrape_configs": [
                {
                    "job_name": "headgate",
                    "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
                }
            ],
        }
        file = folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        self._log = folder / "log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=output,
                stderr=output,
            )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)

    def ask(self, path: str, **arguments: str) -> dict[str, Any]:
        """The data of an answer; what is refused fails with the server's words."""
        url = f"{self.base}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                with urllib.request.urlopen(url, timeout=WAIT_S) as response:
                    answer = json.load(response)
            except urllib.error.HTTPError as refused:
                if refused.code != 503:  # it is still starting
                    raise AssertionError(f"{arguments}: {refused.read()!r}") from None
            except urllib.error.URLError:
                assert self._process.poll() is None, self._log.read_text()
            else:
                assert answer["status"] == "success"
                assert not answer.get("warnings")
                data: dict[str, Any] = answer["data"]
                return data
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[Prometheus, PrometheusMetrics]]:
    """A Prometheus over the metrics of a worker and of a store that drains."""
    registry, store = CollectorRegistry(), MemStore()
    for number in range(9):
        enqueue(store, f"j{number}")
    store.advance_clock(150_000)  # what came then counts as arrivals no more
    for _ in range(3):
        store.ack(claim_one(store).lease_ref, Outcome.SUCCESS)
    StoreCollector(store, registry)
    sink = PrometheusMetrics(registry)
    server, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
    asked = Prometheus(tmp_path, server.server_port)
    try:
        yield asked, sink
    finally:
        asked.stop()
        server.shutdown()
        server.server_close()


def filled(expression: str) -> str:
    """A query of the dashboard as it is sent for all queues."""
    return expression.replace("$__rate_interval", "10s").replace("$queue", ".*")


def test_every_query_is_answered_with_the_labels_that_its_legend_shows(
    prometheus: tuple[Prometheus, PrometheusMetrics],
) -> None:
    server, sink = prometheus
    wanted = {e: set(re.findall(r"\{\{(\w+)\}\}", shown)) for e, shown in expressions()}
    silent = {rule["expr"] for rule in rules() if rule["alert"] in SILENT}
    waiting = set(wanted) - silent
    deadline = time.monotonic() + WAIT_S
    while waiting:
        assert time.monotonic() < deadline, f"without an answer: {waiting}"
        for event in EVERY_EVENT:
            sink.on_event(event)
        for expression in sorted(waiting):
            for series in server.ask("query", query=filled(expression))["result"]:
                assert set(series["metric"]) >= wanted[expression], expression
                waiting.discard(expression)
    for expression in silent:
        assert server.ask("query", query=filled(expression))["result"] == []


def test_the_rules_are_evaluated_without_an_error(
    prometheus: tuple[Prometheus, PrometheusMetrics],
) -> None:
    server, _ = prometheus
    deadline = time.monotonic() + WAIT_S
    while True:
        (group,) = server.ask("rules")["groups"]
        healths = {rule["name"]: rule["health"] for rule in group["rules"]}
        if "unknown" not in healths.values():
            break
        assert time.monotonic() < deadline, healths
        time.sleep(0.05)
    assert set(healths.values()) == {"ok"}, healths
