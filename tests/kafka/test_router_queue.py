"""Requests that wait in one router go on when load falls at another one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.api import PATIENCE_S, Api, metrics, served

#: A rank with more tokens still to prefill is closed, or with half as many again once a router knows the other one.
BACKLOG_TOKENS = 1000


def waiting(api: Api) -> float:
    return sum(number for name, number in metrics(api).items() if name.startswith("kvstreams_flow_control_queue_size/"))


def long_prompt(seed: int) -> list[int]:
    """A prompt that closes a rank. Prompts with different seeds share no block."""
    return [seed * 10_000 + number for number in range(2 * BACKLOG_TOKENS)]


def test_routers_share_a_rank_that_opens(scope: Settings) -> None:
    """Requests that wait in two routers get the rank as those before them end, which their other router reports."""
    settings = replace(
        scope, router_queue_backlog_ms=BACKLOG_TOKENS * 0.1, prefill_us_per_token=100.0, stale_after_ms=2000
    )
    with served(settings) as main, served(settings) as peer, ThreadPoolExecutor(8) as threads:
        main.call("PUT", "/workers/1", {"url": "http://e", "model": "m", "block_size": settings.block_size}).given()
        wait_for(lambda: 1 in peer.workers(), PATIENCE_S, "the peer to know the worker")
        main.route(request_id="first", token_ids=long_prompt(0))
        wait_for(lambda: peer.loads([1])[1, 0][2] == 1, PATIENCE_S, "the peer to know the booking")

        asked = {}
        for number in range(1, 7):
            fields = {"request_id": str(number), "queue": "on", "token_ids": long_prompt(number)}
            asked[str(number)] = threads.submit((main, peer)[number % 2].route, **fields)
        wait_for(lambda: waiting(main) == waiting(peer) == 3, PATIENCE_S, "all to wait")
        assert not any(each.done() for each in asked.values())
        freed = {"first"}
        peer.call("DELETE", "/loads/first").given()

        def running_now() -> set[str]:
            return {name for name, each in asked.items() if each.done()} - freed

        while len(freed) < 7:
            wait_for(lambda: bool(running_now()), PATIENCE_S, "the next request to get the rank")
            running = running_now()
            # One request of each router at most, even while the routers do not know of each other yet.
            assert len(running) <= 2
            for name in running:
                answer = asked[name].result()
                assert answer["worker_id"] == 1
                assert answer["queued_ms"] > 0
                # Each call goes to the router that did not book the request.
                assert (peer, main)[int(name) % 2].call("DELETE", f"/loads/{name}").status in (200, 202)
            freed |= running
        wait_for(lambda: main.loads([1])[1, 0][2] == peer.loads([1])[1, 0][2] == 0, PATIENCE_S, "no booking to be left")
