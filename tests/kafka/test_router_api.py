"""The answers of routers on a real Kafka (docs/http.md): cost, mode, filters, registry, state.

The fleet's two routers serve all tests. Every test uses a model and workers of its own, so that none affects another.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import struct
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web

from streams.core.events import WorkerRemoved
from streams.core.ids import U64_MASK, Tier
from streams.core.reducer.ordering import Health
from streams.core.routing.selection import RouterMode
from streams.errors import NotReady
from streams.kafka.clients import Record, ensure_topics, producer
from streams.kafka.records import decode_batch
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from streams.router_api.deciding.router import Router
from streams.router_api.http.handlers import FACT, Handlers, error_shape
from streams.router_api.messages.answer_json import render_json
from streams.router_api.messages.requests import COUNT_MAX, parse_worker
from streams.router_api.sharing import registry as registry_module
from streams.settings import WEIGHT_MAX, Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.api import (
    APPLIED_OFFSET,
    BEHIND,
    BLOCK_SIZE,
    LIVE,
    NEVER,
    OCTETS,
    PATIENCE_S,
    SILENT,
    TOKENS,
    Agents,
    Answer,
    Api,
    Fleet,
    metrics,
    packed,
    rank_of,
    served,
)

# --- what goes in ------------------------------------------------------------------------------------------------


def test_u64_values_are_numbers_or_decimal_strings(fleet: Fleet) -> None:
    """The greatest ids and hashes are accepted as numbers and as strings, and returned unchanged as numbers."""
    model = fleet.model()
    greatest, least = U64_MASK - 1, 12345678901234567890
    for worker_id in (greatest, least):
        fleet.put(worker_id, model)
    try:
        for worker_id in (greatest, least):
            for form in (worker_id, str(worker_id)):
                for asked in ({"worker_id": form}, {"allowed_worker_ids": [form]}):
                    answer = fleet.main.ask(model=model, block_hashes=[U64_MASK, str(U64_MASK)], **asked)
                    assert answer["worker_id"] == worker_id
            other = least if worker_id == greatest else greatest
            answer = fleet.main.ask(model=model, token_ids=TOKENS, excluded_worker_ids=[str(worker_id)])
            assert answer["worker_id"] == other
        body = {"worker_id": str(greatest), "token_ids": TOKENS}
        assert fleet.main.call("POST", "/loads/greatest", body).given()["worker_id"] == greatest
        assert fleet.same_loads([greatest], 1) == {(greatest, 0): (64, 4, 1)}
        fleet.main.call("DELETE", "/loads/greatest").given()
    finally:
        for worker_id in (greatest, least):
            fleet.main.call("DELETE", f"/workers/{worker_id}").given()


def test_hashes_and_tokens_are_the_same_request(fleet: Fleet) -> None:
    """Local hashes, as numbers or strings, find the same blocks as the tokens that they were computed from."""
    from streams.core.hashing import local_hashes

    model = fleet.model()
    (worker_id,) = fleet.register(model)
    fleet.agents.hold(rank_of(worker_id), TOKENS[:48])
    fleet.holds(worker_id, 3)
    local = local_hashes(TOKENS, BLOCK_SIZE).tolist()
    by_tokens = fleet.main.ask(model=model, request_id="r", token_ids=TOKENS)
    assert by_tokens["overlap_blocks"] == 3
    assert fleet.main.ask(model=model, request_id="r", block_hashes=local) == by_tokens
    assert fleet.main.ask(model=model, request_id="r", block_hashes=[str(each) for each in local]) == by_tokens


def test_octets_and_json_are_the_same_request(fleet: Fleet) -> None:
    """Packed tokens with query parameters get the same answer as the same request in JSON."""
    model = fleet.model()
    first, second = fleet.register(model, 2, taints=["a", "b"], dp_size=2)
    fleet.agents.hold(rank_of(first, 1), TOKENS)
    fleet.holds(first, 4)
    requests: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"worker_id": second, "dp_rank": 1}, f"worker_id={second}&dp_rank=1"),
        ({"allowed_worker_ids": [first, second]}, f"allowed_worker_ids={first},{second}"),
        ({"excluded_worker_ids": [first], "dp_rank": 0}, f"excluded_worker_ids={first}&dp_rank=0"),
        ({"required_taints": ["a", "b"]}, "required_taints=a,b"),
        ({"phase": "decode", "priority": 3, "session_id": "s"}, "phase=decode&priority=3&session_id=s"),
        ({"expected_output_tokens": 5}, "expected_output_tokens=5"),
        ({"router_config_override": {"overlap_score_weight": 2.5}}, "overlap_score_weight=2.5"),
        (
            {"router_config_override": {"track_active_blocks": False, "tier_weights": [0.5, 0.25, 0.125, 0]}},
            "track_active_blocks=false&tier_weights=0.5,0.25,0.125,0",
        ),
        ({"lora_name": "l ü", "namespace": "n"}, f"lora_name={quote('l ü')}&namespace=n"),
    ]
    for fields, query in requests:
        dp_rank = fields.get("dp_rank", 1)  # one candidate per worker, so that nothing is left to chance
        body = {"model": model, "request_id": "r", "token_ids": TOKENS, **fields, "dp_rank": dp_rank}
        expected = fleet.main.ask(**body)
        rank = "" if "dp_rank" in fields else "&dp_rank=1"
        path = f"/route?model={model}&request_id=r&update_states=false&explain=true{rank}&{query}"
        found = fleet.main.call("POST", path, packed(TOKENS), OCTETS).given()
        assert found["candidates"] == expected["candidates"]
        tied = {"worker_id": 0, "url": ""}  # ties are broken at random
        assert {**found, **tied} == {**expected, **tied}
    potential = fleet.main.call("POST", "/loads/potential", {"model": model, "token_ids": TOKENS}).given()
    found = fleet.main.call("POST", f"/loads/potential?model={model}", packed(TOKENS), f"{OCTETS}; x=y").given()
    assert found == potential


@pytest.mark.parametrize("n_bytes", [0, 1, 2, 3, 5, 63, 65])
def test_octets_are_whole_tokens(n_bytes: int, fleet: Fleet, model: str) -> None:
    """Packed tokens are refused if they are empty or their length is not a multiple of four."""
    answer = fleet.main.call("POST", f"/route?model={model}", b"x" * n_bytes, OCTETS)
    answer.refused(400, "invalid_request")


@pytest.mark.parametrize(
    "query",
    [
        *("unknown=1", "token_ids=1", "block_hashes=1", "dp_rank=x", "dp_rank=-1", "worker_id=x", "worker_id=1.5"),
        *("explain=maybe", "update_states=2", "priority=1.5", "expected_output_tokens=-1", "allowed_worker_ids=1,x"),
        *("overlap_score_weight=nan", "overlap_score_weight=inf", "overlap_score_weight=-1", "router_temperature=x"),
        *(
            "router_temperature=inf",
            "router_config_override=1",
            "tier_weights=1,2",
            "request_id=",
            f"request_id={'x' * 513}",
            "phase=x",
        ),
    ],
)
def test_a_wrong_query_is_400(query: str, fleet: Fleet, model: str) -> None:
    """Query parameters are validated like the fields of a body: an unknown or invalid one is 400."""
    answer = fleet.main.call("POST", f"/route?model={model}&{query}", packed(TOKENS), OCTETS)
    answer.refused(400, "invalid_request")


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 31, 32])
def test_a_partial_block_counts_as_one(n_tokens: int, fleet: Fleet, model: str) -> None:
    """A partial last block counts as a block of the request, although no rank can hold it."""
    answer = fleet.main.ask(model=model, token_ids=[7] * n_tokens)
    assert answer["request_blocks"] == math.ceil(n_tokens / BLOCK_SIZE)
    # Other requests of this model may have been booked on the rank a moment ago.
    recent = {(each["worker_id"], each["dp_rank"]): each["recent_prefill_blocks"] for each in answer["candidates"]}
    chosen = recent[answer["worker_id"], answer["dp_rank"]]
    assert answer["cost"] - chosen == pytest.approx(answer["request_blocks"] + n_tokens // BLOCK_SIZE)


# --- cost, choice and mode ---------------------------------------------------------------------------------------


def test_the_terms_add_up_to_the_cost(fleet: Fleet) -> None:
    """With `explain`, the answer lists every eligible rank; terms follow the formula, and the cheapest is chosen."""
    model = fleet.model()
    ids = fleet.register(model, 3, dp_size=2)
    fleet.agents.hold(rank_of(ids[0]), TOKENS)
    fleet.agents.hold(rank_of(ids[1], 1), TOKENS[:32])
    fleet.agents.hold(rank_of(ids[1], 1), TOKENS[:48], tier=Tier.HOST)
    fleet.agents.hold(rank_of(ids[2]), TOKENS, absent=[1])
    for worker_id in ids:
        for dp_rank in (0, 1):
            fleet.agents.progress(rank_of(worker_id, dp_rank))
    for worker_id, n_blocks in zip(ids, (4, 5, 3), strict=True):
        fleet.holds(worker_id, n_blocks)
    fleet.wait(lambda: fleet.main.ask(model=model, token_ids=TOKENS)["mode"] == "exact", "every rank to be known")
    for n, worker_id in enumerate((ids[0], ids[0], ids[1], ids[2])):
        body = {"worker_id": worker_id, "token_ids": [n] * (BLOCK_SIZE * 3 + 1)}
        fleet.main.call("POST", f"/loads/{model}-{n}", body).given()
    rng = random.Random(1)
    print("seed 1")
    for weight in (0.0, 1.0, 2.5, rng.uniform(0, 10)):
        override = {"overlap_score_weight": weight}
        answer = fleet.main.ask(model=model, token_ids=[*TOKENS, 1], router_config_override=override)
        candidates = {(each["worker_id"], each["dp_rank"]): each for each in answer["candidates"]}
        assert list(candidates) == [(worker_id, rank) for worker_id in ids for rank in (0, 1)]
        for terms in candidates.values():
            assert terms["own_prefill_blocks"] == answer["request_blocks"] - terms["effective_cached_blocks"]
            prefill = sum(terms[f"{part}_prefill_blocks"] for part in ("own", "active", "recent"))
            assert terms["cost"] == pytest.approx(weight * prefill + terms["decode_blocks"])
        chosen = candidates[answer["worker_id"], answer["dp_rank"]]
        assert answer["cost"] == chosen["cost"] == min(each["cost"] for each in candidates.values())
        assert answer["overlap_blocks"] == chosen["scores"]
        cached = [each["effective_cached_blocks"] for each in candidates.values()]
        overlaps = [each["scores"] for each in candidates.values()]
        queued = [each["active_prefill_blocks"] for each in candidates.values()]
        decode = [each["decode_blocks"] for each in candidates.values()]
        # Weight 0 balances load only and reads no index.
        assert overlaps == ([0] * 6 if weight == 0.0 else [4, 0, 0, 3, 1, 0])
        assert cached == ([0.0] * 6 if weight == 0.0 else [4.0, 0.0, 0.0, 2.75, 1.0, 0.0])
        assert queued == [2 * 49 / 16, 0.0, 49 / 16, 0.0, 49 / 16, 0.0]
        assert decode == [10, 4, 7, 4, 7, 4]
        assert answer["mode"] == ("fallback" if weight == 0.0 else "exact")


def test_the_rank_that_holds_most_is_chosen_until_it_is_busy(fleet: Fleet) -> None:
    """A request goes to the rank with the longest prefix until that rank's load outweighs the prefix."""
    model = fleet.model()
    holder, other = fleet.register(model, 2)
    fleet.agents.hold(rank_of(holder), TOKENS)
    fleet.holds(holder, 4)
    assert fleet.main.ask(model=model, token_ids=TOKENS)["worker_id"] == holder
    body = {"worker_id": holder, "token_ids": [9] * BLOCK_SIZE * 20}
    fleet.main.call("POST", f"/loads/{model}", body).given()
    assert fleet.main.ask(model=model, token_ids=TOKENS)["worker_id"] == other


