"""Reading and changing the CXL pools of the registry, for processes that are not routers.

What lives here: reading the pools of the topic `workers`, the result of a change to a pool, and writing a pool. What
must not: what a pool means for its blocks (visibility). Routers read the registry together with their other topics.
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
from streams.kafka.clients import ANSWER_TIMEOUT_S, as_record, consume, producer, reader, require_topic
from streams.settings import ScopeSettings
from streams.topics import topics

log = logging.getLogger(__name__)

_READ_RECORDS = 500
_POLL_S = 0.2


class PoolDirectory:
    """Reads the registry's pools: all of them at the start, and new records at each call.

    Not thread-safe. Its pools may lag the registry. A block that is written with an older epoch because of that is
    ignored, so routers can only report fewer pooled blocks than there are, never more.
    """

    def __init__(self, settings: ScopeSettings) -> None:
        """Read to the end; raises KvStreamsError if that takes longer than ANSWER_TIMEOUT_S."""
        self._settings = settings
        self._pools: dict[str, CxlPool] = {}
        spec = topics(settings).workers
        self._left = set(range(spec.partitions))
        # Nothing empties the client's queue between two calls, so it has a small limit; a registry is small, too.
        self._consumer = reader(settings, **{"queued.max.messages.kbytes": 1024})
        self._consumer.assign([TopicPartition(spec.name, n, OFFSET_BEGINNING) for n in range(spec.partitions)])
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self._left:
            self._take(_POLL_S)
            if time.monotonic() > deadline:
                self.close()
                raise KvStreamsError(f"could not read {spec.name} to its end within {ANSWER_TIMEOUT_S:g} s")

    def pools(self) -> dict[str, CxlPool]:
        """Return all pools by id."""
        while self._take(0.0):
            pass
        return dict(self._pools)

    def epoch_of(self, pool_id: str) -> int:
        """Return a pool's epoch; 0 if it is not registered."""
        while self._take(0.0):
            pass
        pool = self._pools.get(pool_id)
        return 0 if pool is None else pool.epoch

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def _take(self, timeout_s: float) -> int:
        """Fold the messages that have arrived, and return their number."""
        messages = consume(self._consumer, _READ_RECORDS, timeout_s)
        for message in messages:
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    self._left.discard(message.partition() or 0)
                elif error.fatal() or not (error.retriable() or error.code() == KafkaError._TRANSPORT):
                    raise KvStreamsError(f"cannot read the registry: {error.str()}")
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
                log.warning("%s: a record is skipped: %s", record.topic, exc)
        return len(messages)


@dataclass(frozen=True, slots=True)
class PoolChange:
    """A change of a pool; a field that is None keeps its value.

    members: the complete list. capacity_blocks: 0 means unknown. epoch: see `next_epoch`.
    """

    members: tuple[WorkerId, ...] | None = None
    latency_class: str | None = None
    capacity_blocks: int | None = None
    epoch: int | None = None


