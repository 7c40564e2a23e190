"""Kill an engine in the middle of an answer, and let another one go on that reads the first one's KV cache in a pool.

    kvstreams kafka up                                    # once; or set KVSTREAMS_KAFKA to any Kafka
    python examples/cxl_migration.py                      # about half a minute

It starts four simulated engines of one model, a CXL pool that three of them reach, a bridge, a worker with a router,
and a front, all as processes of their own. Engines 1, 2 and 4 have the experts that the request asks for, engines 1, 2
and 3 reach the pool. Engine 1 is killed after 500 of 4,000 tokens. So engine 2 goes on, and the client gets one stream.
"""

from __future__ import annotations

import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

from streams.kafka.clients import delete_topics
from streams.lab.demo.pooled_fleet import FOUR_PLACES, Move, PooledFleet, killed_midway
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.pool import PoolConfig
from streams.lab.engines.synthetic_tokens import greedy_tokens, unpack_tokens
from streams.lab.processes import Children
from streams.lab.stack import FrontProcess, Stack
from streams.settings import load
from streams.topics import topics
from streams.warming import WORKER, warm

N_TOKENS, KILLED_AT = 4000, 500
#: Model seconds per second: 4,000 tokens take 80 s at 20 ms each.
TIME_SCALE = 20.0
PROMPT = [token % 50_000 for token in range(7, 7 + 13 * 2000, 13)]


def start(stack: Stack) -> tuple[PooledFleet, FrontProcess]:
    """Start the processes."""
    worker = stack.worker()
    config = EngineConfig()
    pool = PoolConfig("rack1", config.block_size)
    fleet = PooledFleet(stack, worker, "m", config, pool=pool, time_scale=TIME_SCALE, places=FOUR_PLACES)
    fleet.start()
    return fleet, fleet.front("front", [worker])


def show(fleet: PooledFleet, front: FrontProcess) -> Move:
    """Move one stream, and print what happened."""
    print(f"4 engines and a front at {front.url}; a prompt of {len(PROMPT)} tokens, {N_TOKENS} asked for")
    move = killed_midway(fleet, front, PROMPT, n_tokens=N_TOKENS, kill_at=KILLED_AT)
    streamed = move.streamed
    figures = streamed.figures
    packed = b"".join(token.to_bytes(4, "little") for token in PROMPT)
    undisturbed = unpack_tokens(greedy_tokens(packed, N_TOKENS))
    print(f"engine {move.first} was killed after {KILLED_AT} tokens (exit code {move.exit_code})")
    print(
        f"engine {move.second} went on: it loaded {move.loaded} tokens from the pool and computed {move.computed}, "
        f"{figures['lost_ms']:.0f} ms after the last byte of engine {move.first}"
    )
    same = "equal to" if streamed.token_ids == undisturbed else "DIFFERENT FROM"
    print(f"{len(streamed.token_ids)} tokens came in one stream, {same} those of an undisturbed engine")
    print(f"figures of the stream: {figures}")
    fleet.until_free()
    print("no booking is left")
    return move


def main() -> None:
    """Run in a scope of its own, whose topics are deleted at the end."""
    given = load().settings
    warm(WORKER)  # once, here: otherwise each of the processes would compile the kernels
    with tempfile.TemporaryDirectory() as folder:
        scope = replace(given, topic_prefix=f"moving-{uuid.uuid4().hex[:8]}.", data_dir=str(Path(folder) / "state"))
        try:
            with Children() as children:
                show(*start(Stack(scope, Path(folder), children)))
        finally:
            delete_topics(scope, topics(scope).all())


if __name__ == "__main__":
    main()
