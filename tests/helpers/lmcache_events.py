"""LMCache's events in tests: its own directory's objects, and those of the pools that a bridge publishes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions, NewTopic  # type: ignore[attr-defined]

from streams.core.cxl_memory import CxlMemoryState
from streams.core.hashing import BASE_SEED, salted_seed
from streams.cxl.events import BlockAddress
from streams.cxl.pool_registry import PoolDirectory
from streams.cxl.records import BLOCK_PREFIX, decode_block
from streams.kafka.clients import Record, admin
from streams.lmcache.rows import chunk_of
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics

#: Made by `tests/helpers/lmcache_producer.py golden`, with lmcache 0.5.6: two servers with two ranks each, a shared
#: backend, restarts, and batches that were dropped.
GOLDEN = Path(__file__).parents[1] / "golden_lmcache.json"

#: An object of one rank: the chunk's hash, the seed of its first block, the rank, the instance ("" if shared), the tier
#: and the backend.
Object = list[object]


@cache
def golden() -> dict[str, Any]:
    """Return the golden records, and the directory after them."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


def directory_objects(contents: list[list[Any]]) -> list[Object]:
    """Return the objects that LMCache's own directory lists."""
    return sorted(
        [chunk, salted_seed(BASE_SEED, salt or None), kv_rank >> 16 & 0xFF, "" if shared else instance, tier, backend]
        for chunk, _, kv_rank, salt, instance, tier, backend, shared in contents
    )


def table_objects(settings: Settings) -> list[Object]:
    """Return the objects of the rows that agents have written, of the current epochs of their pools."""
    rows: dict[bytes, bytes] = {}

    def take(records: list[Record]) -> None:
        for record in records:
            if record.key.startswith(BLOCK_PREFIX):
                rows.pop(record.key, None)
                if record.value is not None:
                    rows[record.key] = record.value

    for partition in range(settings.partitions):
        read_to_end(settings, topics(settings).cxl_changelog.name, partition, None, take)
    pools = PoolDirectory(settings)
    epochs = {pool_id: pool.epoch for pool_id, pool in pools.pools().items()}
    pools.close()
    objects: list[Object] = []
    for key, value in rows.items():
        where, row = decode_block(key, value)
        placement, block = row.placement, BlockAddress(where.sequence, row.parent, row.position)
        if placement.state is CxlMemoryState.EVICTED or placement.pool_epoch < epochs[where.pool_id]:
            continue
        found = chunk_of(
            where.owner,
            where.pool_id,
            placement.model,
            placement.state,
            (block, row.engine),
            row.note,
            placement.span,
            settings.block_size,
        )
        assert found is not None
        owner, chunk = found
        whole = chunk.ranks == (1 << owner.world_size) - 1
        assert whole == (placement.state is CxlMemoryState.CXL_POOLED)
        pool, (chunk_hash, space) = owner.pool, chunk.key
        objects += [
            [chunk_hash.hex(), space.first_seed, rank, pool.instance or "", pool.tier.value, pool.backend]
            for rank in range(owner.world_size)
            if chunk.ranks >> rank & 1
        ]
    return sorted(objects)


class EventTopic:
    """A topic of LMCache on the scope's Kafka."""

    def __init__(self, settings: Settings, partitions: int = 3, suffix: str = "") -> None:
        self.name = f"{settings.topic_prefix}lmcache-cache-events{suffix}"
        self.kafka, self._admin = settings.kafka, admin(settings)
        self.create(partitions)
        self._producer = self._producer_of_now()

    def create(self, partitions: int) -> None:
        """Create the topic."""
        self._admin.create_topics([NewTopic(self.name, partitions, 1)])[self.name].result(20.0)

    def delete(self) -> None:
        """Delete the topic with all its records."""
        self._admin.delete_topics([self.name])[self.name].result(20.0)

    def extend(self, partitions: int) -> None:
        """Add partitions to the topic, so that there are as many."""
        self._admin.create_partitions([NewPartitions(self.name, partitions)])[self.name].result(20.0)
        self._producer = self._producer_of_now()

    def _producer_of_now(self) -> Producer:
        """Return a client that knows the topic's present partitions, and partitions keys as LMCache's does."""
        return Producer({"bootstrap.servers": self.kafka})

    def send(self, records: list[dict[str, str]], partition: int = -1) -> None:
        """Send records, and wait until Kafka has them. partition: -1 for that of their keys."""
        for record in records:
            key, value = record["key"].encode(), record["value"].encode()
            self._producer.produce(self.name, key=key, value=value, partition=partition)
            self._producer.poll(0)
        assert self._producer.flush(30.0) == 0

    def send_raw(self, key: bytes, value: bytes | None) -> None:
        """Send one record with any content."""
        self._producer.produce(self.name, key=key, value=value)
        assert self._producer.flush(30.0) == 0
