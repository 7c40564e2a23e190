"""`python -m benchmarks.cxl`: what pooled blocks and labels of experts add to the time of a routing decision.

What lives here: decisions of a router over a view folded from records, with a million rows of pooled blocks and labels
on all held blocks, compared with the same fleet without either. What must not: HTTP and Kafka. Exits 1 if a choice is
not that of the cost formula, or if the scores are not those of the generated data.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from benchmarks.ours import clock
from benchmarks.report import OURS, Bar, Report, Samples, ratio_bar, select, wide_console
from streams import __version__
from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import MoeLabels
from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import DpRank, EngineHash, HashArray, Incarnation, RankId, SequenceHash, WorkerId
from streams.core.workers import Worker
from streams.cxl.events import CxlPool
from streams.cxl.records import BlockKey, BlockRow, Placement, block_key, encode_block, encode_pool, pool_key
from streams.kafka.records import encode_worker
from streams.lab.engines.held_chains import runs_of_chain
from streams.router_api.deciding.router import Router
from streams.router_api.messages.requests import RouteRequest
from streams.settings import Settings
from streams.tables.records import RUN_KEY, encode_run

SEED = 7
BLOCK_SIZE = 16
N_TOKENS = 2048
N_BLOCKS = N_TOKENS // BLOCK_SIZE
#: Blocks that all prompts share at the start, and blocks that a prompt's rank holds before the pooled ones.
N_SHARED = N_BLOCKS // 4
N_OWN = N_BLOCKS // 2
#: Blocks at the end of a prompt that differ from the known prompt.
N_NEW = N_BLOCKS // 8
#: Prompts per rank, of which the rank holds the first half.
N_HELD = 64
N_POOLS = 8
#: The largest accepted ratios: with both to without either, and with the query for them to without it.
WITH_MAX, WITHOUT_MAX = 1.5, 1.05

BOTH, NEITHER, WITHOUT_QUERY = "with pools and labels", "with neither", "with neither, no query"

LABELS = MoeLabels(2, 7, 3)
QUERY = {"layer_id": 2, "expert_ids": [7], "expert_group": 3}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and where its blocks are.

    tokens: as in the body of a request. holder: the worker that holds the first half, None for none. pool: the pool
    with the rest, up to n_known blocks, None for none.
    """

    tokens: bytes
    sequence: HashArray
    local: HashArray
    holder: int | None
    pool: int | None
    n_known: int = N_BLOCKS


