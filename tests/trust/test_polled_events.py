"""TensorRT-LLM's events, polled over HTTP by a real bridge: lost events are a gap, and a restart is noticed."""

from __future__ import annotations

import time

import pytest

from tests.helpers.engine_double import BLOCK_SIZE
from tests.helpers.polled_engine import PolledEngine
from tests.helpers.trtllm_events import block, created, removed, stored
from tests.helpers.trust import TrustFleet

N_BLOCKS = 3
TOKENS = list(range(1000, 1000 + N_BLOCKS * BLOCK_SIZE))
BLOCKS = [block(at + 1, TOKENS[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]) for at in range(N_BLOCKS)]


def option(worker_id: int, engine: PolledEngine, **more: str) -> str:
    parts = {"id": str(worker_id), "url": engine.url, "events": engine.events, **more}
    return ",".join(f"{name}={value}" for name, value in parts.items())


def test_polled_events_are_exact_and_a_lost_one_is_a_gap(fleet: TrustFleet) -> None:
    """The bridge asks again after an error; events that the engine's queue had no room for are noticed."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with PolledEngine(model, queue_max=2) as engine:
        engine.report(created(), stored(*BLOCKS))
        fleet.bridge(option(worker_id, engine))
        fleet.wait_exact(model, TOKENS, N_BLOCKS)
        engine.status = 500
        time.sleep(0.3)
        engine.report(removed(3))
        engine.status = 200
        fleet.wait_exact(model, TOKENS, N_BLOCKS - 1)
        engine.report(removed(2), stored(BLOCKS[0]), stored(BLOCKS[0]))  # the first one is pushed out
        answer = fleet.wait_answer(model, TOKENS, lambda found: found["mode"] == "degraded", "the gap")
        assert answer["degraded_because"] == "events_lost"


@pytest.mark.parametrize("hangs", [False, True], ids=["errors", "hangs"])
def test_an_engine_whose_events_cannot_be_polled_is_behind(fleet: TrustFleet, hangs: bool) -> None:
    """What it holds is known as of its last answer; its metrics page still works."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with PolledEngine(model) as engine:
        engine.report(created(), stored(*BLOCKS))
        fleet.bridge(option(worker_id, engine))
        fleet.wait_exact(model, TOKENS, N_BLOCKS)
        engine.status, engine.hangs = (200, True) if hangs else (500, False)
        engine.report(removed(3))
        # On a busy machine, a pulse of the bridge may be late as well, which is another reason for a moment.
        answer = fleet.wait_answer(
            model, TOKENS, lambda found: found.get("degraded_because") == "feed_behind", "the failed polls"
        )
        assert answer["mode"] == "degraded"
        engine.status, engine.hangs = 200, False
        fleet.wait_exact(model, TOKENS, N_BLOCKS - 1)


def test_an_engine_that_restarts_between_two_polls_keeps_no_credit(fleet: TrustFleet) -> None:
    """Its numbers begin again, so the rank is emptied, and its new blocks are exact."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with PolledEngine(model) as engine:
        fleet.bridge(option(worker_id, engine, dp="2"))
        engine.report(created(), stored(*BLOCKS), stored(*BLOCKS, attention_dp_rank=1))
        fleet.wait_exact(model, TOKENS, N_BLOCKS)
        engine.restart()
        engine.report(created(attention_dp_rank=0), stored(*BLOCKS[:1]), created(attention_dp_rank=1))
        fleet.wait_answer(
            model,
            TOKENS,
            lambda found: (found["overlap_blocks"], found["mode"]) == (1, "exact"),
            "the new process",
        )
