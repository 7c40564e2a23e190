"""A request that breaks every engine which gets it stops after two, and says nothing about the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from streams.client import KvRouterClient
from streams.client.failed_engines import FURTHER_TOKENS, FailedEngines
from streams.errors import EngineFailed
from streams.lab.kafka.ports import free_port
from streams.settings import Settings
from tests.helpers.front_stage import Backend, Stage, on_stage
from tests.helpers.local_router import local_router, register
from tests.helpers.scripted_engine import Script, ScriptedEngine, scripted_engines

POISON = {"model": "m", "prompt": [666] * 40, "max_tokens": 8}
OTHER = {"model": "m", "prompt": list(range(40)), "max_tokens": 8}


class FragileEngine(ScriptedEngine):
    """An engine that fails each request whose prompt begins with 666.

    breaks_at: bytes of the answer after which the connection ends; None answers 500 instead. is_dead: what /health
    says after that. poisoned: how many such requests came.
    """

    breaks_at: int | None = 0
    is_dead = True

    def __init__(self) -> None:
        super().__init__()
        self.poisoned = 0

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/health", self._health)]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_dead and self.poisoned else 200)

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        first = body["prompt"][0]
        if (first[0] if isinstance(first, list) else first) != 666:
            return await super()._serve(http)
        self.poisoned += 1
        if self.breaks_at is None:
            return web.json_response({"error": {"message": "EngineCore encountered an issue", "code": 500}}, status=500)
        if self.breaks_at:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http)
            await response.write(self.events()[: self.breaks_at])
        assert http.transport is not None
        http.transport.close()
        return web.Response()

    @staticmethod
    def events() -> bytes:
        """Return the answer as an engine with token ids sends it."""
        pages = [
            {"choices": [{"index": 0, "text": f"t{at}", "token_ids": [at], "finish_reason": None}]} for at in range(40)
        ]
        return b"".join(b"data: " + orjson.dumps(page) + b"\n\n" for page in pages)


@contextmanager
def fleet(n: int = 6, **changes: Any) -> Iterator[Backend]:
    make: type[ScriptedEngine] = type("Engine", (FragileEngine,), changes)
    with local_router(Settings(), n_workers=0) as router, scripted_engines(n, make) as engines:
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)
        yield router, engines


def poisoned(stage: Stage) -> int:
    """How many times engines got the request."""
    return sum(engine.poisoned for engine in stage.engines if isinstance(engine, FragileEngine))


def avoided(stage: Stage) -> int:
    return sum(row["avoided_ms"] > 0 for row in stage.router.api.workers().values())


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_breaks_connections_reaches_two_engines_over_all_repetitions(stream: bool) -> None:
    """Neither other fields of the answer nor another order of fields make it another request; others are served."""
    repetitions = [
        POISON,
        POISON,
        dict(reversed(POISON.items())),
        {**POISON, "user": "someone", "seed": 7},
        {**POISON, "stream": not stream},
    ]
    with fleet() as backend:
        async with on_stage(backend) as stage:
            for body in repetitions:
                status, _, page = await stage.post({"stream": stream, **body}, "/v1/completions")
                assert status == 502 and b"has broken the engines of 2 workers" in page
                assert (await stage.post({**OTHER, "stream": stream}, "/v1/completions"))[0] == 200
            assert poisoned(stage) == 2
            assert stage.front.counts.outcomes["withheld"] == len(repetitions)
            assert await asyncio.to_thread(avoided, stage) == 0


@pytest.mark.parametrize("tokens", [1, 3, 30])
async def test_a_stream_that_breaks_engines_after_some_tokens_migrates_once(tokens: int) -> None:
    """The rest of the answer says why, and no engine is avoided."""
    with fleet(breaks_at=len(b"".join(FragileEngine.events().split(b"\n\n")[:tokens])) + 2 * tokens) as backend:
        async with on_stage(backend, front_migration=True) as stage:
            for _ in range(3):
                status, *_ = await stage.post({**POISON, "max_tokens": 100, "stream": True}, "/v1/completions")
            assert status == 502
            if tokens < FURTHER_TOKENS:
                assert poisoned(stage) == 2
                assert await asyncio.to_thread(avoided, stage) == 0
            else:  # each engine has got further than the one before, so that it seems to be the engines
                assert poisoned(stage) <= 2 + stage.front.settings.front_migrations_max


async def test_an_engine_whose_core_has_ended_counts_although_it_answers() -> None:
    """It answers 500, and its /health says that it does not work."""
    with fleet(breaks_at=None) as backend:
        async with on_stage(backend) as stage:
            for _ in range(3):
                assert (await stage.post(POISON, "/v1/completions"))[0] in (500, 502)
            assert poisoned(stage) == 2


async def test_an_engine_that_only_answers_500_is_not_broken() -> None:
    """A request gets as many engines as the setting says, each time."""
    with fleet(breaks_at=None, is_dead=False) as backend:
        async with on_stage(backend) as stage:
            for _ in range(2):
                assert (await stage.post(POISON, "/v1/completions"))[0] == 500
            assert poisoned(stage) == 2 * stage.front.settings.front_attempts_max
            assert await asyncio.to_thread(avoided, stage) == 0


async def test_another_request_with_the_same_beginning_is_not_withheld() -> None:
    """The whole request counts, so a client can leave out what breaks engines."""
    with fleet() as backend:
        async with on_stage(backend) as stage:
            await stage.post(POISON, "/v1/completions")
            await stage.post({**POISON, "prompt": [666] * 41}, "/v1/completions")
            assert poisoned(stage) == 4


async def test_engines_that_cannot_be_reached_do_not_count_against_a_request() -> None:
    """It is sent on until it finds an engine, and those that could not be reached are avoided."""
    with fleet(3) as backend:
        router, engines = backend
        for number in (1, 2):
            register(router.router, number, url=f"http://127.0.0.1:{free_port()}")
        async with on_stage(backend) as stage:
            for _ in range(5):
                assert (await stage.post(OTHER, "/v1/completions"))[0] == 200
            assert stage.front.counts.outcomes["withheld"] == 0
            for number, engine in enumerate(engines, start=1):
                register(router.router, number, url=engine.url)


async def test_a_request_that_one_engine_breaks_off_marks_this_engine_once_another_has_served_it() -> None:
    """A failure that does not follow the request is the engine's."""
    with fleet(3) as backend:
        async with on_stage(backend) as stage:
            stage.script(Script(breaks_at=0), Script(), Script())
            async with asyncio.timeout(20):
                while not stage.front.proxy.failures_reported:
                    body = {**OTHER, "stream": True, "prompt": [7, *range(stage.front.counts.retries, 40)]}
                    await stage.post(body, "/v1/completions")


async def test_the_client_sends_a_request_to_two_engines_as_well() -> None:
    """`generate` raises the failure, and no engine is avoided."""
    with fleet() as backend:
        router, engines = backend
        async with KvRouterClient(router.api.url) as client:
            for _ in range(2):
                with pytest.raises(EngineFailed):
                    await client.generate([666] * 40, stop_conditions={"max_tokens": 4})
            assert sum(engine.poisoned for engine in engines if isinstance(engine, FragileEngine)) == 2
            assert all(row["avoided_ms"] == 0 for row in (await asyncio.to_thread(router.api.workers)).values())


async def test_streams_that_ran_on_an_engine_are_not_suspected_of_what_a_new_request_did() -> None:
    """A stream that loses two engines to a request which has just begun there goes on at a third one."""

    class Router:
        async def avoid(self, worker_id: int) -> bool:
            return worker_id > 0

    engines = FailedEngines(Router())
    for worker_id in (1, 2):
        engines.broke(b"running", worker_id, young=False)
        engines.broke(b"new", worker_id, young=True)
    assert engines.breaks_engines(b"new") and not engines.breaks_engines(b"running")
    await engines.close()
