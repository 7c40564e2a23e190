"""Gaps in an engine's batches: filled from a real replay socket, given up, or found to be of another incarnation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import zmq
import zmq.asyncio

from streams.core.ids import DpRank, RankId, WorkerId
from streams.engines import gap_filling
from streams.engines.feed_counters import GapCounters
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

    async def publish(self, batch: Batch, arrived_at_s: float | None = None) -> None:  # noqa: ARG002
        assert self.filler is not None
        self.filler.digests.add(batch)
        self.published.append(batch.sequence)

    def on_batches_lost(self) -> None:
        self.n_losses += 1

    def on_engine_heard(self) -> None:
        pass


def with_filler(
    replay_address: str | None, act: Callable[[GapFiller], Awaitable[None]], counters: GapCounters | None = None
) -> Sink:
    async def main() -> Sink:
        context, sink = zmq.asyncio.Context(), Sink()
        sink.filler = GapFiller(sink, context, replay_address, RANK, counters or GapCounters())
        await act(sink.filler)
        context.destroy(linger=0)
        return sink

    return asyncio.run(main())


async def settle(filler: GapFiller) -> ReplayFinding:
    """Advance until no replay is running; return the last finding."""
    while True:
        finding = await filler.advance()
        if finding is not ReplayFinding.CONSISTENT or filler.answer is None:
            return finding
        await asyncio.wait({filler.answer}, timeout=0.05)


def payload(sequence: int) -> bytes:
    return b"payload %d" % sequence


def test_only_the_next_batch_of_a_stream_without_a_gap_may_be_passed_on() -> None:
    """Early batches, batches of the past, and the next one while others are buffered have to be offered."""

    async def act(filler: GapFiller) -> None:
        assert filler.pass_next(Batch(0, payload(0))) and filler.next == 1
        for sequence in (0, 2):
            assert not filler.pass_next(Batch(sequence, payload(sequence))) and filler.next == 1
        await filler.offer(Batch(2, payload(2)))
        assert not filler.pass_next(Batch(1, payload(1)))
        await filler.offer(Batch(1, payload(1)))
        assert filler.pass_next(Batch(3, payload(3))) and filler.next == 4

    assert with_filler(None, act).published == [1, 2]  # those that were passed on are the caller's to publish


def test_missing_batches_are_requested_and_published_before_the_buffered_one() -> None:
    """A gap is filled from the replay socket, and the batch that was buffered after it follows."""
    counters = GapCounters()
    with EngineDouble() as engine:
        for sequence in range(4):
            engine.send(payload(sequence))

        async def act(filler: GapFiller) -> None:
            await filler.offer(Batch(0, payload(0)))
            await filler.offer(Batch(3, payload(3)))
            assert filler.next == 1
            assert filler.is_behind(time.monotonic())
            assert await settle(filler) is ReplayFinding.CONSISTENT
            assert filler.next == 4
            assert not filler.is_behind(time.monotonic())

        sink = with_filler(engine.replay, act, counters)
    assert sink.published == [0, 1, 2, 3]
    assert (counters.gaps, counters.gap_batches_filled, counters.gap_batches_lost, sink.n_losses) == (1, 2, 0, 0)


def test_batches_that_the_engine_no_longer_keeps_are_lost() -> None:
    """The batches before the first one kept are given up, and the others are published."""
    counters = GapCounters()
    with EngineDouble(kept=2) as engine:
        for sequence in range(5):
            engine.send(payload(sequence))

        async def act(filler: GapFiller) -> None:
            filler.catch_up()
            assert await settle(filler) is ReplayFinding.CONSISTENT

        sink = with_filler(engine.replay, act, counters)
    assert sink.published == [3, 4]
    assert (counters.gap_batches_lost, sink.n_losses) == (3, 1)


def test_without_a_replay_socket_a_gap_is_given_up_at_once() -> None:
    """An engine without a replay socket cannot fill a gap, so the buffered batch is published without waiting."""
    counters = GapCounters()

    async def act(filler: GapFiller) -> None:
        await filler.offer(Batch(2, payload(2)))
        assert await filler.advance() is ReplayFinding.CONSISTENT
        filler.catch_up()
        assert await settle(filler) is ReplayFinding.CONSISTENT

    sink = with_filler(None, act, counters)
    assert (sink.published, counters.gap_batches_lost, counters.replays) == ([2], 2, 0)


def test_a_silent_replay_socket_is_given_up_after_the_hold_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed continues while the answer is awaited and the next attempt is not due, and is behind all that time."""
    counters = GapCounters()
    monkeypatch.setattr(gap_filling, "REPLAY_TIMEOUT_S", 0.1)

    async def act(filler: GapFiller) -> None:
        await filler.offer(Batch(1, payload(1)))
        assert await filler.advance() is ReplayFinding.CONSISTENT
        assert filler.answer is not None and filler.takes_live
        assert await settle(filler) is ReplayFinding.CONSISTENT
        assert await filler.advance() is ReplayFinding.CONSISTENT
        assert (counters.replays, counters.replays_unanswered) == (1, 1) and filler.next == 0
        assert filler.is_behind(time.monotonic())
        monkeypatch.setattr(gap_filling, "GAP_HOLD_S", 0.0)
        assert await filler.advance() is ReplayFinding.CONSISTENT
        assert filler.next == 2 and not filler.is_behind(time.monotonic())

    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.bind("tcp://127.0.0.1:*")
        assert with_filler(mute.getsockopt_string(zmq.LAST_ENDPOINT), act, counters).published == [1]


