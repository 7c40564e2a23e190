"""A publisher inside an engine: its lease, its answers to lost batches, and its use from asyncio."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from examples import vllm_connector
from streams.core.events import MoeLabels
from streams.engines.async_publisher import AsyncKvEventPublisher
from streams.engines.publisher import KvEventPublisher
from streams.engines.stored_blocks import StoredBlock
from streams.process.waiting import wait_for
from streams.settings import Resolved, as_environ
from tests.helpers.commands import environment
from tests.helpers.engine_double import BLOCK_SIZE
from tests.helpers.trust import PATIENCE_S, TrustFleet

N_BLOCKS = 4
PROMPT = list(range(3000, 3000 + N_BLOCKS * BLOCK_SIZE))

_ENGINE = """
import sys, time
from streams.engines.publisher import KvEventPublisher
from streams.settings import load
publisher = KvEventPublisher(load().settings, int(sys.argv[1]), sys.argv[2], lease_s=float(sys.argv[3]))
publisher.stored([1, 2, 3, 4], range(3000, 3064))
publisher.flush()
time.sleep(600)
"""


def register(fleet: TrustFleet, worker_id: int, model: str) -> None:
    body = {"url": "http://127.0.0.1:1", "model": model, "block_size": BLOCK_SIZE}
    assert fleet.api.call("PUT", f"/workers/{worker_id}", body).status in (200, 201)


def refused(fleet: TrustFleet, model: str) -> dict[str, int]:
    answer = fleet.answered(model, PROMPT)
    if answer.status == 200:
        return {}
    counts: dict[str, int] = answer.json["error"]["detail"].get("refused_ranks", {})
    return {reason: n for reason, n in counts.items() if reason != "other_model"}


def blocks(first: int = 1) -> list[StoredBlock]:
    return [
        StoredBlock(first + n, PROMPT[n * BLOCK_SIZE : (n + 1) * BLOCK_SIZE], moe=MoeLabels(n)) for n in range(N_BLOCKS)
    ]


@contextmanager
def killed_engine(fleet: TrustFleet, worker_id: int, model: str, lease_s: float) -> Iterator[None]:
    """An engine that held N_BLOCKS when it was killed."""
    arguments = [sys.executable, "-c", _ENGINE, str(worker_id), model, str(lease_s)]
    engine = subprocess.Popen(arguments, env=environment(as_environ(fleet.stack.settings)))
    try:
        fleet.wait_exact(model, PROMPT, N_BLOCKS)
        engine.send_signal(signal.SIGKILL)
        yield
    finally:
        engine.kill()
        engine.wait()


def test_an_engine_whose_publisher_was_killed_gets_no_requests(fleet: TrustFleet) -> None:
    """Its rank is exact while the process runs, and silent one lease after it was killed."""
    model, worker_id = fleet.model(), fleet.worker_id()
    register(fleet, worker_id, model)
    with killed_engine(fleet, worker_id, model, lease_s=1.0):
        wait_for(lambda: refused(fleet, model) == {"silent": 1}, PATIENCE_S, "the rank to be silent")


def test_the_blocks_of_a_publisher_without_a_lease_stay_until_its_worker_is_deleted(fleet: TrustFleet) -> None:
    """Nothing shows that its process is gone, so answers stay exact: this limit is documented."""
    model, worker_id = fleet.model(), fleet.worker_id()
    register(fleet, worker_id, model)
    with killed_engine(fleet, worker_id, model, lease_s=0.0):
        time.sleep(2.0)
        fleet.wait_exact(model, PROMPT, N_BLOCKS)
        assert fleet.api.call("DELETE", f"/workers/{worker_id}").status == 200
        wait_for(lambda: fleet.answered(model, PROMPT).status != 200, PATIENCE_S, "the rank to get no requests")


def test_a_publisher_with_an_earlier_clock_is_ignored(fleet: TrustFleet) -> None:
    """The blocks of its predecessor stay: this limit is documented. One with a later clock replaces them."""
    model, worker_id = fleet.model(), fleet.worker_id()
    register(fleet, worker_id, model)
    an_hour_ago = time.time_ns() // 1000 - 3_600_000_000
    with KvEventPublisher(fleet.stack.settings, worker_id, model) as former:
        former.stored_blocks(blocks())
        fleet.wait_exact(model, PROMPT, N_BLOCKS)
    with KvEventPublisher(fleet.stack.settings, worker_id, model, incarnation=an_hour_ago) as earlier:
        earlier.stored_blocks(blocks()[:2])
        earlier.flush()
        time.sleep(1.0)
        fleet.wait_exact(model, PROMPT, N_BLOCKS)
    with KvEventPublisher(fleet.stack.settings, worker_id, model) as later:
        later.stored_blocks(blocks()[:2])
        fleet.wait_exact(model, PROMPT, 2)


def test_a_publisher_heals_a_batch_that_was_lost(fleet: TrustFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers the agents' request from what it knows that it holds, with the labels of each block."""
    model, worker_id = fleet.model(), fleet.worker_id()
    register(fleet, worker_id, model)
    with KvEventPublisher(fleet.stack.settings, worker_id, model, lease_s=2.0) as publisher:
        publisher.stored_blocks(blocks()[:1])
        send, lost = publisher._writer.records._kafka, []

        class Losing:
            """Loses the next batch."""

            def produce(self, *_: object, **record: object) -> None:
                lost.append(record)

            def __getattr__(self, name: str) -> object:
                return getattr(send, name)

        monkeypatch.setattr(publisher._writer.records, "_kafka", Losing())
        with publisher._lock:
            publisher.stored_blocks(blocks()[1:3], 1)
            monkeypatch.setattr(publisher._writer.records, "_kafka", send)
        assert len(lost) == 1
        publisher.stored_blocks(blocks()[3:], 3)
        fleet.wait_exact(model, PROMPT, N_BLOCKS)
        override = {"moe_query": {"layer_id": 2, "fallback_to_unlabeled": False}, "moe_score_weight": 1.0}
        answer = fleet.route(model, PROMPT, router_config_override=override)
        assert answer["candidates"][0]["moe_scores"] == 1
    wait_for(lambda: refused(fleet, model) == {"silent": 1}, PATIENCE_S, "the closed publisher's rank to be silent")


