"""A router's choices without Kafka: its topics count as read, and its registry is folded by hand.

What must not be here: anything that depends on Kafka's behaviour (test_router_modes, test_router_api).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest

from streams.core.hashing import local_hashes, pack_hashes
from streams.core.ids import HashArray, Tier, WorkerId
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.core.reducer.ordering import Health
from streams.core.routing.eligibility import WorkerFilter
from streams.core.routing.policies.dynamo import DynamoCost, DynamoWeights
from streams.core.routing.policies.interface import Prices, Situation
from streams.core.routing.selection import RouterMode
from streams.core.workers import Role, WorkerState
from streams.errors import AllWorkersBusy, InvalidRequest, NoEligibleWorker, NotReady, SettingsError
from streams.kafka import outage_log
from streams.kafka.clients import Record
from streams.kafka.outage_log import CLIENT_LOGGER
from streams.kafka.records import encode_load
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from streams.router_api.deciding import prompt_matches
from streams.router_api.deciding.prompt_matches import UNMATCHED_DECISIONS
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import UNFILTERED, BookRequest, parse_route, parse_route_query, worker_filter
from streams.settings import Settings
from streams.tables.records import PROGRESS_KEY, encode_progress
from tests.helpers.api import PATIENCE_S, TOKENS, packed
from tests.helpers.routers import ask, router_of
from tests.helpers.views import BLOCK_SIZE, hold, rank, register, report


def test_without_events_a_prompt_goes_where_it_went() -> None:
    """Without events a prompt returns to the rank that got it before, and a request that books nothing predicts
    nothing."""
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
    """A router without weight never reads its index; a request that sets a weight gets mode `fallback`."""
    router = router_of(kv_overlap_score_weight=0.0)

    def refuse(_: object) -> None:
        raise AssertionError("the index was asked")

    monkeypatch.setattr(router.view.index, "find_matches", refuse)
    answer = ask(router, **override)
    assert (answer["mode"], answer["overlap_blocks"]) == ("fallback", 0)
    assert router.potential(parse_route_query({}), packed(TOKENS))["mode"] == "fallback"


def test_a_request_without_weight_does_not_ask_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that sets weight 0 does not read the index, while other requests on the same router do."""
    router = router_of()

    def refuse(_: object) -> None:
        raise AssertionError("the index was asked")

    monkeypatch.setattr(router.view.index, "find_matches", refuse)
    assert ask(router, overlap_score_weight=0.0)["mode"] == "fallback"
    with pytest.raises(AssertionError, match="the index was asked"):
        ask(router, "other")


def test_direct_needs_a_worker() -> None:
    """In mode direct a request must name a worker, which is then chosen."""
    router = router_of(router_mode=RouterMode.DIRECT)
    with pytest.raises(InvalidRequest, match="worker_id is missing"):
        ask(router)
    assert ask(router, worker_id=2)["worker_id"] == 2


def test_a_session_stays_where_it_was() -> None:
    """A session keeps its rank while that is a candidate; each phase has its own, and a request that books nothing
    binds none."""
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
    """Ranks that are busy by their engine's report or by bookings are left out; if all are, the error is
    AllWorkersBusy."""
    router = router_of(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=40)
    report(router.view, rank(1), kv_active_blocks=51, kv_total_blocks=100)
    chosen = {ask(router, f"r{n}")["worker_id"] for n in range(2)}
    assert chosen == {2, 3}
    with pytest.raises(AllWorkersBusy):
        ask(router, "r3")
    report(router.view, rank(1), kv_active_blocks=50, kv_total_blocks=100)
    assert ask(router, "r4")["worker_id"] == 1


def test_metrics_reach_the_older_policies() -> None:
    """The emptier engine wins, and the mode is that of the index."""
    router = router_of(2, router_mode=RouterMode.LOAD_DEVIATION)
    for worker_id, active in ((1, 90), (2, 10)):
        hold(router.view, rank(worker_id), local_hashes(TOKENS, BLOCK_SIZE))
        report(router.view, rank(worker_id), kv_active_blocks=active, kv_total_blocks=100)
    answer = ask(router)
    assert (answer["worker_id"], answer["mode"]) == (2, "exact")


def cold(router: Router, number: int, **fields: Any) -> int:
    """Route a prompt of its own that nothing holds; return the chosen worker."""
    worker_id: int = ask(router, f"cold{number}", range(10**6 + 100 * number, 10**6 + 100 * number + 32), **fields)[
        "worker_id"
    ]
    return worker_id


