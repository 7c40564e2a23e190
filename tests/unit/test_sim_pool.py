"""The shared pool: capacity, link and events against oracles; engines that load from it; traces that use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.cxl.states import NOT_POOLED, TransitionRefused, transition
from streams.errors import InvalidRequest, KvStreamsError
from streams.lab.engines.engine_messages import (
    EngineStats,
    Finished,
    FirstToken,
    KvRemoved,
    KvStored,
    Output,
    PoolAsked,
)
from streams.lab.engines.model import EngineModel
from streams.lab.engines.pool import CxlChanged, EnginePoolBlocks, PoolConfig, PoolEvent, PoolLoad, SharedPool
from tests.helpers.sim_requests import CONFIG, FOREVER, Asked, ask, only, requests_, submit_all

IN_TRANSIT, POOLED, EVICTED, PLAIN_STATE = (
    CxlMemoryState.IN_TRANSIT,
    CxlMemoryState.CXL_POOLED,
    CxlMemoryState.EVICTED,
    CxlMemoryState.LOCAL_GPU,
)

#: 2 ms per block to the pool, 1 ms per block from it, 0.5 ms per transfer: times that a reader can add up.
POOL = PoolConfig(
    pool_id="p",
    block_size=4,
    bytes_per_token=250_000,
    capacity_blocks=4,
    offload_gb_per_s=0.5,
    load_gb_per_s=1.0,
    latency_us=500.0,
)


def events_until(pool: SharedPool, to_ms: float) -> list[tuple[float, str, CxlMemoryState, tuple[int, ...]]]:
    events = pool.advance(to_ms)
    pool.check()
    return [(each.at_ms, each.owner, each.state, each.keys) for each in events]


def holding(*chains: Sequence[int], config: PoolConfig = POOL) -> SharedPool:
    """Give a pool into which these chains were offloaded one after the other."""
    pool = SharedPool(config)
    for at, chain in enumerate(chains):
        pool.offload(100.0 * at, "a", chain)
    pool.advance(100.0 * len(chains))
    return pool


# -- the link ----------------------------------------------------------------------------------------------------------


def test_an_offload_arrives_as_a_whole_after_its_bytes_and_its_latency() -> None:
    """Three blocks of 2 ms each that begin at 10 arrive together at 16.5, and not before."""
    pool = SharedPool(POOL)
    pool.offload(10.0, "a", [1, 2, 3])
    assert pool.next_event_ms() == 16.5
    assert events_until(pool, 16.4) == []
    assert pool.pooled() == []
    assert pool.load(16.4, [1]).n_blocks == 0
    assert events_until(pool, 16.5) == [(16.5, "a", POOLED, (1, 2, 3))]
    assert pool.next_event_ms() is None


def test_offloads_queue_for_the_link_and_loads_have_their_own_direction() -> None:
    """Of two simultaneous offloads, the second arrives after the bytes of both; a load waits for neither."""
    pool = holding([9])
    pool.offload(200.0, "a", [1])
    pool.offload(200.0, "b", [2])
    assert pool.load(200.0, [9]) == PoolLoad(1, 201.5)
    assert pool.load(200.0, [9]) == PoolLoad(1, 202.5)
    assert events_until(pool, FOREVER) == [(202.5, "a", POOLED, (1,)), (204.5, "b", POOLED, (2,))]


def test_a_load_gives_the_leading_blocks_that_have_arrived() -> None:
    """A missing block ends a load, and so does a block in transit."""
    pool = holding([1, 2])
    pool.offload(100.0, "a", [3])
    assert pool.load(100.0, [1, 2, 3]) == PoolLoad(2, 102.5)
    assert pool.load(100.0, [7, 1]) == PoolLoad(0, 100.0)


def test_a_block_that_the_pool_has_gets_one_more_owner_and_is_not_written_again() -> None:
    """The second owner gets an event at once, or on arrival if the block is in transit; both get its eviction."""
    pool = holding([1])
    pool.offload(100.0, "a", [2])
    pool.offload(101.0, "b", [1, 2, 3])
    assert events_until(pool, 102.5) == [
        (101.0, "b", POOLED, (1,)),
        (102.5, "a", POOLED, (2,)),
        (102.5, "b", POOLED, (2,)),
    ]
    assert events_until(pool, 104.5) == [(104.5, "b", POOLED, (3,))]
    assert (pool.stats().offloaded, pool.stats().joined) == (3, 2)
    pool.offload(200.0, "c", [11, 12, 13, 14])
    assert sorted(events_until(pool, 200.0)) == [(200.0, "a", EVICTED, (1, 2)), (200.0, "b", EVICTED, (1, 2, 3))]


# -- capacity ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_chain_is_evicted_first_and_from_its_tail() -> None:
    """If chain 1, 2 is loaded after chain 3, 4 was written, 4 is evicted first, then 3, then 2."""
    pool = holding([1, 2], [3, 4])
    pool.load(200.0, [1, 2])
    pool.advance(300.0)
    for at, evicted in enumerate((4, 3, 2)):
        pool.offload(300.0 + 100 * at, "a", [10 + at])
        assert events_until(pool, 300.0 + 100 * at) == [(300.0 + 100 * at, "a", EVICTED, (evicted,))]
        pool.advance(399.0 + 100 * at)


def test_blocks_in_use_or_in_transit_are_not_evicted_and_an_offload_over_capacity_is_refused() -> None:
    """Two blocks that are loaded until 202.5 and one in transit leave space for one; the others are refused."""
    pool = holding([1, 2])
    pool.load(200.0, [1, 2])
    pool.offload(200.0, "b", [3])
    pool.offload(201.0, "c", [4, 5, 6])
    assert events_until(pool, 201.0) == [(201.0, "c", PLAIN_STATE, (5, 6))]
    pool.offload(202.5, "c", [5])  # exactly when the load ends
    assert events_until(pool, 202.5) == [(202.5, "b", POOLED, (3,)), (202.5, "a", EVICTED, (2,))]
    assert (pool.stats().refused, pool.stats().evicted) == (2, 1)


def test_of_an_offload_larger_than_the_pool_the_head_is_kept() -> None:
    """A prefix needs its leading blocks, so the head of an offload is not evicted for its tail."""
    pool = holding([1, 2])
    pool.offload(100.0, "a", [1, 2, 3, 4, 5, 6])
    assert events_until(pool, 100.0) == [(100.0, "a", POOLED, (1, 2)), (100.0, "a", PLAIN_STATE, (5, 6))]
    pool.advance(200.0)
    assert set(pool.pooled()) == {1, 2, 3, 4}


# -- owners ------------------------------------------------------------------------------------------------------------


def test_the_unfinished_writes_of_an_engine_that_left_are_dropped_and_its_other_blocks_stay() -> None:
    """An engine that had joined the write gets an eviction, and the next write keeps its time."""
    pool = holding([1])
    pool.offload(100.0, "a", [2])
    pool.offload(100.0, "b", [2, 3])
    pool.leave(101.0, "a")
    assert (101.0, "b", EVICTED, (2,)) in events_until(pool, 101.0)
    assert events_until(pool, FOREVER) == [(104.5, "b", POOLED, (3,))]
    assert pool.load(FOREVER, [1]).n_blocks == 1
    pool.leave(FOREVER, "a")  # leaving twice changes nothing
    pool.check()


def test_an_eviction_that_no_engine_reports_is_counted() -> None:
    """When a block of an engine that left is evicted, there is no event, and the eviction counts as unreported."""
    pool = holding([1, 2])
    pool.leave(100.0, "a")
    pool.offload(100.0, "b", [3, 4, 5])
    assert events_until(pool, 100.0) == []
    assert (pool.stats().evicted, pool.stats().unreported) == (1, 1)


# -- properties --------------------------------------------------------------------------------------------------------

#: Chains of a small tree, so that content is shared and exceeds the capacity.
chains = st.builds(lambda root, length: [root * 10 + at for at in range(length)], st.integers(1, 4), st.integers(1, 4))
actions = st.lists(
    st.tuples(
        st.floats(0.0, 6.0),
        st.sampled_from(["offload"] * 4 + ["load"] * 2 + ["leave", "lose"]),
        st.integers(0, 2),
        chains,
    ),
    max_size=40,
)


class Owner:
    """One engine as its bridge sees it: the metadata that its reports lead to, by the table of states."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.n_begun = 0
        self.begin()

    def begin(self) -> None:
        self.n_begun += 1
        self.name = f"{self.number}/{self.n_begun}"
        self.blocks = EnginePoolBlocks(POOL.pool_id)
        self.metadata: dict[int, CxlMemoryMetadata] = {}

    def report(self, changed: CxlChanged | None) -> None:
        for name in [] if changed is None else changed.engine.tolist():
            assert changed is not None
            pool_id = changed.pool_id
            after = transition(self.metadata.get(name, NOT_POOLED), changed.state, pool_id)
            assert not isinstance(after, TransitionRefused), after
            self.metadata[name] = after

    def store(self, chain: list[int]) -> tuple[int, ...]:
        keys: Any = np.array(chain, dtype=np.uint64)
        names = keys + np.uint64(1000 * self.number)
        keys_new, changed = self.blocks.stored(KvStored(0.0, None, names, keys, keys, b"", 0, None))
        self.report(changed)
        return keys_new


