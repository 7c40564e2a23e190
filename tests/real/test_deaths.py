"""Engines that die, stop or lose their core: streams go on token by token, and nothing is promised that is gone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from streams.process.waiting import wait_for
from tests.real.engine import BLOCK_SIZE, RealEngine
from tests.real.environment import FULL
from tests.real.fleet import NOTICE_S, Fleet, Streamed

SETTINGS = {"front_migration": True, "front_stall_timeout_s": 3.0}

N_TOKENS = 120


def _kill(engine: RealEngine) -> None:
    engine.kill()


def _stop(engine: RealEngine) -> None:
    engine.signal(signal.SIGSTOP)


def _kill_core(engine: RealEngine) -> None:
    os.kill(engine.core_pid(), signal.SIGKILL)


@pytest.mark.parametrize("failure", [_kill, _stop, _kill_core])
def test_a_stream_goes_on_at_the_other_engine(fleet: Fleet, failure: Callable[[RealEngine], None]) -> None:
    """Text and token ids equal those of an undisturbed answer; no booking is left; the engine comes back empty."""
    prompt = [13 + (place * 7 + len(failure.__name__)) % 1800 for place in range(4 * BLOCK_SIZE)]
    body = {"model": FULL, "prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0.0, "return_token_ids": True}
    undisturbed = fleet.stream("/v1/completions", body)
    assert undisturbed.n_tokens == N_TOKENS
    fleet.settle()
    hit: list[RealEngine] = []

    def fail(streamed: Streamed) -> None:
        if streamed.n_tokens >= 20 and not hit:
            hit.append(fleet.engines[streamed.worker_id])
            threading.Thread(target=failure, args=(hit[0],)).start()

    try:
        disturbed = fleet.stream("/v1/completions", body, fail)
        assert disturbed.error is None, disturbed.error
        assert (disturbed.tokens, disturbed.text) == (undisturbed.tokens, undisturbed.text)
        assert disturbed.migration["migrations"] == 1
        wait_for(lambda: not fleet.n_active(), NOTICE_S, "every booking to end", 0.1)
    finally:
        engine = hit[0]
        engine.kill()
        engine.start()
        engine.wait_ready()
    wait_for(lambda: engine.worker_id not in fleet.matches(prompt, FULL), NOTICE_S, "its blocks to be gone", 0.2)
    fleet.wait_exact(FULL)
    answer = fleet.complete(FULL, prompt)
    answer.assert_agrees()
