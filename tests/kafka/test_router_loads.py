"""Bookings shared by two routers through a real Kafka (docs/bookings.md)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.kafka.clients import ensure_topics, producer
from streams.kafka.load_records import request_partition
from streams.process.waiting import wait_for
from streams.router_api.messages.requests import COUNT_MAX, NAME_CHARS_MAX
from streams.router_api.sharing.late_calls import BUFFERED_CALL_TTL_MS, BUFFERED_CALLS_MAX
from streams.router_api.sharing.loads_sync import LoadsSync
from streams.settings import Settings
from streams.topics import MESSAGE_BYTES_MAX, topics
from tests.helpers.api import (
    BLOCK_SIZE,
    LIVE,
    OCTETS,
    PATIENCE_S,
    TOKENS,
    Fleet,
    metrics,
    packed,
    rank_of,
    served,
)


def test_a_request_without_update_states_books_nothing(fleet: Fleet) -> None:
    """With update_states false nothing is booked, whether the request id is new or has an active booking."""
    model = fleet.model()
    ids = fleet.register(model, 2)
    for _ in range(3):
        fleet.main.ask(model=model, token_ids=TOKENS, request_id=f"{model}-r")
    assert set(fleet.main.loads(ids).values()) == {(0, 0, 0)}
    booked = fleet.main.route(model=model, token_ids=TOKENS, request_id=f"{model}-r")
    before = fleet.main.loads(ids)
    other = fleet.main.ask(model=model, token_ids=TOKENS, request_id=f"{model}-r")
    assert other["worker_id"] != booked["worker_id"]  # it books nothing, and its choice takes the booking into account
    assert fleet.main.loads(ids) == before == fleet.same_loads(ids, 1)


def test_a_request_without_an_id_gets_one(fleet: Fleet) -> None:
    """The id that the router makes up can be used in all later calls for the request."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    first, second = (fleet.main.route(model=model, token_ids=TOKENS)["request_id"] for _ in range(2))
    assert first != second
    for request_id in (first, second):
        assert fleet.main.call("DELETE", f"/loads/{request_id}").given()["buffered"] is False
    assert fleet.same_loads([worker_id], 0) == {(worker_id, 0): (0, 0, 0)}


def test_requests_without_ids_that_follow_each_other_share_a_partition(fleet: Fleet) -> None:
    """Their records are in one partition, or in two where the next one begins, and each booking can be ended."""
    model, n_partitions = fleet.model(), fleet.settings.partitions
    ids = fleet.register(model)
    asked = [fleet.main.route(model=model, token_ids=TOKENS)["request_id"] for _ in range(20)]
    assert len(set(asked)) == 20
    assert len({request_partition(each, n_partitions) for each in asked}) <= 2 < n_partitions
    for each in asked:
        assert fleet.main.call("DELETE", f"/loads/{each}").given()["buffered"] is False
    assert fleet.same_loads(ids, 0) == {(ids[0], 0): (0, 0, 0)}


def test_a_repeated_request_books_once(fleet: Fleet) -> None:
    """A repeated id of an active booking gets the same choice from every router, even with other tokens, and is booked
    once."""
    model = fleet.model()
    ids = fleet.register(model, 3)
    request_id = f"{model}-r"
    first = fleet.main.route(model=model, token_ids=TOKENS, request_id=request_id)
    fleet.same_loads(ids, 1)
    for api in (fleet.main, fleet.peer):
        for tokens in (TOKENS, TOKENS[:16], [1] * 64):
            again = api.route(model=model, token_ids=tokens, request_id=request_id)
            assert again == {**first, "cost": None}
    assert fleet.same_loads(ids, 1)[first["worker_id"], 0] == (64, 4, 1)
    fleet.main.call("DELETE", f"/loads/{request_id}").given()
    fleet.same_loads(ids, 0)