def deliver(owners: Sequence[Owner], pool_events: Sequence[PoolEvent]) -> None:
    """Let each owner report the events that concern it."""
    names = {owner.name: owner for owner in owners}
    for each in pool_events:
        if each.owner in names:
            names[each.owner].report(names[each.owner].blocks.pool_changed(each.state, each.keys))


@settings(max_examples=300, deadline=None)
@given(actions, st.integers(1, 9))
def test_capacity_link_events_and_counts_are_those_of_an_oracle(done: list[Any], capacity: int) -> None:
    """In any sequence of actions, the capacity is never exceeded, no block arrives before the link carried it, no
    transition is illegal, and no block is evicted while it is loaded. Each block that was offloaded is pooled, in
    transit, evicted, or was dropped with its writer."""
    pool = SharedPool(replace(POOL, capacity_blocks=capacity))
    owners = [Owner(number) for number in range(3)]
    now_ms = write_free = read_free = 0.0
    writes: list[tuple[float, str, int]] = []  # end, writer, blocks
    loading: dict[int, float] = {}
    n_dropped = 0
    for wait_ms, action, number, chain in done:
        now_ms += wait_ms
        owner = owners[number]
        deliver(owners, pool.advance(now_ms))
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
            n_arrived = next((at for at, key in enumerate(chain) if key not in before), len(chain))
            assert load.n_blocks == n_arrived
            if n_arrived:
                read_free = max(now_ms, read_free) + n_arrived * POOL.load_ms_per_block
                assert load.end_ms == pytest.approx(read_free + POOL.latency_ms)
                loading.update({key: max(loading.get(key, 0.0), load.end_ms) for key in chain[:n_arrived]})
        else:
            pool.leave(now_ms, owner.name)
            n_dropped += sum(n for end, writer, n in writes if writer == owner.name and end > now_ms)
            writes = [write for write in writes if write[1] != owner.name]
            if action == "lose":
                owner.report(owner.blocks.lost())
                assert POOLED not in {each.state for each in owner.metadata.values()}
            owner.begin()
        deliver(owners, pool.advance(now_ms))
        pool.check()
        stats = pool.stats()
        assert stats.n_in_transit == sum(n for end, _, n in writes if end > now_ms)
        assert stats.n_pooled + stats.n_in_transit <= capacity
        assert stats.offloaded == stats.n_pooled + stats.n_in_transit + stats.evicted + n_dropped
        arrived = set(pool.pooled())
        assert {key for key, end in loading.items() if end > now_ms} <= arrived
        for each in owners:
            pooled = {key for key, state in each.blocks.states().items() if state is POOLED}
            assert pooled <= arrived
            assert {name - 1000 * each.number for name, meta in each.metadata.items() if meta.state is POOLED} == pooled
    deliver(owners, pool.advance(FOREVER))
    assert pool.stats().n_in_transit == 0
    assert all(state is POOLED for owner in owners for state in owner.blocks.states().values())