def test_an_answer_names_where_else_the_prompt_is(fleet: Fleet) -> None:
    """Both forms of the request get the ranks with more of the prompt, by blocks and then by tier."""
    model = fleet.model()
    ids = fleet.register(model, 4)
    fleet.agents.hold(rank_of(ids[0]), TOKENS[:16])
    fleet.agents.hold(rank_of(ids[1]), TOKENS[:32], tier=Tier.HOST)
    fleet.agents.hold(rank_of(ids[2]), TOKENS[:32])
    fleet.agents.hold(rank_of(ids[3]), TOKENS)
    for worker_id, n_blocks in zip(ids, (1, 2, 2, 4), strict=True):
        fleet.holds(worker_id, n_blocks)
    wanted = [
        {"worker_id": ids[3], "dp_rank": 0, "blocks": 4, "tier": "device"},
        {"worker_id": ids[2], "dp_rank": 0, "blocks": 2, "tier": "device"},
        {"worker_id": ids[1], "dp_rank": 0, "blocks": 2, "tier": "host"},
    ]
    answer = fleet.main.ask(model=model, token_ids=TOKENS, worker_id=ids[0], kv_sources=True)
    assert (answer["overlap_blocks"], answer["kv_sources"]) == (1, wanted)
    query = f"/route?model={model}&worker_id={ids[0]}&update_states=false&kv_sources=true"
    assert fleet.main.call("POST", query, packed(TOKENS), OCTETS).given()["kv_sources"] == wanted
    assert "kv_sources" not in fleet.main.ask(model=model, token_ids=TOKENS, worker_id=ids[0])


