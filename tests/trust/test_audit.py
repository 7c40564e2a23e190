"""An engine whose cache is not what its events say, and which says so after each request."""

from __future__ import annotations

from typing import Any

import pytest

from streams.core.routing.audit import OVER_MIN
from streams.process.waiting import wait_for
from tests.helpers.api import metrics
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import PATIENCE_S, TrustFleet, claim_a_batch_that_never_arrived, engine_option, state_of

N_BLOCKS = 4


def route(fleet: TrustFleet, model: str, first: int) -> str:
    """Book a prompt whose blocks the engine reported, in an exact answer; return the request's id."""
    tokens = list(range(first, first + N_BLOCKS * BLOCK_SIZE + 1))
    answer = fleet.api.call("POST", "/route", {"model": model, "token_ids": tokens}).json
    assert (answer["mode"], answer["overlap_blocks"]) == ("exact", N_BLOCKS)
    return str(answer["request_id"])


def end(fleet: TrustFleet, request_id: str, found: int) -> None:
    """End a request with what its engine found."""
    query = f"prompt_tokens={N_BLOCKS * BLOCK_SIZE + 1}&cached_tokens={found * BLOCK_SIZE}"
    assert fleet.api.call("DELETE", f"/loads/{request_id}?{query}").status == 200


def counted(fleet: TrustFleet, outcome: str) -> float:
    return metrics(fleet.api)[f"kvstreams_overlap_audited_total/{outcome}"]


@pytest.mark.first_ring("audit_disagrees")
def test_an_engine_that_evicts_without_reporting_it_is_approximate_until_it_clears(fleet: TrustFleet) -> None:
    """A restatement of the same ledger does not end it; what was evicted and reported is no contradiction."""
    model, worker_id = fleet.model(), fleet.worker_id()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)

    def disagrees(answer: dict[str, Any]) -> bool:
        return (answer["mode"], answer.get("degraded_because")) == ("approximate", "audit_disagrees")

    with EngineDouble(model=model) as engine:
        fleet.bridge(engine_option(worker_id, engine))
        firsts = [2000 + 1000 * number for number in range(OVER_MIN)]
        for first in (1000, *firsts):
            engine.store(first, N_BLOCKS)
        fleet.wait_exact(model, range(firsts[-1], firsts[-1] + N_BLOCKS * BLOCK_SIZE), N_BLOCKS)
        agreed, excused, over = (counted(fleet, name) for name in ("agreed", "excused", "over"))
        end(fleet, route(fleet, model, 1000), N_BLOCKS)
        for first in firsts:  # the event of the eviction is on its way when the report comes
            request_id = route(fleet, model, first)
            engine.remove(first, 2)
            end(fleet, request_id, 2)
        wait_for(lambda: counted(fleet, "excused") == excused + OVER_MIN, PATIENCE_S, "the evictions to excuse")
        assert (counted(fleet, "agreed"), counted(fleet, "over")) == (agreed + 1, over)
        fleet.wait_exact(model, prompt, N_BLOCKS)
        for _ in range(OVER_MIN):
            end(fleet, route(fleet, model, 1000), 1)
        assert fleet.wait_answer(model, prompt, disagrees, "the contradiction")["overlap_blocks"] == N_BLOCKS
        claim_a_batch_that_never_arrived(fleet, worker_id, model)
        wait_for(lambda: state_of(fleet, worker_id)["generation"] == 1, PATIENCE_S, "the restatement")
        assert fleet.wait_answer(model, prompt, disagrees, "the restated blocks")["overlap_blocks"] == N_BLOCKS
        assert fleet.route(model, prompt)["mode"] == "approximate"
        engine.clear()
        engine.store(1000, N_BLOCKS)
        fleet.wait_exact(model, prompt, N_BLOCKS)
