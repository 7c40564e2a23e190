"""Calls to a fleet with CXL pools: reachable workers, and scores of decisions."""

from __future__ import annotations

import urllib.request
from typing import Any

import orjson

from streams.lab.stack import Engine, RouterProcess, get_json
from streams.process.waiting import wait_for
from tests.helpers.support import VISIBLE_TIMEOUT_S

POOL = "rack1"


def call(router: RouterProcess, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else orjson.dumps(body)
    request = urllib.request.Request(f"{router.url}{path}", data=data, method=method)
    with urllib.request.urlopen(request, timeout=30.0) as response:
        return orjson.loads(response.read())


def reach(router: RouterProcess) -> dict[int, tuple[str, list[int]]]:
    """Return state and reachable workers by engine hash."""
    rows = get_json(f"{router.url}/state/cxl")["blocks"]
    return {row["engine_hash"]: (row["state"], row["reachable_workers"]) for row in rows}


def await_reach(router: RouterProcess, expected: dict[int, tuple[str, list[int]]]) -> None:
    try:
        wait_for(lambda: reach(router) == expected, VISIBLE_TIMEOUT_S, "the reachable workers of each block")
    finally:
        assert reach(router) == expected


def ask(router: RouterProcess, tokens: list[int], **query: Any) -> dict[str, Any]:
    """Return a decision without a booking, with the scores of every candidate."""
    body = {"token_ids": tokens, "update_states": False, "explain": True}
    if query:
        body["router_config_override"] = {"moe_query": query}
    answer: dict[str, Any] = call(router, "POST", "/route", body)
    return answer


def supplementary(answer: dict[str, Any]) -> dict[int, tuple[int, int, int]]:
    """Return own, CXL-accessible and MoE-matching blocks by worker."""
    names = ("scores", "cxl_accessible_scores", "moe_scores")
    return {each["worker_id"]: tuple(each[name] for name in names) for each in answer["candidates"]}


def await_supplementary(
    router: RouterProcess, expected: dict[int, tuple[int, int, int]], tokens: list[int], **query: Any
) -> int:
    """Wait until a decision has these scores, and return the chosen worker."""
    try:
        wait_for(
            lambda: supplementary(ask(router, tokens, **query)) == expected,
            VISIBLE_TIMEOUT_S,
            "a decision's scores",
        )
    finally:
        answer = ask(router, tokens, **query)
        assert supplementary(answer) == expected
    chosen: int = answer["worker_id"]
    return chosen


def attached(engine: Engine) -> bool:
    return bool(get_json(f"{engine.url}/sim/info")["pool"]["attached"])