@pytest.mark.parametrize("replica_sync", [False, True])
def test_a_burst_between_two_reports_spreads_and_ends_when_all_slots_are_taken(replica_sync: bool) -> None:
    """Of 12 cold requests over two workers with 4 slots each, each worker gets 4, and the others all_workers_busy."""
    router = router_of(2, router_mode=RouterMode.LOAD_DEVIATION, router_replica_sync=replica_sync)
    for worker_id in (1, 2):
        report(router.view, rank(worker_id), request_total_slots=4, kv_total_blocks=100)
    for _ in range(5):
        cold(router, 99, update_states="false")  # it books nothing
    chosen = [cold(router, number) for number in range(8)]
    assert [chosen.count(worker_id) for worker_id in (1, 2)] == [4, 4]
    for _ in range(4):
        with pytest.raises(AllWorkersBusy, match="full"):
            cold(router, 8)
    assert ask(router, "cold3", range(10**6))["cost"] is None  # a repeated id gets its booking
    router.report_phase("cold3", BookingPhase.FREE)
    assert cold(router, 9) == chosen[3]
    with pytest.raises(AllWorkersBusy):
        cold(router, 10)


def test_a_burst_of_requests_that_override_the_mode_spreads_as_well() -> None:
    """A router whose own mode reads no reports counts bookings from the first request on whose mode reads them."""
    router = router_of(2)
    for worker_id in (1, 2):
        report(router.view, rank(worker_id), request_total_slots=4, kv_total_blocks=100)
    chosen = [cold(router, number, router_mode="load-deviation") for number in range(8)]
    assert [chosen.count(worker_id) for worker_id in (1, 2)] == [4, 4]
    with pytest.raises(AllWorkersBusy, match="full"):
        cold(router, 8, router_mode="load-deviation")
    assert cold(router, 9) in (1, 2)


def test_a_report_replaces_the_bookings_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookings count until a report that contains them arrives; from then on the report does."""
    router = router_of(2, router_mode=RouterMode.LOAD_DEVIATION)
    now_ms = [10_000]
    for owner in (router.view.fleet.engines, router.loads):
        monkeypatch.setattr(owner, "_now_ms", lambda: now_ms[0])

    def reported(**running: int) -> None:
        for name, n in running.items():
            numbers = {"request_active_slots": n, "request_total_slots": 4, "kv_total_blocks": 100}
            report(router.view, rank(int(name[1:])), **numbers, kv_active_blocks=2 * n)

    reported(w1=0, w2=0)
    for number in range(8):
        cold(router, number)
    now_ms[0] += 1000
    reported(w1=4, w2=2)  # two of the second worker's requests have ended, and their clients have not said so
    assert [cold(router, number) for number in (8, 9)] == [2, 2]
    with pytest.raises(AllWorkersBusy):
        cold(router, 10)
    now_ms[0] += 100
    reported(w1=4, w2=2)  # scraped before the last two requests can have reached the engine
    with pytest.raises(AllWorkersBusy):
        cold(router, 10)


def test_booked_blocks_fill_a_rank_as_slots_do() -> None:
    """Blocks of booked requests, including a partial last one, count against the rank's blocks, shared ones once."""
    router = router_of(1, router_mode=RouterMode.LOAD_DEVIATION)
    report(router.view, rank(1), kv_total_blocks=8, kv_active_blocks=1)
    ask(router, "a", range(36))  # 3 blocks
    ask(router, "b", range(52))  # the first two are the same: 2 more
    ask(router, "c", range(68))  # the first three are the same: 2 more, and all 8 are in use
    with pytest.raises(AllWorkersBusy):
        ask(router, "e", [1])


def test_bookings_of_other_routers_count_as_well() -> None:
    """A booking that another router wrote to the log counts on its rank from when it is read."""
    router = router_of(1, router_mode=RouterMode.HIT_USAGE_WAITING, router_replica_sync=True)
    report(router.view, rank(1), kv_total_blocks=10)
    assert ask(router, update_states="false")["mode"] == "fallback"  # nothing is known but an empty engine
    theirs = Booking(rank(1), "m", 64, pack_hashes([1, 2]), 0, 3)
    key, value = encode_load(BookingId("x", "other", 1), BookingPhase.ADD, theirs, 0)
    router.loads.fold(Record("router-loads", 0, 0, 5, key, value))
    found = ask(router, update_states="false", explain="true")["candidates"][0]["cost"]
    assert found == pytest.approx(0.3)  # 3 of 10 blocks


def test_a_hit_rate_counts_tokens_and_not_pooled_or_weighted_blocks() -> None:
    """Of 20 tokens with one cached block of 16 the hit rate is 0.8; a request given as hashes has full blocks."""
    router = router_of(1, router_mode=RouterMode.HIT_USAGE_WAITING)
    local = local_hashes(list(range(32)), BLOCK_SIZE)
    hold(router.view, rank(1), local[:1], Tier.HOST)
    assert ask(router, tokens=range(20), update_states="false")["cost"] == pytest.approx(-1.6)
    by_hashes = parse_route(orjson.dumps({"block_hashes": local.tolist(), "update_states": False}))
    assert router.route(by_hashes).cost == pytest.approx(-1.0)


