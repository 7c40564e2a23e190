"""LMCache's own classes, with made-up events: what they publish, and what LMCache's directory makes of it.

Runs in a Python that has LMCache (0.5.6) and neither this project nor a GPU:

    PYTHON tests/helpers/lmcache_producer.py golden FILE
    PYTHON tests/helpers/lmcache_producer.py publish KAFKA TOPIC SEED CHUNK_TOKENS

The first writes the file of golden records again. The second reads numbers of events from its standard input, publishes
so many, and answers each with one line of JSON: the directory's contents, and which chunks in it may have no name,
since a batch was dropped that had their tokens or those of a chunk before them. `CacheEventSubscriber` makes the
batches, and `KafkaCacheEventSink` publishes them; `EventGate` and `KeyDirectory` are the coordinator's. Events of the
servers are made up: their storage needs engines.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
import time
from typing import Any

logging.disable(logging.CRITICAL)

from lmcache.v1.distributed.api import (  # noqa: E402
    CapacitySnapshot,
    L1BackendType,
    ModuleMemoryCapacity,
    ObjectKey,
    Tier,
)
from lmcache.v1.distributed.internal_api import L1ObjectMeta  # noqa: E402
from lmcache.v1.mp_coordinator.cache_events import (  # noqa: E402
    CacheEventPublishError,
    CacheEventSink,
    CacheEventSubscriber,
    KafkaCacheEventSink,
)
from lmcache.v1.mp_coordinator.ingest.event_broadcaster import CacheEventBroadcaster  # noqa: E402
from lmcache.v1.mp_coordinator.ingest.event_gate import EventGate  # noqa: E402
from lmcache.v1.mp_coordinator.persistence.quiesce import QuiesceLock  # noqa: E402
from lmcache.v1.mp_coordinator.schemas import CacheEventsRequest  # noqa: E402
from lmcache.v1.mp_coordinator.views.key_directory import KeyDirectory  # noqa: E402
from lmcache.v1.mp_observability.event import Event, EventType  # noqa: E402
from lmcache.v1.multiprocess.config import KafkaCacheEventSinkConfig  # noqa: E402
from lmcache.v1.multiprocess.token_hasher import TokenHasher  # noqa: E402

MODEL = "m"
WORLD = 2
BYTES = 1 << 20


class Directory:
    """The coordinator's gate and directory."""

    def __init__(self) -> None:
        self.keys = KeyDirectory()
        broadcaster = CacheEventBroadcaster()
        broadcaster.register_consumer(self.keys)
        self.gate = EventGate(broadcaster, QuiesceLock())

    def contents(self) -> Any:
        _, found = self.keys.list_keys(limit=1 << 60)
        return sorted(
            [
                key.chunk_hash.hex(),
                key.model_name,
                key.kv_rank,
                key.cache_salt,
                p.instance_id,
                p.tier.value,
                p.backend,
                p.shared,
            ]
            for key, placements in found.items()
            for p in placements
        )


class Published(CacheEventSink):  # type: ignore[misc]  # LMCache is not installed here
    """Passes batches on to a sink and to the directory, or drops them, as a sink does that Kafka does not answer."""

    def __init__(self, directory: Any, sink: Any = None) -> None:
        self.directory, self.sink, self.records, self.drops = directory, sink, list[Any](), False
        self.n_dropped = 0
        self.lost: set[Any] = set()  # chunks, with their salts, whose tokens were in a batch that was dropped

    def publish(self, batches: Any) -> Any:
        if self.drops:
            self.n_dropped += len(batches)
            entries = itertools.chain.from_iterable(batch.entries for batch in batches)
            self.lost.update((each.key.chunk_hash_hex, each.key.cache_salt) for each in entries if each.token_ids)
            raise CacheEventPublishError("dropped")
        if self.sink is not None:
            self.sink.publish(batches)
        for batch in batches:
            if self.sink is None:  # as KafkaCacheEventSink encodes it
                value = CacheEventsRequest(batches=[batch]).model_dump_json()
                self.records.append({"key": batch.instance_id, "value": value})
            self.directory.gate.ingest(batch)

    def close(self) -> Any:
        if self.sink is not None:
            self.sink.close()


