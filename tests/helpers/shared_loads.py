"""Routers that share bookings through one log, in memory. The log stands in for Kafka."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from streams.core.hashing import pack_hashes
from streams.core.ids import RankId
from streams.core.loads.bookings import Booking
from streams.kafka.clients import Record
from streams.router_api.sharing.loads_sync import LoadsSync
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.api import rank_of
from tests.helpers.invariants import check
from tests.replicas import Loads, loads_of

TTL_MS = 10_000
KNOBS = Settings(partitions=2, booking_ttl_s=TTL_MS / 1000)
TOPIC = topics(KNOBS).router_loads

#: The time since the epoch at which every world begins.
WALL_MS = 1_800_000_000_000


@dataclass
class Log:
    """One compacted topic. away: nothing is acknowledged. now_ms: the broker's clock."""

    partitions: list[list[Record]] = field(default_factory=lambda: [[] for _ in range(TOPIC.partitions)])
    written: list[Record] = field(default_factory=list)  # including superseded records
    away: bool = False
    now_ms: int = 1_000_000

    def append(self, partition: int, key: bytes, value: bytes | None) -> None:
        offset = self.partitions[partition][-1].offset + 1 if self.partitions[partition] else 0
        record = Record(TOPIC.name, partition, offset, self.now_ms, key, value)
        self.partitions[partition].append(record)
        self.written.append(record)

    def compact(self) -> int:
        """Keep the last record of each key and the last one of each partition; return how many were removed."""
        gone = 0
        for partition, records in enumerate(self.partitions):
            last = {record.key: record.offset for record in records}
            kept = [record for record in records if last[record.key] == record.offset]
            gone += len(records) - len(kept)
            self.partitions[partition] = kept
        return gone

    def loads(self) -> Loads:
        """The loads of one process that has read every record ever written, at this time."""
        return loads_of(self.written, self.now_ms)


@dataclass(frozen=True)
class Delivered:
    """What a delivery report says about its record."""

    of: bytes

    def key(self) -> bytes:
        return self.of


class Client:
    """A producer that writes to the log. Records are acknowledged when it is polled, unless Kafka is away."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._queue: list[tuple[int, bytes, bytes | None, Callable[[KafkaError | None, Any], None]]] = []
        self.refusing: KafkaError | BufferError | None = None
        self.failing: KafkaError | None = None

    def produce(self, topic: str, *, key: bytes, value: bytes | None, partition: int, on_delivery: Any) -> None:
        assert topic == TOPIC.name
        if isinstance(self.refusing, BufferError):
            raise self.refusing
        if self.refusing is not None:
            raise KafkaException(self.refusing)
        self._queue.append((partition, key, value, on_delivery))

    def produce_batch(self, topic: str, messages: list[dict[str, Any]], partition: int, on_delivery: Any) -> int:
        assert topic == TOPIC.name
        if self.refusing is not None:
            full = isinstance(self.refusing, BufferError)
            for message in messages:
                message["_error"] = KafkaError(KafkaError._QUEUE_FULL) if full else self.refusing
            return 0
        self._queue += [(partition, each["key"], each["value"], on_delivery) for each in messages]
        return len(messages)

    def poll(self, timeout_s: float) -> int:  # noqa: ARG002 - as the client has it
        if self._log.away and self.failing is None:
            return 0
        queue, self._queue = self._queue, []
        for partition, key, value, on_delivery in queue:
            if self.failing is None:
                self._log.append(partition, key, value)
            on_delivery(self.failing, Delivered(key))
        return len(queue)

    def time_out(self, n: int) -> None:
        """The client gives up its oldest n records; later ones may still arrive."""
        gone, self._queue = self._queue[:n], self._queue[n:]
        for _, key, _, on_delivery in gone:
            on_delivery(KafkaError(KafkaError._MSG_TIMED_OUT), Delivered(key))

    def flush(self, timeout_s: float) -> int:
        self.poll(timeout_s)
        return len(self._queue)


class Replica:
    """One router's loads, with its client and how far it has read."""

    def __init__(self, log: Log, clock: list[int], knobs: Settings = KNOBS) -> None:
        self.log = log
        self.client = Client(log)
        self.sync = LoadsSync(knobs, TOPIC, self.client, lambda: clock[0], lambda: WALL_MS + clock[0])  # type: ignore[arg-type]
        self.read = [0] * TOPIC.partitions
        self.falls = 0
        self.sync.listen(self._on_load_fell)
        self._last_loads: Loads = {}
        self._last_falls = 0

    def _on_load_fell(self) -> None:
        self.falls += 1

    def check_announcements(self) -> None:
        """Check that load which is lower than at the last check was announced since then."""
        last, self._last_loads = self._last_loads, self.loads
        announced, self._last_falls = self.falls > self._last_falls, self.falls
        if any(now < before for rank, load in last.items() for now, before in zip(self._of(rank), load, strict=True)):
            assert announced

    def _of(self, rank: RankId) -> tuple[int, int, int]:
        return self._last_loads.get(rank, (0, 0, 0))

    def fold(self, partition: int, n: int | None = None) -> int:
        """Read n records of a partition, or all of them; return how many there were."""
        ahead = [each for each in self.log.partitions[partition] if each.offset >= self.read[partition]][:n]
        for record in ahead:
            self.sync.fold(record)
            self.read[partition] = record.offset + 1
        return len(ahead)

    @property
    def loads(self) -> Loads:
        with self.sync.locked() as active:
            return {
                rank: (load.prefill_tokens, load.decode_blocks, load.requests) for rank, load in active.ranks().items()
            }

    def __len__(self) -> int:
        with self.sync.locked() as active:
            check(active)
            return len(active)


@dataclass
class World:
    """Three routers, one log, and one clock for all durations."""

    knobs: Settings = KNOBS
    clock: list[int] = field(default_factory=lambda: [0])
    log: Log = field(default_factory=Log)
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [self.new_replica() for _ in range(3)]

    def new_replica(self) -> Replica:
        """A router that starts; it has read nothing."""
        return Replica(self.log, self.clock, self.knobs)

    def pass_time(self, ms: int) -> None:
        self.clock[0] += ms
        self.log.now_ms += ms

    def settle(self) -> None:
        """Kafka is back, and every router has published and read everything."""
        self.log.away = False
        busy = True
        while busy:
            for replica in self.replicas:
                replica.sync.poll()
            # All of them read, even if only some had records: a router that lags would write one tick after another.
            busy = sum(replica.fold(n) for replica in self.replicas for n in range(TOPIC.partitions)) > 0
            busy |= any(replica.sync.unacknowledged for replica in self.replicas)

    def same(self) -> Loads:
        """Return the loads of all routers, which must be those of the log and of a router that starts late.

        This is checked before and after compaction.
        """
        self.settle()
        truth = self.log.loads()
        for _ in range(2):
            late = self.new_replica()
            read_all(late)
            for replica in (*self.replicas, late):
                assert replica.loads == truth
            self.log.compact()
        return truth


def booking(worker_id: int, blocks: list[int] | None = None, prefill: int = 16, phase: str | None = None) -> Booking:
    chain = [1] if blocks is None else blocks
    return Booking(rank_of(worker_id), "m", prefill, pack_hashes(chain), 0, len(chain), phase=phase)


def live(replica: Replica, request_id: str) -> int:
    with replica.sync.locked() as active:
        return len(active.live_ids(request_id))


def read_all(replica: Replica, n: int | None = None) -> int:
    """Read n records of each partition, or all of them; return how many there were."""
    return sum([replica.fold(partition, n) for partition in range(TOPIC.partitions)])