def test_overrides_are_the_requests_own() -> None:
    """A request without tracked blocks pays nothing for them, and the next request does again."""
    router = router_of(1)
    ask(router, "one", list(range(500, 564)))
    with_blocks, without = (
        ask(router, "two", update_states="false", explain="true", track_active_blocks=tracked)["candidates"][0]
        for tracked in ("true", "false")
    )
    assert (with_blocks["decode_blocks"], without["decode_blocks"]) == (8, 0)


def test_a_router_waits_for_its_first_workers() -> None:
    """A router is not ready before enough workers are registered, and stays ready when they leave."""
    router = router_of(1, router_min_initial_workers=2)
    with pytest.raises(NotReady, match="1 more workers") as caught:
        ask(router)
    assert caught.value.detail == {"workers_left": 1}
    register(router.view, 2)
    ask(router)
    router.view.fold_worker(b"1", None)
    ask(router, "again")


def requests_of(router: Router) -> dict[int, int]:
    with router.loads.locked() as loads:
        return {each.worker_id: load.requests for each, load in loads.ranks().items()}


@pytest.mark.parametrize(
    "fields",
    [
        {"excluded_worker_ids": "1"},
        {"allowed_worker_ids": "2,3"},
        {"worker_id": 2},
        {"worker_id": 1, "dp_rank": 1},
    ],
)
def test_a_retry_that_rules_out_its_worker_moves_the_booking(fields: dict[str, Any]) -> None:
    """A repeated id whose worker is excluded, or that names another rank, gets a new choice and has one booking."""
    router = router_of(1)
    register(router.view, 1, dp_size=2)
    assert ask(router, dp_rank=0)["worker_id"] == 1
    register(router.view, 2)
    for _ in range(2):
        moved = ask(router, **fields)
        assert (moved["worker_id"], moved["dp_rank"]) == (fields.get("worker_id", 2), fields.get("dp_rank", 0))
        assert requests_of(router) == {moved["worker_id"]: 1}
    assert ask(router)["worker_id"] == moved["worker_id"]
    ask(router, update_states="false", worker_id=1)
    assert requests_of(router) == {moved["worker_id"]: 1}  # a request that books nothing moves nothing


def test_a_booking_that_cannot_move_stays() -> None:
    """If every other rank is busy, the request is refused, and its booking remains where it was."""
    router = router_of(2, active_prefill_tokens_threshold=40)
    first = ask(router)["worker_id"]
    other = ask(router, "other")["worker_id"]
    assert {first, other} == {1, 2}
    with pytest.raises(AllWorkersBusy):
        ask(router, excluded_worker_ids=first)
    assert requests_of(router) == {1: 1, 2: 1}
    router.report_phase("other", BookingPhase.FREE)
    assert ask(router, excluded_worker_ids=first)["worker_id"] == other
    assert requests_of(router) == {other: 1}


def test_each_phase_of_a_request_has_a_booking_of_its_own() -> None:
    """Prefill and decode bookings of one id are made, moved, reported and ended separately."""
    router = router_of(0)
    register(router.view, 1, role=Role.PREFILL)
    for worker_id in (2, 3):
        register(router.view, worker_id, role=Role.DECODE)
    assert ask(router, phase="prefill")["worker_id"] == 1
    decode = ask(router, phase="decode")["worker_id"]
    assert decode in (2, 3)
    assert requests_of(router) == {1: 1, decode: 1}
    moved = ask(router, phase="decode", excluded_worker_ids=decode)["worker_id"]
    assert ask(router, phase="prefill")["cost"] is None
    assert requests_of(router) == {1: 1, moved: 1}
    assert router.report_phase("r", BookingPhase.FREE, "prefill")["buffered"] is False
    assert requests_of(router) == {moved: 1}
    assert router.report_phase("r", BookingPhase.PREFILL, "prefill")["buffered"] is False  # it has ended
    with router.loads.locked() as loads:
        assert loads.load(rank(moved)).prefill_tokens == len(TOKENS)
    router.report_phase("r", BookingPhase.PREFILL, "decode")
    router.report_output("r", 17, "decode")
    with router.loads.locked() as loads:
        assert (loads.load(rank(moved)).prefill_tokens, loads.load(rank(moved)).output_blocks) == (0, 2)
    ask(router, phase="prefill")
    router.report_phase("r", BookingPhase.FREE)  # of every phase
    assert requests_of(router) == {}


def test_a_booking_that_comes_while_a_choice_is_made_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another router's booking of the id arrives during the choice, it is the answer, and nothing is booked."""
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