class Fleet:
    """A fleet of ranks, and the prompts that they hold."""

    def __init__(self, n_ranks: int, n_pooled: int) -> None:
        self.rng = np.random.default_rng(SEED)
        self.n_ranks = n_ranks
        self._shared = self.rng.integers(0, 128_000, N_SHARED * BLOCK_SIZE, dtype=np.uint32)
        self.prompts = [
            self.prompt(holder, int(self.rng.integers(N_POOLS)))
            for holder in range(1, n_ranks + 1)
            for _ in range(N_HELD)
        ]
        self.n_rows = (N_BLOCKS - N_OWN) * len(self.prompts)
        while self.n_rows < n_pooled:
            self.prompts.append(self.prompt(None, int(self.rng.integers(N_POOLS))))
            self.n_rows += N_BLOCKS - N_SHARED

    def prompt(self, holder: int | None, pool: int | None) -> Prompt:
        own = self.rng.integers(0, 128_000, N_TOKENS - len(self._shared), dtype=np.uint32)
        tokens = np.concatenate([self._shared, own]).astype("<u4").tobytes()
        local = local_hashes(tokens, BLOCK_SIZE)
        return Prompt(tokens, sequence_hashes(local), local, holder, pool)

    def with_new_end(self, prompt: Prompt) -> Prompt:
        """Return the prompt with a different last eighth, which no rank and no pool has."""
        end = self.rng.integers(0, 128_000, N_NEW * BLOCK_SIZE, dtype=np.uint32).astype("<u4").tobytes()
        tokens = prompt.tokens[: -len(end)] + end
        local = local_hashes(tokens, BLOCK_SIZE)
        return Prompt(tokens, sequence_hashes(local), local, prompt.holder, prompt.pool, N_BLOCKS - N_NEW)

    def members(self, pool: int) -> tuple[WorkerId, ...]:
        """Return the members of a pool: every eighth worker and its neighbour."""
        first = range(pool, pool + self.n_ranks, 8)
        return tuple(WorkerId(1 + (each + next_to) % self.n_ranks) for each in first for next_to in (0, 1))

    def router(self, *, pooled: bool, labelled: bool) -> Router:
        """Return a router that has read all records."""
        router = Router(Settings(router_replica_sync=False, router_seed=SEED))
        router.feeds.pending = dict  # type: ignore[method-assign]  # nothing left to read
        for number in range(1, self.n_ranks + 1):
            worker = Worker(WorkerId(number), "http://w", "m", BLOCK_SIZE)
            router.view.fold_worker(str(number).encode(), encode_worker(worker))
        for prompt in self.prompts:
            if prompt.holder is not None:
                router.view.fold_index_batch(list(self._runs(prompt, prompt.holder, labelled=labelled)))
        if pooled:
            for pool in range(N_POOLS):
                record = CxlPool(f"pool{pool}", members=self.members(pool))
                router.view.fold_worker(pool_key(record.pool_id), encode_pool(record))
            for prompt in self.prompts:
                for key, value in self._rows(prompt):
                    router.view.fold_pooled(key, value)
        return router

    def _runs(self, prompt: Prompt, holder: int, *, labelled: bool) -> Iterator[tuple[bytes, bytes]]:
        rank = RankId(WorkerId(holder), DpRank(0))
        for run in runs_of_chain(rank, prompt.local, last=N_OWN, labels=LABELS if labelled else None):
            yield RUN_KEY.pack(run.key), encode_run(run)

    def _rows(self, prompt: Prompt) -> Iterator[tuple[bytes, bytes]]:
        placement = Placement(CxlMemoryState.CXL_POOLED, f"pool{prompt.pool}", 0, (), "m", Incarnation(1), 0)
        owner = RankId(WorkerId(prompt.holder or 1), DpRank(0))
        sequence = prompt.sequence.tolist()
        for at in range(N_SHARED if prompt.holder is None else N_OWN, N_BLOCKS):
            row = BlockRow(placement, SequenceHash(sequence[at - 1]), at, EngineHash(at))
            yield block_key(BlockKey(SequenceHash(sequence[at]), owner, placement.pool_id)), encode_block(row)


def request(*, moe: bool, explain: bool = False) -> RouteRequest:
    body: dict[str, Any] = {"update_states": False, "explain": explain}
    if moe:
        body["router_config_override"] = {"moe_query": QUERY}
    return msgspec.convert(body, RouteRequest)


def check(fleet: Fleet, router: Router, prompt: Prompt, body: RouteRequest, *, supplementary: bool) -> None:
    """Check that the scores are those of the generated data, and that the cheapest rank was chosen."""
    answer = router.route(body, prompt.tokens)
    members = set() if prompt.pool is None else set(fleet.members(prompt.pool))
    for each in answer.candidates or ():
        own = N_OWN if each.rank.worker_id == prompt.holder else N_SHARED
        reached = (
            prompt.n_known - own if each.rank.worker_id in members and (prompt.holder is None or own == N_OWN) else 0
        )
        wanted = (own, reached if supplementary else 0, own if supplementary else 0)
        found = (each.scores, each.cxl_accessible_scores, each.moe_scores)
        if found != wanted:
            raise SystemExit(f"worker {each.rank.worker_id} has scores {found}, but the data has {wanted}")
    if answer.cost != min(each.cost for each in answer.candidates or ()):
        raise SystemExit(f"worker {answer.rank.worker_id} was chosen at cost {answer.cost}, which is not the lowest")


