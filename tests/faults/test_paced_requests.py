"""Requests that come one at a time find no load anywhere, and are still spread where they have little in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import RankId, SequenceHash
from streams.core.loads.bookings import BookingPhase
from streams.core.routing.selection import RouterMode
from streams.router_api.deciding import compose
from streams.tables.records import RUN_KEY, encode_run
from tests.helpers.routers import ask, router_of
from tests.helpers.run_records import runs_of
from tests.helpers.views import BLOCK_SIZE, Clock, hold, rank, register

pytestmark = pytest.mark.first_ring()

MODES = (RouterMode.KV, RouterMode.EXPECTED_TIME)
N_REQUESTS = 80


class PacedFleet:
    """Engines that start with empty caches, their router, and a client that waits for each answer."""

    def __init__(self, clock: Clock, n_workers: int, dp_size: int = 1, **knobs: Any) -> None:
        self.clock = clock
        self.ranks = [rank(1 + number // dp_size, number % dp_size) for number in range(n_workers * dp_size)]
        self.router = router_of(0, router_seed=1, **knobs)
        self._n_asked = 0
        self._stored: set[RankId] = set()  # ranks that have the common blocks
        for worker_id in range(1, n_workers + 1):
            register(self.router.view, worker_id, dp_size=dp_size, kv_total_blocks=200_000)
        for each in self.ranks:
            hold(self.router.view, each, local_hashes([], BLOCK_SIZE))

    def send(self, tokens: list[int], n_shared: int, pause_ms: int = 1_000) -> RankId:
        """Send a prompt whose first n_shared tokens are common; its engine stores it, and the answer ends."""
        self._n_asked += 1
        name = f"r{self._n_asked}"
        answer = ask(self.router, name, tokens)
        chosen = rank(answer["worker_id"], answer["dp_rank"])
        self._store(chosen, tokens, n_shared // BLOCK_SIZE)
        self.clock.now_ms += 50
        self.router.report_phase(name, BookingPhase.PREFILL)
        self.clock.now_ms += 200
        self.router.report_phase(name, BookingPhase.FREE)
        self.clock.now_ms += pause_ms
        return chosen

    def counts(self, prompts: Iterable[list[int]], n_shared: int, pause_ms: int = 1_000) -> list[int]:
        """How many of these prompts each rank gets."""
        chosen = Counter(self.send(prompt, n_shared, pause_ms) for prompt in prompts)
        return [chosen[each] for each in self.ranks]

    def join(self, worker_id: int) -> None:
        """Another engine is there, with an empty cache."""
        register(self.router.view, worker_id, kv_total_blocks=200_000)
        hold(self.router.view, rank(worker_id), local_hashes([], BLOCK_SIZE))
        self.ranks.append(rank(worker_id))

    def _store(self, chosen: RankId, tokens: list[int], n_shared_blocks: int) -> None:
        """The engine reports the blocks that it did not have."""
        local = local_hashes(tokens, BLOCK_SIZE)
        shared, own, parent = local[:n_shared_blocks], local[n_shared_blocks:], None
        if n_shared_blocks:
            parent = SequenceHash(int(sequence_hashes(shared)[-1]))
        fresh = [] if chosen in self._stored else runs_of(chosen, shared)
        self._stored.add(chosen)
        for run in (*fresh, *runs_of(chosen, own, parent=parent)):
            self.router.view.fold_index(RUN_KEY.pack(run.key), encode_run(run))


def prompts(n_tokens: int, n_shared: int, n: int = N_REQUESTS) -> list[list[int]]:
    """Prompts of this length that begin with the same tokens, and have nothing else in common."""
    n_own = n_tokens - n_shared
    return [[*range(n_shared), *(1_000 + n_own * number + at for at in range(n_own))] for number in range(n)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(compose, "monotonic_ms", clock)
    return clock


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pause_s", [0, 1, 60])
def test_a_short_common_beginning_leaves_no_engine_idle(clock: Clock, mode: RouterMode, pause_s: int) -> None:
    """Of 80 prompts with 64 tokens in common and 2,000 of their own, two engines get about half each."""
    counts = PacedFleet(clock, 2, router_mode=mode).counts(prompts(2_064, 64), 64, pause_s * 1_000)
    assert all(30 <= count <= 50 for count in counts), counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_shared", [2_000, 1_032])
def test_a_long_common_beginning_keeps_requests_together(clock: Clock, mode: RouterMode, n_shared: int) -> None:
    """Prompts with half or most of their tokens in common stay on the engine that has these."""
    counts = PacedFleet(clock, 2, router_mode=mode).counts(prompts(2_064, n_shared), n_shared)
    assert sorted(counts) == [0, N_REQUESTS]


@pytest.mark.parametrize("mode", MODES)
def test_without_weight_the_first_block_decides(clock: Clock, mode: RouterMode) -> None:
    """With `recent_prefill_weight` 0, one engine gets every prompt, as the cost of NVIDIA Dynamo has it."""
    fleet = PacedFleet(clock, 2, router_mode=mode, recent_prefill_weight=0.0)
    assert sorted(fleet.counts(prompts(2_064, 64, 12), 64)) == [0, 12]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_workers", [3, 8])
@pytest.mark.parametrize(("n_tokens", "n_shared"), [(500, 48), (2_000, 208), (20_000, 96), (20_000, 2_000)])
def test_prompts_of_any_length_use_all_engines(
    clock: Clock, mode: RouterMode, n_workers: int, n_tokens: int, n_shared: int
) -> None:
    """With up to a tenth of the prompt in common, each engine gets its share within two requests."""
    n = 5 * n_workers if n_tokens > 10_000 else N_REQUESTS
    counts = PacedFleet(clock, n_workers, router_mode=mode).counts(prompts(n_tokens, n_shared, n), n_shared)
    assert all(abs(count - n / n_workers) <= 2.0 for count in counts), counts


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_one_engine_are_spread_as_engines_are(clock: Clock, mode: RouterMode) -> None:
    """Two engines with four ranks each use all eight ranks."""
    counts = PacedFleet(clock, 2, 4, router_mode=mode).counts(prompts(2_064, 64), 64)
    assert all(8 <= count <= 12 for count in counts), counts


@pytest.mark.parametrize("mode", MODES)
def test_prompts_of_several_lengths_share_the_work_and_not_the_number(clock: Clock, mode: RouterMode) -> None:
    """Of long and short prompts, which begin with the same block, two engines compute about as many tokens."""
    long, short = prompts(4_016, 16, 20), prompts(1_016, 16, 60)
    mixed = [prompt for four in zip(long, short[::3], short[1::3], short[2::3], strict=True) for prompt in four]
    fleet, tokens = PacedFleet(clock, 2, router_mode=mode), Counter[RankId]()
    for prompt in mixed:
        tokens[fleet.send(prompt, 16)] += len(prompt)
    assert min(tokens.values()) > 0.9 * max(tokens.values()) and len(tokens) == 2, tokens


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_joins_gets_its_share(clock: Clock, mode: RouterMode) -> None:
    """A third engine gets new prompts until it has computed as much lately as the others, and then one of three."""
    fleet = PacedFleet(clock, 2, router_mode=mode)
    fleet.counts(prompts(2_064, 64, 20), 64)
    fleet.join(3)
    counts = fleet.counts(prompts(2_064, 64)[20:], 64)
    assert counts[2] >= 20 and min(counts) >= 15, counts