def test_a_prepared_request_can_be_booked_once_a_rank_is_free_again() -> None:
    """A booking that found every rank busy succeeds with the same preparation after a load has been freed."""
    router = router_of(1, active_prefill_tokens_threshold=40)
    ask(router, "first")
    prepared = router.prepare(parse_route_query({"request_id": "second"}), packed(TOKENS))
    with pytest.raises(AllWorkersBusy):
        router.try_book(prepared)
    router.report_phase("first", BookingPhase.FREE)
    answer = router.try_book(prepared)
    assert (answer.request_id, answer.rank, answer.candidates) == ("second", rank(1), None)
    assert router.try_book(prepared).cost is None  # the same id again gets the existing choice


@pytest.mark.parametrize("mode", ["kv", "expected-time"])
def test_explained_loads_are_those_of_earlier_requests(mode: str) -> None:
    """The terms of the candidates leave out what the request itself is charged, in every mode."""
    router = router_of(1, router_mode=RouterMode(mode))

    def explained(name: str) -> list[float]:
        body = orjson.dumps({"request_id": name, "token_ids": TOKENS, "explain": True})
        (candidate,) = answer_json(router.route(parse_route(body)))["candidates"]
        return [candidate["active_prefill_blocks"], candidate["decode_blocks"]]

    n_blocks = len(TOKENS) // BLOCK_SIZE
    assert explained("first") == [0, n_blocks]
    router.report_phase("first", BookingPhase.FREE)
    assert explained("second") == [0, n_blocks]


def test_a_request_that_no_rank_may_serve_is_refused_when_it_is_booked() -> None:
    """Preparation does not raise, since the request may repeat the id of a booking on a rank that is cordoned now."""
    router = router_of(1)
    ask(router)
    register(router.view, 1, state=WorkerState.CORDONED)
    prepared = router.prepare(parse_route_query({"request_id": "other"}), packed(TOKENS))
    matches = prepared.routing.matches
    assert (matches.ranks, type(matches.refusal)) == ((), NoEligibleWorker)
    with pytest.raises(NoEligibleWorker, match="cordoned 1"):
        router.try_book(prepared)
    assert ask(router)["worker_id"] == 1


def test_an_answer_has_the_url_of_its_worker() -> None:
    """The URL is the registered one, and null for an existing booking whose worker was removed."""
    router = router_of(1)
    assert ask(router)["url"] == router.view.fleet.workers[rank(1).worker_id].url
    router.view.fold_worker(b"1", None)
    register(router.view, 2)
    assert (ask(router)["worker_id"], ask(router)["url"]) == (1, None)


def spoil(router: Router, worker_id: int, health: Health) -> None:
    """The worker's rank gets another health, as if it had lost a batch or had blocks that are not indexed."""
    (progress,) = router.view.index.progress_of(WorkerId(worker_id))
    changed = replace(progress, health=health, sequence=progress.sequence + 1)
    router.view.fold_index(PROGRESS_KEY.pack(rank(worker_id)), encode_progress(changed))


def modes_of(answer: dict[str, Any]) -> tuple[Any, ...]:
    """An answer's rank, its modes, and the reasons for which they are degraded."""
    reasons = answer.get("degraded_because"), answer.get("chosen_degraded_because")
    return (answer["worker_id"], answer["mode"], answer["chosen_mode"], *reasons)


def test_an_answer_has_the_trust_in_the_chosen_rank_alone() -> None:
    """`mode` is the worst over all eligible ranks, and `chosen_mode` that of the chosen rank, each with its reason."""
    router = router_of(3)
    local = local_hashes(TOKENS, BLOCK_SIZE)
    for worker_id in (1, 2, 3):
        hold(router.view, rank(worker_id), local[:worker_id])
    assert modes_of(ask(router, update_states="false")) == (3, "exact", "exact", None, None)
    spoil(router, 1, Health.DEGRADED)
    assert modes_of(ask(router, update_states="false")) == (3, "degraded", "exact", "events_lost", None)
    spoil(router, 3, Health.APPROXIMATE)
    assert modes_of(ask(router, update_states="false")) == (3, "degraded", "approximate", "events_lost", None)
    assert modes_of(ask(router, update_states="false", worker_id=2)) == (2, "exact", "exact", None, None)
    register(router.view, 4)
    for worker_id, reason in ((1, "events_lost"), (4, "no_events_yet")):
        only = ask(router, update_states="false", worker_id=worker_id)
        assert modes_of(only) == (worker_id, "degraded", "degraded", reason, reason)
    assert router.decisions.chosen_modes == {"exact": 3, "approximate": 1, "degraded": 2}
    booked = ask(router, "again", allowed_worker_ids="1,2")
    assert modes_of(booked) == (2, "degraded", "exact", "events_lost", None)
    assert modes_of(ask(router, "again")) == (2, "exact", "exact", None, None)  # the booked rank is the only one
    assert modes_of(ask(router, overlap_score_weight=0.0))[1:] == ("fallback", "fallback", None, None)


