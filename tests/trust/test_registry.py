"""Wrong block sizes, and cordons: what answers say when an engine, a router or a publisher disagrees with its scope."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any
from urllib.request import Request, urlopen

import msgpack
import pytest

from streams.engines.publisher import KvEventPublisher
from streams.engines.rank_records import event_producer
from streams.errors import BlockSizeContradicted
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.processes import Child, Children
from streams.lab.stack import Engine, Stack
from streams.model_registry import registered_models
from streams.process.waiting import wait_for
from streams.settings import as_environ
from tests.helpers.api import Api, metrics
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import PATIENCE_S, TrustFleet, engine_option

LARGE = 2 * BLOCK_SIZE
N_BLOCKS = 8
PROMPT = list(range(5000, 5000 + N_BLOCKS * LARGE))


def refused(fleet: TrustFleet, model: str, api: Api | None = None) -> dict[str, int]:
    """Return which filters refuse the ranks of a model, without the workers of other tests; {} for an answer."""
    body = {"model": model, "token_ids": PROMPT, "update_states": False}
    answer = (api or fleet.api).call("POST", "/route", body)
    if answer.status == 200:
        return {}
    counts: dict[str, int] = answer.json["error"]["detail"].get("refused_ranks", {})
    return {reason: n for reason, n in counts.items() if reason != "other_model"}


def complete(engine: Engine, model: str, tokens: list[int]) -> None:
    body = json.dumps({"model": model, "prompt": tokens, "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{engine.url}/v1/completions", body, headers), timeout=PATIENCE_S) as response:
        assert response.status == 200


def wait_refused(fleet: TrustFleet, model: str, reasons: dict[str, int]) -> None:
    wait_for(lambda: refused(fleet, model) == reasons, PATIENCE_S, f"refusals {reasons}")


def dead_letters(fleet: TrustFleet) -> float:
    """Dead letters with this reason, since the router started."""
    name = "kvstreams_dead_letters_total/"
    return sum(n for key, n in metrics(fleet.api).items() if key.startswith(name) and "wrong_block_size" in key)


def wrong_ranks(fleet: TrustFleet) -> float:
    return metrics(fleet.api)["kvstreams_ranks/wrong_block_size"]


def test_an_engine_whose_metrics_show_another_block_size_is_never_a_candidate(fleet: TrustFleet) -> None:
    """It is registered with its own size from the start, is not chosen, and leaves no flood of dead letters."""
    model, worker_id = fleet.model(), fleet.worker_id()
    before, wrong_before = dead_letters(fleet), wrong_ranks(fleet)
    (engine,) = fleet.stack.engines(1, EngineConfig(block_size=LARGE, n_blocks=256), model, 100.0, worker_id)
    address = f"id={worker_id},url={engine.url},events={engine.events},replay={engine.replay}"
    bridge = fleet.bridge(address)
    wait_for(lambda: worker_id in fleet.api.workers(), PATIENCE_S, "the worker")
    with fleet.watching(model, PROMPT) as watch:
        for turn in range(5):
            complete(engine, model, [turn * 10_000 + token for token in PROMPT])
        time.sleep(1.0)
    assert not watch.samples  # no answer at all, and so none that is exact
    shown = fleet.api.workers()[worker_id]
    assert (shown["block_size"], shown["wrong_block_size_dp_ranks"]) == (LARGE, [0])
    assert refused(fleet, model) == {"wrong_block_size": 1}
    assert wrong_ranks(fleet) - wrong_before == 1
    assert dead_letters(fleet) - before <= 1
    assert bridge.log_path.read_text().count(f"has blocks of {LARGE} tokens, but this scope has blocks of") == 1
    assert model not in registered_models(fleet.stack.settings)  # the settings may be what is wrong
    engine.child.kill()


def stored(engine: EngineDouble, first: int, block_size: int) -> None:
    tokens = list(range(first, first + 4 * block_size))
    names = [first * 1000 + n for n in range(4)]
    engine.send(msgpack.packb([time.time(), [["BlockStored", names, None, tokens, block_size, None, "GPU"]], 0]))


def test_an_engine_whose_events_show_another_block_size_stops_being_a_candidate(fleet: TrustFleet) -> None:
    """The first such event is enough. After a restart with the scope's size, the engine is a candidate again."""
    model, worker_id = fleet.model(), fleet.worker_id()
    before = dead_letters(fleet)
    with EngineDouble(model=model) as engine:
        bridge = fleet.bridge(engine_option(worker_id, engine))
        fleet.wait_answer(model, PROMPT, lambda answer: answer["worker_id"] == worker_id, "the engine")
        assert registered_models(fleet.stack.settings)[model].block_size == BLOCK_SIZE
        for n in range(20):
            stored(engine, 5000 + 1000 * n, LARGE)
        wait_refused(fleet, model, {"wrong_block_size": 1})
        assert fleet.api.workers()[worker_id]["block_size"] == LARGE
        assert fleet.api.workers()[worker_id]["model_block_size"] == BLOCK_SIZE
        body = {"url": engine.url, "model": model, "block_size": BLOCK_SIZE}
        message = fleet.api.call("PUT", f"/workers/{worker_id}", body).refused(400, "wrong_block_size")
        assert str(LARGE) in message and str(BLOCK_SIZE) in message
        time.sleep(0.5)
        assert refused(fleet, model) == {"wrong_block_size": 1}
        assert dead_letters(fleet) - before == 1
        assert bridge.log_path.read_text().count(f"has blocks of {LARGE} tokens") == 1
        engine.restart()
        engine.store(PROMPT[0], N_BLOCKS)
        answer = fleet.wait_answer(model, PROMPT, lambda answer: answer["overlap_blocks"] == N_BLOCKS, "its blocks")
        assert answer["worker_id"] == worker_id
        assert fleet.api.workers()[worker_id]["block_size"] == BLOCK_SIZE


