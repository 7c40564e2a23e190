"""The expressions of the dashboard and the alert rules, and the metrics and labels that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser
import yaml

from tests.helpers.go_program import GoProgram
from tests.helpers.pages import ROOT

DASHBOARD = ROOT / "dashboards/kvstreams.json"
ALERTS = ROOT / "dashboards/alerts.yml"

#: Prometheus' own tool. The Go module v0.316.0 is Prometheus 3.16.0.
PROMTOOL = GoProgram(
    "promtool",
    "github.com/prometheus/prometheus@v0.316.0",
    "h1:f1GRFerhTMKQma+awCoC9T820ecWeGSdF+xAlMHzZzM=",
    "./cmd/promtool",
)

#: Grafana replaces its variables before Prometheus sees an expression.
_VARIABLES = {"$__rate_interval": "1m", "$router": ".*"}

_LABEL_VALUES = re.compile(r"label_values\((\w+), (\w+)\)")


@dataclass(frozen=True, slots=True)
class Selection:
    """One metric of an expression. labels: those that its matchers name, or that it is grouped by. source: for people.

    values: the values that matchers compare a label with by `=`.
    """

    source: str
    metric: str
    labels: frozenset[str]
    values: tuple[tuple[str, str], ...]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return board


def alerts() -> list[dict[str, Any]]:
    """The alert rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def selections() -> list[Selection]:
    """Every metric that the dashboard or an alert rule reads. Raises ValueError for what is not PromQL."""
    board = dashboard()
    found: list[Selection] = []
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            found += selections_of(f"panel {panel['title']!r}", target["expr"], shown)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = _LABEL_VALUES.fullmatch(variable["query"]["query"]).groups()  # type: ignore[union-attr]
            found.append(Selection(f"variable {variable['name']!r}", metric, frozenset({label}), ()))
    for rule in alerts():
        shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        found += selections_of(f"alert {rule['alert']}", rule["expr"], shown)
    return found


def selections_of(source: str, expression: str, shown: set[str]) -> Iterator[Selection]:
    """The metrics of one expression. shown: labels that its legend or text names, which the result must have."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    yield from _walk(source, promql_parser.parse(expression), frozenset(shown))


def _walk(source: str, node: Any, labels: frozenset[str]) -> Iterator[Selection]:
    match node:
        case promql_parser.VectorSelector():
            assert node.name is not None, f"{source} selects by labels alone"
            matchers = node.matchers.matchers
            values = tuple((each.name, each.value) for each in matchers if each.op == promql_parser.MatchOp.Equal)
            yield Selection(source, node.name, labels | {each.name for each in matchers}, values)
        case promql_parser.MatrixSelector():
            yield from _walk(source, node.vector_selector, labels)
        case promql_parser.AggregateExpr():
            by = set(node.modifier.labels) if node.modifier is not None else set()
            assert labels <= by, f"{source} shows {sorted(labels - by)}, which its aggregation drops"
            yield from _walk(source, node.expr, frozenset(by))
        case promql_parser.BinaryExpr():
            # Labels that a comparison or `and` keeps are those of its left side.
            on = set[str]()
            if node.modifier is not None and node.modifier.matching is not None:
                on = set(node.modifier.matching.labels)
            yield from _walk(source, node.lhs, labels)
            yield from _walk(source, node.rhs, frozenset(on))
        case promql_parser.Call():
            for argument in node.args:
                yield from _walk(source, argument, labels)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from _walk(source, node.expr, labels)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            pass
        case _:
            raise AssertionError(f"{source}: {type(node).__name__} is not expected")
