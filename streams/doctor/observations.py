"""What the doctor has read, as values (pure).

What lives here: one type for each thing that is read. What must not: reading, and what is wrong with it (checks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streams.core.ids import WorkerId
from streams.core.workers import ServedModel, Worker
from streams.errors import KvStreamsError
from streams.kafka.clients import GroupMember, TopicState
from streams.lmcache.feeds import KnownFeed
from streams.settings import AgentSettings
from streams.tables.records import PartitionRecord
from streams.topics import TopicSpec


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """One partition record. live: whether it was appended while the doctor watched. at_ms: its time in the log."""

    record: PartitionRecord
    at_ms: int
    live: bool


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker of the registry. renewed_after_s: when its lease was first renewed while the doctor watched, or None."""

    worker: Worker
    renewed_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class FeedSeen:
    """A feed of LMCache's events. renewed_after_s: as in Registration."""

    feed: KnownFeed
    renewed_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClockReading:
    """How far a clock is ahead of this machine's (negative: behind).

    It is between the two numbers: a Date header has whole seconds, and a record takes time to arrive.
    """

    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class TopicsSeen:
    """Topics as the broker has them.

    states: None for a topic that is missing. refused: topics that these credentials may not describe, with the reason.
    without_leader, out_of_sync: partitions as `topic [number]`. other_prefixes: prefixes of further scopes.
    """

    specs: tuple[TopicSpec, ...]
    states: Mapping[str, TopicState | None]
    refused: Mapping[str, str] = field(default_factory=dict)
    without_leader: tuple[str, ...] = ()
    out_of_sync: tuple[str, ...] = ()
    other_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogsSeen:
    """What was in the logs, and what was appended while the doctor watched.

    watched_s: for how long. owners: partition records by partition, in log order. pulses: pulses by bridge. feeds: of
    LMCache's events, by key.
    bad: records that could not be read, by topic: their number and the reason of the first.
    dead_letters: those of the last minutes, by origin and reason. clocks: by subject.
    """

    watched_s: float
    owners: Mapping[int, tuple[OwnerRecord, ...]]
    workers: Mapping[WorkerId, Registration]
    models: Mapping[str, ServedModel]
    pulses: Mapping[str, int] = field(default_factory=dict)
    bad: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    dead_letters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    clocks: Mapping[str, ClockReading] = field(default_factory=dict)
    feeds: Mapping[str, FeedSeen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KafkaSeen:
    """Everything of Kafka. error: why it cannot be used; then the rest is None. members: None during a rebalance."""

    error: KvStreamsError | None = None
    topics: TopicsSeen | None = None
    members: tuple[GroupMember, ...] | None = None
    logs: LogsSeen | None = None


@dataclass(frozen=True, slots=True)
class StateSeen:
    """A router's state, compared with the topics in one partition of the tables. error: why it was not compared."""

    url: str
    partition: int
    error: KvStreamsError | None
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SocketSeen:
    """A ZMQ socket. error: why it cannot be used, or None. n_messages: received while the doctor watched."""

    address: str
    error: str | None
    n_messages: int = 0


@dataclass(frozen=True, slots=True)
class ProbeSeen:
    """What became of a probe prompt.

    error: why it could not be sent. n_blocks: its blocks. n_stored: those that the engine's events have with the hashes
    that a router computes; None if the doctor could not listen to its events. n_events: batches that arrived.
    matched: by router, the blocks that it finds on this worker; or why it did not answer.
    """

    error: str | None = None
    n_blocks: int = 0
    n_stored: int | None = None
    n_events: int = 0
    matched: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """One engine of the registry.

    error: why it does not answer over HTTP, or None. block_size: on its metrics page, None if it reports none. models:
    those that it serves, None if it does not say. has_lmcache: whether its metrics page has metrics of LMCache.
    tokens_grew: whether it processed tokens while the doctor watched.
    events, replays: by rank; replays are empty if it is registered without one. tokens: by the name of a prompt, how
    its tokens differ from those of the files of --tokenizer, or ""; empty if it has no /tokenize, None if not asked.
    """

    worker: Worker
    error: str | None = None
    block_size: int | None = None
    models: tuple[str, ...] | None = None
    version: str | None = None
    tokens_grew: bool = False
    has_lmcache: bool = False
    clock: ClockReading | None = None
    events: tuple[SocketSeen, ...] = ()
    replays: tuple[SocketSeen, ...] = ()
    tokens: Mapping[str, str] | None = None
    probe: ProbeSeen | None = None


#: Samples of a Prometheus page: name, labels, number.
Samples = tuple[tuple[str, Mapping[str, str], float], ...]


@dataclass(frozen=True, slots=True)
class PageSeen:
    """The metrics of one process. error: why they could not be read, or None."""

    url: str
    error: str | None = None
    samples: Samples = ()

    def total(self, name: str) -> float | None:
        """The sum of all samples of this name, None if the page has none."""
        numbers = [number for sample_name, _, number in self.samples if sample_name == name]
        return sum(numbers) if numbers else None

    def label(self, name: str, label: str) -> str | None:
        """The label of the first sample of this name, None if the page has none."""
        return next((labels.get(label) for sample_name, labels, _ in self.samples if sample_name == name), None)


@dataclass(frozen=True, slots=True)
class RankDigest:
    """What a router has of one rank. at: incarnation, generation and number of its last batch."""

    at: tuple[int, int, int]
    digest: str


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """One router. Lists have one entry for each round in which it was read.

    error: why it does not answer, or None. refused: status of an answer that its token does not allow, or None.
    not_ready: the reason, or None. workers: ids in its registry. digests: by worker id and rank. degraded: pairs of a
    reason and a worker id. silent: workers with ranks that were not heard from. differing: workers whose engines make
    other tokens than a front, with the prompt that shows it and the first token that differs; without rounds.
    """

    url: str
    error: str | None = None
    refused: int | None = None
    not_ready: str | None = None
    in_sync: tuple[bool, ...] = ()
    workers: tuple[frozenset[int], ...] = ()
    digests: tuple[Mapping[tuple[int, int], RankDigest], ...] = ()
    degraded: tuple[frozenset[tuple[str, int]], ...] = ()
    silent: tuple[frozenset[int], ...] = ()
    differing: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    page: PageSeen | None = None
    clock: ClockReading | None = None


@dataclass(frozen=True, slots=True)
class Observations:
    """Everything that was read.

    settings: those of the scope. kafka: None if it was skipped. pages: of processes other than the routers.
    tokenizer_models: models that --tokenizer names. states: with --verify, of the routers.
    """

    settings: AgentSettings
    kafka: KafkaSeen | None = None
    engines: tuple[EngineSeen, ...] = ()
    routers: tuple[RouterSeen, ...] = ()
    pages: tuple[PageSeen, ...] = ()
    tokenizer_models: tuple[str, ...] = ()
    states: tuple[StateSeen, ...] = ()
