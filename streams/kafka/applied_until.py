"""Up to which time everything that was appended to a partition's sources has been applied.

What lives here: comparing readings of the sources' ends with applied offsets, and lags as metrics show them. What must
not: asking a broker, reading a clock, deciding how old is too old.

All times are of one monotonic clock: that of the process that reads the ends. So neither the clocks of other machines
nor the time at which a lag is noticed matters. A reading of the ends that fails is not passed in; then nothing is known
about what was appended since the last one, and `at_ms` stays where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from streams.process.metrics import OTHER, VALUES_MAX

#: Readings that wait until everything before their ends is applied. Further ones are dropped until then: the ends only
#: grow, so once the waiting ones are applied, the next reading shows how far the newest records are.
READINGS_MAX = 64

#: After this much time without a reading, the broker was out of reach: longer than any pause of a healthy one.
OUTAGE_MS = 2000


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """An offset of one source, and the topic that it belongs to: a recreated topic of the same name has another id."""

    topic_id: str
    offset: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How far something is behind the sources of one partition, as far as their ends are known.

    records: offsets that are not applied yet, transaction markers included; None if that is not known. ms: everything
    that was appended before that long ago is applied; None if that is not known for any time.
    """

    records: int | None
    ms: int | None


def records_behind(ends: Mapping[str, SourceOffset], applied: Mapping[str, SourceOffset]) -> int:
    """Count the offsets before the ends that are not applied. applied: the next offset of each source.

    Nothing is applied of a source that was recreated since.
    """
    n_records = 0
    for topic, end in ends.items():
        offset = applied.get(topic)
        n_records += max(
            end.offset - (offset.offset if offset is not None and offset.topic_id == end.topic_id else 0), 0
        )
    return n_records


def lag_seconds(lags: Mapping[int, Lag]) -> dict[str, float]:
    """Lags in seconds by partition, as a reading."""
    return _lag_reading({partition: None if lag.ms is None else lag.ms / 1000 for partition, lag in lags.items()})


def lag_records(lags: Mapping[int, Lag]) -> dict[str, float]:
    """Lags in records by partition, as a reading."""
    return _lag_reading({partition: lag.records for partition, lag in lags.items()})


def _lag_reading(lags: Mapping[int, float | None]) -> dict[str, float]:
    """Known lags by partition. Beyond the label's limit: the greatest of the rest, since a sum would be no lag."""
    reading: dict[str, float] = {}
    for partition, lag in lags.items():
        if lag is not None:
            key = str(partition) if partition < VALUES_MAX else OTHER
            reading[key] = max(lag, reading.get(key, 0.0))
    return reading


class AppliedUntil:
    """Follows one partition. Not thread-safe.

    at_ms: everything appended to the sources before this time is applied; None if that is not known for any time.
    """

    __slots__ = ("_asked_ms", "_next", "_settle_ms", "_settled_ms", "_waiting", "at_ms")

    def __init__(self, settle_ms: int = 0) -> None:
        """settle_ms: for how long after an outage the ends are not used.

        When a broker returns, its logs lack what producers could not send meanwhile.
        """
        self.at_ms: int | None = None
        self._settle_ms = settle_ms
        self._asked_ms: int | None = None
        self._settled_ms: int | None = None
        self._next: Mapping[str, SourceOffset] = {}
        self._waiting: deque[tuple[int, Mapping[str, SourceOffset]]] = deque()

    @property
    def reached_last_end(self) -> bool:
        """Whether the last end that was read is reached."""
        return self.at_ms is not None and not self._waiting

    def note_ends(self, asked_ms: int, ends: Mapping[str, SourceOffset]) -> None:
        """Take in the ends of all sources. asked_ms: before the broker was asked, so that older records are included.

        Nothing follows from ends of a topic other than the one whose records are applied.
        """
        if self._asked_ms is not None and asked_ms - self._asked_ms > OUTAGE_MS:
            self._settled_ms = asked_ms + self._settle_ms
        self._asked_ms = asked_ms
        if self._settled_ms is not None and asked_ms < self._settled_ms:
            return
        if len(self._waiting) < READINGS_MAX and all(
            topic in self._next and self._next[topic].topic_id == end.topic_id for topic, end in ends.items()
        ):
            self._waiting.append((asked_ms, ends))
            self._advance()

    def note_applied(self, next_offsets: Mapping[str, SourceOffset]) -> None:
        """Take in how far each source is applied: every offset before the given one."""
        if any(next_offsets.get(topic, offset).topic_id != offset.topic_id for topic, offset in self._next.items()):
            self._waiting.clear()  # they are ends of a topic that was recreated since
        self._next = next_offsets
        self._advance()

    def _advance(self) -> None:
        while self._waiting:
            asked_ms, ends = self._waiting[0]
            if any(topic not in self._next or self._next[topic].offset < end.offset for topic, end in ends.items()):
                return
            self.at_ms = asked_ms
            self._waiting.popleft()
