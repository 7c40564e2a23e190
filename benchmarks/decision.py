"""`python -m benchmarks.decision`: the time of one routing decision inside the process, and of each of its parts.

What lives here: a fleet of ranks that hold prompts and run requests, and the steps of Router.route between the parsed
request and the answer: hash, match, cost and selection, booking; and whole answers of a Router, from the parsed request
to JSON, for a small and for a large fleet. What must not: HTTP and Kafka. The time for encoding a booking's record is
listed separately. Exits with 1 if the chosen rank is not the one with the lowest cost.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from benchmarks.ours import clock
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams import __version__
from streams.core.bridge_pulses import BridgePulse
from streams.core.engine_metrics import MetricsReport, WorkerMetrics
from streams.core.hashing import pack_hashes, request_hashes
from streams.core.ids import DpRank, RankId, Tier, WorkerId
from streams.core.index.tree_fold import TreeRunFold
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId, BookingPhase
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.busy import BlocksInUse
from streams.core.routing.decision import Chooser
from streams.core.routing.request import FleetState, Matches, PromptBlocks, RoutePolicy, RoutingRequest
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import AnswerMode
from streams.core.workers import BridgeLease, Worker
from streams.kafka.applied_until import SourceOffset
from streams.kafka.clients import worker_key
from streams.kafka.load_records import encoded_load
from streams.kafka.records import PULSES, encode_metrics, encode_worker
from streams.lab.engines.held_chains import FIRST_EPOCH, runs_of_chain
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import ConfigOverride, RouteRequest
from streams.settings import Settings
from streams.tables.records import (
    PARTITION_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    PartitionRecord,
    SourceProgress,
    encode_partition,
    encode_progress,
    encode_run,
)

SEED = 7
BLOCK_SIZE = 16
#: The bar, for 64 ranks and 2,048 tokens.
P50_US_MAX = 28.0

#: The bar for mode expected-time, relative to mode kv.
EXPECTED_TIME_RATIO_MAX = 1.5

#: The bar for a large fleet: a whole answer takes at most this many times as long as in the small one.
LARGE_RATIO_MAX = 3.0

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
        self.index = TreeRunFold()
        self.loads = ActiveLoads(1 << 60)
        self.chooser = Chooser(random.Random(SEED))
        self.policy = RoutePolicy()
        capacity = BlocksInUse(np.full(n_ranks, 100_000, dtype=np.int64), np.zeros(n_ranks, dtype=np.int64))
        self.state = FleetState(blocks_of=lambda _: capacity)
        self.prompts: list[bytes] = []
        for rank in self.ranks:
            for number in range(N_HELD):
                prompt = self.prompt()
                local, names = request_hashes(prompt, BLOCK_SIZE)
                runs = list(runs_of_chain(rank, local))
                self.index.fold([run.key for run in runs], runs)
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
    prompt_in_blocks = PromptBlocks(sequence, fleet.n_tokens, n_blocks, BLOCK_SIZE, "m")
    request = RoutingRequest(fleet.policy, prompt_in_blocks, Matches(fleet.ranks, scores), fleet.state)
    decision = fleet.chooser.choose(request, fleet.loads)
    chosen = clock()
    booking = decision.booking()
    booking_id = BookingId(str(number), "bench", number)
    fleet.loads.add(booking_id, booking, 0)
    booked = clock()
    encoded_load(booking_id, BookingPhase.ADD, booking, 0)
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


def compare(samples: Samples, case: str, fleet: Fleet, n_decisions: int, repeats: int) -> None:
    """Measure decisions of mode kv and of expected-time in turns, on the same loads and prompts.

    Each decision is followed by one of the other mode, so that noise of the machine meets both alike.
    """
    prompts = [
        fleet.prompts[int(fleet.rng.integers(len(fleet.prompts)))] if number % 2 else fleet.prompt()
        for number in range(n_decisions)
    ]
    policies = (RoutePolicy(), RoutePolicy(mode=RouterMode.EXPECTED_TIME))
    for repeat in range(repeats + 1):
        gc.collect()
        taken: dict[RouterMode, list[int]] = {policy.mode: [] for policy in policies}
        for number, prompt in enumerate(prompts):
            for fleet.policy in policies if number % 2 else reversed(policies):
                fleet.loads.advance(number)
                taken[fleet.policy.mode].append(decide(fleet, prompt, number)["all"])
        if repeat:
            for mode, ns in taken.items():
                samples.add(case, f"{mode} p50", "us", OURS, statistics.median(ns) / 1000)
    fleet.policy = policies[0]


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


class RouterFleet:
    """A Router without Kafka whose ranks hold prompts, are exact and report metrics; records are folded directly.

    tiers: each rank holds its first prompt in the first of them, its second one in the second, and so on.
    """

    def __init__(self, n_ranks: int, n_tokens: int, tiers: Sequence[Tier] = (Tier.DEVICE,), **changes: object) -> None:
        self.rng = np.random.default_rng(SEED)
        self.n_tokens = n_tokens
        tolerant = {"behind_after_ms": 60_000, "stale_after_ms": 60_000}  # of a busy machine
        given = {"router_replica_sync": False, "kafka": "127.0.0.1:1", **tolerant, **changes}
        self.router = Router(Settings(block_size=BLOCK_SIZE, **given))  # type: ignore[arg-type]
        self.router.feeds.pending = dict  # type: ignore[method-assign]  # nothing is left to be read
        self.shared = self.rng.integers(0, 128_000, n_tokens // 4, dtype=np.uint32)
        self.prompts: list[bytes] = []
        self.worker_ids = list(range(1, n_ranks + 1))
        for worker_id in self.worker_ids:
            self._register(worker_id)
            records = []
            for number in range(N_HELD // 8):
                self.prompts.append(self.prompt())
                records += self._held(worker_id, self.prompts[-1], number, tiers[number % len(tiers)])
            assert not self.router.view.fold_index_batch(records)
        self.prove()

    def prompt(self) -> bytes:
        """A new prompt, as packed tokens; all of them begin with the same quarter."""
        own = self.rng.integers(0, 128_000, self.n_tokens - len(self.shared), dtype=np.uint32)
        return np.concatenate([self.shared, own]).astype("<u4").tobytes()

    def prove(self) -> None:
        """Fold what keeps answers exact: the bridge and every owner are running, and everything is applied."""
        view, now_ms = self.router.view, time.monotonic_ns() // 1_000_000
        view.fold_report(PULSES.keys.pack(_BRIDGE), PULSES.encode(BridgePulse(_BRIDGE, 1)))
        for partition in range(self.router.settings.partitions):
            record = PartitionRecord(partition, 0, "bench", (SourceProgress("events", "a", 0, 0, 1, 0),))
            view.fold_index(PARTITION_KEY.pack(partition), encode_partition(record))
            view.note_ends(partition, now_ms, {"events": SourceOffset("a", 1)})

    def renew(self, worker_id: int) -> None:
        """Fold the records that a fleet at work writes all the time: a lease, progress and metrics of one worker."""
        rank = RankId(WorkerId(worker_id), DpRank(0))
        self._register(worker_id)
        self.router.view.fold_index(PROGRESS_KEY.pack(rank), encode_progress(_progress(rank)))
        report = MetricsReport(rank, WorkerMetrics(kv_total_blocks=100_000, kv_active_blocks=worker_id), 60_000, 0, 0)
        self.router.view.fold_report(worker_key(rank.worker_id), encode_metrics(report))

    def _register(self, worker_id: int) -> None:
        lease = BridgeLease(_BRIDGE, 1, 6000, 1)
        url = f"http://engine-{worker_id}:8000"
        # With an address of events, since what engines without events hold is predicted.
        worker = Worker(WorkerId(worker_id), url, "m", BLOCK_SIZE, lease=lease, events_endpoint="tcp://engine:5557")
        self.router.view.fold_worker(worker_key(worker.worker_id), encode_worker(worker))

    def _held(self, worker_id: int, prompt: bytes, number: int, tier: Tier) -> list[tuple[bytes, bytes | None]]:
        rank = RankId(WorkerId(worker_id), DpRank(0))
        local, _ = request_hashes(prompt, BLOCK_SIZE)
        records: list[tuple[bytes, bytes | None]] = [
            (RUN_KEY.pack(run.key), encode_run(run)) for run in runs_of_chain(rank, local, tier=tier)
        ]
        records.append((PROGRESS_KEY.pack(rank), encode_progress(_progress(rank, number))))
        return records


_BRIDGE = "bench"


def _progress(rank: RankId, sequence: int = N_HELD) -> Progress:
    return Progress(rank, FIRST_EPOCH, sequence, health=Health.EXACT, model="m", block_size=BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Asked:
    """A kind of request: fields of its body, settings of the router, and whether records arrive in between."""

    name: str
    fields: Callable[[RouterFleet, int], dict[str, Any]]
    settings: dict[str, object]
    renewals: bool = False


def _nothing(fleet: RouterFleet, number: int) -> dict[str, Any]:  # noqa: ARG001
    return {}


def _without_one(fleet: RouterFleet, number: int) -> dict[str, Any]:
    return {"excluded_worker_ids": [fleet.worker_ids[number % len(fleet.worker_ids)], 10**6 + number]}


ASKED = (
    Asked("answer", _nothing, {}),
    Asked("answer, records arrive", _nothing, {}, renewals=True),
    Asked("answer, a worker excluded", _without_one, {}),
    Asked(
        "answer, busy thresholds",
        _nothing,
        {"active_prefill_tokens_threshold": 10_000_000, "active_decode_blocks_threshold": 0.9},
        renewals=True,
    ),
    Asked("answer, temperature", lambda *_: {"router_config_override": ConfigOverride(router_temperature=0.5)}, {}),
)


def measure_answers(samples: Samples, n_ranks: int, n_tokens: int, n_decisions: int, repeats: int) -> None:
    """Measure whole answers: route, book, assess trust, write JSON. Each booking is freed between the measurements."""
    for asked in ASKED:
        fleet = RouterFleet(n_ranks, n_tokens, (Tier.DEVICE,), **asked.settings)
        prompts = [
            fleet.prompts[int(fleet.rng.integers(len(fleet.prompts)))] if number % 2 else fleet.prompt()
            for number in range(n_decisions)
        ]
        for repeat in range(repeats + 1):
            gc.collect()
            taken: list[int] = []
            for number, prompt in enumerate(prompts):
                if number % 50 == 0:
                    fleet.prove()
                request = RouteRequest(request_id=str(number), **asked.fields(fleet, number))
                if asked.renewals:
                    fleet.renew(fleet.worker_ids[number % n_ranks])
                begun = clock()
                answer = fleet.router.route(request, prompt)
                orjson.dumps(answer_json(answer))
                taken.append(clock() - begun)
                if answer.trust.mode is not AnswerMode.EXACT:
                    raise SystemExit(f"an answer of an exact fleet is {answer.trust}")
                fleet.router.report_phase(str(number), BookingPhase.FREE)
            if repeat:
                case = f"whole answers, {n_ranks} ranks"
                samples.add(case, f"{asked.name} p50", "us", OURS, statistics.median(taken) / 1000)
                p99 = statistics.quantiles(taken, n=100)[98]
                samples.add(case, f"{asked.name} p99", "us", OURS, p99 / 1000)
        fleet.router._kafka.close()  # otherwise it keeps trying to connect


@click.command(help=__doc__)
@click.option("--ranks", default=64, show_default=True)
@click.option("--tokens", default=2048, show_default=True)
@click.option("--decisions", default=1000, show_default=True, help="of one repetition")
@click.option("--repeats", default=7, show_default=True)
@click.option("--large", default=1000, show_default=True, help="ranks of the large fleet")
@click.option("--answers/--no-answers", default=True, show_default=True, help="measure whole answers as well")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None)
def main(
    ranks: int, tokens: int, decisions: int, repeats: int, large: int, answers: bool, json_file: Path | None
) -> None:
    samples = Samples()
    for n_ranks in (ranks, large):
        for name, shared in (("shared system prompt", True), ("nothing shared", False)):
            fleet = Fleet(n_ranks, tokens, shared=shared)
            measure(samples, f"{n_ranks} ranks, {tokens} tokens, {name}", fleet, decisions, repeats)
            compare(samples, f"modes, {n_ranks} ranks, {tokens} tokens, {name}", fleet, decisions, repeats)
        if answers:
            measure_answers(samples, n_ranks, tokens, decisions, repeats)
    rows = samples.rows()
    totals = {row.case: row.value for row in rows if row.metric == "all p50" and row.case.startswith(f"{ranks} ")}
    wanted = (ranks, tokens) == (64, 2048)
    bar = Bar(
        f"a decision takes {P50_US_MAX:g} us at most at p50",
        max(totals.values()) <= P50_US_MAX if wanted else None,
        ", ".join(f"{value:.1f}" for value in totals.values()) + " us",
    )
    medians = {(row.case, row.metric): row.value for row in rows if row.case.startswith(f"modes, {ranks} ")}
    cases = sorted({case for case, _ in medians})
    ratios = [medians[case, "expected-time p50"] / medians[case, "kv p50"] for case in cases]
    of_modes = Bar(
        f"a decision by expected-time takes at most {EXPECTED_TIME_RATIO_MAX:g} times as long as one of mode kv",
        max(ratios) <= EXPECTED_TIME_RATIO_MAX if wanted else None,
        ", ".join(f"{ratio:.2f}" for ratio in ratios),
    )
    bars = [bar, of_modes]
    for asked in ASKED if answers else ():
        of = {row.case: row.value for row in rows if row.metric == f"{asked.name} p50"}
        small_us, large_us = (of[f"whole answers, {n_ranks} ranks"] for n_ranks in (ranks, large))
        name = f"{asked.name}: {large} ranks take at most {LARGE_RATIO_MAX:g} times as long as {ranks}"
        figures = f"{large_us / small_us:.2f}: {large_us:.1f} and {small_us:.1f} us"
        bars.append(Bar(name, large_us <= LARGE_RATIO_MAX * small_us, figures))
    report = Report("decision", {"kvstreams": __version__}, rows, bars)
    report.print(wide_console())
    if json_file is not None:
        report.write(json_file)


if __name__ == "__main__":
    main()
