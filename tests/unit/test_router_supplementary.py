"""The effect of pooled blocks and labels on a router's choice, its booking and its mode, without Kafka."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from streams.core.block_facts import fact_sets as block_sets
from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import FeedState, MoeLabels
from streams.core.ids import EngineHash, WorkerId
from streams.core.reducer.ordering import Health
from streams.core.routing.trust import AnswerMode
from streams.cxl import pooled_view
from streams.cxl.records import BlockKey, BlockRow, block_key, encode_block
from streams.errors import BadRecord, InvalidRequest, NoEligibleWorker
from streams.kafka.clients import partition_of
from streams.lab.engines.held_chains import runs_of_chain
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import RouteRequest, parse_route_query
from streams.settings import Settings
from streams.tables.records import (
    PARTITION_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    PartitionRecord,
    SourceProgress,
    encode_partition,
    encode_progress,
    encode_run,
)
from tests.helpers.api import TOKENS, packed
from tests.helpers.routers import CHAIN, DEAD, LABELS, LOCAL, PLACED, QUERY, hosts, label, put, router_of
from tests.helpers.runs import run_of
from tests.helpers.views import BLOCK_SIZE, caught_up, hold, rank, register


def alive(router: Router, worker_id: int, behind_ms: int = 0) -> None:
    """The worker's partition gets a record of its owner, which lags by behind_ms."""
    partition = partition_of(WorkerId(worker_id), Settings().partitions)
    source = SourceProgress("t", "id", 0, 0, 1, behind_ms)
    record = PartitionRecord(partition, 0, "test", (source,))
    router.view.fold_index(PARTITION_KEY.pack(partition), encode_partition(record))
    caught_up(router.view, partition)


def ask(router: Router, override: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"token_ids": TOKENS, "update_states": False, "explain": True, **fields}
    if override is not None:
        asked["router_config_override"] = override
    return answer_json(router.route(msgspec.convert(asked, RouteRequest)))


def terms(answer: dict[str, Any]) -> dict[int, tuple[int, int, int, float, float]]:
    return {
        each["worker_id"]: (
            each["scores"],
            each["cxl_accessible_scores"],
            each["moe_scores"],
            each["effective_cached_blocks"],
            each["cost"],
        )
        for each in answer["candidates"]
    }


def test_a_dead_owners_pooled_prefix_draws_a_request_to_who_reaches_it() -> None:
    """A worker that reaches a removed owner's pooled prefix wins, with every term in the answer."""
    router = router_of(3)
    put(router, 0, 1, 2)
    hosts(router, 2, DEAD)
    hold(router.view, rank(3), LOCAL[:1])
    answer = ask(router)
    assert (answer["worker_id"], answer["overlap_blocks"]) == (2, 0)
    assert terms(answer) == {1: (0, 0, 0, 0.0, 8.0), 2: (0, 3, 0, 2.25, 5.75), 3: (1, 0, 0, 1.0, 7.0)}
    assert ask(router, excluded_worker_ids=[2])["worker_id"] == 3


def test_what_was_looked_up_before_a_rank_was_trusted_is_looked_up_again() -> None:
    """A request may wait between its look-up and its decision, and its overlap is old by then."""
    router = router_of(1)
    prepared = router.prepare(msgspec.convert({"token_ids": TOKENS, "update_states": False}, RouteRequest))
    hold(router.view, rank(1), LOCAL)
    answer = answer_json(router.try_book(prepared))
    assert (answer["overlap_blocks"], answer["mode"], answer["chosen_mode"]) == (len(LOCAL), "exact", "exact")


