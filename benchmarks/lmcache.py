"""`python -m benchmarks.lmcache`: what a bridge costs that passes LMCache's events on.

What lives here: made-up servers of LMCache, and a bridge as a real process that reads their topic. What must not: the
servers' own classes (tests/kafka/test_lmcache.py), and engines (bridge).

Each server sends what LMCache 0.5.6 sends by default: once per second the events since the last time, one record for
consecutive ones of a kind. Its engines compute several prompts at a time, in steps of 2,048 tokens, so that the chunks
of a prompt arrive in groups, with those of other prompts in between. A prompt is new, or continues a conversation whose
chunks are accessed first; new ones begin with one of a few shared beginnings. Every chunk has 256 token ids and one
rank. With full caches, a server deletes as many chunks as it stores. With unknown beginnings, the topic no longer has
the stores of half of the shared ones, so that no chunk after these can be named.

Records are made before the measurement. Processor time is that of the whole bridge, its Kafka clients included, from
the first record until Kafka has acknowledged all that follows from them, which the position in the registry shows; it
is divided by the time in which the records were sent. Afterwards the pools on the topic are compared with the chunks
that the servers hold, block hashes included. Exits 1 if they differ.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import orjson
import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from benchmarks.machinery import Machinery, cpu_seconds, machinery
from benchmarks.report import OURS, Report, Samples, select, value_bar, wide_console
from streams.core.cxl_memory import CxlMemoryState
from streams.core.hashing import TokenArray, request_hashes
from streams.core.kernels.blake3 import SCRATCH_WORDS, find_parent
from streams.cxl.records import decode_transition
from streams.kafka.clients import Record, admin
from streams.kafka.log_offsets import log_end
from streams.lmcache.feeds import decode_feed
from streams.lmcache.pools import Feed
from streams.lmcache.wire import CHUNK_TOKENS
from streams.process.waiting import wait_for
from streams.tables.changelog import read_to_end
from streams.topics import topics

MODEL = "m"
BLOCK_SIZE = 16
CHUNK_BYTES = 32 << 20

#: More servers have smaller records: LMCache's producer refuses those above 1 MB.
N_SERVERS = 16
PARTITIONS = 8
FLUSH_S = 1.0

#: Prompts that one server's engines compute at a time, and the chunks of one step of an engine.
RUNNING = 8
STEP_CHUNKS = 8

#: Chunks of a prompt, those of a shared beginning, and how many beginnings there are.
PROMPT_CHUNKS = (8, 64)
SHARED_CHUNKS = 4
N_SHARED = 8

#: How often a prompt continues one that the server had, and of how many it can be.
CONTINUES = 0.5
CONVERSATIONS = 64

#: Seconds of records before the measurement, in which the bridge loads its code and takes its leases.
WARM_UP_S = 3
READY_TIMEOUT_S = 120.0

#: The bars of issue 42.
CORES_MAX = 0.5
BYTES_MAX = 30.0


@dataclass(slots=True)
class Chunk:
    """A chunk of a prompt. name: LMCache's hash; root: that of the prompt's first chunk. sequence: our hash of its last
    block. key, entry: JSON, as in a batch."""

    name: bytes
    root: bytes
    sequence: int
    key: bytes
    entry: bytes

    @property
    def without_tokens(self) -> bytes:
        """Its entry in a batch that stores nothing."""
        return b'{"key":%s,"size_bytes":0,"token_ids":[],"token_offset":-1}' % self.key


@dataclass(slots=True, eq=False)
class Conversation:
    """A prompt that grows."""

    tokens: list[TokenArray] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


class Prompts:
    """Makes chunks with their hashes. That of a prompt's first chunk is not LMCache's; a bridge does not check it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        self._scratch = np.empty(SCRATCH_WORDS, dtype=np.int64)
        self.shared = [Conversation() for _ in range(N_SHARED)]
        for conversation in self.shared:
            self.extend(conversation, SHARED_CHUNKS)

    def extend(self, conversation: Conversation, n_chunks: int) -> None:
        """Add chunks to a conversation."""
        first = len(conversation.chunks)
        conversation.tokens += [self._rng.integers(0, 1 << 17, CHUNK_TOKENS, dtype=np.uint32) for _ in range(n_chunks)]
        _, sequence = request_hashes(np.concatenate(conversation.tokens), BLOCK_SIZE)
        last_of_chunk = sequence[CHUNK_TOKENS // BLOCK_SIZE - 1 :: CHUNK_TOKENS // BLOCK_SIZE].tolist()
        for number in range(first, first + n_chunks):
            tokens = conversation.tokens[number]
            name = self._name(conversation.chunks[-1].name if number else bytes(32), tokens)
            key = b'{"chunk_hash_hex":"%s","model_name":"%s","kv_rank":%d,"object_group_id":0,"cache_salt":""}' % (
                name.hex().encode(),
                MODEL.encode(),
                1 << 24 | 1 << 8,
            )
            entry = b'{"key":%s,"size_bytes":%d,"token_ids":%s,"token_offset":%d}' % (
                key,
                CHUNK_BYTES,
                orjson.dumps(tokens.tolist()),
                number * CHUNK_TOKENS,
            )
            root = conversation.chunks[0].name if number else name
            conversation.chunks.append(Chunk(name, root, last_of_chunk[number], key, entry))

    def _name(self, parent: bytes, tokens: TokenArray) -> bytes:
        find_parent(np.frombuffer(parent, np.uint8), tokens, np.frombuffer(bytes(32), np.uint8), self._scratch)
        return self._scratch[:8].astype("<u4").tobytes()


class Server:
    """One server: what its engines have it do, and the records of that."""

    def __init__(self, number: int, prompts: Prompts, hidden: Iterable[Conversation], capacity: int | None) -> None:
        """hidden: conversations whose stores the topic no longer has. capacity: in chunks; None for all of them."""
        self.name = f"node-{number}"
        self.held: dict[bytes, Chunk] = {}
        self.n_stored = 0
        self._prompts, self._capacity = prompts, capacity
        self._hidden = {chunk.name for conversation in hidden for chunk in conversation.chunks}
        self._known: deque[Conversation] = deque(maxlen=CONVERSATIONS)
        self._running: list[tuple[Conversation, int]] = []
        self._pending: list[tuple[str, list[bytes]]] = []
        self._number = 0

    def records(self, n_chunks: int) -> list[bytes]:
        """Return the records of one interval, in which the server stores about so many chunks."""
        until = self.n_stored + n_chunks
        while self.n_stored < until:
            self._step()
        if self._capacity is not None and len(self.held) > self._capacity:
            oldest = list(self.held.values())[: len(self.held) - self._capacity]
            for chunk in oldest:
                del self.held[chunk.name]
            self._note("delete", [chunk.without_tokens for chunk in oldest])
        pending, self._pending = self._pending, []
        return [self._record(kind, entries) for kind, entries in pending]

    def _step(self) -> None:
        """Let an engine compute a step of one of its prompts."""
        while len(self._running) < RUNNING:
            self._running.append(self._begun())
        at = self._prompts.chance.randrange(RUNNING)
        conversation, done = self._running.pop(at)
        step = conversation.chunks[done : done + STEP_CHUNKS]
        if done + STEP_CHUNKS < len(conversation.chunks):
            self._running.append((conversation, done + STEP_CHUNKS))
        else:
            self._known.append(conversation)
        fresh = [chunk for chunk in step if chunk.name not in self.held]
        self.held.update((chunk.name, chunk) for chunk in fresh)
        reported = [chunk.entry for chunk in fresh if chunk.name not in self._hidden]
        if reported:
            self.n_stored += len(reported)
            self._note("store", reported)

    def _begun(self) -> tuple[Conversation, int]:
        """Begin a prompt, and access those of its chunks that the server has, up to the first that it does not have."""
        chance = self._prompts.chance
        if self._known and chance.random() < CONTINUES:
            conversation = self._known[chance.randrange(len(self._known))]
            self._known.remove(conversation)
        else:
            shared = self._prompts.shared[chance.randrange(N_SHARED)]
            conversation = Conversation(list(shared.tokens), list(shared.chunks))
        n_held = next(
            (number for number, chunk in enumerate(conversation.chunks) if chunk.name not in self.held),
            len(conversation.chunks),
        )
        if n_held:
            self._note("access", [chunk.without_tokens for chunk in conversation.chunks[:n_held]])
        self._prompts.extend(conversation, chance.randint(*PROMPT_CHUNKS))
        return conversation, n_held

    def _note(self, kind: str, entries: list[bytes]) -> None:
        """Buffer entries, as LMCache's `CacheEventSubscriber` does."""
        if self._pending and self._pending[-1][0] == kind:
            self._pending[-1][1].extend(entries)
        else:
            self._pending.append((kind, entries))

    def _record(self, kind: str, entries: list[bytes]) -> bytes:
        self._number += 1
        return (
            b'{"batches":[{"instance_id":"%s","incarnation":1,"seq":%d,"event_type":"%s","tier":"l1","backend":"%s",'
            b'"entries":[%s],"shared":false,"ts":1795928949.5417655,"capacity_bytes":0,"capacity_revision":0}]}'
        ) % (
            self.name.encode(),
            self._number,
            kind.encode(),
            b"" if kind == "access" else b"devdax",
            b",".join(entries),
        )


@dataclass(frozen=True, slots=True)
class Case:
    """What the servers do. kept_s: their capacity, as the time in which they store so many chunks."""

    name: str
    kept_s: float | None = None
    n_hidden: int = 0


CASES = (Case("stores"), Case("full caches", kept_s=5.0), Case("unknown beginnings", n_hidden=N_SHARED // 2))


class Fleet:
    """The servers, and their records by interval."""

    def __init__(self, case: Case, per_s: int, seconds: int) -> None:
        prompts = Prompts(1)
        per_server = round(per_s * FLUSH_S / N_SERVERS)
        capacity = None if case.kept_s is None else round(case.kept_s * per_s / N_SERVERS)
        self.hidden = prompts.shared[: case.n_hidden]
        self.servers = [Server(number, prompts, self.hidden, capacity) for number in range(N_SERVERS)]
        self.intervals: list[list[list[bytes]]] = []
        self.n_stored: list[int] = []
        for _ in range(round(seconds / FLUSH_S)):
            before = sum(server.n_stored for server in self.servers)
            self.intervals.append([server.records(per_server) for server in self.servers])
            self.n_stored.append(sum(server.n_stored for server in self.servers) - before)

    def expected(self) -> set[tuple[str, int]]:
        """Return the chunks that are held and can be named: their pools, and our hashes of their last blocks."""
        unnamed = {shared.chunks[0].name for shared in self.hidden}
        return {
            (f"lmcache/{server.name}/devdax", chunk.sequence)
            for server in self.servers
            for chunk in server.held.values()
            if chunk.root not in unnamed
        }


class Source:
    """LMCache's topic, and how far the bridge has got on it."""

    def __init__(self, machine: Machinery) -> None:
        self._settings = machine.settings
        self.topic = f"{machine.settings.topic_prefix}lmcache-cache-events"
        client = admin(machine.settings)
        client.create_topics([NewTopic(self.topic, PARTITIONS, 1)])[self.topic].result(READY_TIMEOUT_S)
        # As LMCache's `KafkaCacheEventSink`.
        self._producer = Producer(
            {"bootstrap.servers": machine.settings.kafka, "enable.idempotence": True, "acks": "all"}
        )

    def send(self, fleet: Fleet, intervals: Iterable[int]) -> float:
        """Send the records of these intervals in their time, the servers by turns; return how long that took, in s."""
        began_s = due_s = time.monotonic()
        for interval in intervals:
            for server, records in zip(fleet.servers, fleet.intervals[interval], strict=True):
                time.sleep(max(due_s - time.monotonic(), 0.0))
                for record in records:
                    self._producer.produce(self.topic, key=server.name.encode(), value=record)
                self._producer.poll(0)
                due_s += FLUSH_S / len(fleet.servers)
        time.sleep(max(due_s - time.monotonic(), 0.0))
        assert self._producer.flush(READY_TIMEOUT_S) == 0
        return time.monotonic() - began_s

    def await_acknowledged(self, fleet: Fleet) -> None:
        """Wait until the registry says that all records were passed on, and that Kafka has what follows from them."""
        ends = [log_end(self._settings, self.topic, partition) for partition in range(PARTITIONS)]
        keys = {Feed(server.name).key for server in fleet.servers}

        def acknowledged() -> bool:
            feeds = [
                decode_feed(record.value)
                for record in self._all(topics(self._settings).workers.name)
                if record.value is not None and record.key.decode() in keys
            ]
            return keys == {
                feed.key
                for feed in feeds
                if len(feed.positions) == PARTITIONS
                and all(at >= end for at, end in zip(feed.positions, ends, strict=True))
            }

        wait_for(acknowledged, READY_TIMEOUT_S, "all records to be passed on", 0.5)

    def pooled(self) -> set[tuple[str, int]]:
        """Return the chunks that `cxl-events` has in pools: their pools, and our hashes of their last blocks."""
        states: dict[tuple[str, int], CxlMemoryState] = {}
        for record in self._all(topics(self._settings).cxl_events.name):
            read = decode_transition(record.value)
            for sequence in read.blocks.sequence.tolist():
                states[read.pool_id or "", sequence] = read.state
        assert CxlMemoryState.IN_TRANSIT not in states.values()
        return {where for where, state in states.items() if state is CxlMemoryState.CXL_POOLED}

    def _all(self, topic: str) -> list[Record]:
        records: list[Record] = []
        for partition in range(self._settings.partitions):
            read_to_end(self._settings, topic, partition, None, records.extend)
        return records


def _measure(case: Case, samples: Samples, per_s: int, seconds: int) -> bool:
    """Measure one case; return whether the pools are those of the servers."""
    fleet = Fleet(case, per_s, WARM_UP_S + seconds)
    with machinery() as machine:
        source = Source(machine)
        bridge = machine.stack.bridge([], options=["--lmcache", source.topic])
        source.send(fleet, range(WARM_UP_S))
        source.await_acknowledged(fleet)
        processes = {"bridge": bridge.pid, "broker": machine.broker_pid}
        topic = topics(machine.settings).cxl_events.name
        cpu_s, n_bytes = {name: cpu_seconds(pid) for name, pid in processes.items()}, machine.topic_bytes(topic)
        lasted_s = source.send(fleet, range(WARM_UP_S, WARM_UP_S + seconds))
        sent_s = time.monotonic()
        source.await_acknowledged(fleet)
        drained_s = time.monotonic() - sent_s
        used = {name: cpu_seconds(pid) - cpu_s[name] for name, pid in processes.items()}
        n_chunks = sum(fleet.n_stored[WARM_UP_S:])
        samples.add(case.name, "chunks stored", "per s", OURS, n_chunks / lasted_s)
        samples.add(case.name, "bridge", "cores", OURS, used["bridge"] / lasted_s)
        samples.add(case.name, "bridge, per chunk", "us", OURS, used["bridge"] * 1e6 / n_chunks)
        samples.add(case.name, "broker", "cores", OURS, used["broker"] / lasted_s)
        samples.add(case.name, "until all is acknowledged", "s", OURS, drained_s)
        samples.add(case.name, "memory of the bridge", "MB", OURS, psutil.Process(bridge.pid).memory_info().rss / 1e6)
        pooled, expected = source.pooled(), fleet.expected()
        n_blocks = n_chunks * (CHUNK_TOKENS // BLOCK_SIZE)
        if not case.n_hidden:
            n_bytes = machine.topic_bytes(topic) - n_bytes
            samples.add(case.name, "bytes of cxl-events", "per stored block", OURS, n_bytes / n_blocks)
        samples.add(case.name, "chunks in pools at the end", "", OURS, len(pooled))
        return pooled == expected


@click.command(help=__doc__)
@click.option("--seconds", default=20, show_default=True, help="length of each measurement")
@click.option("--per-s", default=5000, show_default=True, help="chunks that are stored per second")
@click.option("--only", type=click.Choice([case.name for case in CASES]), default=None, help="one case alone")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="write the report there too")
def main(seconds: int, per_s: int, only: str | None, json_path: Path | None) -> None:
    samples = Samples()
    cases = [case for case in CASES if only in (None, case.name)]
    wrong = [case.name for case in cases if not _measure(case, samples, per_s, seconds)]
    rows = samples.rows()
    report = Report("lmcache", {"LMCache's format": "0.5.6"}, rows)
    report.wrong += [f"{name}: the pools are not what the servers hold" for name in wrong]
    report.bars = [
        value_bar(f"{per_s} chunks per second in one process", select(rows, "bridge"), CORES_MAX, "cores"),
        value_bar("bytes per block", select(rows, "bytes of cxl-events"), BYTES_MAX, "bytes"),
    ]
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
