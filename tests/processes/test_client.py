"""The client over HTTP with real routers, engines and connections: every path on which a request can end.

The routers have no Kafka: their registry is filled by hand, and bookings stay with each of them. Tests with Kafka are
in tests/kafka/test_client.py.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from streams.client import Booking, EngineOptions, Generation, KvRouterClient, generation, http
from streams.client.payloads import pack_tokens, unpack_tokens
from streams.core.hashing import local_hashes
from streams.core.ids import WorkerId
from streams.core.routing.selection import RouterMode
from streams.errors import (
    EngineFailed,
    EngineRefused,
    InvalidRequest,
    KvStreamsError,
    NoEligibleWorker,
    NotReady,
    QueueFull,
    QueueTimeout,
    RouterUnavailable,
    UnknownModel,
)
from streams.kafka.clients import worker_key
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.server import SimServer, SimServerConfig, serve
from streams.lab.engines.synthetic_tokens import greedy_tokens
from streams.lab.kafka.ports import free_port
from streams.process.http_server import HttpServer, Startup, starting_app
from streams.settings import Settings
from tests.helpers.api import metrics
from tests.helpers.local_router import LocalRouter, hold, local_router, rank
from tests.helpers.local_router import register as register_at

PATIENCE_S = 60.0
BLOCK_SIZE = 16
PROMPT = list(range(1000, 1000 + 4 * BLOCK_SIZE))
#: A prompt that no engine has seen, for tests that count what is not cached.
COLD = list(range(9000, 9000 + 4 * BLOCK_SIZE))

ENGINE = EngineConfig(block_size=BLOCK_SIZE, n_blocks=16_384)

#: An engine whose tokens are all due at once.
FAST = SimServerConfig(engine=ENGINE, model="m", time_scale=1000.0)

#: An engine that takes about a second for a hundred tokens.
SLOW = SimServerConfig(engine=ENGINE, model="m", time_scale=2.0)


def register(local: LocalRouter, worker_id: int, url: str) -> None:
    """Register a worker at the address of an engine."""
    register_at(local.router, worker_id, url=url)


def loads(local: LocalRouter) -> dict[int, tuple[int, int, int]]:
    """Active prefill tokens, decode blocks and requests of each worker."""
    return {
        row["worker_id"]: (row["active_prefill_tokens"], row["active_decode_blocks"], row["active_requests"])
        for row in local.router.rank_loads()["loads"]
    }


def active(local: LocalRouter) -> int:
    """Requests that this router has bookings for."""
    return sum(n for _, _, n in loads(local).values())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; the test's own timeout ends the wait."""
    while not condition():
        await asyncio.sleep(0.005)


@contextmanager
def routers(n: int = 1, **settings: Any) -> Iterator[list[LocalRouter]]:
    """Give n routers, whose workers are still to be registered."""
    with ExitStack() as stack:
        own = Settings(block_size=BLOCK_SIZE, **settings)
        yield [stack.enter_context(local_router(own, n_workers=0)) for _ in range(n)]


@pytest.fixture(scope="module")
def router() -> Iterator[LocalRouter]:
    """Give a router that the tests of this module share; each registers its own worker ids and leaves no booking."""
    with routers(router_avoid_s=0.0) as (local,):  # a failure of one test must not matter to the next one
        yield local


@asynccontextmanager
async def engine_at(local: LocalRouter, worker_id: int, config: SimServerConfig = FAST) -> AsyncIterator[SimServer]:
    """Run a simulated engine as the engine of this worker."""
    engine = await serve(config)
    register(local, worker_id, engine.http_url)
    try:
        yield engine
    finally:
        await engine.stop()
        remove(local, worker_id)


def remove(local: LocalRouter, worker_id: int) -> None:
    local.router.view.fold_worker(worker_key(WorkerId(worker_id)), None)