def test_matches_never_cross_lora_or_namespace(fleet: Fleet) -> None:
    """The same tokens with an adapter, in a namespace or with a cache salt are different blocks."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    fleet.agents.hold(rank_of(worker_id), TOKENS)
    fleet.holds(worker_id, 4)
    overlaps = [
        fleet.main.ask(model=model, token_ids=TOKENS, **fields)["overlap_blocks"]
        for fields in (
            {},
            {"lora_name": ""},
            {"lora_name": "a"},
            {"namespace": "a"},
            {"namespace": None},
            {"cache_salt": "a"},
            {"cache_salt": ""},
        )
    ]
    assert overlaps == [4, 4, 0, 0, 4, 0, 4]


def test_requests_for_an_adapter_go_to_workers_that_list_it(fleet: Fleet) -> None:
    """A worker that lists no adapters gets requests for any; what is listed can be changed, and excludes the others."""
    model = fleet.model()
    listing, other = fleet.register(model, 2)
    asked = {"model": model, "token_ids": TOKENS}

    def chosen(**more: Any) -> set[int]:
        override = {"router_mode": "round-robin"}
        return {fleet.main.ask(**asked, router_config_override=override, **more)["worker_id"] for _ in range(4)}

    assert chosen(lora_name="sql") == {listing, other}
    registered = fleet.main.call("GET", "/workers").given()["workers"]
    by_id = {worker["worker_id"]: worker for worker in registered}
    for worker_id, names in ((listing, ["sql", "chat"]), (other, ["chat"])):
        body = {name: by_id[worker_id][name] for name in ("url", "model", "block_size")}
        put = fleet.main.call("PUT", f"/workers/{worker_id}", {**body, "lora_names": names}).given()
        assert put["lora_names"] == names
    assert chosen(lora_name="sql") == {listing}
    assert chosen(lora_name="chat") == chosen() == chosen(lora_name="") == {listing, other}
    refused = fleet.main.call("POST", "/route", {**asked, "lora_name": "poetry", "update_states": False})
    assert (refused.status, refused.json["error"]["code"]) == (503, "no_eligible_worker")
    assert refused.json["error"]["detail"]["refused_ranks"]["lora_missing"] == 2


def test_temperature_spreads_choices(fleet: Fleet) -> None:
    """Without temperature the cheapest rank is always chosen; with a high one, every rank is."""
    model = fleet.model()
    first, second = fleet.register(model, 2)
    fleet.agents.hold(rank_of(first), TOKENS)
    fleet.holds(first, 4)

    def chosen(temperature: float) -> set[int]:
        override = {"router_temperature": temperature}
        asked = {"model": model, "token_ids": TOKENS, "router_config_override": override}
        return {fleet.main.ask(**asked)["worker_id"] for _ in range(60)}

    assert chosen(0.0) == {first}
    assert chosen(WEIGHT_MAX) == {first, second}  # missing one of two in 60 fair draws: 2 in 10^18


@pytest.mark.first_ring("fallback")
@pytest.mark.parametrize(
    ("mode", "order"), [(RouterMode.ROUND_ROBIN, "each in turn"), (RouterMode.RANDOM, "each at some time")]
)
def test_modes_that_read_no_index(mode: RouterMode, order: str, fleet: Fleet) -> None:
    """Round-robin takes turns and random draws, whatever ranks hold. Both answer `fallback`, also for a repeated id."""
    model = fleet.model()
    ids = fleet.register(model, 3)
    fleet.agents.hold(rank_of(ids[0]), TOKENS)
    fleet.holds(ids[0], 4)
    with served(replace(fleet.settings, router_mode=mode)) as api:
        answers = [api.ask(model=model, token_ids=TOKENS) for _ in range(60)]
        chosen = [answer["worker_id"] for answer in answers]
        assert {answer["mode"] for answer in answers} == {"fallback"}
        assert {answer["overlap_blocks"] for answer in answers} == {0}
        if order == "each in turn":
            assert chosen == ids * 20
        else:
            assert set(chosen) == set(ids)
        first = api.route(model=model, token_ids=TOKENS, request_id=f"{model}-twice")
        again = api.route(model=model, token_ids=TOKENS, request_id=f"{model}-twice")
        assert (first["mode"], again["mode"]) == ("fallback", "fallback")
        assert first["worker_id"] == again["worker_id"]


@pytest.mark.first_ring(
    "exact", "approximate", "no_events_yet", "events_lost", "removed", "owner_silent", "owner_behind"
)
def test_mode_shows_how_far_the_index_can_be_trusted(fleet: Fleet) -> None:
    """`exact` requires a running owner without lag and ranks without gaps; the worst eligible rank decides the mode."""
    model = fleet.model()
    live, gap, hybrid = fleet.register(model, 3, LIVE)
    (never,) = fleet.register(model, 1, NEVER)
    (silent,) = fleet.register(model, 1, SILENT)
    (behind,) = fleet.register(model, 1, BEHIND)

    def mode(*worker_ids: int) -> str:
        asked = {"model": model, "token_ids": TOKENS, "allowed_worker_ids": worker_ids}
        found = fleet.main.ask(**asked)
        potential = fleet.main.call("POST", "/loads/potential", asked).given()
        assert {row["worker_id"] for row in potential["loads"]} == set(worker_ids)
        assert ("degraded_because" in found) == (found["mode"] == "degraded")
        return f"{found['mode']}: {found['degraded_because']}" if "degraded_because" in found else str(found["mode"])

    def becomes(expected: str, *worker_ids: int) -> None:
        fleet.wait(lambda: mode(*worker_ids) == expected, f"mode {expected}")

    assert mode(live) == "degraded: no_events_yet"  # a rank without any event may hold blocks
    for worker_id in (live, gap, silent, behind):
        fleet.agents.progress(rank_of(worker_id))
    becomes("exact", live)
    fleet.agents.progress(rank_of(hybrid), Health.APPROXIMATE)
    becomes("approximate", hybrid)
    fleet.agents.progress(rank_of(gap), Health.DEGRADED)
    becomes("degraded: events_lost", gap)
    becomes("exact", live)
    becomes("approximate", live, hybrid)
    becomes("degraded: events_lost", live, hybrid, gap)
    fleet.agents.progress(rank_of(gap), Health.EXACT, generation=1)
    becomes("exact", gap)
    fleet.agents.progress(rank_of(gap), Health.REMOVED, generation=2)
    becomes("degraded: removed", gap)
    fleet.agents.progress(rank_of(never))
    becomes("degraded: no_events_yet", never)  # no owner was ever heard from, so the transaction never ends
    fleet.agents.state_partition(SILENT)
    becomes("exact", silent)
    becomes("degraded: owner_silent", silent)  # this owner is no longer heard from
    becomes("exact", live)
    becomes("degraded: owner_silent", live, silent)
    fleet.agents.state_partition(BEHIND, behind_ms=fleet.settings.behind_after_ms + 1)
    fleet.wait(
        lambda: fleet.main.get("/state")["applied_offsets"].get(str(BEHIND)) == APPLIED_OFFSET, "the owner's record"
    )
    assert mode(behind) == "degraded: owner_behind"
    fleet.agents.state_partition(BEHIND, behind_ms=fleet.settings.behind_after_ms)
    becomes("exact", behind)
    assert mode(live, silent, never, gap, hybrid, behind) == "degraded: removed"


# --- eligibility -------------------------------------------------------------------------------------------------


def test_filters_come_before_cost(fleet: Fleet) -> None:
    """Each filter (allowed, excluded and named workers, rank, phase, taints) leaves only the ranks that pass it."""
    model = fleet.model()
    both, prefill, decode, tainted = fleet.agents.worker_ids(4, LIVE)
    fleet.put(both, model, dp_size=2)
    fleet.put(prefill, model, role="prefill")
    fleet.put(decode, model, role="decode", taints=["gpu-b"])
    fleet.put(tainted, model, taints=["gpu-a", "gpu-b"])
    fleet.agents.hold(rank_of(both), TOKENS)  # the cheapest one whenever it is eligible
    fleet.holds(both, 4)

    def ranks(**fields: Any) -> list[tuple[int, int]]:
        answer = fleet.main.ask(model=model, token_ids=TOKENS, **fields)
        found = [(each["worker_id"], each["dp_rank"]) for each in answer["candidates"]]
        assert (answer["worker_id"], answer["dp_rank"]) in found
        potential = fleet.main.call("POST", "/loads/potential", {"model": model, "token_ids": TOKENS, **fields}).given()
        assert [(each["worker_id"], each["dp_rank"]) for each in potential["loads"]] == found
        return found

    all_ranks = [(both, 0), (both, 1), (prefill, 0), (decode, 0), (tainted, 0)]
    assert ranks() == all_ranks
    assert ranks(allowed_worker_ids=[decode, prefill]) == [(prefill, 0), (decode, 0)]
    assert ranks(excluded_worker_ids=[both]) == all_ranks[2:]
    assert ranks(excluded_worker_ids=[]) == all_ranks
    assert ranks(allowed_worker_ids=[both, prefill], excluded_worker_ids=[both]) == [(prefill, 0)]
    assert ranks(worker_id=both) == [(both, 0), (both, 1)]
    assert ranks(worker_id=both, dp_rank=1) == [(both, 1)]
    assert ranks(dp_rank=1) == [(both, 1)]
    assert ranks(phase="prefill") == [(both, 0), (both, 1), (prefill, 0), (tainted, 0)]
    assert ranks(phase="decode") == [(both, 0), (both, 1), (decode, 0), (tainted, 0)]
    assert ranks(required_taints=["gpu-b"]) == [(decode, 0), (tainted, 0)]
    assert ranks(required_taints=["gpu-b", "gpu-a"]) == [(tainted, 0)]
    assert ranks(required_taints=[]) == all_ranks
    impossible: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"allowed_worker_ids": []}, {"not_allowed": 5}),
        ({"allowed_worker_ids": [5]}, {"not_allowed": 5}),
        ({"worker_id": 5}, {"other_worker": 5}),
        ({"worker_id": prefill, "phase": "decode"}, {"other_worker": 4, "other_role": 1}),
        ({"dp_rank": 2}, {"other_dp_rank": 5}),
        ({"required_taints": ["gpu-c"]}, {"taints_missing": 5}),
        ({"excluded_worker_ids": [both, prefill, decode, tainted]}, {"excluded": 5}),
        ({"worker_id": both, "excluded_worker_ids": [both]}, {"other_worker": 3, "excluded": 2}),
    ]
    for fields, refused in impossible:
        for path in ("/route", "/loads/potential"):
            asked = {"model": model, "token_ids": TOKENS, **fields}
            answer = fleet.main.call("POST", path, asked)
            reasons = ", ".join(f"{reason} {n}" for reason, n in refused.items())
            assert f"({reasons})" in answer.refused(503, "no_eligible_worker")
            detail = answer.json["error"]["detail"]
            detail["refused_ranks"].pop("other_model", None)  # other tests' workers
            assert detail == {"workers": 4, "refused_ranks": refused}


def test_workers_are_registered_changed_and_listed(fleet: Fleet) -> None:
    """A registered worker is listed by every router, and is changed when it is registered again."""
    model = fleet.model()
    body = {
        "url": "http://e:1",
        "model": model,
        "block_size": BLOCK_SIZE,
        "dp_size": 3,
        "role": "decode",
        "kv_total_blocks": COUNT_MAX,
        "max_requests": COUNT_MAX,
        "device_class": "cpu",
        "taints": ["a", "ü"],
        "lora_names": ["sql", "ü"],
        "events_endpoint": "tcp://e:2",
        "replay_endpoint": "tcp://e:3",
    }
    (worker_id,) = fleet.agents.worker_ids(1, LIVE)
    answer = fleet.main.call("PUT", f"/workers/{worker_id}", body).given()
    assert answer == {
        "worker_id": worker_id,
        "state": "active",
        "registered_at_ms": answer["registered_at_ms"],
        "lease": None,
        "model_block_size": BLOCK_SIZE,
        "wrong_block_size_dp_ranks": [],
        "silent_dp_ranks": [],
        "avoided": False,
        "avoided_ms": 0,
        "incarnation": None,
        "render": render_json(None),
        "metrics": [],
        "aliases": [],
        "dp_start": 0,
        "max_model_len": None,
        **body,
    }
    assert fleet.main.workers()[worker_id] == answer  # at once, on the router that was called
    fleet.wait(lambda: fleet.peer.workers().get(worker_id) == answer, "the peer to know the worker")
    assert fleet.main.loads([worker_id]) == {(worker_id, rank): (0, 0, 0) for rank in range(3)}
    changed = fleet.put(worker_id, model, url="http://e:9")
    assert changed == {**answer, "url": "http://e:9", "registered_at_ms": changed["registered_at_ms"]}
    cleared = fleet.put(worker_id, model, url="http://e:9", taints=[], kv_total_blocks=None, dp_size=1)
    assert (cleared["taints"], cleared["kv_total_blocks"], cleared["dp_size"]) == ([], None, 1)
    changed = cleared
    fleet.wait(lambda: fleet.peer.workers().get(worker_id) == changed, "the peer to know the change")
    listed = [worker["worker_id"] for worker in fleet.main.get("/workers")["workers"]]
    assert listed == sorted(listed)


def test_each_call_answers_known_and_unknown_workers(fleet: Fleet) -> None:
    """Calls for known and unknown workers get the answers that the table in docs/http.md lists, from every router."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    path = f"/workers/{worker_id}"
    body = {"url": "http://e", "model": model, "block_size": BLOCK_SIZE}
    for api in (fleet.main, fleet.peer):
        for _ in range(2):
            assert api.call("PUT", f"{path}/cordon").given()["state"] == "cordoned"
        answer = api.call("PUT", path, body).given()
        shown = (answer["state"], answer["url"], answer["metrics"], answer["lease"])
        assert shown == ("cordoned", "http://e", [], None)
        for _ in range(2):
            assert api.call("DELETE", f"{path}/cordon").given() == {"worker_id": worker_id, "cordoned": False}
        answer = {**answer, "state": "active"}
        fleet.wait(lambda: fleet.main.workers()[worker_id] == fleet.peer.workers()[worker_id], "both to know it")
        assert api.workers()[worker_id] == answer
    fleet.main.call("PUT", f"{path}/cordon").given()
    fleet.wait(lambda: fleet.peer.workers()[worker_id]["state"] == "cordoned", "the peer to know the cordon")
    assert fleet.peer.call("DELETE", path).given() == {"worker_id": worker_id, "removed": True}
    fleet.wait(lambda: worker_id not in fleet.main.workers(), "it to be gone")
    for api in (fleet.main, fleet.peer):
        for method, where in (("DELETE", path), ("PUT", f"{path}/cordon")):
            api.call(method, where).refused(404, "unknown_id")
    assert fleet.peer.call("PUT", path, body).given()["state"] == "cordoned"  # the cordon outlived the worker
    fleet.peer.call("DELETE", path).given()
    assert fleet.peer.call("DELETE", f"{path}/cordon").given() == {"worker_id": worker_id, "cordoned": False}
    fleet.peer.call("DELETE", f"{path}/cordon").refused(404, "unknown_id")
    assert fleet.peer.call("PUT", path, body).given()["state"] == "active"
    fleet.peer.call("DELETE", path).given()
    fleet.wait(lambda: worker_id not in fleet.main.workers(), "it to be gone")