def measure(router: Router, prompts: list[Prompt], body: RouteRequest) -> tuple[float, float]:
    """Return the median and mean time of a decision, in us."""
    taken = []
    for prompt in prompts:
        begun = clock()
        router.route(body, prompt.tokens)
        taken.append(clock() - begun)
    return statistics.median(taken) / 1000, statistics.fmean(taken) / 1000


@click.command(help=__doc__)
@click.option("--ranks", default=64, show_default=True)
@click.option("--pooled", default=1_000_000, show_default=True, help="rows of pooled blocks")
@click.option("--decisions", default=600, show_default=True, help="decisions per repetition")
@click.option("--repeats", default=15, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None)
def main(ranks: int, pooled: int, decisions: int, repeats: int, json_file: Path | None) -> None:
    samples = Samples()
    fleet = Fleet(ranks, pooled)
    neither = fleet.router(pooled=False, labelled=False)
    without_query = fleet.router(pooled=False, labelled=False)  # the same, without the query for supplementary matches
    without_query.view.supplementary = lambda *_, **__: None  # type: ignore[method-assign]
    begun = time.monotonic()
    full = fleet.router(pooled=True, labelled=True)
    facts = full.view.facts
    case = f"{ranks} ranks, {N_TOKENS} tokens, {facts.n_pooled()} rows, {facts.labelled()[0]} labelled records"
    samples.add(case, "records to a view", "s", OURS, time.monotonic() - begun)
    # A third is held and pooled, a third is only pooled, a third is new except for the shared start.
    rng = random.Random(SEED)
    held = [prompt for prompt in fleet.prompts if prompt.holder is not None]
    only_pooled = [prompt for prompt in fleet.prompts if prompt.holder is None] or held
    kinds = [held, only_pooled, [fleet.prompt(None, None) for _ in range(decisions // 3)]]
    prompts = [rng.choice(kind) for _, kind in zip(range(decisions), itertools.cycle(kinds), strict=False)]
    new_ends = [fleet.with_new_end(prompt) for prompt in prompts]
    series = (
        (BOTH, full, request(moe=True), prompts),
        (NEITHER, neither, request(moe=False), prompts),
        (WITHOUT_QUERY, without_query, request(moe=False), prompts),
        (f"{BOTH}, new ends", full, request(moe=True), new_ends),
        (f"{NEITHER}, new ends", neither, request(moe=False), new_ends),
    )
    for _, router, body, these in series:
        supplementary = router is full
        for prompt in these[:: max(1, decisions // 100)]:
            check(fleet, router, prompt, request(moe=supplementary, explain=True), supplementary=supplementary)
        measure(router, these, body)  # fills the caches
    gc.collect()
    gc.freeze()
    found: dict[str, tuple[float, float]] = {}
    for repeat in range(repeats):
        for name, router, body, these in series if repeat % 2 else series[::-1]:
            found[name] = measure(router, these, body)
        for name, than in ((BOTH, NEITHER), (f"{BOTH}, new ends", f"{NEITHER}, new ends"), (NEITHER, WITHOUT_QUERY)):
            for metric, which in (("decision p50", 0), ("decision mean", 1)):
                samples.add(name, metric, "us", OURS, found[name][which])
                samples.add(name, metric, "us", than, found[than][which])
    rows = samples.rows()
    p50 = select(rows, "decision p50")
    bars: list[Bar] = [
        ratio_bar(
            f"with pools and labels a decision takes at most {WITH_MAX:g} times as long",
            [row for row in p50 if row.case.startswith(BOTH)],
            WITH_MAX,
        ),
        ratio_bar(
            f"with neither, the query for them takes at most {WITHOUT_MAX:g} times as long",
            [row for row in p50 if row.case == NEITHER],
            WITHOUT_MAX,
        ),
    ]
    report = Report("cxl", {"kvstreams": __version__}, rows, bars)
    report.print(wide_console())
    if json_file is not None:
        report.write(json_file)


if __name__ == "__main__":
    main()
