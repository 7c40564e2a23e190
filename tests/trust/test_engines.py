"""Engines other than vLLM, through a real bridge, Kafka and router: their prompts match exactly, and only theirs."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import msgpack

from streams.lab.kafka.ports import free_ports_in_a_row
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trtllm_events import block, created, removed, stored, updated
from tests.helpers.trust import TrustFleet, engine_option

N_BLOCKS = 3
TOKENS = list(range(1000, 1000 + N_BLOCKS * BLOCK_SIZE))


def test_sglangs_pages_and_salts_match_exactly(fleet: TrustFleet) -> None:
    """Pages of one token make blocks; only a request with the salt matches; a repeated store is no copy."""
    model, worker_id = fleet.model(), fleet.worker_id()
    names = [-(1 << 40) - at for at in range(len(TOKENS))]
    store = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": "tenant",
    }
    with EngineDouble(model=model) as engine:
        fleet.bridge(engine_option(worker_id, engine))
        engine.send(msgpack.packb([1.0, [store], 0]))
        engine.send(msgpack.packb([1.0, [store], 0]))
        salted = {"cache_salt": "tenant"}
        answer = fleet.wait_answer(
            model,
            TOKENS,
            lambda found: found["mode"] == "exact" and found["overlap_blocks"] == N_BLOCKS,
            "all blocks",
            **salted,
        )
        assert answer["worker_id"] == worker_id
        for other in ({}, {"cache_salt": "another tenant"}):
            assert fleet.route(model, TOKENS, **other)["overlap_blocks"] == 0
        removal = {"type": "BlockRemoved", "block_hashes": names[-1:], "medium": "GPU"}
        engine.send(msgpack.packb([1.0, [removal], 0]))
        fleet.wait_answer(
            model, TOKENS, lambda found: found["overlap_blocks"] == N_BLOCKS - 1, "the last page is gone", **salted
        )


def test_tensorrt_llms_blocks_match_exactly_and_follow_their_tier(fleet: TrustFleet) -> None:
    """JSON is recognised; a block that moves to the host is still held there, and a removal removes it."""
    model, worker_id = fleet.model(), fleet.worker_id()
    blocks = [block(at + 1, TOKENS[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]) for at in range(N_BLOCKS)]
    with EngineDouble(model=model) as engine:
        fleet.bridge(engine_option(worker_id, engine))
        for event in (created(), stored(*blocks), updated(3, 0, 1)):
            engine.send(json.dumps([event]).encode())
        fleet.wait_exact(model, TOKENS, N_BLOCKS)
        engine.send(json.dumps([removed(3)]).encode())
        fleet.wait_exact(model, TOKENS, N_BLOCKS - 1)


def test_ranks_have_the_numbers_that_the_engines_batches_name(fleet: TrustFleet) -> None:
    """One engine of a larger deployment has the ranks 8 and 9, which requests for them name."""
    model, worker_id = fleet.model(), fleet.worker_id()
    events, replay = free_ports_in_a_row(2), free_ports_in_a_row(2)
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(EngineDouble(model=model, ports=(None, events + n, replay + n))) for n in range(2)
        ]
        fleet.bridge(engine_option(worker_id, sockets[0], dp="2"))
        for n, socket in enumerate(sockets):
            tokens = TOKENS[: (n + 1) * BLOCK_SIZE]
            store = ["BlockStored", list(range(1, n + 2)), None, tokens, BLOCK_SIZE]
            socket.send(msgpack.packb([time.time(), [store], 8 + n]))
        for n_blocks, dp_rank in ((1, 8), (2, 9)):
            answer = fleet.wait_answer(
                model,
                TOKENS[: n_blocks * BLOCK_SIZE],
                lambda found, n=n_blocks: (found["overlap_blocks"], found["mode"]) == (n, "exact"),  # type: ignore[misc]
                f"rank {dp_rank}",
                worker_id=worker_id,
                dp_rank=dp_rank,
            )
            assert (answer["dp_rank"], answer["dp_size"]) == (dp_rank, 2)
