"""`python -m benchmarks.recovery`: how long a new process takes to read the changelog.

What lives here: changelogs of given sizes, written as agents write them, with each run overwritten ten times, and the
time until a fresh worker, a warm one and a fresh router have read them. What must not: throughput (pipeline).
Compaction uses the default settings. Exits 1 if a process recovers anything other than what was written.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import numpy as np

from benchmarks.machinery import Machinery, cpu_seconds, machinery
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams.core.events import BlocksStored, EngineBatch, EngineEvents
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, WorkerId
from streams.core.reducer.holdings import Holdings
from streams.kafka.clients import partition_of
from streams.lab.stack import RouterProcess, get_json
from streams.process.waiting import wait_for
from streams.tables.records import PROGRESS_KEY, Change, encode_progress
from streams.tables.run_table import RunTable
from streams.tables.transactions import table_producer
from streams.topics import topics

MODEL = "m"
BLOCK_SIZE = 16
OVERWRITES = 10
RECORDS_PER_TRANSACTION = 500
#: Tokens of a prompt without a trace: Mooncake's conversations have 12,035 on average, most of them fewer.
PROMPT_TOKENS_MEDIAN, PROMPT_TOKENS_SIGMA = 7000.0, 1.05
ANSWER_TOKENS_MEDIAN, ANSWER_TOKENS_SIGMA = 300.0, 0.8
READY_TIMEOUT_S = 300.0


def lengths(trace: Path | None, seed: int) -> Iterator[tuple[int, int]]:
    """Yield blocks of prompts and of answers, without end."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int]] = []
    if trace is not None:
        for line in trace.read_text().splitlines():
            row = json.loads(line)
            rows.append((row["input_length"], row["output_length"]))
    while True:
        if rows:
            prompt, answer = rows[int(rng.integers(len(rows)))]
        else:
            prompt = int(rng.lognormal(np.log(PROMPT_TOKENS_MEDIAN), PROMPT_TOKENS_SIGMA))
            answer = int(rng.lognormal(np.log(ANSWER_TOKENS_MEDIAN), ANSWER_TOKENS_SIGMA))
        yield max(1, prompt // BLOCK_SIZE), max(1, answer // BLOCK_SIZE)


class Written:
    """The changelog of one scope: records by partition, as a table's owner writes them."""

    def __init__(self, partitions: int, ranks: list[RankId], n_blocks: int, trace: Path | None, seed: int) -> None:
        rng = np.random.default_rng(seed)
        draw = lengths(trace, seed)
        self.n_blocks = dict.fromkeys(ranks, 0)
        self.records: list[list[Change]] = [[] for _ in range(partitions)]
        self.progress: list[list[Change]] = [[] for _ in range(partitions)]
        self.value_bytes = 0
        holdings = [Holdings(RunTable()) for _ in range(partitions)]
        sequence = dict.fromkeys(ranks, 0)
        left = n_blocks
        while left > 0:
            rank = ranks[int(rng.integers(len(ranks)))]
            prompt, answer = next(draw)
            names = rng.integers(1, 1 << 63, size=prompt + answer, dtype=np.uint64)
            local = rng.integers(1, 1 << 63, size=prompt + answer, dtype=np.uint64)
            events = [BlocksStored(None, names[:prompt], local[:prompt])]
            events += [
                BlocksStored(EngineHash(int(names[at - 1])), names[at : at + 1], local[at : at + 1])
                for at in range(prompt, prompt + answer)
            ]
            body = EngineEvents(tuple(events))
            one = EngineBatch(rank, MODEL, BLOCK_SIZE, Incarnation(1), sequence[rank], 0, 0, body)
            sequence[rank] += 1
            holdings[partition_of(rank.worker_id, partitions)].apply(one, body.events)
            self.n_blocks[rank] += prompt + answer
            left -= prompt + answer
        for partition, held in enumerate(holdings):
            changes = held.take_changes(0)
            self.records[partition] = changes.runs
            self.progress[partition] = [(PROGRESS_KEY.pack(p.rank), encode_progress(p)) for p in changes.progress]
            self.value_bytes += sum(len(key) + len(value or b"") for key, value in changes.runs)

    @property
    def n_runs(self) -> int:
        """Number of run records that are not deleted."""
        return sum(map(len, self.records))


def write(parts: Machinery, written: Written, times: int, seed: int) -> float:
    """Write every record several times, each time in another order; returns the seconds that it took."""
    topic = topics(parts.settings).index_changelog.name
    rng = np.random.default_rng(seed)
    began = time.perf_counter()
    for partition, records in enumerate(written.records):
        kafka = table_producer(parts.settings, partition)
        kafka.init_transactions(30.0)
        for _ in range(times):
            order = rng.permutation(len(records)).tolist()
            for first in range(0, len(order), RECORDS_PER_TRANSACTION):
                kafka.begin_transaction()
                for key, value in written.progress[partition]:
                    kafka.produce(topic, value, key, partition)
                for position in order[first : first + RECORDS_PER_TRANSACTION]:
                    key, value = records[position]
                    kafka.produce(topic, value, key, partition)
                kafka.commit_transaction(30.0)
    return time.perf_counter() - began


_OPENED = re.compile(r"partition (\d+) is open")


def opened(process: RouterProcess, since: int = 0) -> set[int]:
    """Return the partitions that a worker has opened, from its log after a number of characters."""
    return set(map(int, _OPENED.findall(process.child.log_path.read_text()[since:])))


def all_open(process: RouterProcess, since: int = 0) -> bool:
    """Whether a worker has opened every partition."""
    return len(opened(process, since)) == process.settings.partitions


def recover_worker(process: RouterProcess) -> tuple[float, float]:
    """Return the seconds from the assignment until the last partition is open, and those of processor time."""
    log = process.child.log_path
    log.write_text("")
    process.child.start()
    wait_for(lambda: "partitions assigned" in log.read_text(), READY_TIMEOUT_S, "an assignment", 0.02)
    began, cpu = time.perf_counter(), cpu_seconds(process.child.pid)
    wait_for(partial(all_open, process), READY_TIMEOUT_S, "open partitions", 0.02)
    return time.perf_counter() - began, cpu_seconds(process.child.pid) - cpu


def recover_router(parts: Machinery, name: str, written: Written) -> tuple[float, list[str]]:
    """Return the seconds from a fresh router's first answer until it is ready, and what is wrong in its view."""
    router = parts.stack.router(name, wait=False)
    wait_for(lambda: _answers(router), READY_TIMEOUT_S, "an answer", 0.02)
    began = time.perf_counter()
    wait_for(lambda: bool(get_json(f"{router.url}/ready")["ready"]), READY_TIMEOUT_S, "a ready router", 0.05)
    took = time.perf_counter() - began
    found = {(r["worker_id"], r["dp_rank"]): r["blocks"] for r in get_json(f"{router.url}/state")["ranks"]}
    wrong = [
        f"{name}: rank {rank} has {found.get((rank.worker_id, rank.dp_rank))} blocks, {n} were written"
        for rank, n in written.n_blocks.items()
        if found.get((rank.worker_id, rank.dp_rank)) != n
    ]
    router.child.stop()
    return took, wrong


def _answers(router: RouterProcess) -> bool:
    try:
        get_json(f"{router.url}/healthz")
    except OSError:
        return False
    return True


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option(
    "--blocks",
    "sizes",
    multiple=True,
    type=int,
    help="Blocks held, over all ranks; may be repeated. [default: 1, 2, 5 M]",
)
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A Mooncake trace.")
@click.option("--ranks", default=64, show_default=True)
@click.option("--partitions", default=8, show_default=True)
def main(json_path: Path | None, sizes: tuple[int, ...], trace: Path | None, ranks: int, partitions: int) -> None:
    """Measure recovery from the changelog."""
    samples, report, console = Samples(), Report("recovery", {}, []), wide_console()
    for n_blocks in sizes or (1_000_000, 2_000_000, 5_000_000):
        case = f"{n_blocks / 1e6:g} M"
        fleet = [RankId(WorkerId(n + 1), DpRank(0)) for n in range(ranks)]
        written = Written(partitions, fleet, n_blocks, trace, seed=1)
        with machinery(partitions=partitions, block_size=BLOCK_SIZE) as parts:
            worker = parts.stack.worker(router=False)
            wait_for(partial(all_open, worker), READY_TIMEOUT_S, "open partitions")
            worker.child.stop()
            shutil.rmtree(worker.settings.data_dir)
            took = write(parts, written, OVERWRITES, seed=2)
            console.print(f"{case}: {written.n_runs:,} runs written {OVERWRITES} times in {took:.0f} s")
            n_bytes = parts.topic_bytes(topics(parts.settings).index_changelog.name)
            cold, cold_cpu = recover_worker(worker)
            worker.child.kill()
            warm, warm_cpu = recover_worker(worker)
            router, wrong = recover_router(parts, "fresh", written)
            report.wrong += wrong
            add = samples.add
            add(case, "run records", "", OURS, float(written.n_runs))
            add(case, "changelog on disk", "MB", OURS, n_bytes / 1e6)
            add(case, "live records per block", "B", OURS, written.value_bytes / sum(written.n_blocks.values()))
            add(case, "fresh worker", "s", OURS, cold)
            add(case, "fresh worker's processor time", "s", OURS, cold_cpu)
            add(case, "warm worker", "s", OURS, warm)
            add(case, "warm worker's processor time", "s", OURS, warm_cpu)
            add(case, "fresh router", "s", OURS, router)
            for name, value, most in (
                ("fresh worker", cold, 15.0),
                ("warm worker", warm, 5.0),
                ("fresh router", router, 15.0),
            ):
                report.bars.append(Bar(f"{case}: {name} at most {most:g} s", value <= most, f"{value:.1f}"))
            per_block = written.value_bytes / sum(written.n_blocks.values())
            report.bars.append(Bar(f"{case}: at most 30 B per live block", per_block <= 30.0, f"{per_block:.1f}"))
    report.rows = samples.rows()
    report.print(console)
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
