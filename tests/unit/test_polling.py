"""Events that are polled over HTTP: what the feeds say while the engine does not answer."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
import zmq.asyncio

from streams.core.events import FeedState
from streams.core.ids import WorkerId
from streams.core.workers import Worker
from streams.engines.address import EngineAddress
from streams.engines.dialects.registry import DIALECTS
from streams.engines.feed import RankFeed
from streams.engines.link_delay import LATE_S
from streams.engines.polling import BACKOFF_S_MIN, ENGINE_WAITS_S, POLL_EVERY_S, Answers, polled
from streams.engines.wiring import EngineWiring
from streams.settings import Settings
from tests.helpers.feeds import FeedUnderTest, held_lease
from tests.helpers.polled_engine import PolledEngine
from tests.helpers.recording_producer import RecordingProducer
from tests.helpers.trtllm_events import block, created, removed, stored

LIVE, CATCHING_UP = FeedState.LIVE, FeedState.CATCHING_UP


def test_events_are_late_once_the_last_answer_is_too_old() -> None:
    """A request that fails and is repeated at once changes nothing."""
    answers = Answers()
    answers.asked(0.0)
    answers.failed()
    assert not answers.are_late(100.0)  # nothing has been received that could be out of date
    answers.answered(100.0)
    answers.asked(100.0 + POLL_EVERY_S)
    answers.failed()
    assert not answers.are_late(100.0 + POLL_EVERY_S + BACKOFF_S_MIN)
    assert answers.are_late(100.0 + LATE_S)
    answers.answered(200.0)
    assert not answers.are_late(200.0)


def test_an_engine_without_events_may_hold_its_answer_back() -> None:
    """It waits for its first event; one that hangs is noticed afterwards."""
    answers = Answers()
    answers.answered(100.0)
    answers.asked(100.0)
    assert not answers.are_late(100.0 + ENGINE_WAITS_S)
    assert answers.are_late(100.0 + ENGINE_WAITS_S + LATE_S)


@pytest.mark.parametrize("hangs", [False, True], ids=["errors", "hangs"])
async def test_a_feed_is_behind_while_its_engine_cannot_be_polled(hangs: bool) -> None:
    """Its metrics page works, and the feed's own socket is connected; the feed is live again after an answer."""

    async def act(fed: FeedUnderTest, engine: PolledEngine) -> None:
        engine.report(created(), stored(block(1, list(range(16)))))
        await fed.until(lambda: fed.numbers() == [0, 1] and fed.state is LIVE, "the first events")
        engine.status, engine.hangs = (200, True) if hangs else (500, False)
        engine.report(removed(1))
        await fed.until(lambda: fed.state is CATCHING_UP, "the failed requests to be stated")
        assert fed.numbers() == [0, 1]
        engine.status, engine.hangs = 200, False
        await fed.until(lambda: fed.numbers() == [0, 1, 2] and fed.state is LIVE, "the next answer")

    settings, context, producer = Settings(bridge_lease_s=600.0), zmq.asyncio.Context(), RecordingProducer()
    with PolledEngine("m") as engine:
        dialect = DIALECTS["trtllm"]
        address = EngineAddress(WorkerId(7), engine.url, engine.events, None, model="m", dialect=dialect)
        lease = held_lease(settings, Worker(WorkerId(7), engine.url, "m", 16))
        async with aiohttp.ClientSession() as http:
            wiring = EngineWiring(settings, producer, context, http, address, "m", lease, 1, lambda _: 0)
            async with polled(wiring) as read:
                fed = FeedUnderTest(RankFeed(read, 0, None), producer)
                running = asyncio.create_task(fed.feed.run())
                try:
                    await act(fed, engine)
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
    context.destroy(linger=0)
