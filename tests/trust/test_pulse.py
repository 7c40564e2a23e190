"""A bridge that passes on nothing: killed, or stopped without ending its connections."""

from __future__ import annotations

import signal
import time

import pytest

from streams.core.bridge_pulses import SILENT_AFTER_MS_MIN
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import TrustFleet, engine_option

N_BLOCKS = 20

#: What processes that share two cores with five others may need in addition.
SLACK_S = 1.0


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, marks=pytest.mark.first_ring("bridge_silent")), signal.SIGSTOP]
)
def test_answers_are_degraded_soon_after_a_bridge_stops_passing_events_on(
    how: signal.Signals, fleet: TrustFleet
) -> None:
    """The engine clears its cache when its bridge is gone; no answer says exact and 20 blocks for longer than that."""
    model, worker_id = fleet.model(), fleet.worker_id()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)
    with EngineDouble(model=model) as engine:
        engine.store(1000, N_BLOCKS)
        bridge = fleet.bridge(engine_option(worker_id, engine))
        fleet.wait_exact(model, prompt, N_BLOCKS)
        with fleet.watching(model, prompt) as watch:
            bridge.signal(how)
            stopped_s = time.monotonic()
            engine.clear()
            answer = fleet.wait_answer(model, prompt, lambda found: found["mode"] == "degraded", "a degraded answer")
            assert answer["degraded_because"] == "bridge_silent"
            time.sleep(0.5)
            if how is signal.SIGSTOP:
                bridge.signal(signal.SIGCONT)
                fleet.wait_exact(model, prompt, 0)
        wrong = watch.wrong_while_exact(0)
        assert wrong, "the watcher saw nothing of the time before the silence was noticed"
        assert max(sample.sent_s for sample in wrong) - stopped_s < SILENT_AFTER_MS_MIN / 1000 + SLACK_S
