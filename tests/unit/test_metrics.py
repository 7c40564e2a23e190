"""Metrics: their declarations, what a registry makes of numbers and labels, and where they are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import chain
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from streams.cli import cli
from streams.cli.metrics import declared_metrics
from streams.core.engine_metrics import MetricsReport, WorkerMetrics
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.reducer.maintenance import MAINTENANCE_COUNTS
from streams.core.reducer.ordering import Verdict
from streams.engines.bridge_metrics import BRIDGE_METRICS, bridge_snapshot
from streams.engines.dialects.interface import NOT_INDEXED_REASONS
from streams.engines.feed_counters import NOT_INDEXED, RELEASED_RANKS_MAX, FeedCounters, RankCounters
from streams.errors import API_ERRORS, api_error
from streams.kafka.applied_until import Lag, lag_records, lag_seconds
from streams.lmcache.chunk_names import ChunkNames
from streams.lmcache.counters import LmcacheCounters
from streams.lmcache.pools import Feed, FeedPools, ModelNames
from streams.lmcache.wire import CacheBatch, Entry, EventType, Tier
from streams.process.metrics import (
    OTHER,
    VALUES_MAX,
    Distribution,
    Label,
    Metric,
    MetricsRegistry,
    counter,
    gauge,
    histogram,
)
from streams.router_api.http.metrics import _FailedScrapes
from streams.tables.agent_metrics import agent_registry
from streams.tables.partition import PARTITION_COUNTS
from streams.tables.pooled_block_table import TransitionOutcome

ALL = list(chain.from_iterable(declared_metrics().values()))


def samples(registry: MetricsRegistry[Any]) -> dict[str, float]:
    """Every sample of a page by its name and label values."""
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(registry.page().decode())
        for sample in family.samples
    }


@pytest.mark.first_ring("metrics")
def test_the_command_prints_every_metric() -> None:
    """`kvstreams metrics` names each metric once, with its labels and their values, and in a pipe on one line."""
    printed = CliRunner().invoke(cli, ["metrics"]).output
    words = Counter(printed.split())
    assert all(words[metric.name] == 1 for metric in ALL)
    assert "owner_silent" in printed
    lines = {line.split(maxsplit=1)[0]: line for line in printed.splitlines() if line.strip()}
    assert all(metric.help.replace("`", "") in lines[metric.name] for metric in ALL)


def test_metrics_of_different_processes_have_different_names() -> None:
    """A worker serves the router's metrics and its own on one page, so no name may occur twice."""
    names = [metric.name for metric in ALL]
    assert len(set(names)) == len(names)


def test_every_code_of_an_error_is_a_declared_label_value() -> None:
    """An error of the API is counted under its own code and not under `other`."""
    (errors,) = (metric for metric in ALL if metric.name == "kvstreams_errors_total")
    (code,) = errors.labels
    assert {api_error(error("x")).code for error in API_ERRORS} <= set(code.values)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: counter("kvstreams_x", "A total without the suffix of totals.", float),
        lambda: gauge("kvstreams_x_total", "A gauge with the suffix of totals.", float),
        lambda: gauge("other_x", "A name without our prefix.", float),
        lambda: gauge("kvstreams_X", "A name with a capital letter.", float),
        lambda: histogram("kvstreams_x_seconds", "A histogram without buckets."),
        lambda: Label("unlimited"),
        lambda: Label("both", ("a",), values_max=1),
        lambda: MetricsRegistry([gauge("kvstreams_x", "Once.", float), gauge("kvstreams_x", "Twice.", float)], int),
    ],
)
def test_a_declaration_that_breaks_a_rule_is_refused(declare: Callable[[], object]) -> None:
    """Kinds and suffixes agree, every label has a limit, and no metric is declared twice."""
    with pytest.raises(AssertionError):
        declare()


