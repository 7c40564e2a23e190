"""The shared pool, pure: its room, its link and its news against oracles; engines that load from it; traces with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.routing.decision import RoutePolicy
from streams.core.routing.selection import RouterMode
from streams.cxl.states import NOT_POOLED, Refused, transition
from streams.errors import InvalidRequest, KvStreamsError, SettingsError
from streams.sim.engine_config import EngineConfig
from streams.sim.engine_messages import EngineStats, FirstToken, KvStored, Output, PoolAsked
from streams.sim.model import EngineModel
from streams.sim.offline import Outcome, simulate
from streams.sim.pool import CxlChanged, EnginePoolBlocks, PoolConfig, PoolEvent, PoolLoad, SharedPool
from streams.sim.trace import generate, infinite_cache_hit_share
from tests.unit.test_sim_model import CONFIG, FOREVER, Asked, ask, only, requests_, submit_all

IN_TRANSIT, POOLED, EVICTED, PLAIN_STATE = (
    CxlMemoryState.IN_TRANSIT,
    CxlMemoryState.CXL_POOLED,
    CxlMemoryState.EVICTED,
    CxlMemoryState.LOCAL_GPU,
)

#: 2 ms a block towards it, 1 ms a block from it, and half a millisecond a transfer: times that a reader can add up.
POOL = PoolConfig(
    pool_id="p",
    block_size=4,
    bytes_per_token=250_000,
    capacity_blocks=4,
    offload_gb_per_s=0.5,
    load_gb_per_s=1.0,
    latency_us=500.0,
)


def said(pool: SharedPool, to_ms: float) -> list[tuple[float, str, CxlMemoryState, tuple[int, ...]]]:
    pool_events = pool.advance(to_ms)
    pool.check()
    return [(each.at_ms, each.owner, each.state, each.keys) for each in pool_events]


def holding(*chains: Sequence[int], config: PoolConfig = POOL) -> SharedPool:
    """A pool into which these came, one behind the other."""
    pool = SharedPool(config)
    for at, chain in enumerate(chains):
        pool.offload(100.0 * at, "a", chain)
    pool.advance(100.0 * len(chains))
    return pool


# -- the link ----------------------------------------------------------------------------------------------------------


def test_an_offload_arrives_as_a_whole_when_its_bytes_and_its_latency_are_over() -> None:
    """Three blocks of 2 ms begun at 10 are there at 16.5, all at once, and not before."""
    pool = SharedPool(POOL)
    pool.offload(10.0, "a", [1, 2, 3])
    assert pool.next_event_ms() == 16.5
    assert said(pool, 16.4) == []
    assert pool.pooled() == []
    assert pool.load(16.4, [1]).n_blocks == 0
    assert said(pool, 16.5) == [(16.5, "a", POOLED, (1, 2, 3))]
    assert pool.next_event_ms() is None


def test_offloads_queue_for_the_link_and_loads_have_their_own_direction() -> None:
    """Of two offloads at once the second arrives when both have passed; a load in between waits for neither."""
    pool = holding([9])
    pool.offload(200.0, "a", [1])
    pool.offload(200.0, "b", [2])
    assert pool.load(200.0, [9]) == PoolLoad(1, 201.5)
    assert pool.load(200.0, [9]) == PoolLoad(1, 202.5)
    assert said(pool, FOREVER) == [(202.5, "a", POOLED, (1,)), (204.5, "b", POOLED, (2,))]


def test_a_load_gives_the_leading_blocks_that_are_there() -> None:
    """A hole ends it, and so does what is on its way."""
    pool = holding([1, 2])
    pool.offload(100.0, "a", [3])
    assert pool.load(100.0, [1, 2, 3]) == PoolLoad(2, 102.5)
    assert pool.load(100.0, [7, 1]) == PoolLoad(0, 100.0)


def test_what_the_pool_has_is_not_written_again_and_has_one_more_owner() -> None:
    """Of what is there the second owner hears at once, of what is on its way when it arrives; both hear of its end."""
    pool = holding([1])
    pool.offload(100.0, "a", [2])
    pool.offload(101.0, "b", [1, 2, 3])
    assert said(pool, 102.5) == [(101.0, "b", POOLED, (1,)), (102.5, "a", POOLED, (2,)), (102.5, "b", POOLED, (2,))]
    assert said(pool, 104.5) == [(104.5, "b", POOLED, (3,))]
    assert (pool.stats().offloaded, pool.stats().joined) == (3, 2)
    pool.offload(200.0, "c", [11, 12, 13, 14])
    assert sorted(said(pool, 200.0)) == [(200.0, "a", EVICTED, (1, 2)), (200.0, "b", EVICTED, (1, 2, 3))]


# -- room --------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_of_a_chain_its_tail() -> None:
    """Chain 1, 2 was loaded since chain 3, 4 came: these go, tail first, then 2."""
    pool = holding([1, 2], [3, 4])
    pool.load(200.0, [1, 2])
    pool.advance(300.0)
    for at, gone in enumerate((4, 3, 2)):
        pool.offload(300.0 + 100 * at, "a", [10 + at])
        assert said(pool, 300.0 + 100 * at) == [(300.0 + 100 * at, "a", EVICTED, (gone,))]
        pool.advance(399.0 + 100 * at)


def test_what_is_loaded_or_on_its_way_is_not_evicted_and_what_finds_no_room_is_refused() -> None:
    """Two blocks that are loaded until 202.5 and one on its way leave room for one: the others hear no."""
    pool = holding([1, 2])
    pool.load(200.0, [1, 2])
    pool.offload(200.0, "b", [3])
    pool.offload(201.0, "c", [4, 5, 6])
    assert said(pool, 201.0) == [(201.0, "c", PLAIN_STATE, (5, 6))]
    pool.offload(202.5, "c", [5])  # the load is over, to the moment
    assert said(pool, 202.5) == [(202.5, "b", POOLED, (3,)), (202.5, "a", EVICTED, (2,))]
    assert (pool.stats().refused, pool.stats().evicted) == (2, 1)


def test_an_offload_longer_than_the_pool_keeps_its_head() -> None:
    """Leading blocks are what a prefix needs; its own head is not evicted for its tail."""
    pool = holding([1, 2])
    pool.offload(100.0, "a", [1, 2, 3, 4, 5, 6])
    assert said(pool, 100.0) == [(100.0, "a", POOLED, (1, 2)), (100.0, "a", PLAIN_STATE, (5, 6))]
    pool.advance(200.0)
    assert set(pool.pooled()) == {1, 2, 3, 4}


# -- owners ------------------------------------------------------------------------------------------------------------


def test_what_a_dead_engine_was_writing_never_arrives_and_what_it_wrote_stays() -> None:
    """Whoever had joined the write hears that it is over; the next in line keeps its time."""
    pool = holding([1])
    pool.offload(100.0, "a", [2])
    pool.offload(100.0, "b", [2, 3])
    pool.leave(101.0, "a")
    assert (101.0, "b", EVICTED, (2,)) in said(pool, 101.0)
    assert said(pool, FOREVER) == [(104.5, "b", POOLED, (3,))]
    assert pool.load(FOREVER, [1]).n_blocks == 1
    pool.leave(FOREVER, "a")  # twice is once
    pool.check()


def test_an_eviction_that_nobody_can_tell_is_counted() -> None:
    """The owner is gone: his block stays what routers know until the pool's epoch grows."""
    pool = holding([1, 2])
    pool.leave(100.0, "a")
    pool.offload(100.0, "b", [3, 4, 5])
    assert said(pool, 100.0) == []
    assert (pool.stats().evicted, pool.stats().unreported) == (1, 1)


