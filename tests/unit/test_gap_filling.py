"""Gaps in an engine's batches: filled from a real replay socket, given up, or found to be of another incarnation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import zmq.asyncio

from streams.core.ids import DpRank, RankId, WorkerId
from streams.engines import gap_filling
from streams.engines.feed_counters import FeedCounters
from streams.engines.gap_filling import GapFiller, ReplayFinding
from streams.engines.replay import Batch
from tests.helpers.engine_double import EngineDouble

RANK = RankId(WorkerId(1), DpRank(0))


class Sink:
    """Records the batches that are published, as a feed would publish them."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.n_losses = 0
        self.filler: GapFiller | None = None

    async def publish(self, batch: Batch) -> None:
        assert self.filler is not None
        self.filler.digests.add(batch)
        self.published.append(batch.sequence)

    def on_batches_lost(self) -> None:
        self.n_losses += 1

    def on_engine_heard(self) -> None:
        pass


def with_filler(
    replay_address: str | None, act: Callable[[GapFiller], Awaitable[None]], counters: FeedCounters | None = None
) -> Sink:
    async def main() -> Sink:
        context, sink = zmq.asyncio.Context(), Sink()
        sink.filler = GapFiller(sink, context, replay_address, RANK, counters or FeedCounters())
        await act(sink.filler)
        context.destroy(linger=0)
        return sink

    return asyncio.run(main())


def payload(sequence: int) -> bytes:
    return b"payload %d" % sequence


def test_missing_batches_are_requested_and_published_before_the_buffered_one() -> None:
    """A gap is filled from the replay socket, and the batch that was buffered after it follows."""
    counters = FeedCounters()
    with EngineDouble() as engine:
        for sequence in range(4):
            engine.send(payload(sequence))

        async def act(filler: GapFiller) -> None:
            await filler.offer(Batch(0, payload(0)))
            await filler.offer(Batch(3, payload(3)))
            assert filler.next == 1
            assert await filler.fill_gap() is ReplayFinding.CONSISTENT
            assert filler.next == 4

        sink = with_filler(engine.replay, act, counters)
    assert sink.published == [0, 1, 2, 3]
    assert (counters.gaps, counters.gap_batches_filled, counters.gap_batches_lost, sink.n_losses) == (1, 2, 0, 0)


def test_batches_that_the_engine_no_longer_keeps_are_lost() -> None:
    """The batches before the first one kept are given up, and the others are published."""
    counters = FeedCounters()
    with EngineDouble(kept=2) as engine:
        for sequence in range(5):
            engine.send(payload(sequence))

        async def act(filler: GapFiller) -> None:
            assert await filler.catch_up() is ReplayFinding.CONSISTENT

        sink = with_filler(engine.replay, act, counters)
    assert sink.published == [3, 4]
    assert (counters.gap_batches_lost, sink.n_losses) == (3, 1)


def test_without_a_replay_socket_a_gap_is_given_up_at_once() -> None:
    """An engine without a replay socket cannot fill a gap, so the buffered batch is published without waiting."""
    counters = FeedCounters()

    async def act(filler: GapFiller) -> None:
        await filler.offer(Batch(2, payload(2)))
        assert await filler.fill_gap() is ReplayFinding.CONSISTENT
        assert await filler.catch_up() is ReplayFinding.CONSISTENT

    sink = with_filler(None, act, counters)
    assert (sink.published, counters.gap_batches_lost, counters.replays) == ([2], 2, 0)


def test_a_silent_replay_socket_is_given_up_after_the_hold_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next attempt is not due, filling returns at once; after GAP_HOLD_S the gap is given up."""
    counters = FeedCounters()

    async def silent(*_: object) -> gap_filling._Replay:
        counters.replays += 1
        return gap_filling._Replay()

    monkeypatch.setattr(GapFiller, "_request", silent)

    async def act(filler: GapFiller) -> None:
        await filler.offer(Batch(1, payload(1)))
        assert await filler.fill_gap() is ReplayFinding.CONSISTENT
        assert await filler.fill_gap() is ReplayFinding.CONSISTENT
        assert counters.replays == 1 and filler.next == 0
        monkeypatch.setattr(gap_filling, "GAP_HOLD_S", 0.0)
        assert await filler.fill_gap() is ReplayFinding.CONSISTENT
        assert filler.next == 2

    assert with_filler("ipc:///nowhere", act, counters).published == [1]


def test_a_batch_beyond_the_engines_numbers_is_foreign_and_dropped() -> None:
    """A batch with a number that the engine has not reached yet comes from an older incarnation."""
    counters = FeedCounters()
    with EngineDouble() as engine:
        engine.send(payload(0))

        async def act(filler: GapFiller) -> None:
            await filler.offer(Batch(0, payload(0)))
            await filler.offer(Batch(9, b"from an older incarnation"))
            assert await filler.fill_gap() is ReplayFinding.FOREIGN
            assert await filler.fill_gap() is ReplayFinding.CONSISTENT

        sink = with_filler(engine.replay, act, counters)
    assert (sink.published, counters.batches_foreign) == ([0], 1)


def test_another_batch_under_a_published_number_contradicts() -> None:
    """The replay of a restarted engine has other bytes under the last number that was published."""
    with EngineDouble() as engine:
        engine.send(b"of the new incarnation")

        async def act(filler: GapFiller) -> None:
            await filler.offer(Batch(0, b"of the old incarnation"))
            assert await filler.catch_up() is ReplayFinding.CONTRADICTED

        assert with_filler(engine.replay, act).published == [0]


def test_a_number_that_the_engine_never_sent_contradicts() -> None:
    """An engine keeps at least its last batch, so one that has nothing from the last number on never sent that."""
    with EngineDouble() as engine:
        engine.send(payload(0))

        async def act(filler: GapFiller) -> None:
            filler.continue_after(5, digest=1)
            assert filler.next == 6
            assert await filler.catch_up() is ReplayFinding.CONTRADICTED

        assert with_filler(engine.replay, act).published == []
