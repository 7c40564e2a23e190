"""CXL pools as the registry has them, for whoever writes transitions or registers a pool: a reader and a writer.

What lives here: reading the pools of the topic `workers`, and writing one. What must not: what follows from a pool
(pooled_view). Routers read the whole registry with their other topics, and do not come here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

from streams.core.ids import WorkerId
from streams.cxl.events import POOL_EPOCH_GIVEN_MAX, CxlPool, check_pool_id, newest_pool
from streams.cxl.records import POOL_KEY_PREFIX, decode_pool, encode_pool, pool_key
from streams.errors import BadRecord, EpochConflict, InvalidRequest, KvStreamsError, UnknownId
from streams.kafka import ANSWER_TIMEOUT_S, as_record, consume, producer, reader, require_topic
from streams.settings import Settings
from streams.topics import topics

log = logging.getLogger(__name__)

_READ_RECORDS = 500
_POLL_S = 0.2


class PoolDirectory:
    """Reads the registry's pools, at first to their end and then, whenever it is asked, what has come since.

    Not thread-safe. What it tells may be behind the registry, never ahead: a block that is written with an older epoch
    counts for nothing, which can only under-report.
    """

    def __init__(self, settings: Settings) -> None:
        """Read to the end; raises KvStreamsError where the registry cannot be read within ANSWER_TIMEOUT_S."""
        self._settings = settings
        self._pools: dict[str, CxlPool] = {}
        spec = topics(settings).workers
        self._left = set(range(spec.partitions))
        # Between two calls nothing is taken out of the client's queue: a registry is small, and so is that.
        self._consumer = reader(settings, **{"queued.max.messages.kbytes": 1024})
        self._consumer.assign([TopicPartition(spec.name, n, OFFSET_BEGINNING) for n in range(spec.partitions)])
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self._left:
            self._take(_POLL_S)
            if time.monotonic() > deadline:
                self.close()
                raise KvStreamsError(f"{spec.name} was not read within {ANSWER_TIMEOUT_S:g} s")

    def pools(self) -> dict[str, CxlPool]:
        """Every pool by its id."""
        while self._take(0.0):
            pass
        return dict(self._pools)

    def epoch_of(self, pool_id: str) -> int:
        """A pool's epoch; 0 for one that is not registered."""
        while self._take(0.0):
            pass
        pool = self._pools.get(pool_id)
        return 0 if pool is None else pool.epoch

    def close(self) -> None:
        """End the reading."""
        self._consumer.close()

    def _take(self, timeout_s: float) -> int:
        """Fold what has come; gives how many messages that were."""
        messages = consume(self._consumer, _READ_RECORDS, timeout_s)
        for message in messages:
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    self._left.discard(message.partition() or 0)
                elif error.fatal() or not (error.retriable() or error.code() == KafkaError._TRANSPORT):
                    raise KvStreamsError(f"the registry cannot be read: {error.str()}")
                continue
            record = as_record(message)
            if not record.key.startswith(POOL_KEY_PREFIX):
                continue
            try:
                if record.value is None:
                    self._pools.pop(record.key.removeprefix(POOL_KEY_PREFIX).decode(errors="replace"), None)
                else:
                    pool = decode_pool(record.key, record.value, self._settings.schema_ids)
                    self._pools[pool.pool_id] = newest_pool(self._pools.get(pool.pool_id), pool)
            except BadRecord as exc:
                log.warning("%s: a record is passed over: %s", record.topic, exc)
        return len(messages)


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What is to be changed of a pool; None leaves as it is.

    members: all of them from now on. capacity_blocks: 0 forgets it. epoch: as of `next_epoch`.
    """

    members: tuple[WorkerId, ...] | None = None
    latency_class: str | None = None
    capacity_blocks: int | None = None
    epoch: int | None = None


def changed_pool(pool_id: str, known: CxlPool | None, change: PoolChange) -> CxlPool:
    """Apply a change to what the registry has of a pool, None for nothing; one that was lost is back in the next epoch.

    A change that names nothing changes nothing. Raises UnknownId for a new pool, or one that is lost, of which not even
    the members are said, EpochConflict for an epoch that is over, InvalidRequest for values out of range.
    """
    if change == PoolChange() and known is not None:
        return known
    if known is None and change.members is None:
        raise UnknownId(
            f"no pool {pool_id} is registered",
            remedy="To register it, say who its members are, or that it has none",
        )
    if known is not None and known.lost and change.members is None:
        raise UnknownId(
            f"pool {pool_id} is lost", remedy="To bring it back, say who its members are, or that it has none"
        )
    base = known or CxlPool(pool_id)
    capacity = base.capacity_blocks if change.capacity_blocks is None else change.capacity_blocks or None
    return replace(
        base,
        members=base.members if change.members is None else change.members,
        latency_class=base.latency_class if change.latency_class is None else change.latency_class,
        capacity_blocks=capacity,
        epoch=next_epoch(pool_id, known, change.epoch),
        lost=False,
    )


def next_epoch(pool_id: str, known: CxlPool | None, asked: int | None) -> int:
    """The epoch that a pool is registered in: the one asked for, else the one it is in, or the next if that was lost.

    Raises EpochConflict for one that is over, InvalidRequest for one above POOL_EPOCH_GIVEN_MAX.
    """
    lowest = 0 if known is None else known.epoch + known.lost
    if asked is None:
        return lowest
    if known is not None and asked < lowest:
        over = ", in which it was lost" if known.lost else ""
        raise EpochConflict(f"pool {pool_id} is in epoch {known.epoch} already{over}", epoch=known.epoch)
    if asked < lowest:
        raise InvalidRequest(f"pool {pool_id}: epoch {asked}")
    if asked > max(lowest, POOL_EPOCH_GIVEN_MAX):
        raise InvalidRequest(f"pool {pool_id}: epoch {asked}; at most {POOL_EPOCH_GIVEN_MAX} can be asked for")
    return asked


def write_pool_change(pool: CxlPool, log: CxlPool | None, publish: Callable[[CxlPool], None]) -> None:
    """Look at the registry as it was read behind a write of `pool`; raises EpochConflict if that came too late.

    log: what a reader of the whole registry, up to that write or further, takes for the pool. If that is a loss, or an
    epoch, that the writer did not know of, it is published once more: else compaction leaves only what came last, and
    whoever reads later has lost the loss.
    """
    if log is not None and (log.epoch, log.lost) > (pool.epoch, pool.lost):
        publish(log)
        raise EpochConflict(f"pool {pool.pool_id} is in epoch {log.epoch} by now", epoch=log.epoch)


def change_pool(settings: Settings, pool_id: str, change: PoolChange) -> CxlPool:
    """Register a pool, or change what is named of it, and wait until Kafka has it; gives it as it is now.

    Nothing is written where nothing is named. Raises as `changed_pool` and `write_pool_change`, and KvStreamsError.
    """
    check_pool_id(pool_id)
    known = registered_pool(settings, pool_id)
    pool = changed_pool(pool_id, known, change)
    return pool if pool is known else register_pool(settings, pool)


def lose_pool(settings: Settings, pool_id: str) -> CxlPool:
    """Mark a pool as lost, with all that it held, and return it as written.

    Raises UnknownId, what `write_pool_change` raises, and KvStreamsError.
    """
    check_pool_id(pool_id)
    known = registered_pool(settings, pool_id)
    if known is None:
        raise UnknownId(f"no pool {pool_id} is registered")
    return register_pool(settings, replace(known, epoch=known.epoch + 1, lost=True))


def register_pool(settings: Settings, pool: CxlPool) -> CxlPool:
    """Write a pool, wait until Kafka has it, and return it as written.

    Raises what `write_pool_change` raises, and KvStreamsError.
    """
    pool = replace(pool, registered_at_ms=time.time_ns() // 1_000_000)
    _write(settings, pool)
    write_pool_change(pool, registered_pool(settings, pool.pool_id), lambda newest: _write(settings, newest))
    return pool


def registered_pool(settings: Settings, pool_id: str) -> CxlPool | None:
    """A pool as the whole registry has it, None if it has none. Raises KvStreamsError."""
    require_topic(settings, topics(settings).workers.name)  # it says soon, and in words, that there is no Kafka
    directory = PoolDirectory(settings)
    try:
        return directory.pools().get(pool_id)
    finally:
        directory.close()


def _write(settings: Settings, pool: CxlPool) -> None:
    failed: list[str] = []
    kafka = producer(settings)
    kafka.produce(
        topics(settings).workers.name,
        key=pool_key(pool.pool_id),
        value=encode_pool(pool),
        on_delivery=lambda error, _: failed.append(error.str()) if error is not None else None,
    )
    if kafka.flush(ANSWER_TIMEOUT_S) or failed:
        raise KvStreamsError(f"Kafka did not take pool {pool.pool_id}: {failed[0] if failed else 'no answer'}")
