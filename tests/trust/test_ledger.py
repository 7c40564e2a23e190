"""What the ledger cannot know: whether a repeated store is a copy. And what a restatement must not lose: labels."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import msgpack

from streams.core.hashing import local_hashes, sequence_hashes
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.stack import get_json
from streams.process.waiting import wait_for
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import (
    PATIENCE_S,
    TrustFleet,
    claim_a_batch_that_never_arrived,
    engine_option,
    state_of,
)

N_BLOCKS = 20

QUERY = {"layer_id": 2, "expert_ids": [7], "fallback_to_unlabeled": False}


def complete(url: str, prompt: Sequence[int]) -> None:
    """Let a simulated engine answer a prompt with one token."""
    body = json.dumps({"prompt": list(prompt), "max_tokens": 1}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body)) as answer:
        answer.read()


def held_of(url: str, prompt: Sequence[int]) -> int:
    """Return how many leading blocks of a prompt a simulated engine holds, as it answers itself."""
    held = set(get_json(f"{url}/sim/cache")["sequence_hashes"])
    overlap = 0
    for block in sequence_hashes(local_hashes(list(prompt), BLOCK_SIZE, 1337)).tolist():
        if str(block) not in held:
            break
        overlap += 1
    return overlap


def test_reports_of_reused_blocks_never_make_a_rank_hold_evicted_blocks(fleet: TrustFleet) -> None:
    """vLLM's report mode `full`: after the eviction of reused blocks, answers have none of them and are approximate."""
    model, worker_id = fleet.model(), fleet.worker_id()
    (engine,) = fleet.stack.engines(
        1,
        EngineConfig(block_size=BLOCK_SIZE, n_blocks=N_BLOCKS + 2),
        model,
        time_scale=1000.0,
        first_worker_id=worker_id,
        options=["--kv-cache-report-mode", "full"],
    )
    fleet.bridge(f"id={worker_id},url={engine.url},events={engine.events},replay={engine.replay}")
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE + 1)
    for _ in range(3):
        complete(engine.url, prompt)
    fleet.wait_exact(model, prompt, N_BLOCKS)
    with fleet.watching(model, prompt) as watch:
        complete(engine.url, range(5000, 5000 + (N_BLOCKS + 1) * BLOCK_SIZE + 1))
        assert held_of(engine.url, prompt) == 0
        fleet.wait_answer(model, prompt, lambda found: found["overlap_blocks"] == 0, "the evictions")
        settled_s = time.monotonic()
        answer = fleet.route(model, prompt)
    assert (answer["overlap_blocks"], answer["mode"]) == (0, "approximate")
    assert not [sample for sample in watch.wrong_while_exact(0) if sample.sent_s > settled_s]


def test_copies_that_vllm_makes_by_itself_keep_a_rank_exact(fleet: TrustFleet) -> None:
    """The last block of a repeated prompt is computed again. It is held until both of its copies were evicted."""
    model, worker_id = fleet.model(), fleet.worker_id()
    prompt = range(1000, 1000 + 4 * BLOCK_SIZE)
    names = [11, 12, 13, 14]
    with EngineDouble(model=model) as engine:
        engine.publish(["BlockStored", names, None, list(prompt), BLOCK_SIZE, None, "GPU"])
        engine.publish(["BlockStored", names[3:], names[2], list(prompt[-BLOCK_SIZE:]), BLOCK_SIZE, None, "GPU"])
        engine.publish(["BlockRemoved", names[3:], "GPU"])
        fleet.bridge(engine_option(worker_id, engine))
        fleet.wait_exact(model, prompt, 4)
        engine.publish(["BlockRemoved", names[3:], "GPU"])
        fleet.wait_exact(model, prompt, 3)


def test_a_bridge_without_the_engines_first_batches_is_approximate_once_a_block_was_removed(fleet: TrustFleet) -> None:
    """It continues with one copy of each block. Until a removal the answers are exact; then a copy may be left."""
    model, worker_id = fleet.model(), fleet.worker_id()
    prompt = range(1000, 1000 + 4 * BLOCK_SIZE)
    with EngineDouble(model=model) as engine:
        engine.store(5000)
        engine.store(1000, 4)
        bridge = fleet.bridge(engine_option(worker_id, engine))
        fleet.wait_exact(model, prompt, 4)
        bridge.stop()
        engine.forget()
        fleet.bridge(engine_option(worker_id, engine))
        engine.store(9000)
        fleet.wait_answer(model, range(9000, 9032), lambda found: found["overlap_blocks"] == 2, "the next bridge")
        fleet.wait_exact(model, prompt, 4)
        engine.remove(1000, 3)
        answer = fleet.wait_answer(model, prompt, lambda found: found["overlap_blocks"] == 3, "the removal")
        assert answer["mode"] == "approximate"


def labelled(engine: EngineDouble, prompt: Sequence[int], labels: dict[str, int] | None) -> None:
    """Store the blocks of a prompt, with these labels."""
    n_blocks = len(prompt) // BLOCK_SIZE
    stored: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [prompt[0] + n for n in range(n_blocks)],
        "parent_block_hash": None,
        "token_ids": list(prompt),
        "block_size": BLOCK_SIZE,
        "moe": labels,
    }
    engine.send(msgpack.packb({"ts": time.time(), "events": [stored], "data_parallel_rank": 0}))


def test_a_restatement_brings_labels_back(fleet: TrustFleet) -> None:
    """After a gap was restated, a request with a query of labels still finds them, and strict mode keeps the rank."""
    model, labelled_id, plain_id = fleet.model(), fleet.worker_id(), fleet.worker_id()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)
    with EngineDouble(model=model) as engine, EngineDouble(model=model) as other:
        labelled(engine, prompt, {"layer_id": 2, "expert_id": 7})
        labelled(other, prompt, None)
        fleet.bridge(engine_option(labelled_id, engine), engine_option(plain_id, other))

        def chosen() -> dict[str, Any]:
            return fleet.route(model, prompt, router_config_override={"moe_query": QUERY})

        def matching() -> list[tuple[int, int]]:
            """Worker and matching blocks of each rank that strict mode leaves."""
            return [(each["worker_id"], each["moe_scores"]) for each in chosen()["candidates"]]

        fleet.wait_answer(
            model,
            prompt,
            lambda found: [each["effective_cached_blocks"] for each in found["candidates"]] == [N_BLOCKS] * 2,
            "the blocks of both engines",
        )
        assert matching() == [(labelled_id, N_BLOCKS)]
        claim_a_batch_that_never_arrived(fleet, labelled_id, model)
        wait_for(lambda: state_of(fleet, labelled_id)["generation"] == 1, PATIENCE_S, "the restatement")
        assert matching() == [(labelled_id, N_BLOCKS)]
        wait_for(lambda: bool(chosen()["mode"] == "exact"), PATIENCE_S, "an exact answer")