@asynccontextmanager
async def broken_engine(
    local: LocalRouter, worker_id: int, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> AsyncIterator[list[str | None]]:
    """Run an engine that answers in its own way; gives a list with the rank that each of its requests names."""
    ranks: list[str | None] = []

    async def noted(request: web.Request) -> web.StreamResponse:
        ranks.append(request.headers.get("X-data-parallel-rank"))
        return await answer(request)

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/v1/completions", noted)])
    server = HttpServer("127.0.0.1", 0)
    await server.serve(web.AppRunner(app, access_log=None, shutdown_timeout=0.1))
    register(local, worker_id, "http://{}:{}".format(*server.address))
    try:
        yield ranks
    finally:
        await server.close()
        remove(local, worker_id)


# -- generating --------------------------------------------------------------------------------------------------------


async def test_an_answer_has_the_tokens_of_the_engine_and_is_reported_to_its_end(router: LocalRouter) -> None:
    """The booking loses its prefill tokens at the first token, grows with the answer, and ends with it."""
    async with engine_at(router, 1, SLOW) as engine, KvRouterClient(router.api.url) as client:
        options: dict[str, Any] = {
            "stop_conditions": {"max_tokens": 150, "ignore_eos": True},
            "sampling_options": {"seed": 5},
        }
        answer = await client.generate(token_ids=PROMPT, model=None, **options)
        assert (answer.booking.worker_id, answer.booking.request_blocks) == (1, 4)
        assert loads(router)[1][2] == 1
        tokens: list[int] = []
        reasons: list[str | None] = []
        grown = False
        async for chunk in answer:
            tokens += chunk["token_ids"]
            reasons.append(chunk["finish_reason"])
            if len(tokens) > generation.OUTPUT_REPORT_TOKENS and not grown:
                # 4 blocks of the prompt, and at least 64 tokens of the answer.
                await until(lambda: loads(router)[1][:2] >= (0, 8) and loads(router)[1][0] == 0)
                grown = True
        assert grown
        assert answer.output_tokens == len(tokens) == 150
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        again = await client.generate(PROMPT, **options)
        assert [token async for chunk in again for token in chunk["token_ids"]] == tokens
        await until(lambda: active(router) == 0)
        assert engine.model.stats().n_running == 0
        assert client.reports_lost == 0


async def test_an_override_of_a_request_reaches_the_router(router: LocalRouter) -> None:
    """With weight 0 the index is not read; the example of the issue is accepted as it is written."""
    async with engine_at(router, 1), KvRouterClient([router.api.url]) as client:
        answer = await client.generate(
            token_ids=PROMPT,
            model="m",
            stop_conditions={"max_tokens": 20, "ignore_eos": True},
            sampling_options={"temperature": 0.7, "top_p": 0.9},
            router_config_override={"overlap_score_weight": 2.0, "router_temperature": 0.5},
            worker_id=None,
        )
        assert sum([len(chunk["token_ids"]) async for chunk in answer]) == 20
        plain = await client.book(PROMPT, {"overlap_score_weight": 0})
        assert (plain.mode, plain.worker_id) == ("fallback", 1)
        with pytest.raises(InvalidRequest, match="temperature"):
            await client.generate(PROMPT, router_config_override={"temperature": 1})
        plain.end()
        await until(lambda: active(router) == 0)


async def test_a_prompt_of_a_hundred_thousand_tokens_is_generated(router: LocalRouter) -> None:
    """The engine's first event repeats the prompt, and is longer than any line that aiohttp reads by itself."""
    async with engine_at(router, 1), KvRouterClient(router.api.url) as client:
        prompt = [100_000 + n for n in range(100_000)]
        answer = await client.generate(prompt, stop_conditions={"max_tokens": 3})
        assert answer.booking.request_blocks == len(prompt) // BLOCK_SIZE
        # In one chunk or in several, as the engine's loop found time.
        assert sum([len(chunk["token_ids"]) async for chunk in answer]) == 3


async def _break_off(answer: Generation) -> None:
    async with answer:
        async for _ in answer:
            break


async def _cancel(answer: Generation) -> None:
    async def read() -> None:
        async for _ in answer:
            pass

    reading = asyncio.create_task(read())
    await until(lambda: answer.output_tokens > 0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def _never_read(answer: Generation) -> None:
    pass


async def _end_early(answer: Generation) -> None:
    await answer.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(answer)


@pytest.mark.parametrize("leave", [_break_off, _cancel, _never_read, _end_early])
async def test_an_answer_that_is_left_ends_its_booking(
    router: LocalRouter, leave: Callable[[Generation], Awaitable[None]]
) -> None:
    """Whether the caller breaks off, is cancelled, drops the answer or closes it, while the client stays open."""
    async with engine_at(router, 1, SLOW), KvRouterClient(router.api.url) as client:
        answers = [await client.generate(PROMPT, stop_conditions={"max_tokens": 10_000})]
        assert active(router) == 1
        await leave(answers[0])
        answers.clear()
        gc.collect()
        await until(lambda: active(router) == 0)


async def test_a_client_that_closes_ends_what_is_still_running(router: LocalRouter) -> None:
    """Nothing is left behind, although the caller still has the answer and the booking."""
    async with engine_at(router, 1, SLOW):
        async with KvRouterClient(router.api.url) as client:
            answer = await client.generate(PROMPT, stop_conditions={"max_tokens": 10_000})
            booking = await client.book(PROMPT)
            assert active(router) == 2
        assert active(router) == 0
        assert booking.ended and answer.booking.ended
        with pytest.raises(RouterUnavailable, match="not open"):
            await client.book(PROMPT)


async def test_a_call_that_is_cancelled_leaves_no_booking(router: LocalRouter) -> None:
    """At whatever point of routing and connecting the caller is cancelled."""
    async with engine_at(router, 1, SLOW), KvRouterClient(router.api.url) as client:
        for n in range(40):
            call = asyncio.create_task(client.generate(PROMPT, stop_conditions={"max_tokens": 1000}))
            await asyncio.sleep(n * 0.0002)
            call.cancel()
            await asyncio.wait([call])
            del call
        await until(lambda: len(client._reports) == 0)
        gc.collect()
        await until(lambda: active(router) == 0)


# -- engines that fail -------------------------------------------------------------------------------------------------


async def _hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def _unavailable(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="loading the model")


async def _empty_stream(request: web.Request) -> web.StreamResponse:
    return web.Response(text="data: [DONE]\n\n", content_type="text/event-stream")


async def _no_stream(request: web.Request) -> web.StreamResponse:
    return web.Response(text="data: 5\n\n", content_type="text/event-stream")


async def _error_event(request: web.Request) -> web.StreamResponse:
    return web.Response(text='data: {"error": {"message": "out of memory", "code": 500}}\n\n')


@pytest.mark.parametrize("fail", [_hang_up, _unavailable, _empty_stream, _no_stream, _error_event])
async def test_an_engine_that_fails_before_its_first_token_is_replaced(
    router: LocalRouter, fail: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> None:
    """The booking moves, because the second route request excludes the worker that failed."""
    async with (
        engine_at(router, 2),
        broken_engine(router, 1, fail) as asked,
        KvRouterClient(router.api.url) as client,
    ):
        hold(router.router, rank(1), local_hashes(PROMPT, BLOCK_SIZE))
        answer = await client.generate(PROMPT, stop_conditions={"max_tokens": 4}, request_id="moves")
        first = answer.booking.worker_id
        assert sum([len(chunk["token_ids"]) async for chunk in answer]) == 4
        assert asked == [None]  # an engine with one rank has no number for it
        assert (first, answer.booking.worker_id) in ((1, 2), (2, 2))
        assert answer.booking.request_id == "moves"
        await until(lambda: active(router) == 0)


async def test_an_engine_that_cannot_be_reached_is_replaced_and_the_load_moves_with_the_booking(
    router: LocalRouter,
) -> None:
    """While the second engine answers, only its worker has the request."""
    register(router, 1, f"http://127.0.0.1:{free_port()}")
    hold(router.router, rank(1), local_hashes(PROMPT, BLOCK_SIZE))
    async with engine_at(router, 2, SLOW), KvRouterClient(router.api.url) as client:
        answer = await client.generate(PROMPT, stop_conditions={"max_tokens": 500})
        assert {worker: n for worker, (_, _, n) in loads(router).items()} == {1: 0, 2: 1}
        answer.close()
        await until(lambda: active(router) == 0)
    remove(router, 1)


@pytest.mark.parametrize(("fail", "is_avoided"), [(_hang_up, True), (_empty_stream, True), (_unavailable, False)])
async def test_an_engine_that_breaks_off_is_avoided_by_the_routers(
    fail: Callable[[web.Request], Awaitable[web.StreamResponse]], is_avoided: bool
) -> None:
    """One that answers with an error status can be reached, so it gets further requests of other clients."""

    def avoided_ms(local: LocalRouter) -> int:
        found: int = local.api.workers()[1]["avoided_ms"]
        return found

    with routers() as (local,):
        async with engine_at(local, 2), broken_engine(local, 1, fail), KvRouterClient(local.api.url) as client:
            hold(local.router, rank(1), local_hashes(PROMPT, BLOCK_SIZE))
            answer = await client.generate(PROMPT, stop_conditions={"max_tokens": 4})
            assert sum([len(chunk["token_ids"]) async for chunk in answer]) == 4
            if is_avoided:
                while not await asyncio.to_thread(avoided_ms, local):
                    await asyncio.sleep(0.005)
            else:
                await client.book(PROMPT)  # a call that comes after the report, if there was one
                assert await asyncio.to_thread(avoided_ms, local) == 0


async def test_without_another_engine_the_failure_is_raised(router: LocalRouter) -> None:
    """The error names the worker, and the booking ends. A worker that the caller chose is not replaced either."""
    async with broken_engine(router, 1, _hang_up) as asked, KvRouterClient(router.api.url) as client:
        with pytest.raises(EngineFailed, match="worker 1 failed") as caught:
            await client.generate(PROMPT, request_id="r")
        assert caught.value.detail == {"worker_id": 1, "request_id": "r", "output_tokens": 0}
        async with engine_at(router, 2):
            with pytest.raises(EngineFailed, match="worker 1"):
                await client.direct(1).generate(PROMPT)
        assert asked == [None, None]  # an engine with one rank has no number for it
        await until(lambda: active(router) == 0)


@pytest.mark.parametrize("how", ["dies", "stalls", "refuses"])
async def test_an_answer_goes_on_at_another_engine(router: LocalRouter, how: str) -> None:
    """Every token comes once, and the load moves with the booking."""
    n_tokens, n_before = 300, 7
    expected = unpack_tokens(greedy_tokens(pack_tokens(PROMPT), n_tokens))
    ended = asyncio.Event()

    async def begin(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for token in expected[:n_before]:
            choice = {"token_ids": [token], "text": chr(token), "finish_reason": None}
            await response.write(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
        if how == "refuses":
            await response.write(b'data: {"error": {"message": "x", "code": 503}}\n\ndata: [DONE]\n\n')
        elif how == "stalls":
            await ended.wait()
        assert request.transport is not None
        request.transport.close()
        return response

    hold(router.router, rank(1), local_hashes(PROMPT, BLOCK_SIZE))
    options = EngineOptions(stall_timeout_s=0.5)
    async with (
        broken_engine(router, 1, begin),
        engine_at(router, 2, SLOW),
        KvRouterClient(router.api.url, engine=options) as client,
    ):
        answer = await client.generate(PROMPT, stop_conditions={"max_tokens": n_tokens})
        assert answer.booking.worker_id == 1
        chunks = []
        async for chunk in answer:
            chunks.append(chunk)
            if len(chunks) == n_before + 1:
                assert {worker: n for worker, (_, _, n) in loads(router).items()} == {1: 0, 2: 1}
        assert [token for chunk in chunks for token in chunk["token_ids"]] == expected
        assert "".join(chunk["text"] for chunk in chunks) == "".join(map(chr, expected))
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]
        figures = answer.figures
        assert (figures.migrations, figures.tokens_prefilled_again) == (1, len(PROMPT) + n_before)
        assert answer.booking.worker_id == 2 and answer.output_tokens == n_tokens
        ended.set()
        await until(lambda: active(router) == 0)


async def test_answers_are_not_moved_if_the_caller_does_not_want_it(router: LocalRouter) -> None:
    """With migrations_max 0 the failure is raised, as it is if the answer cannot be moved."""

    async def begin(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"token_ids": [7], "text": "a", "finish_reason": null}]}\n\n')
        assert request.transport is not None
        request.transport.close()
        return response

    for options, extra, words in (
        (EngineOptions(migrations_max=0), {}, "1 engines failed"),
        (EngineOptions(), {"guided_regex": "a+"}, "guided_regex"),
    ):
        async with (
            broken_engine(router, 1, begin),
            broken_engine(router, 2, begin),
            KvRouterClient(router.api.url, engine=options) as client,
        ):
            answer = await client.generate(PROMPT, extra_args=extra)
            with pytest.raises(EngineFailed) as caught:
                _ = [chunk async for chunk in answer]
            assert caught.value.detail["output_tokens"] == 1
            assert words in caught.value.detail["not_moved_because"]
            await until(lambda: active(router) == 0)


async def test_an_engine_that_the_caller_chose_is_not_replaced(router: LocalRouter) -> None:
    """The caller already has a part of the answer, and learns how much and from which worker."""

    async def begin(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"token_ids": [7, 8], "text": "ab", "finish_reason": null}]}\n\n')
        assert request.transport is not None
        request.transport.close()
        return response

    async with (
        broken_engine(router, 1, begin),
        engine_at(router, 2),
        KvRouterClient(router.api.url) as client,
    ):
        answer = await client.direct(1).generate(PROMPT)
        assert (await anext(answer))["token_ids"] == [7, 8]
        with pytest.raises(EngineFailed) as caught:
            await anext(answer)
        assert (caught.value.detail["worker_id"], caught.value.detail["output_tokens"]) == (1, 2)
        await until(lambda: active(router) == 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_tokens": 2, "min_tokens": 3}, "min_tokens must be less"), ({"max_tokens": 10**6}, "maximum context")],
)
async def test_a_request_that_an_engine_refuses_is_not_sent_to_others(
    router: LocalRouter, options: dict[str, Any], words: str
) -> None:
    """The error has the engine's status and message, and the booking ends."""
    async with engine_at(router, 1), KvRouterClient(router.api.url) as client:
        with pytest.raises(EngineRefused, match=words) as caught:
            await client.generate(PROMPT, stop_conditions=options)
        assert caught.value.detail == {"worker_id": 1, "status": 400}
        await until(lambda: active(router) == 0)


