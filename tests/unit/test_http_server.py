"""The HTTP server of a process: listening, starting, and what replaces the pages of a starting process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from aiohttp import web

from streams.errors import SettingsError
from streams.lab.kafka.ports import free_port
from streams.process.http_server import (
    HttpServer,
    Startup,
    monitoring_app,
    monitoring_server,
    starting_app,
)
from streams.process.metrics import MetricsRegistry, gauge

REGISTRY = MetricsRegistry((gauge("kvstreams_x", "X", float),), lambda: 7)


def get(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    """Status and JSON of an answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10.0) as response:
            status, body = response.status, response.read()
    except urllib.error.HTTPError as refused:
        with refused:
            status, body = refused.code, refused.read()
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body.decode()


async def ask(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    return await asyncio.to_thread(get, port, path, method)


async def test_a_starting_process_answers_with_what_it_is_doing() -> None:
    """/healthz is 200, /ready is 503 with the reason, and every other call is refused with 503 and the same reason."""
    startup = Startup()
    server = HttpServer("127.0.0.1", 0)
    port = server.address[1]
    await server.serve(starting_app(startup))
    assert await ask(port, "/healthz") == (200, {"status": "ok"})
    startup.note("compiling kernels, 1 of 9 are done")
    status, answer = await ask(port, "/ready")
    assert (status, answer["ready"], answer["reason"]) == (503, False, "compiling kernels, 1 of 9 are done")
    status, answer = await ask(port, "/route", "POST")
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert answer["error"]["message"] == "compiling kernels, 1 of 9 are done"
    await server.close()


async def test_no_connection_is_refused_while_a_process_finishes_its_start() -> None:
    """The application that replaces the starting one takes over the socket: every call in between is answered."""

    async def hello(_: web.Request) -> web.Response:
        return web.json_response({"hello": True})

    server = HttpServer("127.0.0.1", 0)
    port = server.address[1]
    await server.serve(starting_app(Startup()))
    started = web.Application()
    started.add_routes([web.get("/healthz", hello)])

    async def call_often() -> list[tuple[int, Any]]:
        return [await ask(port, "/healthz") for _ in range(50)]

    callers = [asyncio.create_task(call_often()) for _ in range(4)]
    await asyncio.sleep(0.02)
    await server.serve(started)
    answers = [answer for caller in callers for answer in await caller]
    assert {status for status, _ in answers} == {200}
    assert (await ask(port, "/healthz"))[1] == {"hello": True}
    await server.close()
    with pytest.raises(urllib.error.URLError):
        await ask(port, "/healthz")


async def test_a_connection_that_was_just_accepted_is_answered_when_the_application_changes() -> None:
    """400 changes under three callers without a pause: each call is answered, and none is reset."""
    server = HttpServer("127.0.0.1", 0)
    port = server.address[1]
    await server.serve(starting_app(Startup()))
    changed = threading.Event()

    def call_until_changed() -> list[bytes]:
        answers = []
        while not changed.is_set():
            with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                answers.append(connection.recv(15))
        return answers

    callers = [asyncio.create_task(asyncio.to_thread(call_until_changed)) for _ in range(3)]
    try:
        for _ in range(400):
            await asyncio.sleep(0.002)
            await server.serve(starting_app(Startup()))
    finally:
        changed.set()
    answers = [answer for caller in callers for answer in await caller]
    assert len(answers) > 100
    assert set(answers) == {b"HTTP/1.1 200 OK"}
    await server.close()


@pytest.mark.parametrize("setting", ["port", "metrics_port"])
def test_an_address_in_use_is_named_with_the_setting_to_change(setting: str) -> None:
    """The error names host, port, setting and option; nothing is left open."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        option = f"--{setting.replace('_', '-')}"
        with pytest.raises(SettingsError, match=f"{setting}: cannot listen on 127.0.0.1:{port}: .*in use.*{option}"):
            HttpServer("127.0.0.1", port, setting)


async def test_a_name_with_several_addresses_is_listened_on_at_each() -> None:
    """`localhost` may be 127.0.0.1 and ::1; the port is the same for both."""
    port = free_port()
    server = HttpServer("localhost", port)
    await server.serve(starting_app(Startup()))
    for _, _, _, _, address in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
        reader, writer = await asyncio.open_connection(*address[:2])
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.0 200")
        writer.close()
        await writer.wait_closed()
    await server.close()


async def test_a_process_without_the_api_serves_metrics_health_and_readiness() -> None:
    """/metrics, /healthz and /ready answer while the server runs, and the port is free again afterwards."""
    port = free_port()
    reasons: list[str] = ["the registry is being read"]
    async with monitoring_server("127.0.0.1", port, Startup()) as server:
        assert server is not None
        assert (await ask(port, "/ready"))[0] == 503
        await server.serve(monitoring_app(lambda: reasons[0] if reasons else None, [REGISTRY]))
        assert "kvstreams_x 7.0\n" in (await ask(port, "/metrics"))[1]
        assert await ask(port, "/healthz") == (200, {"status": "ok"})
        assert await ask(port, "/ready") == (503, {"ready": False, "reason": reasons[0]})
        reasons.clear()
        assert await ask(port, "/ready") == (200, {"ready": True})
        assert (await ask(port, "/router/"))[0] == 404
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}.*--metrics-port"):
            async with monitoring_server("127.0.0.1", port, Startup()):
                raise AssertionError("it must not serve")
    with pytest.raises(urllib.error.URLError):
        await ask(port, "/healthz")
    async with monitoring_server("127.0.0.1", 0, Startup()) as server:
        assert server is None  # off: nothing is listened on
