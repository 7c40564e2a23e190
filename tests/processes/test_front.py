"""The front on real sockets, with a real router and engines that break off, stall, refuse, and are left by clients."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from streams.core.routing.audit import Audit, AuditOutcome
from streams.frontend.answers import error_event
from streams.frontend.protocol import FrontProtocol
from streams.lab.engines.chat_template import tokenizer_files
from streams.process import aiohttp_internals
from streams.prompts import tokenizing
from streams.prompts.calls import Kind
from streams.prompts.loop_tokenizer import ENCODED_CHARACTERS_MAX
from streams.prompts.tokenizer import ModelTokenizer
from streams.prompts.tokenizer_process import TokenizerProcess
from streams.settings import Settings
from tests.helpers.front_stage import BODY, IDS, PATIENCE_S, Backend, on_stage
from tests.helpers.local_router import LocalRouter, local_router, register
from tests.helpers.scripted_engine import Script, ScriptedEngine, answer_bytes, scripted_engines


@pytest.fixture(scope="module")
def backend() -> Iterator[tuple[LocalRouter, list[ScriptedEngine]]]:
    """Give a router and two engines that it knows."""
    with local_router(Settings(), n_workers=0) as router, scripted_engines(2, ScriptedEngine) as engines:
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)
        yield router, engines


async def test_a_stream_and_its_request_pass_through_unchanged(backend: Backend) -> None:
    """The engine gets the client's body byte for byte, and the client the engine's answer."""
    async with on_stage(backend) as stage:
        more = {"stream_options": {"include_usage": True}, "unknown": {"é": [1.50, 1e3]}}
        raw = orjson.dumps({**BODY, "tools": [{"odd": None}], "n": 2, **more}) + b"\n "
        headers = {
            "Authorization": "Bearer the client's own",
            "Cookie": "a=b",
            "X-Request-Id": "mine",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "X-Kvstreams-Details": "1",
        }
        url = f"{stage.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, data=raw, headers=headers) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert response.headers["X-Request-Id"] == "mine"
            worker = int(response.headers["X-Kvstreams-Worker"].partition("/")[0])
            assert await response.read() == answer_bytes()
        engine = stage.engines[worker - 1]
        assert engine.bodies == [raw]
        (received,) = engine.received
        assert received["traceparent"] == headers["traceparent"]
        assert received["X-Request-Id"] == "mine"
        assert "X-data-parallel-rank" not in received  # the engine has one rank, and may know it by any number
        assert "the client's own" not in str(received) and "Cookie" not in received


def answer_with_usage(cached_tokens: int) -> bytes:
    """A stream of an engine that was asked for its usage."""
    usage = {"prompt_tokens": 40, "completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": cached_tokens}}
    done = b"data: [DONE]\n\n"
    return (
        answer_bytes().removesuffix(done) + b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n" + done
    )


def reported(audit: Audit) -> int:
    """The answers of which an engine has said what it found, whether they have been judged or not."""
    judged = sum(n for outcome, n in audit.outcomes.items() if outcome is not AuditOutcome.NOT_REPORTED)
    return len(audit._waiting) + judged


@pytest.mark.parametrize("migrates", [False, True])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("piece", [1, 50, 100_000])
async def test_every_stream_is_asked_for_its_usage_which_only_clients_get_that_ask(
    backend: Backend, migrates: bool, asks: bool, piece: int
) -> None:
    """What the engine found of the prompt goes to the router that decided, which counts it."""
    audit = backend[0].router.audit
    async with on_stage(backend, front_migration=migrates) as stage:
        stage.script(*[Script(answer=answer_with_usage(0), piece=piece)] * 2)
        before = reported(audit)
        body = {**IDS, **({"stream_options": {"include_usage": True}} if asks else {})}
        _, _, got = await stage.post(body, "/v1/completions")
        assert got == (answer_with_usage(0) if asks else answer_bytes())
        (sent,) = [orjson.loads(raw) for engine in stage.engines for raw in engine.bodies]
        assert sent["stream_options"] == {"include_usage": True}
        await stage.until_free()
        await stage.until(lambda: reported(audit) == before + 1, "the router's audit")


async def test_an_engine_that_does_not_know_the_usage_of_streams_gets_the_clients_request(backend: Backend) -> None:
    """It names the field in its error. Any other refusal is the client's, and comes once."""
    async with on_stage(backend) as stage:
        refusal = b'{"error": {"message": "Extra inputs are not permitted: stream_options"}}'
        stage.script(*[Script(status=400, refusal=refusal)] * 2)
        status, _, got = await stage.post(IDS, "/v1/completions")
        assert (status, got) == (400, refusal)
        assert [raw for engine in stage.engines for raw in engine.bodies][1] == orjson.dumps(IDS)