@settings(max_examples=60, deadline=None)
@given(actions)
def test_events_do_not_depend_on_how_often_the_pool_was_advanced(done: list[Any]) -> None:
    """Advancing once at the end gives the same events as advancing at every step."""
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
def test_an_invalid_pool_is_refused(wrong: dict[str, Any]) -> None:
    """Invalid numbers are refused, and so are names that the registry would refuse."""
    with pytest.raises(KvStreamsError):
        PoolConfig(**wrong)


def test_with_links_of_their_own_engines_do_not_wait_for_each_other() -> None:
    """Two engines each write and read two blocks at the same time, as fast as one alone; over one link, in turns."""
    cases: list[tuple[Literal["own", "shared"], float, float]] = [("own", 4.5, 102.5), ("shared", 8.5, 104.5)]
    for link, second_ms, load_ms in cases:
        pool = SharedPool(replace(POOL, link=link))
        pool.offload(0.0, "a", [1, 2])
        pool.offload(0.0, "b", [3, 4])
        assert events_until(pool, 50.0) == [(4.5, "a", POOLED, (1, 2)), (second_ms, "b", POOLED, (3, 4))]
        assert pool.load(100.0, [1, 2], "c").end_ms == 102.5
        assert pool.load(100.0, [1, 2], "d").end_ms == load_ms