def test_a_registry_reads_a_snapshot_once_per_scrape() -> None:
    """Each page has the numbers of its own moment, in Prometheus' format, with counters named `_total`."""
    snapshots: list[dict[str, float]] = []

    def snapshot() -> dict[str, float]:
        snapshots.append({"n": len(snapshots) + 1, "by_mode": 2})
        return snapshots[-1]

    declared: tuple[Metric[dict[str, float]], ...] = (
        counter("kvstreams_x_total", "X", lambda now: now["n"]),
        gauge("kvstreams_y", "Y", lambda now: now["n"] / 2),
        gauge("kvstreams_z", "Z", lambda now: {"a": now["by_mode"]}, Label("mode", ("a", "b"))),
        histogram("kvstreams_h_seconds", "H", 1.0, 2.0),
    )
    registry = MetricsRegistry(declared, snapshot)
    registry.histogram("kvstreams_h_seconds").observe(1.5)
    page = registry.page().decode()
    assert len(snapshots) == 1
    for name, kind in (("x_total", "counter"), ("y", "gauge"), ("z", "gauge"), ("h_seconds", "histogram")):
        assert f"# TYPE kvstreams_{name} {kind}\n" in page
    second = samples(registry)
    assert len(snapshots) == 2
    assert (second["kvstreams_x_total"], second["kvstreams_y"], second["kvstreams_z/a"]) == (2.0, 1.0, 2.0)
    assert "kvstreams_z/b" not in second
    assert (second["kvstreams_h_seconds_bucket/1.0"], second["kvstreams_h_seconds_bucket/2.0"]) == (0.0, 1.0)


def test_label_values_that_are_not_declared_are_added_up_as_other() -> None:
    """A value outside the declared ones creates no time series of its own, and its count is not lost."""
    reading = {("a", "x"): 1, ("b", "x"): 2, ("c", "x"): 4, ("a", "y"): 8}
    metric: Metric[None] = counter(
        "kvstreams_x_total", "X", lambda _: reading, Label("first", ("a",)), Label("second", ("x",))
    )
    assert samples(MetricsRegistry([metric], lambda: None)) == {
        "kvstreams_x_total/a/x": 1.0,
        f"kvstreams_x_total/{OTHER}/x": 6.0,
        f"kvstreams_x_total/a/{OTHER}": 8.0,
    }


@pytest.mark.parametrize(("n_values", "n_others"), [(2, 0), (3, 0), (4, 1), (5, 2)])
def test_a_label_whose_values_are_not_known_has_a_limit_of_them(n_values: int, n_others: int) -> None:
    """Up to the limit each value has its own sample; the rest are added up as `other`."""
    reading = {f"v{number}": 1 for number in range(n_values)}
    metric: Metric[None] = gauge("kvstreams_x", "X", lambda _: reading, Label("name", values_max=3))
    found = samples(MetricsRegistry([metric], lambda: None))
    assert found.pop(f"kvstreams_x/{OTHER}", 0.0) == n_others
    assert found == {f"kvstreams_x/v{number}": 1.0 for number in range(min(n_values, 3))}


@pytest.mark.parametrize("value", ["plain", 'a "quoted" one', "back\\slash", "two\nlines", "{braces}", "ümläut", ""])
def test_any_label_value_and_help_text_is_read_back_as_it_was(value: str) -> None:
    """A model's name with quotes, backslashes or line breaks neither breaks the page nor changes."""
    metric: Metric[None] = gauge("kvstreams_x", f"help {value}.", lambda _: {(value, "b"): 1.5}, *two_labels())
    page = MetricsRegistry([metric], lambda: None).page().decode()
    (family,) = text_string_to_metric_families(page)
    assert family.documentation == f"help {value}."
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"first": value, "second": "b"}, 1.5)]


def two_labels() -> tuple[Label, Label]:
    return Label("first", values_max=2), Label("second", ("b",))


@given(st.lists(st.floats(0.0, 3.0) | st.sampled_from([0.5, 1.0, 2.0])))
def test_a_histogram_counts_like_prometheus_own(values: list[float]) -> None:
    """A value that equals a bound is within it; the page has the same samples as prometheus_client's Histogram."""
    bounds = (0.5, 1.0, 2.0)
    registry = CollectorRegistry()
    reference = Histogram("kvstreams_h_seconds", "H", registry=registry, buckets=bounds)
    ours = Distribution(*bounds)
    for value in values:
        reference.observe(value)
        ours.observe(value)
    metric: Metric[None] = histogram("kvstreams_h_seconds", "H", read=lambda _: ours)
    (expected,) = text_string_to_metric_families(
        generate_latest(registry).decode().partition("# HELP kvstreams_h_seconds_created")[0]
    )
    (found,) = text_string_to_metric_families(MetricsRegistry([metric], lambda: None).page().decode())
    assert (found.type, found.documentation) == (expected.type, expected.documentation)
    assert sorted(map(sample_key, found.samples)) == sorted(map(sample_key, expected.samples))