def test_a_repeated_id_is_exact_only_while_its_overlap_is() -> None:
    """A repeated id gets the overlap of its booking; once the rank holds more or less, both modes are `fallback`."""
    router = router_of(1)
    local = local_hashes(TOKENS, BLOCK_SIZE)
    hold(router.view, rank(1), local[:2])
    assert (ask(router)["overlap_blocks"], modes_of(ask(router))[1:3]) == (2, ("exact", "exact"))
    assert modes_of(ask(router, tokens=range(64)))[1:3] == ("fallback", "fallback")  # other tokens match nothing
    hold(router.view, rank(1), local)
    again = ask(router)
    assert (again["overlap_blocks"], modes_of(again)[1:]) == (2, ("fallback", "fallback", None, None))
    hold(router.view, rank(1), local[:2])
    assert modes_of(ask(router))[1:3] == ("exact", "exact")
    register(router.view, 1, state=WorkerState.CORDONED)
    refused = ask(router)  # it is refused before the index is read
    assert modes_of(refused) == (1, "fallback", "fallback", None, None)
    with pytest.raises(NoEligibleWorker):  # and the booking stays, since it cannot move
        ask(router, excluded_worker_ids="1")
    assert ask(router)["worker_id"] == 1
    register(router.view, 1)
    spoil(router, 1, Health.DEGRADED)
    assert modes_of(ask(router))[1:] == ("degraded", "degraded", "events_lost", "events_lost")


def test_a_chosen_rank_is_no_better_than_its_prediction_and_the_bookings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chosen rank whose overlap is predicted is approximate, and if bookings are out of sync it is degraded."""
    router = router_of(2, router_predicted_ttl_s=60.0)
    for worker_id in (1, 2):
        hold(router.view, rank(worker_id), local_hashes(TOKENS, BLOCK_SIZE)[:1])
    router.view.predictions.predict(rank(1), local_hashes(TOKENS, BLOCK_SIZE))
    assert modes_of(ask(router, update_states="false")) == (1, "approximate", "approximate", None, None)
    assert modes_of(ask(router, update_states="false", allowed_worker_ids="2"))[1:3] == ("exact", "exact")
    spoil(router, 1, Health.DEGRADED)
    monkeypatch.setattr(type(router.loads), "in_sync", False)
    not_in_sync = "bookings_not_in_sync"
    found = modes_of(ask(router, update_states="false", excluded_worker_ids="1"))
    assert found == (2, "degraded", "degraded", not_in_sync, not_in_sync)
    router.view.predictions.predict(rank(2), local_hashes(TOKENS, BLOCK_SIZE))
    drawn = {modes_of(ask(router, update_states="false"))[2:] for _ in range(30)}
    assert drawn == {("degraded", "events_lost", "events_lost"), ("degraded", "events_lost", not_in_sync)}


def test_a_repeated_request_is_no_better_than_its_prediction() -> None:
    """The overlap of its booking was predicted, as is what it is compared with."""
    router = router_of(1, router_predicted_ttl_s=60.0)
    hold(router.view, rank(1), local_hashes(TOKENS, BLOCK_SIZE)[:1])
    router.view.predictions.predict(rank(1), local_hashes(TOKENS, BLOCK_SIZE))
    answers = [modes_of(ask(router, "a")) for _ in range(2)]
    assert answers == [(1, "approximate", "approximate", None, None)] * 2


def test_a_policy_without_a_preference_trusts_nothing() -> None:
    """If an older policy had nothing to choose by, both modes are `fallback`."""
    router = router_of(2, router_mode=RouterMode.LOAD_DEVIATION)
    assert modes_of(ask(router))[1:] == ("fallback", "fallback", None, None)


# --- prompts that match nothing -----------------------------------------------------------------------------------


def holding(router: Router, worker_id: int, tokens: Sequence[int]) -> None:
    """The worker's rank holds the blocks of these tokens, as its progress says too."""
    local = local_hashes(list(tokens), BLOCK_SIZE)
    hold(router.view, rank(worker_id), local)
    (progress,) = router.view.index.progress_of(WorkerId(worker_id))
    changed = replace(progress, n_blocks=len(local), sequence=progress.sequence + 1)
    router.view.fold_index(PROGRESS_KEY.pack(rank(worker_id)), encode_progress(changed))


