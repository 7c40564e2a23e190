"""`python -m benchmarks.bridge`: what a bridge costs, from an engine's bytes to records on Kafka.

What lives here: the cost per block without sockets; a bridge as a real process for 200 ranks that report 80 blocks per
second each; the bytes on Kafka, and the time from an engine's event to its record. What must not: what follows from the
records (pipeline).

The engines are sockets in a process of their own. Each batch stores 4 blocks and, once the cache is full, removes the 4
oldest, as an engine that decodes does. Batches are made before the measurement, and records are decoded after it, since
all processes share the machine. The time of an event is that at which its engine hands it to ZMQ, and the time of a
record is that at which the broker appends it. The processor time of the engines and of the records' reader has rows of
its own. Exits 1 if the bridge did not publish every batch.

With `--stages`, the bridge runs with clocks around its parts, and the report divides the time from event to record:
until the bridge has taken the batch from its socket, until it has handed the record to Kafka's client, and until the
broker has appended it. It does so for all batches, and for the slowest hundredth. The clocks cost processor time.

Measured with the second ways of decoding and of encoding, by turns on a busy machine, where all figures are up to twice
those of the README. A kernel that made arrays of lists of tokens saved 0.5 us per block in batches of 128, which is 6 %
of a core at 1,000 such batches per second; it is removed. streams.kafka.event_encoding saves 26 us per batch of four
blocks, 3 % of a core at 1,000 batches per second. Without it and without the kernel, a bridge with 4,000 batches per
second is near a whole core (0.97 and 0.98 instead of 0.90 and 0.89), and the p50 from event to record is 158 and 92 ms
instead of 28 and 36; so it stays.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgpack
import numpy as np
import psutil
import uvloop
import zmq
from aiohttp import web
from confluent_kafka import OFFSET_END, Message, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource  # type: ignore[attr-defined]

from benchmarks.bridge_stages import add_stages
from benchmarks.machinery import Machinery, cpu_seconds, machinery
from benchmarks.report import OURS, Report, Samples, select, value_bar, wide_console
from streams.core.events import EngineEvents
from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.engines.dialects.registry import DIALECTS
from streams.engines.rank_records import event_producer
from streams.engines.rank_writer import RankWriter
from streams.engines.replay import END_MARKER, SEQUENCE
from streams.kafka.clients import admin, reader
from streams.kafka.records import decode_batch
from streams.lab.processes import Child
from streams.process.interpreter import exempt_from_collection
from streams.process.waiting import wait_for
from streams.settings import as_environ
from streams.topics import topics
from streams.warming import HASHING, warm

MODEL = "m"
BLOCK_SIZE = 16
BLOCKS_PER_BATCH = 4
BATCHES_PER_S = 20
N_RANKS = 200
DP_SIZE = 8

#: Blocks of one prompt and its answer, and those that a rank holds before it evicts the oldest.
CHAIN_BLOCKS = 256
CACHE_BLOCKS = 2048

#: Ranges of ports that are tried for the engines' sockets.
FIRST_PORT, LAST_PORT, PORTS_STEP = 21_000, 60_000, 500
READY_TIMEOUT_S = 120.0

POLLIN = int(zmq.POLLIN)

#: Where a payload has its time, a double: after the header of the array, and the double's own first byte.
TIME, TIME_AT = struct.Struct(">d"), 2

#: The reader asks the broker for many records at once, since its requests would delay the bridge's. Records have the
#: time at which they were appended, so a later reader changes no figure.
FETCH_BYTES, FETCH_WAIT_MS = 1 << 20, 500

#: The bars of the issue.
US_MAX = 1.5
CORES_MAX = 1.0
P99_MS_MAX = 50.0


@dataclass(slots=True)
class _Cache:
    """One rank: what it stores next, and what it evicts."""

    number: int
    rng: np.random.Generator
    names: deque[int] = field(default_factory=deque)
    chain: int = 0
    parent: int | None = None

    def payload(self, n_blocks: int = BLOCKS_PER_BATCH) -> bytes:
        """The next batch, in vLLM's format."""
        first = self.number << 40 | len(self.names) + self.chain
        self.chain += n_blocks
        names = [first + 7919 * n for n in range(n_blocks)]
        if self.chain % CHAIN_BLOCKS < n_blocks:
            self.parent = None
        tokens = self.rng.integers(0, 1 << 17, n_blocks * BLOCK_SIZE).tolist()
        events: list[Any] = [["BlockStored", names, self.parent, tokens, BLOCK_SIZE, None, "GPU", None]]
        self.parent = names[-1]
        self.names.extend(names)
        if len(self.names) > CACHE_BLOCKS:
            events.append(["BlockRemoved", [self.names.popleft() for _ in range(n_blocks)], "GPU"])
        return bytes(msgpack.packb([time.time(), events, 0]))


