"""Prometheus metrics as data: declared once, read when they are scraped, served over HTTP, printed as the docs' table.

What lives here: what a declaration is, and the registry that a process serves. What must not: the metrics of any
process, which are router_api.metrics for the router, agent_metrics for the Faust worker and engines.bridge_metrics for
the bridge; and servers (http_server).

A metric holds no number. The router, the indexer and the bridge count for themselves; a declaration names the function
that reads the current number from a snapshot of them. So counting costs nothing here, and the core needs no metrics
library. No label value is a prompt's text or an id, since a time series that is created once stays in Prometheus.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar, assert_never

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

S = TypeVar("S")

#: The label that tells the processes of one port apart.
PROCESS = "process"

#: Label value of everything that a label's declaration does not allow.
OTHER = "other"

_NAME = re.compile(r"kvstreams_[a-z0-9]+(_[a-z0-9]+)*")
_TOTAL = "_total"


class MetricKind(StrEnum):
    """What Prometheus may do with a metric."""

    COUNTER = "counter"  # starts from 0 with the process and never decreases
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A label and a limit on its values. Samples beyond the limit are added up under `other`.

    values: every value that it can have; where they are not known in advance, values_max limits how many there are.
    """

    name: str
    values: tuple[str, ...] = ()
    values_max: int = 0

    def __post_init__(self) -> None:
        assert bool(self.values) != bool(self.values_max), f"label {self.name} needs either values or values_max"

    def allows(self, value: str, seen: set[str]) -> bool:
        """Whether a sample may have this value. seen: the values that other samples have already."""
        if self.values:
            return value in self.values
        return value in seen or len(seen) < self.values_max


#: A number, or one number for each combination of label values. With one label, its value is the key.
Reading = float | Mapping[Any, float]


@dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One metric's declaration. Use `counter`, `gauge` and `histogram` to make one.

    help: one sentence or phrase, also the docs' text. read: takes the number from a snapshot S of the process.
    buckets: of a histogram, whose observations are made while it runs (`MetricsRegistry.histogram`); it has no `read`.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[Label, ...] = ()
    read: Callable[[S], Reading] | None = None
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        assert self.name.endswith(_TOTAL) == (self.kind is MetricKind.COUNTER), f"{self.name} is a {self.kind}"
        assert (self.read is None) == (self.kind is MetricKind.HISTOGRAM) == bool(self.buckets), self.name


def counter(name: str, text: str, read: Callable[[S], Reading], *labels: Label) -> Metric[S]:
    """Declare a total, which starts from 0 with the process. name: ends in `_total`."""
    return Metric(name, MetricKind.COUNTER, text, labels, read)


def gauge(name: str, text: str, read: Callable[[S], Reading], *labels: Label) -> Metric[S]:
    """Declare a number that may rise and fall."""
    return Metric(name, MetricKind.GAUGE, text, labels, read)


def histogram(name: str, text: str, *buckets: float) -> Metric[Any]:
    """Declare a distribution. buckets: upper bounds, ascending, without infinity."""
    return Metric(name, MetricKind.HISTOGRAM, text, buckets=buckets)


class MetricsRegistry(Collector, Generic[S]):
    """What one process serves: its declarations, with numbers read from a snapshot that each scrape takes once."""

    def __init__(self, metrics: Sequence[Metric[S]], snapshot: Callable[[], S], process: str = "") -> None:
        """snapshot: called on the thread that serves; what it returns must not change while the metrics are read.

        process: the value of the label `process`, which every metric then has. Several processes that share a port need
        it: a scrape of that port reads the page of any of them.
        """
        names = [metric.name for metric in metrics]
        assert len(set(names)) == len(names), "a metric is declared twice"
        self._metrics = metrics
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._process = {PROCESS: process} if process else {}
        self._histograms = {
            metric.name: self._new_histogram(metric) for metric in metrics if metric.kind is MetricKind.HISTOGRAM
        }
        self._registry.register(self)

    def _new_histogram(self, metric: Metric[S]) -> Histogram:
        made = Histogram(
            metric.name, metric.help, tuple(self._process), registry=self._registry, buckets=metric.buckets
        )
        return made.labels(**self._process) if self._process else made

    def histogram(self, name: str) -> Histogram:
        """The histogram of that name, to observe values with."""
        return self._histograms[name]

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Read every metric but the histograms, which collect themselves; called by prometheus_client."""
        snapshot = self._snapshot()
        for metric in self._metrics:
            if metric.read is not None:
                yield _family(metric, metric.read(snapshot), self._process)


def _family(
    metric: Metric[Any], reading: Reading, constant: Mapping[str, str]
) -> CounterMetricFamily | GaugeMetricFamily:
    """constant: labels that every sample has."""
    names = [*(label.name for label in metric.labels), *constant]
    family: CounterMetricFamily | GaugeMetricFamily
    match metric.kind:
        case MetricKind.COUNTER:
            family = CounterMetricFamily(metric.name.removesuffix(_TOTAL), metric.help, labels=names)
        case MetricKind.GAUGE:
            family = GaugeMetricFamily(metric.name, metric.help, labels=names)
        case MetricKind.HISTOGRAM:
            raise AssertionError(f"{metric.name} collects itself")
        case _:
            assert_never(metric.kind)
    for values, number in _samples(metric, reading).items():
        family.add_metric((*values, *constant.values()), number)
    return family


def _samples(metric: Metric[Any], reading: Reading) -> dict[tuple[str, ...], float]:
    """Numbers by label values, in order, each value within its label's limit."""
    if not isinstance(reading, Mapping):
        return {(): float(reading)}
    seen: list[set[str]] = [set() for _ in metric.labels]
    samples: dict[tuple[str, ...], float] = {}
    for key, number in sorted((_values(key), number) for key, number in reading.items()):
        values = tuple(
            value if label.allows(value, taken) else OTHER
            for label, value, taken in zip(metric.labels, key, seen, strict=True)
        )
        for value, taken in zip(values, seen, strict=True):
            taken.add(value)
        samples[values] = samples.get(values, 0.0) + number
    return samples


def _values(key: Any) -> tuple[str, ...]:
    return tuple(map(str, key)) if isinstance(key, tuple) else (str(key),)


# -- HTTP --------------------------------------------------------------------------------------------------------------


def metrics_response(*registries: MetricsRegistry[Any]) -> web.Response:
    """Answer GET /metrics with these registries, one after the other; their metrics have different names."""
    page = b"".join(registry.page() for registry in registries)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


# -- the docs ----------------------------------------------------------------------------------------------------------


def markdown_table(metrics: Sequence[Metric[Any]]) -> str:
    """The declarations as a table for the docs, in the order in which they are declared."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{metric.name}` | {metric.kind} | {'; '.join(map(label_text, metric.labels))} | {metric.help} |"
        for metric in metrics
    ]
    return "\n".join(rows) + "\n"


def label_text(label: Label) -> str:
    """A label and its values as Markdown."""
    values = ", ".join(f"`{value}`" for value in label.values) or f"at most {label.values_max} values"
    return f"`{label.name}`: {values}"
