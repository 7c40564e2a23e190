"""A router's choices without Kafka: its topics count as read, and its registry is folded by hand.

What must not be here: anything that depends on what Kafka does (test_router_modes, test_router_api).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from streams.core.hashing import local_hashes
from streams.core.ids import HashArray
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.core.routing.selection import RouterMode
from streams.errors import AllWorkersBusy, InvalidRequest, NotReady
from streams.router_api.router import Router
from streams.router_api.wire import answer_json, parse_route_query
from streams.settings import Settings
from tests.helpers.api import TOKENS, packed
from tests.unit.test_view_predictions import BLOCK_SIZE, hold, rank, register, report


def router_of(n_workers: int = 3, **knobs: Any) -> Router:
    router = Router(Settings(**{"router_replica_sync": False, **knobs}))
    router.feeds.pending = dict  # type: ignore[method-assign]  # as if all were read
    for worker_id in range(1, n_workers + 1):
        register(router.view, worker_id, kv_total_blocks=100)
    return router


def ask(router: Router, name: str = "r", tokens: Sequence[int] = tuple(TOKENS), **fields: Any) -> dict[str, Any]:
    query = {"request_id": name, **{key: str(value) for key, value in fields.items()}}
    return answer_json(router.route(parse_route_query(query), packed(tokens)))


def test_without_events_a_prompt_goes_where_it_went() -> None:
    """In mode approximate; a question without booking predicts nothing."""
    router = router_of(kv_events=False)
    for _ in range(5):
        assert ask(router, update_states="false")["overlap_blocks"] == 0
    first = ask(router)
    router.report_phase("r", BookingPhase.FREE)
    again = [ask(router, update_states="false") for _ in range(5)]
    assert {(each["worker_id"], each["overlap_blocks"], each["mode"]) for each in again} == {
        (first["worker_id"], 4, "approximate")
    }


@pytest.mark.parametrize("override", [{}, {"overlap_score_weight": 1.0}])
def test_without_weight_the_index_is_not_asked(override: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is it by a request that gives itself a weight, which is told `fallback`."""
    router = router_of(kv_overlap_score_weight=0.0)

    def refuse(_: object) -> None:
        raise AssertionError("the index was asked")

    monkeypatch.setattr(router.view.index, "find_matches", refuse)
    answer = ask(router, **override)
    assert (answer["mode"], answer["overlap_blocks"]) == ("fallback", 0)
    assert router.potential(parse_route_query({}), packed(TOKENS))["mode"] == "fallback"


def test_a_request_without_weight_does_not_ask_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a router that has one; others on it do."""
    router = router_of()

    def refuse(_: object) -> None:
        raise AssertionError("the index was asked")

    monkeypatch.setattr(router.view.index, "find_matches", refuse)
    assert ask(router, overlap_score_weight=0.0)["mode"] == "fallback"
    with pytest.raises(AssertionError, match="the index was asked"):
        ask(router, "other")


def test_direct_needs_a_worker() -> None:
    """And obeys."""
    router = router_of(router_mode=RouterMode.DIRECT)
    with pytest.raises(InvalidRequest, match="worker_id is missing"):
        ask(router)
    assert ask(router, worker_id=2)["worker_id"] == 2


def test_a_session_stays_where_it_was() -> None:
    """As long as that rank may be chosen; each phase has its own, and looking binds nothing."""
    router = router_of(router_mode=RouterMode.ROUND_ROBIN, router_session_affinity_ttl_s=60.0)

    def go(name: str, session: str, **fields: Any) -> int:
        worker_id: int = ask(router, name, session_id=session, **fields)["worker_id"]
        return worker_id

    assert go("look", "a", update_states="false") == 1
    assert [go(f"a{n}", "a") for n in range(4)] == [2] * 4
    assert go("b", "b") == 3
    prefill = go("p1", "a", phase="prefill")
    assert go("p2", "a", phase="prefill") == prefill
    moved = go("a5", "a", excluded_worker_ids=2)
    assert moved != 2
    assert go("a6", "a") == moved


def test_busy_ranks_are_left_out_by_what_engines_say() -> None:
    """And by what was booked; all busy is a fault of its own."""
    router = router_of(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=40)
    report(router.view, rank(1), kv_active_blocks=51, kv_total_blocks=100)
    chosen = {ask(router, f"r{n}")["worker_id"] for n in range(2)}
    assert chosen == {2, 3}
    with pytest.raises(AllWorkersBusy):
        ask(router, "r3")
    report(router.view, rank(1), kv_active_blocks=50, kv_total_blocks=100)
    assert ask(router, "r4")["worker_id"] == 1


def test_metrics_reach_the_older_policies() -> None:
    """The emptier engine wins, in mode exact as far as the index goes."""
    router = router_of(2, router_mode=RouterMode.LOAD_DEVIATION)
    for worker_id, active in ((1, 90), (2, 10)):
        hold(router.view, rank(worker_id), local_hashes(TOKENS, BLOCK_SIZE))
        report(router.view, rank(worker_id), kv_active_blocks=active, kv_total_blocks=100)
    answer = ask(router)
    assert (answer["worker_id"], answer["mode"]) == (2, "exact")


def test_overrides_are_the_requests_own() -> None:
    """Blocks that are not tracked cost it nothing; the next request is priced as ever."""
    router = router_of(1)
    ask(router, "one", list(range(500, 564)))
    with_blocks, without = (
        ask(router, "two", update_states="false", explain="true", track_active_blocks=tracked)["candidates"][0]
        for tracked in ("true", "false")
    )
    assert (with_blocks["decode_blocks"], without["decode_blocks"]) == (8, 0)


def test_a_router_waits_for_its_first_workers() -> None:
    """Not ready before; afterwards for good."""
    router = router_of(1, router_min_initial_workers=2)
    with pytest.raises(NotReady, match="1 more workers") as caught:
        ask(router)
    assert caught.value.detail == {"workers_left": 1}
    register(router.view, 2)
    ask(router)
    router.view.fold_worker(b"1", None)
    ask(router, "again")


def test_a_booking_that_comes_while_a_choice_is_made_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another router's, of the same id and on another rank: the answer is that, and nothing is booked beside it."""
    router = router_of(2)
    overlap = router.view.overlap

    def meanwhile(local: HashArray) -> Any:
        with router.loads.locked() as loads:
            told = Booking(rank(2), "m", 64, b"", 3, 4)
            loads.add(BookingId("r", "other", 1), told, None)
        return overlap(local)

    monkeypatch.setattr(router.view, "overlap", meanwhile)
    answer = ask(router)  # the choice would be the other rank, where nothing is booked
    assert (answer["worker_id"], answer["overlap_blocks"], answer["cost"]) == (2, 3, None)
    with router.loads.locked() as loads:
        assert len(loads) == 1