def test_a_publisher_is_used_from_asyncio(fleet: TrustFleet) -> None:
    """Calls of several tasks are published in their order, and the loop goes on; Kafka is reached in the background."""
    model, worker_id = fleet.model(), fleet.worker_id()
    register(fleet, worker_id, model)

    async def engine() -> None:
        async with AsyncKvEventPublisher(fleet.stack.settings, worker_id, model) as publisher:
            await asyncio.gather(
                publisher.stored_blocks(blocks()),
                publisher.removed([4]),
                *(publisher.stored([50 + n], list(range(n * 16, n * 16 + 16))) for n in range(20)),
            )
            await publisher.flush()
            await asyncio.to_thread(fleet.wait_exact, model, PROMPT, N_BLOCKS - 1)
        with pytest.raises(RuntimeError, match="outside of its `async with` block"):
            await publisher.cleared()

    asyncio.run(engine())


def test_the_hooks_of_vllms_connector_interface_report_blocks(
    fleet: TrustFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example is called as vLLM's scheduler calls a connector, without vLLM."""
    model, worker_id = fleet.model(), fleet.worker_id()
    register(fleet, worker_id, model)
    settings = fleet.stack.settings
    monkeypatch.setattr(vllm_connector, "load", lambda: Resolved(settings, {}, ()))
    extra = {"worker_id": worker_id, "blocks_max": N_BLOCKS + 1}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=SimpleNamespace(served_model_name=model, model=model),
    )
    connector = vllm_connector.KvStreamsConnector(config, None)
    try:
        hashes = [number.to_bytes(32, "big") for number in (1, 2, 3, 4)]
        request = SimpleNamespace(block_hashes=hashes, all_token_ids=[*PROMPT, 1, 2])
        assert connector.request_finished(request, [0, 1, 2, 3]) == (False, None)
        assert connector.request_finished(request, [0, 1, 2, 3]) == (False, None)  # the blocks are known already
        assert list(connector.take_events()) == []
        fleet.wait_exact(model, PROMPT, N_BLOCKS)
        other = list(range(9000, 9000 + 4 * BLOCK_SIZE))
        connector.request_finished(SimpleNamespace(block_hashes=[5, 6, 7, 8], all_token_ids=other), [])
        fleet.wait_exact(model, other, 4)
        fleet.wait_exact(model, PROMPT, 0)  # its first blocks were evicted
    finally:
        connector.shutdown()
