"""The decisions behind prefill on another worker, without HTTP."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from streams.frontend.disaggregation import (
    POOL_PAUSE_S_MAX,
    ModelRoles,
    SplitLimits,
    bootstrap_fields,
    decode_body,
    fields_to_split,
    is_busy,
    pauses_s,
    prefill_body,
    ranks_that_reach,
    stays,
    transfer_for,
    transferred_fields,
    uncached_tokens,
    usable_blocks,
)
from streams.settings import KvTransfer

LIMITS = SplitLimits(remote_tokens_min=100, backlog_tokens_max=1000)
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [3, 4],
    "remote_host": "h",
    "remote_port": 5600,
}


def route_answer(**fields: Any) -> dict[str, Any]:
    return {"worker_id": 1, "dp_rank": 0, "overlap_blocks": 0, **fields}


@pytest.mark.parametrize(
    ("roles", "splits"),
    [
        ((), False),
        (("both", "both"), False),
        (("prefill",), False),
        (("decode", "both"), False),
        (("prefill", "decode"), True),
        (("both", "prefill"), True),
    ],
)
def test_a_model_is_split_if_it_has_workers_for_prefill_and_others_that_decode(
    roles: tuple[str, ...], splits: bool
) -> None:
    """Workers of both roles decode; a fleet without prefill workers is served as before."""
    known = ModelRoles(16)
    for worker_id, role in enumerate(roles, start=1):
        known = known.including(worker_id, role)
    assert known.splits is splits
    assert known.prefill_ids == tuple(at for at, role in enumerate(roles, start=1) if role == "prefill")


@pytest.mark.parametrize(
    ("answer", "n_tokens", "uncached"),
    [
        (route_answer(), 160, 160),
        (route_answer(overlap_blocks=4), 160, 96),
        (route_answer(overlap_blocks=4, pooled_blocks=3), 160, 48),
        (route_answer(overlap_blocks=10), 165, 5),
        (route_answer(overlap_blocks=11), 165, 0),  # a booking that was made for a longer prompt
    ],
)
def test_the_uncached_part_counts_own_and_pooled_blocks(answer: dict[str, Any], n_tokens: int, uncached: int) -> None:
    """What a worker reads in a pool does not have to be computed."""
    assert uncached_tokens(answer, n_tokens, 16) == uncached


@pytest.mark.parametrize(("n_tokens", "remains"), [(98, True), (99, True), (100, False), (101, False)])
def test_a_short_uncached_part_stays_on_the_decode_worker(n_tokens: int, remains: bool) -> None:
    """The threshold itself is long enough."""
    assert stays(route_answer(), n_tokens, 16, LIMITS) is remains


def test_the_last_token_alone_is_never_computed_elsewhere() -> None:
    """Also without a threshold, a worker with the whole prompt keeps it."""
    none = SplitLimits(0, 0)
    assert stays(route_answer(overlap_blocks=10), 161, 16, none)
    assert stays(route_answer(), 1, 16, none)
    assert not stays(route_answer(), 2, 16, none)


@pytest.mark.parametrize(("backlog_blocks", "busy"), [(0, False), (62, False), (62.5, False), (63, True)])
def test_a_prefill_worker_is_busy_above_its_backlog(backlog_blocks: float, busy: bool) -> None:
    """Only the chosen rank counts."""
    rows = [
        {"worker_id": 1, "dp_rank": 1, "active_prefill_blocks": 10_000.0},
        {"worker_id": 1, "dp_rank": 0, "active_prefill_blocks": backlog_blocks},
        {"worker_id": 2, "dp_rank": 0, "active_prefill_blocks": 10_000.0},
    ]
    assert is_busy(route_answer(candidates=rows), 16, LIMITS) is busy
    assert not is_busy(route_answer(candidates=rows), 16, SplitLimits(100, 0))


def test_a_repeated_booking_has_no_candidates_and_is_not_busy() -> None:
    """A router answers a repeated id with the choice alone."""
    assert not is_busy(route_answer(), 16, LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"bootstrap_room": 0},
        {"use_beam_search": True},
    ],
)
def test_what_cannot_be_split(fields: dict[str, Any]) -> None:
    """Several answers or prompts, answers about the prompt, and requests that clients have split themselves."""
    assert fields_to_split(orjson.dumps({"prompt": "x", **fields})) is None


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b'{"a": 1e}'])
def test_a_body_that_is_no_object_is_not_split(body: bytes) -> None:
    """The engine says what is wrong with it."""
    assert fields_to_split(body) is None


@pytest.mark.parametrize("fields", [{"n": 1}, {"n": None}, {"prompt": [1, 2, 3]}, {"messages": [], "logprobs": True}])
def test_what_can_be_split(fields: dict[str, Any]) -> None:
    """The fields are returned as they are."""
    assert fields_to_split(orjson.dumps(fields)) == fields


def test_the_prefill_asks_for_one_token_and_nothing_else_changes() -> None:
    """Limits, streaming and usage are the decode request's."""
    fields = {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 500,
        "min_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "cache_salt": "s",
    }
    sent = orjson.loads(prefill_body(fields, KvTransfer.PARAMS, None))
    params = sent.pop("kv_transfer_params")
    assert sent == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.5,
        "cache_salt": "s",
    }
    assert params["do_remote_decode"] is True and params["do_remote_prefill"] is False
    assert fields["max_tokens"] == 500


