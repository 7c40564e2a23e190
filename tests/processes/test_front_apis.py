"""The calls of the front other than completions and chats, on real sockets, with scripted engines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from streams.core.workers import Role
from streams.frontend.render_audit import Rendering
from streams.lab.engines.chat_template import tokenizer_files
from streams.prompts.calls import Kind
from streams.settings import Settings
from tests.helpers.front_stage import Backend, Stage, on_stage
from tests.helpers.local_router import local_router, register
from tests.helpers.pages import block_of
from tests.helpers.scripted_engine import Script, ScriptedEngine, scripted_engines

#: A request and an answer of each call that generates nothing, with a field that no front knows.
PAGES: dict[str, tuple[Any, Any]] = {
    "/v1/embeddings": (
        {"model": "m", "input": ["a text", "another"], "odd": [1.50]},
        {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 3}},
    ),
    "/v1/messages/count_tokens": (
        {"model": "m", "messages": [{"role": "user", "content": "a text"}]},
        {"input_tokens": 9, "context_management": {"original_input_tokens": 9}},
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


def sse(*events: dict[str, Any]) -> list[bytes]:
    """Events as vLLM sends them for both APIs."""
    return [f"event: {event['type']}\ndata: ".encode() + orjson.dumps(event) + b"\n\n" for event in events]


#: A streamed request of each API for agents, and its answer: the events before the first token, and those from it on.
AGENTS: dict[str, tuple[dict[str, Any], list[bytes], list[bytes]]] = {
    "/v1/responses": (
        {"model": "m", "input": "hello", "stream": True, "max_output_tokens": 9},
        sse(
            {"type": "response.created", "response": {"id": "resp_1", "error": None}, "sequence_number": 0},
            {"type": "response.in_progress", "response": {"id": "resp_1"}, "sequence_number": 1},
            {"type": "response.output_item.added", "item": {}, "sequence_number": 2},
        ),
        sse(
            {"type": "response.output_text.delta", "delta": "a", "sequence_number": 3},
            {"type": "response.output_text.delta", "delta": "b", "sequence_number": 4},
            {"type": "response.completed", "response": {"usage": {"output_tokens": 77}}, "sequence_number": 5},
        ),
    ),
    "/v1/messages": (
        {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 9},
        sse(
            {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 4, "output_tokens": 0}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        ),
        sse(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 77}},
            {"type": "message_stop"},
        ),
    ),
}


@pytest.mark.parametrize("path", AGENTS)
async def test_a_stream_of_an_agents_call_passes_through_unchanged(backend: Backend, path: str) -> None:
    """Its tokens are those of its usage. It needs the engine of the model to render, which these engines do not."""
    body, before, after = AGENTS[path]
    async with on_stage(backend, front_migration=True) as stage:
        answer = b"".join(before + after)
        stage.script(*[Script(answer=answer)] * 2)
        # Anthropic's client asks for features of its next version with a query.
        code, headers, got = await stage.post(body, f"{path}?beta=true", **{"X-Kvstreams-Details": "1"})
        assert (code, got, headers["X-Kvstreams-Mode"]) == (200, answer, "fallback")
        assert orjson.dumps(body) in chosen(stage, headers).bodies
        assert stage.front.counts.output_tokens == 77


@pytest.mark.parametrize("path", AGENTS)
async def test_an_agents_call_is_routed_by_the_chat_that_the_engine_makes_of_it(
    backend: Backend, tmp_path: Path, path: str
) -> None:
    """With the model's tokenizer the front renders it; not if the engine has the beginning of the prompt."""
    body, before, after = AGENTS[path]
    for name, text in tokenizer_files().items():
        (tmp_path / name).write_text(text)
    async with on_stage(backend, {"tokenizers": {"m": tmp_path}}) as stage:
        stage.script(*[Script(answer=b"".join(before + after))] * 2)
        for more, source in (({}, "files"), ({"input": 7, "messages": 7}, "none")):
            counted = stage.front.counts.sources[source]
            assert (await stage.post({**body, **more}, path))[0] == 200
            assert stage.front.counts.sources[source] == counted + 1


#: The usage of an answer to a prompt of n tokens, of which the engine had three in its cache.
USAGES: dict[str, Callable[[int], dict[str, Any]]] = {
    "/v1/responses": lambda n: {"input_tokens": n, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 3}},
    "/v1/messages": lambda n: {"input_tokens": n - 3, "output_tokens": 5, "cache_read_input_tokens": 3},
}