def test_on_links_of_their_own_a_small_write_overtakes_a_large_one() -> None:
    """The one block of the second engine arrives first, and the events are in the order of time."""
    pool = SharedPool(replace(POOL, link="own"))
    pool.offload(0.0, "a", [1, 2, 3])
    pool.offload(1.0, "b", [4])
    assert events_until(pool, 50.0) == [(3.5, "b", POOLED, (4,)), (6.5, "a", POOLED, (1, 2, 3))]


def test_blocks_that_are_read_in_place_are_not_transferred() -> None:
    """They take only the latency, and the link stays free for others."""
    pool = holding([1, 2, 3, 4])
    assert pool.load(200.0, [1, 2, 3, 4], "c", in_place=True) == PoolLoad(4, 200.5)
    assert pool.load(200.0, [1, 2], "d").end_ms == 202.5


# -- an engine that loads ----------------------------------------------------------------------------------------------


def engine_with_pool() -> EngineModel:
    engine = EngineModel(CONFIG)
    engine.use_pool(True)
    return engine


def test_a_prefill_loads_what_the_pool_gives_and_computes_the_rest() -> None:
    """Two blocks of 14 tokens are loaded in 3 ms and 6 tokens take 10 + 6 ms, so the first token is out at 119."""
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
    engine.submit(200.0, ask("b", range(14)))  # the engine now holds them itself
    assert only(engine.advance(FOREVER), FirstToken) == [FirstToken("b", 212.0, 12.0, 12, 14, 0)]
    engine.check()


def test_the_pool_is_asked_for_blocks_after_the_engines_own_and_never_for_a_whole_prompt() -> None:
    """The engine uses its own blocks first, and computes the last block of 12 tokens even if the pool has it."""
    engine = engine_with_pool()
    engine.submit(0.0, ask("a", range(4)))  # its whole prompt is one block, so there is nothing to ask for
    assert only(engine.advance(FOREVER), PoolAsked) == []
    engine.submit(100.0, ask("b", range(12)))
    (asked,) = only(engine.advance(FOREVER), PoolAsked)
    assert len(asked.keys) == 1
    engine.pool_answered("b", 0, 0.0)
    assert only(engine.advance(FOREVER), FirstToken) == [FirstToken("b", 118.0, 18.0, 4, 12, 0)]


def test_no_request_starts_while_another_waits_for_the_pool_and_decoding_continues() -> None:
    """A prefill that loads occupies the GPU, and requests that were decoding finish."""
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
def test_an_impossible_answer_of_the_pool_is_refused_and_a_valid_one_is_still_accepted(
    request_id: str, n_blocks: int, wait_ms: float
) -> None:
    """An answer for another request, with too many or negative blocks, or without an end is refused."""
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
    """Late answers give the same first tokens as immediate ones, and no token is counted twice."""

    def run(lateness: Sequence[float]) -> tuple[list[FirstToken], EngineStats]:
        engine = EngineModel(replace(CONFIG, n_blocks=1000))
        engine.use_pool(True)
        submit_all(engine, asked)
        out: list[Output] = []
        n_asked = 0
        while (due_ms := engine.next_event_ms()) is not None:
            outputs = engine.advance(due_ms)
            for question in only(outputs, PoolAsked):
                outputs += engine.advance(due_ms + lateness[n_asked])
                engine.check()
                n_asked += 1
                n_given = max(0, len(question.keys) - n_missing)
                engine.pool_answered(question.request_id, n_given, 2.0 * n_given)
            out += outputs
        engine.check()
        return only(out, FirstToken), engine.stats()

    immediate, stats = run([0.0] * 14)
    assert sorted(run(lateness)[0], key=lambda token: token.at_ms) == immediate
    assert len(immediate) == len(asked)
    assert sum(token.pooled_tokens for token in immediate) == stats.loaded_tokens
    assert sum(token.prompt_tokens - token.cached_tokens for token in immediate) == stats.computed_tokens


# -- an engine that reads in place -------------------------------------------------------------------------------------


def reading_in_place(in_place: bool, **changes: Any) -> tuple[EngineModel, list[Output]]:
    """Let an engine answer 14 tokens with 6, of which the pool gives two blocks, and return its outputs."""
    engine = EngineModel(replace(CONFIG, **changes))
    engine.use_pool(True, in_place)
    engine.submit(100.0, ask("a", range(14), 6))
    engine.advance(FOREVER)
    engine.check()
    engine.pool_answered("a", 2, 3.0)
    out = engine.advance(FOREVER)
    engine.check()
    return engine, out