class _RankSockets:
    """The sockets of one rank, and what it has sent."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], number: int, port: int, replay_port: int, n_batches: int
    ) -> None:
        self.events, self.replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.events.setsockopt(zmq.SNDHWM, 100_000)
        try:
            self.events.bind(f"tcp://127.0.0.1:{port}")
            self.replay.bind(f"tcp://127.0.0.1:{replay_port}")
        except zmq.ZMQError:
            self.close()
            raise
        cache = _Cache(number, np.random.default_rng(number))
        self.payloads = [bytearray(cache.payload()) for _ in range(n_batches)]
        self.sent: deque[tuple[int, bytes]] = deque(maxlen=10_000)
        self.n_sent = 0

    def close(self) -> None:
        """Free the ports."""
        self.events.close(linger=0)
        self.replay.close(linger=0)

    def publish(self) -> None:
        made = self.payloads[self.n_sent]
        TIME.pack_into(made, TIME_AT, time.time())
        payload = bytes(made)
        self.sent.append((self.n_sent, payload))
        self.events.send_multipart([b"", SEQUENCE.pack(self.n_sent), payload])
        self.n_sent += 1

    def answer_all(self) -> None:
        """Answer the requests that wait. The file descriptor is readable again only after the last check."""
        while int(self.replay.getsockopt(zmq.EVENTS)) & POLLIN:
            self._answer()

    def _answer(self) -> None:
        client, *_, start = self.replay.recv_multipart()
        first = SEQUENCE.unpack(start)[0]
        found = []
        for number, payload in reversed(self.sent):
            if number < first:
                break
            found.append((number, payload))
        for number, payload in reversed(found):
            self.replay.send_multipart([client, b"", SEQUENCE.pack(number), payload])
        self.replay.send_multipart([client, b"", END_MARKER, b""])


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], n_engines: int, dp_size: int, n_batches: int
) -> tuple[int, list[_RankSockets]]:
    """Bind the sockets of all ranks; return the first port of a range in which no port is in use, and the ranks."""
    for first_port in range(FIRST_PORT, LAST_PORT, PORTS_STEP):
        ranks: list[_RankSockets] = []
        try:
            for engine in range(n_engines):
                base, first = first_port + engine * 2 * dp_size, engine * dp_size
                ranks.extend(
                    _RankSockets(context, first + n, base + n, base + dp_size + n, n_batches) for n in range(dp_size)
                )
            return first_port, ranks
        except zmq.ZMQError:
            for rank in ranks:
                rank.close()
    raise RuntimeError("no range of ports is free")


async def _generate(n_engines: int, dp_size: int, seconds: float, out: str) -> None:
    """Be the engines: wait for the line `start SECONDS`, send, and print how many batches were sent."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 4096)
    n_batches = int(seconds * BATCHES_PER_S) + 1
    first_port, ranks = _bound(context, n_engines, dp_size, n_batches)
    page = f"process_start_time_seconds {time.time()}\n".encode()
    models = json.dumps({"data": [{"id": MODEL}]}).encode()

    async def page_or_models(request: web.Request) -> web.Response:
        return web.Response(body=models if request.path.endswith("/v1/models") else page)

    app = web.Application()
    app.router.add_get("/{any:.*}", page_or_models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    loop = asyncio.get_running_loop()
    for rank in ranks:
        loop.add_reader(rank.replay.FD, rank.answer_all)
    Path(out).write_text(f"{runner.addresses[0][1]} {first_port}")
    command = loop.run_in_executor(None, sys.stdin.readline)
    until_s, turn, began_s, late_s = 0.0, 0, 0.0, 0.0
    exempt_from_collection()  # its pauses would be gaps and bursts of the engines
    while True:
        if command.done():
            line = command.result().split()
            if not line or line[0] == "end":
                break
            began_s, turn = time.monotonic(), 0
            until_s = began_s + float(line[1])
            command = loop.run_in_executor(None, sys.stdin.readline)
        now_s = time.monotonic()
        if now_s < until_s:
            due = min(int((now_s - began_s) * BATCHES_PER_S * len(ranks)), n_batches * len(ranks))
            late_s = max(late_s, (due - turn) / (BATCHES_PER_S * len(ranks)))
            for _ in range(due - turn):  # the ranks by turns, so that their batches are spread over each interval
                ranks[turn % len(ranks)].publish()
                turn += 1
        elif until_s:
            until_s = 0.0
            sys.stdout.write(f"{sum(rank.n_sent for rank in ranks)} {late_s * 1000:.1f}\n")
            sys.stdout.flush()
        await asyncio.sleep(0.001)
    await runner.cleanup()
    context.destroy(linger=0)


def _per_block(machine: Machinery, samples: Samples, n_blocks: int, n_batches: int) -> None:
    """Measure decode, hash, ledger, encode and produce in this process, until Kafka has all records."""
    settings = machine.settings
    cache = _Cache(1, np.random.default_rng(1))
    payloads = [cache.payload(n_blocks) for _ in range(n_batches)]
    warm(HASHING)
    kafka = event_producer(settings)
    decoder = DIALECTS["vllm"].decoder(BLOCK_SIZE)
    writer = RankWriter(settings, kafka, RankId(WorkerId(9_999_999), DpRank(0)), MODEL, Incarnation(1), True)
    case = f"batches of {n_blocks} blocks"
    process = psutil.Process()
    cpu = process.cpu_times()
    began_s = time.perf_counter()
    for number, payload in enumerate(payloads):
        decoded = decoder.decode(payload)
        writer.write(number, number, decoded.emitted_at_ms or 0, decoded.events)
        while not writer.records.send():
            kafka.poll(0.01)
    called_s = time.perf_counter()
    assert kafka.flush(60.0) == 0
    drained_s = time.perf_counter()
    used = process.cpu_times()
    total = n_batches * n_blocks
    samples.add(case, "until the last call", "us per block", OURS, (called_s - began_s) * 1e6 / total)
    samples.add(case, "until Kafka has all", "us per block", OURS, (drained_s - began_s) * 1e6 / total)
    cpu_s = used.user + used.system - cpu.user - cpu.system
    samples.add(case, "processor time", "us per block", OURS, cpu_s * 1e6 / total)


def _use_append_times(machine: Machinery) -> None:
    """Let records of kv-events have the time at which the broker appends them, instead of their producer's."""
    entry = ConfigEntry("message.timestamp.type", "LogAppendTime", incremental_operation=AlterConfigOpType.SET)
    name = topics(machine.settings).kv_events.name
    resource = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=[entry])
    client = admin(machine.settings)
    for future in client.incremental_alter_configs([resource]).values():
        future.result(READY_TIMEOUT_S)


