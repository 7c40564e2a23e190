"""How a process of a group reads its bookings from the group's feed, in place of Kafka.

What lives here: when the feed can be used, the switch to it without a gap, what comes next in it, and when it is lost.
What must not: Kafka (topic_readers reads it before the switch and after a loss), and what a record means (loads_sync).
All state but the thread's own is guarded by the lock of LoadsSync, which calls `take` whenever it needs the loads.

The switch: `mark` notes the ring's position. After that, the caller asks Kafka for the ends of all partitions, and
reads up to them. A record beyond these ends was appended after the position was noted, so the parent had not read it
yet, and the ring has it behind that position. `begin` then reads the ring from there, without the records that the
process has read from Kafka itself: there is no gap and no duplicate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from streams.errors import BadRecord
from streams.load_batches import LoadBatch
from streams.router_api.booking_ring import Frame, RingReader, encode_frame

log = logging.getLogger(__name__)

#: The thread folds what no request has folded, whenever about so many bytes have come, in intervals between these two,
#: which begin anew when a request or a tick folds. Each wake-up takes 0.5 ms of processor time, since others have used
#: the caches meanwhile: as much as 200 bookings. The longest interval also limits what the next request has to fold.
FOLLOWED_BYTES = 384 * 1024
FOLLOW_INTERVAL_MIN_S, FOLLOW_INTERVAL_MAX_S = 0.050, 0.250

#: The interval while requests wait for load to fall. With the parent's 10 ms they learn of it some 3 ms later than from
#: Kafka, which a router alone reads every 8 ms.
HURRIED_INTERVAL_S = 0.003

#: Records that the thread folds in one call, as many as a request folds before it uses the loads, and how long it then
#: leaves the lock to others.
_FOLDED_TOGETHER_MAX = 512
_YIELD_S = 50e-6

#: The feed is lost if its writer has not run for this long, or if a frame stays incomplete for so long. The writer
#: renews its heartbeat every 50 ms, except while it waits for the ends of partitions that it does not cover.
LOST_AFTER_S = 1.0

#: If this process's own records do not come back for this long, it reads Kafka itself. Mostly Kafka is away then, which
#: makes no difference. But the parent may have lost a partition while Kafka is there, and the process returns to the
#: feed only once the parent has read everything.
UNREAD_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the ring was when a switch began."""

    position: int
    epoch: int


@dataclass(frozen=True, slots=True)
class FramePart:
    """Records of one frame, from `first` up to `stop`."""

    frame: Frame
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def n_bytes(self) -> int:
        """About how many bytes they have."""
        return len(self.frame.payload) * len(self) // max(1, self.frame.n_records)

    def batch(self) -> LoadBatch:
        """The records in the frame's own buffer."""
        return self.frame.batch().part(self.first, self.stop)


class Follower(Protocol):
    """Who folds what the feed has: LoadsSync."""

    @property
    def is_waited_for(self) -> bool:
        """Whether anyone waits for load to fall."""

    @property
    def reads_back(self) -> bool:
        """Whether what this process wrote comes back in time."""

    def follow(self, group: GroupReader, begin: Callable[[], bool]) -> bool:
        """Call `begin` under the lock; if it returns True, fold what the group's feed has from now on."""

    def unfollow(self) -> None:
        """Fold nothing more from the feed."""

    def catch_up(self, records_max: int) -> bool:
        """Fold at most this many records; returns whether there may be more."""