def test_each_call_answers_repeated_unknown_foreign_and_ended_ids(fleet: Fleet) -> None:
    """Each call answers each kind of request id as the table in docs/http.md lists it, at every router."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    (unregistered,) = fleet.agents.worker_ids(1, LIVE)
    asked = {"model": model, "token_ids": TOKENS}
    booked = {"worker_id": worker_id, "token_ids": TOKENS, "overlap_blocks": 1}
    existing = {"request_id": f"{model}-r", "worker_id": worker_id, "dp_rank": 0, "request_blocks": 4}
    output = {"request_id": f"{model}-no-booking", "output_tokens": 17}
    answer = fleet.main.call("POST", f"/loads/{model}-no-booking/output", {"output_tokens": 17}).given(202)
    assert answer == {**output, "buffered": True}
    for phase in ("prefill", "free"):  # for an id that is unknown to every router
        path = f"/loads/{model}-unknown" + ("/prefill-complete" if phase == "prefill" else "")
        answer = fleet.main.call("POST" if phase == "prefill" else "DELETE", path).given(202)
        assert answer == {"request_id": f"{model}-unknown", "phase": phase, "buffered": True}
    for first in (fleet.main, fleet.peer):
        route = {**asked, "request_id": f"{model}-r"}
        mode: dict[str, Any] = {"mode": "degraded", "degraded_because": "no_events_yet"}
        mode |= {f"chosen_{name}": value for name, value in mode.items()}
        mode |= {"router_mode": "kv", "dp_size": 1}
        url = f"http://engine-{worker_id}:8000"
        assert first.route(**route).items() >= mode.items()
        fleet.same_loads([worker_id], 1)
        for overlap, each in enumerate((fleet.main, fleet.peer)):  # only one of them booked it
            assert each.route(**route) == {**existing, "url": url, "overlap_blocks": overlap, "cost": None, **mode}
            assert each.call("POST", f"/loads/{model}-r", booked).given() == {**existing, "overlap_blocks": 1}
            fleet.wait(lambda: fleet.same_loads([worker_id], 1) == {(worker_id, 0): (48, 4, 1)}, "it to be replaced")
            each.call("POST", f"/loads/{model}-r", {**booked, "dp_rank": 1}).refused(404, "unknown_id")
            each.call("POST", f"/loads/{model}-r", {**booked, "worker_id": unregistered}).refused(404, "unknown_id")
        for each in (fleet.main, fleet.peer, fleet.main):
            answer = each.call("POST", f"/loads/{model}-r/prefill-complete").given()
            assert answer == {"request_id": f"{model}-r", "phase": "prefill", "buffered": False}
        fleet.wait(lambda: fleet.same_loads([worker_id], 1) == {(worker_id, 0): (0, 4, 1)}, "its prompt to be computed")
        for tokens, each in ((17, fleet.main), (3, fleet.peer), (17, fleet.peer)):
            answer = each.call("POST", f"/loads/{model}-r/output", {"output_tokens": tokens}).given()
            assert answer == {"request_id": f"{model}-r", "output_tokens": tokens, "buffered": False}
            fleet.wait(lambda: fleet.same_loads([worker_id], 1) == {(worker_id, 0): (0, 4 + 2, 1)}, "it to grow")
        second = fleet.peer if first is fleet.main else fleet.main
        assert second.call("DELETE", f"/loads/{model}-r").given()["buffered"] is False
        fleet.same_loads([worker_id], 0)
        for each in (fleet.main, fleet.peer):  # the booking has ended, and both routers still know its id
            for call in (("DELETE", f"/loads/{model}-r"), ("POST", f"/loads/{model}-r/prefill-complete")):
                assert each.call(*call).given()["buffered"] is False
            assert each.call("POST", f"/loads/{model}-r/output", {"output_tokens": 999}).given()["buffered"] is False
        fleet.same_loads([worker_id], 0)
    assert fleet.main.call("POST", f"/loads/{model}-r", booked).given() == {**existing, "overlap_blocks": 1}
    assert fleet.same_loads([worker_id], 1) == {(worker_id, 0): (48, 4, 1)}
    fleet.main.call("DELETE", f"/loads/{model}-r").given()
    fleet.same_loads([worker_id], 0)


def test_a_choice_made_elsewhere_is_booked(fleet: Fleet) -> None:
    """POST /loads books a choice made elsewhere, and repeating it changes nothing."""
    model = fleet.model()
    first, second = fleet.register(model, 2, dp_size=2)
    path = f"/loads/{model}-r"
    body = {"worker_id": first, "dp_rank": 1, "token_ids": [*TOKENS, 1], "overlap_blocks": 3}
    expected = {
        "request_id": f"{model}-r",
        "worker_id": first,
        "dp_rank": 1,
        "overlap_blocks": 3,
        "request_blocks": 5,
    }
    for _ in range(3):
        assert fleet.main.call("POST", path, body).given() == expected
    assert fleet.same_loads([first], 1) == {(first, 0): (0, 0, 0), (first, 1): (65 - 48, 4, 1)}
    for other in ({"worker_id": second}, {"worker_id": first, "dp_rank": 0}):
        for api in (fleet.main, fleet.peer):
            message = api.call("POST", path, {**other, "token_ids": TOKENS}).refused(409, "booking_conflict")
            assert "DELETE" in message
    fleet.main.call("POST", path, {**body, "dp_rank": 2}).refused(404, "unknown_id")
    asked = {"model": model, "token_ids": TOKENS, "request_id": f"{model}-r"}
    assert fleet.main.call("POST", "/route", asked).given()["dp_rank"] == 1
    # The booking is replaced by one with more cached blocks.
    more = fleet.main.call("POST", path, {**body, "overlap_blocks": 1000}).given()
    assert more["overlap_blocks"] == 5
    assert fleet.same_loads([first], 1)[first, 1] == (0, 4, 1)
    fleet.main.call("DELETE", path).given()
    assert fleet.main.call("POST", path, {"worker_id": second, "token_ids": TOKENS}).given()["worker_id"] == second
    fleet.main.call("DELETE", path).given()
    fleet.same_loads([first, second], 0)


@pytest.mark.parametrize("expected", [0, 1, COUNT_MAX])
def test_any_expected_output_is_booked(expected: int, fleet: Fleet) -> None:
    """A booking with the least or the greatest expected output reaches the other routers."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    asked = {"model": model, "token_ids": TOKENS, "expected_output_tokens": expected, "request_id": f"{model}-r"}
    fleet.main.route(**asked)
    fleet.same_loads([worker_id], 1)
    fleet.peer.call("DELETE", f"/loads/{model}-r").given()
    fleet.same_loads([worker_id], 0)


