"""Calls that are made of engines: preflights of browsers, `/health`, and paths that end with a slash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from streams.lab.kafka.ports import free_port
from streams.process.http_server import HttpServer, Startup, monitoring_app, starting_app
from streams.security.access import Access
from streams.settings import Settings
from tests.helpers.front_stage import BODY, Backend, Stage, on_stage
from tests.helpers.local_router import local_router, register
from tests.helpers.scripted_engine import ScriptedEngine, scripted_engines

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with local_router(Settings(), n_workers=0) as router, scripted_engines(1, ScriptedEngine) as engines:
        register(router.router, 1, url=engines[0].url)
        yield router, engines


@pytest.fixture
def tokens_file(tmp_path: Path) -> str:
    file = tmp_path / "tokens.toml"
    file.write_text('[client]\ntoken = "0123456789abcdef0123456789abcdef"\nrights = ["generate"]\n')
    file.chmod(0o600)
    return str(file)


async def call(stage: Stage, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, stage.url + path, json=body, headers=headers, allow_redirects=False) as response,
    ):
        return response.status, response.headers, await response.read()


@pytest.mark.parametrize("origins", [PAGE, f"http://x, {PAGE}/", "*"])
async def test_a_page_of_an_allowed_origin_may_call_the_front(backend: Backend, origins: str) -> None:
    """Its preflight is answered, and it may read the headers of streams, of whole answers and of errors."""
    async with on_stage(backend, front_cors_origins=origins) as stage:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/models"):
            status, headers, _ = await call(stage, "OPTIONS", path, **PREFLIGHT)
            assert status == 204
            assert headers["Access-Control-Allow-Origin"] == PAGE
            assert "POST" in headers["Access-Control-Allow-Methods"]
            assert headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        asked = {"Origin": PAGE, "X-Kvstreams-Details": "1"}
        answers = [
            await call(stage, "POST", "/v1/chat/completions", BODY, **asked),
            await call(stage, "POST", "/v1/chat/completions", {**BODY, "stream": False}, **asked),
            await call(stage, "POST", "/v1/completions", {"model": "none", "prompt": [1]}, **asked),
            await call(stage, "GET", "/v1/models", **asked),
            await call(stage, "GET", "/nothing", **asked),
        ]
        assert [status for status, *_ in answers] == [200, 200, 404, 200, 404]
        for _, headers, _ in answers:
            assert headers.getall("Access-Control-Allow-Origin") == [PAGE]
            assert "X-Kvstreams-Worker" in headers["Access-Control-Expose-Headers"]
            assert headers["Vary"] == "Origin"


@pytest.mark.parametrize("origins", ["", "https://other.example.org"])
async def test_a_page_of_another_origin_may_not(backend: Backend, origins: str) -> None:
    """The preflight is refused as before, and no answer names the page."""
    async with on_stage(backend, front_cors_origins=origins) as stage:
        status, headers, _ = await call(stage, "OPTIONS", "/v1/chat/completions", **PREFLIGHT)
        assert status == 405 and "Access-Control-Allow-Origin" not in headers
        _, headers, _ = await call(stage, "POST", "/v1/chat/completions", BODY, Origin=PAGE)
        assert "Access-Control-Allow-Origin" not in headers


async def test_a_preflight_needs_no_token_and_a_request_does(backend: Backend, tokens_file: str) -> None:
    """A browser sends no token with a preflight; the refusal of the request itself can be read by the page."""
    async with on_stage(backend, front_cors_origins=PAGE, tokens_file=tokens_file) as stage:
        assert (await call(stage, "OPTIONS", "/v1/chat/completions", **PREFLIGHT))[0] == 204
        status, headers, _ = await call(stage, "POST", "/v1/chat/completions", BODY, Origin=PAGE)
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, PAGE)
        authorized = {"Origin": PAGE, "Authorization": "Bearer 0123456789abcdef0123456789abcdef"}
        assert (await call(stage, "POST", "/v1/chat/completions", BODY, **authorized))[0] == 200


@pytest.mark.parametrize("names", ["x" * 5000, "a\tb"])
async def test_a_list_of_headers_that_is_none_is_not_repeated(backend: Backend, names: str) -> None:
    """The preflight is answered without it."""
    async with on_stage(backend, front_cors_origins="*") as stage:
        asked = {**PREFLIGHT, "Access-Control-Request-Headers": names}
        status, headers, _ = await call(stage, "OPTIONS", "/v1/chat/completions", **asked)
        assert status == 204 and "Access-Control-Allow-Headers" not in headers


async def test_paths_of_the_front_may_end_with_a_slash(backend: Backend, tokens_file: str) -> None:
    """The answers are those without it, and /health needs no token."""
    async with on_stage(backend) as stage:
        for path in ("/v1/models", "/v1/models/m", "/health", "/healthz", "/ready", "/metrics"):
            assert (await call(stage, "GET", path))[0] == 200
            assert (await call(stage, "GET", path + "/"))[0] == 200
        assert (await call(stage, "GET", "/v1/models/"))[2] == (await call(stage, "GET", "/v1/models"))[2]
        assert (await call(stage, "POST", "/v1/chat/completions/", BODY))[0] == 200
        assert (await call(stage, "POST", "/v1/completions/?a=b", {**BODY, "prompt": [1, 2]}))[0] == 200
    async with on_stage(backend, tokens_file=tokens_file) as stage:
        for path in ("/health", "/health/", "/healthz"):
            assert (await call(stage, "GET", path))[0] == 200
        assert (await call(stage, "GET", "/metrics/"))[0] == 401


async def test_routers_bridges_and_processes_that_start_have_health(backend: Backend) -> None:
    """It says what /healthz says."""
    assert backend[0].api.call("GET", "/health").given() == backend[0].api.call("GET", "/healthz").given()
    for app in (starting_app(Startup()), monitoring_app(lambda: "not yet", [], Access(Settings()))):
        server = HttpServer("127.0.0.1", free_port(), access=Access(Settings()))
        await server.serve(app)
        try:
            async with aiohttp.ClientSession() as session:
                for path in ("/health", "/healthz"):
                    async with session.get(server.url + path) as response:
                        assert (response.status, await response.json()) == (200, {"status": "ok"})
        finally:
            await server.close()
