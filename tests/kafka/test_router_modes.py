"""Routers on a real Kafka with various settings: modes, predictions, sessions, busy ranks, and the topics they read."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from streams.core.ids import WorkerId
from streams.core.routing.selection import RouterMode
from streams.core.workers import Worker
from streams.errors import NotReady
from streams.kafka.clients import ensure_topics
from streams.process.waiting import wait_for
from streams.router_api.deciding.router import Router
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.api import BLOCK_SIZE, PATIENCE_S, TOKENS, TOKENS_MAX, Api, Fleet, rank_of, served


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, {"index", "pooled", "workers", "metrics", "loads"}),
        ({"kv_overlap_score_weight": 0.0}, {"workers", "metrics", "loads"}),
        ({"kv_events": False}, {"workers", "metrics", "loads"}),
        ({"router_replica_sync": False}, {"index", "pooled", "workers", "metrics"}),
        ({"router_event_threads": 64}, {"index", "pooled", "workers", "metrics", "loads"}),
    ],
)
def test_a_router_reads_only_the_topics_that_it_needs(changes: dict[str, Any], read: set[str]) -> None:
    """A router skips the index if overlap has no weight or is predicted, and loads if routers do not share them."""
    assert Router(Settings(**changes)).feeds.pending().keys() == {*read, "dead letters"}


@pytest.mark.parametrize(
    "mode",
    [RouterMode.LEAST_LOADED, RouterMode.POWER_OF_TWO, RouterMode.DEVICE_AWARE_WEIGHTED, RouterMode.DIRECT],
)
def test_modes_by_load_follow_the_bookings(mode: RouterMode, fleet: Fleet) -> None:
    """Modes by load choose the worker without requests, whatever workers hold; direct chooses the named worker."""
    model = fleet.model()
    busy, idle = fleet.register(model, 2)
    fleet.agents.hold(rank_of(busy), TOKENS)
    fleet.holds(busy, 4)
    fleet.main.call("POST", f"/loads/{model}", {"worker_id": busy, "token_ids": TOKENS}).given()
    fleet.same_loads([busy, idle], 1)
    with served(replace(fleet.settings, router_mode=mode)) as api:
        if mode is RouterMode.DIRECT:
            message = api.call("POST", "/route", {"model": model, "token_ids": TOKENS}).refused(400, "invalid_request")
            assert "worker_id" in message
            assert api.ask(model=model, token_ids=TOKENS, worker_id=busy)["worker_id"] == busy
            return
        for _ in range(10):
            answer = api.ask(model=model, token_ids=TOKENS)
            assert (answer["worker_id"], answer["mode"], answer["overlap_blocks"]) == (idle, "fallback", 0)


@pytest.mark.parametrize("mode", [RouterMode.HIT_USAGE_WAITING, RouterMode.LOAD_DEVIATION])
def test_the_older_policies_without_metrics(mode: RouterMode, fleet: Fleet) -> None:
    """Without metrics, hit-usage-waiting decides by hits alone, and load-deviation falls back to the least loaded."""
    model = fleet.model()
    holder, other = fleet.register(model, 2)
    fleet.agents.hold(rank_of(holder), TOKENS)
    for worker_id in (holder, other):
        fleet.agents.progress(rank_of(worker_id))
    fleet.holds(holder, 4)
    fleet.main.call("POST", f"/loads/{model}", {"worker_id": holder, "token_ids": [7] * 64}).given()
    fleet.same_loads([holder, other], 1)
    with served(replace(fleet.settings, router_mode=mode)) as api:

        def asked(tokens: list[int]) -> tuple[int, str]:
            answer = api.ask(model=model, token_ids=tokens)
            return answer["worker_id"], answer["mode"]

        if mode is RouterMode.LOAD_DEVIATION:
            assert asked(TOKENS) == (other, "fallback")
            return
        fleet.wait(lambda: asked(TOKENS) == (holder, "exact"), "hits to decide")
        assert asked([9] * 64)[1] == "fallback"


def test_without_events_a_router_predicts_from_its_own_decisions(fleet: Fleet) -> None:
    """With kv_events off, a prompt goes to the rank that got it before; the mode is `approximate`."""
    model = fleet.model()
    first, second = fleet.register(model, 2)
    fleet.agents.hold(rank_of(first), TOKENS)
    fleet.holds(first, 4)
    with served(replace(fleet.settings, kv_events=False)) as api:
        answer = api.ask(model=model, token_ids=TOKENS)
        assert (answer["overlap_blocks"], answer["mode"]) == (0, "approximate")
        chosen = api.route(model=model, token_ids=TOKENS, request_id=f"{model}-1")["worker_id"]
        api.call("DELETE", f"/loads/{model}-1").given()
        for _ in range(5):
            again = api.ask(model=model, token_ids=TOKENS)
            assert (again["worker_id"], again["overlap_blocks"]) == (chosen, 4)
        other = second if chosen == first else first
        api.call("POST", f"/loads/{model}-2", {"worker_id": other, "token_ids": [5] * 32}).given()
        api.call("DELETE", f"/loads/{model}-2").given()
        assert api.ask(model=model, token_ids=[5] * 32)["worker_id"] == other
    fleet.same_loads([first, second], 0)


def test_a_router_without_weight_answers_by_load(fleet: Fleet) -> None:
    """A router whose overlap weight is 0 answers with `fallback`, even if the request overrides the weight."""
    model = fleet.model()
    holder, _ = fleet.register(model, 2)
    fleet.agents.hold(rank_of(holder), TOKENS)
    fleet.holds(holder, 4)
    with served(replace(fleet.settings, kv_overlap_score_weight=0.0)) as api:
        for override in ({}, {"router_config_override": {"overlap_score_weight": 1.0}}):
            answer = api.ask(model=model, token_ids=TOKENS, **override)
            assert (answer["overlap_blocks"], answer["mode"]) == (0, "fallback")
        potential = api.call("POST", "/loads/potential", {"model": model, "token_ids": TOKENS}).given()
        assert potential["mode"] == "fallback"
        assert {row["potential_prefill_tokens"] for row in potential["loads"]} == {64}


def test_a_session_stays_on_its_rank(fleet: Fleet) -> None:
    """A session keeps its rank under load as long as the rank is a candidate. Each phase has its own binding, and a
    request that books nothing binds nothing."""
    model = fleet.model()
    ids = fleet.register(model, 3)
    settings = replace(fleet.settings, router_session_affinity_ttl_s=600.0, router_mode=RouterMode.ROUND_ROBIN)
    with served(settings) as api:

        def go(session: str, n: int, **asked: Any) -> int:
            answer = api.route(
                model=model, token_ids=[n] * 64, session_id=session, request_id=f"{model}-{session}-{n}", **asked
            )
            worker_id: int = answer["worker_id"]
            return worker_id

        assert api.route(model=model, token_ids=TOKENS, session_id="a", update_states=False)["worker_id"] == ids[0]
        assert [go("a", n) for n in range(4)] == [ids[1]] * 4
        assert go("b", 0) == ids[2]
        assert go("a", 5, excluded_worker_ids=[ids[1]]) != ids[1]
        moved = go("a", 6)
        assert moved != ids[1]
        prefill = go("a", 7, phase="prefill")
        assert {go("a", n, phase="prefill") for n in range(8, 12)} == {prefill}
        for session, n in [("a", n) for n in range(12) if n != 4] + [("b", 0)]:
            api.call("DELETE", f"/loads/{model}-{session}-{n}").given()
    fleet.same_loads(ids, 0)


def test_busy_ranks_get_nothing(fleet: Fleet) -> None:
    """A rank over a threshold gets no requests, and if all ranks are over it the answer is 503 all_workers_busy."""
    model = fleet.model()
    holder, other = fleet.register(model, 2)
    fleet.agents.hold(rank_of(holder), TOKENS)
    fleet.holds(holder, 4)
    with served(replace(fleet.settings, active_prefill_tokens_threshold=100)) as api:
        for n, worker_id in enumerate((holder, other)):
            assert api.ask(model=model, token_ids=TOKENS)["worker_id"] == (holder if n == 0 else other)
            body = {"worker_id": worker_id, "token_ids": [n] * 101}
            api.call("POST", f"/loads/{model}-{n}", body).given()
        api.call("POST", "/route", {"model": model, "token_ids": TOKENS}).refused(503, "all_workers_busy")
        for n in range(2):
            api.call("POST", f"/loads/{model}-{n}/prefill-complete").given()
        assert api.ask(model=model, token_ids=TOKENS)["worker_id"] == holder
        for n in range(2):
            api.call("DELETE", f"/loads/{model}-{n}").given()
    fleet.same_loads([holder, other], 0)


def test_without_replica_sync_a_router_keeps_its_bookings_to_itself(fleet: Fleet) -> None:
    """Without replica sync a router neither publishes its bookings nor reads those of others."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    with served(replace(fleet.settings, router_replica_sync=False)) as api:
        api.route(model=model, token_ids=TOKENS, request_id=f"{model}-own")
        assert api.loads([worker_id])[worker_id, 0] == (64, 4, 1)
        fleet.main.route(model=model, token_ids=[3] * 32, request_id=f"{model}-other")
        assert fleet.same_loads([worker_id], 1)[worker_id, 0] == (32, 2, 1)
        assert api.loads([worker_id])[worker_id, 0] == (64, 4, 1)
        fleet.main.call("DELETE", f"/loads/{model}-other").given()
        assert fleet.same_loads([worker_id], 0)[worker_id, 0] == (0, 0, 0)