def test_each_phase_ends_its_part_of_a_booking(fleet: Fleet) -> None:
    """Prefill-complete ends the charge for prefill, and free ends the rest. Both may be repeated, at any router."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    for name in ("a", "b"):
        fleet.main.route(model=model, token_ids=TOKENS, request_id=f"{model}-{name}")
    assert fleet.same_loads([worker_id], 2) == {(worker_id, 0): (128, 4, 2)}  # shared blocks count once
    for api in (fleet.main, fleet.peer, fleet.main):
        answer = api.call("POST", f"/loads/{model}-a/prefill-complete").given()
        assert answer == {"request_id": f"{model}-a", "phase": "prefill", "buffered": False}
    fleet.wait(lambda: fleet.main.loads([worker_id]) == {(worker_id, 0): (64, 4, 2)}, "one prefill to be over")
    fleet.same_loads([worker_id], 2)
    for api in (fleet.main, fleet.peer):
        answer = api.call("DELETE", f"/loads/{model}-b").given()  # without prefill-complete: free implies it
        assert answer == {"request_id": f"{model}-b", "phase": "free", "buffered": False}
    assert fleet.same_loads([worker_id], 1) == {(worker_id, 0): (0, 4, 1)}
    fleet.peer.call("DELETE", f"/loads/{model}-a").given()
    assert fleet.same_loads([worker_id], 0) == {(worker_id, 0): (0, 0, 0)}


@pytest.mark.parametrize(
    "body", [None, {}, {"output_tokens": -1}, {"output_tokens": COUNT_MAX + 1}, {"output_tokens": 1.5}, {"tokens": 1}]
)
def test_a_wrong_number_of_generated_tokens_is_refused(body: Any, fleet: Fleet) -> None:
    """The number must be whole and fit into a record, and the body has no other fields."""
    fleet.main.call("POST", "/loads/r/output", body).refused(400, "invalid_request")


def test_generated_tokens_are_load_at_every_router(fleet: Fleet) -> None:
    """Output that is reported to another router than the one that booked raises the rank's cost at both routers."""
    model = fleet.model()
    first, second = fleet.register(model, 2)
    fleet.main.route(model=model, token_ids=TOKENS, worker_id=first, request_id=f"{model}-r")
    fleet.main.route(model=model, token_ids=TOKENS, worker_id=second, request_id=f"{model}-s")
    fleet.same_loads([first, second], 2)
    fleet.peer.call("POST", f"/loads/{model}-r/output", {"output_tokens": COUNT_MAX}).given()
    most = -(-COUNT_MAX // BLOCK_SIZE)
    grown = {(first, 0): (64, 4 + most, 1), (second, 0): (64, 4, 1)}
    fleet.wait(lambda: fleet.same_loads([first, second], 2) == grown, "the booking to grow")
    for api in (fleet.main, fleet.peer):
        seen = api.ask(model=model, token_ids=TOKENS)
        assert {each["worker_id"]: each["decode_blocks"] for each in seen["candidates"]} == {
            first: 4 + most,
            second: 4,
        }
        assert seen["worker_id"] == second
    for name in ("r", "s"):
        fleet.main.call("DELETE", f"/loads/{model}-{name}").given()
    fleet.same_loads([first, second], 0)


def test_cached_tokens_are_not_charged(fleet: Fleet) -> None:
    """A booking charges the tokens that its rank must compute: those not in its cache, including a partial block."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    fleet.agents.hold(rank_of(worker_id), TOKENS[:32])
    fleet.holds(worker_id, 2)
    fleet.main.route(model=model, token_ids=[*TOKENS, 1, 2], request_id=f"{model}-r")
    assert fleet.same_loads([worker_id], 1) == {(worker_id, 0): (66 - 32, 4, 1)}


def test_potential_loads_are_those_that_a_booking_brings(fleet: Fleet) -> None:
    """POST /loads/potential predicts for a rank what GET /loads shows once the request is booked."""
    model = fleet.model()
    ids = fleet.register(model, 3)
    fleet.agents.hold(rank_of(ids[0]), TOKENS[:48])
    fleet.holds(ids[0], 3)
    fleet.main.call("POST", f"/loads/{model}-0", {"worker_id": ids[1], "token_ids": TOKENS[:32]}).given()
    asked = {"model": model, "token_ids": [*TOKENS, 1]}
    potential = fleet.main.call("POST", "/loads/potential", asked).given()
    assert potential["mode"] in ("exact", "degraded")
    predicted = {
        row["worker_id"]: (row["potential_prefill_tokens"], row["potential_decode_blocks"])
        for row in potential["loads"]
    }
    assert predicted == {ids[0]: (17, 4), ids[1]: (32 + 65, 4), ids[2]: (65, 4)}
    assert fleet.main.call("POST", "/loads/potential", asked).given()["loads"] == potential["loads"]  # books nothing
    for n, worker_id in enumerate(ids):
        fleet.main.route(**asked, worker_id=worker_id, request_id=f"{model}-r{n}")
    loads = fleet.main.loads(ids)
    assert {worker_id: loads[worker_id, 0][:2] for worker_id in ids} == predicted


@pytest.mark.parametrize("phase", ["prefill", "free"])
def test_a_call_that_comes_too_soon_waits_for_its_booking(phase: str, fleet: Fleet) -> None:
    """A call for an unknown id is answered with 202, buffered, and applied when the booking arrives."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    request_id = f"{model}-r"
    call = (
        ("POST", f"/loads/{request_id}/prefill-complete") if phase == "prefill" else ("DELETE", f"/loads/{request_id}")
    )
    for _ in range(2):
        answer = fleet.peer.call(*call).given(202)
        assert answer == {"request_id": request_id, "phase": phase, "buffered": True}
    fleet.main.route(model=model, token_ids=TOKENS, request_id=request_id)
    applied = {(worker_id, 0): (0, 4, 1) if phase == "prefill" else (0, 0, 0)}
    fleet.wait(lambda: fleet.main.loads([worker_id]) == applied, "the call to be applied")
    fleet.same_loads([worker_id], 1 if phase == "prefill" else 0)


def test_a_retry_that_excludes_its_worker_moves_the_booking_everywhere(fleet: Fleet) -> None:
    """A retry at another router that excludes the booked worker gets another one, and both routers charge only that."""
    model = fleet.model()
    ids = fleet.register(model, 2)
    asked = {"model": model, "token_ids": TOKENS, "request_id": f"{model}-r"}
    first = fleet.main.route(**asked)["worker_id"]
    fleet.same_loads(ids, 1)
    (other,) = set(ids) - {first}
    assert fleet.peer.route(**asked, excluded_worker_ids=[first])["worker_id"] == other
    moved = {(first, 0): (0, 0, 0), (other, 0): (64, 4, 1)}
    fleet.wait(lambda: fleet.same_loads(ids, 1) == moved, "the booking to move")
    assert fleet.main.route(**asked)["worker_id"] == other
    decode = fleet.main.route(**asked, phase="decode", worker_id=first)
    assert decode["worker_id"] == first
    assert set(fleet.same_loads(ids, 2).values()) == {(64, 4, 1)}
    fleet.main.call("DELETE", f"/loads/{model}-r").given()  # both phases
    fleet.same_loads(ids, 0)


def test_a_free_right_after_a_move_ends_the_booking_at_whichever_router(fleet: Fleet) -> None:
    """The router that gets the report has mostly not read the move yet."""
    model = fleet.model()
    ids = fleet.register(model, 2)
    for number, (mover, ender) in enumerate([(fleet.main, fleet.peer), (fleet.peer, fleet.main)] * 4):
        asked = {"model": model, "token_ids": TOKENS, "request_id": f"{model}-{number}"}
        first = fleet.main.route(**asked)["worker_id"]
        fleet.same_loads(ids, 1)
        assert mover.route(**asked, excluded_worker_ids=[first])["worker_id"] != first
        assert ender.call("DELETE", f"/loads/{model}-{number}").given()["buffered"] is False
        fleet.same_loads(ids, 0)


def test_a_free_ends_the_bookings_of_two_routers_that_were_asked_at_once(fleet: Fleet) -> None:
    """At the router that gets it, Kafka mostly does not have the booking yet, and so never gets its end."""
    model = fleet.model()
    ids = fleet.register(model, 2)
    for number, (first, second) in enumerate([(fleet.main, fleet.peer), (fleet.peer, fleet.main)] * 4):
        asked = {"model": model, "token_ids": TOKENS, "request_id": f"{model}-{number}"}
        first.route(**asked, worker_id=ids[0])
        second.route(**asked, worker_id=ids[1])
        assert first.call("DELETE", f"/loads/{model}-{number}").given()["buffered"] is False
        fleet.same_loads(ids, 0)
        second.route(**asked)
        fleet.same_loads(ids, 1)
        assert second.call("DELETE", f"/loads/{model}-{number}").given()["buffered"] is False
        fleet.same_loads(ids, 0)


def test_a_repeated_free_does_not_end_the_next_booking_of_the_id(fleet: Fleet) -> None:
    """A free that is repeated after its booking ended changes nothing, and the id's next booking stays."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    request_id = f"{model}-r"
    for _ in range(2):
        fleet.main.route(model=model, token_ids=TOKENS, request_id=request_id)
        fleet.same_loads([worker_id], 1)
        for api in (fleet.main, fleet.main, fleet.peer):
            assert api.call("DELETE", f"/loads/{request_id}").given()["buffered"] is False
            fleet.same_loads([worker_id], 0)
    fleet.peer.route(model=model, token_ids=TOKENS, request_id=request_id)
    # A later booking in the same partition is read after everything that might still be on its way for this id.
    fleet.main.route(model=model, token_ids=TOKENS, request_id=f"{model}-other")
    assert fleet.same_loads([worker_id], 2) == {(worker_id, 0): (128, 4, 2)}
    for name in (request_id, f"{model}-other"):
        fleet.main.call("DELETE", f"/loads/{name}").given()
    fleet.same_loads([worker_id], 0)


@given(st.text(min_size=1, max_size=NAME_CHARS_MAX))
@settings(max_examples=60, deadline=None, print_blob=True)
def test_any_text_is_a_request_id(fleet: Fleet, model: str, request_id: str) -> None:
    """Any text under which a request was routed can be used as an id in a path."""
    if len(quote(request_id, safe="")) > 4000:  # the server's limit on a request line is 8 KiB
        request_id = request_id[:300]
    answer = fleet.main.route(model=model, token_ids=TOKENS, request_id=request_id)
    assert answer["request_id"] == request_id
    path = f"/loads/{quote(request_id, safe='')}"
    answer = fleet.main.call("POST", f"{path}/prefill-complete").given()
    assert answer == {"request_id": request_id, "phase": "prefill", "buffered": False}
    assert fleet.main.call("DELETE", path).given() == {"request_id": request_id, "phase": "free", "buffered": False}


@pytest.mark.parametrize(
    "request_id", [".", "..", "a/b", "a%2Fb", "{x}", "+", "a b", "?", "#", "prefill-complete", "0"]
)
def test_ids_that_look_like_paths_are_ids(request_id: str, fleet: Fleet, model: str) -> None:
    """Request ids that consist of characters with a meaning in URLs, or look like paths, can be used in paths."""
    fleet.main.route(model=model, token_ids=TOKENS, request_id=request_id)
    answer = fleet.main.call("DELETE", f"/loads/{quote(request_id, safe='')}").given()
    assert answer == {"request_id": request_id, "phase": "free", "buffered": False}


def test_an_id_that_is_too_long_is_refused(fleet: Fleet) -> None:
    """A request id in a path that is longer than the limit for ids in bodies is refused with 400."""
    path = f"/loads/{'x' * (NAME_CHARS_MAX + 1)}"
    for call in (("DELETE", path), ("POST", f"{path}/prefill-complete"), ("POST", path, {"worker_id": 1})):
        fleet.main.call(*call).refused(400, "invalid_request")


def test_a_router_that_starts_late_has_the_same_loads(fleet: Fleet) -> None:
    """A router that starts late has exactly the loads of the routers that were running all the time."""
    model = fleet.model()
    ids = fleet.register(model, 2, dp_size=2)
    rng = random.Random(7)
    print("seed 7")
    active = []
    for n in range(40):
        api = rng.choice([fleet.main, fleet.peer])
        request_id = f"{model}-{n}"
        tokens = [rng.randrange(2)] * (BLOCK_SIZE * rng.randrange(1, 5) + rng.randrange(3))
        api.route(model=model, token_ids=tokens, request_id=request_id)
        if rng.random() < 0.5:
            api.call("POST", f"/loads/{request_id}/prefill-complete").given()
        if rng.random() < 0.6:
            api.call("DELETE", f"/loads/{request_id}").given()
        else:
            active.append(request_id)
    loads = fleet.same_loads(ids, len(active))
    with served(fleet.settings) as late:
        assert late.loads(ids) == loads
        assert late.get("/workers") == fleet.main.get("/workers")
        again = late.route(model=model, token_ids=TOKENS, request_id=active[0])
        assert again["cost"] is None
        for request_id in active:
            assert late.call("DELETE", f"/loads/{request_id}").given()["buffered"] is False
        fleet.same_loads(ids, 0)
        assert set(late.loads(ids).values()) == {(0, 0, 0)}


def test_a_long_booking_reaches_the_other_routers(scope: Settings) -> None:
    """A booking whose hashes exceed Kafka's default limit for a record is a load at every router."""
    tiny = replace(scope, model_block_sizes={"tiny": 1})
    n = 140_000  # 8 bytes each, against Kafka's default of 1 MiB
    with served(tiny) as api, served(tiny) as peer:
        api.call("PUT", "/workers/1", {"url": "http://e", "model": "tiny", "block_size": 1}).given()
        answer = api.call("POST", "/route?request_id=long", packed([1]) * n, OCTETS).given()
        assert answer["request_blocks"] == n
        assert api.loads([1]) == {(1, 0): (n, n, 1)}
        wait_for(lambda: peer.loads([1]) == {(1, 0): (n, n, 1)}, PATIENCE_S, "the peer to see the load")
        assert metrics(api)["kvstreams_bookings_dropped_total"] == 0.0
        peer.call("DELETE", "/loads/long").given()
        wait_for(lambda: api.loads([1]) == {(1, 0): (0, 0, 0)}, PATIENCE_S, "the load to end")


@pytest.mark.parametrize("limit", ["the client's", "the topic's"])
def test_a_booking_too_long_for_a_record_is_charged_and_counted(limit: str, scope: Settings) -> None:
    """A booking that Kafka refuses is charged at its own router, is counted as unpublished, and can be freed."""
    ensure_topics(scope, [topics(scope).router_loads])
    more = {} if limit == "the client's" else {"message.max.bytes": 2 * MESSAGE_BYTES_MAX}
    kafka = producer(scope, **more)
    loads = LoadsSync(scope, topics(scope).router_loads, kafka, lambda: 0)
    n = MESSAGE_BYTES_MAX // 8 + 20_000
    loads.book("long", Booking(rank_of(1), "m", n, pack_hashes(range(n)), 0, n))
    loads.book("short", booking())
    loads.flush(PATIENCE_S)
    assert loads.unpublished == 1
    with loads.locked() as active:
        assert active.load(rank_of(1)).requests == 2
    assert loads.report_phase("long", BookingPhase.FREE) is True
    with loads.locked() as active:
        assert active.load(rank_of(1)).requests == 1


def loads_of(scope: Settings, clock: Sequence[int]) -> LoadsSync:
    ensure_topics(scope, [topics(scope).router_loads])
    return LoadsSync(scope, topics(scope).router_loads, producer(scope), lambda: clock[0])


def booking(worker_id: int = 1) -> Booking:
    return Booking(rank_of(worker_id), "m", 16, pack_hashes([1]), 0, 1)


def test_a_call_is_buffered_no_longer_than_a_minute(scope: Settings) -> None:
    """A buffered call whose booking does not arrive in time is dropped and counted, and does not affect a later
    booking."""
    clock = [0]
    loads = loads_of(scope, clock)
    assert loads.report_phase("r", BookingPhase.FREE) is False
    clock[0] = BUFFERED_CALL_TTL_MS - 1
    loads.poll()
    assert loads.unknown_calls == 0
    clock[0] = BUFFERED_CALL_TTL_MS
    loads.poll()
    assert loads.unknown_calls == 1
    loads.book("r", booking())
    with loads.locked() as active:
        assert active.live("r") is not None


def test_the_number_of_buffered_calls_is_limited(scope: Settings) -> None:
    """Beyond the limit the oldest buffered call is dropped and counted."""
    loads = loads_of(scope, [0])
    for n in range(BUFFERED_CALLS_MAX + 2):
        assert loads.report_phase(str(n), BookingPhase.FREE) is False
    assert loads.unknown_calls == 2
    for n in (0, 1, 2):
        loads.book(str(n), booking())
    with loads.locked() as active:
        assert [active.live(str(n)) is not None for n in (0, 1, 2)] == [True, True, False]


def test_a_booking_that_is_not_freed_expires(scope: Settings) -> None:
    """After its TTL a booking is no longer charged, and its id can be booked on another rank."""
    clock = [0]
    loads = loads_of(scope, clock)
    loads.book("r", booking(1))
    clock[0] = int(scope.booking_ttl_s * 1000) - 1
    with loads.locked() as active:
        assert active.load(rank_of(1)).requests == 1
    clock[0] += 1
    with loads.locked() as active:
        assert active.load(rank_of(1)).requests == 0
    assert isinstance(loads.book("r", booking(2)), BookingId)
