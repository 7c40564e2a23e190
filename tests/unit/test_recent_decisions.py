"""Decisions of the last minute: which are kept, what is shown of them, and what is not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from streams.core.routing.reasons import EXPLANATIONS
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import DegradedReason
from streams.router_api.deciding.recent_decisions import KEPT_EVERY_S, NOTED_MAX, RECENT_MAX
from streams.router_api.deciding.router import Router
from tests.helpers.routers import CHAIN, LOCAL, ask, router_of
from tests.helpers.views import hold, rank


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The router's clock, in seconds; the test sets it."""
    now = [1000.0]
    monkeypatch.setattr("streams.router_api.deciding.router.time.monotonic", lambda: now[0])
    return now


def shown(router: Router, now_s: float) -> list[dict[str, Any]]:
    router.tick()
    return router.recent.answer(now_s)


def test_a_decision_is_shown_with_its_terms_and_the_next_best(clock: list[float]) -> None:
    """Overlap, load and cost are those of the answer, and the terms are those that `explain` returns."""
    router = router_of()
    hold(router.view, rank(2), LOCAL)
    answer = ask(router, explain="true")
    (decision,) = shown(router, clock[0] + 3.0)
    by_worker = {each["worker_id"]: each for each in answer["candidates"]}
    chosen = by_worker[2]
    terms = decision.pop("terms")
    assert terms == {name: pytest.approx(chosen[name], abs=0.01) for name in terms}
    assert terms.keys() >= {"own_prefill_blocks", "active_prefill_blocks", "decode_blocks"}
    other = decision.pop("next_best")
    assert other["worker_id"] in ("1", "3") and other["overlap_blocks"] == 0
    assert other["cost"] == pytest.approx(by_worker[int(other["worker_id"])]["cost"], abs=0.01)
    assert decision == {
        "age_s": 3.0,
        "model": "m",
        "router_mode": "kv",
        "worker_id": "2",
        "dp_rank": 0,
        "overlap_blocks": 4,
        "request_blocks": 4,
        "load_blocks": chosen["decode_blocks"],
        "cost": pytest.approx(answer["cost"], abs=0.01),
        "candidates": 3,
        "mode": answer["chosen_mode"],
        "reason": answer.get("chosen_degraded_because"),
    }


def test_expected_time_shows_its_times(clock: list[float]) -> None:
    """In the mode of default, the terms are the policy's own: waiting, computing, loading."""
    router = router_of(router_mode=RouterMode.EXPECTED_TIME)
    answer = ask(router, explain="true")
    (decision,) = shown(router, clock[0])
    chosen = next(each for each in answer["candidates"] if each["worker_id"] == answer["worker_id"])
    assert decision["terms"] == {name: pytest.approx(term, abs=0.01) for name, term in chosen["policy_terms"].items()}
    assert {"backlog_ms", "prefill_ms"} <= decision["terms"].keys()


def test_one_decision_a_second_is_kept_for_a_minute(clock: list[float]) -> None:
    """A busy router keeps the first decision of each second; what is older than a minute is not shown."""
    router = router_of()
    for number in range(4 * (RECENT_MAX + 10)):
        clock[0] += KEPT_EVERY_S / 4
        ask(router, f"r{number}", update_states="false")
        router.tick()
    ages = [decision["age_s"] for decision in router.recent.answer(clock[0])]
    assert ages[0] < KEPT_EVERY_S
    assert np.diff(ages).tolist() == pytest.approx([KEPT_EVERY_S] * (RECENT_MAX - 1))
    assert len(router.recent.answer(clock[0] + 30.0)) == pytest.approx(RECENT_MAX / 2, abs=1)
    assert router.recent.answer(clock[0] + 61.0) == []


def test_without_a_tick_few_decisions_wait(clock: list[float]) -> None:
    """A router that nothing ticks holds the terms of a few decisions, and not of all."""
    router = router_of()
    for number in range(3 * NOTED_MAX):
        clock[0] += KEPT_EVERY_S
        ask(router, f"r{number}")
    assert len(shown(router, clock[0])) == NOTED_MAX


def test_nothing_of_a_prompt_or_a_request_id_is_shown(clock: list[float]) -> None:
    """Who reads the page may not be who may read prompts: there is no id, no token and no hash in it."""
    router = router_of()
    hold(router.view, rank(2), LOCAL)
    ask(router, "somebody-s-request")
    text = json.dumps(shown(router, clock[0]))
    assert "somebody" not in text
    for block in (*CHAIN, *LOCAL.tolist()):
        assert str(block) not in text


def test_a_decision_whose_terms_cannot_be_listed_is_left_out(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of another package may return arrays that do not fit its names. Its requests are served all the same."""
    router = router_of()
    answer = ask(router)
    noted = router.recent._noted[0]
    monkeypatch.setattr(type(noted.decision.columns), "terms", np.zeros((2, 3)))
    assert answer["worker_id"] in (1, 2, 3)
    assert shown(router, clock[0]) == []


def test_every_reason_has_a_meaning_and_a_remedy() -> None:
    """The page, `top` and the doctor say of each reason what it means and what to do, in whole sentences."""
    assert set(DegradedReason) <= EXPLANATIONS.keys()
    for name, explanation in EXPLANATIONS.items():
        for text in explanation:
            assert text[0].isupper() or text.startswith("DELETE"), name
            assert text.endswith("."), name