def route_prompts(router: Router, n: int, first: int = 0, **fields: Any) -> None:
    """Route n prompts that nothing holds."""
    for number in range(first, first + n):
        ask(router, tokens=range(10**6 + 100 * number, 10**6 + 100 * number + 32), update_states="false", **fields)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of routers. Clients of Kafka, also those of earlier tests, log on threads of their own."""
    found = [record for record in caplog.records if record.name != outage_log.__name__]
    return [record.getMessage() for record in found if record.levelname == "WARNING"]


def test_a_model_whose_prompts_never_match_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """After UNMATCHED_DECISIONS without a match on a fleet that holds blocks, one warning names likely causes."""
    router = router_of(2)
    register(router.view, 3, model="other")
    holding(router, 1, TOKENS)
    holding(router, 3, range(32))
    with caplog.at_level("INFO"):
        route_prompts(router, UNMATCHED_DECISIONS - 1, model="m")
        ask(router, tokens=range(32), model="other", update_states="false")  # it matches, on its own model's rank
        assert (router.prompt_matches.unmatched(), warnings_of(caplog)) == ({}, [])
        # Blocks of another model do not count as a match.
        ask(router, tokens=range(32), model="m", update_states="false")
        assert router.prompt_matches.unmatched() == {"m": UNMATCHED_DECISIONS}
        route_prompts(router, 60, model="m", first=1000)
        (warning,) = warnings_of(caplog)
        for part in ("'m'", "4 blocks", "tokenizer", "block size", "hash seed", "lora_name", "namespace"):
            assert part in warning
        assert router.prompt_matches.unmatched() == {"m": UNMATCHED_DECISIONS + 60}
        ask(router, model="m", update_states="false")
        assert router.prompt_matches.unmatched() == {}
        route_prompts(router, 2 * UNMATCHED_DECISIONS, model="m")
        assert (router.prompt_matches.unmatched(), len(warnings_of(caplog))) == ({}, 1)


def test_an_empty_fleet_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Decisions count only while the model's ranks hold blocks, since nothing can match before that."""
    router = router_of(1)
    route_prompts(router, 2 * UNMATCHED_DECISIONS)
    holding(router, 1, TOKENS)
    route_prompts(router, UNMATCHED_DECISIONS - 20, first=1000)
    assert (router.prompt_matches.unmatched(), warnings_of(caplog)) == ({}, [])
    route_prompts(router, 20, first=2000)
    assert router.prompt_matches.unmatched() == {"m": UNMATCHED_DECISIONS}


def test_a_prediction_is_no_match(caplog: pytest.LogCaptureFixture) -> None:
    """A router hashes a prompt and its own prediction alike, so that a prediction shows nothing about the engines."""
    router = router_of(1, router_predicted_ttl_s=60.0)
    holding(router, 1, TOKENS)
    router.view.predictions.predict(rank(1), local_hashes(list(range(64)), BLOCK_SIZE))
    for _ in range(UNMATCHED_DECISIONS):
        assert ask(router, tokens=range(64), update_states="false")["overlap_blocks"] == 4
    assert len(warnings_of(caplog)) == 1


def test_prompts_shorter_than_a_block_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt without a full block can match nothing, and the warning says how many of the prompts are like that."""
    router = router_of(1)
    holding(router, 1, TOKENS)
    for number in range(UNMATCHED_DECISIONS):
        n_tokens = BLOCK_SIZE - number % 2
        assert ask(router, tokens=range(n_tokens), update_states="false")["request_blocks"] == 1
    assert router.prompt_matches.n_without_blocks == UNMATCHED_DECISIONS // 2
    (warning,) = warnings_of(caplog)
    assert f"{UNMATCHED_DECISIONS // 2} of these prompts are shorter" in warning
    ask(router, tokens=[1], overlap_score_weight=0.0, update_states="false")  # it does not read the index
    assert router.prompt_matches.n_without_blocks == UNMATCHED_DECISIONS // 2


def test_further_models_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of models that are followed has a limit."""
    monkeypatch.setattr(prompt_matches, "MODELS_MAX", 1)
    router = router_of(1)
    register(router.view, 2, model="other")
    for worker_id in (1, 2):
        holding(router, worker_id, TOKENS)
    route_prompts(router, 1, model="m")
    route_prompts(router, UNMATCHED_DECISIONS, model="other")
    assert router.prompt_matches.unmatched() == {}
    route_prompts(router, UNMATCHED_DECISIONS - 1, model="m")
    assert router.prompt_matches.unmatched() == {"m": UNMATCHED_DECISIONS}


def test_expected_time_explains_its_cost_and_forecasts_what_it_books() -> None:
    """Each candidate shows the policy's terms; the booking's forecast is the next request's backlog there."""
    router = router_of(router_mode=RouterMode.EXPECTED_TIME)
    first = ask(router, "first", explain="true")
    for each in first["candidates"]:
        terms = each["policy_terms"]
        assert each["cost"] == pytest.approx(sum(terms[name] for name in terms if name.endswith("_ms")))
        assert terms["backlog_ms"] == 0.0
    again = ask(router, "second", [9] * 64, update_states="false", explain="true")
    backlogs = {each["worker_id"]: each["policy_terms"]["backlog_ms"] for each in again["candidates"]}
    expected_ms = next(iter(first["candidates"]))["policy_terms"]["prefill_ms"]
    assert 0.0 < backlogs.pop(first["worker_id"]) <= expected_ms
    assert set(backlogs.values()) == {0.0}
    assert again["worker_id"] != first["worker_id"]


