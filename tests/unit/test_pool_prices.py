"""The price of pooled blocks by the medium of their pool: blocks by speed, and the decisions that follow."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from streams.core.block_facts.fact_sets import FactSets, RankNumbering
from streams.core.cxl_memory import CxlMemoryState, PoolSpeeds
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.core.index.interface import Candidates
from streams.core.routing.selection import RouterMode
from streams.cxl import pooled_index
from streams.cxl.events import CxlPool
from streams.cxl.pooled_index import PooledIndex, PooledScore
from streams.cxl.records import BlockKey, BlockRow, Placement, block_key, encode_block, encode_pool, pool_key
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import RouteRequest
from tests.helpers.api import TOKENS
from tests.helpers.routers import CHAIN, LOCAL, router_of
from tests.helpers.views import BLOCK_SIZE, hold, rank

WORKERS = tuple(map(WorkerId, range(70)))  # more than one word of a mask
RANKS = RankNumbering(tuple(RankId(worker, DpRank(0)) for worker in WORKERS))
SPEEDS = {"dram": 25.0, "devdax": 25.0, "fs": 4.0, "redis": 1.0, "tape": 0.0}
CLASSES = (*SPEEDS, "default")


def placed(pool_id: str, span: int = 1) -> Placement:
    return Placement(CxlMemoryState.CXL_POOLED, pool_id, 0, (), "m", Incarnation(1), 0, span=span)


@pytest.mark.parametrize("seed", range(40))
def test_blocks_are_counted_by_the_fastest_pool_that_has_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random pools, each block counts for the fastest one that a worker reads, and none in a pool of speed 0."""
    rng, sets = random.Random(seed), FactSets()
    monkeypatch.setattr(pooled_index, "SPEEDS_MAX", rng.choice([1, 2, 8]))
    speeds = PoolSpeeds(rng.choice([0.0, 4.0, 10.0]), SPEEDS if rng.random() < 0.8 else {})
    pools = {f"p{n}": CxlPool(f"p{n}", rng.choice(CLASSES), members=tuple(rng.sample(WORKERS, 40))) for n in range(5)}
    index = PooledIndex(sets, pools, speeds)
    span, n_blocks = rng.choice([1, 4]), rng.randrange(1, 41)
    sequence = np.array([rng.randrange(1, 1 << 64) for _ in range(n_blocks)], dtype=np.uint64)
    holders: list[set[str]] = [set() for _ in range(n_blocks)]
    for last in range(span - 1, n_blocks, span):
        for pool_id in rng.sample(sorted(pools), rng.randrange(1, 5)):
            index.replace(SequenceHash(int(sequence[last])), None, placed(pool_id, span))
            for at in range(last - span + 1, last + 1):
                holders[at].add(pool_id)
    query, candidates = index.query("m", RANKS), Candidates(RANKS.ranks)
    of_groups = [speeds.of(name) for name in query.groups]
    assert of_groups == sorted(set(of_groups), reverse=True)
    starts = np.array([rng.randrange(n_blocks + 1) for _ in WORKERS], dtype=np.int64)
    own = [{worker for worker in WORKERS if rng.random() < 0.2} for _ in range(n_blocks)]

    def walked(worker: WorkerId, at: int, *, over_own: bool) -> dict[float, int]:
        found: dict[float, int] = {}
        while at < n_blocks:
            reached = [speeds.of(pools[name].latency_class) for name in holders[at] if worker in pools[name].members]
            fastest = max(reached, default=0.0)
            if fastest:
                of_group = max(fastest, of_groups[-1])  # slower ones count as the slowest that are told apart
                of_group = max(speed for speed in of_groups if speed <= of_group)
                found[of_group] = found.get(of_group, 0) + 1
            elif not over_own or worker not in own[at]:
                break
            at += 1
        return found

    numbers, keys, floats = RANKS.of(candidates), index.keys_of(sequence), starts.astype(np.float64)
    weighed = sets.weigh(query.masks(), None, keys, numbers, starts, floats, 1.0, 0.0)
    for worker in WORKERS:
        expected = walked(worker, int(starts[worker]), over_own=False)
        total = 0 if weighed.cxl_accessible_scores is None else int(weighed.cxl_accessible_scores[worker])
        assert total == sum(expected.values())
        if weighed.by_group is not None:
            counts = weighed.by_group[:, worker].tolist()
            assert {of: n for of, n in zip(of_groups, counts, strict=True) if n} == expected
    scores = [
        PooledScore(worker, int(starts[worker]), sum(walked(worker, int(starts[worker]), over_own=True).values()))
        for worker in WORKERS
    ]
    for worker, shares in zip(WORKERS, index.shares(keys, "m", scores, WORKERS), strict=True):
        by_speed: dict[float, int] = {}
        for share in shares:
            assert (worker in pools[share.pool_id].members, share.gb_per_s > 0.0) == (True, True)
            of_group = max(speed for speed in of_groups if speed <= max(share.gb_per_s, of_groups[-1]))
            by_speed[of_group] = by_speed.get(of_group, 0) + share.n_blocks
        assert by_speed == walked(worker, int(starts[worker]), over_own=True)
    bits = np.array(
        [[sum(1 << w % 64 for w in of if w // 64 == word) for word in (0, 1)] for of in own], dtype=np.uint64
    )
    held = np.arange(n_blocks), bits.view(np.int64).reshape(-1), 2
    path = query.path(keys)
    counted = None if path is None else path.walk(candidates, starts, held)
    for worker in WORKERS:
        expected = walked(worker, int(starts[worker]), over_own=True)
        assert (0 if counted is None else counted[worker]) == sum(expected.values())
        if path is not None and counted is not None:
            counts = path.by_group(candidates, starts, counted)[:, worker].tolist()
            assert {of: n for of, n in zip(of_groups, counts, strict=True) if n} == expected


def test_pools_of_one_speed_are_one_group() -> None:
    """Classes that are equally fast cost nothing more, and a pool that changes its class changes the groups."""
    pools = {"p": CxlPool("p", "dram"), "q": CxlPool("q", "devdax")}
    index = PooledIndex(FactSets(), pools, PoolSpeeds(5.0, SPEEDS))
    before = index.query("m", RANKS)
    assert len(before.groups) == 1
    assert index.query("m", RANKS) is before
    pools["q"] = CxlPool("q", "fs")
    index.invalidate_masks()
    assert index.query("m", RANKS).groups == ("dram", "fs")


# -- decisions ---------------------------------------------------------------------------------------------------------

BYTES_PER_TOKEN = 100_000
MS_AT_1_GB_PER_S = BLOCK_SIZE * BYTES_PER_TOKEN / 1e6  # per block

MEMORY, DISK = "lmcache/node-a/dram", "lmcache/node-a/l2/fs"


def stored(router: Router, pool_id: str, *positions: int) -> None:
    """These blocks of the request are in a pool, as one chunk each, with an owner that is no worker."""
    for at in positions:
        row = BlockRow(placed(pool_id), CHAIN[at - 1] if at else None, at, EngineHash(at))
        router.view.fold_pooled(block_key(BlockKey(CHAIN[at], rank(99), pool_id)), encode_block(row))


def register_pool(router: Router, pool_id: str, latency_class: str, *members: int) -> None:
    pool = CxlPool(pool_id, latency_class, members=tuple(map(WorkerId, members)))
    router.view.fold_worker(pool_key(pool_id), encode_pool(pool))


def ask(router: Router, **fields: Any) -> dict[str, Any]:
    asked = {"token_ids": TOKENS, "update_states": False, "explain": True, **fields}
    return answer_json(router.route(msgspec.convert(asked, RouteRequest)))


def router_with(**knobs: Any) -> Router:
    """Worker 1 has nothing, and loads all blocks from the memory of its LMCache or half of them from its storage."""
    return router_of(2, router_mode=RouterMode.EXPECTED_TIME, kv_bytes_per_token=BYTES_PER_TOKEN, **knobs)


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [({"dram": 25.0}, 1), ({"dram": 0.02}, 2), ({"dram": 0.0}, 2), ({"fs": 0.02}, 1), ({}, 1)],
)
def test_the_price_of_a_medium_decides_between_loading_and_computing(speeds: dict[str, float], chosen: int) -> None:
    """The worker whose LMCache has the prompt is chosen if its memory is fast, and else one that has half of it."""
    router = router_with(pool_class_load_gb_per_s=speeds)
    stored(router, MEMORY, *range(len(CHAIN)))
    register_pool(router, MEMORY, "dram", 1)
    hold(router.view, rank(2), LOCAL[: len(CHAIN) // 2])
    answer = ask(router)
    assert answer["worker_id"] == chosen
    of_first = next(each for each in answer["candidates"] if each["worker_id"] == 1)
    n_loaded = len(CHAIN) if speeds.get("dram", 25.0) else 0
    assert of_first["cxl_accessible_scores"] == of_first["policy_terms"]["cached_blocks"] == n_loaded
    expected_ms = n_loaded * MS_AT_1_GB_PER_S / (speeds.get("dram", 25.0) or 1.0)
    assert of_first["policy_terms"]["load_ms"] == pytest.approx(expected_ms)


def test_blocks_of_one_prompt_in_two_media_cost_what_each_medium_costs() -> None:
    """The time to load is the sum over media, and a block in both is loaded from the faster one."""
    router = router_with(pool_class_load_gb_per_s={"dram": 20.0, "fs": 2.0})
    register_pool(router, MEMORY, "dram", 1)
    register_pool(router, DISK, "fs", 1, 2)
    stored(router, MEMORY, 0, 1)
    stored(router, DISK, 0, 2, 3)
    first, second = (each["policy_terms"] for each in sorted(ask(router)["candidates"], key=lambda of: of["worker_id"]))
    assert first["load_ms"] == pytest.approx(MS_AT_1_GB_PER_S * (2 / 20.0 + 2 / 2.0))
    assert (first["cached_blocks"], second["cached_blocks"]) == (4, 1)
    assert second["load_ms"] == pytest.approx(MS_AT_1_GB_PER_S / 2.0)


def test_pools_without_a_speed_of_their_own_have_that_of_all_others() -> None:
    """A class that the setting does not name keeps the price of pool_load_gb_per_s, next to one that it names."""
    router = router_with(pool_load_gb_per_s=5.0, pool_class_load_gb_per_s={"fs": 0.0})
    register_pool(router, MEMORY, "dram", 1)
    register_pool(router, DISK, "fs", 1)
    stored(router, MEMORY, 0, 1)
    stored(router, DISK, 2, 3)
    first = next(each for each in ask(router)["candidates"] if each["worker_id"] == 1)
    assert first["cxl_accessible_scores"] == first["policy_terms"]["cached_blocks"] == 2
    assert first["policy_terms"]["load_ms"] == pytest.approx(2 * MS_AT_1_GB_PER_S / 5.0)


def test_explain_names_the_pools_of_each_candidate_with_their_medium_and_speed() -> None:
    """A block in two pools counts for the faster one, and a candidate's own blocks for none."""
    router = router_with(pool_class_load_gb_per_s={"fs": 2.0, "tape": 0.0})
    register_pool(router, MEMORY, "dram", 1)
    register_pool(router, DISK, "fs", 1, 2)
    register_pool(router, "tape", "tape", 1, 2)
    stored(router, MEMORY, 1)
    for pool_id in (DISK, "tape"):
        stored(router, pool_id, 0, 1, 2)
    hold(router.view, rank(2), LOCAL[:1])
    pools = {each["worker_id"]: each.get("pools") for each in ask(router)["candidates"]}
    storage = {"pool_id": DISK, "latency_class": "fs", "load_gb_per_s": 2.0}
    memory = {"pool_id": MEMORY, "latency_class": "dram", "load_gb_per_s": 25.0}
    assert pools == {1: [{**storage, "blocks": 2}, {**memory, "blocks": 1}], 2: [{**storage, "blocks": 2}]}
    assert "pools" not in ask(router_with())["candidates"][0]
    assert "pools" not in ask(router, explain=False)
