"""Where else a prompt's KV cache is: the ranks and pools that an answer names, compared with a plain reference."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from streams.core.cxl_memory import CxlMemoryState
from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import EngineHash, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.interface import Candidates, PrefixScores
from streams.core.routing.selection import RouterMode
from streams.core.routing.sources import KV_SOURCES_MAX, SourceTier, rank_sources
from streams.core.workers import Role, WorkerState
from streams.cxl import pooled_index
from streams.cxl.events import CxlPool
from streams.cxl.records import BlockKey, BlockRow, Placement, block_key, encode_block, encode_pool, pool_key
from streams.lab.engines.held_chains import FIRST_EPOCH, runs_of_chain
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import RouteRequest
from streams.tables.records import RUN_KEY, encode_run
from tests.helpers.api import TOKENS
from tests.helpers.routers import LOCAL, PLACED, ask, hosts, put, router_of
from tests.helpers.views import BLOCK_SIZE, hold, rank, register

#: A prompt of 12 blocks.
PROMPT = list(range(1000, 1000 + 12 * BLOCK_SIZE))
PROMPT_LOCAL = local_hashes(PROMPT, BLOCK_SIZE)
PROMPT_CHAIN = [SequenceHash(block) for block in sequence_hashes(PROMPT_LOCAL).tolist()]
N_BLOCKS = len(PROMPT_CHAIN)

#: An owner of pooled blocks that is not registered.
OWNER = 99


def sources(router: Router, tokens: list[int] = TOKENS, **fields: Any) -> list[dict[str, Any]]:
    asked = {"token_ids": tokens, "update_states": False, "kv_sources": True, **fields}
    found: list[dict[str, Any]] = answer_json(router.route(msgspec.convert(asked, RouteRequest)))["kv_sources"]
    return found


def of_rank(worker_id: int, blocks: int, tier: str = "device", dp_rank: int = 0) -> dict[str, Any]:
    return {"worker_id": worker_id, "dp_rank": dp_rank, "blocks": blocks, "tier": tier}


def of_pool(pool_id: str, blocks: int, *, accessible: bool) -> dict[str, Any]:
    return {"pool_id": pool_id, "blocks": blocks, "tier": "pool", "accessible": accessible}


def test_sources_are_named_only_if_the_request_asks_for_them() -> None:
    """Without `kv_sources` the answer has no such field; with it, an empty list says that there are none."""
    router = router_of(2)
    hold(router.view, rank(1), LOCAL)
    assert "kv_sources" not in ask(router, update_states="false")
    assert ask(router, update_states="false", kv_sources="true")["kv_sources"] == []
    assert ask(router, "r", kv_sources="true")["kv_sources"] == []
    assert "kv_sources" not in ask(router, "r", kv_sources="true"), "a repeated id gets the existing choice"


def test_ranks_with_more_of_the_prompt_are_sources() -> None:
    """The most blocks come first; a rank with as many as the chosen one is none, and neither is an excluded one."""
    router = router_of(5)
    for worker_id, n_blocks in ((1, 4), (2, 3), (3, 4), (4, 1), (5, 2)):
        hold(router.view, rank(worker_id), LOCAL[:n_blocks])
    assert [each["worker_id"] for each in sources(router, worker_id=4)] == [1, 3, 2]
    assert sources(router, worker_id=2, excluded_worker_ids=[3]) == [of_rank(1, 4)]
    assert sources(router, worker_id=1) == []


def test_a_source_serves_the_model_and_gets_requests() -> None:
    """Ranks of another role are sources; cordoned ones and those of another model are none."""
    router = router_of(5)
    register(router.view, 2, role=Role.PREFILL)
    register(router.view, 3, state=WorkerState.CORDONED)
    register(router.view, 4, model="other")
    for worker_id in (2, 3, 4):
        hold(router.view, rank(worker_id), LOCAL)
    assert sources(router, model="m", phase="decode") == [of_rank(2, 4)]


def test_blocks_below_device_memory_are_worth_a_source() -> None:
    """A rank with the prompt on disk is offered one that has fewer blocks, but more than it has in device memory."""
    router = router_of(3)
    hold(router.view, rank(1), LOCAL, Tier.DISK)
    hold(router.view, rank(1), LOCAL[:1])
    hold(router.view, rank(2), LOCAL[:2])
    hold(router.view, rank(3), LOCAL[:2], Tier.HOST)
    assert sources(router, worker_id=1) == [of_rank(2, 2), of_rank(3, 2, "host")]
    assert sources(router, worker_id=2) == [of_rank(1, 4, "disk")]


def test_pools_are_sources_whether_or_not_the_chosen_rank_reaches_them() -> None:
    """A pool counts from the end of the rank's own blocks; a lost pool has nothing."""
    router = router_of(2)
    put(router, 1, 2)
    hosts(router, 1)
    hold(router.view, rank(1), LOCAL[:1])
    hold(router.view, rank(2), LOCAL[:1])
    assert sources(router, worker_id=1) == [of_pool("p", 3, accessible=True)]
    assert sources(router, worker_id=2) == [of_pool("p", 3, accessible=False)]
    assert sources(router, worker_id=2, router_config_override={"cxl_score_weight": 0.0}) == []
    lost = encode_pool(CxlPool("p", members=(WorkerId(1),), epoch=1, lost=True))
    router.view.fold_worker(pool_key("p"), lost)
    assert sources(router, worker_id=1) == []