async def test_an_engine_without_token_ids_is_refused_with_what_to_do(router: LocalRouter) -> None:
    """An old engine ignores return_token_ids; its text must not look like an answer without tokens."""

    async def text_only(request: web.Request) -> web.StreamResponse:
        return web.Response(text='data: {"choices": [{"text": "hello", "finish_reason": null}]}\n\n')

    async with broken_engine(router, 1, text_only), KvRouterClient(router.api.url) as client:
        answer = await client.generate(PROMPT)
        with pytest.raises(EngineRefused, match="return_token_ids"):
            await anext(answer)
        await until(lambda: active(router) == 0)


async def test_an_engine_that_is_silent_for_too_long_has_failed(router: LocalRouter) -> None:
    """The limit is one of the engine's options."""

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(PATIENCE_S)
        return web.Response()

    options = EngineOptions(silence_timeout_s=0.05, attempts_max=1)
    async with broken_engine(router, 1, hang), KvRouterClient(router.api.url, engine=options) as client:
        with pytest.raises(EngineFailed):
            await client.generate(PROMPT)


# -- several routers ---------------------------------------------------------------------------------------------------


async def test_calls_go_to_the_routers_by_turns_and_reports_to_the_one_that_booked() -> None:
    """These routers do not share bookings, so a report to the other one would end nothing."""
    with routers(2) as both:
        for local in both:
            register(local, 1, "http://engine")
        async with KvRouterClient([local.api.url for local in both]) as client:
            bookings = [await client.book(PROMPT) for _ in range(6)]
            assert [active(local) for local in both] == [3, 3]
            for booking in bookings:
                booking.end()
            await until(lambda: [active(local) for local in both] == [0, 0])
            assert client._routed_by == {}