def test_a_router_waits_for_its_first_workers(scope: Settings) -> None:
    """A router is not ready until enough workers are registered, and stays ready when they are removed later."""
    ensure_topics(scope, topics(scope).all())
    router = Router(replace(scope, router_min_initial_workers=2))
    router.start()
    try:
        wait_for(lambda: not router.feeds.pending(), PATIENCE_S, "the topics to be read")
        for left in (2, 1):
            with pytest.raises(NotReady, match=f"{left} more workers") as caught:
                router.readiness.check()
            assert caught.value.detail == {"workers_left": left}
            router.registry.put_worker(_worker(left))
        router.readiness.check()
        for worker_id in (1, 2):
            router.registry.delete_worker(_worker(worker_id).worker_id)
        router.readiness.check()
    finally:
        router.stop()


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_any_number_of_threads_folds_the_same(threads: int, fleet: Fleet) -> None:
    """With any number of reading threads, every fact, worker and booking arrives."""
    model = fleet.model()
    ids = fleet.register(model, 4)
    for n, worker_id in enumerate(ids):
        fleet.agents.hold(rank_of(worker_id), [n] * 64)
        fleet.main.call("POST", f"/loads/{model}-{n}", {"worker_id": worker_id, "token_ids": [n] * 16}).given()
    for worker_id in ids:
        fleet.holds(worker_id, 4)
    with served(replace(fleet.settings, router_event_threads=threads)) as api:
        fleet.wait(lambda: api.get("/state")["ranks"] == fleet.main.get("/state")["ranks"], "the same state")
        fleet.wait(lambda: api.loads(ids) == {(worker_id, 0): (16, 1, 1) for worker_id in ids}, "the same loads")
        assert set(ids) <= api.workers().keys()
    for n in range(len(ids)):
        fleet.main.call("DELETE", f"/loads/{model}-{n}").given()