# -- properties --------------------------------------------------------------------------------------------------------

#: Chains of a small tree, so that content is shared, and more of it than there is room for.
chains = st.builds(lambda root, length: [root * 10 + at for at in range(length)], st.integers(1, 4), st.integers(1, 4))
actions = st.lists(
    st.tuples(
        st.floats(0.0, 6.0),
        st.sampled_from(["offload"] * 4 + ["load"] * 2 + ["die", "lose"]),
        st.integers(0, 2),
        chains,
    ),
    max_size=40,
)


class Owner:
    """One engine as its bridge follows it: what it told, by the table of states."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lives = 0
        self.begin()

    def begin(self) -> None:
        self.lives += 1
        self.name = f"{self.number}/{self.lives}"
        self.blocks = EnginePoolBlocks(POOL.pool_id)
        self.told: dict[int, CxlMemoryMetadata] = {}

    def report(self, changed: CxlChanged | None) -> None:
        for name in [] if changed is None else changed.engine.tolist():
            assert changed is not None
            pool_id = changed.pool_id
            after = transition(self.told.get(name, NOT_POOLED), changed.state, pool_id)
            assert not isinstance(after, Refused), after
            self.told[name] = after

    def store(self, chain: list[int]) -> tuple[int, ...]:
        keys: Any = np.array(chain, dtype=np.uint64)
        names = keys + np.uint64(1000 * self.number)
        keys_new, changed = self.blocks.stored(KvStored(0.0, None, names, keys, keys, b"", 0, None))
        self.report(changed)
        return keys_new


def heard(owners: Sequence[Owner], pool_events: Sequence[PoolEvent]) -> None:
    names = {owner.name: owner for owner in owners}
    for each in pool_events:
        if each.owner in names:
            names[each.owner].report(names[each.owner].blocks.pool_changed(each.state, each.keys))


@settings(max_examples=300, deadline=None)
@given(actions, st.integers(1, 9))
def test_room_link_news_and_numbers_are_those_of_an_oracle(done: list[Any], capacity: int) -> None:
    """Whatever happens: never more blocks than room, no byte before the link carried it, no illegal transition, nothing
    that is loaded evicted, and each block that came is there, on its way, evicted, or died with its mover."""
    pool = SharedPool(replace(POOL, capacity_blocks=capacity))
    owners = [Owner(number) for number in range(3)]
    now_ms = write_free = read_free = 0.0
    writes: list[tuple[float, str, int]] = []  # end, mover, blocks
    loading: dict[int, float] = {}
    n_died = 0
    for wait_ms, action, number, chain in done:
        now_ms += wait_ms
        owner = owners[number]
        heard(owners, pool.advance(now_ms))
        before, before_ms = set(pool.pooled()), pool.stats()
        if action == "offload":
            keys = owner.store(chain)
            if keys:
                pool.offload(now_ms, owner.name, keys)
            n_new = pool.stats().offloaded - before_ms.offloaded
            if n_new:
                write_free = max(now_ms, write_free) + n_new * POOL.offload_ms_per_block
                writes.append((write_free + POOL.latency_ms, owner.name, n_new))
        elif action == "load":
            load = pool.load(now_ms, chain)
            n_there = next((at for at, key in enumerate(chain) if key not in before), len(chain))
            assert load.n_blocks == n_there
            if n_there:
                read_free = max(now_ms, read_free) + n_there * POOL.load_ms_per_block
                assert load.end_ms == pytest.approx(read_free + POOL.latency_ms)
                loading.update({key: max(loading.get(key, 0.0), load.end_ms) for key in chain[:n_there]})
        else:
            pool.leave(now_ms, owner.name)
            n_died += sum(n for end, mover, n in writes if mover == owner.name and end > now_ms)
            writes = [write for write in writes if write[1] != owner.name]
            if action == "lose":
                owner.report(owner.blocks.lost())
                assert POOLED not in {each.state for each in owner.told.values()}
            owner.begin()
        heard(owners, pool.advance(now_ms))
        pool.check()
        stats = pool.stats()
        assert stats.n_in_transit == sum(n for end, _, n in writes if end > now_ms)
        assert stats.n_pooled + stats.n_in_transit <= capacity
        assert stats.offloaded == stats.n_pooled + stats.n_in_transit + stats.evicted + n_died
        there = set(pool.pooled())
        assert {key for key, end in loading.items() if end > now_ms} <= there
        for each in owners:
            pooled = {key for key, state in each.blocks.states().items() if state is POOLED}
            assert pooled <= there
            assert {name - 1000 * each.number for name, meta in each.told.items() if meta.state is POOLED} == pooled
    heard(owners, pool.advance(FOREVER))
    assert pool.stats().n_in_transit == 0
    assert all(state is POOLED for owner in owners for state in owner.blocks.states().values())


@settings(max_examples=60, deadline=None)
@given(actions)
def test_news_do_not_depend_on_how_often_the_pool_was_asked(done: list[Any]) -> None:
    """One look at the end gives the very news of looks at every moment."""
    often, once = SharedPool(POOL), SharedPool(POOL)
    pool_events: list[PoolEvent] = []
    now_ms = 0.0
    for wait_ms, action, number, chain in done:
        now_ms += wait_ms
        pool_events += often.advance(now_ms)
        for pool in (often, once):
            if action == "offload":
                pool.offload(now_ms, str(number), chain)
            elif action == "load":
                pool.load(now_ms, chain)
            else:
                pool.leave(now_ms, str(number))
        pool_events += often.advance(now_ms)
    assert pool_events + often.advance(FOREVER) == once.advance(FOREVER)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity_blocks": 0},
        {"block_size": 0},
        {"bytes_per_token": 0},
        {"offload_gb_per_s": 0.0},
        {"load_gb_per_s": float("nan")},
        {"latency_us": -1.0},
        {"pool_id": ""},
        {"latency_class": ""},
    ],
)
def test_a_pool_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    """Numbers, and names that the registry would refuse."""
    with pytest.raises(KvStreamsError):
        PoolConfig(**wrong)


# -- an engine that loads ----------------------------------------------------------------------------------------------


def engine_with_pool() -> EngineModel:
    engine = EngineModel(CONFIG)
    engine.use_pool(True)
    return engine


def test_a_prefill_loads_what_the_pool_gives_and_computes_the_rest() -> None:
    """Of 14 tokens two blocks come in 3 ms, 6 tokens take 10 + 6: the first token is out at 119, and all is stored."""
    engine = engine_with_pool()
    engine.submit(100.0, ask("a", range(14)))
    (asked,) = only(engine.advance(FOREVER), PoolAsked)
    assert (asked.at_ms, len(asked.keys)) == (100.0, 3)
    assert engine.next_event_ms() is None
    engine.check()
    engine.pool_answered("a", 2, 3.0)
    out = engine.advance(FOREVER)
    assert only(out, FirstToken) == [FirstToken("a", 119.0, 19.0, 8, 14, 8)]
    assert [len(stored.sequence) for stored in only(out, KvStored)] == [3]
    assert (engine.stats().computed_tokens, engine.stats().loaded_tokens) == (6, 8)
    engine.submit(200.0, ask("b", range(14)))  # by now they are its own
    assert only(engine.advance(FOREVER), FirstToken) == [FirstToken("b", 212.0, 12.0, 12, 14, 0)]
    engine.check()


def test_the_pool_is_asked_for_what_follows_the_engines_own_blocks_and_never_for_a_whole_prompt() -> None:
    """Own blocks first; of 12 tokens the last block is computed whatever the pool has."""
    engine = engine_with_pool()
    engine.submit(0.0, ask("a", range(4)))  # one block is its whole prompt: nothing to ask for
    assert only(engine.advance(FOREVER), PoolAsked) == []
    engine.submit(100.0, ask("b", range(12)))
    (asked,) = only(engine.advance(FOREVER), PoolAsked)
    assert len(asked.keys) == 1
    engine.pool_answered("b", 0, 0.0)
    assert only(engine.advance(FOREVER), FirstToken) == [FirstToken("b", 118.0, 18.0, 4, 12, 0)]


def test_nothing_starts_while_a_request_waits_for_the_pool_and_answers_go_on() -> None:
    """A prefill that loads holds the GPU; what was decoding finishes."""
    engine = EngineModel(CONFIG)
    engine.submit(0.0, ask("decoding", range(4), 10))
    engine.advance(15.0)
    engine.use_pool(True)
    engine.submit(15.0, ask("a", range(100, 109)))
    engine.submit(15.0, ask("b", range(200, 209)))
    out = engine.advance(1000.0)
    assert [asked.request_id for asked in only(out, PoolAsked)] == ["a"]
    assert engine.stats().n_running == 1
    engine.pool_answered("a", 2, 5.0)
    (asked,) = only(engine.advance(1000.0), PoolAsked)
    assert (asked.request_id, asked.at_ms) == ("b", 31.0)


@pytest.mark.parametrize(
    ("request_id", "n_blocks", "wait_ms"), [("b", 1, 0.0), ("a", 4, 0.0), ("a", -1, 0.0), ("a", 1, float("nan"))]
)
def test_an_answer_that_cannot_be_is_refused_and_the_right_one_still_taken(
    request_id: str, n_blocks: int, wait_ms: float
) -> None:
    """Another request's, more than was asked for, less than nothing, or never."""
    engine = engine_with_pool()
    engine.submit(0.0, ask("a", range(14)))
    engine.advance(0.0)
    with pytest.raises(InvalidRequest):
        engine.pool_answered(request_id, n_blocks, wait_ms)
    engine.pool_answered("a", 3, 1.0)
    with pytest.raises(InvalidRequest):
        engine.pool_answered("a", 3, 1.0)