def test_a_router_that_contradicts_a_model_refuses_its_requests(fleet: TrustFleet, children: Children) -> None:
    """A router with another size that was there first answers nothing for the model; one that starts later ends."""
    stack = Stack(
        replace(fleet.stack.settings, topic_prefix=f"{fleet.stack.settings.topic_prefix}own-"),
        fleet.stack.directory / "own",
        children,
    )
    early = stack.router("early", block_size=LARGE)
    right = stack.router("right")
    model, worker_id = fleet.model(), fleet.worker_id()
    api, other = Api(early.url), Api(right.url)
    with EngineDouble(model=model) as engine:
        engine.store(PROMPT[0], N_BLOCKS)
        fleet.bridge(engine_option(worker_id, engine), env=as_environ(stack.settings))
        wait_for(lambda: worker_id in other.workers(), PATIENCE_S, "the worker")
        with fleet.watching(model, PROMPT, early.url) as watch:
            wait_for(lambda: model in registered_models(stack.settings), PATIENCE_S, "the model's record")

            def contradicted() -> bool:
                answer = api.call("POST", "/route", {"model": model, "token_ids": PROMPT, "update_states": False})
                return answer.status == 503 and "scope_block_size" in answer.json["error"]["detail"]

            wait_for(contradicted, PATIENCE_S, "the router to refuse the model")
        assert not watch.samples
        answer = api.call("POST", "/route", {"model": model, "token_ids": PROMPT})
        message = answer.refused(503, "not_ready")
        assert f"blocks of {LARGE} tokens" in message and f"it has blocks of {BLOCK_SIZE}" in message
        assert api.workers()[worker_id]["wrong_block_size_dp_ranks"] == [0]
        assert other.call("POST", "/route", {"model": model, "token_ids": PROMPT, "update_states": False}).status == 200
    late = stack.router("late", wait=False, block_size=LARGE)
    wait_for(lambda: not late.child.running, PATIENCE_S, "the router to end")
    assert f"it has blocks of {BLOCK_SIZE}" in late.child.log_path.read_text()


