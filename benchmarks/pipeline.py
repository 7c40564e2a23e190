"""`python -m benchmarks.pipeline`: from engine events to a router's view, with real processes.

What lives here: a fleet that reports its caches, a broker, one Faust worker and one router, and the throughput
including the drain: a record counts once the router's view has it. What must not: recovery (recovery). Exits 1 if the
router does not hold in the end what the fleet holds.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np
from confluent_kafka import Producer

from benchmarks.machinery import Machinery, cpu_seconds, machinery
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams.core.events import EngineBatch, EngineEvents
from streams.core.ids import DpRank, HashArray, Incarnation, RankId, WorkerId
from streams.core.workers import Worker
from streams.kafka.clients import producer
from streams.kafka.records import decode_batch, encode_batch, encode_worker
from streams.lab.stack import get_json
from streams.topics import topics

MODEL = "m"
BLOCK_SIZE = 16
#: Conversations that decode at the same time, over all engines, and the length at which one ends and another starts.
LIVE_RUNS = 4096
RUN_BLOCKS = 256
STORES_PER_RECORD = 16
LARGE_BLOCKS = 128
#: Share of records that carry decode steps.
DECODE_SHARE = 0.7
#: Blocks of prompts that an engine keeps before it evicts the oldest.
PROMPTS_KEPT = 64
DRAIN_TIMEOUT_S = 120.0
#: The pause between two requests of the probe. Without it, the probe would use one of two cores.
PROBE_EVERY_S = 0.002


@dataclass(slots=True)
class _Run:
    tail: int | None = None
    names: list[int] = field(default_factory=list)


class Engine:
    """One engine's cache, as its events report it; contents and engine hashes are random."""

    def __init__(self, worker_id: int, n_runs: int, seed: int) -> None:
        self.rank = RankId(WorkerId(worker_id), DpRank(0))
        self.key = str(worker_id).encode()
        self.sequence = -1
        self.n_blocks = 0
        self._random = np.random.default_rng(seed)
        empty = EngineBatch(self.rank, MODEL, BLOCK_SIZE, Incarnation(1), 0, 0, 0, EngineEvents(()))
        self._head = encode_batch(empty)[: -1 - _DIGEST_BYTES - len(_AFTER_DIGEST) - 1]
        self._random_pairs: list[tuple[int, int]] = []
        self._runs = [_Run() for _ in range(n_runs)]
        self._prompts: deque[HashArray] = deque()

    def decode_steps(self) -> tuple[bytes, int]:
        """Return a record of one-block stores on uniformly chosen runs, and its number of blocks."""
        events: list[bytes] = []
        ended = 0
        for choice in self._random.integers(len(self._runs), size=STORES_PER_RECORD).tolist():
            run = self._runs[choice]
            if len(run.names) == RUN_BLOCKS:
                events.append(_removed(np.array(run.names, dtype=np.uint64)))
                self.n_blocks -= RUN_BLOCKS
                ended += RUN_BLOCKS
                run.tail, run.names = None, []
            name, local = self._random_pairs.pop() if self._random_pairs else self._more_pairs()
            parent = b"\x00" if run.tail is None else b"\x02" + run.tail.to_bytes(8, "little")
            one = (b"\x00", parent, b"\x10", name.to_bytes(8, "little"), b"\x10", local.to_bytes(8, "little"), _LAST)
            events.append(b"".join(one))
            run.tail = name
            run.names.append(name)
        self.n_blocks += STORES_PER_RECORD
        return self._record(events), STORES_PER_RECORD + ended

    def large(self) -> tuple[bytes, int]:
        """Return a record that stores a prompt or, if the cache is full, removes the oldest; and its blocks."""
        if len(self._prompts) >= PROMPTS_KEPT:
            self.n_blocks -= LARGE_BLOCKS
            return self._record([_removed(self._prompts.popleft())]), LARGE_BLOCKS
        names = self._random.integers(1, 1 << 63, size=LARGE_BLOCKS, dtype=np.uint64)
        local = self._random.integers(1, 1 << 63, size=LARGE_BLOCKS, dtype=np.uint64)
        self._prompts.append(names)
        self.n_blocks += LARGE_BLOCKS
        return self._record([_stored(names, local)]), LARGE_BLOCKS

    def begin(self) -> bytes:
        """Return the record that announces an incarnation."""
        return self._record([])

    def store(self, names: HashArray, local: HashArray) -> bytes:
        """Return a record of one store without a parent."""
        return self._record([_stored(names, local)])

    def _record(self, events: list[bytes]) -> bytes:
        # Encoded by hand, since the codec would make the preparation ten times as long; `_check` compares the two.
        parts = [self._head, _long(self.sequence), bytes(_DIGEST_BYTES), _AFTER_DIGEST]
        if events:
            parts += [_long(len(events)), *events]
        self.sequence += 1
        return b"".join((*parts, b"\x00"))

    def _more_pairs(self) -> tuple[int, int]:
        pairs = self._random.integers(1, 1 << 63, size=(4096, 2), dtype=np.uint64).tolist()
        self._random_pairs = [(name, local) for name, local in pairs]
        return self._random_pairs.pop()


