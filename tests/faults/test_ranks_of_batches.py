"""Which rank a batch is about is what the engine says, and not what the order of its ports suggests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import msgpack
import pytest

from streams.core.events import BlocksStored, EngineEvents, FeedState
from streams.core.workers import Worker
from streams.engines import engine_ranks
from streams.engines.address import EngineAddress
from streams.engines.engine_ranks import AGREEING_BATCHES, CONTRADICTION_S, MOVES_MAX, EngineRanks, Naming
from streams.engines.metrics import parse_metrics, ranks_on_page
from streams.kafka.records import decode_worker
from streams.lab.kafka.ports import free_ports_in_a_row
from tests.helpers.bridged_engine import RANK, EngineUnderTest
from tests.helpers.engine_double import EngineDouble
from tests.helpers.fed_engine import SUBSCRIBED_S, batches_of, bridging, warnings_of

#: Time in which records that must not come would come.
SETTLED_S = 1.5


class Ranks:
    """Two engines as the two sockets of one, whose HTTP server is that of the first; each has a replay socket."""

    def __init__(self, first: EngineDouble, second: EngineDouble) -> None:
        self.sockets = first, second

    def store(self, socket: int, named: int | None, first_token: int = 1000) -> None:
        """Publish a batch with four blocks that names a rank."""
        tokens = list(range(first_token, first_token + 64))
        stored = ["BlockStored", [first_token + n for n in range(4)], None, tokens, 16]
        self.sockets[socket].send(msgpack.packb([time.time(), [stored], *([] if named is None else [named])]))

    def address(self, *, with_replay: bool = True, dp_start: int | None = None) -> EngineAddress:
        first = self.sockets[0]
        replay = first.replay if with_replay else None
        return EngineAddress(RANK.worker_id, first.url, first.events, replay, dp_size=2, dp_start=dp_start, model="m")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """An engine with two ranks."""
    events, replay = free_ports_in_a_row(2), free_ports_in_a_row(2)
    with ExitStack() as stack:
        yield Ranks(*(stack.enter_context(EngineDouble(ports=(None, events + n, replay + n))) for n in range(2)))


def stored_of(engine: EngineUnderTest) -> dict[int, int]:
    """How many blocks the records of each rank's last incarnation store."""
    batches = batches_of(engine)
    last = {int(batch.rank.dp_rank): batch.incarnation for batch in batches}
    stored: dict[int, int] = dict.fromkeys(last, 0)
    for batch in batches:
        number = int(batch.rank.dp_rank)
        if batch.incarnation == last[number] and isinstance(batch.body, EngineEvents):
            stored[number] += sum(len(event.engine) for event in batch.body.events if isinstance(event, BlocksStored))
    return stored


def feed_of(engine: EngineUnderTest, dp_rank: int) -> FeedState | None:
    states = [batch.feed for batch in batches_of(engine) if batch.rank.dp_rank == dp_rank]
    return states[-1] if states else None


def worker_of(engine: EngineUnderTest) -> Worker:
    return decode_worker(engine.producer.values("workers")[-1])


async def connected(engine: EngineUnderTest, n_ranks: int = 2) -> None:
    await engine.until(lambda: len({batch.rank for batch in batches_of(engine)}) == n_ranks, "the feeds")
    await asyncio.sleep(SUBSCRIBED_S)