def test_a_chats_own_limit_is_changed_as_well() -> None:
    """Engines prefer max_completion_tokens to max_tokens."""
    sent = orjson.loads(prefill_body({"messages": [], "max_completion_tokens": 9}, KvTransfer.POOL, None))
    assert (sent["max_completion_tokens"], sent["max_tokens"]) == (1, 1)
    assert "kv_transfer_params" not in sent


def test_bootstrap_fields_are_equal_in_both_requests() -> None:
    """SGLang's workers meet at the prefill worker's host, in a room of their own."""
    given = bootstrap_fields("http://gpu7:30000/base", 8998, 42)
    assert given == {"bootstrap_host": "gpu7", "bootstrap_port": 8998, "bootstrap_room": 42}
    fields = {"prompt": "x", "max_tokens": 9}
    for sent in (prefill_body(fields, KvTransfer.BOOTSTRAP, given), decode_body(orjson.dumps(fields), given)):
        assert given.items() <= orjson.loads(sent).items()


@pytest.mark.parametrize("mode", ["device-aware-weighted", "power-of-two"])
def test_modes_that_look_at_the_load_of_the_moment_have_no_bootstrap(mode: str) -> None:
    """There the decode request waits for the prefill's answer."""
    assert transfer_for(KvTransfer.BOOTSTRAP, mode) is KvTransfer.PARAMS
    assert transfer_for(KvTransfer.POOL, mode) is KvTransfer.POOL
    assert transfer_for(KvTransfer.BOOTSTRAP, "kv") is KvTransfer.BOOTSTRAP


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        ({"choices": [], "kv_transfer_params": PARAMS}, {"kv_transfer_params": PARAMS}),
        (
            {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 0, "text": "x"},
            {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 0},
        ),
        ({"choices": []}, None),
        ({"kv_transfer_params": None}, None),
        ({"kv_transfer_params": {}}, None),
        ({"bootstrap_host": "h", "bootstrap_room": 0}, None),
        ([], None),
    ],
)
def test_what_a_prefills_answer_passes_on(answer: Any, fields: dict[str, Any] | None) -> None:
    """An engine that cannot transfer answers without these fields."""
    assert transferred_fields(orjson.dumps(answer)) == fields


def test_an_answer_that_is_not_json_passes_nothing_on() -> None:
    """For example a proxy's page."""
    assert transferred_fields(b"<html>") is None


def test_a_request_without_additions_stays_as_it_came() -> None:
    """Byte for byte, with its spaces."""
    body = b'{ "prompt": "x",  "seed": 1 }'
    assert decode_body(body, {}) is body
    assert orjson.loads(decode_body(body, {"kv_transfer_params": PARAMS})) == {
        "prompt": "x",
        "seed": 1,
        "kv_transfer_params": PARAMS,
    }


@pytest.mark.parametrize(("n_tokens", "n_blocks"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_last_token_is_always_computed(n_tokens: int, n_blocks: int) -> None:
    """So the block that it completes is of no use."""
    assert usable_blocks(n_tokens, 16) == n_blocks


def test_ranks_reach_a_prompt_by_their_own_and_by_pooled_blocks() -> None:
    """Their sum counts, and more than needed is enough."""
    own, pooled = {"a": 3, "b": 10, "c": 2}, {"a": 7, "c": 7, "d": 10}
    assert sorted(ranks_that_reach(own, pooled, 10)) == ["a", "b", "d"]
    assert ranks_that_reach({}, {}, 1) == []


@pytest.mark.parametrize("timeout_s", [0.001, 0.5, 2.0])
def test_pauses_add_up_to_the_deadline(timeout_s: float) -> None:
    """They grow up to a limit, and none is longer than what is left."""
    pauses = list(pauses_s(timeout_s))
    assert sum(pauses) == pytest.approx(timeout_s)
    assert max(pauses) <= POOL_PAUSE_S_MAX
    assert pauses[:-1] == sorted(pauses[:-1])


def test_without_a_deadline_there_is_no_pause() -> None:
    """The pool is then not asked at all."""
    assert list(pauses_s(0.0)) == []
