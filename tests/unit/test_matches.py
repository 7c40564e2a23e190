"""A request's own mode, and the matched blocks of workers and ranks, without Kafka."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams.core.hashing import local_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.routing.selection import RouterMode
from streams.errors import InvalidRequest, NoEligibleWorker
from streams.router_api.deciding.router import Router
from streams.router_api.messages.requests import RouteRequest, parse_route_query
from tests.helpers.api import TOKENS, packed
from tests.helpers.routers import QUERY, ask, hosts, label, put, router_of
from tests.helpers.views import BLOCK_SIZE, hold, rank, register

LOCAL = local_hashes(TOKENS, BLOCK_SIZE)


def matches(router: Router, **fields: Any) -> dict[str, Any]:
    return router.matches(msgspec.convert({"token_ids": TOKENS, **fields}, RouteRequest))


def counts(rows: list[dict[str, Any]]) -> dict[Any, tuple[int, int, int]]:
    """Own, CXL-accessible and MoE-matching blocks by worker, or by rank where rows are of ranks."""
    return {
        (row["worker_id"], row["dp_rank"]) if "dp_rank" in row else row["worker_id"]: (
            row["scores"],
            row["cxl_accessible_scores"],
            row["moe_scores"],
        )
        for row in rows
    }


def test_a_request_overrides_the_mode_of_its_router() -> None:
    """Each request is routed in its own mode, and the following one in the router's mode again."""
    router = router_of(3)
    hold(router.view, rank(2), LOCAL)
    ask_once: dict[str, Any] = {"update_states": "false"}
    turns = [ask(router, router_mode="round-robin", **ask_once) for _ in range(6)]
    assert [each["worker_id"] for each in turns] == [1, 2, 3, 1, 2, 3]
    assert {each["mode"] for each in turns} == {"fallback"}
    assert {ask(router, **ask_once)["worker_id"] for _ in range(6)} == {2}
    assert {ask(router, router_mode="random", **ask_once)["worker_id"] for _ in range(60)} == {1, 2, 3}
    assert ask(router, router_mode="direct", worker_id=3, **ask_once)["worker_id"] == 3


def test_a_router_in_mode_direct_takes_other_modes_from_requests() -> None:
    """Only a request that is routed in mode direct must name its worker."""
    router = router_of(2, router_mode=RouterMode.DIRECT)
    hold(router.view, rank(2), LOCAL)
    assert ask(router, router_mode="kv")["worker_id"] == 2
    with pytest.raises(InvalidRequest, match="worker_id is missing"):
        ask(router, "other")
    with pytest.raises(InvalidRequest, match="worker_id is missing"):
        ask(router_of(2), router_mode="direct")


@pytest.mark.parametrize("mode", ["", "fastest", "KV"])
def test_an_unknown_mode_is_refused(mode: str) -> None:
    """The message names the field."""
    with pytest.raises(InvalidRequest, match="router_mode"):
        parse_route_query({"router_mode": mode})


def test_matches_are_counted_by_worker_and_by_rank() -> None:
    """Ranks without a match are left out, and a worker has the greatest count of its ranks."""
    router = router_of(3)
    register(router.view, 2, dp_size=2)
    hold(router.view, rank(1), LOCAL[:3])
    hold(router.view, RankId(WorkerId(2), DpRank(0)), LOCAL[:1])
    hold(router.view, RankId(WorkerId(2), DpRank(1)), LOCAL[:2])
    answer = matches(router)
    assert answer["request_blocks"] == 4
    assert counts(answer["ranks"]) == {(1, 0): (3, 0, 0), (2, 0): (1, 0, 0), (2, 1): (2, 0, 0)}
    assert counts(answer["workers"]) == {1: (3, 0, 0), 2: (2, 0, 0)}
    assert router.matches(parse_route_query({}), packed(TOKENS)) == answer
    assert counts(matches(router, excluded_worker_ids=[1])["workers"]) == {2: (2, 0, 0)}


def test_matches_count_pooled_and_labelled_blocks_whatever_their_weights_are() -> None:
    """The weights of the router are for choosing; these are counts of blocks."""
    router = router_of(3, cxl_score_weight=0.0, moe_score_weight=0.0)
    put(router, 1, 2)
    hosts(router, 1, 2)
    hold(router.view, rank(1), LOCAL[:1])
    label(router, 1, 0, 1)
    assert counts(matches(router)["ranks"]) == {(1, 0): (1, 2, 0)}
    with_labels = matches(router, router_config_override={"moe_query": QUERY})
    assert counts(with_labels["ranks"]) == {(1, 0): (1, 2, 1)}


def test_a_router_without_an_index_has_no_matches_and_says_so() -> None:
    """Its mode is fallback, so that nothing looks like a prompt that no rank holds."""
    answer = matches(router_of(2, kv_overlap_score_weight=0.0))
    assert answer == {"request_blocks": 4, "workers": [], "ranks": [], "mode": "fallback"}


def test_matches_choose_and_book_nothing_and_need_an_eligible_rank() -> None:
    """A request whose filters no rank passes is refused as by POST /route."""
    router = router_of(1, router_mode=RouterMode.DIRECT)
    hold(router.view, rank(1), LOCAL)
    assert counts(matches(router, request_id="r")["workers"]) == {1: (4, 0, 0)}
    assert router.rank_loads()["loads"][0]["active_requests"] == 0
    with pytest.raises(NoEligibleWorker, match="excluded 1"):
        matches(router, excluded_worker_ids=[1])
