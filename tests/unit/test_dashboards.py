"""The Grafana dashboard and the alert rules read metrics that exist.

tests/kafka/test_router_metrics.py compares them with pages of real processes.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from streams.cli.metrics import declared_metrics
from streams.process.metrics import MetricKind
from tests.helpers.go_program import BUILD_TIMEOUT_S
from tests.helpers.pages import ROOT
from tests.helpers.promql import PROMTOOL, alerts, dashboard, selections, selections_of

#: Labels that Prometheus adds to every sample.
ADDED_LABELS = {"instance", "job"}


def test_every_expression_names_metrics_and_labels_that_are_declared() -> None:
    """Each metric is one of ours, has the labels that the expression or its legend uses, and can have their values."""
    names: dict[str, dict[str, tuple[str, ...]]] = {}
    for metric in itertools.chain.from_iterable(declared_metrics().values()):
        labels = {label.name: label.values for label in metric.labels}
        names[metric.name] = labels
        if metric.kind is MetricKind.HISTOGRAM:
            names |= {f"{metric.name}_bucket": {"le": ()}, f"{metric.name}_sum": {}, f"{metric.name}_count": {}}
    found = selections()
    assert len(found) > 50
    for selection in found:
        assert selection.metric in names, selection
        labels = names[selection.metric]
        assert selection.labels <= labels.keys() | ADDED_LABELS, selection
        for label, value in selection.values:
            assert not labels.get(label) or value in labels[label], selection


def test_a_counter_is_read_as_a_rate_and_a_gauge_is_not() -> None:
    """A counter's total since its process started says nothing, and the rate of a gauge neither."""
    texts = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    texts += [rule["expr"] for rule in alerts()]
    for text in texts:
        ranged = set(re.findall(r"(?:rate|increase)\(\s*(\w+)", text))
        for name in re.findall(r"\bkvstreams_\w+", text):
            assert (name in ranged) == name.endswith(("_total", "_bucket")), text


def test_panels_do_not_overlap_and_use_the_chosen_data_source() -> None:
    """Grafana would move overlapping panels; a panel with a data source of its own would show nothing elsewhere."""
    cells: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        grid = panel["gridPos"]
        own = set(itertools.product(range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])))
        assert not own & cells and grid["x"] + grid["w"] <= 24, panel["title"]
        cells |= own
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


def test_the_docs_describe_every_alert() -> None:
    """docs/metrics.md has a row for each rule, in their order, and each rule says what it means."""
    named = re.findall(r"^\| `(KvStreams\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in alerts()] == named
    for rule in alerts():
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize(
    ("alert", "target"),
    [("KvStreamsHitRateLow", "< 0.3"), ("KvStreamsRoutingSlow", "> 0.005"), ("KvStreamsLoadUneven", "> 0.2")],
)
def test_the_alerts_have_the_targets(alert: str, target: str) -> None:
    """Hit rate over 0.3, latency under 5 ms, imbalance under 0.2."""
    (rule,) = (rule for rule in alerts() if rule["alert"] == alert)
    assert target in rule["expr"]


@pytest.mark.thorough
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_each_alert_fires_when_its_target_is_missed_and_not_otherwise() -> None:
    """Prometheus' own tool evaluates the rules on series that miss every target, and on series that meet them."""
    PROMTOOL.skip_without()
    rules = ROOT / "dashboards/alerts_test.yml"
    command = [str(PROMTOOL.installed()), "test", "rules", str(rules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """The paths of all that is in `given` and not, or with another value, in `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [each for key, value in given.items() for each in lost(value, kept.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            each for at, values in enumerate(zip(given, kept, strict=True)) for each in lost(*values, f"{path}/{at}")
        ]
    return [] if given == kept else [path]


def through_grafana(given: dict[str, Any]) -> Any:
    """Return a dashboard as Grafana's own types read it and write it. They drop what they do not have."""
    register_default_plugins()  # the options of each kind of panel
    return json.loads(JSONEncoder().encode(Dashboard.from_json(given)))


def test_the_dashboard_has_only_what_grafana_has() -> None:
    """Each panel and option is one of Grafana's. A variable's definition, which Grafana writes, copies its query."""
    found = lost(dashboard(), through_grafana(dashboard()))
    assert [path for path in found if not re.fullmatch(r"/templating/list/\d+/definition", path)] == []


def test_an_option_that_grafana_does_not_have_is_found() -> None:
    """An option of a panel with a mistyped name would have no effect."""
    given = dashboard()
    panel = next(panel for panel in given["panels"] if panel["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 2
    (path,) = [path for path in lost(given, through_grafana(given)) if not path.endswith("/definition")]
    assert path.endswith("/custom/lineWidht")


@pytest.mark.parametrize("expression", ["sum(", "rate(kvstreams_x)", "kvstreams_x{a=b}"])
def test_an_expression_that_is_not_promql_is_found(expression: str) -> None:
    """The reader of expressions is a parser of PromQL, and refuses what Prometheus would refuse."""
    with pytest.raises(ValueError, match=r"\w"):
        list(selections_of("test", expression, set()))


def test_a_legend_with_a_label_that_its_aggregation_drops_is_found() -> None:
    """Such a legend would show the name of the label instead of its value."""
    with pytest.raises(AssertionError, match="drops"):
        list(selections_of("test", "sum by (mode) (rate(kvstreams_answers_total[1m]))", {"reason"}))
