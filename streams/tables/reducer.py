"""The interface between a partition and the reducer that gives its records their meaning.

What lives here: the records that pass between them, the reducer's protocol, and the plan of a partition. What must not:
any reducer (index_reducer, cxl_reducer), transactions, threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from streams.errors import BadRecord
from streams.tables.records import Change
from streams.tables.store import TableSpec
from streams.topics import TopicSpec

Decoded = TypeVar("Decoded")


@dataclass(slots=True)
class SourceRecord:
    """One record of a source topic.

    handle: an opaque value with which the partition acknowledges the record; None if the handle of a later record
    acknowledges this one, too.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, str | bytes | None]]
    handle: Any = field(compare=False, default=None)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record for another topic, written in the same transaction to the partition with the same number."""

    topic: str
    key: bytes
    value: bytes | None


class Reducer(Protocol[Decoded]):
    """The pure state of one partition: source records in, changed records out."""

    def load(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> None:
        """Start from the rows of a table; the partition record is not among the items."""

    def follow(self, table: TableSpec, changes: Sequence[Change]) -> None:
        """Take in rows of a loaded table that its owner has written since, None for a deleted one.

        What is small or rare may be left out until `resume`.
        """

    def resume(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> bool:
        """Become what `load` of these rows makes, after `follow`; returns False if that takes a new reducer."""

    def decode(self, records: Sequence[SourceRecord]) -> Sequence[Decoded]:
        """Carry out effect 1 for many records; returns one value per record, which `apply` takes."""

    def apply(self, record: SourceRecord, decoded: Decoded) -> None:
        """Carry out effects 2 to 4. Raises BadRecord for a dead letter, also if the record could not be decoded."""

    @property
    def full(self) -> bool:
        """Whether so much has changed that the partition must commit before it applies more."""

    def source_lost(self) -> None:
        """Take note that records of a source were lost before this partition read them."""

    def tick(self, monotonic_ms: int, wall_ms: int, applied_until: Callable[[], int]) -> list[Outgoing]:
        """Do what is due by time alone.

        Called between `apply` and `take_changes`, at least every PARTITION_RECORD_EVERY_S. applied_until: returns the
        time, on the monotonic clock, up to which every appended record has been applied; it may ask the broker.
        """

    def take_refused(self) -> list[tuple[SourceRecord, BadRecord]]:
        """Take the records that were applied earlier and have become dead letters since."""

    def take_changes(self) -> dict[TableSpec, list[Change]]:
        """Take what changed since the last call, by table; a table may be missing."""


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What an owner of a partition maintains: its tables, the topics that it folds into them, and the reducer.

    The sources have the same number of partitions and one subscriber, so Faust assigns partitions of the same number to
    the same worker. The first source decides which partitions this worker owns. make_reducer: takes the counter of
    verdicts, and the fault point that a test armed.
    """

    tables: tuple[TableSpec, ...]
    sources: tuple[TopicSpec, ...]
    make_reducer: Callable[[Counter[str], Callable[[int], None] | None], Reducer[Any]]