def changed_pool(pool_id: str, known: CxlPool | None, change: PoolChange) -> CxlPool:
    """Return a pool after a change. known: the registry's record of the pool, None if it has none.

    A change without any field changes nothing; otherwise a lost pool returns in its next epoch. Raises UnknownId if the
    pool is unknown or lost and the change has no members, EpochConflict for an epoch that has ended, InvalidRequest for
    values out of range.
    """
    if change == PoolChange() and known is not None:
        return known
    if known is None and change.members is None:
        raise UnknownId(
            f"no pool {pool_id} is registered",
            remedy="To register it, name its members, or state that it has none",
        )
    if known is not None and known.lost and change.members is None:
        raise UnknownId(
            f"pool {pool_id} is lost", remedy="To bring it back, name its members, or state that it has none"
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


def next_epoch(pool_id: str, known: CxlPool | None, requested: int | None) -> int:
    """Return the epoch in which a pool is registered.

    It is the requested epoch. By default it is the current one, or the next one if the pool is lost. Raises
    EpochConflict for an epoch that has ended, InvalidRequest for one above POOL_EPOCH_GIVEN_MAX.
    """
    lowest = 0 if known is None else known.epoch + known.lost
    if requested is None:
        return lowest
    if known is not None and requested < lowest:
        lost = ", in which it was lost" if known.lost else ""
        raise EpochConflict(f"pool {pool_id} is in epoch {known.epoch} already{lost}", epoch=known.epoch)
    if requested < lowest:
        raise InvalidRequest(f"pool {pool_id}: epoch {requested} is negative")
    if requested > max(lowest, POOL_EPOCH_GIVEN_MAX):
        raise InvalidRequest(f"pool {pool_id}: epoch {requested}; at most {POOL_EPOCH_GIVEN_MAX} can be set")
    return requested


def write_pool_change(pool: CxlPool, log: CxlPool | None, publish: Callable[[CxlPool], None]) -> None:
    """Check the registry after a write of `pool`; raises EpochConflict if a newer record of the pool was there before.

    log: the pool as read from the registry, at least up to that write. If it is in a greater epoch than `pool`, or lost
    in the same epoch, it is published again. Otherwise compaction would keep only the writer's record, and later
    readers would not see the loss.
    """
    if log is not None and (log.epoch, log.lost) > (pool.epoch, pool.lost):
        publish(log)
        raise EpochConflict(f"pool {pool.pool_id} is in epoch {log.epoch} already", epoch=log.epoch)


def change_pool(settings: ScopeSettings, pool_id: str, change: PoolChange) -> CxlPool:
    """Register or change a pool, wait until Kafka has it, and return it.

    A change without any field writes nothing. Raises what `changed_pool` and `write_pool_change` raise, and
    KvStreamsError.
    """
    check_pool_id(pool_id)
    known = registered_pool(settings, pool_id)
    pool = changed_pool(pool_id, known, change)
    return pool if pool is known else register_pool(settings, pool)


def lose_pool(settings: ScopeSettings, pool_id: str) -> CxlPool:
    """Mark a pool as lost with all its contents, and return it as written.

    Raises UnknownId, what `write_pool_change` raises, and KvStreamsError.
    """
    check_pool_id(pool_id)
    known = registered_pool(settings, pool_id)
    if known is None:
        raise UnknownId(f"no pool {pool_id} is registered")
    return register_pool(settings, replace(known, epoch=known.epoch + 1, lost=True))


def register_pool(settings: ScopeSettings, pool: CxlPool) -> CxlPool:
    """Write a pool, wait until Kafka has it, and return it as written.

    Raises what `write_pool_change` raises, and KvStreamsError.
    """
    pool = replace(pool, registered_at_ms=time.time_ns() // 1_000_000)
    _write(settings, pool)
    write_pool_change(pool, registered_pool(settings, pool.pool_id), lambda newest: _write(settings, newest))
    return pool


def registered_pool(settings: ScopeSettings, pool_id: str) -> CxlPool | None:
    """Return a pool after reading the whole registry; None if it is not registered. Raises KvStreamsError."""
    require_topic(settings, topics(settings).workers.name)  # fails quickly, with a clear message, if no broker answers
    directory = PoolDirectory(settings)
    try:
        return directory.pools().get(pool_id)
    finally:
        directory.close()


def _write(settings: ScopeSettings, pool: CxlPool) -> None:
    failed: list[str] = []
    kafka = producer(settings)
    kafka.produce(
        topics(settings).workers.name,
        key=pool_key(pool.pool_id),
        value=encode_pool(pool),
        on_delivery=lambda error, _: failed.append(error.str()) if error is not None else None,
    )
    if kafka.flush(ANSWER_TIMEOUT_S) or failed:
        raise KvStreamsError(f"Kafka did not accept pool {pool.pool_id}: {failed[0] if failed else 'no answer'}")