def test_what_was_looked_up_too_long_ago_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that answers was kept busy while another one folded evictions, and nothing was in doubt."""
    router = router_of(1)
    hold(router.view, rank(1), LOCAL)
    now_ms = router.view._now_ms()
    monkeypatch.setattr(router.view, "_now_ms", lambda: now_ms)
    prepared = router.prepare(msgspec.convert({"token_ids": TOKENS, "update_states": False}, RouteRequest))
    for run in runs_of_chain(rank(1), LOCAL):
        router.view.fold_index(RUN_KEY.pack(run.key), None)
    assert answer_json(router.try_book(prepared))["overlap_blocks"] == len(LOCAL)
    monkeypatch.setattr(router.view, "_now_ms", lambda: now_ms + 101)
    assert answer_json(router.try_book(prepared))["overlap_blocks"] == 0


def test_what_was_looked_up_before_all_topics_are_read_again_is_looked_up_again() -> None:
    """The same fleet is read again, with fewer blocks."""
    router = router_of(1)
    hold(router.view, rank(1), LOCAL)
    prepared = router.prepare(msgspec.convert({"token_ids": TOKENS, "update_states": False}, RouteRequest))
    router.view.reset()
    register(router.view, 1)
    hold(router.view, rank(1), LOCAL[:1])
    assert answer_json(router.try_book(prepared))["overlap_blocks"] == 1


def test_pooled_blocks_are_exact_once_they_are_folded_up_to_where_their_rank_is() -> None:
    """The rank can be trusted again by the index; its evictions from the pool are in another changelog."""
    router = router_of(1)
    hold(router.view, rank(1), LOCAL[:1])
    put(router, 1, 2, owner=1)
    hosts(router, 1)
    assert ask(router)["mode"] == "exact"
    (progress,) = router.view.index.progress_of(WorkerId(1))
    behind = replace(progress, feed=FeedState.CATCHING_UP, sequence=progress.sequence + 1)
    for state in (behind, replace(behind, feed=FeedState.LIVE)):
        router.view.fold_index(PROGRESS_KEY.pack(rank(1)), encode_progress(state))
    partition = partition_of(WorkerId(1), Settings().partitions)
    record = encode_partition(PartitionRecord(partition, 0, "test", ()))
    router.view.fold_index(PARTITION_KEY.pack(partition), record)
    assert ask(router)["degraded_because"] == "pooled_rank_unknown"
    caught_up(router.view, partition)
    assert ask(router)["mode"] == "exact"


def test_own_and_pooled_blocks_add_up_and_nothing_counts_twice() -> None:
    """A rank's own blocks count first, whichever rank has pooled them as well."""
    router = router_of(2)
    put(router, 0, 1, 2, 3)
    hosts(router, 1, 2)
    hold(router.view, rank(1), LOCAL[:2])
    assert terms(ask(router)) == {1: (2, 2, 0, 3.5, 4.5), 2: (0, 4, 0, 3.0, 5.0)}


@pytest.mark.parametrize(
    ("weight", "effective"), [(0.0, 0.0), (0.5, 1.5), (2.0, 6.0)], ids=["not looked for", "half", "double"]
)
def test_the_weight_is_a_setting_and_a_requests_own(weight: float, effective: float) -> None:
    """The weight can be set in JSON, as a query parameter, and for the whole router."""
    for knobs, override in (({}, {"cxl_score_weight": weight}), ({"cxl_score_weight": weight}, None)):
        router = router_of(1, **knobs)
        put(router, 0, 1, 2)
        hosts(router, 1)
        assert terms(ask(router, override))[1][3] == effective
    query = {"update_states": "false", "explain": "true", "cxl_score_weight": str(weight)}
    assert terms(answer_json(router.route(parse_route_query(query), packed(TOKENS))))[1][3] == effective


def test_what_a_pool_has_is_not_booked_as_prefill_and_what_labels_are_worth_is() -> None:
    """A booking charges neither own nor pooled blocks; labels are a preference and reduce no charge."""
    router = router_of(1)
    put(router, 2, 3)
    hosts(router, 1)
    label(router, 1, 0, 2)
    asked = {"token_ids": TOKENS, "request_id": "r", "router_config_override": {"moe_query": QUERY}}
    router.route(msgspec.convert(asked, RouteRequest))
    (row,) = router.rank_loads()["loads"]
    assert row["active_prefill_tokens"] == len(TOKENS) - int((2 + 0.75 * 2) * BLOCK_SIZE)


