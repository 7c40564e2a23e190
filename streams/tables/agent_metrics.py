"""The metrics of an agent, the Faust worker that indexes events; docs/metrics-reference.md has their table.

What lives here: the declarations, and the snapshot of an Indexer that they read. What must not: counting (the indexer
and its partitions count) and Prometheus' formats (streams.process.metrics).

All totals are over every partition that this process has owned since it started, so they never decrease when a
partition moves to another worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from streams.core.reducer.maintenance import MAINTENANCE_COUNTS
from streams.core.reducer.ordering import Verdict
from streams.kafka.applied_until import Lag, lag_records, lag_seconds
from streams.process.metrics import PARTITION, Label, Metric, MetricsRegistry, counter, gauge
from streams.tables.pooled_block_table import TransitionOutcome

#: Reasons for refusing a transition come from several modules, about a dozen in all.
REFUSAL_REASONS_MAX = 64

_OUTCOME_PREFIX = "cxl_"
_REFUSED_PREFIX = "cxl_refused_"
_STANDBY_STATES = (("current", True), ("loading", False))


class AgentCounts(Protocol):
    """The part of an Indexer that metrics read; the Indexer's docstrings list the keys."""

    def verdict_counts(self) -> Mapping[str, int]:
        """Totals of what records turned out to be."""
        ...

    def partition_counts(self) -> Mapping[str, int]:
        """Totals of the partitions' transactions."""
        ...

    def partition_lags(self) -> Mapping[int, Lag]:
        """The lag of each partition that this process owns."""
        ...

    def standbys(self) -> Mapping[int, bool]:
        """The partitions that this process follows as a standby, and whether each is up to date."""
        ...


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """What the declarations read."""

    verdicts: Mapping[str, int]
    partitions: Mapping[str, int]
    lags: Mapping[int, Lag]
    standbys: Mapping[int, bool]

    def refused(self) -> dict[str, int]:
        """Refused transitions by reason."""
        refused = (
            (key.removeprefix(_REFUSED_PREFIX), n)
            for key, n in self.verdicts.items()
            if key.startswith(_REFUSED_PREFIX)
        )
        return dict(refused)


AGENT_METRICS: tuple[Metric[AgentSnapshot], ...] = (
    gauge(
        "kvstreams_agent_partitions",
        "Partitions that this worker owns",
        lambda now: len(now.lags),
    ),
    gauge(
        "kvstreams_agent_standby_partitions",
        "Partitions of other workers that this worker follows: its copy is up to date (`current`), or is still being "
        "read (`loading`)",
        lambda now: {state: sum(1 for each in now.standbys.values() if each is at) for state, at in _STANDBY_STATES},
        Label("state", tuple(state for state, _ in _STANDBY_STATES)),
    ),
    gauge(
        "kvstreams_agent_lag_seconds",
        "For how long records of a partition that this worker owns may have been waiting; 0 if everything up to the "
        "last known ends of the logs is applied. Absent while it is not known",
        lambda now: lag_seconds(now.lags),
        PARTITION,
    ),
    gauge(
        "kvstreams_agent_lag_records",
        "Records of `kv-events` and `cxl-events`, transaction markers included, that are not applied yet in a "
        "partition that this worker owns. Absent while it is not known",
        lambda now: lag_records(now.lags),
        PARTITION,
    ),
    counter(
        "kvstreams_agent_source_records_total",
        "Records of `kv-events` and `cxl-events` that were processed in committed transactions, duplicates included",
        lambda now: now.partitions["applied"],
    ),
    counter(
        "kvstreams_agent_verdicts_total",
        "Records of `kv-events` by what they turned out to be (see verdict in the glossary)",
        lambda now: {verdict: now.verdicts[verdict] for verdict in Verdict},
        Label("verdict", tuple(Verdict)),
    ),
    counter(
        "kvstreams_agent_transitions_total",
        "Transitions of `cxl-events` that were not refused, by outcome",
        lambda now: {outcome: now.verdicts.get(f"{_OUTCOME_PREFIX}{outcome}", 0) for outcome in TransitionOutcome},
        Label("outcome", tuple(TransitionOutcome)),
    ),
    counter(
        "kvstreams_agent_transitions_refused_total",
        "Transitions of `cxl-events` that were refused, by reason; each is also a dead letter",
        AgentSnapshot.refused,
        Label("reason", values_max=REFUSAL_REASONS_MAX),
    ),
    counter(
        "kvstreams_agent_dead_letters_total",
        "Records that this agent wrote to the dead letters",
        lambda now: now.partitions["dead_letters"],
    ),
    counter(
        "kvstreams_agent_transactions_total",
        "Kafka transactions that were committed",
        lambda now: now.partitions["transactions"],
    ),
    counter(
        "kvstreams_agent_partition_failures_total",
        "Failures after which a partition was opened again, such as a fenced producer or an unreachable Kafka",
        lambda now: now.partitions["reopened"],
    ),
    counter(
        "kvstreams_agent_takeovers_total",
        "Partitions that this worker took over from another with the tables that it had in memory as their standby",
        lambda now: now.partitions["taken_over"],
    ),
    counter(
        "kvstreams_agent_bad_table_records_total",
        "Rows of a changelog that could not be read when a partition was opened",
        lambda now: now.verdicts["bad_table_record"],
    ),
    counter(
        "kvstreams_agent_maintenance_total",
        "What maintenance ticks did: ranks that became silent (`silent`), workers whose expiry was written "
        "(`expiry_written`), resync requests (`resync_requested`), ranks for which no further "
        "requests are sent (`resync_given_up`), and degraded ranks that were cleared (`cleared`)",
        lambda now: {name: now.verdicts[name] for name in MAINTENANCE_COUNTS},
        Label("action", MAINTENANCE_COUNTS),
    ),
)


def agent_registry(indexer: AgentCounts) -> MetricsRegistry[AgentSnapshot]:
    """The registry of an agent."""

    def snapshot() -> AgentSnapshot:
        return AgentSnapshot(
            indexer.verdict_counts(), indexer.partition_counts(), indexer.partition_lags(), indexer.standbys()
        )

    return MetricsRegistry(AGENT_METRICS, snapshot)
