"""How far one partition has applied its sources, and how far that is behind their ends.

What lives here: the applied offsets, stretches of the logs without records, and the ends as last read. What must not:
records (source_queue, partition), locks, reading a clock, asking a broker. Owner: the partition, under its lock.

State: applied offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from streams.kafka.applied_until import AppliedUntil, Lag, SourceOffset, records_behind
from streams.tables.records import BEHIND_UNKNOWN_MS, SourceProgress
from streams.tables.reducer import SourceRecord

#: An owner that has reached the ends of its sources, as read at most this long ago, does not lag. Ends are read at
#: least four times per second. If the broker is silent for longer, all the time since the last reading counts as a lag.
ENDS_VALID_MS = 600


class AppliedSources:
    """The progress of one partition in each of its source topics. Times are monotonic, in ms.

    progress: by topic, as last written. recreated: a source that was recreated since `open`, or a changelog, as the
    partition finds out. lost: records of a source were lost before they were read, and the tables do not contain this
    yet.
    """

    def __init__(self) -> None:
        self.progress: dict[str, SourceProgress] = {}
        self.recreated: str | None = None
        self.lost = False
        self._skipped: dict[str, tuple[int, int]] = {}  # topic to first and last offset of a stretch without records
        self._until = AppliedUntil()
        self._ends: Mapping[str, SourceOffset] = {}
        self._lag_written = True  # whether the last partition record says that the owner lags

    def open(self, progress: dict[str, SourceProgress], recreated: Iterable[str]) -> None:
        """Continue from here. Until the ends have been read and reached, it is unknown how far the owner lags.

        recreated: sources whose offsets start over.
        """
        for topic in recreated:
            self._skipped.pop(topic, None)
        self.progress = progress
        self.recreated = None
        self._until = AppliedUntil()
        self._ends = {}

    def restart(self) -> dict[str, int]:
        """Return the next offset of each source, from which its records are read again, and forget what was skipped."""
        self._skipped.clear()
        return {topic: source.applied_offset + 1 for topic, source in self.progress.items()}

    def applied(self, topic: str) -> int:
        """Return the last applied offset of a source, -1 before the first one."""
        return self.progress[topic].applied_offset if topic in self.progress else -1

    @property
    def applied_until_ms(self) -> int | None:
        """Everything appended to the sources before this time is applied; None if that is not known for any time."""
        return self._until.at_ms

    def skip(self, topic: str, first: int, end: int, lost: bool) -> None:
        """Take note that the log has nothing from the next offset `first` up to `end`; `lost` if it once had."""
        skipped_first, skipped_last = self._skipped.get(topic, (first, first - 1))
        self._skipped[topic] = (skipped_first if skipped_last + 1 == first else first, end - 1)
        self.lost = self.lost or lost

    def note_ends(self, asked_ms: int, ends: Mapping[str, SourceOffset]) -> bool:
        """Take in where the logs end; returns whether the owner has something to do or to write since.

        Nothing follows from the ends if a source was recreated.
        """
        for topic, end in ends.items():
            if end.topic_id != self.progress[topic].topic_id:
                self.recreated = topic
                return True
        self._ends = ends
        self._until.note_ends(asked_ms, ends)
        return self._lag_written and self._until.reached_last_end

    def follows(self, records: Sequence[SourceRecord]) -> bool:
        """Whether these records follow the applied ones without a hole; they do not if the table has started over."""
        firsts = {record.topic: record.offset for record in reversed(records)}
        return all(first <= self._done_with(topic) + 1 for topic, first in firsts.items())

    def advance(self, applied: Sequence[SourceRecord]) -> None:
        """Move the applied offsets past these records, and past stretches without records that follow them."""
        progress = self.progress
        for topic, record in {record.topic: record for record in applied}.items():
            progress[topic] = replace(progress[topic], applied_offset=record.offset, applied_at_ms=record.timestamp_ms)
        for topic, source in progress.items():
            if (done := self._done_with(topic)) > source.applied_offset:
                progress[topic] = replace(source, applied_offset=done)
        self._until.note_applied(self._next_offsets())

    def has_caught_up(self, now_ms: int) -> bool:
        """Whether the owner has reached the sources' ends since a partition record said that it lags.

        Also if a skipped stretch lets it reach them: routers compare the applied offset with the ends.
        """
        if self._lag_written and self._behind_ms(now_ms) == 0:
            return True
        return any(self._done_with(topic) > source.applied_offset for topic, source in self.progress.items())

    def write(self, now_ms: int) -> tuple[SourceProgress, ...]:
        """Return the progress for a partition record, with the ends and the lag of now."""
        behind_ms = self._behind_ms(now_ms)
        for topic, source in self.progress.items():
            end = self._ends[topic].offset if topic in self._ends else 0
            self.progress[topic] = replace(source, end_offset=max(end, source.applied_offset + 1), behind_ms=behind_ms)
        self._lag_written = behind_ms > 0
        return tuple(self.progress.values())

    def lag(self, now_ms: int) -> Lag:
        """How far the table is behind its sources."""
        n_records = records_behind(self._ends, self._next_offsets()) if self._ends and self.progress else None
        behind_ms = self._behind_ms(now_ms)
        return Lag(n_records, None if behind_ms == BEHIND_UNKNOWN_MS else behind_ms)

    def _next_offsets(self) -> dict[str, SourceOffset]:
        return {
            topic: SourceOffset(source.topic_id, source.applied_offset + 1) for topic, source in self.progress.items()
        }

    def _done_with(self, topic: str) -> int:
        """Return the last offset that is applied, or the end of a stretch without records right after it.

        A stretch further on is not used yet: records before it may have been taken, and dropped without
        acknowledgement.
        """
        applied = self.progress[topic].applied_offset
        first, last = self._skipped.get(topic, (0, -1))
        return max(applied, last) if first <= applied + 1 else applied

    def _behind_ms(self, now_ms: int) -> int:
        """Return for how long records of the sources may have been waiting, as far as this owner knows."""
        if self._until.at_ms is None:
            return BEHIND_UNKNOWN_MS
        since_ms = now_ms - self._until.at_ms
        return 0 if self._until.reached_last_end and since_ms <= ENDS_VALID_MS else since_ms