#: Between a batch's digest and its events: time, n_unindexed, incomplete, feed, and which body it has; all of them 0.
_DIGEST_BYTES = 8
_AFTER_DIGEST = bytes(5)

#: Device tier, no labels, no pool.
_LAST = b"\x00\x00\x00"


def _long(value: int) -> bytes:
    """Return Avro's zigzag varint."""
    left = (value << 1) ^ (value >> 63)
    out = bytearray()
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    out.append(left)
    return bytes(out)


def _packed(hashes: HashArray) -> bytes:
    return _long(hashes.nbytes) + hashes.astype("<u8").tobytes()


def _stored(names: HashArray, local: HashArray) -> bytes:
    return b"\x00\x00" + _packed(names) + _packed(local) + _LAST


def _removed(names: HashArray) -> bytes:
    return b"\x02" + _packed(names) + b"\x00"


def _check(engine: Engine) -> None:
    """Raise AssertionError if a record encoded by hand differs from the codec's, or is not the next one of its rank."""
    values = (
        engine.begin(),
        *(engine.large()[0] for _ in range(2)),
        *(engine.decode_steps()[0] for _ in range(3)),
    )
    for number, value in enumerate(values, -1):
        batch = decode_batch(value)
        assert encode_batch(batch) == value
        assert (batch.rank, batch.sequence, batch.digest) == (engine.rank, number, 0)


@dataclass(frozen=True, slots=True)
class Published:
    """Records prepared before the measurement: key and value of each, and the number of blocks in all."""

    records: list[tuple[bytes, bytes]]
    n_blocks: int


def mixed(engines: list[Engine], n_records: int, rng: random.Random) -> Published:
    """Prepare decode steps and prompts, of engines in turn."""
    records, n_blocks = [], 0
    for number in range(n_records):
        engine = engines[number % len(engines)]
        value, blocks = engine.decode_steps() if rng.random() < DECODE_SHARE else engine.large()
        records.append((engine.key, value))
        n_blocks += blocks
    return Published(records, n_blocks)


def large(engines: list[Engine], n_records: int) -> Published:
    """Prepare prompts only."""
    records = []
    for number in range(n_records):
        engine = engines[number % len(engines)]
        records.append((engine.key, engine.large()[0]))
    return Published(records, n_records * LARGE_BLOCKS)


@dataclass(frozen=True, slots=True)
class Passed:
    """What one run took. sent_s: until the last record was sent; all_s: until the router had it."""

    sent_s: float
    all_s: float
    worker_cpu_s: float
    router_cpu_s: float
    changelog_bytes: int