@pytest.mark.parametrize("path", AGENTS)
async def test_an_agents_prompt_is_compared_with_what_the_engine_had(
    backend: Backend, tmp_path: Path, path: str
) -> None:
    """Its usage is in the last events of a stream, and at the top of a page. Messages leave out cached tokens."""
    body, before, after = AGENTS[path]
    for name, text in tokenizer_files().items():
        (tmp_path / name).write_text(text)
    async with on_stage(backend, {"tokenizers": {"m": tmp_path}}) as stage:
        stage.script(*[Script(page=b"{}")] * 2)
        assert (await stage.post(body | {"stream": False}, path))[0] == 200
        counts = stage.front.counts
        n = counts.prompt_tokens
        assert n > 3 and not counts.renders.renderings
        for more, rendering in ((0, Rendering.SAME_LENGTH), (1, Rendering.OTHER_LENGTH)):
            usage = USAGES[path](n + more)
            stage.script(*[Script(page=orjson.dumps({"usage": usage}))] * 2)
            assert (await stage.post(body | {"stream": False}, path))[0] == 200
            last = sse(
                {"type": "response.completed", "response": {"usage": usage}}
                if path == "/v1/responses"
                else {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
            )
            stage.script(*[Script(answer=b"".join([*before, *after[:2], *last]))] * 2)
            assert (await stage.post(body, path))[0] == 200
            assert counts.renders.renderings[rendering] == 2
        assert counts.output_tokens == 4 * 5


async def test_the_page_shows_how_to_use_anthropics_client(backend: Backend) -> None:
    """Its example runs in another process, and prints the message that the engine gave."""
    code = block_of("docs/front.md", "from anthropic")
    message = {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "model": "my-model",
        "content": [{"type": "text", "text": "Good day"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 9, "output_tokens": 2},
    }
    async with on_stage(backend) as stage:
        stage.script(*[Script(page=orjson.dumps(message))] * 2)
        code = code.replace("http://localhost:8081", stage.url).replace("my-model", "m")
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        out, _ = await client.communicate()
    assert client.returncode == 0 and b"text='Good day'" in out


@pytest.mark.parametrize("path", AGENTS)
async def test_an_agents_call_is_served_whole_by_a_decode_worker(path: str) -> None:
    """Its prompt is not computed on a prefill worker, whose answers would delay the prompts of others."""
    body, before, after = AGENTS[path]
    with local_router(Settings(), n_workers=0) as router, scripted_engines(2, WithEveryCall) as engines:
        for number, (engine, role) in enumerate(zip(engines, (Role.PREFILL, Role.DECODE), strict=True), start=1):
            register(router.router, number, url=engine.url, role=role)
        async with on_stage((router, list(engines)), front_remote_prefill_tokens_min=0) as stage:
            stage.script(*[Script(answer=b"".join(before + after))] * 2)
            for _ in range(3):
                assert (await stage.post(body, path))[0] == 200
            assert [engine.bodies.count(orjson.dumps(body)) for engine in stage.engines] == [0, 3]
            assert stage.front.counts.splits == {"unsuitable": 3}


async def test_what_engines_keep_is_refused_in_the_shape_of_the_call(backend: Backend) -> None:
    """Also where an engine would keep it: the next request may go to another one."""
    body = AGENTS["/v1/responses"][0]
    async with on_stage(backend) as stage:
        for more, status, code in (
            ({"previous_response_id": "resp_1"}, 404, "unknown_id"),
            ({"background": True}, 400, "invalid_request"),
        ):
            got, _, raw = await stage.post(body | more, "/v1/responses")
            assert (got, orjson.loads(raw)["error"]["code"]) == (status, code)
            assert not any(orjson.dumps(body | more) in engine.bodies for engine in stage.engines)


@pytest.mark.parametrize("path", AGENTS)
@pytest.mark.parametrize("breaks", [0, 1, 2])
async def test_before_its_first_token_another_engine_takes_over(backend: Backend, path: str, breaks: int) -> None:
    """The events that begin an answer are held back, so the client sees one beginning."""
    body, before, after = AGENTS[path]
    answer = b"".join(before + after)
    async with on_stage(backend) as stage:
        scripts = [Script(answer=answer, breaks_at=len(b"".join(before[:breaks]))), Script(answer=answer)]
        for engine in stage.engines:
            assert isinstance(engine, WithEveryCall)
            engine.scripts = scripts
        assert (await stage.post(body, path))[::2] == (200, answer)
        assert stage.front.counts.retries == 1


@pytest.mark.parametrize("path", AGENTS)
async def test_after_its_first_token_it_ends_with_an_error_event_of_its_api(backend: Backend, path: str) -> None:
    """Such a stream does not migrate: the event says that the engine failed."""
    body, before, after = AGENTS[path]
    begun = b"".join([*before, *after[:2]])
    async with on_stage(backend, front_migration=True) as stage:
        stage.script(*[Script(answer=begun + b"more", breaks_at=len(begun))] * 2)
        code, _, got = await stage.post(body, path)
        assert code == 200 and got.startswith(begun)
        name, data = got[len(begun) :].rstrip(b"\n").split(b"\n")
        event = orjson.loads(data.removeprefix(b"data: "))
        assert (name, event["type"]) == (b"event: error", "error")
        error = event if path == "/v1/responses" else event["error"]
        assert "the engine failed after" in error["message"]
        assert f"Streams of {path} do not migrate" in error["message"]
        assert event.get("sequence_number", 5) == 5 == len([*before, *after[:2]]) + (path == "/v1/messages")
        assert stage.front.counts.outcomes == {"broken": 1}


async def test_errors_of_messages_have_anthropics_shape(backend: Backend, tmp_path: Path) -> None:
    """Those of the front and those of the router; other calls keep OpenAI's shape."""
    file = tmp_path / "tokens.toml"
    file.write_text(f'[a]\ntoken = "{"g" * 20}"\nrights = ["generate"]\n')
    body = AGENTS["/v1/messages"][0] | {"model": "other"}
    async with on_stage(backend, tokens_file=str(file)) as stage:
        for headers, status, type_ in (
            ({}, 401, "authentication_error"),
            ({"X-Api-Key": "g" * 19}, 401, "authentication_error"),
            ({"X-Api-Key": "g" * 20}, 404, "not_found_error"),
            ({"Authorization": "Bearer " + "g" * 20, "X-Api-Key": "x"}, 404, "not_found_error"),
        ):
            code, _, raw = await stage.post(body, "/v1/messages", **headers)
            page = orjson.loads(raw)
            assert (code, page["type"], page["error"]["type"]) == (status, "error", type_)
        code, _, raw = await stage.post(body | {"input": "x"}, "/v1/responses", **{"X-Api-Key": "g" * 20})
        assert (code, orjson.loads(raw)["error"]["code"]) == (404, "unknown_model")


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