async def test_bytes_arrive_as_they_come(backend: Backend) -> None:
    """A token reaches the client while the engine still works on the next one."""
    async with on_stage(backend) as stage:
        answer = answer_bytes()
        role_and_first = answer.index(b"t1")
        stage.script(*[Script(stalls_at=role_and_first)] * 2)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{stage.url}/v1/completions", json=IDS) as response,
        ):
            got = b""
            while len(got) < role_and_first:
                got += await response.content.readany()
            assert got == answer[:role_and_first]


async def raw_exchange(url: str, version: str) -> tuple[bytes, bytes]:
    """Send BODY in a version of HTTP; return the bytes that came first, and all of them."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = orjson.dumps(BODY)
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first = await reader.read(65_536)
    rest = await reader.read()
    writer.close()
    return first, first + rest


async def test_headers_and_the_first_token_come_together(backend: Backend) -> None:
    """They are one piece for the network, so that a client does not wake up for headers alone."""
    async with on_stage(backend) as stage:
        slow = Script(pause_s=0.02)
        stage.script(slow, slow)
        first, _ = await raw_exchange(stage.url, "1.1")
        assert first.startswith(b"HTTP/1.1 200") and b"\r\n\r\n" in first and b'"t0"' in first


async def test_a_client_without_chunks_gets_plain_bytes_until_the_connection_ends(backend: Backend) -> None:
    """A client of HTTP/1.0 receives the engine's bytes without the frames of chunks."""
    async with on_stage(backend) as stage:
        _, whole = await raw_exchange(stage.url, "1.0")
        head, _, body = whole.partition(b"\r\n\r\n")
        assert b"chunked" not in head and body == answer_bytes()


def request_bytes(body: Any, *headers: str) -> bytes:
    """Return a request for a completion."""
    raw = orjson.dumps(body)
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", *headers, f"Content-Length: {len(raw)}"]
    return "\r\n".join([*lines, "", ""]).encode() + raw


async def whole_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer from a connection that stays open; return its status and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if b"chunked" not in head:
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        return status, await reader.readexactly(length)
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    assert await reader.readexactly(2) == b"\r\n"
    return status, body


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give the list of the requests that were served without aiohttp's task."""
    assert aiohttp_internals.is_supported()
    begun: list[Any] = []
    begin = FrontProtocol._begin

    def noting(connection: FrontProtocol, *args: Any) -> None:
        begun.append(connection)
        begin(connection, *args)

    monkeypatch.setattr(FrontProtocol, "_begin", noting)
    return begun