def test_the_potential_load_knows_what_a_pool_has() -> None:
    """The potential load counts pooled blocks as the booking does."""
    router = router_of(2)
    put(router, 0, 1, 2, 3)
    hosts(router, 2)
    rows = router.potential(msgspec.convert({"token_ids": TOKENS}, RouteRequest))["loads"]
    assert [row["potential_prefill_tokens"] for row in rows] == [64, 16]


def test_labels_that_match_are_worth_more_and_labels_that_do_not_are_not() -> None:
    """Matching labels of own leading blocks add weight; without a query labels are ignored."""
    router = router_of(3)
    hold(router.view, rank(1), LOCAL[:2])
    label(router, 2, 0, 2)
    label(router, 3, 0, 1, MoeLabels(2, 8, 3))
    label(router, 3, 2, 4)  # after a hole
    assert terms(ask(router, {"moe_query": QUERY, "moe_score_weight": 0.25})) == {
        1: (2, 0, 0, 2.0, 6.0),
        2: (2, 0, 2, 2.5, 5.5),
        3: (1, 0, 0, 1.0, 7.0),
    }
    assert ask(router, {"moe_query": QUERY})["worker_id"] == 2
    assert {each[2] for each in terms(ask(router)).values()} == {0}
    assert {each[2] for each in terms(ask(router, {"moe_query": {}})).values()} == {0}


def test_of_ranks_that_hold_the_whole_request_one_whose_labels_match_wins() -> None:
    """Exact ties go to the most matching blocks, and ties that remain are drawn; labels of weight 0 decide nothing."""
    router = router_of(4)
    hold(router.view, rank(1), LOCAL)
    label(router, 2, 0, 4)
    label(router, 3, 0, 4)
    mostly = run_of(LOCAL, rank(4), 0, 4, moe=dict.fromkeys(range(3), LABELS))
    router.view.fold_index(RUN_KEY.pack(mostly.key), encode_run(mostly))
    query = {"moe_query": QUERY}
    assert {ask(router, query)["worker_id"] for _ in range(40)} == {2, 3}
    assert {ask(router, {**query, "moe_score_weight": 0.0})["worker_id"] for _ in range(80)} == {1, 2, 3, 4}
    assert {ask(router)["worker_id"] for _ in range(80)} == {1, 2, 3, 4}


@pytest.mark.parametrize("mode", ["kv", "random", "least-loaded"])
def test_strictly_only_matching_ranks_stay_where_any_matches(mode: str) -> None:
    """In every mode only matching ranks remain, unless no rank matches."""
    router = router_of(3, router_mode=mode)
    hold(router.view, rank(1), LOCAL)
    label(router, 2, 0, 1)
    strict = {"moe_query": {**QUERY, "fallback_to_unlabeled": False}}
    for _ in range(8):
        assert terms(ask(router, strict)).keys() == {2}
    assert len(terms(ask(router, {"moe_query": QUERY}))) == 3
    nobody = {"moe_query": {**QUERY, "expert_ids": [99], "fallback_to_unlabeled": False}}
    assert len(terms(ask(router, nobody))) == 3


def test_an_answer_says_whether_the_strict_filter_applied() -> None:
    """Without a match anywhere, all ranks stay candidates, and the answer says so without `explain`."""
    router = router_of(2)
    strict = {"moe_query": {**QUERY, "fallback_to_unlabeled": False}}

    def applied(override: dict[str, Any] | None) -> Any:
        return ask(router, override, explain=False).get("moe_filter_applied", "absent")

    assert applied(strict) is False  # no rank has any label
    label(router, 2, 0, 1)
    assert applied(strict) is True
    assert applied({"moe_query": {**QUERY, "expert_ids": [99], "fallback_to_unlabeled": False}}) is False
    assert applied({"moe_query": {"fallback_to_unlabeled": False}}) is False  # it selects nothing
    assert [applied({"moe_query": QUERY}), applied(None)] == ["absent", "absent"]
    booked = ask(router, strict, request_id="r", update_states=True)
    again = ask(router, strict, request_id="r", update_states=True)
    assert (booked["moe_filter_applied"], again["cost"]) == (True, None)
    assert "moe_filter_applied" not in again  # the existing choice was not filtered now


