"""Routers of some models on a real Kafka (`models`): what they keep, refuse, and read again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streams.kafka.clients import ensure_topics
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.api import BLOCK_SIZE, PATIENCE_S, TOKENS, Agents, Api, metrics, rank_of, served
from tests.helpers.scopes import PARTITIONS

N_BLOCKS = len(TOKENS) // BLOCK_SIZE


def blocks_of(api: Api) -> dict[int, int]:
    return {rank["worker_id"]: rank["blocks"] for rank in api.get("/state")["ranks"]}


def put(api: Api, worker_id: int, model: str) -> None:
    body = {"url": f"http://engine-{worker_id}:8000", "model": model, "block_size": BLOCK_SIZE}
    api.call("PUT", f"/workers/{worker_id}", body).given()


def test_a_router_of_one_model_keeps_its_workers_alone(scope: Settings) -> None:
    """Other models are 404, their bookings are skipped, and a worker that changes to the model is read again.

    A worker that is not registered yet is kept. No answer about the worker that changed is exact and wrong.
    """
    settings = replace(scope, block_size=BLOCK_SIZE)
    ensure_topics(settings, topics(settings).all())
    agents = Agents(settings, fresh=range(PARTITIONS))
    with (
        agents.keeping_fresh(),
        served(settings) as every,
        served(replace(settings, models="a")) as some,
    ):
        mine, other, late = agents.worker_ids(3, partition=1)
        put(every, mine, "a")
        put(every, other, "b")
        wait_for(lambda: mine in some.workers(), PATIENCE_S, "the worker to be registered")
        for worker_id in (mine, other, late):
            agents.progress(rank_of(worker_id))
            agents.hold(rank_of(worker_id), TOKENS)
        wait_for(lambda: blocks_of(every) == dict.fromkeys((mine, other, late), N_BLOCKS), PATIENCE_S, "all blocks")
        wait_for(
            lambda: blocks_of(some) == dict.fromkeys((mine, late), N_BLOCKS), PATIENCE_S, "the blocks that are kept"
        )
        assert some.workers().keys() == {mine}
        some.call("POST", "/route", {"model": "b", "token_ids": TOKENS}).refused(404, "unknown_model")

        every.route(model="b", token_ids=TOKENS, request_id="of-b")
        every.route(model="a", token_ids=TOKENS, request_id="of-a")
        wait_for(lambda: metrics(some)["kvstreams_bookings_known"] == 1, PATIENCE_S, "the booking of the model")
        every.call("DELETE", "/loads/of-b").given()

        put(every, late, "a")
        wait_for(lambda: late in some.workers(), PATIENCE_S, "the late worker to be registered")
        assert exact(some, late)["overlap_blocks"] == N_BLOCKS

        put(every, other, "a")
        wait_for(lambda: other in some.workers(), PATIENCE_S, "the worker that changed to be registered")
        assert exact(some, other)["overlap_blocks"] == N_BLOCKS
        agents.hold(rank_of(other), list(range(500, 500 + BLOCK_SIZE)))
        wait_for(lambda: blocks_of(some)[other] == N_BLOCKS + 1, PATIENCE_S, "what the worker stored afterwards")

        put(every, mine, "b")
        wait_for(lambda: blocks_of(some).keys() == {other, late}, PATIENCE_S, "the blocks to be dropped")
        assert some.workers().keys() == {other, late}
        with served(replace(settings, models="a")) as fresh:
            assert blocks_of(fresh) == {other: N_BLOCKS + 1, late: N_BLOCKS}
            assert exact(fresh, late)["overlap_blocks"] == N_BLOCKS


def exact(api: Api, worker_id: int) -> dict[str, Any]:
    """The first answer about a worker that is exact; until then it is degraded."""
    answers: list[dict[str, Any]] = []

    def is_exact() -> bool:
        answers.append(api.ask(model="a", token_ids=TOKENS, worker_id=worker_id))
        assert answers[-1]["mode"] in ("exact", "degraded")
        return bool(answers[-1]["mode"] == "exact")

    wait_for(is_exact, PATIENCE_S, "an exact answer")
    return answers[-1]
