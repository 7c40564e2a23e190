"""`python -m benchmarks.fold FILE...`: folding run records, compared with applying the same events directly.

What lives here: records made from a workload, the way a router folds them, and the times of its parts. What must not:
Kafka. Exits with 1 if the fold and the index do not hold the same facts.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks import ours
from benchmarks.ours import clock
from benchmarks.workload import REMOVED, Workload, load
from streams.core.events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvents
from streams.core.ids import EngineHash, Incarnation, RankId, Tier
from streams.core.index.tree_fold import TreeRunFold
from streams.core.reducer.holdings import plain_holdings
from streams.router_api.view import View
from streams.settings import Settings
from streams.tables.records import encode_run, run_key
from streams.tables.run_decoding import decode, join

Record = tuple[bytes, bytes | None]

APPLY_EVENTS = 128  # per call, as in benchmarks.index
FOLD_RECORDS = 500  # per call, as a router consumes them
ALONE_RECORDS = 2000  # folded one at a time for comparison, which is slow


@dataclass(frozen=True, slots=True)
class Log:
    """Records in some order. n_blocks: number of blocks in all records; tombstones have none."""

    records: list[Record]
    n_blocks: int

    def batches(self) -> Iterator[list[Record]]:
        """Yield batches as a router gets them: its client has just created these bytes, so they are in the cache."""
        for at in range(0, len(self.records), FOLD_RECORDS):
            batch = self.records[at : at + FOLD_RECORDS]
            yield [(bytes(bytearray(key)), value if value is None else bytes(bytearray(value))) for key, value in batch]


def logged(workload: Workload, ranks: Sequence[RankId], n_events: int, n_transaction_events: int) -> Log:
    """Convert events to records as an agent does, with this many events per transaction."""
    holdings = plain_holdings()
    offset = workload.ev_off.astype(int).tolist()
    records: list[Record] = []
    n_blocks = 0
    sequence = [0] * len(ranks)
    for first in range(0, n_events, n_transaction_events):
        for event in range(first, min(first + n_transaction_events, n_events)):
            worker = int(workload.ev_worker[event])
            names = workload.blk_seq[offset[event] : offset[event + 1]]
            parent = int(workload.ev_parent[event])
            change = (
                BlocksRemoved(names)
                if workload.ev_kind[event] == REMOVED
                else BlocksStored(
                    EngineHash(parent) if parent else None,
                    names,
                    workload.blk_local[offset[event] : offset[event + 1]],
                    Tier.DEVICE,
                )
            )
            body = EngineEvents((change,))
            batch = EngineBatch(ranks[worker], "m", workload.block_size, Incarnation(1), sequence[worker], 0, 0, body)
            sequence[worker] += 1
            holdings.apply(batch, body.events)
        for key, run in holdings.take_changes(1 << 30).runs:
            records.append((run_key(key), None if run is None else encode_run(run)))
            n_blocks += 0 if run is None else len(run.local)
    return Log(records, n_blocks)


def compacted(log: Log, seed: int) -> Log:
    """Last records of all keys without a final tombstone, shuffled."""
    last = {key: value for key, value in log.records if value is not None}
    for key, value in log.records:
        if value is None:
            last.pop(key, None)
        else:
            last[key] = value
    records: list[Record] = list(last.items())
    random.Random(seed).shuffle(records)
    columns, _ = decode(*join(records))
    return Log(records, int(columns.offset[-1]))


def time_direct(target: ours.Grown, n_events: int) -> int:
    """Apply events in batches; returns nanoseconds."""
    apply, columns = target.index.apply, target.columns
    start = clock()
    for at in range(0, n_events, APPLY_EVENTS):
        apply(columns, at, min(at + APPLY_EVENTS, n_events))
    return clock() - start


def time_view(log: Log) -> tuple[int, View]:
    """Fold records as a router does; returns nanoseconds, and the view."""
    view = View(Settings(), lambda: 0)
    took = 0
    for batch in log.batches():
        start = clock()
        bad = view.fold_index_batch(batch)
        took += clock() - start
        if bad:
            raise ValueError("a generated record is bad")
    return took, view


def time_parts(log: Log) -> dict[str, int]:
    """Nanoseconds for joining, decoding and folding."""
    took = {"join": 0, "decode": 0, "fold": 0}
    fold = TreeRunFold()
    for batch in log.batches():
        begin = clock()
        joined = join(batch)
        took["join"] += clock() - begin
        begin = clock()
        columns, _ = decode(*joined)
        took["decode"] += clock() - begin
        begin = clock()
        fold.fold_records(columns)
        took["fold"] += clock() - begin
    return took


def time_alone(log: Log) -> float:
    """Nanoseconds per record if each is decoded and folded alone."""
    view = View(Settings(), lambda: 0)
    records = log.records[:ALONE_RECORDS]
    start = clock()
    for key, value in records:
        view.fold_index(key, value)
    return (clock() - start) / len(records)


def measure(path: Path, n_events: int, n_transaction_events: int, repeats: int, say: Callable[[str], None]) -> bool:
    """Measure one workload; returns whether fold and index hold the same facts."""
    workload = load(path)
    target = ours.empty(workload)
    n_events = min(n_events, workload.n_events) if n_events else workload.n_events
    event_blocks = int(workload.ev_off[n_events])
    begun = time.perf_counter()
    log = logged(workload, target.ranks, n_events, n_transaction_events)
    permuted = compacted(log, 1)
    say(
        f"{workload.name}: {n_events} events with {event_blocks} blocks; the log has {len(log.records)} records with "
        f"{log.n_blocks} blocks; compacted and shuffled, {len(permuted.records)} records with {permuted.n_blocks} "
        f"blocks (generated in {time.perf_counter() - begun:.0f} s)"
    )
    took: dict[str, list[float]] = {}
    same = True
    time_direct(ours.again(target, workload), n_events)  # compiles the kernels, or reads them from their cache
    time_parts(log)
    gc.disable()  # the sets that are compared below have millions of objects
    for _ in range(repeats):
        fresh = ours.again(target, workload)
        direct = time_direct(fresh, n_events) / event_blocks
        took.setdefault("direct", []).append(direct)
        expected: set[tuple[RankId, Tier, int]] = set(fresh.index.members())
        held = len(expected)
        for name, each in (("log", log), ("permuted", permuted)):
            whole, view = time_view(each)
            blocks = event_blocks if name == "log" else each.n_blocks
            took.setdefault(f"{name} ns/block", []).append(whole / blocks)
            took.setdefault(f"{name} ns/record block", []).append(whole / max(1, each.n_blocks))
            took.setdefault(f"{name} ns/record", []).append(whole / len(each.records))
            took.setdefault(f"{name} / direct", []).append(whole / blocks / direct)
            for part, ns in time_parts(each).items():
                took.setdefault(f"{name} {part} ns/record", []).append(ns / len(each.records))
            found: set[tuple[RankId, Tier, int]] = {*view.index.members()}
            if len(view.index) != held or found != expected:
                say(f"{workload.name}: the {name} fold holds {len(view.index)} facts, the index {held}, or others")
                same = False
    took["alone ns/record"] = [time_alone(log)]
    for name, values in took.items():
        say(f"  {name:28} {statistics.median(values):9.2f}   ({min(values):.2f} to {max(values):.2f})")
    return same


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--events", default=20_000, show_default=True, help="Events per workload; 0 for all, which takes minutes."
)
@click.option("--transaction", default=128, show_default=True, help="Events per transaction of an agent.")
@click.option("--repeats", default=9, show_default=True)
def main(files: Sequence[Path], events: int, transaction: int, repeats: int) -> None:
    """Compare folding the run records of KVWL workloads with applying their events directly."""
    same = [measure(path, events, transaction, repeats, click.echo) for path in files]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