def test_a_cordoned_worker_gets_nothing_new(fleet: Fleet) -> None:
    """A cordoned worker keeps its running requests, and gets no new ones until the cordon is deleted."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    fleet.main.route(model=model, token_ids=TOKENS, request_id=f"{model}-running")
    cordoned = fleet.main.call("PUT", f"/workers/{worker_id}/cordon").given()
    assert cordoned["state"] == "cordoned"
    asked = {"model": model, "token_ids": TOKENS}
    fleet.main.call("POST", "/route", asked).refused(503, "no_eligible_worker")
    fleet.wait(lambda: fleet.peer.workers()[worker_id]["state"] == "cordoned", "the peer to know")
    fleet.peer.call("POST", "/route", asked).refused(503, "no_eligible_worker")
    assert fleet.same_loads([worker_id], 1) == {(worker_id, 0): (64, 4, 1)}
    again = fleet.main.route(model=model, token_ids=TOKENS, request_id=f"{model}-running")
    assert again["worker_id"] == worker_id
    assert fleet.main.call("PUT", f"/workers/{worker_id}/cordon").given() == cordoned
    assert fleet.put(worker_id, model)["state"] == "cordoned"
    fleet.main.call("POST", "/route", asked).refused(503, "no_eligible_worker")
    fleet.main.call("DELETE", f"/workers/{worker_id}/cordon").given()
    assert fleet.main.ask(**asked)["worker_id"] == worker_id
    fleet.wait(lambda: fleet.peer.workers()[worker_id]["state"] == "active", "the peer to know")
    assert fleet.peer.ask(**asked)["worker_id"] == worker_id


def test_a_deleted_worker_is_removed_from_every_router(fleet: Fleet) -> None:
    """DELETE removes a worker from every router, and writes the removal to kv-events, in order with its events."""
    fleet.register(fleet.model())  # if no worker at all were registered, the answer would be another one
    model = fleet.model()
    active, unused = fleet.register(model, 2, dp_size=2)
    fleet.agents.progress(rank_of(active, 0), incarnation=4)
    fleet.agents.progress(rank_of(active, 1), incarnation=U64_MASK)
    fleet.agents.hold(rank_of(active), TOKENS, incarnation=4)
    fleet.holds(active, 4)
    for worker_id in (active, unused):
        answer = fleet.main.call("DELETE", f"/workers/{worker_id}").given()
        assert answer == {"worker_id": worker_id, "removed": True}
        fleet.main.call("DELETE", f"/workers/{worker_id}").refused(404, "unknown_id")
    fleet.main.call("POST", "/route", {"model": model, "token_ids": TOKENS}).refused(404, "unknown_model")
    fleet.wait(lambda: not {active, unused} & fleet.peer.workers().keys(), "the peer to know")
    records: list[Record] = []
    read_to_end(fleet.settings, topics(fleet.settings).kv_events.name, LIVE, None, records.extend)
    removed = {record.key: decode_batch(record.value) for record in records}
    assert str(unused).encode() not in removed  # it never had events, so there is nothing to remove
    batch = removed[str(active).encode()]
    assert (batch.rank.worker_id, batch.incarnation, batch.model) == (active, U64_MASK, model)
    assert isinstance(batch.body, WorkerRemoved)


# --- the router itself -------------------------------------------------------------------------------------------


def test_metrics_count_workers_blocks_and_answers(fleet: Fleet) -> None:
    """/metrics is a valid Prometheus page that counts workers, blocks, answers by mode, and the time of answers."""
    model = fleet.model()
    (worker_id,) = fleet.register(model)
    before = metrics(fleet.main)
    fleet.agents.hold(rank_of(worker_id), TOKENS)
    fleet.holds(worker_id, 4)
    for _ in range(3):
        override = {"overlap_score_weight": 0.0}
        fleet.main.ask(model=model, token_ids=TOKENS, router_config_override=override)
    after = metrics(fleet.main)
    assert after["kvstreams_workers"] == len(fleet.main.workers())
    assert after["kvstreams_index_blocks"] == before["kvstreams_index_blocks"] + 4
    assert after["kvstreams_answers_total/fallback"] == before.get("kvstreams_answers_total/fallback", 0) + 3
    assert after["kvstreams_route_seconds_count"] == before["kvstreams_route_seconds_count"] + 3
    assert after["kvstreams_bad_records_total"] == before["kvstreams_bad_records_total"]


def test_state_is_the_same_on_every_router(fleet: Fleet) -> None:
    """/state returns each rank's epoch, health and digest; /state/blocks returns every single fact."""
    model = fleet.model()
    (worker_id,) = fleet.register(model, dp_size=2)
    sequence = fleet.agents.hold(rank_of(worker_id, 1), TOKENS, tier=Tier.DISK, absent=[2])
    fleet.agents.progress(rank_of(worker_id, 1), incarnation=1)
    fleet.holds(worker_id, 3)

    def state(api: Api) -> list[dict[str, Any]]:
        return [rank for rank in api.get("/state")["ranks"] if rank["worker_id"] == worker_id]

    fleet.wait(lambda: state(fleet.main) == state(fleet.peer) != [], "the same state")
    fleet.wait(lambda: state(fleet.main)[0]["health"] == "exact", "the rank's progress")
    (rank,) = state(fleet.main)
    assert len(rank.pop("digest")) == 16
    assert rank == {
        "worker_id": worker_id,
        "dp_rank": 1,
        "incarnation": 1,
        "generation": 0,
        "sequence": 0,
        "health": "exact",
        "blocks": 3,
        "gaps": 0,
        "unknown_parents": 0,
        "lease_ms": 0,
        "silent": False,
    }
    for api in (fleet.main, fleet.peer):
        answer = api.call("GET", "/state/blocks")
        assert answer.headers["content-type"] == OCTETS
        facts = list(FACT.iter_unpack(answer.body))
        assert facts == sorted(facts)
        ours = [fact for fact in facts if fact[0] == worker_id]
        assert ours == sorted((worker_id, 1, int(Tier.DISK), int(sequence[n])) for n in (0, 1, 3))
    assert fleet.main.get("/state")["applied_offsets"][str(LIVE)] == APPLIED_OFFSET