def test_a_router_that_reads_no_index_says_that_the_strict_filter_did_not_apply() -> None:
    """Without events a router has no labels, so that the filter removes no rank."""
    router = router_of(2, kv_events=False)
    answer = ask(router, {"moe_query": {**QUERY, "fallback_to_unlabeled": False}})
    assert (answer["moe_filter_applied"], len(answer["candidates"])) == (False, 2)


def test_pooled_blocks_and_labels_limit_the_chosen_mode_only_if_its_score_has_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a pool's owner lags or labels were dropped, the mode is degraded, and the chosen mode too if its score uses
    them."""
    monkeypatch.setattr(block_sets.FactSets._number_of, "__defaults__", (1,))
    router = router_of(3)
    for worker_id in (1, 2, 3):
        hold(router.view, rank(worker_id), LOCAL[:1])
    alive(router, DEAD, behind_ms=5000)
    put(router, 1, 2)
    hosts(router, 2)

    def modes(override: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, ...]:
        answer = ask(router, override, **fields)
        reasons = answer.get("degraded_because"), answer.get("chosen_degraded_because")
        return (answer["worker_id"], answer["mode"], answer["chosen_mode"], *reasons)

    behind = "pooled_owner_behind"
    assert modes() == (2, "degraded", "degraded", behind, behind)
    assert modes(allowed_worker_ids=[1]) == (1, "degraded", "exact", behind, None)
    assert modes({"cxl_score_weight": 0.0}, allowed_worker_ids=[2]) == (2, "exact", "exact", None, None)
    router.view.fold_pooled(block_key(BlockKey(CHAIN[1], rank(DEAD), "p")), None)
    router.view.fold_pooled(block_key(BlockKey(CHAIN[2], rank(DEAD), "p")), None)

    label(router, 1, 0, 1)
    label(router, 2, 0, 1)  # dropped, since only one set of labels fits
    lost, query = "labels_over_capacity", {"moe_query": QUERY}
    assert modes(query) == (1, "degraded", "exact", lost, None)
    assert modes(query, excluded_worker_ids=[1], allowed_worker_ids=[2]) == (2, "degraded", "exact", lost, None)
    strict = {"moe_query": {**QUERY, "fallback_to_unlabeled": False}}
    # Rank 2 passes the strict filter only because its labels may match: that choice depends on them.
    assert modes(strict, excluded_worker_ids=[1]) == (2, "degraded", "degraded", lost, lost)


def test_exclusions_apply_last() -> None:
    """If only excluded ranks match, no rank is left; if another matches, it remains."""
    router = router_of(3)
    label(router, 2, 0, 1)
    strict = {"moe_query": {**QUERY, "fallback_to_unlabeled": False}}
    with pytest.raises(NoEligibleWorker, match="excluded") as caught:
        ask(router, strict, excluded_worker_ids=[2])
    assert caught.value.detail == {"matching": 1}
    assert terms(ask(router, strict, allowed_worker_ids=[1, 3])).keys() == {
        1,
        3,
    }  # a rank that is not eligible does not match
    label(router, 3, 0, 1)
    assert terms(ask(router, strict, excluded_worker_ids=[2])).keys() == {3}


def test_a_labelled_rank_that_restarts_matches_nothing_any_more() -> None:
    """A progress record of a newer incarnation ends a rank's labels."""
    router = router_of(1)
    label(router, 1, 0, 2)
    assert terms(ask(router, {"moe_query": QUERY}))[1][:3] == (2, 0, 2)
    hold(router.view, rank(1), LOCAL)
    progress = router.view.index.progress_of(WorkerId(1))[0]
    later = replace(progress, epoch=progress.epoch._replace(generation=1))
    router.view.fold_index(PROGRESS_KEY.pack(rank(1)), encode_progress(later))
    assert terms(ask(router, {"moe_query": QUERY}))[1][:3] == (0, 0, 0)