async def test_requests_of_one_connection_are_answered_in_order(backend: Backend, direct: list[Any]) -> None:
    """Also if they come together, of several kinds, and while an earlier one is being answered."""
    async with on_stage(backend) as stage:
        address = urlsplit(stage.url)
        generate, refused = request_bytes(IDS), request_bytes({"model": "other", "prompt": [1]})
        models = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(generate + models + generate + refused + generate)
        kinds = [(await whole_answer(reader))[0] for _ in range(5)]
        assert kinds == [200, 200, 200, 404, 200]
        for number in range(3):
            writer.write(generate)
            if number == 1:
                writer.write(models)
            assert await whole_answer(reader) == (200, answer_bytes())
            if number == 1:
                assert (await whole_answer(reader))[0] == 200
        assert len(direct) == 1 + 3  # those that met an idle connection
        writer.write(request_bytes(IDS, "Connection: close"))
        assert await whole_answer(reader) == (200, answer_bytes())
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_request_that_comes_with_its_connection_is_served(
    backend: Backend, direct: list[Any], monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """uvloop may read the first bytes before aiohttp's task of the connection has begun."""
    made = FrontProtocol.connection_made

    def with_a_request(connection: FrontProtocol, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        connection.data_received(request_bytes(IDS))

    monkeypatch.setattr(FrontProtocol, "connection_made", with_a_request)
    async with on_stage(backend) as stage:
        address, n_tasks = urlsplit(stage.url), len(asyncio.all_tasks())
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        if not leaves:
            assert await whole_answer(reader) == (200, answer_bytes())
            for _ in range(2):
                writer.write(request_bytes(IDS))
                assert await whole_answer(reader) == (200, answer_bytes())
        writer.close()
        await stage.until(lambda: not stage.front.connections, "the end of the connection")
        await stage.until_free()
        await stage.until(lambda: len(asyncio.all_tasks()) <= n_tasks, "the end of the tasks")
        assert len(direct) == (1 if leaves else 3)


async def test_a_connection_without_a_request_has_no_task_and_ends_with_the_front(backend: Backend) -> None:
    """Its socket has the options that aiohttp sets: the kernel probes it, and sends what is written at once."""
    async with on_stage(backend) as stage:
        address, tasks = urlsplit(stage.url), asyncio.all_tasks()
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        await stage.until(lambda: len(stage.front.connections) == 1, "the connection")
        assert not asyncio.all_tasks() - tasks
        server = stage.front.connections._server
        assert server is not None
        ((connection, transport),) = server._connections.items()
        accepted = transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.close()  # as a server does that stops
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(("hold_s", "n_direct"), [(PATIENCE_S, 1), (0.0, 0)])
async def test_a_body_may_come_after_its_headers(
    backend: Backend, direct: list[Any], monkeypatch: pytest.MonkeyPatch, hold_s: float, n_direct: int
) -> None:
    """Many clients send it so. One that comes late is read by aiohttp."""
    monkeypatch.setattr(aiohttp_internals, "HOLD_S", hold_s)
    async with on_stage(backend) as stage:
        address = urlsplit(stage.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        raw = request_bytes(IDS)
        for piece in (raw[:30], raw[30 : raw.index(b"{") + 5], raw[raw.index(b"{") + 5 :]):
            writer.write(piece)
            await asyncio.sleep(0.05)
        assert await whole_answer(reader) == (200, answer_bytes())
        assert len(direct) == n_direct
        writer.close()


async def test_a_client_that_leaves_at_once_leaves_nothing_behind(backend: Backend, direct: list[Any]) -> None:
    """Whether its request has begun or not, every task of its connection ends."""
    async with on_stage(backend) as stage:
        address, n_clients = urlsplit(stage.url), 20
        n_tasks = len(asyncio.all_tasks())
        for number in range(n_clients):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(request_bytes(IDS))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            writer.transport.abort()
        await stage.until(lambda: not stage.front.connections, "the end of the connections")
        await stage.until_free()
        await stage.until(lambda: len(asyncio.all_tasks()) <= n_tasks, "the end of the tasks")
        assert direct


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_an_engine_that_cannot_serve_is_replaced_by_another(backend: Backend, status: int) -> None:
    """The client sees one whole answer, and the booking has moved."""

    n_requests = 8  # without a known prompt a router chooses at random: one of them begins at the engine that fails
    async with on_stage(backend) as stage:
        for failing in (0, 1):
            stage.script(*[Script(status=status) if at == failing else Script() for at in range(2)])
            for _ in range(n_requests):
                code, headers, body = await stage.post(**{"X-Kvstreams-Details": "1"})
                assert (code, body) == (200, answer_bytes())
                assert headers["X-Kvstreams-Worker"] == f"{2 - failing}/0"
        n_received = sum(sum(1 for _ in engine.received) for engine in stage.engines)
        assert stage.front.counts.retries == n_received - 2 * n_requests
        assert stage.front.counts.retries > 0


@pytest.mark.parametrize("breaks_at", [0, 10, answer_bytes().index(b"t0")])
async def test_an_engine_that_ends_before_its_first_token_is_replaced(backend: Backend, breaks_at: int) -> None:
    """The role that it had sent is not shown, so the client gets one answer and not parts of two."""
    async with on_stage(backend) as stage:
        for failing in (0, 1):
            stage.script(*[Script(breaks_at=breaks_at) if at == failing else Script() for at in range(2)])
            assert (await stage.post())[2] == answer_bytes()


@pytest.mark.parametrize("status", [400, 503])
async def test_an_answer_that_replaces_a_stream_is_whole(backend: Backend, status: int) -> None:
    """Nothing of the stream that ended before its first token is left in the answer, such as its form in chunks."""
    async with on_stage(backend) as stage:
        ended, refusing = Script(breaks_at=10), Script(status=status)
        for scripts in ((ended, refusing), (refusing, ended)):
            stage.script(*scripts)
            for _ in range(6):  # some of them begin at each engine
                code, headers, body = await stage.post()
                if code == 502:  # the stream came last
                    assert orjson.loads(body)["error"]["code"] == "engine_failed"
                else:
                    assert (code, body) == (status, refusing.refusal)
                assert headers["Content-Length"] == str(len(body)) and "Transfer-Encoding" not in headers
        stage.script(ended, ended)
        code, headers, body = await stage.post()
        assert (code, headers["Content-Length"]) == (502, str(len(body)))


async def test_a_silent_engine_is_replaced_before_its_first_token(backend: Backend) -> None:
    """It counts as failed after front_silence_timeout_s."""
    async with on_stage(backend, front_silence_timeout_s=0.3) as stage:
        for failing in (0, 1):
            stage.script(*[Script(stalls_at=20) if at == failing else Script() for at in range(2)])
            assert (await stage.post())[2] == answer_bytes()


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(status=503, refusal=b'{"error": {"message": "overloaded"}}'), 503),
        (Script(status=400, refusal=b'{"error": {"message": "bad \xc3\xbc"}}'), 400),
        (Script(status=418, refusal=b"not JSON"), 418),
    ],
)
async def test_an_engines_error_keeps_its_status_and_body(backend: Backend, script: Script, status: int) -> None:
    """Also if every engine has refused; what is invalid is sent to one engine only."""
    async with on_stage(backend) as stage:
        stage.script(script, script)
        code, _, body = await stage.post()
        assert (code, body) == (status, script.refusal)
        assert sum(engine.counts["begun"] for engine in stage.engines) == (2 if status == 503 else 1)


