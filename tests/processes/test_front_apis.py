"""The calls of the front that do not complete a prompt or a chat, on real sockets, with scripted engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from streams.core.workers import Role
from streams.frontend.requests import Kind
from streams.lab.engines.chat_template import tokenizer_files
from streams.settings import Settings
from tests.helpers.front_stage import Backend, Stage, on_stage
from tests.helpers.local_router import local_router, register
from tests.helpers.scripted_engine import Script, ScriptedEngine, scripted_engines

#: A request and an answer of each call that generates nothing, with a field that no front knows.
PAGES: dict[str, tuple[Any, Any]] = {
    "/v1/embeddings": (
        {"model": "m", "input": ["a text", "another"], "odd": [1.50]},
        {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 3}},
    ),
    "/tokenize": ({"prompt": "a text", "odd": None}, {"count": 2, "tokens": [1, 2], "max_model_len": 99}),
    "/detokenize": ({"model": "m", "tokens": [1, 2]}, {"prompt": "a text"}),
}


class WithEveryCall(ScriptedEngine):
    """An engine that answers every call with its script's answer.

    paths: the calls. scripts: of the next requests, in place of `script`; a list that engines may share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.scripts: list[Script] = []

    def routes(self) -> list[web.RouteDef]:
        """The calls that it serves."""
        return [web.post(kind, self._noted) for kind in Kind]

    async def _noted(self, http: web.Request) -> web.StreamResponse:
        self.paths.append(http.path)
        self.script = self.scripts.pop(0) if self.scripts else self.script
        return await self._serve(http)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """Give a router and two engines. No engine is avoided after a test in which it failed."""
    with (
        local_router(Settings(router_avoid_s=0.0), n_workers=0) as router,
        scripted_engines(2, WithEveryCall) as engines,
    ):
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)
        yield router, list(engines)


def chosen(stage: Stage, headers: Any) -> ScriptedEngine:
    """The engine that the router chose."""
    return stage.engines[int(headers["X-Kvstreams-Worker"].partition("/")[0]) - 1]


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_and_its_request_pass_through_unchanged(backend: Backend, path: str) -> None:
    """The engine gets the bytes of the body at the same path, and the client those of the answer."""
    body, page = PAGES[path]
    async with on_stage(backend) as stage:
        stage.script(*[Script(page=orjson.dumps(page))] * 2)
        raw = orjson.dumps(body) + b"\n "
        async with (
            aiohttp.ClientSession() as session,
            session.post(stage.url + path, data=raw, headers={"X-Kvstreams-Details": "1"}) as response,
        ):
            assert (response.status, await response.read()) == (200, orjson.dumps(page))
            engine = chosen(stage, response.headers)
        assert engine.bodies == [raw]
        assert isinstance(engine, WithEveryCall) and engine.paths[-1] == path
        assert stage.front.counts.outcomes == {"completed": 1}


@pytest.mark.parametrize("path", PAGES)
async def test_calls_that_generate_nothing_are_routed_by_load_and_have_no_output(
    backend: Backend, tmp_path: Path, path: str
) -> None:
    """Also with the model's tokenizer: what the engine says is the truth, so it is asked in any case."""
    body, page = PAGES[path]
    for name, text in tokenizer_files().items():
        (tmp_path / name).write_text(text)
    async with on_stage(backend, {"tokenizers": {"m": tmp_path}}) as stage:
        stage.script(*[Script(page=orjson.dumps(page | {"usage": {"completion_tokens": 7}}))] * 2)
        raw = {**body, "max_tokens": 500, "n": 9}
        code, headers, _ = await stage.post(raw, path, **{"X-Kvstreams-Details": "1"})
        assert (code, headers["X-Kvstreams-Mode"]) == (200, "fallback")
        # The front's own probes of the tokenizer are also sent to engines.
        assert sum(engine.bodies.count(orjson.dumps(raw)) for engine in stage.engines) == 1
        assert stage.front.counts.sources == {"none": 1}
        assert stage.front.counts.output_tokens == 0


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("failure", [Script(status=503), Script(breaks_at=0)])
async def test_another_engine_serves_what_one_could_not(backend: Backend, path: str, failure: Script) -> None:
    """An answer that is a page is passed on when it is whole, so no failure reaches the client."""
    body, page = PAGES[path]
    async with on_stage(backend) as stage:
        scripts = [failure, Script(page=orjson.dumps(page))]
        for engine in stage.engines:
            assert isinstance(engine, WithEveryCall)
            engine.scripts = scripts
        assert (await stage.post(body, path))[::2] == (200, orjson.dumps(page))
        assert [len(engine.bodies) for engine in stage.engines] == [1, 1]
        assert stage.front.counts.retries == 1


@pytest.mark.parametrize("status", [400, 404])
async def test_a_refusal_by_the_engine_reaches_the_client(backend: Backend, status: int) -> None:
    """Such as that of a model which makes no embeddings."""
    async with on_stage(backend) as stage:
        refusal = b'{"error": {"message": "no embeddings", "type": "NotFoundError", "param": null, "code": 404}}'
        stage.script(*[Script(status=status, refusal=refusal)] * 2)
        assert (await stage.post(PAGES["/v1/embeddings"][0], "/v1/embeddings"))[::2] == (status, refusal)
        assert sum(len(engine.bodies) for engine in stage.engines) == 1


async def test_calls_that_generate_nothing_need_no_second_worker() -> None:
    """Where prompts are computed on prefill workers, one worker of either role serves them whole."""
    with local_router(Settings(), n_workers=0) as router, scripted_engines(2, WithEveryCall) as engines:
        for number, (engine, role) in enumerate(zip(engines, (Role.PREFILL, Role.DECODE), strict=True), start=1):
            register(router.router, number, url=engine.url, role=role)
        async with on_stage((router, list(engines)), front_remote_prefill_tokens_min=0) as stage:
            for path, (body, page) in PAGES.items():
                stage.script(*[Script(page=orjson.dumps(page))] * 2)
                assert (await stage.post(body, path))[::2] == (200, orjson.dumps(page))
            assert sum(len(engine.bodies) for engine in stage.engines) == len(PAGES)
            assert not stage.front.counts.splits


@pytest.mark.parametrize("path", PAGES)
async def test_they_need_the_right_to_generate(backend: Backend, tmp_path: Path, path: str) -> None:
    """No engine is asked for a client without a token, or with one for pages of metrics."""
    file = tmp_path / "tokens.toml"
    tokens = {"generate": "g" * 20, "read": "r" * 20}
    file.write_text("".join(f'[{right}]\ntoken = "{token}"\nrights = ["{right}"]\n' for right, token in tokens.items()))
    body, page = PAGES[path]
    async with on_stage(backend, tokens_file=str(file)) as stage:
        stage.script(*[Script(page=orjson.dumps(page))] * 2)
        assert (await stage.post(body, path))[0] == 401
        assert (await stage.post(body, path, Authorization=f"Bearer {tokens['read']}"))[0] == 403
        assert not any(engine.bodies for engine in stage.engines)
        assert (await stage.post(body, path, Authorization=f"Bearer {tokens['generate']}"))[0] == 200
