"""The feed of one rank when batches contradict what it has published: which process do they belong to?"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from streams.core.events import FeedState
from streams.engines import feed_machine
from tests.helpers.engine_double import EngineDouble
from tests.helpers.feeds import FeedUnderTest, address_of, feeding

LIVE, CATCHING_UP = FeedState.LIVE, FeedState.CATCHING_UP

#: Ample for a subscription to reach the engine once the connection is complete.
SUBSCRIBED_S = 0.5


async def connected(fed: FeedUnderTest) -> None:
    """Wait until the engine's batches reach the feed."""
    await fed.until(lambda: fed.feed._receiver.connection.completed_at_s is not None, "the connection")
    await asyncio.sleep(SUBSCRIBED_S)


@pytest.mark.parametrize("replay", ["", None], ids=["replay", "no replay"])
def test_another_core_behind_the_same_http_server_begins_an_incarnation(replay: str | None) -> None:
    """The start time is that of the HTTP server; the bytes of the batches show that another process sends them."""
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await connected(fed)
            for n in range(5):
                engine.store(1 + 100 * n)
            await fed.until(lambda: fed.numbers() == list(range(5)) and fed.state is LIVE, "five batches")
            first = fed.batches[-1].incarnation
            n_before = len(fed.batches)
            await asyncio.to_thread(engine.replace_core)
            await fed.until(lambda: fed.state is not LIVE, "the broken connection to be stated")
            await connected(fed)
            for n in range(8):
                engine.store(10_001 + 100 * n)
            await fed.until(lambda: fed.numbers()[5:] == list(range(8)) and fed.state is LIVE, "the new batches")
            live = {batch.incarnation for batch in fed.batches[n_before:] if batch.feed is LIVE}
            assert live == {fed.batches[-1].incarnation} and first not in live
            ledger = fed.feed._writer.ledger
            assert ledger.complete and len(ledger) == len(engine.held)

        feeding(address_of(engine, replay=replay), act)


@pytest.mark.parametrize("replay", ["", None], ids=["replay", "no replay"])
def test_a_stray_batch_ends_no_incarnation(replay: str | None) -> None:
    """The rank is behind until a batch shows that the connection goes on with the known numbers."""
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await connected(fed)
            for n in range(3):
                engine.store(1 + 100 * n)
            await fed.until(lambda: fed.numbers() == [0, 1, 2] and fed.state is LIVE, "three batches")
            engine.send_stray(1)
            await fed.until(lambda: fed.state is CATCHING_UP, "the contradiction to be stated")
            await fed.until(lambda: fed.feed.counters.batches_foreign == 1, "the stray batch to be dropped")
            engine.store(1000)
            await fed.until(lambda: fed.numbers() == [0, 1, 2, 3] and fed.state is LIVE, "the next batch")

        batches = feeding(address_of(engine, replay=replay), act)
    assert len({batch.incarnation for batch in batches}) == 1


def test_several_batches_that_contradict_begin_an_incarnation() -> None:
    """Another process sends them, although the connection has not broken."""
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await connected(fed)
            for n in range(3):
                engine.store(1 + 100 * n)
            await fed.until(lambda: fed.numbers() == [0, 1, 2] and fed.state is LIVE, "three batches")
            engine.send_stray(0)
            engine.send_stray(1)
            await fed.until(lambda: fed.feed.counters.incarnations == 2, "another incarnation")

        feeding(address_of(engine, replay=None), act)


def test_contradictions_without_end_are_stated_and_fill_no_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay socket is that of another engine by mistake: the rank is never live again, and its feed waits."""
    monkeypatch.setattr(feed_machine, "RETRY_S", 600.0)
    with EngineDouble() as engine, EngineDouble() as other:
        for n in range(5):
            other.store(1 + 100 * n)

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.numbers() == list(range(5)) and fed.state is LIVE, "the other engine's batches")
            n_before = len(fed.batches)
            for n in range(4):
                engine.store(10_001 + 100 * n)
            await fed.until(lambda: fed.state is CATCHING_UP, "the contradiction to be stated")
            await asyncio.sleep(2.0)
            states = [batch.feed for batch in fed.batches[n_before:]]
            assert set(states) == {CATCHING_UP} and len(states) < 10

        feeding(replace(address_of(engine), replay=other.replay), act)