def _fleet(
    machine: Machinery, samples: Samples, n_engines: int, dp_size: int, seconds: float, profile: bool, stages: bool
) -> bool:
    """Measure a real bridge; return whether it published every batch."""
    settings, case = machine.settings, f"{n_engines} engines with dp {dp_size}"
    folder = Path(settings.data_dir).parent / f"fleet-{n_engines}"
    folder.mkdir()
    port_file = folder / "port"
    generator = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bridge", "--be-engines", f"{n_engines},{dp_size},{seconds},{port_file}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert generator.stdin is not None and generator.stdout is not None
    bridge: Child | None = None
    try:
        wait_for(lambda: port_file.exists() and port_file.read_text() != "", READY_TIMEOUT_S, "the engines")
        (port, first_port), tables = port_file.read_text().split(), []
        for engine in range(n_engines):
            base = int(first_port) + engine * 2 * dp_size
            tables.append(
                f'[[engine]]\nid = {n_engines * 10_000 + engine}\nurl = "http://127.0.0.1:{port}/{engine}"\n'
                f'events = "tcp://127.0.0.1:{base}"\nreplay = "tcp://127.0.0.1:{base + dp_size}"\ndp = {dp_size}\n'
            )
        engines = folder / "engines.toml"
        engines.write_text("\n".join(tables))
        program = ["-m", "streams.cli", "bridge", "--engines-file", str(engines)]
        if stages:
            program = ["-m", "benchmarks.bridge_stages", str(folder / "stages.npz"), *program[2:]]
        if profile:
            program = ["-m", "cProfile", "-o", str(Path.cwd() / f"bridge-{n_engines}.prof"), *program]
        bridge = Child("bridge", program, folder / "bridge.log", as_environ(settings)).start()
        records = _Records(machine, n_engines * 10_000)
        began_s = time.monotonic()
        wait_for(lambda: records.read() and len(records.live) == N_RANKS, READY_TIMEOUT_S, "all ranks to be live")
        samples.add(case, "until all ranks are live", "s", OURS, time.monotonic() - began_s)
        idle_from_s, idle_cpu_s = time.monotonic(), cpu_seconds(bridge.pid)
        deadline_s = idle_from_s + 5.0
        while time.monotonic() < deadline_s:
            records.read()
        idle = (cpu_seconds(bridge.pid) - idle_cpu_s) / (time.monotonic() - idle_from_s)
        samples.add(case, "without batches", "cores", OURS, idle)
        processes = {
            "bridge": bridge.pid,
            "broker": machine.broker_pid,
            "engines": generator.pid,
            "reader": os.getpid(),
        }
        generator.stdin.write(f"start {seconds}\n")
        generator.stdin.flush()
        began_s, sending_from_s = time.monotonic(), time.time()
        cpu_s = {name: cpu_seconds(pid) for name, pid in processes.items()}
        while time.monotonic() < began_s + seconds:
            records.keep()
        lasted_s = time.monotonic() - began_s
        used = {name: (cpu_seconds(pid) - cpu_s[name]) / lasted_s for name, pid in processes.items()}
        sent_text, late_ms = generator.stdout.readline().split()
        sent = int(sent_text)
        wait_for(lambda: records.read() and records.n_batches >= sent, READY_TIMEOUT_S, f"{sent} batches on Kafka")
        samples.add(case, "with batches", "cores", OURS, used.pop("bridge"))
        for name, cores in used.items():
            samples.add(case, f"with batches, {name}", "cores", OURS, cores)
        samples.add(case, "batches", "per s", OURS, sent / seconds)
        samples.add(case, "engines late by at most", "ms", OURS, float(late_ms))
        latency = np.array(records.latencies_ms)
        samples.add(case, "event to record, p50", "ms", OURS, float(np.percentile(latency, 50)))
        samples.add(case, "event to record, p99", "ms", OURS, float(np.percentile(latency, 99)))
        samples.add(case, "bytes of records", "per stored block", OURS, records.n_bytes / max(1, records.n_blocks))
        samples.add(
            case, "bytes of heartbeats", "per s", OURS, records.heartbeat_bytes / (time.monotonic() - idle_from_s)
        )
        samples.add(case, "memory", "MB", OURS, psutil.Process(bridge.pid).memory_info().rss / 1e6)
        if stages:
            bridge.stop()
            add_stages(samples, case, folder / "stages.npz", sending_from_s)
        return records.n_batches == sent
    finally:
        if bridge is not None:
            bridge.stop()
        generator.stdin.write("end\n")
        generator.stdin.close()
        generator.wait(30.0)