async def test_engines_that_do_not_answer_are_an_error_in_openais_shape(backend: Backend) -> None:
    """After front_attempts_max engines the client gets 502."""
    async with on_stage(backend, front_attempts_max=1) as stage:
        stage.script(Script(breaks_at=0), Script(breaks_at=0))
        code, _, body = await stage.post()
        assert (code, orjson.loads(body)["error"]["code"]) == (502, "engine_failed")
        assert sum(engine.counts["begun"] for engine in stage.engines) == 1


async def test_an_engine_that_dies_at_a_random_byte_ends_the_answer_cleanly(backend: Backend) -> None:
    """What was generated reaches the client, then an error event, or a broken connection if an event was cut in two."""
    async with on_stage(backend) as stage:
        answer = answer_bytes()
        first = answer.index(b"\n\n", answer.index(b"t0")) + 2
        seed = random.randrange(1 << 32)
        print("seed", seed)
        rng = random.Random(seed)
        boundaries = [at + 2 for at in range(first, len(answer) - 40) if answer[at : at + 2] == b"\n\n"]
        for at in [*rng.sample(range(first, len(answer) - 20), 12), *rng.sample(boundaries, 4)]:
            stage.script(*[Script(breaks_at=at)] * 2)
            try:
                _, _, body = await stage.post({**BODY, "top_k": at})  # another request each time
            except aiohttp.ClientPayloadError:
                assert answer[at - 2 : at] != b"\n\n"
                continue
            # From the finish reason on, events pass when they are complete, so that nothing of a cut one did.
            end = answer.rindex(b"\n\n", 0, at) + 2 if at > answer.index(b'"finish_reason":"') else at
            assert answer[end - 2 : end] == b"\n\n"
            assert body.startswith(answer[:end])
            event = orjson.loads(body[end:].split(b"\n\n")[0].removeprefix(b"data: "))
            assert event["error"]["code"] == "engine_failed"
            assert body.endswith(b"\n\ndata: [DONE]\n\n")
        assert stage.front.counts.outcomes["broken"] == 16