class Server:
    """One instance: its L1, and what it knows to be in L2."""

    def __init__(self, name: Any, sink: Any, incarnation: Any) -> None:
        self.name, self.sink = name, sink
        self.subscriber = CacheEventSubscriber(sink, name, incarnation, flush_interval=1e9)
        self.handlers = self.subscriber.get_subscriptions()
        self.l1: dict[Any, Any] = {}
        self.l2: dict[Any, Any] = {}
        self.incarnation = incarnation

    def emit(self, kind: Any, **metadata: Any) -> Any:
        self.handlers[kind](Event(event_type=kind, session_id="s", metadata=metadata))

    def restart(self) -> Any:
        self.incarnation += 1
        self.subscriber = CacheEventSubscriber(self.sink, self.name, self.incarnation, flush_interval=1e9)
        self.handlers = self.subscriber.get_subscriptions()
        self.l1 = {}


def keys_of(hashes: Any, rank: Any, salt: Any = "") -> Any:
    kv_rank = ObjectKey.ComputeKVRank(WORLD, rank, WORLD, rank)
    return [ObjectKey(chunk, MODEL, kv_rank, 0, salt) for chunk in hashes]


class Fleet:
    """Servers that do what chance says."""

    def __init__(self, seed: Any, chunk_tokens: Any, sink: Any) -> None:
        self.random = random.Random(seed)
        self.hasher = TokenHasher(chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self.sink = sink
        self.servers = [Server(name, sink, 1_790_000_000 + n) for n, name in enumerate(("node-a", "node-b"))]
        self.prompts: list[Any] = []
        self.l2_shared: dict[Any, Any] = {}
        self.parents: dict[Any, Any] = {}
        self.n_events = 0

    def prompt(self) -> Any:
        """A prompt: new, or one that continues or branches off an earlier one."""
        chance = self.random.random()
        if self.prompts and chance < 0.7:
            base = self.random.choice(self.prompts)
            keep = (
                self.random.randint(0, len(base) // self.chunk_tokens) * self.chunk_tokens
                if chance < 0.3
                else len(base)
            )
            base = base[:keep]
        else:
            base = []
        more = self.random.randint(1, 4) * self.chunk_tokens
        tokens = base + [self.random.randrange(150_000) for _ in range(more)]
        if len(tokens) <= 12 * self.chunk_tokens:
            self.prompts.append(tokens)
            if len(self.prompts) > 200:
                self.prompts.pop(self.random.randrange(200))
        return tokens

    def store(self, server: Any) -> Any:
        tokens, salt = self.prompt(), self.random.choice(("", "", "tenant"))
        hashes = self.hasher.compute_chunk_hashes(tokens)
        self.parents.update((chunk.hex(), parent.hex()) for parent, chunk in itertools.pairwise(hashes))
        held = {(key.chunk_hash, key.cache_salt) for key in server.l1}
        first = next((n for n, chunk in enumerate(hashes) if (chunk, salt) not in held), len(hashes))
        if first:
            known = [key for rank in range(WORLD) for key in keys_of(hashes[:first], rank, salt)]
            server.emit(EventType.L1_KEYS_ACCESSED, keys=known)
        fresh = hashes[first:]
        if not fresh:
            return
        offsets = [n * self.chunk_tokens for n in range(first, len(hashes))]
        server.emit(
            EventType.MP_TOKENS,
            chunk_hashes=fresh,
            token_chunks=[tokens[at : at + self.chunk_tokens] for at in offsets],
            token_offsets=offsets,
            parent_hashes=[None] * len(fresh),
        )
        ranks = range(WORLD) if self.random.random() < 0.95 else [self.random.randrange(WORLD)]
        for rank in ranks:
            keys = keys_of(fresh, rank, salt)
            backend = self.random.choice((L1BackendType.DRAM, L1BackendType.DRAM, L1BackendType.DEVDAX))
            meta = L1ObjectMeta(size_bytes=BYTES, backend=backend)
            server.l1.update(dict.fromkeys(keys, meta))
            server.emit(EventType.L1_WRITE_FINISHED, keys=keys, meta=[meta] * len(keys))

    def some(self, of: Any) -> Any:
        keys = sorted(of, key=lambda key: (key.chunk_hash, key.kv_rank, key.cache_salt))
        return self.random.sample(keys, min(len(keys), self.random.randint(1, 8)))

    def evict(self, server: Any) -> Any:
        keys = self.some(server.l1)
        if keys:
            server.emit(EventType.L1_KEYS_EVICTED, keys=keys, meta=[server.l1.pop(key) for key in keys])

    def offload(self, server: Any, shared: Any) -> Any:
        keys = self.some(server.l1)
        if keys:
            (self.l2_shared if shared else server.l2).update(dict.fromkeys(keys))
            name = "s3" if shared else "fs"
            server.emit(EventType.L2_KEYS_STORED, keys=keys, sizes=[BYTES] * len(keys), backend=name, shared=shared)

    def drop_l2(self, server: Any, shared: Any) -> Any:
        held = self.l2_shared if shared else server.l2
        keys = self.some(held)
        if keys:
            for key in keys:
                del held[key]
            server.emit(EventType.L2_KEYS_DELETED, keys=keys, backend="s3" if shared else "fs", shared=shared)

    def declare(self, server: Any) -> Any:
        modules = (
            ModuleMemoryCapacity(Tier.L1, "dram", 64 << 30),
            ModuleMemoryCapacity(Tier.L1, "devdax", 256 << 30),
            ModuleMemoryCapacity(Tier.L2, "s3", 0, shared=True),
        )
        server.emit(EventType.SM_CAPACITY_CHANGED, snapshot=CapacitySnapshot(modules=modules))

    def step(self, drops: Any = 0.002, restarts: Any = 0.001) -> Any:
        self.n_events += 1
        server, chance = self.random.choice(self.servers), self.random.random()
        if chance < restarts:
            server.restart()
            self.declare(server)
        elif chance < 0.5:
            self.store(server)
        elif chance < 0.68:
            self.evict(server)
        elif chance < 0.83:
            self.offload(server, self.random.random() < 0.5)
        else:
            self.drop_l2(server, self.random.random() < 0.5)
        self.sink.drops = self.random.random() < drops
        if self.random.random() < 0.7 or self.sink.drops:
            server.subscriber.flush()
        self.sink.drops = False

    def flush(self) -> Any:
        for server in self.servers:
            server.subscriber.flush()

    def may_have_no_name(self, chunk: Any, salt: Any) -> Any:
        """Whether a batch was dropped that had the tokens of a chunk, or of one before it.

        If the tokens are stored again, a bridge that had read what followed them names it. One that took over since
        does not: it has read the table, which has no chunks without names.
        """
        while chunk is not None and (chunk, salt) not in self.sink.lost:
            chunk = self.parents.get(chunk)
        return chunk is not None


def digests() -> Any:
    """BLAKE3 of 32 bytes and so many tokens, as TokenHasher packs them."""
    hash_func = TokenHasher(1).hash_func
    counts = (1, 8, 248, 249, 256, 1000, 5000)
    tokens = {n: tuple(i * 2_654_435_761 % (1 << 32) for i in range(n)) for n in counts}
    return {str(n): hash_func((bytes(range(32)), tokens[n], None)).hex() for n in counts}


def golden(path: Any) -> Any:
    directory = Directory()
    fleet = Fleet(1, 32, Published(directory))
    for server in fleet.servers:
        fleet.declare(server)
    for _ in range(60):
        fleet.step(drops=0.03, restarts=0.03)
    fleet.flush()
    contents = {"records": fleet.sink.records, "directory": directory.contents(), "blake3": digests()}
    with open(path, "w") as out:
        json.dump(contents, out, indent=0)
        out.write("\n")


def publish(kafka: Any, topic: Any, seed: Any, chunk_tokens: Any) -> Any:
    directory = Directory()
    sink = KafkaCacheEventSink(KafkaCacheEventSinkConfig(bootstrap_servers=kafka, topic=topic, delivery_timeout=60.0))
    fleet = Fleet(int(seed), int(chunk_tokens), Published(directory, sink))
    for server in fleet.servers:
        fleet.declare(server)
    for line in sys.stdin:
        for _ in range(int(line)):
            fleet.step()
            if len(sink._producer) > 5000:  # faster than Kafka, which no server is
                sink._producer.flush(30)
        fleet.flush()
        sink._producer.flush(60)
        contents = directory.contents()
        answer = {
            "directory": contents,
            "uncertain": sorted(
                {(chunk, salt) for chunk, _, _, salt, *_ in contents if fleet.may_have_no_name(chunk, salt)}
            ),
            "dropped": sink.dropped_batches,
            "batches_dropped": fleet.sink.n_dropped,
            "at": time.time(),
            "incarnations": {server.name: server.incarnation for server in fleet.servers},
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    programs: dict[str, Any] = {"golden": golden, "publish": publish}
    programs[sys.argv[1]](*sys.argv[2:])
