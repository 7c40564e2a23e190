"""Queries while another thread folds records: each answer is correct for some prefix of the records."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from streams.core.ids import DpRank, Epoch, HashArray, RankId, Tier, WorkerId
from streams.core.index.run_columns import RunColumns
from streams.core.index.tree_fold import TreeRunFold
from streams.tables.run_decoding import decode_runs
from streams.tables.run_table import RunTable
from tests.helpers.invariants import check
from tests.helpers.reference import chain_hashes
from tests.helpers.run_records import FIRST_EPOCH

# Threads compete for both cores.
pytestmark = pytest.mark.thorough

N_RANKS = 70  # two words of coverage
N_EVENTS = 2000
N_ROUNDS = 2000

RANKS = [RankId(WorkerId(worker), DpRank(0)) for worker in range(N_RANKS)]
Answer = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Records:
    """The records of consecutive transactions, which are folded in calls of any size."""

    columns: RunColumns

    def steps(self, batch: int) -> Iterator[Callable[[TreeRunFold], object]]:
        """Fold `batch` records per call."""
        n_records = self.columns.n_records
        for first in range(0, n_records, batch):
            last = min(first + batch, n_records)
            yield partial(TreeRunFold.fold_records, records=self.columns, first=first, last=last)


@dataclass(frozen=True)
class Progress:
    """A rank's progress record: it begins an epoch, or, without one, is a tombstone."""

    rank: RankId
    epoch: Epoch | None

    def steps(self, _: int) -> Iterator[Callable[[TreeRunFold], object]]:
        """One step, whatever the batch is."""
        epoch = self.epoch
        if epoch is None:
            yield lambda fold: fold.forget_rank(self.rank)
        else:
            yield lambda fold: fold.enter_epoch(self.rank, epoch)


def event(rng: random.Random, prompts: list[list[int]]) -> KvEvent:
    """A store from the root, a hole, an evicted tail or a clear, so that runs are split, joined, removed, created."""
    prompt = rng.choice(prompts)
    chain, last = np.array(chain_hashes(prompt), dtype=np.uint64), rng.randint(1, len(prompt))
    match rng.choices(("stored", "removed", "cleared"), (60, 39, 1))[0]:
        case "stored":
            return BlocksStored(None, chain[:last], np.array(prompt[:last], dtype=np.uint64), Tier.DEVICE)
        case "removed":
            first = rng.randrange(last)
            return BlocksRemoved(chain[first : rng.choice((first + 1, last))], Tier.DEVICE)
        case _:
            return AllBlocksCleared()


def history(rng: random.Random, prompts: list[list[int]]) -> list[Records | Progress]:
    """The changelog of an agent that applies random events, one per transaction; at the end every rank is forgotten."""
    runs, epochs = RunTable(), dict.fromkeys(RANKS, FIRST_EPOCH)
    for rank in RANKS:
        runs.end(rank, FIRST_EPOCH)
    log: list[Records | Progress] = []
    rows: list[tuple[bytes, bytes | None]] = []
    for _ in range(N_EVENTS):
        rank = rng.choice(RANKS)
        n_clears = runs.apply(rank, (event(rng, prompts),)).n_clears
        if n_clears:
            epochs[rank] = Epoch(epochs[rank].incarnation, epochs[rank].generation + n_clears)
            log += [Records(decode_runs(rows)[0]), Progress(rank, epochs[rank])]
            rows = []
        rows += runs.take_changes(1 << 30)
    return [*log, Records(decode_runs(rows)[0]), *(Progress(rank, None) for rank in RANKS)]


def answer(fold: TreeRunFold, query: HashArray) -> Answer:
    return frozenset((rank.worker_id, blocks) for rank, blocks in fold.find_matches(query).scores.items())


@pytest.mark.parametrize("batch", [1, 16, 500])
def test_every_answer_is_correct_for_some_prefix_of_the_records(batch: int) -> None:
    """No answer shows a part of a record, whatever the size of the writer's batches."""
    rng = random.Random(batch)
    stem = [rng.randrange(1 << 60) for _ in range(40)]
    prompts = [
        stem[: rng.randint(5, 40)] + [rng.randrange(1 << 60) for _ in range(rng.randint(1, 60))] for _ in range(5)
    ]
    queries = [np.array(prompt, dtype=np.uint64) for prompt in prompts]

    dry, log = TreeRunFold(), history(rng, prompts)
    allowed: list[set[Answer]] = [{frozenset()} for _ in queries]
    # All cycles go through the same states, since every rank is forgotten at the end of each.
    for part in log:
        for step in part.steps(1):
            step(dry)
            for query, answers in zip(queries, allowed, strict=True):
                answers.add(answer(dry, query))
        check(dry)
    assert len(dry) == 0

    fold = TreeRunFold()
    failures: list[BaseException] = []
    stop = threading.Event()

    def write() -> None:
        try:
            while not stop.is_set():
                for part in log:
                    for step in part.steps(batch):
                        step(fold)
        except BaseException as exc:
            failures.append(exc)

    writer = threading.Thread(target=write)
    writer.start()
    n_changed = 0
    before: list[Answer] = [frozenset()] * len(queries)
    try:
        for _ in range(N_ROUNDS):
            for number, query in enumerate(queries):
                seen = answer(fold, query)
                assert seen in allowed[number], f"no prefix gives {sorted(seen)} for query {number}"
                n_changed += seen != before[number]
                before[number] = seen
            time.sleep(0)  # lets the writer take the GIL
    finally:
        stop.set()
        writer.join()
    assert not failures
    assert n_changed > 100  # the writer was writing during the queries
    check(fold)
    assert sorted(fold.members()) == sorted(dry.members()) == []