def test_an_answer_is_as_good_as_the_worse_of_index_and_pooled_blocks() -> None:
    """A silent owner of pooled rows degrades answers that use pooled blocks."""
    router = router_of(1)
    hold(router.view, rank(1), LOCAL)
    other = next(n for n in range(100, 200) if partition_of(WorkerId(n), 8) != partition_of(WorkerId(1), 8))
    row = BlockRow(PLACED, None, 0, EngineHash(0))
    key = block_key(BlockKey(CHAIN[0], rank(other), "p"))
    assert ask(router)["mode"] == "exact"
    router.view.fold_pooled(key, encode_block(row))
    assert (ask(router)["mode"], ask(router)["degraded_because"]) == ("degraded", "pooled_owner_silent")
    assert ask(router, {"cxl_score_weight": 0.0})["mode"] == "exact"
    alive(router, other)
    assert ask(router)["mode"] == "exact"
    alive(router, other, behind_ms=5000)
    assert ask(router)["degraded_because"] == "pooled_owner_behind"
    router.view.fold_pooled(key, None)
    assert ask(router)["mode"] == "exact"


@pytest.mark.parametrize(
    ("health", "feed", "mode"),
    [
        (Health.EXACT, FeedState.LIVE, "exact"),
        (Health.DEGRADED, FeedState.LIVE, "degraded"),
        (Health.EXACT, FeedState.CATCHING_UP, "degraded"),
        (Health.EXACT, FeedState.UNPROVEN, "degraded"),
        (Health.REMOVED, FeedState.LIVE, "exact"),  # it writes no evictions any more, as docs/cxl.md says
    ],
)
def test_an_answer_is_no_better_than_the_rank_that_pooled_the_blocks(
    health: Health, feed: FeedState, mode: str
) -> None:
    """A rank that lost events, or whose feed is behind, may have evicted blocks from the pool unnoticed."""
    router = router_of(2)
    hold(router.view, rank(1), LOCAL[:1])
    hold(router.view, rank(2), LOCAL[:1])
    put(router, 1, 2, owner=2)
    hosts(router, 1, 2)
    progress = router.view.index.progress_of(WorkerId(2))[0]
    router.view.fold_index(PROGRESS_KEY.pack(rank(2)), encode_progress(replace(progress, health=health, feed=feed)))
    answer = ask(router, allowed_worker_ids=[1])
    assert answer["chosen_mode"] == mode
    assert answer.get("chosen_degraded_because") == ("pooled_rank_unknown" if mode == "degraded" else None)
    assert answer["mode"] == mode
    assert ask(router, {"cxl_score_weight": 0.0}, allowed_worker_ids=[1])["mode"] == "exact"
    assert router.view.assess([rank(1)], pooled="another model").mode is AnswerMode.EXACT