def test_expected_time_learns_on_ticks() -> None:
    """What clients report changes the speeds that a router expects, without a decision paying for it."""
    router = router_of(router_mode=RouterMode.EXPECTED_TIME)
    before = router.ms_per_token()
    for number in range(40):
        ask(router, f"r{number}", [number + 1] * 2048)
        router.report_phase(f"r{number}", BookingPhase.PREFILL)
        router.report_phase(f"r{number}", BookingPhase.FREE)
    assert router.ms_per_token() == before
    router.tick()
    assert router.ms_per_token() < before / 2


def test_a_request_may_use_expected_time_on_a_router_of_another_mode() -> None:
    """Then bookings without forecasts count by their tokens."""
    router = router_of()
    booked = ask(router, "first")["worker_id"]
    answer = ask(router, "second", [9] * 64, router_mode="expected-time", update_states="false", explain="true")
    backlogs = {each["worker_id"]: each["policy_terms"]["backlog_ms"] for each in answer["candidates"]}
    assert [worker_id for worker_id, backlog in backlogs.items() if backlog] == [booked]
    assert "policy_terms" not in ask(router, "third", update_states="false", explain="true")["candidates"][0]


def test_a_policy_by_name_needs_a_name_that_exists() -> None:
    """A router with a wrong name does not start; a request for a policy that the router does not have is invalid."""
    assert ask(router_of(router_mode=RouterMode.POLICY, router_policy="expected-time"))["cost"] > 0.0
    with pytest.raises(SettingsError, match="there is no policy 'fastest'"):
        router_of(router_mode=RouterMode.POLICY, router_policy="fastest")
    with pytest.raises(InvalidRequest, match="this router has no router_policy"):
        ask(router_of(), router_mode="policy")


def test_credit_and_request_weight_change_the_cost_of_mode_kv() -> None:
    """The cost is that of NVIDIA Dynamo: the credit reduces earlier requests' prefill too, down to 0."""
    router = router_of(
        kv_overlap_score_weight=4.0,
        kv_overlap_score_credit=2.0,
        decode_active_request_weight=64.0,
        recent_prefill_weight=0.0,
    )
    hold(router.view, rank(1), local_hashes(TOKENS, BLOCK_SIZE))
    for worker_id in (1, 2):
        router.book(f"w{worker_id}", BookRequest(worker_id=worker_id, token_ids=[7] * 6 * BLOCK_SIZE))
    found = ask(router, update_states="false", explain="true")
    costs = {each["worker_id"]: each["cost"] for each in found["candidates"]}
    assert costs[1] == 4.0 * max(0, 6 + 4 - 2 * 4) + (6 + 4) + 64.0
    assert costs[2] == 4.0 * (6 + 4) + (6 + 4) + 64.0
    assert costs[3] == 4.0 * 4 + 4


def test_what_ranks_computed_lately_is_a_term_of_mode_kv() -> None:
    """A rank that was given half as much as the one with the most costs half of the weight, and an idle one nothing."""
    router = router_of(recent_prefill_weight=0.5)
    for worker_id, n_blocks in ((1, 6), (2, 3)):
        router.book(f"w{worker_id}", BookRequest(worker_id=worker_id, token_ids=[7] * n_blocks * BLOCK_SIZE))
        router.report_phase(f"w{worker_id}", BookingPhase.FREE)
    found = ask(router, update_states="false", explain="true")
    terms = {each["worker_id"]: (each["recent_prefill_blocks"], each["cost"]) for each in found["candidates"]}
    assert terms == {1: (0.5 * 4, 8 + 2.0), 2: (0.25 * 4, 8 + 1.0), 3: (0.0, 8.0)}


@pytest.mark.parametrize(
    ("field", "value", "filtered"),
    [
        ("worker_id", 1, "worker_id"),
        ("dp_rank", 0, "dp_rank"),
        ("allowed_worker_ids", [], "allowed"),
        ("excluded_worker_ids", [1], "excluded"),
        ("phase", "decode", "phase"),
        ("required_taints", ["gpu"], "required_taints"),
        ("lora_name", "a", "lora_name"),
    ],
)
def test_every_filter_of_a_request_counts(field: str, value: Any, filtered: str) -> None:
    """A request with any filter is not taken for one without filters, which share a filter for each model."""
    request = parse_route(orjson.dumps({"token_ids": TOKENS, field: value}))
    assert getattr(worker_filter(request), filtered) != getattr(UNFILTERED, filtered)


def test_all_filters_are_tested() -> None:
    """A filter that is new has a row in the test above; the other ones come from the view."""
    tested = {"worker_id", "dp_rank", "allowed", "excluded", "phase", "required_taints", "lora_name"}
    assert {*WorkerFilter._fields} == tested | {"model", "block_size", "lists_lora"}
    assert worker_filter(parse_route(orjson.dumps({"token_ids": TOKENS}))) is UNFILTERED