async def test_a_router_that_refuses_connections_or_is_not_ready_is_skipped(router: LocalRouter) -> None:
    """Each of these calls succeeds at the third address, without a pause."""
    starting = HttpServer("127.0.0.1", 0)
    await starting.serve(starting_app(Startup()))
    register(router, 1, "http://engine")
    urls = [f"http://127.0.0.1:{free_port()}", "http://{}:{}".format(*starting.address), router.api.url]
    try:
        async with KvRouterClient(urls, retry_timeout_s=0.0) as client:
            for _ in range(6):
                async with await client.book(PROMPT) as booking:
                    assert booking.worker_id == 1
        async with KvRouterClient(urls[:2], retry_timeout_s=0.0) as client:
            with pytest.raises((NotReady, RouterUnavailable)):
                await client.book(PROMPT)
        async with KvRouterClient(urls[1], retry_timeout_s=0.0) as client:
            with pytest.raises(NotReady, match="starting"):
                await client.best_worker_id(PROMPT)
    finally:
        await starting.close()
    await until(lambda: active(router) == 0)
    remove(router, 1)


async def test_a_refused_call_is_repeated_until_a_worker_is_there(router: LocalRouter) -> None:
    """It succeeds as soon as one registers, and is not refused before its time is over."""
    async with KvRouterClient(router.api.url) as client:
        call = asyncio.create_task(client.best_worker_id(PROMPT))
        await asyncio.sleep(0.2)
        assert not call.done()
        register(router, 5, "http://engine")
        assert await call == (5, 0)
        remove(router, 5)
    async with KvRouterClient(router.api.url, retry_timeout_s=0.0) as client:
        with pytest.raises(NoEligibleWorker) as caught:
            await client.book(PROMPT)
        assert caught.value.detail["status"] == 503


