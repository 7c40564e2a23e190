"""Long histories for an index and for a fold, compared with the reference: `python -m tests.soak`.

An index is a store of runs and a fold of its records, as agents and routers have them (tests.helpers.folded_index).

What lives here: playing a history to an index, and reporting where it differs. test_index_histories
does the same with short histories. What must not: the generation of histories (tests.helpers.reference_index).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Sequence
from typing import assert_never

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from streams.core.ids import RankId
from streams.core.index.tree_fold import TreeRunFold
from streams.core.runs import Run, RunKey
from streams.tables.records import PROGRESS_KEY, RUN_KEY, decode_progress, decode_run
from tests.helpers.folded_index import FoldedIndex, UnknownParent
from tests.helpers.invariants import check
from tests.helpers.reference import Member, overlap_of
from tests.helpers.reference_index import Answer, IndexHistory, Query, RankGone, Step
from tests.helpers.table_logs import Record, State, compacted, random_log

#: Operations in one history: enough to fill and empty ranks many times, and few enough to repeat while debugging.
HISTORY_OPERATIONS = 2_000

#: Operations between two comparisons of all facts, which take as long as a few hundred operations.
COMPARE_EVERY = 500

#: Batches of engines in one history of run records, with about four records each.
FOLD_BATCHES = 120

Chains = dict[int, tuple[int | None, int]]


class Differs(AssertionError):
    """An index or fold differs from the reference; the message names it, the seed and the operation."""


def play(seed: int, n_operations: int = HISTORY_OPERATIONS, make_index: type[FoldedIndex] = FoldedIndex) -> None:
    """Play one history to an index. Raises Differs."""
    rng = random.Random(seed)
    history = IndexHistory(rng)
    index = make_index()
    step, number = None, 0
    try:
        for number, step in enumerate(history.steps(n_operations)):
            _apply(index, step, history)
            if number % COMPARE_EVERY == COMPARE_EVERY - 1:
                _compare(index, history)
        _compare(index, history)
        index.check()
        _compare_rebuilt(index.rebuilt(seed), history)
    except Exception as exc:
        raise Differs(f"seed {seed}, operation {number} of {n_operations}: {step}") from exc


def _apply(index: FoldedIndex, step: Step, history: IndexHistory) -> None:
    """Apply one operation, and compare its result with that of the reference."""
    name, action = type(index).__name__, step.action
    match action:
        case Query():
            answer = index.find_matches(action.local)
            assert Answer(dict(answer.scores), dict(answer.by_tier)) == step.expected, (name, answer, step.expected)
        case BlocksStored() if step.expected is False:
            _refused(index, step.rank, action)
        case BlocksStored():
            index.store(step.rank, action.tier, action.parent, action.engine, action.local)
        case BlocksRemoved():
            unknown = index.remove(step.rank, action.tier, action.engine)
            assert unknown == step.expected, (name, unknown, step.expected)
        case AllBlocksCleared():
            index.clear(step.rank)
        case RankGone():
            index.remove_rank(step.rank)
        case _:
            assert_never(action)
    if not isinstance(action, Query):
        assert len(index) == len(history.reference), (name, len(index), len(history.reference))


def _refused(index: FoldedIndex, rank: RankId, event: BlocksStored) -> None:
    """Assert that a store after an unknown parent raises and changes nothing.

    In a large index, only the number of facts is compared.
    """
    before = set(index.members()) if len(index) < COMPARE_EVERY else len(index)
    try:
        index.store(rank, event.tier, event.parent, event.engine, event.local)
    except UnknownParent:
        pass
    else:
        raise AssertionError(f"{type(index).__name__} accepted a store after an unknown parent")
    assert before == (set(index.members()) if isinstance(before, set) else len(index))


def _compare(index: FoldedIndex, history: IndexHistory) -> None:
    found = {(rank, tier, int(name)) for rank, tier, name in index.members()}
    _same(type(index).__name__, found, history.reference.members())


def _same(name: str, found: set[Member], expected: set[Member]) -> None:
    if found != expected:
        more, less = sorted(found - expected)[:3], sorted(expected - found)[:3]
        raise AssertionError(f"{name} holds {len(found)} facts, not {len(expected)}; additional {more}, missing {less}")


def _compare_rebuilt(copy: FoldedIndex, history: IndexHistory) -> None:
    """Assert that an index rebuilt from the records holds the same facts and gives the same answers."""
    _compare(copy, history)
    copy.check()
    for step in history.queries(20):
        _apply(copy, step, history)


def play_fold(seed: int, n_batches: int = FOLD_BATCHES) -> None:
    """Write a history as run records, and fold them in every order in which a reader may see them. Raises Differs."""
    rng = random.Random(seed)
    log = random_log(seed, n_batches, rng.choice((1, 2, 4, 9)), rng.randint(1, 8))
    last = log.states[-1]
    table = compacted(log.records)
    chains = _chains(log.records)
    try:
        following = TreeRunFold()
        for transaction, state in zip(log.transactions, log.states, strict=True):
            fold_records(following, transaction, rng)
            _compare_fold(following, state, chains, rng)
        fold_records(following, log.records, rng)  # the whole log again
        _compare_fold(following, last, chains, rng)
        for tombstones in (False, True):
            shuffled = [record for record in table.items() if tombstones or record[1] is not None]
            shuffled += rng.sample(shuffled, len(shuffled) // 3)  # some of them twice
            rng.shuffle(shuffled)
            fold = TreeRunFold()
            fold_records(fold, shuffled, rng)
            _compare_fold(fold, last, chains, rng)
        fold = TreeRunFold()
        fold_records(fold, _with_compaction(log.records, rng), rng)
        _compare_fold(fold, last, chains, rng)
        for rank in last.epochs:
            fold.forget_rank(rank)
        assert not len(fold) and not fold.ranks() and not list(fold.members())
        check(fold)
    except Exception as exc:
        raise Differs(f"seed {seed}, a fold of {n_batches} batches") from exc


def fold_records(fold: TreeRunFold, records: Iterable[Record], rng: random.Random) -> None:
    """Fold the index's records like a view does, with runs in batches of any size."""
    keys: list[RunKey] = []
    runs: list[Run | None] = []
    for key, value in records:
        if key.startswith(PROGRESS_KEY.prefix):
            fold.fold(keys, runs)
            keys, runs = [], []
            if value is None:
                fold.forget_rank(PROGRESS_KEY.parse(key))
            else:
                progress = decode_progress(key, value)
                fold.enter_epoch(progress.rank, progress.epoch)
        elif key.startswith(RUN_KEY.prefix):  # other records are chunks of restatements, which only agents read
            keys.append(RUN_KEY.parse(key))
            runs.append(None if value is None else decode_run(key, value))
            if rng.random() < 0.1:
                fold.fold(keys, runs)
                keys, runs = [], []
    fold.fold(keys, runs)