async def test_a_client_that_vanishes_at_a_random_byte_cancels_its_request(backend: Backend) -> None:
    """Before or after the first token, the engine's request ends and the booking is freed."""
    async with on_stage(backend) as stage:
        # The end of the answer never comes, so that no request can end by itself.
        stage.script(*[Script(pause_s=0.002, stalls_at=len(answer_bytes()) - 30)] * 2)
        seed = random.randrange(1 << 32)
        print("seed", seed)
        rng = random.Random(seed)

        async def vanish(n_bytes: int) -> None:
            async with aiohttp.ClientSession() as session:
                posting = asyncio.ensure_future(session.post(f"{stage.url}/v1/completions", json=IDS))
                if n_bytes == 0:
                    await asyncio.sleep(rng.random() * 0.01)
                    posting.cancel()
                    return
                response, got = await posting, 0
                while got < n_bytes and (data := await response.content.readany()):
                    got += len(data)
                response.close()

        read = [rng.choice([0, rng.randrange(1, 3000)]) for _ in range(40)]
        await asyncio.gather(*map(vanish, read))
        await stage.until_free()
        outcomes = stage.front.counts.outcomes
        assert outcomes.keys() == {"client_gone"}
        # The others may have left before the front had read their requests.
        assert outcomes["client_gone"] >= sum(n_bytes > 0 for n_bytes in read)


async def test_a_client_that_does_not_read_is_disconnected(backend: Backend) -> None:
    """Meanwhile the engine is not read either, so nothing piles up in the front."""
    async with on_stage(backend, front_client_timeout_s=0.5) as stage:
        answer = answer_bytes(2000, padding=20_000)
        stage.script(*[Script(answer=answer, piece=65_536)] * 2)
        loop = asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            host, port = stage.url.removeprefix("http://").split(":")
            await loop.sock_connect(slow, (host, int(port)))
            body = orjson.dumps(IDS)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            await loop.sock_sendall(slow, head + body)
            await stage.until(lambda: stage.front.counts.outcomes["client_slow"] == 1, "the disconnection")


async def test_prefill_and_output_are_reported_while_a_stream_runs(backend: Backend) -> None:
    """The router sees the end of the prefill at the first token, and the length of the answer from time to time."""
    async with on_stage(backend) as stage:
        answer = answer_bytes(400)
        until = answer.index(b"t200")
        stage.script(*[Script(answer=answer, stalls_at=until)] * 2)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{stage.url}/v1/completions", json=IDS) as response,
        ):
            got = 0
            while got < until:
                got += len(await response.content.readany())

            def seen() -> bool:
                rows = stage.router.api.get("/loads")["loads"]
                return [row["active_prefill_tokens"] for row in rows if row["active_requests"]] == [0]

            async with asyncio.timeout(PATIENCE_S):
                while not await asyncio.to_thread(seen):
                    await asyncio.sleep(0.01)
        assert stage.front.counts.output_tokens == 0  # it is counted when a request has ended
        await stage.until_free()
        assert 200 <= stage.front.counts.output_tokens <= 202


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_request"),
        (b'{"model": "other", "prompt": [1]}', {}, 404, "unknown_model"),
        (b'{"model": "m", "prompt": [1]}', {"X-Priority": "x"}, 400, "invalid_request"),
        (b'{"model": "m", "prompt": [1]}', {"Content-Encoding": "gzip"}, 415, "unsupported_encoding"),
        (b" " * 5000, {}, 413, "too_large"),
        (b'{"model": "m", "prompt": [1]}', {"X-Required-Taints": "none-has-it"}, 503, "no_eligible_worker"),
    ],
)
async def test_refusals_have_openais_shape(
    backend: Backend, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    """No engine sees a request that the front or the router refuses."""
    async with on_stage(backend, body_bytes_max=4096) as stage:
        stage.front.router._retry_timeout_s = 0.0
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{stage.url}/v1/completions", data=body, headers=headers) as response,
        ):
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (status, code)
            assert {"message", "type", "param"} < error.keys()
            assert ("Retry-After" in response.headers) == (status == 503)
        assert not any(engine.bodies for engine in stage.engines)


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "says"),
    [
        ("POST", "/v1/conversations", 404, "not_found", "POST /v1/chat/completions"),
        ("POST", "/v1/rerank", 404, "not_found", "/v1/rerank"),
        ("GET", "/v1/responses/resp_1", 404, "not_found", "GET /v1/models"),
        ("POST", "/v1/audio/speech", 404, "not_found", "POST /v1/completions"),
        ("GET", "/", 404, "not_found", "POST /v1/completions"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed", "use POST"),
        ("GET", "/v1/models/other", 404, "unknown_model", "'other'"),
    ],
)
async def test_a_call_that_the_front_does_not_have_says_what_it_has(
    backend: Backend, method: str, path: str, status: int, code: str, says: str
) -> None:
    """OpenAI's client shows the message, so it names the calls that there are."""
    async with on_stage(backend) as stage:
        body = {"model": "m", "input": "secret"} if method == "POST" else None
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, stage.url + path, json=body) as response,
        ):
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (status, code)
            assert says in error["message"] and "secret" not in error["message"]
            assert {"message", "type", "param"} < error.keys()
            assert response.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_a_token_needs_the_right_to_generate(backend: Backend, tmp_path: Path) -> None:
    """Each call has its right; without a known token there is none."""
    tokens = {"generate": "g" * 20, "read": "r" * 20}
    file = tmp_path / "tokens.toml"
    file.write_text("".join(f'[{right}]\ntoken = "{token}"\nrights = ["{right}"]\n' for right, token in tokens.items()))
    async with on_stage(backend, tokens_file=str(file)) as stage:

        async def status(method: str, path: str, token: str | None) -> int:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.request(method, stage.url + path, json=BODY if method == "POST" else None) as response,
            ):
                await response.read()
                return response.status

        for method, path, right in (
            ("POST", "/v1/chat/completions", "generate"),
            ("GET", "/v1/models", "generate"),
            ("GET", "/v1/models/m", "generate"),
            ("GET", "/metrics", "read"),
        ):
            assert [await status(method, path, tokens[each]) for each in tokens] == [
                200 if each == right else 403 for each in tokens
            ]
            assert await status(method, path, None) == await status(method, path, "x" * 20) == 401
        for path in ("/healthz", "/ready"):
            assert await status("GET", path, None) == 200
        assert await status("GET", "/no/such/path", tokens["generate"]) == 404
        assert not any("g" * 20 in str(engine.received) for engine in stage.engines)


