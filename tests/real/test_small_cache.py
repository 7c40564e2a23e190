"""An engine whose cache is small, and which computes prompts in chunks: what it has dropped is not promised."""

from __future__ import annotations

import random

from streams.process.waiting import wait_for
from tests.real.engine import BLOCK_SIZE
from tests.real.environment import FULL
from tests.real.fleet import NOTICE_S, Conversations, Fleet

#: 200 blocks are 6,400 tokens; a prompt is computed in chunks of 64.
FLAGS = ("--num-gpu-blocks-override", "200", "--max-num-batched-tokens", "64", "--max-num-seqs", "4")


def test_eviction_under_pressure(fleet: Fleet) -> None:
    """Conversations that together exceed the caches agree in every turn, also where their blocks were evicted."""
    rng = random.Random(3)
    conversations = Conversations(3)
    active = [conversations.begin() for _ in range(16)]
    for _ in range(60):
        chosen = rng.randrange(len(active))
        answer = fleet.chat(FULL, active[chosen])
        answer.assert_agrees()
        active[chosen] = conversations.go_on(active[chosen], answer.text)
        if answer.prompt_tokens > 1500:
            active[chosen] = conversations.begin()
        fleet.settle()


def test_a_cleared_cache_is_not_promised(fleet: Fleet) -> None:
    """After `/reset_prefix_cache` nothing is promised; the next answer is promised again."""
    prompt = [5 + place % 1500 for place in range(8 * BLOCK_SIZE)]
    answer = fleet.complete(FULL, prompt)
    fleet.settle()
    again = fleet.complete(FULL, prompt)
    again.assert_agrees()
    assert again.promised == 8
    for engine in fleet.engines.values():
        engine.call("POST", "/reset_prefix_cache")
    # vLLM reports the clear with the next step of its scheduler, so only the next request shows it.
    wait_for(lambda: _cleared(fleet, prompt), NOTICE_S, "the clear to be known", 0.5)
    third = fleet.complete(FULL, [*prompt, 7])
    third.assert_agrees()
    assert answer.worker_id in fleet.engines


def _cleared(fleet: Fleet, prompt: list[int]) -> bool:
    for engine in fleet.engines.values():
        engine.call("POST", "/v1/completions", {"model": FULL, "prompt": [9] * 40, "max_tokens": 1})
    fleet.settle()
    return not fleet.matches(prompt, FULL)