class _Records:
    """The records of `kv-events` as they arrive."""

    def __init__(self, machine: Machinery, first_worker: int) -> None:
        settings = machine.settings
        self._consumer = reader(settings, **{"fetch.min.bytes": FETCH_BYTES, "fetch.wait.max.ms": FETCH_WAIT_MS})
        topic = topics(settings).kv_events.name
        self._consumer.assign([TopicPartition(topic, n, OFFSET_END) for n in range(settings.partitions)])
        self._first_worker = first_worker
        self._kept: list[Message] = []
        self.live: set[RankId] = set()
        self.n_batches = self.n_blocks = self.n_bytes = self.heartbeat_bytes = 0
        self.latencies_ms: list[int] = []

    def keep(self) -> None:
        """Keep the records that have arrived for the next call of `read`."""
        self._kept += self._consumer.consume(2000, 0.2)

    def read(self) -> bool:
        """Take the records that have arrived."""
        self.keep()
        kept, self._kept = self._kept, []
        for message in kept:
            value = message.value()
            if message.error() is not None or value is None:
                continue
            batch = decode_batch(value)
            if batch.rank.worker_id < self._first_worker:
                continue
            if not batch.feed:
                self.live.add(batch.rank)
            if not isinstance(batch.body, EngineEvents):
                self.heartbeat_bytes += len(value)
            elif batch.sequence >= 0:
                self.n_batches += 1
                self.n_bytes += len(value)
                self.n_blocks += BLOCKS_PER_BATCH
                self.latencies_ms.append(message.timestamp()[1] - batch.emitted_at_ms)
        return True