async def test_engines_get_their_key_from_a_file(backend: Backend, tmp_path: Path) -> None:
    """The client's own header does not replace it."""
    (tmp_path / "key").write_text("engine-key\n")
    async with on_stage(backend, {"engine_key_files": {"": str(tmp_path / "key")}}) as stage:
        assert (await stage.post(Authorization="Bearer client"))[0] == 200
        (received,) = [each for engine in stage.engines for each in engine.received]
        assert received["Authorization"] == "Bearer engine-key"


async def test_a_full_front_refuses_and_says_when_to_return(backend: Backend) -> None:
    """front_requests_max requests are served; the next one gets 503."""
    async with on_stage(backend, front_requests_max=1) as stage:
        stage.script(*[Script(stalls_at=3000)] * 2)
        async with aiohttp.ClientSession() as session:
            first = await session.post(f"{stage.url}/v1/completions", json=IDS)
            async with session.post(f"{stage.url}/v1/completions", json=IDS) as second:
                assert second.status == 503
                assert (await second.json())["error"]["code"] == "overloaded"
            first.close()


def long_prompt(number: int) -> dict[str, Any]:
    """Return a completion that is too long for the event loop, and is in no cache."""
    return {"model": "m", "prompt": f"{number} " * ENCODED_CHARACTERS_MAX, "stream": True}