class Proxy:
    """Passes connections on to a router, and breaks those whose answer it is to lose."""

    def __init__(self, url: str) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self.loses = False
        self.lost = 0
        self.connections = 0

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection(self._host, int(self._port))

        async def requests() -> None:
            while data := await reader.read(1 << 16):
                up_writer.write(data)

        passing = asyncio.create_task(requests())
        try:
            while data := await up_reader.read(1 << 16):
                if self.loses:
                    self.lost += 1
                    break
                writer.write(data)
        finally:
            passing.cancel()
            up_writer.close()
            writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


async def test_a_call_whose_answer_was_lost_is_repeated_and_books_once(router: LocalRouter) -> None:
    """The second address leads to the same router, which returns the booking of the first call."""
    register(router, 1, "http://engine")
    proxy = Proxy(router.api.url)
    proxy.loses = True
    async with proxy.serving() as lossy, KvRouterClient([router.api.url, lossy]) as client:
        for _ in range(4):
            async with await client.book(PROMPT):
                assert active(router) == 1
            await until(lambda: active(router) == 0)
        assert proxy.lost >= 1
    remove(router, 1)


async def test_a_call_that_is_given_up_leaves_no_booking(router: LocalRouter) -> None:
    """Its answers were lost, so it may be booked; the client frees it as soon as a router can be reached again."""
    register(router, 1, "http://engine")
    proxy = Proxy(router.api.url)
    proxy.loses = True
    async with proxy.serving() as lossy, KvRouterClient(lossy, retry_timeout_s=0.0) as client:
        with pytest.raises(RouterUnavailable, match="does not answer"):
            await client.book(PROMPT)
        assert active(router) == 1
        proxy.loses = False
        await until(lambda: active(router) == 0)
    remove(router, 1)