@click.command()
@click.option("--seconds", default=20.0, show_default=True, help="length of each measurement of a fleet")
@click.option("--quick", is_flag=True, help="a smoke test of a few seconds")
@click.option("--profile", is_flag=True, help="write the bridge's profile to bridge-N.prof (cProfile, which slows it)")
@click.option("--stages", is_flag=True, help="divide the time from event to record by stage, which costs some time")
@click.option("--only", type=click.IntRange(0, 1), default=None, help="one fleet alone: 0 with dp 1, 1 with dp 8")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="write the report there too")
@click.option("--be-engines", hidden=True, default=None)
def main(
    seconds: float,
    quick: bool,
    profile: bool,
    stages: bool,
    only: int | None,
    json_path: Path | None,
    be_engines: str | None,
) -> None:
    """Measure what a bridge costs."""
    if be_engines is not None:
        numbers = be_engines.split(",", 3)
        uvloop.run(_generate(int(numbers[0]), int(numbers[1]), float(numbers[2]), numbers[3]))
        return
    samples, complete = Samples(), True
    with machinery() as machine:
        _use_append_times(machine)
        for n_blocks, n_batches in ((BLOCKS_PER_BATCH, 20_000), (128, 6_000)) if only is None else ():
            _per_block(machine, samples, n_blocks, n_batches // (10 if quick else 1))
        shapes = ((N_RANKS, 1), (N_RANKS // DP_SIZE, DP_SIZE))
        for n_engines, dp_size in shapes if only is None else (shapes[only],):
            complete &= _fleet(machine, samples, n_engines, dp_size, 4.0 if quick else seconds, profile, stages)
    rows = samples.rows()
    report = Report("bridge", {"vLLM's format": "0.33.0"}, rows)
    report.bars = [
        value_bar("cost per block", [row for row in rows if "128" in row.case and "all" in row.metric], US_MAX, "us"),
        value_bar(f"{N_RANKS} ranks in one process", select(rows, "with batches"), CORES_MAX, "cores"),
        value_bar("event to record, p99", select(rows, "event to record, p99"), P99_MS_MAX, "ms"),
    ]
    report.wrong += [] if complete else ["the bridge did not publish every batch"]
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