@settings(max_examples=120, deadline=None)
@given(requests_, st.lists(st.floats(0.0, 60.0), min_size=14, max_size=14), st.integers(0, 1))
def test_times_do_not_depend_on_when_the_pools_answer_came(asked: Asked, lateness: list[float], n_missing: int) -> None:
    """Answers that a live engine hears late give the first tokens of prompt ones, and no token is counted twice."""

    def run(lateness: Sequence[float]) -> tuple[list[FirstToken], EngineStats]:
        engine = EngineModel(replace(CONFIG, n_blocks=1000))
        engine.use_pool(True)
        submit_all(engine, asked)
        out: list[Output] = []
        n_asked = 0
        while (due_ms := engine.next_event_ms()) is not None:
            pool_events = engine.advance(due_ms)
            for question in only(pool_events, PoolAsked):
                pool_events += engine.advance(due_ms + lateness[n_asked])
                engine.check()
                n_asked += 1
                n_given = max(0, len(question.keys) - n_missing)
                engine.pool_answered(question.request_id, n_given, 2.0 * n_given)
            out += pool_events
        engine.check()
        return only(out, FirstToken), engine.stats()

    prompt_ones, stats = run([0.0] * 14)
    assert sorted(run(lateness)[0], key=lambda token: token.at_ms) == prompt_ones
    assert len(prompt_ones) == len(asked)
    assert sum(token.pooled_tokens for token in prompt_ones) == stats.loaded_tokens
    assert sum(token.prompt_tokens - token.cached_tokens for token in prompt_ones) == stats.computed_tokens


