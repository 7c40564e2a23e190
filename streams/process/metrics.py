"""Prometheus metrics as data: declared once, read when they are scraped, printed as the docs' table.

What lives here: what a declaration is, and the registry that a process serves. What must not: the metrics of any
process, which are router_api.http.metrics for the router, agent_metrics for the Faust worker and engines.bridge_metrics
for the bridge, and process_metrics for all; and servers (http_server).

A metric holds no number. The router, the indexer and the bridge count for themselves; a declaration names the function
that reads the current number from a snapshot of them. So counting costs nothing here, and the core needs no metrics
library. No label value is a prompt's text or an id, since a time series that is created once stays in Prometheus.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Generic, TypeVar

from prometheus_client.utils import floatToGoString

S = TypeVar("S")

#: The label that tells the processes of one port apart.
PROCESS = "process"

#: Label value of everything that a label's declaration does not allow.
OTHER = "other"

#: Values of a label whose number grows with the fleet or with what users send, such as workers and models. Each is a
#: time series in Prometheus, for each router.
VALUES_MAX = 1000

#: `inference` begins the names that the Gateway API Inference Extension has for endpoint pickers.
_NAME = re.compile(r"(kvstreams|inference)_[a-z0-9]+(_[a-z0-9]+)*")
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


class Distribution:
    """Observations, counted by the first bound that is not below them. Used on one thread.

    It takes a fifth of the time of prometheus_client's Histogram, which has a lock: every request is observed.
    bounds: ascending, without infinity. counts: one for each bound, and one for everything above the last.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """How many observations are not above each bound, by the bound as Prometheus writes it."""
        return list(zip(map(floatToGoString, (*self.bounds, float("inf"))), accumulate(self.counts), strict=True))


#: A number, or one number for each combination of label values. With one label, its value is the key. A Distribution
#: for a histogram.
Reading = float | Mapping[Any, float] | Distribution


@dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One metric's declaration. Use `counter`, `gauge` and `histogram` to make one.

    help: one sentence or phrase, also the docs' text. read: takes the number from a snapshot S of the process.
    buckets: of a histogram that the registry keeps (`MetricsRegistry.histogram`); it has no `read`.
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
        assert (self.read is None) == bool(self.buckets), f"{self.name} needs either a reading or buckets"
        assert not self.buckets or self.kind is MetricKind.HISTOGRAM, f"{self.name} is a {self.kind}"


def counter(name: str, text: str, read: Callable[[S], Reading], *labels: Label) -> Metric[S]:
    """Declare a total, which starts from 0 with the process. name: ends in `_total`."""
    return Metric(name, MetricKind.COUNTER, text, labels, read)


def gauge(name: str, text: str, read: Callable[[S], Reading], *labels: Label) -> Metric[S]:
    """Declare a number that may rise and fall."""
    return Metric(name, MetricKind.GAUGE, text, labels, read)


def histogram(name: str, text: str, *buckets: float, read: Callable[[S], Distribution] | None = None) -> Metric[S]:
    """Declare a distribution. buckets: upper bounds, ascending, without infinity; none if it is read like a number."""
    return Metric(name, MetricKind.HISTOGRAM, text, read=read, buckets=buckets)


class MetricsRegistry(Generic[S]):
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
        self.process = process
        self._constant = [f'{PROCESS}="{_escaped_value(process)}"'] if process else []
        self._histograms = {metric.name: Distribution(*metric.buckets) for metric in metrics if metric.buckets}

    def histogram(self, name: str) -> Distribution:
        """The histogram of that name, to observe values with."""
        return self._histograms[name]

    def page(self) -> bytes:
        """All metrics in Prometheus' text format.

        Not by prometheus_client, which takes three times as long: with 1,000 workers, requests would wait for 30 ms.
        """
        snapshot = self._snapshot()
        lines: list[str] = []
        for metric in self._metrics:
            reading = self._histograms[metric.name] if metric.read is None else metric.read(snapshot)
            lines.append(f"# HELP {metric.name} {_escaped(metric.help)}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            if isinstance(reading, Distribution):
                lines += _distribution_lines(metric.name, reading, self._constant)
            else:
                lines += _lines(metric, reading, self._constant)
        return "\n".join([*lines, ""]).encode()


def _lines(metric: Metric[Any], reading: float | Mapping[Any, float], constant: Sequence[str]) -> Iterator[str]:
    """The samples of a metric that is no histogram. constant: labels that every sample has, as text."""
    assert metric.kind is not MetricKind.HISTOGRAM, f"{metric.name} needs a Distribution"
    if not isinstance(reading, Mapping):
        yield f"{metric.name}{_braced(constant)} {float(reading)}"
        return
    start = f"{metric.name}{{"
    names = [label.name for label in metric.labels]
    for values, number in _samples(metric, reading).items():
        pairs = [f'{name}="{_escaped_value(value)}"' for name, value in zip(names, values, strict=True)]
        yield f"{start}{','.join([*pairs, *constant])}}} {float(number)}"


def _distribution_lines(name: str, reading: Distribution, constant: Sequence[str]) -> Iterator[str]:
    """The samples of a histogram."""
    count = 0.0
    for bound, count in reading.cumulative():
        bucket = [f'le="{bound}"', *constant]
        yield f"{name}_bucket{_braced(bucket)} {float(count)}"
    yield f"{name}_count{_braced(constant)} {float(count)}"
    yield f"{name}_sum{_braced(constant)} {float(reading.total)}"


def _braced(pairs: Sequence[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escaped_value(value: str) -> str:
    return value if value.isalnum() else _escaped(value).replace('"', '\\"')


def _samples(metric: Metric[Any], reading: Mapping[Any, float]) -> dict[tuple[str, ...], float]:
    """Numbers by label values, in order, each value within its label's limit."""
    values_max = metric.labels[0].values_max
    if len(metric.labels) == 1 and values_max:  # most samples of a large fleet
        every = sorted([((str(value),), number) for value, number in reading.items()])
        kept: dict[tuple[str, ...], float] = dict(every[:values_max])
        if len(every) > values_max:
            kept[OTHER,] = kept.get((OTHER,), 0.0) + sum(number for _, number in every[values_max:])
        return kept
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


# -- lags --------------------------------------------------------------------------------------------------------------

#: The label of metrics that have one number per partition.
PARTITION = Label("partition", values_max=VALUES_MAX)


# -- the docs ----------------------------------------------------------------------------------------------------------


def label_text(label: Label) -> str:
    """A label and its values as Markdown."""
    values = ", ".join(f"`{value}`" for value in label.values) or f"at most {label.values_max} values"
    return f"`{label.name}`: {values}"