def sample_key(sample: Sample) -> tuple[str, list[tuple[str, str]], float]:
    return sample.name, sorted(sample.labels.items()), sample.value


@pytest.mark.parametrize(("n_partitions", "others"), [(VALUES_MAX, 0), (VALUES_MAX + 1, 1), (VALUES_MAX + 24, 1)])
def test_the_lag_of_partitions_beyond_the_limit_is_the_greatest_of_them(n_partitions: int, others: int) -> None:
    """A thousand partitions have a sample each; the rest share one, which is a lag that one of them has."""
    lags = {partition: Lag(partition, 1000 * partition) for partition in range(n_partitions)}
    for reading in (lag_records(lags), lag_seconds(lags)):
        assert len(reading) == min(n_partitions, VALUES_MAX) + others
        assert reading.get(OTHER, 0.0) == (n_partitions - 1 if others else 0.0)


def test_an_unknown_lag_has_no_sample() -> None:
    """A lag that is not known is neither 0 nor a number of any kind."""
    assert (lag_records({0: Lag(None, 5), 1: Lag(7, None)}), lag_seconds({0: Lag(None, 5), 1: Lag(7, None)})) == (
        {"1": 7},
        {"0": 0.005},
    )


class Counts:
    """Stands in for an Indexer: every total that it documents, each with another number."""

    def __init__(self) -> None:
        verdicts = [*map(str, Verdict), "bad_table_record", *MAINTENANCE_COUNTS]
        verdicts += [f"cxl_{outcome}" for outcome in TransitionOutcome] + ["cxl_refused_no_pool", "cxl_refused_bad_key"]
        self.verdicts = {name: 100 + n for n, name in enumerate(verdicts)}
        self.partitions = {name: 1000 + n for n, name in enumerate(PARTITION_COUNTS)}
        self.followed: dict[int, bool] = {}

    def verdict_counts(self) -> Mapping[str, int]:
        return self.verdicts

    def partition_counts(self) -> Mapping[str, int]:
        return self.partitions

    def partition_lags(self) -> Mapping[int, Lag]:
        return {}

    def standbys(self) -> Mapping[int, bool]:
        return self.followed


def test_every_total_of_an_agent_is_served() -> None:
    """Each number that an indexer counts is on the page of its process, exactly once."""
    counts = Counts()
    counts.followed = {1: True, 2: True, 3: False}
    found = samples(agent_registry(counts))
    assert found.pop("kvstreams_agent_partitions") == 0.0
    assert found.pop("kvstreams_agent_standby_partitions/current") == 2.0
    assert found.pop("kvstreams_agent_standby_partitions/loading") == 1.0
    assert sorted(found.values()) == sorted(map(float, (*counts.verdicts.values(), *counts.partitions.values())))
    assert found["kvstreams_agent_transitions_refused_total/no_pool"] == counts.verdicts["cxl_refused_no_pool"]
    assert found["kvstreams_agent_verdicts_total/gap"] == counts.verdicts["gap"]


def test_an_agent_that_has_counted_nothing_serves_zeros() -> None:
    """A counter exists from the start, so that Prometheus sees its first increase."""
    counts = Counts()
    counts.verdicts = dict.fromkeys((name for name in counts.verdicts if not name.startswith("cxl_")), 0)
    counts.partitions = dict.fromkeys(counts.partitions, 0)
    found = samples(agent_registry(counts))
    assert set(found.values()) == {0.0}
    assert found["kvstreams_agent_transitions_total/applied"] == 0.0


def test_every_counter_of_a_feed_is_served_as_the_sum_over_ranks() -> None:
    """Each field of FeedCounters has a metric; two ranks are added up, and none has a label of its own."""
    ranks = [RankId(WorkerId(1), DpRank(0)), RankId(WorkerId(2), DpRank(1))]
    names = [each.name for each in fields(FeedCounters) if each.name != "not_indexed"]
    counters = RankCounters()
    for rank in ranks:
        for n, name in enumerate(names):
            setattr(counters.of(rank), name, 10 * n + 1)
        counters.of(rank).not_indexed.update(dict.fromkeys(NOT_INDEXED_REASONS, 3))
    found = samples(MetricsRegistry(BRIDGE_METRICS, lambda: bridge_snapshot(counters, 3, 4)))
    of_lmcache = {name for name in found if name.startswith("kvstreams_bridge_lmcache_")}
    assert {found.pop(name) for name in of_lmcache} == {0.0}
    wanted = {f"kvstreams_bridge_{name}_total": 20.0 * n + 2 for n, name in enumerate(names)}
    wanted |= {f"kvstreams_bridge_not_indexed_total/{reason}": 6.0 for reason in NOT_INDEXED_REASONS}
    gauges = {"kvstreams_bridge_ranks": 2.0, "kvstreams_bridge_engines": 3.0, "kvstreams_bridge_buffered_records": 4.0}
    assert found == wanted | gauges


