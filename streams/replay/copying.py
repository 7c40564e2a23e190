"""What is copied of a scope that another scope follows: which records, in which order, and how fresh (pure).

What lives here: the rules. What must not: Kafka (moving), and restating what tables have (restating).

An event is copied at once. A record of the registry and a bridge's pulse wait until every event is copied that the old
scope had before them. So another bridge does not claim an engine before everything is there that the former one wrote,
and a pulse says on the new scope what it says on the old one: that the events before it are in the log. A pulse that
is too old by then is left out, and answers for its bridge's ranks are degraded on the new scope.

What an owner concluded is not copied, since the owners of the new scope come to their own conclusions: expiries of
silent workers. Events of a worker without a bridge, as a publisher has it, are copied as those of a feed that is
behind: no pulse would show that the copying has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from streams.core.bridge_pulses import PULSE_EVERY_MS
from streams.core.events import BEFORE_FIRST, EngineBatch, EngineEvents, FeedState, Heartbeat, WorkerRemoved
from streams.core.ids import WorkerId
from streams.core.workers import Worker
from streams.errors import KvStreamsError
from streams.kafka.log_offsets import Place
from streams.kafka.records import PULSES

#: The oldest pulse that is copied, by when it was written: an exact answer may be as much older on the new scope.
PULSE_AGE_MS_MAX = PULSE_EVERY_MS

#: Readings of the ends that tell when a pulse was written. They cover several times the age above.
READINGS_MAX = 32

#: Records of the registry and of worker-metrics that wait for events. A thousand engines write 500 renewals per second,
#: so that these wait for minutes; nothing is copied at all if events are that far behind.
WAITING_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record that waits. received_ms: when it was read. written_ms: it was written later than this; None if that is
    not known. Both are of the monotonic clock."""

    topic: str
    key: bytes
    value: bytes | None
    received_ms: int
    written_ms: int | None

    @property
    def is_pulse(self) -> bool:
        """Whether it is a bridge's pulse."""
        return self.key.startswith(PULSES.keys.prefix)


class WaitingRecords:
    """The records that wait, in the order of their receipt. Times are of one monotonic clock, in ms."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._readings: deque[tuple[int, Mapping[Place, int]]] = deque(maxlen=READINGS_MAX)

    def __len__(self) -> int:
        return len(self._waiting)

    def note_ends(self, asked_ms: int, ends: Mapping[Place, int]) -> None:
        """Take in where the old scope's logs end, as the broker was asked for at this time."""
        self._readings.append((asked_ms, ends))

    def add(self, place: Place, offset: int, key: bytes, value: bytes | None, now_ms: int) -> None:
        """Let a record wait. Raises KvStreamsError beyond WAITING_MAX."""
        if len(self._waiting) >= WAITING_MAX:
            raise KvStreamsError(
                f"{WAITING_MAX} records of the registry wait for events to be copied",
                remedy="Start the command again; both Kafkas must be faster than the fleet",
            )
        # A record was written after every reading whose end it is not before.
        written_ms = max(
            (asked for asked, ends in self._readings if offset >= ends.get(place, offset + 1)), default=None
        )
        self._waiting.append(Waiting(place[0], key, value, now_ms, written_ms))

    def due(self, copied_until_ms: int | None, now_ms: int) -> Iterator[Waiting]:
        """Take the records before which every event is copied; pulses that are too old by now are left out.

        copied_until_ms: every event that was written before this time is copied; None if that is not known.
        """
        while self._waiting and copied_until_ms is not None and self._waiting[0].received_ms <= copied_until_ms:
            record = self._waiting.popleft()
            written_ms = record.written_ms
            if record.is_pulse and (written_ms is None or now_ms - written_ms > PULSE_AGE_MS_MAX):
                continue
            yield record


class Holders:
    """Which bridges hold the leases of workers, on both scopes. A worker that a new bridge feeds has moved."""

    def __init__(self) -> None:
        self._old: set[str] = set()  # bridges of the old scope
        self._new: dict[WorkerId, str] = {}  # the last holder on the new scope, by records that are no copies
        #: The length of the lease of each worker that has a bridge, by the last copied record of the registry.
        self.lease_ms: dict[WorkerId, int] = {}

    def note_old(self, worker: Worker | None) -> None:
        """Take in a worker's record of the old scope."""
        if worker is not None and worker.lease is not None:
            self._old.add(worker.lease.bridge)

    def note_copied(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Note that a worker's record was copied. A lease that was given up has the length that it had before."""
        if worker is None or worker.lease is None:
            self.lease_ms.pop(worker_id, None)
        elif not worker.lease.is_released:
            self.lease_ms[worker_id] = worker.lease.lease_ms

    def note_new(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Take in a worker's record of the new scope that is no copy."""
        if worker is not None and worker.lease is not None:
            self._new[worker_id] = worker.lease.bridge

    def has_moved(self, worker_id: WorkerId) -> bool:
        """Whether a bridge of the new scope feeds a worker, or did so last."""
        return self._new.get(worker_id, "") not in self._old and worker_id in self._new

    def moved(self) -> frozenset[WorkerId]:
        """The workers that have moved."""
        return frozenset(filter(self.has_moved, self._new))


def copies_of(batch: EngineBatch, lease_ms: int | None) -> tuple[EngineBatch, ...]:
    """Return what stands for a record of kv-events on the new scope. The same object if that is the record itself.

    lease_ms: of the worker's bridge; None without one.
    """
    body = batch.body
    if isinstance(body, WorkerRemoved):
        return () if body.seen_sequence is not None else (batch,)
    if lease_ms is None:
        return (replace(batch, feed=FeedState.CATCHING_UP),)
    if isinstance(body, EngineEvents) and batch.sequence == BEFORE_FIRST and not batch.n_unindexed:
        # A rank without a lease counts as one without a bridge. If the copying ended after this record, and before the
        # heartbeat that follows, nothing would show it. After this heartbeat, the record changes nothing. One of an
        # engine without events does: it makes the rank approximate.
        return replace(batch, body=Heartbeat("", lease_ms)), batch
    return (batch,)
