"""Damaged messages through a real bridge: it continues, and the router's answers are exact afterwards."""

from __future__ import annotations

import json
import urllib.request

import msgpack
import pytest

from streams.lab.kafka.ports import free_port
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.event_mutations import Mutator, payloads
from tests.helpers.trtllm_events import block, created, stored
from tests.helpers.trust import TrustFleet, engine_option
from tests.witness import NAMES

N_DAMAGED = 150
N_BLOCKS = 3
TOKENS = list(range(1000, 1000 + (N_BLOCKS + 1) * BLOCK_SIZE))


def whole(dialect: str, n_blocks: int = N_BLOCKS) -> bytes:
    """An undamaged payload: the cache is empty, and then holds one prompt."""
    if dialect == "trtllm":
        blocks = [block(at + 1, TOKENS[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]) for at in range(n_blocks)]
        return json.dumps([created(), stored(*blocks)]).encode()
    names = [NAMES[dialect][at] for at in range(n_blocks)]
    store = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": TOKENS[: n_blocks * BLOCK_SIZE],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
    }
    more = {"lora_name": None} if dialect == "vllm" else {}
    return bytes(msgpack.packb([1.5, [{"type": "AllBlocksCleared"}, store | more], 0]))


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "trtllm"])
def test_damaged_messages_stop_no_bridge(dialect: str, fleet: TrustFleet) -> None:
    """Each is counted, and after the engine has reported its cache anew, the answer is exact."""
    model, worker_id, port = fleet.model(), fleet.worker_id(), free_port()
    mutator, found = Mutator(f"bridge {dialect}"), payloads()[dialect]
    with EngineDouble(model=model) as engine:
        fleet.bridge(engine_option(worker_id, engine), env={"KVSTREAMS_METRICS_PORT": str(port)})
        for _ in range(10):
            engine.send(whole(dialect))
        fleet.wait_exact(model, TOKENS, N_BLOCKS)
        for _ in range(N_DAMAGED):
            engine.send(mutator.mutated(mutator.pick([*found, whole(dialect)])))
        engine.send(whole(dialect, N_BLOCKS + 1))
        fleet.wait_exact(model, TOKENS, N_BLOCKS + 1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
    counted = {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"kvstreams_bridge_{name}_total"))
        for name in ("batches_published", "dead_letters")
    }
    assert counted["batches_published"] == N_DAMAGED + 11
    assert N_DAMAGED // 4 < counted["dead_letters"] <= N_DAMAGED
