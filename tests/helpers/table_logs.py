"""The table's log without Kafka: a random history in transactions, and what both of its readers make of it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from streams.core.ids import Epoch, RankId
from streams.core.reducer.holdings import HoldingChanges
from streams.core.runs import Run, RunKey
from streams.kafka.records import decode_batch
from streams.router_api.knowledge.view import View
from streams.settings import Settings
from streams.tables.records import (
    CHUNK_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    decode_progress,
    decode_run,
    encode_progress,
    encode_run,
)
from tests.helpers.holdings import judge, members
from tests.helpers.invariants import check
from tests.helpers.plain_run_store import PlainHoldings, plain_holdings
from tests.helpers.reference import Member, ReferenceFleet, ReferenceInput, input_history

Record = tuple[bytes, bytes | None]

#: So few at a time that at most cuts some are still pending.
TOMBSTONES_MAX = 3


@dataclass
class State:
    """What two sides must agree on: blocks, epochs, silent ranks."""

    members: set[Member]
    epochs: dict[RankId, Epoch]
    silent: set[RankId] = field(default_factory=set)


@dataclass
class Log:
    """A judged history: its transactions, the batches of each, and the reference's state after each."""

    batches: list[list[ReferenceInput]] = field(default_factory=list)
    transactions: list[list[Record]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        return [record for transaction in self.transactions for record in transaction]


def written(changes: HoldingChanges[tuple[RunKey, Run | None]]) -> list[Record]:
    """Return the records of one transaction, as the agent writes them."""
    records: list[Record] = [(PROGRESS_KEY.pack(p.rank), encode_progress(p)) for p in changes.progress]
    records += [(CHUNK_KEY.pack(key), raw) for key, raw in changes.parked]
    return records + [(RUN_KEY.pack(key), None if run is None else encode_run(run)) for key, run in changes.runs]


def commit(holdings: PlainHoldings, batches: Iterable[ReferenceInput]) -> list[Record]:
    for one in batches:
        judge(holdings, one)
    return written(holdings.take_changes(TOMBSTONES_MAX))


def judged(history: list[ReferenceInput], rng: random.Random, batches_max: int) -> Log:
    """Judge a history in transactions of 1 to `batches_max` batches."""
    log, holdings, reference = Log(), plain_holdings(), ReferenceFleet()
    while history:
        n = rng.randint(1, batches_max)
        taken, history = history[:n], history[n:]
        log.batches.append(taken)
        log.transactions.append(commit(holdings, taken))
        for one in taken:
            reference.apply(one)
        silent = {rank for rank, state in reference.ranks.items() if state.silent}
        log.states.append(State(reference.members(), reference.epochs(), silent))
    return log


def random_log(seed: int, n_batches: int, n_ranks: int, batches_max: int, *, begins: bool | None = None) -> Log:
    """Judge a random history. begins: with announced incarnations and bridges; by default, in every second seed."""
    rng = random.Random(seed)
    announced = seed % 2 == 1 if begins is None else begins
    history = input_history(
        rng, n_batches, n_ranks, n_blocks_max=120, begins=announced, bridged=announced, silences=announced
    )
    return judged(history, rng, batches_max)


def compacted(records: Iterable[Record]) -> dict[bytes, bytes | None]:
    """Return the last value of each key, tombstones included, in the order of these last values."""
    table: dict[bytes, bytes | None] = {}
    for key, value in records:
        table.pop(key, None)
        table[key] = value
    return table


def recovered(table: dict[bytes, bytes | None]) -> PlainHoldings:
    """Return the holdings with which an agent starts from a table."""
    progress, runs, parked = [], [], []
    for key, value in table.items():
        if value is not None and key.startswith(PROGRESS_KEY.prefix):
            progress.append(decode_progress(key, value))
        elif value is not None and key.startswith(CHUNK_KEY.prefix):
            parked.append((CHUNK_KEY.parse(key), decode_batch(value), len(value)))
        elif value is not None:
            runs.append(decode_run(key, value))
    holdings = plain_holdings()
    holdings.load(progress, runs, parked)
    check(holdings)
    return holdings


def folded(records: Iterable[Record], view: View | None = None) -> View:
    view = view or View(Settings(), lambda: 0)
    for key, value in records:
        view.fold_index(key, value)
    return view


def state_of_view(view: View) -> State:
    found = {(rank, tier, int(block)) for rank, tier, block in view.index.members()}
    states = view.index.rank_states()
    return State(found, {state.rank: state.epoch for state in states}, {state.rank for state in states if state.silent})


def state_of_holdings(holdings: PlainHoldings) -> State:
    ranks = holdings.progress
    silent = {rank for rank, progress in ranks.items() if progress.silent}
    return State(members(holdings), {rank: progress.epoch for rank, progress in ranks.items()}, silent)