def test_a_router_that_runs_is_alive_and_ready(fleet: Fleet) -> None:
    """/healthz and /ready answer GET and HEAD for a router that has read its topics."""
    assert fleet.main.get("/healthz") == {"status": "ok"}
    assert fleet.main.get("/ready") == {
        "ready": True,
        "partitions_left": {},
        "workers_left": 0,
        "topics_missing": [],
    }
    for path in ("/healthz", "/ready", "/metrics"):
        answer = fleet.main.call("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")


def test_a_router_that_has_not_read_its_topics_is_not_ready(scope: Settings) -> None:
    """Until its topics are read to their ends, a router is healthy but not ready, and refuses every request."""

    async def ask() -> None:
        app = web.Application(middlewares=[error_shape])
        app.add_routes(Handlers(Router(scope)).routes())
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                async with http.get("/ready") as response:
                    left = dict.fromkeys(
                        ("index", "pooled", "workers", "metrics", "dead letters", "loads"), scope.partitions
                    )
                    expected = {"ready": False, "partitions_left": left, "workers_left": 0, "topics_missing": []}
                    expected["reason"] = "topics are still being read"
                    assert (response.status, await response.json()) == (503, expected)
                async with http.get("/healthz") as response:
                    assert response.status == 200
                for method, path, body in (
                    ("POST", "/route", {"token_ids": TOKENS}),
                    ("POST", "/loads/potential", {"token_ids": TOKENS}),
                    ("GET", "/loads", None),
                    ("GET", "/workers", None),
                    ("POST", "/loads/r", {"worker_id": 1, "token_ids": TOKENS}),
                    ("POST", "/loads/r/prefill-complete", None),
                    ("DELETE", "/loads/r", None),
                ):
                    async with http.request(method, path, json=body) as response:
                        answer = Answer(
                            response.status,
                            {name.lower(): value for name, value in response.headers.items()},
                            await response.read(),
                        )
                        answer.refused(503, "not_ready")
                        assert answer.json["error"]["detail"] == {"partitions_left": left}
        finally:
            await runner.cleanup()

    asyncio.run(ask())