# -- traces ------------------------------------------------------------------------------------------------------------

SMALL = EngineConfig(n_blocks=2048)
TRACE = generate(60, np.random.default_rng(7))


def run(pool: PoolConfig | None, mode: RouterMode = RouterMode.KV) -> list[Outcome]:
    return simulate(TRACE, 4, SMALL, RoutePolicy(mode), random.Random(3), pool)


def hit_share(outcomes: list[Outcome]) -> float:
    return sum(each.cached_tokens for each in outcomes) / sum(each.prompt_tokens for each in outcomes)


@pytest.mark.parametrize("mode", [RouterMode.KV, RouterMode.ROUND_ROBIN])
def test_a_trace_with_a_pool_saves_prefill_up_to_the_bound_and_is_the_same_each_time(mode: RouterMode) -> None:
    """More is reused than without a pool, what more comes from it, and nothing that no cache could reuse."""
    without, with_pool = run(None, mode), run(PoolConfig(), mode)
    assert with_pool == run(PoolConfig(), mode)
    assert hit_share(without) < hit_share(with_pool) <= infinite_cache_hit_share(TRACE, SMALL.block_size)
    assert sum(each.pooled_tokens for each in without) == 0
    assert all(each.pooled_tokens <= each.cached_tokens for each in with_pool)
    assert sum(each.pooled_tokens for each in with_pool) > 0


def test_a_pool_of_one_block_saves_next_to_nothing() -> None:
    """Room is what it is worth."""
    assert hit_share(run(PoolConfig(capacity_blocks=1))) < hit_share(run(PoolConfig()))


def test_a_pool_of_other_blocks_is_refused() -> None:
    """Its keys would mean other tokens."""
    with pytest.raises(SettingsError, match="blocks of 32"):
        run(PoolConfig(block_size=32))