class GroupReader:
    """One process's way through the ring. `reads` shows whether it takes its bookings from there at this moment."""

    def __init__(self, ring: RingReader, follower: Follower, topic_id: Callable[[], str | None]) -> None:
        """topic_id: returns the id of the topic that this process reads, None if it is not known yet."""
        self._topic_id = topic_id
        self._ring = ring
        self._follower = follower
        self._epoch = -1
        self._next: list[int] = [0] * ring.n_partitions
        self._part: FramePart | None = None  # what is left of the frame that was read last
        self._note_bad: Callable[[int, int, BadRecord], None] | None = None
        self._failed = False
        self._leaves = False  # no further frame is read
        self._lacks = False  # because records before the next one are not in the ring
        self.reads = False
        # Of the thread: what it last saw of the writer and of the ring, and for how long that has not changed.
        self._hurry = threading.Event()
        self._taken_s = 0.0  # when anyone last took records
        self._seen = (0, 0)
        self._silent_s = self._stuck_s = self._unread_s = 0.0

    # -- the switch ----------------------------------------------------------------------------------------------------

    def mark(self) -> Mark | None:
        """Begin a switch. None if the feed cannot be used now."""
        ring = self._ring
        mark = Mark(ring.written, ring.epoch)
        topic_id = self._topic_id()
        if ring.closed or -1 in ring.covered_from() or not self._follower.reads_back:
            return None
        if topic_id is None or not ring.is_of(topic_id):
            return None
        if time.monotonic_ns() - ring.heartbeat_ns > LOST_AFTER_S * 1e9:
            return None
        return mark

    def covers(self, ends: Sequence[int], next_offsets: Sequence[int]) -> bool:
        """Whether a process that reads these offsets next may take everything else from the ring.

        ends: of the partitions, as Kafka had them after the mark was made. The parent has to have read up to them too:
        a parent that does not get a partition's records must not be followed.
        """
        return (
            all(
                offset >= end and offset >= covered and read_to >= end
                for offset, end, covered, read_to in zip(
                    next_offsets, ends, self._ring.covered_from(), self._ring.read_to(), strict=True
                )
            )
            and -1 not in self._ring.covered_from()
        )

    def begin(self, mark: Mark, next_offsets: Sequence[int], note_bad: Callable[[int, int, BadRecord], None]) -> bool:
        """Read from the mark on, each partition from its next offset. Returns False if that is not possible any more.

        note_bad: called with partition, offset and error for each record that cannot be used.
        """

        def seek() -> bool:
            if self._ring.closed or self._ring.epoch != mark.epoch or not self._ring.seek(mark.position):
                return False
            self._epoch, self._next, self._part = mark.epoch, list(next_offsets), None
            self._note_bad, self._failed, self._leaves, self._lacks = note_bad, False, False, False
            self.reads = True
            return True

        self._seen, self._silent_s, self._stuck_s, self._unread_s = (0, 0), 0.0, 0.0, 0.0
        return self._follower.follow(self, seek)

    def end(self) -> None:
        """Read the ring no more. What was taken from it is folded."""
        self._leaves = True
        while self._follower.catch_up(_FOLDED_TOGETHER_MAX):
            pass
        self._follower.unfollow()
        self.reads = False

    # -- reading; called under the lock of LoadsSync -------------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether `take` may return something. Every decision asks; it takes 0.2 us."""
        return self._part is not None or self._ring.has_news()

    def take(self, records_max: int) -> FramePart | None:
        """The next records, of at most one frame; None if there are none now."""
        if self._failed:
            return None
        part = self._part
        while part is None:
            payload = None if self._leaves or self._ring.epoch != self._epoch else self._ring.read()
            if payload is None:
                return None
            part = self._unread(Frame(payload))
        self._taken_s = time.monotonic()
        if len(part) <= records_max:
            self._part = None
            return part
        self._part = FramePart(part.frame, part.first + records_max, part.stop)
        return FramePart(part.frame, part.first, part.first + records_max)

    def _unread(self, frame: Frame) -> FramePart | None:
        """What a frame has that this process has not read from Kafka itself."""
        skips = False
        before = self._next
        for span in frame.spans:
            if span.follows > before[span.partition]:
                # The parent reads a topic that has begun anew where it was in the former one, for example.
                self._leaves = self._lacks = True
                self._hurry.set()
                return None
            if span.first < before[span.partition]:
                skips = True
        if skips:  # only just after the switch
            if all(span.end <= before[span.partition] for span in frame.spans):
                return None
            left = [record for record in frame.records() if record.offset >= before[record.partition]]
            frame = Frame(encode_frame(left, frame.read_ms, {span.partition: span.follows for span in frame.spans}))
        for span in frame.spans:
            before[span.partition] = span.end
        return FramePart(frame, 0, frame.n_records)

    def note_bad(self, partition: int, offset: int, exc: BadRecord) -> None:
        """Report a record that cannot be used."""
        assert self._note_bad is not None
        self._note_bad(partition, offset, exc)

    def fail(self) -> None:
        """Note that a fold failed for no fault of a record: everything must be read again."""
        self._failed = True

    def next_offsets(self) -> list[int]:
        """For each partition the offset that follows what was taken from the ring."""
        return list(self._next)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Fold soon, since somebody has begun to wait for load to fall."""
        self._hurry.set()

    def follow(self, is_over: Callable[[], bool]) -> list[int] | None:
        """Fold what no request folds, until `is_over`, or until the feed is lost.

        Returns the offsets from which to read Kafka. None: it is over, or all topics must be read again.
        """
        last_s, position, interval_s = time.monotonic(), self._ring.position, FOLLOW_INTERVAL_MIN_S
        while not is_over():
            if self._follower.is_waited_for:
                time.sleep(HURRIED_INTERVAL_S)
            else:
                self._wait(interval_s)
            while self._follower.catch_up(_FOLDED_TOGETHER_MAX):
                time.sleep(_YIELD_S)  # without it, this thread would take the lock again before those that wait for it
            if self._failed:
                return None
            if self._ring.epoch != self._epoch:
                log.warning("the topic of the bookings has begun anew, so all topics are read again")
                return None
            now_s = time.monotonic()
            # Time in which this process itself did not run says nothing about the writer.
            reason = self._lost(min(now_s - last_s, 2 * FOLLOW_INTERVAL_MAX_S))
            bytes_per_s = (self._ring.position - position) / max(now_s - last_s, HURRIED_INTERVAL_S)
            interval_s = FOLLOWED_BYTES / max(bytes_per_s, FOLLOWED_BYTES / FOLLOW_INTERVAL_MAX_S)
            interval_s = max(interval_s, FOLLOW_INTERVAL_MIN_S)
            last_s, position = now_s, self._ring.position
            if reason:
                log.warning("bookings are read from Kafka again: %s", reason)
                self.end()
                return None if self._failed else self.next_offsets()
        return None

    def _wait(self, interval_s: float) -> None:
        """Wait for this time, and once more for what is missing from it if a request or a tick has taken records."""
        if not self._hurry.wait(interval_s):
            self._hurry.wait(max(self._taken_s + interval_s - time.monotonic(), 0.0))
        self._hurry.clear()

    def _lost(self, passed_s: float) -> str:
        """Why the feed cannot be used any more; "" if it can."""
        ring = self._ring
        seen = ring.heartbeat_ns, ring.position
        self._silent_s = self._silent_s + passed_s if seen[0] == self._seen[0] else 0.0
        self._stuck_s = self._stuck_s + passed_s if seen[1] == self._seen[1] and ring.has_news() else 0.0
        self._unread_s = 0.0 if self._follower.reads_back else self._unread_s + passed_s
        self._seen = seen
        if self._lacks:
            return "the group's feed lacks records; the topic was probably truncated or recreated"
        if ring.overtaken:
            return "this process was too slow, and the group's feed has overtaken it"
        if ring.closed:
            return "the group's feed has ended"
        if self._silent_s > LOST_AFTER_S:
            return f"the group's parent has not run for {LOST_AFTER_S:g} s"
        if self._stuck_s > LOST_AFTER_S:
            return "the group's feed cannot be read"
        if self._unread_s > UNREAD_AFTER_S:
            return "this process's own bookings do not come back from the group's feed"
        return ""
