"""The dashboard and the alerts ask only for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from headgate_sync.memory.store import MemStore
from headgate_sync.metrics import PrometheusMetrics, StoreCollector
from tests.builders import enqueue
from tests.test_metrics import EVERY_EVENT, samples

FOLDER = Path(__file__).parents[1] / "docs" / "grafana"
PAGE = FOLDER.parent / "metrics.md"
# Words of the query language beside the names of metrics and labels.
WORDS = {
    *("and", "or", "on", "by", "unless", "sum", "max", "min", "rate", "increase"),
    "histogram_quantile",
}


def known() -> dict[str, set[str]]:
    """Names that a scrape can show, with their labels."""
    registry, store = CollectorRegistry(), MemStore()
    enqueue(store, "a")
    StoreCollector(store, registry, queues=["q", "idle"])
    sink = PrometheusMetrics(registry)
    for event in EVERY_EVENT:
        sink.on_event(event)
    return {name: {label for label, _ in labels} for name, labels in samples(registry)}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "headgate.json").read_text())
    return loaded


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Every query of both files, with the texts that name labels of its answer."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]
    for rule in rules():
        yield rule["expr"], " ".join(rule["annotations"].values())
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            # Names of metrics by a pattern, so that queues without workers show too.
            found = re.fullmatch(
                r'label_values\(\{__name__=~"([\w|]+)"\}, (\w+)\)',
                variable["query"]["query"],
            )
            assert found
            for metric in found[1].split("|"):
                yield metric, f"{{{{{found[2]}}}}}"


def faults(expression: str, shown: str, known: dict[str, set[str]]) -> set[str]:
    """Names in a query that nothing has."""
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\[[^\]]*\]", "", text)
    words = set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text)) - WORDS
    metrics = {word for word in words if word.startswith("headgate_")}
    allowed = set().union(*(known.get(metric, set()) for metric in metrics))
    labels = words - metrics
    labels |= set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", shown))
    return (metrics - set(known)) | (labels - allowed)


def test_every_query_asks_for_what_there_is() -> None:
    assert {e: f for e, s in expressions() if (f := faults(e, s, known()))} == {}


def test_every_metric_is_shown_somewhere() -> None:
    text = " ".join(expression for expression, _ in expressions())
    asked = set(re.findall(r"headgate_\w+", text))
    unasked = {name for name in known() if name not in asked}
    # What comes with the buckets of a histogram; the rest must be on the dashboard.
    assert unasked == {
        "headgate_job_attempt_duration_seconds_sum",
        "headgate_admission_duration_seconds_sum",
        "headgate_admission_duration_seconds_count",
        "headgate_queue_quiet_arrival_rate",
        "headgate_queue_quiet_drain_rate",
    }


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("sum(headgate_jobs_admited_total)", ""),
        ("sum by (tenant) (headgate_jobs_admitted_total)", ""),
        ('headgate_jobs_admitted_total{kind="k"}', ""),
        ("headgate_jobs_admitted_total", "{{kind}}"),
        ("headgate_jobs_admitted", ""),
    ],
)
def test_a_name_that_nothing_has_is_found(expression: str, shown: str) -> None:
    assert faults(expression, shown, known())


def test_the_dashboard_can_be_imported_as_it_is() -> None:
    board = dashboard()
    assert board["uid"]
    assert board["schemaVersion"] >= 36
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert used <= {*variables, "__rate_interval"}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["type"] for panel in panels} == {"row", "timeseries"}
    for panel in panels:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == [
        *("Is work flowing", "Limits", "Handlers", "Workers", "Trouble"),
    ]


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_alerts_cover_what_stops_a_fleet() -> None:
    by_name = {rule["alert"]: rule for rule in rules()}
    assert set(by_name) == {
        "HeadgateQueueUncovered",
        "HeadgateBacklogDoesNotShrink",
        "HeadgateQuarantine",
        "HeadgateLeasesLost",
        "HeadgateGateCorrections",
        "HeadgateStoreDown",
    }
    assert by_name["HeadgateBacklogDoesNotShrink"]["for"] == "10m"
    assert all(rule["annotations"]["summary"] for rule in by_name.values())


def test_the_page_names_every_metric_and_none_that_there_is_not() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`(headgate_\w+)`", text))
    base = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known()}
    assert named == base