def test_once_its_topics_are_read_one_thread_reads_on(fleet: Fleet) -> None:
    """Threads that read up to the ends hand their partitions over; what is written later still arrives, once each."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    with served(replace(fleet.settings, router_event_threads=3)) as api:
        # One for bookings, and one for everything else. The fixture has two routers in this process.
        n_threads = 2 * 3
        fleet.wait(lambda: _n_reading() == n_threads, "the other threads to end")
        for n in range(1, 6):
            fleet.agents.hold(rank_of(worker_id), [n] * 64)
            fleet.holds(worker_id, 4 * n)
        fleet.wait(lambda: api.get("/state")["ranks"] == fleet.main.get("/state")["ranks"], "the same state")
        assert _n_reading() == n_threads


def _n_reading() -> int:
    return sum(thread.name.startswith("feeds-") for thread in threading.enumerate())


def _worker(worker_id: int) -> Worker:
    return Worker(WorkerId(worker_id), "http://w", "m", BLOCK_SIZE)


def test_routers_agree_on_backlogs_in_milliseconds(fleet: Fleet) -> None:
    """What one router books and forecasts is another one's backlog, until a client reports its prefill at either."""
    model = fleet.model()
    fleet.register(model, 2)
    settings = replace(fleet.settings, router_mode=RouterMode.EXPECTED_TIME)

    def backlogs(api: Api) -> dict[int, float]:
        asked = {"model": model, "token_ids": TOKENS, "update_states": False, "explain": True}
        found = api.call("POST", "/route", asked).given()["candidates"]
        return {each["worker_id"]: each["policy_terms"]["backlog_ms"] for each in found}

    with served(settings) as first, served(settings) as second:
        booked = {}
        for number in range(60):  # of 143 ms each, so that a slow machine has time to compare
            tokens = [1000 + number] * TOKENS_MAX
            body = {"request_id": f"{model}-{number}", "model": model, "token_ids": tokens}
            answer = first.call("POST", "/route", body).given()
            booked[f"{model}-{number}"] = answer["worker_id"]
        assert len(set(booked.values())) == 2

        def agree() -> bool:
            mine, theirs = backlogs(first), backlogs(second)
            return all(abs(mine[each] - theirs[each]) < 30.0 for each in mine)

        fleet.wait(lambda: min(backlogs(second).values()) > 0.0 and agree(), "the second router to have the bookings")
        for request_id in booked:
            second.call("POST", f"/loads/{request_id}/prefill-complete").given()
        fleet.wait(lambda: set(backlogs(first).values()) == {0.0}, "the first router to have the reports")
        for request_id in booked:
            first.call("DELETE", f"/loads/{request_id}").given()


def test_a_client_that_reports_nothing_does_not_block_a_rank(fleet: Fleet) -> None:
    """Its bookings leave the backlog and then the loads by themselves, on every router, long before their TTL."""
    model = fleet.model()
    (worker_id,) = fleet.register(model, 1)
    settings = replace(fleet.settings, router_mode=RouterMode.EXPECTED_TIME)
    with served(settings) as first, served(settings) as second:
        body = {"request_id": model, "model": model, "token_ids": TOKENS, "expected_output_tokens": 40}
        first.call("POST", "/route", body).given()

        def requests(api: Api) -> int:
            rows = api.call("GET", "/loads").given()["loads"]
            return sum(each["active_requests"] for each in rows if each["worker_id"] == worker_id)

        assert requests(first) == 1
        fleet.wait(lambda: requests(first) == requests(second) == 0, "the booking to count as over")
        first.call("DELETE", f"/loads/{model}").given()
