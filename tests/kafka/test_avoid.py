"""Workers that requests avoid for a while: two routers on a real Kafka, the client, and what starts later."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from streams.client import KvRouterClient
from streams.errors import UnknownId
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.api import BLOCK_SIZE, PATIENCE_S, TOKENS, Api, Fleet, served

AVOID_S = 1.5


def chosen(api: Api, model: str, n: int = 30) -> set[int]:
    return {api.route(model=model, token_ids=TOKENS, update_states=False)["worker_id"] for _ in range(n)}


def test_every_router_avoids_a_worker_for_a_while(scope: Settings) -> None:
    """One router is called, both avoid the worker until its time is over, and the rest of the fleet stays."""
    settings = replace(scope, block_size=BLOCK_SIZE, router_avoid_s=AVOID_S)
    body = {"url": "http://e", "model": "m", "block_size": BLOCK_SIZE}
    with served(settings) as main, served(settings) as peer:
        for worker_id in (1, 2, 3):
            main.call("PUT", f"/workers/{worker_id}", body).given()
        wait_for(lambda: len(peer.workers()) == 3, PATIENCE_S, "the peer to read the workers")
        began_s = time.monotonic()
        answer = main.call("PUT", "/workers/2/avoid").given()
        assert (answer["worker_id"], answer["avoided"]) == (2, True)
        assert 0 < answer["avoided_ms"] <= AVOID_S * 1000
        assert chosen(main, "m") == {1, 3}
        wait_for(lambda: peer.workers()[2]["avoided"], PATIENCE_S, "the peer to read the avoidance")
        assert chosen(peer, "m") == {1, 3} or time.monotonic() - began_s > AVOID_S
        # A second worker would be more than a third of the model's ranks.
        assert peer.call("PUT", "/workers/3/avoid").given()["avoided"] is False
        assert 3 in chosen(peer, "m")
        with served(settings) as late:  # it starts, and does not take the records that it finds for new ones
            assert chosen(late, "m") == {1, 2, 3}
        for api in (main, peer):
            wait_for(lambda api=api: not api.workers()[2]["avoided"], PATIENCE_S, "the end of the avoidance")  # type: ignore[misc]
            assert 2 in chosen(api, "m")
        assert time.monotonic() - began_s >= AVOID_S


def test_the_client_reports_a_failed_engine(fleet: Fleet, model: str) -> None:
    """One of two workers is avoided while the other one can serve, and the other one is not."""

    async def scenario() -> None:
        async with KvRouterClient(fleet.main.url) as client:
            first, second = [row["worker_id"] for row in await client.workers() if row["model"] == model]
            assert await client.avoid(first) is True
            assert await client.avoid(second) is False
            rows = {row["worker_id"]: row for row in await client.workers()}
            assert rows[first]["avoided"] is True
            assert rows[second]["avoided_ms"] > 0 and rows[second]["avoided"] is False
            with pytest.raises(UnknownId):
                await client.avoid(5)

    asyncio.run(scenario())
