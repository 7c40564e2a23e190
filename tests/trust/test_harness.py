"""The state that every other test of trust departs from: with nothing wrong, answers become exact and right."""

from __future__ import annotations

import pytest

from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import TrustFleet, engine_option

N_BLOCKS = 20


@pytest.mark.first_ring("faust worker", "bridge", "exact")
def test_answers_are_exact_and_right_while_nothing_is_wrong(fleet: TrustFleet) -> None:
    """An engine's blocks appear, and disappear when it clears its cache; the answers say exact and are right."""
    model, worker_id = fleet.model(), fleet.worker_id()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)
    with EngineDouble(model=model) as engine:
        engine.store(1000, N_BLOCKS)
        fleet.bridge(engine_option(worker_id, engine))
        fleet.wait_exact(model, prompt, N_BLOCKS)
        engine.clear()
        fleet.wait_exact(model, prompt, 0)