def _with_compaction(records: Sequence[Record], rng: random.Random) -> list[Record]:
    """The records that a reader sees if compaction runs meanwhile: replaced values may be missing."""
    last = {key: number for number, (key, _) in enumerate(records)}
    share = rng.random()
    return [record for number, record in enumerate(records) if last[record[0]] == number or rng.random() > share]


def _chains(records: Iterable[Record]) -> Chains:
    """Parent and local hash of each block in any record."""
    chains: Chains = {}
    for key, value in records:
        if value is not None and key.startswith(RUN_KEY.prefix):
            run = decode_run(key, value)
            before: int | None = run.parent
            for block, local in zip(run.sequence, run.local, strict=True):
                chains[block] = before, local
                before = block
    return chains


def _compare_fold(fold: TreeRunFold, state: State, chains: Chains, rng: random.Random) -> None:
    found = {(rank, tier, int(block)) for rank, tier, block in fold.members()}
    _same("the fold", found, state.members)
    assert len(fold) == len(found)
    assert {rank: fold.epoch_of(rank) for rank in fold.ranks()} == state.epochs
    check(fold)
    expected = dict.fromkeys(state.epochs, (0, 0))
    for rank, tier, block in found:
        n_blocks, digest = expected[rank]
        fact = xxhash.xxh3_64_intdigest(bytes([tier]) + block.to_bytes(8, "little"))
        expected[rank] = n_blocks + 1, digest ^ fact
    assert {rank: fold.facts(rank) for rank in state.epochs} == expected
    blocks = [block for _, _, block in state.members]
    for asked in rng.sample(blocks, min(3, len(blocks))):
        path: list[int] = [rng.getrandbits(64)]  # one block more than any rank holds
        before: int | None = asked
        while before in chains:
            before, local = chains[before]
            path.append(local)
        if before is not None:
            continue  # stored and removed in one transaction, so no record contains it
        answer = fold.find_matches(np.array(path[::-1], dtype=np.uint64))
        assert answer.scores == overlap_of(state.members, path[::-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Play histories until enough operations are done; prints the seed of the first difference and returns 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, help="seed of the first history; the others use the following numbers")
    options = parser.parse_args(arguments)
    if options.operations < 1:
        parser.error(f"--operations is {options.operations}; at least one must be played")
    first = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    console = Console()
    console.print(f"first seed {first}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("operations", total=options.operations)
        seed = first
        while not progress.finished:
            progress.update(task, description=f"seed {seed}")
            try:
                play(seed)
                play_fold(seed)
            except Differs as exc:
                console.print(f"{exc}: {exc.__cause__!r}", soft_wrap=True, markup=False, highlight=False)
                console.print(f"to repeat: python -m tests.soak --operations 1 --seed {seed}", soft_wrap=True)
                return 1
            progress.update(task, advance=HISTORY_OPERATIONS)
            seed += 1
    console.print(f"no difference in seeds {first} to {seed - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