class Fleet:
    """Registered engines, with workers and a router."""

    def __init__(
        self, parts: Machinery, n_engines: int, seed: int, *, n_workers: int = 1, router_in_worker: bool = False
    ) -> None:
        """router_in_worker: the first Faust worker's own process serves the router, and there is no other one."""
        self._parts = parts
        _check(Engine(n_engines + 1, 1, 0))
        self.engines = [Engine(n + 1, LIVE_RUNS // n_engines, seed + n) for n in range(n_engines)]
        self.topics = topics(parts.settings)
        self.kafka: Producer = producer(parts.settings, **{"linger.ms": 2, "queue.buffering.max.messages": 1_000_000})
        self.worker = parts.stack.worker(router=router_in_worker)
        others = [parts.stack.worker(f"worker-{n}", router=False) for n in range(1, n_workers)]
        self.workers = [self.worker, *others]
        self.router = self.worker if router_in_worker else parts.stack.router("router")
        for engine in self.engines:
            worker = Worker(engine.rank.worker_id, "http://engine", MODEL, BLOCK_SIZE)
            self.kafka.produce(self.topics.workers.name, encode_worker(worker), engine.key)
            self.kafka.produce(self.topics.kv_events.name, engine.begin(), engine.key)
        self.kafka.flush()
        self.await_visible()

    def send(self, published: Published, records_per_second: float | None, together: int = 64) -> float:
        """Send records at an even rate; returns the seconds that it took. together: those that are sent at once."""
        produce, poll, topic = self.kafka.produce, self.kafka.poll, self.topics.kv_events.name
        began = time.perf_counter()
        for number, (key, value) in enumerate(published.records):
            if number % together == 0:
                poll(0)
                if records_per_second is not None:
                    ahead = number / records_per_second - (time.perf_counter() - began)
                    if ahead > 0:
                        time.sleep(ahead)
            while True:
                try:
                    produce(topic, value, key)
                    break
                except BufferError:
                    poll(0.01)
        self.kafka.flush()
        return time.perf_counter() - began

    def passed(self, published: Published, records_per_second: float | None) -> Passed:
        """Send records and wait until the router has them all."""
        changelog = self.topics.index_changelog.name
        n_bytes = self._parts.topic_bytes(changelog)
        before = self._cpu_seconds()
        began = time.perf_counter()
        sent = self.send(published, records_per_second)
        self.await_visible()
        took = time.perf_counter() - began
        of_workers, of_router = (now - then for now, then in zip(self._cpu_seconds(), before, strict=True))
        return Passed(sent, took, of_workers, of_router, self._parts.topic_bytes(changelog) - n_bytes)

    def _cpu_seconds(self) -> tuple[float, float]:
        """Of all workers, and of the router."""
        return sum(cpu_seconds(worker.child.pid) for worker in self.workers), cpu_seconds(self.router.child.pid)

    def await_visible(self) -> None:
        """Wait until the router's view has every engine's last batch, and exactly the blocks that the engine holds."""
        wanted = {engine.rank.worker_id: (engine.sequence - 1, engine.n_blocks) for engine in self.engines}
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while True:
            ranks = get_json(f"{self.router.url}/state")["ranks"]
            current = {rank["worker_id"]: (rank["sequence"], rank["blocks"]) for rank in ranks}
            if all(current.get(each) == state for each, state in wanted.items()):
                return
            if time.monotonic() > deadline:
                return  # `wrong` reports what is missing
            time.sleep(0.05)

    def wrong(self) -> list[str]:
        """Return where the router's view differs from what the engines hold."""
        ranks = {rank["worker_id"]: rank for rank in get_json(f"{self.router.url}/state")["ranks"]}
        found = []
        for engine in self.engines:
            rank = ranks[engine.rank.worker_id]
            actual = (rank["sequence"], rank["blocks"], rank["health"])
            expected = (engine.sequence - 1, engine.n_blocks, "exact")
            if actual != expected:
                found.append(f"rank {engine.rank}: batch, blocks, health are {actual}, expected {expected}")
        return found


def latencies(fleet: Fleet, published: Published, records_per_second: float, seed: int) -> list[float]:
    """Return the seconds from publishing a prompt to the first answer of /route that uses it, under other traffic."""
    found: list[float] = []
    sender = threading.Thread(target=fleet.send, args=(published, records_per_second))
    sender.start()
    probe = Engine(1_000_001, 1, seed)
    worker = Worker(probe.rank.worker_id, "http://probe", MODEL, BLOCK_SIZE)
    fleet.kafka.produce(fleet.topics.workers.name, encode_worker(worker), probe.key)
    fleet.kafka.produce(fleet.topics.kv_events.name, probe.begin(), probe.key)
    rng = np.random.default_rng(seed)
    # Kept open, as gateways do: a connection per request would cost more than the request.
    address = urlsplit(fleet.router.url)
    kept = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10.0)
    time.sleep(2.0)
    while sender.is_alive():
        local = rng.integers(1, 1 << 63, size=8, dtype=np.uint64)
        body = json.dumps(
            {
                "model": MODEL,
                "block_hashes": [str(each) for each in local.tolist()],
                "update_states": False,
                "worker_id": probe.rank.worker_id,
            }
        ).encode()
        record = probe.store(rng.integers(1, 1 << 63, size=8, dtype=np.uint64), local)
        fleet.kafka.produce(fleet.topics.kv_events.name, record, probe.key)
        fleet.kafka.poll(0)
        began = time.perf_counter()
        while time.perf_counter() - began < 5.0:
            if _route(kept, body)["overlap_blocks"] == len(local):
                break
            time.sleep(PROBE_EVERY_S)
        found.append(time.perf_counter() - began)
        time.sleep(0.02)
    sender.join()
    kept.close()
    return found


def _route(kept: http.client.HTTPConnection, body: bytes) -> Any:
    kept.request("POST", "/route", body, {"Content-Type": "application/json"})
    return json.loads(kept.getresponse().read())


def _cases(names: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: not names or name in names


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--case", "cases", multiple=True, type=click.Choice(["mixed", "large", "latency"]))
@click.option("--seconds", default=60.0, show_default=True, help="Duration of sending, per case.")
@click.option(
    "--mixed-rate", default=6300.0, show_default=True, help="Records per second; the result includes the drain."
)
@click.option("--large-rate", default=4000.0, show_default=True, help="Records per second, of 128 blocks each.")
@click.option("--latency-rate", default=1000.0, show_default=True, help="Records per second of other traffic.")
@click.option("--engines", default=64, show_default=True)
@click.option("--partitions", default=4, show_default=True, help="Each has its own transactions.")
def main(
    json_path: Path | None,
    cases: tuple[str, ...],
    seconds: float,
    mixed_rate: float,
    large_rate: float,
    latency_rate: float,
    engines: int,
    partitions: int,
) -> None:
    """Measure throughput and latency from engine events to a router's view."""
    samples, report = Samples(), Report("pipeline", {}, [])
    console, wanted = wide_console(), _cases(cases)
    with machinery(partitions=partitions, block_size=BLOCK_SIZE) as parts:
        fleet = Fleet(parts, engines, seed=1)
        rng = random.Random(1)
        # The first seconds fill caches and run every code path once; they are not measured.
        fleet.passed(mixed(fleet.engines, int(5 * mixed_rate), rng), mixed_rate)
        for case, rate in (("mixed", mixed_rate), ("large", large_rate)):
            if not wanted(case):
                continue
            n = int(seconds * rate)
            published = mixed(fleet.engines, n, rng) if case == "mixed" else large(fleet.engines, n)
            run = fleet.passed(published, rate)
            add = samples.add
            add(case, "offered", "records/s", OURS, n / run.sent_s)
            add(case, "to visible, with drain", "records/s", OURS, n / run.all_s)
            add(case, "to visible, with drain", "blocks/s", OURS, published.n_blocks / run.all_s)
            add(case, "drain after the last record", "s", OURS, run.all_s - run.sent_s)
            add(case, "worker's processor time per record", "us", OURS, run.worker_cpu_s / n * 1e6)
            add(case, "router's processor time per record", "us", OURS, run.router_cpu_s / n * 1e6)
            add(case, "changelog per decoded block", "B", OURS, run.changelog_bytes / published.n_blocks)
            if case == "mixed":
                report.bars += [
                    _bar("6,000 records per second, mixed", n / run.all_s, 6000.0),
                    _bar("at most 400 B per decoded block", -run.changelog_bytes / published.n_blocks, -400.0),
                ]
            else:
                report.bars.append(_bar("500,000 blocks per second", published.n_blocks / run.all_s, 500_000.0))
            del published
            report.wrong += fleet.wrong()
        if wanted("latency"):
            published = mixed(fleet.engines, int(seconds * latency_rate), rng)
            found = sorted(latencies(fleet, published, latency_rate, seed=7))
            p50, p99 = statistics.median(found), found[int(len(found) * 0.99)]
            samples.add("latency", "published to used, p50", "ms", OURS, p50 * 1e3)
            samples.add("latency", "published to used, p99", "ms", OURS, p99 * 1e3)
            samples.add("latency", "probes", "", OURS, float(len(found)))
            report.bars += [_bar("p50 at most 20 ms", -p50 * 1e3, -20.0), _bar("p99 at most 60 ms", -p99 * 1e3, -60.0)]
    report.rows = samples.rows()
    report.print(console)
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


def _bar(name: str, value: float, least: float) -> Bar:
    return Bar(name, value >= least, f"{abs(value):,.1f}")


if __name__ == "__main__":
    main()