def put_worker(fleet: TrustFleet, worker_id: int, model: str) -> None:
    body: dict[str, Any] = {"url": "http://engine:1", "model": model, "block_size": BLOCK_SIZE}
    fleet.api.call("PUT", f"/workers/{worker_id}", body).given()


def test_a_publisher_that_restarts_with_another_block_size_keeps_no_credit(fleet: TrustFleet) -> None:
    """The blocks of its former incarnation are gone, and its rank is no candidate until the sizes agree."""
    settings, model, worker_id = fleet.stack.settings, fleet.model(), fleet.worker_id()
    put_worker(fleet, worker_id, model)
    names = list(range(N_BLOCKS))
    with KvEventPublisher(settings, worker_id, model) as publisher:
        publisher.stored(names, PROMPT[: N_BLOCKS * BLOCK_SIZE])
    fleet.wait_exact(model, PROMPT, N_BLOCKS)
    large = replace(settings, block_size=LARGE)
    with pytest.raises(BlockSizeContradicted, match=f"blocks of {LARGE} tokens"):
        KvEventPublisher(large, worker_id, model)
    answer = fleet.wait_answer(model, PROMPT, lambda answer: answer["overlap_blocks"] == 0, "an end of its blocks")
    assert (answer["mode"], answer["degraded_because"]) == ("degraded", "no_events_yet")
    # One that ignores the record, as a publisher of an earlier version does.
    before, kafka = dead_letters(fleet), event_producer(large)
    publisher = KvEventPublisher(large, worker_id, model, kafka=kafka)
    for n in range(10):
        publisher.stored([100 + n], [n * 10_000 + token for token in range(LARGE)])
    publisher.close()
    wait_refused(fleet, model, {"wrong_block_size": 1})
    assert fleet.api.workers()[worker_id]["wrong_block_size_dp_ranks"] == [0]
    (rank,) = [rank for rank in fleet.api.get("/state")["ranks"] if rank["worker_id"] == worker_id]
    assert rank["blocks"] == 0
    wait_for(lambda: dead_letters(fleet) - before == 1, PATIENCE_S, "one dead letter")
    with KvEventPublisher(settings, worker_id, model) as publisher:
        publisher.stored(names, PROMPT[: N_BLOCKS * BLOCK_SIZE])
    fleet.wait_exact(model, PROMPT, N_BLOCKS)
    assert dead_letters(fleet) - before == 1


def test_a_cordon_survives_the_restarts_of_a_bridge(fleet: TrustFleet) -> None:
    """Neither a killed nor a stopped bridge, nor a new registration, ends a cordon; only its deletion does."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        holders: list[str] = []

        def next_holder() -> bool:
            lease = fleet.api.workers().get(worker_id, {}).get("lease")
            if lease is not None and lease["bridge"] not in holders:
                holders.append(lease["bridge"])
                return True
            return False

        for end in (Child.kill, Child.stop, None):
            bridge = fleet.bridge(engine_option(worker_id, engine), env={"KVSTREAMS_BRIDGE_LEASE_S": "0.6"})
            wait_for(next_holder, PATIENCE_S, "the bridge to hold the lease")
            if end is Child.kill:
                fleet.api.call("PUT", f"/workers/{worker_id}/cordon").given()
            assert fleet.api.workers()[worker_id]["state"] == "cordoned"
            assert refused(fleet, model) == {"cordoned": 1}
            if end is not None:
                end(bridge)
        put_worker(fleet, worker_id, model)
        assert refused(fleet, model) == {"cordoned": 1}
        fleet.api.call("DELETE", f"/workers/{worker_id}/cordon").given()
        fleet.wait_answer(model, PROMPT, lambda answer: answer["worker_id"] == worker_id, "the engine")