def test_a_pool_of_chunks_counts_whole_chunks() -> None:
    """A row of LMCache stands for a chunk of blocks, which can be loaded only together."""
    router = router_of(1)
    hosts(router, 1)
    put(router, 1, 3, placement=replace(PLACED, span=2))
    assert sources(router) == [of_pool("p", 4, accessible=True)]
    assert sources(router, TOKENS[: 3 * BLOCK_SIZE]) == [of_pool("p", 2, accessible=True)]


def test_stretches_of_a_pool_beyond_the_limit_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose blocks all have different placements must not hold up other decisions."""
    monkeypatch.setattr(pooled_index, "STRETCHES_MAX", 2)
    router = router_of(1)
    hosts(router, 1)
    for at in range(4):
        put(router, at, placement=replace(PLACED, accessible_workers=(WorkerId(1), WorkerId(10 + at))))
    assert sources(router) == [of_pool("p", 2, accessible=True)]


@pytest.mark.parametrize("mode", [RouterMode.ROUND_ROBIN, RouterMode.KV])
def test_a_decision_that_does_not_read_the_index_names_none(mode: RouterMode) -> None:
    """Neither does one whose prompt is not compared."""
    router = router_of(2, router_mode=mode)
    hold(router.view, rank(2), LOCAL)
    prompt_part = "none" if mode is RouterMode.KV else "whole"
    assert sources(router, worker_id=1, prompt_part=prompt_part) == []


def test_predicted_blocks_make_no_source() -> None:
    """Nothing has shown that a rank has the blocks of a request that was sent there a moment ago."""
    router = router_of(2, router_predicted_ttl_s=60.0)
    hold(router.view, rank(1), LOCAL[:1])
    hold(router.view, rank(2), LOCAL[:2])
    assert ask(router, worker_id=1)["worker_id"] == 1
    assert [each["worker_id"] for each in sources(router, worker_id=2)] == []
    assert sources(router, [*TOKENS[:32], *range(32)], worker_id=1) == []


def test_of_many_equal_ranks_the_cheapest_are_named() -> None:
    """Ties of a thousand ranks are decided by their costs, so that not everybody reads from the same three."""
    rng = random.Random(7)
    ranks = tuple(rank(number) for number in range(1000))
    held = {each: rng.choice([5, 9]) for each in ranks}
    costs = np.array([rng.random() for _ in ranks])
    found = rank_sources(PrefixScores(held), Candidates(ranks), costs, 4, np.zeros(1000, dtype=np.bool_))
    best = sorted((cost, each) for each, cost in zip(ranks, costs.tolist(), strict=True) if held[each] == 9)
    assert {source.rank for source in found} == {each for _, each in best[:KV_SOURCES_MAX]}


# -- random fleets against a reference that is nothing but loops -------------------------------------------------------

#: By rank and tier: positions of the prompt's blocks. By pool: positions, and the workers that each block names.
Held = dict[RankId, dict[Tier, set[int]]]
Pooled = dict[str, dict[int, frozenset[int]]]

ORDER = [tier.value for tier in SourceTier]


def leading(held: Mapping[Tier, set[int]]) -> list[Tier]:
    """The tier of the fastest copy of each leading block."""
    fastest: list[Tier] = []
    for position in range(N_BLOCKS):
        tiers = [tier for tier in Tier if position in held.get(tier, ())]
        if not tiers:
            break
        fastest.append(tiers[0])
    return fastest


def expected(
    answer: Mapping[str, Any], held: Held, pooled: Pooled, members: Mapping[str, set[int]], excluded: set[int]
) -> list[dict[str, Any]]:
    chosen = rank(answer["worker_id"], answer["dp_rank"])
    on_device = leading(held[chosen]).count(Tier.DEVICE)
    costs = {rank(each["worker_id"], each["dp_rank"]): each["cost"] for each in answer["candidates"]}
    found: list[tuple[Any, dict[str, Any]]] = []
    for each, by_tier in held.items():
        tiers = leading(by_tier)
        if each != chosen and each.worker_id not in excluded and len(tiers) > on_device:
            slowest = max(tiers).name.lower()
            key: tuple[Any, ...] = (-len(tiers), ORDER.index(slowest), costs.get(each, float("inf")))
            found.append((key, of_rank(each.worker_id, len(tiers), slowest, each.dp_rank)))
    for pool_id, blocks in pooled.items():
        end, accessible = on_device, True
        while end in blocks and (readers := members[pool_id] & (blocks[end] or members[pool_id])):
            accessible = accessible and chosen.worker_id in readers
            end += 1
        if end > on_device:
            key = (-end, ORDER.index("pool"), not accessible, pool_id)
            found.append((key, of_pool(pool_id, end, accessible=accessible)))
    return [source for _, source in sorted(found, key=lambda pair: pair[0])[:KV_SOURCES_MAX]]


def some(rng: random.Random) -> set[int]:
    """Some of the first blocks, mostly without a hole."""
    positions = set(range(rng.randrange(N_BLOCKS + 1)))
    return positions - {rng.randrange(N_BLOCKS)} if rng.random() < 0.3 else positions


def fold_held(router: Router, held: Held) -> None:
    for each, by_tier in held.items():
        hold(router.view, each, PROMPT_LOCAL[:0])
        for tier, positions in by_tier.items():
            absent = set(range(N_BLOCKS)) - positions
            for run in runs_of_chain(each, PROMPT_LOCAL, tier=tier, absent=absent, epoch=FIRST_EPOCH):
                if run.present:
                    router.view.fold_index(RUN_KEY.pack(run.key), encode_run(run))


def fold_pooled(router: Router, pooled: Pooled, members: Mapping[str, set[int]], rng: random.Random) -> None:
    for number, (pool_id, blocks) in enumerate(pooled.items()):
        pool = CxlPool(pool_id, members=tuple(WorkerId(each) for each in sorted(members[pool_id])))
        router.view.fold_worker(pool_key(pool_id), encode_pool(pool))
        for at, named in blocks.items():
            workers = tuple(map(WorkerId, sorted(named)))
            placement = Placement(CxlMemoryState.CXL_POOLED, pool_id, 0, workers, "m", Incarnation(1), 0)
            parent = PROMPT_CHAIN[at - 1] if at else None
            row = BlockRow(placement, parent, at, EngineHash(at))
            key = BlockKey(PROMPT_CHAIN[at], rank(OWNER + rng.randrange(2) + 2 * number), pool_id)
            router.view.fold_pooled(block_key(key), encode_block(row))


@pytest.mark.parametrize("seed", range(40))
def test_the_sources_of_random_fleets_are_those_of_plain_loops(seed: int) -> None:
    """Ranks with holes and in all tiers, and pools that some workers reach, in modes with and without a policy."""
    rng = random.Random(seed)
    n_workers = rng.randrange(1, 9)
    mode = rng.choice([RouterMode.KV, RouterMode.EXPECTED_TIME])
    router = router_of(0, router_mode=mode)
    held: Held = {}
    for worker_id in range(1, n_workers + 1):
        dp_size = rng.randrange(1, 3)
        register(router.view, worker_id, dp_size=dp_size, kv_total_blocks=100)
        for dp_rank in range(dp_size):
            tiers = rng.sample(list(Tier), rng.randrange(3)) if seed % 2 else [Tier.DEVICE] * rng.randrange(2)
            held[rank(worker_id, dp_rank)] = {tier: some(rng) for tier in tiers}
    workers = list(range(1, n_workers + 1))
    members = {f"pool{n}": set(rng.sample(workers, rng.randrange(1, n_workers + 1))) for n in range(rng.randrange(3))}
    named = [frozenset(rng.sample(workers, rng.randrange(n_workers + 1))) for _ in range(3)]
    pooled: Pooled = {pool_id: {at: rng.choice(named) for at in some(rng)} for pool_id in members}
    fold_held(router, held)
    fold_pooled(router, pooled, members, rng)
    for number in range(8):  # so that costs differ
        busy = {"token_ids": [10**6 + number] * rng.randrange(16, 400), "request_id": f"busy-{number}"}
        router.route(msgspec.convert(busy, RouteRequest))
    for _ in range(12):
        asked: dict[str, Any] = {"token_ids": PROMPT, "update_states": False, "kv_sources": True, "explain": True}
        excluded = set(rng.sample(workers, rng.randrange(2))) if n_workers > 1 else set()
        if excluded:
            asked["excluded_worker_ids"] = sorted(excluded)
        if rng.random() < 0.5:
            asked["worker_id"] = rng.choice(sorted(set(workers) - excluded))
        answer = answer_json(router.route(msgspec.convert(asked, RouteRequest)))
        costs = [each["cost"] for each in answer["candidates"]]
        wanted = expected(answer, held, pooled, members, excluded)
        if len(set(costs)) == len(costs) and "worker_id" not in asked:
            assert answer["kv_sources"] == wanted, (seed, asked)
        else:  # ranks of equal cost, or of none
            facts = [[(each["blocks"], each["tier"]) for each in found] for found in (answer["kv_sources"], wanted)]
            assert facts[0] == facts[1], (seed, asked)
