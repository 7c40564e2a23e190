"""KV caches that come from another simulated engine: vLLM's parameters, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streams.errors import InvalidRequest
from streams.lab.engines.engine_messages import FirstToken, PoolAsked
from streams.lab.engines.kv_transfer import NO_TRANSFER, TransferRequest, answered_transfer, parse_transfer
from streams.lab.engines.model import EngineModel
from tests.helpers.sim_requests import CONFIG, FOREVER, ask, only

ANSWERED = answered_transfer("engine-1", "http://127.0.0.1:8101", 3)


def test_what_an_answer_names_is_what_another_request_may_use() -> None:
    """The parameters of a prefill's answer are those of the decode request, unchanged."""
    assert parse_transfer({"kv_transfer_params": ANSWERED}) == TransferRequest(n_blocks=3)
    assert (ANSWERED["remote_host"], ANSWERED["remote_port"]) == ("127.0.0.1", 8101)


@pytest.mark.parametrize(
    ("body", "transfer"),
    [
        ({}, NO_TRANSFER),
        ({"kv_transfer_params": None}, NO_TRANSFER),
        ({"kv_transfer_params": {}}, NO_TRANSFER),
        ({"kv_transfer_params": {"do_remote_decode": True, "remote_host": None}}, TransferRequest(is_read_later=True)),
    ],
)
def test_requests_without_a_remote_prefill(body: dict[str, Any], transfer: TransferRequest) -> None:
    """They compute their prompts; one of them is asked for its blocks."""
    assert parse_transfer(body) == transfer


@pytest.mark.parametrize(
    "params",
    [
        "text",
        [1],
        {"do_remote_prefill": True},
        {**ANSWERED, "remote_host": None},
        {**ANSWERED, "remote_block_ids": []},
        {**ANSWERED, "remote_block_ids": 3},
    ],
)
def test_incomplete_parameters_are_refused(params: Any) -> None:
    """An engine could not find the blocks."""
    with pytest.raises(InvalidRequest, match="kv_transfer_params"):
        parse_transfer({"kv_transfer_params": params})


@pytest.mark.parametrize(("n_named", "n_loaded"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_transferred_blocks_cost_a_transfer_and_no_prefill(n_named: int, n_loaded: int) -> None:
    """Of a prompt of three blocks, at most two are loaded, since at least one token is always computed."""
    config = replace(CONFIG, transfer_us_per_token=250.0)
    model, size = EngineModel(config), CONFIG.block_size
    prompt = range(3 * size)
    model.submit(0.0, ask("a", prompt, n_transferred_blocks=n_named))
    (first,) = only(model.advance(FOREVER), FirstToken)
    model.check()
    assert first.cached_tokens == n_loaded * size
    assert first.ttft_ms == pytest.approx(n_loaded * size * 0.25 + config.prefill_ms((3 - n_loaded) * size))
    stats = model.stats()
    assert (stats.loaded_tokens, stats.computed_tokens) == (n_loaded * size, (3 - n_loaded) * size)
    assert len(model.cached_blocks().sequence) == 3


def test_cached_blocks_are_not_transferred_again() -> None:
    """Only what follows them is; and blocks that are transferred are not asked of a pool."""
    model, size = EngineModel(CONFIG), CONFIG.block_size
    model.use_pool(True)
    model.submit(0.0, ask("a", range(4 * size), n_transferred_blocks=4))
    assert only(model.advance(FOREVER), PoolAsked) == []
    before = model.stats().loaded_tokens
    model.submit(100_000.0, ask("b", [*range(4 * size), 7], n_transferred_blocks=2))
    outputs = model.advance(FOREVER)
    assert model.stats().loaded_tokens == before
    assert only(outputs, FirstToken)[0].cached_tokens == 4 * size