def test_a_prompt_that_is_read_in_place_takes_no_blocks_of_the_engine() -> None:
    """The request needs 5 blocks, of which it takes 3; the tokens and their times are the same otherwise."""
    loading, loaded = reading_in_place(False)
    in_place, read = reading_in_place(True)
    assert only(read, FirstToken) == only(loaded, FirstToken) == [FirstToken("a", 119.0, 19.0, 8, 14, 8)]
    assert only(read, Finished) == only(loaded, Finished)
    assert (loading.stats().n_blocks_used_max, in_place.stats().n_blocks_used_max) == (5, 3)
    assert (loading.stats().in_place_tokens, in_place.stats().in_place_tokens) == (0, 8)
    assert (loading.stats().loaded_tokens, in_place.stats().loaded_tokens) == (8, 8)


def test_blocks_that_are_read_in_place_are_reported_until_the_request_ends() -> None:
    """The stores name each other's blocks as parents without a gap, and only those of the pool end with the request."""
    engine, out = reading_in_place(True)
    first, *own = only(out, KvStored)
    assert (first.medium, first.start, len(first.engine), first.parent) == ("SHARED", 0, 2, None)
    assert [(stored.medium, stored.start, len(stored.engine), stored.generated) for stored in own] == [
        ("GPU", 2, 1, False),
        ("GPU", 3, 1, True),
    ]
    assert [stored.parent for stored in own] == [first.engine[-1], own[0].engine[-1]]
    (removed,) = only(out, KvRemoved)
    assert (removed.medium, removed.engine.tolist()) == ("SHARED", first.engine.tolist())
    assert sorted(engine.cached_blocks().position.tolist()) == [2, 3]
    # A copy that is loaded is stored as one, whose blocks have the same names.
    _, loaded = reading_in_place(False)
    (copied, *_) = only(loaded, KvStored)
    assert copied.engine.tolist() == [*first.engine.tolist(), *own[0].engine.tolist()]


def test_each_decode_step_reads_the_blocks_in_place_again() -> None:
    """Eight tokens at 500 us add 4 ms to each of 5 steps of 1 ms."""
    _, out = reading_in_place(True, in_place_us_per_token=500.0)
    assert only(out, Finished)[0].at_ms == 119.0 + 5 * (1.0 + 4.0)
    _, out = reading_in_place(False, in_place_us_per_token=500.0)
    assert only(out, Finished)[0].at_ms == 119.0 + 5 * 1.0


def test_a_cancelled_request_reports_that_it_no_longer_reads_in_place() -> None:
    """The removal comes with the next outputs, and the request's own blocks are free or cached."""
    engine = EngineModel(CONFIG)
    engine.use_pool(True, True)
    engine.submit(0.0, ask("a", range(14), 40))
    engine.advance(0.0)
    engine.pool_answered("a", 3, 1.0)
    engine.advance(25.0)
    engine.cancel(25.0, "a")
    engine.check()
    (removed,) = only(engine.advance(25.0), KvRemoved)
    assert (removed.medium, len(removed.engine), engine.stats().n_blocks_used) == ("SHARED", 3, 0)


@settings(max_examples=120, deadline=None)
@given(requests_, st.integers(0, 2))
def test_reading_in_place_keeps_every_invariant_and_needs_no_more_blocks(asked: Asked, n_missing: int) -> None:
    """In a small cache, with any requests, the same ones finish, and blocks that are in use never exceed the others."""

    def run(in_place: bool) -> tuple[set[str], EngineStats]:
        engine = EngineModel(CONFIG)
        engine.use_pool(True, in_place)
        submit_all(engine, asked)
        out: list[Output] = []
        mapped = 0
        while (due_ms := engine.next_event_ms()) is not None:
            outputs = engine.advance(due_ms)
            engine.check()
            for question in only(outputs, PoolAsked):
                n_given = max(0, len(question.keys) - n_missing)
                engine.pool_answered(question.request_id, n_given, 2.0 * n_given)
                engine.check()
            out += outputs
        for each in out:
            if isinstance(each, KvStored | KvRemoved) and each.medium == "SHARED":
                mapped += len(each.engine) if isinstance(each, KvStored) else -len(each.engine)
        assert mapped == 0
        return {each.request_id for each in only(out, Finished)}, engine.stats()

    (loading, load_stats), (reading, read_stats) = run(False), run(True)
    assert loading == reading
    assert read_stats.n_blocks_used == load_stats.n_blocks_used == 0
