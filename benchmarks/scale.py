"""`python -m benchmarks.scale PART`: up to which size one router holds.

What lives here: the parts, each a command. `ranks` compares a fleet of 64 ranks with larger ones: matches, decisions
with their bookings, the calls that list the fleet, and memory. `memberships` writes the changelog of a large index,
which a router in a process of its own then reads from Kafka. `models` compares routers of ten models and of one of
them (setting `models`). `workers` compares numbers of Faust workers and of partitions. What must not: the fleets
(decision, pipeline), the steps of a decision, and the end of a worker (failover). A part exits with 1 if an answer is
wrong, and prints which bars are met.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import orjson
from confluent_kafka import Message

from benchmarks.decision import BLOCK_SIZE, SEED, RouterFleet
from benchmarks.machinery import machinery
from benchmarks.memory import resident_bytes
from benchmarks.ours import WEIGHTS, clock
from benchmarks.pipeline import Fleet, mixed
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams import __version__
from streams.core.hashing import pack_hashes, request_hashes
from streams.core.ids import DpRank, HashArray, RankId, Tier, WorkerId
from streams.core.index.interface import Candidates
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.trust import AnswerMode
from streams.core.workers import Cordon, Worker
from streams.kafka.clients import Record, partition_of, worker_key
from streams.kafka.records import CORDONS, encode_load, encode_worker
from streams.lab.engines.held_chains import FIRST_EPOCH, runs_of_chain
from streams.process.http_server import HttpServer
from streams.process.interpreter import exempt_from_collection, prefer_request_threads
from streams.process.waiting import wait_for
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import RouteRequest
from streams.router_api.processes.server import api_runner
from streams.settings import AgentSettings, Settings, as_environ, load
from streams.tables.records import PROGRESS_KEY, RUN_KEY, encode_progress, encode_run
from streams.tables.transactions import commit_until_answered, produce, table_producer
from streams.topics import topics

MIB = 1024 * 1024

#: The fleet with which others are compared.
SMALL = 64

#: By number of ranks, how many times as long as in the small fleet a decision may take, at p50 and at p99.
RATIOS_MAX = {1_000: (3.0, 4.0), 10_000: (20.0, 30.0)}

#: Requests that each rank runs while decisions are measured.
RUNNING = 4

#: What they generate, so that they still run at the end.
OUTPUT_TOKENS = 1_000_000

#: Decisions between two records that keep answers exact.
PROVEN_EVERY = 50

#: The calls that list the fleet, and how often each is made in a repetition.
PAGES = ("/loads", "/workers", "/scale", "/metrics", "/live")
PAGES_ASKED = 5

#: Settings of a router that answers exactly although nothing was read while another fleet was measured.
PATIENT = {"behind_after_ms": 3_600_000, "stale_after_ms": 3_600_000}

#: Changes of the fleet in a repetition.
CHANGES = 20


@click.group(help=__doc__)
def main() -> None:
    pass


# -- ranks -------------------------------------------------------------------------------------------------------------


class Measured:
    """A fleet, and what was measured of it, in ns.

    changed: decisions that came first after a change of the fleet. pages: by path, until the last byte came. pauses: by
    path, the longest time in which the loop that answers decisions did nothing else.
    """

    def __init__(self, n_ranks: int, n_tokens: int) -> None:
        """The ranks run requests, which the router itself has booked."""
        before = resident_bytes()
        self.n_ranks = n_ranks
        self.fleet = fleet = RouterFleet(n_ranks, n_tokens, (Tier.DEVICE, Tier.HOST), **PATIENT)
        self.candidates = Candidates(tuple(fleet.router.view.fleet.all_ranks()))
        for number in range(RUNNING * n_ranks):
            self.prove(number)
            prompt = fleet.prompts[number % len(fleet.prompts)]
            fleet.router.route(
                RouteRequest(request_id=f"running-{number}", expected_output_tokens=OUTPUT_TOKENS), prompt
            )
        for worker_id in fleet.worker_ids:
            fleet.renew(worker_id)
        self.memory_bytes = resident_bytes() - before
        self.forget()

    def forget(self) -> None:
        """Begin to measure."""
        self.match: list[int] = []
        self.decide: list[int] = []
        self.with_sources: list[int] = []
        self.changed: list[int] = []
        self.pages: dict[str, list[int]] = {path: [] for path in PAGES}
        self.pauses: dict[str, list[int]] = {path: [] for path in PAGES}

    def prove(self, number: int) -> None:
        """Keep answers exact; number: counts the calls, most of which have nothing to do."""
        if number % PROVEN_EVERY == 0:
            self.fleet.prove()

    def prompt(self, number: int) -> bytes:
        """A prompt that a rank holds, or a new one, by turns."""
        held = self.fleet.prompts
        return held[int(self.fleet.rng.integers(len(held)))] if number % 2 else self.fleet.prompt()

    def measure(self, n_decisions: int) -> None:
        """Measure decisions while records arrive, and those that follow a change of the fleet."""
        for number in range(n_decisions):
            self.prove(number)
            self.fleet.renew(self.fleet.worker_ids[number * 7 % self.n_ranks])
            prompt = self.prompt(number)
            local, _ = request_hashes(prompt, BLOCK_SIZE)
            begun = clock()
            scores, _ = self.fleet.router.view.overlap(local)
            scores.columns(self.candidates, WEIGHTS)
            self.match.append(clock() - begun)
            self.decide.append(self.time_decision(number, prompt))
            self.with_sources.append(self.time_decision(number, prompt, kv_sources=True))
        for number in range(CHANGES):
            worker_id = WorkerId(self.fleet.worker_ids[number // 2])
            cordon = None if number % 2 else CORDONS.encode(Cordon(worker_id, 0))
            self.fleet.router.view.fold_worker(CORDONS.keys.pack(worker_id), cordon)
            self.changed.append(self.time_decision(number, self.prompt(number)))

    def time_decision(self, number: int, prompt: bytes, *, kv_sources: bool = False) -> int:
        """Time one decision from the parsed request to the answer's JSON, with its booking."""
        router, request_id = self.fleet.router, f"asked-{number}"
        begun = clock()
        answer = router.route(RouteRequest(request_id=request_id, kv_sources=kv_sources), prompt)
        orjson.dumps(answer_json(answer))
        taken = clock() - begun
        if answer.trust.mode is not AnswerMode.EXACT:
            raise SystemExit(f"an answer of an exact fleet is {answer.trust}")
        router.report_phase(request_id, BookingPhase.FREE)
        return taken

    async def ask_pages(self) -> None:
        """Ask for the pages that list the fleet, over HTTP."""
        server = HttpServer("127.0.0.1", 0)
        await server.serve(api_runner(self.fleet.router))
        try:
            for path in PAGES * PAGES_ASKED:
                begun = clock()
                page = asyncio.create_task(asyncio.to_thread(_read, server.url + path))
                longest, turn = 0, clock()
                while not page.done():
                    await asyncio.sleep(0)
                    now = clock()
                    longest, turn = max(longest, now - turn), now
                self.pages[path].append(clock() - begun)
                self.pauses[path].append(longest)
                await page
        finally:
            await server.close()

    def add_to(self, samples: Samples) -> None:
        """Add the figures."""
        case, runs = f"{self.n_ranks} ranks", self.fleet.router.view.index.runs
        by_name = {"match": self.match, "decide": self.decide, "decide, with kv_sources": self.with_sources}
        for name, taken in by_name.items():
            samples.add(case, f"{name} p50", "us", OURS, statistics.median(taken) / 1e3)
            samples.add(case, f"{name} p99", "us", OURS, p99(taken) / 1e3)
        samples.add(case, "decide, after a change of the fleet, p50", "ms", OURS, statistics.median(self.changed) / 1e6)
        for path in PAGES:
            samples.add(case, f"GET {path}", "ms", OURS, statistics.median(self.pages[path]) / 1e6)
            samples.add(case, f"GET {path}, pause", "ms", OURS, statistics.median(self.pauses[path]) / 1e6)
        with self.fleet.router.loads.locked() as loads:
            samples.add(case, "bookings", "MiB", OURS, loads.n_bytes / MIB)
        samples.add(case, "index", "MiB", OURS, runs.memory_bytes() / MIB)
        samples.add(case, "memory of the router", "MiB", OURS, self.memory_bytes / MIB)