def test_a_registration_fails_if_kafka_does_not_take_it(scope: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Kafka a registration is answered with 503, and the registry stays as it was."""
    monkeypatch.setattr(registry_module, "PUBLISH_TIMEOUT_S", 0.5)
    router = Router(replace(scope, kafka=f"127.0.0.1:{free_port()}"))
    body = json.dumps({"url": "http://e", "model": "m", "block_size": BLOCK_SIZE}).encode()
    with pytest.raises(NotReady, match="Kafka did not take the change"):
        router.registry.put_worker(parse_worker(rank_of(1).worker_id, body, 0))
    assert router.registry.workers() == []
    del router
    gc.collect()  # ends its client, which would otherwise try to connect, and log that, until the last test


def test_records_that_cannot_be_used_are_counted_and_skipped(scope: Settings) -> None:
    """Records of a foreign writer in a router's topics are counted and skipped, and the records after them are read."""
    named = topics(scope)
    ensure_topics(scope, named.all())
    unusable: list[tuple[str, bytes | None, bytes | None]] = [
        (spec.name, key, value)
        for spec in (named.index_changelog, named.cxl_changelog, named.workers, named.router_loads)
        for key, value in (
            (b"", b""),
            (b"1", b"plain text"),
            (b"-1", b"\x00\x00\x00\x00\x01"),
            (b"R" + bytes(20), b"\xc3\x01" + bytes(30)),
            (b"P" + bytes(12), b"\xc3\x01"),
            (b"B" + bytes(20) + b"pool", b"\xc3\x01"),
            (b"pool/", b"\xc3\x01"),
            (b"cordon/x", b"\xc3\x01"),
            (b"avoid/x", b"\xc3\x01"),
            (b"render/x", b"\xc3\x01"),
            (b"model/m", b"\xc3\x01"),
            (b"Z", struct.pack(">I", 1)),
        )
    ]
    kafka = producer(scope)
    for topic, key, value in unusable:
        kafka.produce(topic, key=key, value=value, partition=0)
    assert kafka.flush(PATIENCE_S) == 0
    with served(scope) as api:
        assert metrics(api)["kvstreams_bad_records_total"] == len(unusable)
        api.call("PUT", "/workers/1", {"url": "http://e", "model": "m", "block_size": BLOCK_SIZE}).given()
        agents = Agents(scope, fresh=[])
        agents.hold(rank_of(1), TOKENS)
        wait_for(lambda: api.get("/state")["blocks"] == 4, PATIENCE_S, "the blocks after the unusable records")
        assert api.route(token_ids=TOKENS, request_id="r")["overlap_blocks"] == 4
