"""A front between clients and engines that the test scripts, all in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from streams.frontend.server import Front, FrontOptions
from streams.process.http_server import HttpServer
from streams.security.access import Access
from streams.settings import Settings
from tests.helpers.byte_engine import Plan
from tests.helpers.local_router import LocalRouter
from tests.helpers.scripted_engine import Script, ScriptedEngine

#: Only a hang is a failure. Nothing here is a measurement.
PATIENCE_S = 30.0
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
IDS = {"model": "m", "prompt": list(range(40)), "stream": True}


class Stage:
    """A front with its router and engines. url: the front's."""

    def __init__(self, front: Front, url: str, router: LocalRouter, engines: list[ScriptedEngine]) -> None:
        self.front = front
        self.url = url
        self.router = router
        self.engines = engines

    def script(self, *scripts: Script) -> None:
        for engine, script in zip(self.engines, scripts, strict=True):
            engine.script = script

    async def post(
        self, body: Any = None, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, Any, bytes]:
        """Return status, headers and body."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=orjson.dumps(body or BODY), headers=headers) as response,
        ):
            return response.status, response.headers, await response.read()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"still waiting for {what}") from None

    async def until_free(self) -> None:
        """Wait until neither the front, the engines nor the router have a request, and all reports are sent."""

        def active() -> int:
            loads = self.router.api.get("/loads")["loads"]
            return sum(row["active_requests"] for row in loads)

        await self.until(lambda: len(self.front.proxy) == 0, "the front's requests")
        await self.until(lambda: sum(engine.n_open for engine in self.engines) == 0, "the engines' requests")
        async with asyncio.timeout(PATIENCE_S):
            while await asyncio.to_thread(active):
                await asyncio.sleep(0.01)
        assert self.front.router.reports_lost == 0


Backend = tuple[LocalRouter, list[ScriptedEngine]]


@asynccontextmanager
async def on_stage(
    backend: Backend,
    options: dict[str, Any] | None = None,
    patience_s: float = 2 * PATIENCE_S,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """A front of its own; afterwards every booking must have ended."""
    router, engines = backend
    own = Settings(**settings)
    access = Access(own)
    front = Front(own, FrontOptions((router.api.url,), **(options or {})), access)
    server = HttpServer("127.0.0.1", 0, access=access)
    try:
        await front.start()
        await server.serve(front.runner())
        stage = Stage(front, server.url, router, engines)
        for engine in engines:
            engine.script, engine.received, engine.bodies = Script(), [], []
            engine.counts.clear()
        async with asyncio.timeout(patience_s):
            yield stage
            await stage.until_free()
    finally:
        await server.close()
        await front.close()


class Answer:
    """What a client got, read as OpenAI's clients read it."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        lines = body.split(b"\n")
        data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
        self.ended = bool(data) and data[-1] == b"[DONE]"
        self.comments = [line for line in lines if line.startswith(b":")]
        pages = [orjson.loads(each) for each in data if each != b"[DONE]"]
        self.error: Any = next((page["error"] for page in pages if "error" in page), None)
        self.figures: Any = next((page["kvstreams_migration"] for page in pages if "kvstreams_migration" in page), None)
        self.usages: list[Any] = [page["usage"] for page in pages if page.get("usage")]
        self.usage: Any = self.usages[0] if self.usages else None
        chunks = [page for page in pages if page.get("choices")]
        self.frames = {(page["id"], page["object"], page["created"]) for page in chunks}
        choices = [page["choices"][0] for page in chunks]
        self.roles = sum("role" in each.get("delta", {}) for each in choices)
        self.text = "".join(each["delta"].get("content") or "" if "delta" in each else each["text"] for each in choices)
        self.token_ids = [each for choice in choices for each in choice.get("token_ids") or []]
        self.has_ids = any("token_ids" in each for each in choices) or any("prompt_token_ids" in p for p in pages)
        self.finish_reasons = [each["finish_reason"] for each in choices if each["finish_reason"] is not None]


def share(engines: Sequence[Any], *plans: Plan) -> None:
    """Give engines one list of plans."""
    shared = list(plans)
    for engine in engines:
        engine.plans = shared