def p99(taken: Sequence[int]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(taken, n=100)[98]


PERCENTILES: dict[str, Callable[[Sequence[int]], float]] = {"p50": statistics.median, "p99": p99}


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        page: bytes = answer.read()
    return page


@main.command()
@click.option("--tokens", default=2048, show_default=True)
@click.option("--decisions", default=500, show_default=True, help="of one fleet in one repetition")
@click.option("--repeats", default=6, show_default=True)
@click.option("--large", "sizes", multiple=True, type=int, default=tuple(RATIOS_MAX), show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def ranks(tokens: int, decisions: int, repeats: int, sizes: tuple[int, ...], json_path: Path | None) -> None:
    """Fleets of several sizes by turns, whose ranks hold prompts on their devices and in their hosts' memory."""
    prefer_request_threads()
    exempt_from_collection()  # as a router does before it reads its topics
    fleets = [Measured(n_ranks, tokens) for n_ranks in (SMALL, *sizes)]
    for repeat in range(repeats + 1):
        for measured in fleets:
            gc.collect()
            measured.measure(decisions)
            asyncio.run(measured.ask_pages())
            if repeat == 0:  # caches are filled
                measured.forget()
    samples, bars, small = Samples(), [], fleets[0]
    for measured in fleets:
        measured.add_to(samples)
    for measured in fleets[1:]:
        for (name, of), most in zip(PERCENTILES.items(), RATIOS_MAX.get(measured.n_ranks, ()), strict=False):
            ratio = of(measured.decide) / of(small.decide)
            title = f"a decision at {measured.n_ranks} ranks takes at most {most:g} times as long as at {SMALL}, {name}"
            bars.append(Bar(title, ratio <= most, f"{ratio:.2f}"))
    report = Report("scale ranks", {"kvstreams": __version__}, samples.rows(), bars)
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)


# -- memberships -------------------------------------------------------------------------------------------------------

#: Blocks of a chain, of which every holder has all: a prompt of 2,048 tokens.
CHAIN_BLOCKS = 128

#: Records of a partition in one transaction of the writer.
TRANSACTION_RECORDS = 5_000

#: Matches that are timed once everything is read, and the time between two of them while it is read.
MATCHES = 20_000
MATCH_EVERY_S = 0.002

BYTES_PER_MEMBERSHIP_MAX = 20.0
RECOVERY_S_MAX = 120.0
MATCH_RATIO_MAX = 3.0

#: A router that has not read everything by then is given up.
READ_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Which ranks hold which chains: every process makes the same ones."""

    chains: int
    ranks: int
    holders: int

    def chain(self, number: int) -> tuple[HashArray, list[RankId]]:
        """The local hashes of a chain, and the ranks that hold it."""
        rng = np.random.default_rng((SEED, number))
        local = rng.integers(1, 1 << 63, size=CHAIN_BLOCKS, dtype=np.uint64)
        holders = rng.permutation(self.ranks)[: self.holders].tolist()
        return local, [RankId(WorkerId(1 + each), DpRank(0)) for each in holders]

    @property
    def memberships(self) -> int:
        """Blocks, counted once for each rank that holds them."""
        return self.chains * CHAIN_BLOCKS * self.holders


class ChangelogWriter:
    """Writes the records of one partition as its owner does, in transactions."""

    def __init__(self, settings: AgentSettings, topic: str, partition: int) -> None:
        self._kafka = table_producer(settings, partition)
        self._kafka.init_transactions(30.0)
        self._topic, self._partition, self._n_records = topic, partition, 0

    def write(self, key: bytes, value: bytes) -> None:
        """Write one record."""
        if not self._n_records:
            self._kafka.begin_transaction()
        produce(self._kafka, self._topic, self._partition, key, value, None)
        self._n_records += 1
        if self._n_records == TRANSACTION_RECORDS:
            self.commit()

    def commit(self) -> None:
        """End the transaction."""
        if self._n_records:
            commit_until_answered(self._kafka)
            self._n_records = 0


def write_chains(settings: Settings, shape: Shape) -> None:
    """Write the changelog. All holders of a run have records of the same value, and engines that name blocks alike."""
    topic = topics(settings).index_changelog.name
    writers = [ChangelogWriter(settings, topic, partition) for partition in range(settings.partitions)]
    for worker_id in range(1, shape.ranks + 1):
        rank = RankId(WorkerId(worker_id), DpRank(0))
        progress = Progress(rank, FIRST_EPOCH, 0, health=Health.EXACT, model="m", block_size=BLOCK_SIZE)
        writer = writers[partition_of(worker_id, settings.partitions)]
        writer.write(PROGRESS_KEY.pack(rank), encode_progress(progress))
    for number in range(shape.chains):
        local, holders = shape.chain(number)
        for run in runs_of_chain(holders[0], local):
            value = encode_run(run)
            for rank in holders:
                key = RUN_KEY.pack(run.key._replace(rank=rank))
                writers[partition_of(rank.worker_id, settings.partitions)].write(key, value)
    for writer in writers:
        writer.commit()


class Found(NamedTuple):
    """What a router was like once it had read everything. Times of matches are in ns."""

    recovery_s: float
    index_bytes: int
    peak_bytes: int
    match_p50: float
    match_p99: float
    meanwhile_p99: float
    wrong: int


@main.command(hidden=True)
@click.argument("shape", nargs=3, type=int)
def read(shape: tuple[int, int, int]) -> None:
    """Read the scope of the environment with a router, and print what it was like."""
    of, rng = Shape(*shape), np.random.default_rng(SEED)
    exempt_from_collection()
    prefer_request_threads()
    router = Router(load({}).settings)
    candidates = Candidates([RankId(WorkerId(1 + each), DpRank(0)) for each in range(of.ranks)])
    wrong, meanwhile, matches = 0, list[int](), list[int]()

    def time_match() -> tuple[int, bool]:
        local, holders = of.chain(int(rng.integers(of.chains)))
        begun = clock()
        scores, _ = router.view.overlap(local)
        scores.columns(candidates, WEIGHTS)
        taken = clock() - begun
        return taken, scores.scores == dict.fromkeys(holders, CHAIN_BLOCKS)

    begun = time.perf_counter()
    router.start()
    while router.feeds.pending():
        meanwhile.append(time_match()[0])
        time.sleep(MATCH_EVERY_S)
    recovery_s = time.perf_counter() - begun
    for _ in range(MATCHES):
        taken, is_right = time_match()
        matches.append(taken)
        wrong += not is_right
    router.stop()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    found = Found(
        recovery_s,
        router.view.index.runs.memory_bytes(),
        int(peak.split()[1]) * 1024,
        statistics.median(matches),
        p99(matches),
        p99(meanwhile),
        wrong,
    )
    click.echo(orjson.dumps(found._asdict()))


def measure_memberships(shape: Shape, directory: Path | None) -> tuple[Found, int, float]:
    """Write a changelog and read it; returns also its bytes on disk, and the seconds in which it was written."""
    with machinery(partitions=8, directory=directory, block_size=BLOCK_SIZE, router_replica_sync=False) as parts:
        begun = time.perf_counter()
        write_chains(parts.settings, shape)
        written_s = time.perf_counter() - begun
        n_bytes = parts.topic_bytes(topics(parts.settings).index_changelog.name)
        command = [sys.executable, "-m", "benchmarks.scale", "read", *map(str, astuple(shape))]
        environ = {**os.environ, **as_environ(parts.settings)}
        printed = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, timeout=READ_TIMEOUT_S)
        return Found(**orjson.loads(printed.stdout)), n_bytes, written_s


@main.command()
@click.option("--memberships", "sizes", multiple=True, type=int, default=(2_000_000, 64_000_000), show_default=True)
@click.option("--holders", default=16, show_default=True, help="ranks that hold each block")
@click.option("--ranks", "n_ranks", default=64, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), default=None, help="where Kafka keeps its data meanwhile")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def memberships(
    sizes: tuple[int, ...], holders: int, n_ranks: int, directory: Path | None, json_path: Path | None
) -> None:
    """Indexes of several sizes, each read from Kafka by a router in a process of its own."""
    samples, bars, wrong, first = Samples(), list[Bar](), list[str](), None
    for size in sizes:
        shape = Shape(max(1, size // (CHAIN_BLOCKS * holders)), n_ranks, holders)
        found, n_bytes, written_s = measure_memberships(shape, directory)
        first = first or found
        case, n = f"{size / 1e6:g} M memberships", shape.memberships
        add = partial(samples.add, case)
        add("index", "B per membership", OURS, found.index_bytes / n)
        add("peak of the process", "MiB", OURS, found.peak_bytes / MIB)
        add("changelog on disk", "B per membership", OURS, n_bytes / n)
        add("written", "s", OURS, written_s)
        add("recovery", "s", OURS, found.recovery_s)
        add("match p50", "us", OURS, found.match_p50 / 1e3)
        add("match p99", "us", OURS, found.match_p99 / 1e3)
        add("match p99 during the recovery", "us", OURS, found.meanwhile_p99 / 1e3)
        if found.wrong:
            wrong.append(f"{case}: {found.wrong} of {MATCHES} matches found other ranks or blocks than those written")
        for name, value, most in (
            ("bytes per membership", found.index_bytes / n, BYTES_PER_MEMBERSHIP_MAX),
            ("seconds of recovery", found.recovery_s, RECOVERY_S_MAX),
            ("times the first p99 of a match", found.match_p99 / first.match_p99, MATCH_RATIO_MAX),
        ):
            bars.append(Bar(f"{case}: at most {most:g} {name}", value <= most, f"{value:.2f}"))
    report = Report("scale memberships", {"kvstreams": __version__}, samples.rows(), bars, wrong=wrong)
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if wrong else 0)


# -- models ------------------------------------------------------------------------------------------------------------

#: Of each model: its workers, the prompts that each of them holds, and bookings.
WORKERS, PROMPTS, BOOKINGS = 16, 32, 3_000

#: How many of the bookings run. The others have ended, and are known until they expire: requests of 20 s, by the
#: default of booking_ttl_s.
RUNNING_SHARE = 1 / 30

MODEL_SHARE_MAX = 0.15


def fleet_records(n_models: int) -> tuple[list[Record], list[Message], list[Record]]:
    """The registry, the index and the bookings of several models, as Kafka has them."""
    workers, index, bookings = list[Record](), list[Message](), list[Record]()
    rng = np.random.default_rng(SEED)
    topic = "any"

    def append(to: list[Record], key: bytes, value: bytes) -> None:
        to.append(Record(topic, 0, len(to), 1000 + len(to), key, value))

    for number in range(n_models * WORKERS):
        rank, model = RankId(WorkerId(1 + number), DpRank(0)), f"model-{number % n_models}"
        worker = Worker(rank.worker_id, f"http://engine-{number}:8000", model, BLOCK_SIZE)
        append(workers, worker_key(rank.worker_id), encode_worker(worker))
        for _ in range(PROMPTS):
            local = rng.integers(1, 1 << 63, size=CHAIN_BLOCKS, dtype=np.uint64)
            for run in runs_of_chain(rank, local):
                key, value = RUN_KEY.pack(run.key), encode_run(run)
                index.append(Message(topic=topic, partition=0, offset=len(index), key=key, value=value))
    for number in range(n_models * BOOKINGS):
        sequence = pack_hashes(rng.integers(1, 1 << 63, size=CHAIN_BLOCKS, dtype=np.uint64))
        rank = RankId(WorkerId(1 + number % (n_models * WORKERS)), DpRank(0))
        booking = Booking(rank, f"model-{number % n_models}", 2048, sequence, 0, CHAIN_BLOCKS)
        booking_id = BookingId(uuid.UUID(int=number).hex, "router", number)
        append(bookings, *encode_load(booking_id, BookingPhase.ADD, booking, 1))
        if number >= RUNNING_SHARE * n_models * BOOKINGS:
            append(bookings, *encode_load(booking_id, BookingPhase.FREE, None, 1))
    return workers, index, bookings


@main.command()
@click.option("--models", "n_models", default=10, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def models(n_models: int, json_path: Path | None) -> None:
    """What a router of one of ten models keeps, and what the records of the others cost it."""
    samples, bars = Samples(), list[Bar]()
    workers, index, bookings = fleet_records(n_models)
    kept: dict[str, tuple[int, int]] = {}
    for served in ("", "model-0"):
        router = Router(Settings(kafka="127.0.0.1:1", models=served))
        for record in workers:
            router.view.fold_worker(record.key, record.value)
        begun = clock()
        for first in range(0, len(index), 500):
            assert not router.view.served.fold(index[first : first + 500], False)
        of_index = clock() - begun
        begun = clock()
        for record in bookings:
            router.loads.fold(record)
        of_bookings = clock() - begun
        with router.loads.locked() as loads:
            n_bytes = loads.n_bytes + router.loads.skipped_bytes
        kept[served] = router.view.index.runs.memory_bytes(), n_bytes
        case = f"{n_models} models, served: {served or 'all'}"
        samples.add(case, "index", "MiB", OURS, kept[served][0] / MIB)
        samples.add(case, "bookings", "MiB", OURS, kept[served][1] / MIB)
        samples.add(case, "processor time per run record", "us", OURS, of_index / len(index) / 1e3)
        samples.add(case, "processor time per record of a booking", "us", OURS, of_bookings / len(bookings) / 1e3)
        router._kafka.close()  # otherwise it keeps trying to connect
    share = sum(kept["model-0"]) / sum(kept[""])
    title = f"a router of one of {n_models} models keeps at most {MODEL_SHARE_MAX:g} of the bytes"
    bars.append(Bar(title, share <= MODEL_SHARE_MAX, f"{share:.3f}"))
    for name, number in (("index", 0), ("bookings", 1)):
        part = kept["model-0"][number] / kept[""][number]
        bars.append(Bar(f"{title}, {name} alone", part <= MODEL_SHARE_MAX, f"{part:.3f}"))
    report = Report("scale models", {"kvstreams": __version__}, samples.rows(), bars)
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)


# -- workers -----------------------------------------------------------------------------------------------------------

#: How long the partitions of a new group may take until each worker has its share.
SHARED_TIMEOUT_S = 60.0


@main.command()
@click.option("--workers", "numbers", multiple=True, type=int, default=(1, 2, 4), show_default=True)
@click.option("--partitions", "partitions", multiple=True, type=int, default=(8, 64), show_default=True)
@click.option("--records", default=30_000, show_default=True, help="of engines, sent as fast as Kafka takes them")
@click.option("--rate", default=1_000.0, show_default=True, help="records per second, in a second run of 10 s")
@click.option("--engines", default=64, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def workers(
    numbers: tuple[int, ...],
    partitions: tuple[int, ...],
    records: int,
    rate: float,
    engines: int,
    json_path: Path | None,
) -> None:
    """What a record costs all workers together, while they have a backlog, and at an even rate."""
    samples, wrong = Samples(), list[str]()
    for n_partitions in partitions:
        for n_workers in numbers:
            with machinery(partitions=n_partitions, block_size=BLOCK_SIZE) as parts:
                fleet = Fleet(parts, engines, seed=1, n_workers=n_workers)
                wait_for(partial(are_shared, fleet), SHARED_TIMEOUT_S, "partitions of every worker")
                rng = random.Random(SEED)
                fleet.passed(
                    mixed(fleet.engines, records // 4, rng), None
                )  # the first records run code for the first time
                case = f"{n_partitions} partitions, workers: {n_workers}"
                for how, n, per_second in (("backlog", records, None), (f"{rate:g}/s", int(10 * rate), rate)):
                    run = fleet.passed(mixed(fleet.engines, n, rng), per_second)
                    samples.add(case, f"{how}: records by wall time", "1/s", OURS, n / run.all_s)
                    samples.add(case, f"{how}: records by processor time", "1/s", OURS, n / run.worker_cpu_s)
                    samples.add(case, f"{how}: all workers", "cores", OURS, run.worker_cpu_s / run.all_s)
                wrong += [f"{case}: {each}" for each in fleet.wrong()]
    report = Report("scale workers", {"kvstreams": __version__}, samples.rows(), wrong=wrong)
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if wrong else 0)


def n_owned(url: str) -> int:
    """How many partitions a worker owns, by its metrics."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith("kvstreams_agent_partitions "))


def are_shared(fleet: Fleet) -> bool:
    """Whether the workers own all partitions, and each its share."""
    owned = [n_owned(worker.url) for worker in fleet.workers]
    partitions = fleet.worker.settings.partitions
    return sum(owned) == partitions and min(owned) >= partitions // len(owned)


if __name__ == "__main__":
    main()
