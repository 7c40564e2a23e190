"""`python -m benchmarks.decision`: the time of one routing decision inside the process, and of each of its parts.

What lives here: a fleet of ranks that hold prompts and run requests, and the steps of Router.route between the parsed
request and the answer: hash, match, cost and selection, booking. What must not: HTTP and Kafka. The time for encoding a
booking's record is listed separately. Exits with 1 if the chosen rank is not the one with the lowest cost.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from rich.console import Console

from benchmarks.ours import clock
from benchmarks.report import OURS, Bar, Report, Samples
from streams import __version__
from streams.codec import encode_load
from streams.core.hashing import pack_hashes, request_hashes
from streams.core.ids import DpRank, EngineHash, RankId, Tier, WorkerId
from streams.core.index.run_tree import RunTreeIndex
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId, BookingPhase
from streams.core.routing.decision import Chooser, RoutePolicy, booking_of

SEED = 7
BLOCK_SIZE = 16
#: The bar, for 64 ranks and 2,048 tokens.
P50_US_MAX = 28.0

#: Running requests of each rank, and prompts that each rank holds, including those of the running requests.
N_ACTIVE = 16
N_HELD = 64


class Fleet:
    """Ranks, the prompts that they hold and run; with `shared`, all prompts begin with the same quarter."""

    def __init__(self, n_ranks: int, n_tokens: int, *, shared: bool) -> None:
        self.rng = np.random.default_rng(SEED)
        self.n_tokens = n_tokens
        self.shared = self.rng.integers(0, 128_000, n_tokens // 4 if shared else 0, dtype=np.uint32)
        self.ranks = tuple(RankId(WorkerId(number), DpRank(0)) for number in range(1, n_ranks + 1))
        self.index = RunTreeIndex()
        self.loads = ActiveLoads(1 << 60)
        self.chooser = Chooser(random.Random(SEED))
        self.policy = RoutePolicy()
        self.prompts: list[bytes] = []
        for rank in self.ranks:
            for number in range(N_HELD):
                prompt = self.prompt()
                local, names = request_hashes(prompt, BLOCK_SIZE)
                known: EngineHash | None = None
                self.index.store(rank, Tier.DEVICE, known, names, local)
                self.prompts.append(prompt)
                if number < N_ACTIVE:
                    carried = Booking(rank, "m", n_tokens, pack_hashes(names), 0, len(local))
                    self.loads.add(BookingId(f"{rank}-{number}", "r", number), carried, 0)

    def prompt(self) -> bytes:
        """A new prompt, as packed tokens."""
        own = self.rng.integers(0, 128_000, self.n_tokens - len(self.shared), dtype=np.uint32)
        return np.concatenate([self.shared, own]).astype("<u4").tobytes()


Step = Callable[[], object]


def decide(fleet: Fleet, prompt: bytes, number: int) -> dict[str, int]:
    """Make one decision and its booking; return the ns of each step and of all steps."""
    begun = clock()
    local, chain = request_hashes(prompt, BLOCK_SIZE)
    sequence = pack_hashes(chain)
    hashed = clock()
    scores = fleet.index.find_matches(local)
    matched = clock()
    n_blocks = -(-fleet.n_tokens // BLOCK_SIZE)
    decision = fleet.chooser.choose(
        fleet.policy,
        fleet.ranks,
        scores,
        fleet.loads,
        sequence=sequence,
        request_blocks=n_blocks,
        block_size=BLOCK_SIZE,
    )
    chosen = clock()
    booking = booking_of(
        decision.chosen,
        model="m",
        sequence=sequence,
        n_tokens=fleet.n_tokens,
        request_blocks=n_blocks,
        block_size=BLOCK_SIZE,
    )
    booking_id = BookingId(str(number), "bench", number)
    fleet.loads.add(booking_id, booking, 0)
    booked = clock()
    encode_load(booking_id, BookingPhase.ADD, booking, 0)
    encoded = clock()
    if number % 50 == 0:
        costs = [terms.cost for terms in decision.candidates]
        if decision.chosen.cost != min(costs):
            raise SystemExit(f"rank {decision.chosen.rank} was chosen at {decision.chosen.cost}, {min(costs)} is there")
    fleet.loads.free(booking_id, 0)
    return {
        "hash": hashed - begun,
        "match": matched - hashed,
        "cost and selection": chosen - matched,
        "booking": booked - chosen,
        "all": booked - begun,
        "encode the record": encoded - booked,
    }


def measure(samples: Samples, case: str, fleet: Fleet, n_decisions: int, repeats: int) -> None:
    """Measure decisions; one rank holds half of the prompts, and the others are new."""
    prompts = [
        fleet.prompts[int(fleet.rng.integers(len(fleet.prompts)))] if number % 2 else fleet.prompt()
        for number in range(n_decisions)
    ]
    for repeat in range(repeats + 1):
        gc.collect()
        taken = [decide(fleet, prompt, number) for number, prompt in enumerate(prompts)]
        if repeat == 0:
            continue  # caches are filled
        for step in taken[0]:
            ns = [each[step] for each in taken]
            samples.add(case, f"{step} p50", "us", OURS, statistics.median(ns) / 1000)
            if step == "all":
                samples.add(case, "all p99", "us", OURS, statistics.quantiles(ns, n=100)[98] / 1000)


@click.command(help=__doc__)
@click.option("--ranks", default=64, show_default=True)
@click.option("--tokens", default=2048, show_default=True)
@click.option("--decisions", default=1000, show_default=True, help="of one repetition")
@click.option("--repeats", default=7, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None)
def main(ranks: int, tokens: int, decisions: int, repeats: int, json_file: Path | None) -> None:
    samples = Samples()
    for name, shared in (("shared system prompt", True), ("nothing shared", False)):
        fleet = Fleet(ranks, tokens, shared=shared)
        measure(samples, f"{ranks} ranks, {tokens} tokens, {name}", fleet, decisions, repeats)
    rows = samples.rows()
    totals = {row.case: row.value for row in rows if row.metric == "all p50"}
    wanted = (ranks, tokens) == (64, 2048)
    bar = Bar(
        f"a decision takes {P50_US_MAX:g} us at most at p50",
        max(totals.values()) <= P50_US_MAX if wanted else None,
        ", ".join(f"{value:.1f}" for value in totals.values()) + " us",
    )
    report = Report("decision", {"kvstreams": __version__}, rows, [bar])
    report.print(Console(width=None if sys.stdout.isatty() else 140))
    if json_file is not None:
        report.write(json_file)


if __name__ == "__main__":
    main()