async def test_answers_that_are_read_to_their_end_share_a_connection_to_their_engine(router: LocalRouter) -> None:
    """Opening a connection for each request would cost more than routing it."""
    async with engine_at(router, 1) as engine, KvRouterClient(router.api.url) as client:
        proxy = Proxy(engine.http_url)
        async with proxy.serving() as url:
            register(router, 1, url)
            for _ in range(5):
                async for _ in await client.generate(PROMPT, stop_conditions={"max_tokens": 2}):
                    pass
            assert proxy.connections == 1
        await until(lambda: active(router) == 0)


# -- routing -----------------------------------------------------------------------------------------------------------


async def test_each_method_returns_what_its_call_returns(router: LocalRouter) -> None:
    """The best worker, potential loads, matches, and one call in each of three modes, none of which books."""
    for worker_id in (11, 12, 13):
        register(router, worker_id, "http://engine")
    hold(router.router, rank(12), local_hashes(COLD, BLOCK_SIZE))
    async with KvRouterClient(router.api.url) as client:
        assert await client.best_worker_id(COLD) == (12, 4)
        assert await client.best_worker(COLD) == (12, 0, 4)
        found = await client.find_matches_for_request(COLD)
        assert (found.scores, found.cxl_accessible_scores, found.moe_scores) == ({12: 4}, {}, {})
        assert found.by_rank.scores == {(12, 0): 4}
        potential = await client.get_potential_loads(COLD)
        assert [(row["worker_id"], row["potential_prefill_tokens"]) for row in potential] == [
            (11, 64),
            (12, 0),
            (13, 64),
        ]
        turns = [(await client.round_robin().best_worker_id(COLD))[0] for _ in range(6)]
        assert sorted(turns) == [11, 11, 12, 12, 13, 13]
        assert {(await client.random().best_worker_id(COLD))[0] for _ in range(60)} == {11, 12, 13}
        assert await client.direct(13).best_worker_id(COLD) == (13, 0)
        assert await client.best_worker_id(COLD, excluded_worker_ids=[12]) in ((11, 0), (13, 0))
        assert active(router) == 0
    for worker_id in (11, 12, 13):
        remove(router, worker_id)