def test_live_batches_are_published_while_a_catch_up_is_not_answered() -> None:
    """A socket that answered before and is silent now shows that the feed may be behind, until a batch follows."""

    async def act(filler: GapFiller) -> None:
        await filler.offer(Batch(0, payload(0)))
        filler.catch_up()
        assert await settle(filler) is ReplayFinding.CONSISTENT
        began_s = time.monotonic()
        assert filler.answered_from_s <= began_s and not filler.is_behind(began_s)
        engine.stop_replays()
        filler.catch_up()
        assert not filler.is_behind(began_s)
        assert filler.is_behind(began_s + gap_filling.ANSWER_LATE_S + 1.0)
        assert await filler.advance() is ReplayFinding.CONSISTENT
        await filler.offer(Batch(1, payload(1)))
        assert filler.next == 2 and filler.answer is not None
        filler.abort()
        assert not filler.is_behind(began_s + 100.0)

    with EngineDouble() as engine:
        engine.send(payload(0))
        assert with_filler(engine.replay, act).published == [0, 1]


def test_live_batches_wait_while_a_replay_brings_what_precedes_them() -> None:
    """From the first answer to the last one, the feed is behind if the replay has batches that were not published."""

    async def act(filler: GapFiller) -> None:
        filler.catch_up()
        behind = []
        while filler.answer is not None:
            await filler.answer
            assert await filler.advance() is ReplayFinding.CONSISTENT
            behind.append((filler.answer is not None, filler.is_behind(time.monotonic()), not filler.takes_live))
        assert behind[-1] == (False, False, False)
        assert all(running == waiting == late for running, late, waiting in behind)

    with EngineDouble() as engine:
        for sequence in range(3 * gap_filling.ANSWERS_AT_ONCE):
            engine.send(payload(sequence))
        assert with_filler(engine.replay, act).published == list(range(3 * gap_filling.ANSWERS_AT_ONCE))


def test_a_batch_beyond_the_engines_numbers_is_foreign_and_dropped() -> None:
    """A batch with a number that the engine has not reached yet comes from an older incarnation."""
    counters = GapCounters()
    with EngineDouble() as engine:
        engine.send(payload(0))

        async def act(filler: GapFiller) -> None:
            await filler.offer(Batch(0, payload(0)))
            await filler.offer(Batch(9, b"from an older incarnation"))
            assert await settle(filler) is ReplayFinding.FOREIGN
            assert await settle(filler) is ReplayFinding.CONSISTENT

        sink = with_filler(engine.replay, act, counters)
    assert (sink.published, counters.batches_foreign) == ([0], 1)


def test_another_batch_under_a_published_number_contradicts() -> None:
    """The replay of a restarted engine has other bytes under the last number that was published."""
    with EngineDouble() as engine:
        engine.send(b"of the new incarnation")

        async def act(filler: GapFiller) -> None:
            await filler.offer(Batch(0, b"of the old incarnation"))
            filler.catch_up()
            assert await settle(filler) is ReplayFinding.CONTRADICTED

        assert with_filler(engine.replay, act).published == [0]


def test_a_number_that_the_engine_never_sent_contradicts() -> None:
    """An engine keeps at least its last batch, so one that has nothing from the last number on never sent that."""
    with EngineDouble() as engine:
        engine.send(payload(0))

        async def act(filler: GapFiller) -> None:
            filler.continue_after(5, digest=1)
            assert filler.next == 6
            filler.catch_up()
            assert await settle(filler) is ReplayFinding.CONTRADICTED

        assert with_filler(engine.replay, act).published == []
