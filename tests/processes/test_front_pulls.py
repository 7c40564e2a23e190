"""The front and engines that pull blocks from each other, on real sockets: what engines are told, what clients see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest

from streams.core.hashing import local_hashes
from streams.core.routing.selection import RouterMode
from streams.core.workers import Role
from streams.settings import Settings
from tests.helpers.front_stage import Backend, Stage, on_stage
from tests.helpers.local_router import LocalRouter, hold, local_router, rank, register
from tests.helpers.scripted_engine import Script, ScriptedEngine, answer_bytes, scripted_engines

#: 8 whole blocks and a part of one.
PROMPT = list(range(8 * 16 + 8))
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 9}
DETAILS = {"X-Kvstreams-Details": "1"}
PORT = 5710


@contextmanager
def fleet(*roles: Role) -> Iterator[Backend]:
    """A router that knows the engines' port, and workers 1, 2, …, of which the last one has the prompt."""
    settings = Settings(router_avoid_s=0.0, router_mode=RouterMode.KV, router_kv_p2p_port=PORT)
    with (
        local_router(settings, n_workers=0) as router,
        scripted_engines(len(roles), ScriptedEngine) as engines,
    ):
        for number, (engine, role) in enumerate(zip(engines, roles, strict=True), start=1):
            register(router.router, number, url=engine.url, role=role)
        hold(router.router, rank(len(roles)), local_hashes(PROMPT, 16))
        yield router, engines


@contextmanager
def busy(router: LocalRouter, number: int) -> Iterator[None]:
    """Give a worker so much to do that no request goes there."""
    router.api.call("POST", "/loads/busy", {"worker_id": number, "token_ids": [9] * 16_000}).given()
    try:
        yield
    finally:
        router.api.call("DELETE", "/loads/busy").given()


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with fleet(Role.BOTH, Role.BOTH) as made:
        yield made


def sent(stage: Stage, number: int) -> list[dict[str, Any]]:
    return [orjson.loads(body) for body in stage.engines[number - 1].bodies]


def without_id(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters without what names the pull."""
    source = dict(params["remote_kv_source"])
    assert source.pop("kv_request_id")
    return {**params, "remote_kv_source": source}


async def test_an_engine_is_told_where_to_pull_from(backend: Backend) -> None:
    """The chosen engine gets the address of the one that has the prompt; the client sees an answer, and the details."""
    async with on_stage(backend, front_kv_pull_tokens_min=128) as stage:
        with busy(stage.router, 2):
            code, headers, body = await stage.post(BODY, "/v1/completions", **DETAILS)
        assert (code, body) == (200, answer_bytes())
        assert headers["X-Kvstreams-Worker"] == "1/0"
        assert headers["X-Kvstreams-Pulls-From"] == "2/0"
        assert headers["X-Kvstreams-Kv-Sources"] == "rank=2/0;blocks=8;tier=device"
        (asked,) = sent(stage, 1)
        assert without_id(asked.pop("kv_transfer_params")) == {
            "remote_kv_source": {"remote_host": "127.0.0.1", "remote_port": PORT}
        }
        assert asked == BODY
        assert stage.front.counts.pulls == 1


@pytest.mark.parametrize(("tokens_min", "fields"), [(0, {}), (129, {}), (128, {"n": 2})])
async def test_otherwise_a_request_stays_as_it_came(tokens_min: int, fields: dict[str, Any], backend: Backend) -> None:
    """Without the setting, with too few tokens, or if the request forbids it; the details name sources anyway."""
    asked = {**BODY, **fields}
    async with on_stage(backend, front_kv_pull_tokens_min=tokens_min) as stage:
        with busy(stage.router, 2):
            headers = (await stage.post(asked, "/v1/completions", **DETAILS))[1]
            plain = (await stage.post(asked, "/v1/completions"))[1]
        assert "X-Kvstreams-Pulls-From" not in headers and stage.front.counts.pulls == 0
        assert headers["X-Kvstreams-Kv-Sources"] == "rank=2/0;blocks=8;tier=device"
        assert not any(name.startswith("X-Kvstreams") for name in plain)
        assert stage.engines[0].bodies == [orjson.dumps(asked)] * 2


async def test_a_request_whose_pull_failed_is_sent_on_as_it_came(backend: Backend) -> None:
    """The next engine computes the prompt, or has it."""
    async with on_stage(backend, front_kv_pull_tokens_min=128, front_queue=False) as stage:
        stage.script(Script(status=500), Script())
        with busy(stage.router, 2):
            code, headers, _ = await stage.post(BODY, "/v1/completions", **DETAILS)
        assert (code, headers["X-Kvstreams-Worker"]) == (200, "2/0")
        assert "X-Kvstreams-Pulls-From" not in headers
        assert "kv_transfer_params" in sent(stage, 1)[0]
        assert stage.engines[1].bodies == [orjson.dumps(BODY)]


async def test_a_prefill_worker_pulls_from_another_one() -> None:
    """One request has both: the engine pulls what it lacks, and keeps the prompt for the decode worker."""
    with fleet(Role.PREFILL, Role.DECODE, Role.PREFILL) as backend:
        options: dict[str, Any] = {"front_remote_prefill_tokens_min": 0, "front_kv_pull_tokens_min": 128}
        async with on_stage(backend, **options) as stage:
            answer = orjson.dumps({"choices": [], "kv_transfer_params": {"remote_block_ids": [1]}})
            stage.script(Script(answer=answer, piece=len(answer)), Script(), Script())
            with busy(stage.router, 3):
                code, headers, _ = await stage.post(BODY, "/v1/completions", **DETAILS)
            assert (code, headers["X-Kvstreams-Prefill-Worker"]) == (200, "1/0")
            params = without_id(sent(stage, 1)[0]["kv_transfer_params"])
            assert params["do_remote_decode"] is True
            assert params["remote_kv_source"] == {"remote_host": "127.0.0.1", "remote_port": PORT}
            assert sent(stage, 2) == [{**BODY, "kv_transfer_params": {"remote_block_ids": [1]}}]
            assert stage.front.counts.pulls == 1