async def test_a_caller_may_book_and_free_by_request_id(router: LocalRouter) -> None:
    """best_worker with an id books, as in Dynamo; ids may contain any character, and repeating one books once."""
    register(router, 1, "http://engine")
    async with KvRouterClient(router.api.url) as client:
        name = "ä/b?c=%2F{d}"
        for _ in range(2):
            assert await client.best_worker(COLD, request_id=name) == (1, 0, 0)
        assert loads(router)[1] == (64, 4, 1)
        client.mark_prefill_complete(name)
        await until(lambda: loads(router)[1][0] == 0)
        client.free(name)
        await until(lambda: active(router) == 0)
    remove(router, 1)


async def test_both_bookings_of_one_request_are_reported_by_their_phase(router: LocalRouter) -> None:
    """A request may be booked for prefill and for decode; each ends by itself."""
    register(router, 1, "http://engine")
    async with KvRouterClient(router.api.url) as client:
        prefill = await client.book(COLD, request_id="r", phase="prefill")
        decode = await client.book(COLD, request_id="r", phase="decode")
        assert active(router) == 2
        prefill.end()
        await until(lambda: active(router) == 1)
        decode.end()
        await until(lambda: active(router) == 0)
    remove(router, 1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ({"model": "other"}, UnknownModel, "other"),
        ({"request_id": ""}, InvalidRequest, "1 to 512 characters"),
        ({"dp_rank": -1}, InvalidRequest, "dp_rank"),
        ({"no_such_field": 1}, InvalidRequest, "no_such_field"),
        ({"router_config_override": {"router_mode": "fastest"}}, InvalidRequest, "router_mode"),
        ({"router_config_override": {"router_mode": "direct"}}, InvalidRequest, "worker_id is missing"),
    ],
)
async def test_a_routers_error_is_raised_as_what_it_is(
    router: LocalRouter, call: dict[str, Any], error: type[KvStreamsError], words: str
) -> None:
    """The class and the message are those of the router, and nothing is repeated."""
    register(router, 1, "http://engine")
    async with KvRouterClient(router.api.url) as client:
        with pytest.raises(error, match=words) as caught:
            await client.book(COLD, **call)
        assert type(caught.value) is error
    remove(router, 1)


@pytest.mark.parametrize("urls", [[], "router:8000", "ftp://router", "http://", "http://r:99999", "http://r/?q=1"])
def test_an_address_that_is_no_router_is_refused_at_once(urls: Any) -> None:
    """The message quotes it."""
    with pytest.raises(InvalidRequest, match="router address"):
        KvRouterClient(urls)


