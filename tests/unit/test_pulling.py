"""From which other engine an engine is to pull blocks of a prompt, by a router's answer alone."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from streams.core.ids import DpRank
from streams.frontend.pulling import pulling_body, source_to_pull, sources_header
from streams.router_api.messages.kv_transfer import pull_params

PARAMS = {"remote_kv_source": {"kv_request_id": "x", "remote_host": "gpu7", "remote_port": 5710}}
SOURCE = {"worker_id": 7, "dp_rank": 0, "blocks": 10, "tier": "host", "kv_transfer_params": PARAMS}
POOL = {"pool_id": "lmcache/a b/dram", "blocks": 12, "tier": "pool", "accessible": False}
ANSWER: dict[str, Any] = {"overlap_blocks": 2, "kv_sources": [POOL, SOURCE]}


@pytest.mark.parametrize(
    ("tokens_min", "answer", "pulls"),
    [
        (0, ANSWER, False),
        (128, ANSWER, True),
        (129, ANSWER, False),
        (128, {**ANSWER, "pooled_blocks": 1}, False),
        (1, {"overlap_blocks": 2}, False),
        (1, {"overlap_blocks": 2, "kv_sources": [POOL]}, False),
    ],
)
def test_a_pull_is_for_a_source_with_enough_more_tokens(tokens_min: int, answer: dict[str, Any], pulls: bool) -> None:
    """What the chosen worker holds in any tier, or reads in a pool, is not pulled; pools have no parameters."""
    assert source_to_pull(answer, 16, tokens_min) == (SOURCE if pulls else None)


@pytest.mark.parametrize("more", [{"n": 2}, {"echo": True}, {"kv_transfer_params": {"a": 1}}, {"prompt": ["a", "b"]}])
def test_a_request_that_cannot_be_split_pulls_nothing(more: dict[str, Any]) -> None:
    """Its engine reads its cache in another way, or its client has parameters of its own."""
    body = {"prompt": [1, 2], "max_tokens": 3}
    asked = pulling_body(orjson.dumps(body), SOURCE)
    assert asked is not None and orjson.loads(asked) == {**body, "kv_transfer_params": PARAMS}
    assert pulling_body(orjson.dumps({**body, **more}), SOURCE) is None


def test_a_header_names_ranks_and_pools() -> None:
    """A pool may have any printable id, and a header may not."""
    assert sources_header(ANSWER["kv_sources"]) == (
        "pool=lmcache/a%20b/dram;blocks=12;tier=pool, rank=7/0;blocks=10;tier=host"
    )


def test_each_rank_listens_at_a_port_of_its_own() -> None:
    """vLLM adds the number of the rank; every answer names another pull."""
    one, other = (pull_params("http://gpu7:8000/base", DpRank(3), 5710)["remote_kv_source"] for _ in range(2))
    assert (one["remote_host"], one["remote_port"]) == ("gpu7", 5713)
    assert one["kv_request_id"] != other["kv_request_id"]