def test_a_batch_of_another_rank_is_published_as_that_ranks(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    async def act(engine: EngineUnderTest) -> None:
        await connected(engine)
        ranks.store(0, 1)
        await engine.until(lambda: stored_of(engine) == {0: 0, 1: 4}, "the blocks of rank 1")
        ranks.store(1, 0, 5000)
        await engine.until(lambda: stored_of(engine) == {0: 4, 1: 4}, "the blocks of rank 0")
        await engine.until(lambda: [feed_of(engine, n) for n in (0, 1)] == [FeedState.LIVE] * 2, "both to be live")
        assert worker_of(engine).dp_start == 0

    bridging(ranks.address(), act)
    assert len(warnings_of(caplog, "has the batches of rank")) == 1


def test_without_a_replay_socket_no_rank_claims_to_have_what_was_lost(ranks: Ranks) -> None:
    async def act(engine: EngineUnderTest) -> None:
        await connected(engine)
        ranks.store(0, 1)
        await engine.until(lambda: engine.bridged.ranks.of(0) == 1, "the ranks to be exchanged")
        await asyncio.sleep(SETTLED_S)
        assert stored_of(engine)[0] == 0 and FeedState.LIVE not in {feed_of(engine, n) for n in (0, 1)}

    bridging(ranks.address(with_replay=False), act)


def test_two_sockets_with_the_batches_of_one_rank_are_not_exact(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever of them is right, the events of the other rank are missing."""

    async def act(engine: EngineUnderTest) -> None:
        await connected(engine)
        ranks.store(0, 0)
        await engine.until(lambda: stored_of(engine)[0] == 4, "the blocks of rank 0")
        for n in range(3):
            ranks.store(1, 0, 5000 + 100 * n)
        await engine.until(lambda: bool(warnings_of(caplog, "it is not known which rank")), "the warning")
        await engine.until(lambda: FeedState.LIVE not in {feed_of(engine, n) for n in (0, 1)}, "no rank to be live")
        assert stored_of(engine) == {0: 4, 1: 0}

    bridging(ranks.address(), act)
    assert len(warnings_of(caplog, "it is not known which rank")) == 1


@pytest.mark.parametrize("source", ["address", "batches", "metrics"])
def test_ranks_may_begin_at_any_number(ranks: Ranks, source: str) -> None:
    if source == "metrics":
        names = "\n".join(f'vllm:num_requests_running{{engine="{n}"}} 0' for n in (8, 9))
        ranks.sockets[0].gauges = f"{names}\n"

    async def act(engine: EngineUnderTest) -> None:
        await connected(engine)
        ranks.store(0, 8)
        ranks.store(1, 9, 5000)
        await engine.until(lambda: {n: stored_of(engine).get(n) for n in (8, 9)} == {8: 4, 9: 4}, "their blocks")
        worker = worker_of(engine)
        assert (worker.dp_start, [int(rank.dp_rank) for rank in worker.ranks()]) == (8, [8, 9])

    bridging(ranks.address(dp_start=8 if source == "address" else None), act)


def test_a_single_rank_may_have_any_number(caplog: pytest.LogCaptureFixture) -> None:
    async def act(engine: EngineUnderTest) -> None:
        await connected(engine, 1)
        double.send(msgpack.packb([time.time(), [["BlockStored", [1], None, list(range(16)), 16]], 3]))
        await engine.until(lambda: stored_of(engine) == {0: 1}, "the block")

    with EngineDouble() as double:
        bridging(EngineAddress(RANK.worker_id, double.url, double.events, double.replay, model="m"), act)
    assert not warnings_of(caplog, "rank")


def test_batches_that_name_no_rank_are_those_of_their_socket(ranks: Ranks) -> None:
    async def act(engine: EngineUnderTest) -> None:
        await connected(engine)
        ranks.store(1, None)
        await engine.until(lambda: stored_of(engine) == {0: 0, 1: 4}, "the blocks of rank 1")

    bridging(ranks.address(), act)


def test_sockets_exchange_their_ranks_once_and_contradict_themselves_after_that() -> None:
    ranks = EngineRanks(3)
    assert ranks.on_batch(0, 2, 1.0) is Naming.MOVED and [ranks.of(n) for n in range(3)] == [2, 1, 0]
    assert ranks.on_batch(0, 2, 2.0) is Naming.FITS and ranks.on_batch(2, 0, 2.0) is Naming.FITS
    assert not ranks.are_contradicted(2.0)
    assert ranks.on_batch(0, 1, 3.0) is Naming.CONTRADICTS and ranks.are_contradicted(3.0)
    ranks.begin(0)
    assert not ranks.are_contradicted(3.0) and ranks.on_batch(0, 1, 3.0) is Naming.CONTRADICTS


def test_a_contradiction_ends_some_time_after_an_empty_cache_without_another_one() -> None:
    ranks = EngineRanks(1)
    assert ranks.on_batch(0, 0, 0.0) is Naming.FITS
    assert ranks.on_batch(0, 1, 1.0) is Naming.CONTRADICTS
    assert ranks.on_batch(0, 0, 2.0) is Naming.FITS and ranks.are_contradicted(1000.0)
    ranks.on_clear(0)
    assert ranks.are_contradicted(1.0 + CONTRADICTION_S / 2) and not ranks.are_contradicted(1.0 + CONTRADICTION_S)
    assert ranks.on_batch(0, 1, 8.0) is Naming.CONTRADICTS and ranks.are_contradicted(8.0 + CONTRADICTION_S)


@pytest.mark.parametrize("dp_size", [1, 2, 8])
@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_damaged_first_batch_is_overruled_by_those_after_it(dp_size: int, begins_anew: bool) -> None:
    """Also if no other rank has anything to report. Feeds begin anew after a move, and when the engine restarts."""
    ranks = EngineRanks(dp_size)
    assert ranks.on_batch(0, 5, 0.0) is (Naming.FITS if dp_size == 1 else Naming.MOVED)
    if dp_size > 1 or begins_anew:
        ranks.begin(0)
    if dp_size > 1 or not begins_anew:
        assert [ranks.on_batch(0, 0, 1.0) for _ in range(AGREEING_BATCHES - 1)] == [Naming.CONTRADICTS] * 2
        assert ranks.on_batch(0, 0, 1.0) is (Naming.FITS if dp_size == 1 else Naming.MOVED)
    assert ranks.on_batch(0, 0, 2.0) is Naming.FITS
    assert [ranks.of(n) for n in range(dp_size)] == list(range(dp_size))


def test_contrary_batches_that_do_not_follow_each_other_change_nothing() -> None:
    ranks = EngineRanks(2)
    for n in range(3 * AGREEING_BATCHES):
        assert ranks.on_batch(0, 0, float(n)) is Naming.FITS
        assert ranks.on_batch(0, 5, float(n)) is Naming.CONTRADICTS
        assert ranks.on_batch(0, 6 + n % 2, float(n)) is Naming.CONTRADICTS
    assert ranks.start == 0


def test_two_ranks_on_one_socket_do_not_move_ranks_without_end() -> None:
    ranks, found = EngineRanks(2), []
    for n in range(20):
        for _ in range(2 * AGREEING_BATCHES):
            found.append(ranks.on_batch(0, n % 2, float(n)))
            if found[-1] is Naming.MOVED:
                ranks.begin(0)
    assert found.count(Naming.MOVED) == MOVES_MAX
    assert found[-12:-6] == [Naming.CONTRADICTS] * 6 and ranks.are_contradicted(1000.0)


def test_a_socket_never_takes_the_rank_that_another_one_names() -> None:
    ranks = EngineRanks(2)
    assert ranks.on_batch(0, 0, 0.0) is Naming.FITS
    assert [ranks.on_batch(1, 0, 1.0) for _ in range(9)] == [Naming.CONTRADICTS] * 9


@pytest.mark.parametrize("with_replay", [True, False])
def test_an_engine_whose_first_batch_was_damaged_is_fed_under_its_own_ranks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, with_replay: bool
) -> None:
    monkeypatch.setattr(engine_ranks, "CONTRADICTION_S", 0.2)

    async def act(engine: EngineUnderTest) -> None:
        await connected(engine)
        ranks.store(0, 5)
        await engine.until(lambda: worker_of(engine).dp_start == 5, "the ranks that the batch names")
        await asyncio.sleep(SUBSCRIBED_S)
        for n in range(AGREEING_BATCHES):
            ranks.store(0, 0, 2000 + 100 * n)
        await engine.until(lambda: worker_of(engine).dp_start == 0, "the engine's own ranks")
        await asyncio.sleep(SUBSCRIBED_S)
        ranks.sockets[0].clear()
        ranks.store(0, 0, 5000)
        await engine.until(lambda: stored_of(engine).get(0, 0) >= 4, "the blocks of rank 0")
        if with_replay:
            await engine.until(lambda: feed_of(engine, 0) is FeedState.LIVE, "rank 0 to be live")

    bridging(ranks.address(with_replay=with_replay), act)


def test_a_rank_outside_of_those_that_the_operator_has_set_contradicts_them() -> None:
    ranks = EngineRanks(2, 8)
    assert ranks.on_batch(0, 0, 1.0) is Naming.CONTRADICTS and ranks.start == 8
    ranks.on_page({0, 1})
    assert ranks.start == 8


@pytest.mark.parametrize("numbers", [{8}, {8, 10}, {8, 9, 10}, set()])
def test_a_page_that_does_not_name_as_many_ranks_in_a_row_says_nothing(numbers: set[int]) -> None:
    ranks = EngineRanks(2)
    ranks.on_page(numbers)
    assert ranks.start == 0


def test_metrics_are_those_of_the_numbered_ranks() -> None:
    page = "".join(f'vllm:num_requests_running{{engine="{n}"}} {n}.0\n' for n in range(8, 16)).encode()
    assert ranks_on_page(page) == set(range(8, 16))
    metrics = parse_metrics(page, dp_size=8, block_size=16, dp_start=8)
    assert {int(rank): of_rank.request_active_slots for rank, of_rank in metrics.items()} == {
        n: n for n in range(8, 16)
    }
    assert list(parse_metrics(page, dp_size=1, block_size=16)) == [0]


def test_a_worker_with_ranks_from_eight_on_is_written_and_read() -> None:
    worker = Worker(RANK.worker_id, "http://gpu1", "m", 16, dp_size=2, dp_start=8)
    assert replace(worker, dp_start=0) != worker and [rank.dp_rank for rank in worker.ranks()] == [8, 9]