async def test_the_token_is_sent_with_every_call_and_read_for_each(router: LocalRouter) -> None:
    """A token file may change while the client runs."""
    seen: list[str] = []

    async def note(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization", ""))
        return web.json_response({"loads": [], "mode": "exact"})

    app = web.Application()
    app.add_routes([web.post("/loads/potential", note)])
    server = HttpServer("127.0.0.1", 0)
    await server.serve(app)
    tokens = iter(["first", "second"])
    async with KvRouterClient("http://{}:{}".format(*server.address), token=lambda: next(tokens)) as client:
        for _ in range(2):
            assert await client.get_potential_loads(COLD) == []
    await server.close()
    assert seen == ["Bearer first", "Bearer second"]


#: In mode kv a backlog is tokens until they are reported, and in expected-time it passes with time.
QUEUEING = Settings(
    router_mode=RouterMode.KV, block_size=BLOCK_SIZE, router_queue_backlog_ms=1.0, router_queue_timeout_s=PATIENCE_S
)


async def queue_has(local: LocalRouter, n: int) -> None:
    """Wait until this many requests wait in a router."""
    name = "kvstreams_flow_control_queue_size/"
    await until(lambda: sum(value for key, value in metrics(local.api).items() if key.startswith(name)) == n)


async def test_requests_that_wait_in_a_routers_queue_do_not_block_the_reports_that_they_wait_for() -> None:
    """They have connections of their own, however few the others are."""
    with local_router(QUEUEING, n_workers=1) as local:
        async with KvRouterClient(local.api.url, connections_max=2) as client:
            running = await client.book(COLD)
            waiting = [asyncio.create_task(client.book(PROMPT, queue="on")) for _ in range(4)]
            await queue_has(local, 4)
            assert len(await client.workers()) == 1
            running.prefill_complete()
            for each in asyncio.as_completed(waiting):
                (await each).end()
            running.end()
            await until(lambda: active(local) == 0)


async def test_a_client_keeps_no_queue_of_its_own_in_front_of_the_routers() -> None:
    """Calls beyond its limit are refused as a full queue refuses them; others are not affected."""

    assert Settings().router_queue_requests_max == http.WAITING_MAX
    with local_router(QUEUEING, n_workers=1) as local:
        async with KvRouterClient(local.api.url, retry_timeout_s=0.0, waiting_max=2) as client:
            running = await client.book(COLD)
            waiting = [asyncio.create_task(client.book(PROMPT, queue="on")) for _ in range(2)]
            await queue_has(local, 2)
            with pytest.raises(QueueFull, match="2 requests of this client wait"):
                await client.book(PROMPT, queue="on")
            (await client.book(PROMPT)).end()
            running.end()
            for each in asyncio.as_completed(waiting):
                (await each).end()
            (await client.book(PROMPT, queue="on")).end()
            await until(lambda: active(local) == 0)


async def test_a_router_that_hangs_does_not_keep_the_requests_that_would_wait_in_its_queue() -> None:
    """After the time that a router may let them wait, they go to the next one, as other calls do."""

    assert Settings().router_queue_timeout_s == http.QUEUE_TIMEOUT_S
    asked: list[bytes] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.read()
        writer.close()

    hung = await asyncio.start_server(hang, "127.0.0.1", 0)
    urls = [f"http://127.0.0.1:{hung.sockets[0].getsockname()[1]}"]
    with local_router(QUEUEING, n_workers=1) as local:
        async with KvRouterClient([local.api.url, *urls], call_timeout_s=0.2, queue_timeout_s=0.1) as client:
            async with await client.book(PROMPT, queue="on") as booking:
                assert booking.worker_id == 1
            (head,) = asked
            assert b"queue_timeout_ms=100" in head
        async with KvRouterClient(local.api.url, queue_timeout_s=0.1) as client, await client.book(COLD):
            with pytest.raises(QueueTimeout):
                await client.book(PROMPT, queue="on")
    hung.close()


async def test_a_router_that_failed_is_tried_last_for_a_while(router: LocalRouter) -> None:
    """So a host that vanished costs one request a timeout, and not every second one."""

    assert http.ROUTER_PENALTY_S >= 1.0
    register(router, 1, "http://engine")
    asked = 0

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    dead = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with KvRouterClient([dead, router.api.url]) as client:
        for _ in range(20):
            assert await client.best_worker_id(COLD) == (1, 0)
    assert asked == 1
    server.close()
    remove(router, 1)


async def test_a_booking_is_ended_once(router: LocalRouter) -> None:
    """Leaving the block ends it; ending it again, or reporting after its end, does nothing."""
    register(router, 1, "http://engine")
    async with KvRouterClient(router.api.url) as client:
        async with await client.book(COLD) as booking:
            booking.prefill_complete()
            booking.prefill_complete()
            booking.output(70)
            await until(lambda: loads(router)[1] == (0, 9, 1))
        assert isinstance(booking, Booking) and booking.ended
        booking.end()
        booking.output(100)
        await until(lambda: active(router) == 0)
    remove(router, 1)