def write_tokenizer_with_markers(folder: Path) -> None:
    """Write the files of a tokenizer whose special tokens begin and end messages, as those of chat models do."""
    files = tokenizer_files()
    tokenizer = orjson.loads(files["tokenizer.json"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer["added_tokens"] = [
        {"id": 256 + at, "content": text, **flags}
        for at, text in enumerate(("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"))
    ]
    for name, text in {**files, "tokenizer.json": orjson.dumps(tokenizer).decode()}.items():
        (folder / name).write_text(text)


async def test_a_prompt_has_the_same_tokens_on_the_loop_and_in_a_process(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process encodes a long system prompt once; then prompts that share it are tokenized on the event loop."""
    write_tokenizer_with_markers(tmp_path)
    system = {"role": "system", "content": "Be careful. " * ENCODED_CHARACTERS_MAX}
    bodies: list[dict[str, Any]] = [
        {"model": "m", "stream": True, "messages": [system, {"role": "user", "content": text}]}
        for text in ("first", "second", "und »noch« eine 🙂", "long" * ENCODED_CHARACTERS_MAX)
    ]
    bodies.append({**bodies[0], "chat_template_kwargs": {"number": 1}})
    calls = 0
    ask = TokenizerProcess._ask

    async def counting(process: TokenizerProcess, head: bytes, body: bytes) -> Any:
        nonlocal calls
        calls += 1
        return await ask(process, head, body)

    monkeypatch.setattr(TokenizerProcess, "_ask", counting)
    async with on_stage(backend, {"tokenizers": {"m": tmp_path}}) as stage:
        counts, known = stage.front.counts, ModelTokenizer(tmp_path, 0)
        n_expected, n_calls = 0, []
        for body in bodies:
            assert (await stage.post(body))[0] == 200
            n_expected += len(known.encode(Kind.CHAT, orjson.dumps(body)).tokens) // 4
            assert counts.prompt_tokens == n_expected
            n_calls.append(calls)
        assert counts.sources == {"files": len(bodies)}
        assert n_calls == [1, 1, 1, 2, 3]


async def test_tokenizer_processes_are_replaced_when_one_dies(backend: Backend, tmp_path: Path) -> None:
    """The request that meets the dead process is routed by load, and the next one has its tokens again."""
    for name, text in tokenizer_files().items():
        (tmp_path / name).write_text(text)
    async with on_stage(backend, {"tokenizers": {"m": tmp_path}}) as stage:
        sources, numbers = stage.front.counts.sources, itertools.count()

        async def post() -> None:
            assert (await stage.post(long_prompt(next(numbers)), "/v1/completions"))[0] == 200

        await post()
        assert sources == {"files": 1}
        (process,) = stage.front.tokenizing._processes
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        while sources["none"] == 0:
            await post()
        before = sources["files"]
        await stage.until(lambda: process.running, "the next process")
        await post()
        assert sources["files"] == before + 1


async def test_a_tokenizer_that_takes_too_long_is_killed(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template may loop for hours; its request is routed by load, and the process is replaced."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for name, text in tokenizer_files().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "chat_template.jinja").write_text(endless)
    monkeypatch.setattr(tokenizing, "TOKENIZE_TIMEOUT_S", 0.5)
    async with on_stage(backend, {"tokenizers": {"m": tmp_path}}) as stage:
        (process,) = stage.front.tokenizing._processes
        before = process.pid
        assert (await stage.post())[2] == answer_bytes()
        assert stage.front.counts.sources == {"none": 1}
        await stage.until(lambda: process.running and process.pid != before, "the next process")
        monkeypatch.setattr(tokenizing, "TOKENIZE_TIMEOUT_S", PATIENCE_S)
        await stage.post(long_prompt(0), "/v1/completions")
        assert stage.front.counts.sources == {"none": 1, "files": 1}


async def test_a_fleet_without_tokenizers_routes_by_load(backend: Backend) -> None:
    """These engines have no /tokenize; their answers reach the client all the same."""
    async with on_stage(backend) as stage:
        assert (await stage.post())[2] == answer_bytes()
        assert stage.front.counts.sources == {"none": 1}


async def test_a_stopping_front_says_so_and_finishes_its_streams(backend: Backend) -> None:
    """/ready turns to 503 during the notice, and a running stream reaches its end."""
    async with on_stage(backend) as stage:
        stage.front.stopping = True
        async with aiohttp.ClientSession() as session, session.get(f"{stage.url}/ready") as response:
            assert response.status == 503
            assert "stopping" in (await response.json())["reason"]
        assert (await stage.post())[2] == answer_bytes()


async def test_an_error_event_before_the_first_token_is_an_error_of_this_engine(backend: Backend) -> None:
    """Engines whose HTTP status has been sent report a failure as an event; another engine then answers."""
    async with on_stage(backend) as stage:
        failed = Script(answer=error_event(503, "the engine is stopping", "stopping").replace(b'"stopping"}', b"503}"))
        for failing in (0, 1):
            stage.script(*[failed if at == failing else Script() for at in range(2)])
            assert (await stage.post())[2] == answer_bytes()
        stage.script(failed, replace(failed))
        assert (await stage.post())[2] == failed.answer