def test_what_a_bridge_counts_of_lmcache_never_decreases() -> None:
    """When a feed goes to another bridge, its objects stay counted, and its chunks are that bridge's."""
    feed, models = Feed("node-a"), ModelNames(lambda _: 16)
    pools, counters = FeedPools(feed, ChunkNames(), models), LmcacheCounters()
    named = Entry(b"chunk", "m", 1, 0, 0, "", 1, b"[" + b"1," * 15 + b"1]", 0)
    entries = [named, named._replace(chunk_hash=b"other", tokens=b"", offset=-1)]
    batch = CacheBatch("node-a", 1, 3, EventType.STORE, Tier.L1, "dram", False, entries, 0, 0)
    counters.batches[batch.kind] += 1
    counters.verdicts[pools.apply(batch, 1)] += 1
    registry = MetricsRegistry(
        BRIDGE_METRICS, lambda: bridge_snapshot(RankCounters(), lmcache=counters.snapshot(passed_on))
    )
    totals = {
        "batches_total/store": 1.0,
        "verdicts_total/gap": 1.0,
        "stored_total": 2.0,
        "not_counted_total/no_tokens": 1.0,
    }
    passed_on = [pools]
    gauges = {"feeds": 1.0, "feeds_incomplete": 1.0, "chunks": 2.0}
    prefix = "kvstreams_bridge_lmcache_"
    for expected in (totals | gauges, totals):
        found = {name.removeprefix(prefix): n for name, n in samples(registry).items() if n and prefix in name}
        assert found == expected
        passed_on = []
        counters.end(pools)


def test_the_counters_of_released_ranks_are_added_up_beyond_a_limit() -> None:
    """A bridge keeps those of the last released ranks, and no total decreases, whichever ranks come and go."""
    counters, n_ranks = RankCounters(), RELEASED_RANKS_MAX + 100
    ranks = [RankId(WorkerId(n), DpRank(0)) for n in range(n_ranks)]
    for rank in ranks:
        counters.of(rank).batches_published += 2
        counters.of(rank).not_indexed["tail"] += 1
        counters.release(rank)
        counters.release(rank)
    assert set(counters.counts()) == set(ranks[100:])
    assert counters.of(ranks[100]).batches_published == 2  # it returns, with its counters
    counters.of(ranks[0]).batches_published += 1  # it returns after its counters were added up
    for rank in ranks[1:50]:
        counters.of(rank)
        counters.release(rank)
    assert {ranks[0], ranks[100]} < set(counters.counts())
    assert len(counters.counts()) == RELEASED_RANKS_MAX + 2
    totals = counters.totals()
    assert totals["batches_published"] == 2 * n_ranks + 1
    assert totals[f"{NOT_INDEXED}tail"] == n_ranks
    assert len(counters) == n_ranks + 50  # those that returned after they were added up count twice


def report(worker_id: int, n_failed: int, dp_rank: int = 0) -> MetricsReport:
    return MetricsReport(RankId(WorkerId(worker_id), DpRank(dp_rank)), WorkerMetrics(0.5), 1000, 0, n_failed)


def test_the_total_of_failed_scrapes_never_decreases() -> None:
    """An engine whose report expires, or whose next bridge counts from 0, takes nothing from the total."""
    scrapes = _FailedScrapes()
    totals = []
    for reports in (
        [report(1, 2), report(1, 2, dp_rank=1), report(2, 1)],  # ranks of one worker share its count
        [report(1, 3), report(2, 1)],
        [report(2, 1)],  # the first engine's report has expired
        [report(1, 4), report(2, 0)],  # it reports again; the second one has another bridge
        [report(1, 4), report(2, 2)],
    ):
        scrapes.update(reports)
        totals.append(scrapes.total)
    assert totals == [3, 4, 4, 5, 7]