def test_rows_have_a_limit_and_beyond_it_answers_are_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row beyond the limit is a bad record; existing rows can still change and end."""
    monkeypatch.setattr(pooled_view.PooledView.__init__, "__defaults__", (None, 2))
    router = router_of(1)
    hold(router.view, rank(1), LOCAL)
    alive(router, DEAD)
    put(router, 0, 1)
    put(router, 0, placement=replace(PLACED, state=CxlMemoryState.EVICTED))
    assert ask(router)["mode"] == "exact"
    with pytest.raises(BadRecord, match="2 rows"):
        put(router, 2)
    assert (router.view.facts.n_pooled(), ask(router)["degraded_because"]) == (2, "pooled_over_capacity")
    router.view.fold_pooled(block_key(BlockKey(CHAIN[0], rank(DEAD), "p")), None)
    put(router, 2)
    assert router.view.facts.n_pooled() == 2


@pytest.mark.parametrize("in_batches", [False, True])
def test_labels_that_find_no_room_are_doubted_and_filter_nobody(
    monkeypatch: pytest.MonkeyPatch, in_batches: bool
) -> None:
    """Dropped labels degrade answers that use labels, until their record is taken or ends."""
    monkeypatch.setattr(block_sets.FactSets._number_of, "__defaults__", (1,))
    router = router_of(3)

    def tell(worker_id: int, *, labelled: bool = True, ends: bool = False) -> None:
        moe = dict.fromkeys(range(4), LABELS) if labelled else {}
        run = run_of(LOCAL, rank(worker_id), 0, 4, moe=moe)
        record = (RUN_KEY.pack(run.key), None if ends else encode_run(run))
        if in_batches:
            assert router.view.fold_index_batch([record]) == []
        else:
            router.view.fold_index(*record)

    strict = {"moe_query": {**QUERY, "fallback_to_unlabeled": False}}

    def strictly() -> tuple[str, set[int]]:
        answer = ask(router, strict)
        return answer["mode"], set(terms(answer))

    for worker_id in (1, 2, 3):
        hold(router.view, rank(worker_id), LOCAL[:1])
    tell(1)
    assert strictly() == ("exact", {1})
    tell(2)
    for override in ({"moe_query": QUERY}, strict, {**strict, "moe_score_weight": 0.0}):
        assert ask(router, override)["degraded_because"] == "labels_over_capacity"
    assert terms(ask(router, strict)).keys() == {1, 2}
    assert router.view.facts.labelled() == (2, 4)
    without_query: list[dict[str, Any] | None] = [
        None,
        {"moe_query": {}},
        {"moe_query": QUERY, "moe_score_weight": 0.0},
    ]
    for nothing in without_query:
        assert ask(router, nothing)["mode"] == "exact"
    assert ask(router, {"moe_query": QUERY}, excluded_worker_ids=[2])["mode"] == "exact"
    booked = {"token_ids": TOKENS, "request_id": "r", "allowed_worker_ids": [2]}
    for _ in range(2):  # the second finds the booking
        again = msgspec.convert({**booked, "router_config_override": {"moe_query": QUERY}}, RouteRequest)
        assert answer_json(router.route(again))["degraded_because"] == "labels_over_capacity"
    # Labels of another rank end, and their capacity is used when the record is written again.
    tell(1, labelled=False)
    assert ask(router, strict)["mode"] == "degraded"
    tell(2)
    assert strictly() == ("exact", {2})
    tell(1)
    assert terms(ask(router, strict)).keys() == {1, 2}
    tell(1, ends=True)
    assert strictly() == ("exact", {2})


def test_a_rank_that_is_forgotten_or_restarts_lacks_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's dropped labels end with its incarnation."""
    monkeypatch.setattr(block_sets.FactSets._number_of, "__defaults__", (1,))
    router = router_of(2)
    for worker_id in (1, 2):
        hold(router.view, rank(worker_id), LOCAL[:1])
        label(router, worker_id, 0, 1)
    assert ask(router, {"moe_query": QUERY})["degraded_because"] == "labels_over_capacity"
    progress = router.view.index.progress_of(WorkerId(2))[0]
    later = replace(progress, epoch=progress.epoch._replace(generation=1))
    router.view.fold_index(PROGRESS_KEY.pack(rank(2)), encode_progress(later))
    number = partition_of(WorkerId(2), router.settings.partitions)
    router.view.fold_index(PARTITION_KEY.pack(number), encode_partition(PartitionRecord(number, 0, "test", ())))
    assert ask(router, {"moe_query": QUERY})["mode"] == "exact"


@pytest.mark.parametrize("query", ['{"layer_id": "x"}', "[1]", "7", "{", '{"layer": 1}', '{"expert_ids": [-1]}'])
def test_a_query_that_is_none_is_refused(query: str) -> None:
    """An invalid moe_query is refused, in a body and as a parameter."""
    with pytest.raises(InvalidRequest):
        parse_route_query({"moe_query": query})


def test_a_query_may_be_a_parameter() -> None:
    """A moe_query may be given as a query parameter in JSON."""
    asked = parse_route_query({"moe_query": '{"layer_id": 2, "expert_ids": [7]}', "moe_score_weight": "2"})
    override = asked.router_config_override
    assert override is not None
    assert override.moe_query is not None
    assert (override.moe_query.layer_id, override.moe_query.expert_ids, override.moe_score_weight) == (2, [7], 2.0)