def test_what_every_client_of_a_router_logs_is_taken_by_its_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that wait in a client would be logged long after Kafka answered again."""
    names: set[str] = set()

    def keep(record: logging.LogRecord) -> bool:
        names.update(re.findall(r"#producer-\d+", record.getMessage()))
        return True

    monkeypatch.setattr(CLIENT_LOGGER, "filters", [keep, *CLIENT_LOGGER.filters])
    router = Router(Settings(kafka=f"127.0.0.1:{free_port()}", router_replica_sync=False))
    clients = (router._kafka, router.registry._producer())
    try:

        def both_logged() -> bool:
            router.tick()
            return len(names) == len(clients)

        wait_for(both_logged, PATIENCE_S, "a line of each client")
    finally:
        for client in clients:
            client.close()


def test_the_default_mode_is_expected_time() -> None:
    """A router whose settings name no mode decides by expected time, in milliseconds."""
    router = router_of(router_mode=Settings().router_mode)
    assert router.policy.mode is RouterMode.EXPECTED_TIME
    assert ask(router, explain="true")["candidates"][0]["policy_terms"]["prefill_ms"] > 0.0


@pytest.mark.parametrize(
    ("mode", "override", "decides"),
    [
        (RouterMode.EXPECTED_TIME, {"overlap_score_weight": 2.0}, RouterMode.KV),
        (RouterMode.EXPECTED_TIME, {"router_temperature": 0.5}, RouterMode.KV),
        (RouterMode.EXPECTED_TIME, {"router_temperature": 0.5, "router_mode": "random"}, RouterMode.RANDOM),
        (RouterMode.EXPECTED_TIME, {"cxl_score_weight": 0.5}, RouterMode.EXPECTED_TIME),
        (RouterMode.RANDOM, {"router_temperature": 0.5}, RouterMode.RANDOM),
    ],
)
def test_a_request_with_a_parameter_of_kv_is_decided_by_kv(
    mode: RouterMode, override: dict[str, Any], decides: RouterMode
) -> None:
    """An override that only kv has selects kv where the default would ignore it, unless the request names a mode."""
    router = router_of(router_mode=mode)
    assert ask(router, **override)["router_mode"] == decides
    assert {counted for counted, _, _ in router.decisions.by_reason} == {decides}


class _Watching(DynamoCost):
    """A policy that keeps the engines' reports that it is given."""

    def __init__(self) -> None:
        super().__init__(DynamoWeights())
        self.given: list[int] = []

    def price(self, situation: Situation) -> Prices:
        self.given = [metrics.num_requests_waiting for metrics in situation.metrics.values()]
        return super().price(situation)


def test_a_policy_of_another_package_gets_what_engines_report() -> None:
    """Situation.metrics has the last report of each rank that has one."""
    router = router_of(2, router_mode=RouterMode.POLICY, router_policy="dynamo-default")
    watching = router._chooser._policies["dynamo-default"] = _Watching()
    report(router.view, rank(1), num_requests_waiting=7)
    ask(router)
    assert watching.given == [7]


def test_alternatives_are_the_next_cheapest_ranks_of_other_workers() -> None:
    """They are as many as asked for, in the order of their costs, and none is on the chosen worker."""
    router = router_of(n_workers=4)
    for worker_id in (2, 3):
        register(router.view, worker_id, dp_size=2)
        hold(router.view, rank(worker_id), local_hashes(TOKENS, BLOCK_SIZE)[: worker_id - 1])
    assert "alternatives" not in ask(router, update_states="false")
    answer = ask(router, update_states="false", alternatives=2, explain="true")
    assert (answer["worker_id"], answer["alternatives"][0]) == (3, {"worker_id": 2, "dp_rank": 0})
    costs = {(each["worker_id"], each["dp_rank"]): each["cost"] for each in answer["candidates"]}
    named = [(each["worker_id"], each["dp_rank"]) for each in answer["alternatives"]]
    assert len(named) == 2 and costs[named[0]] < costs[named[1]] and 3 not in dict(named)


def test_a_request_that_an_alternative_serves_is_charged_there() -> None:
    """The booking moves to the rank that served it, and ends with its request."""
    router = router_of(n_workers=2)
    answer = router.route(parse_route(orjson.dumps({"request_id": "r", "token_ids": TOKENS, "alternatives": 1})))
    (other,) = answer.alternatives
    router.served_by("r", other)
    loads = {each["worker_id"]: each["active_requests"] for each in router.rank_loads()["loads"]}
    assert loads == {answer.rank.worker_id: 0, other.worker_id: 1}
    router.served_by("r", other)
    router.end_unreported("r")
    assert all(each["active_requests"] == 0 for each in router.rank_loads()["loads"])
