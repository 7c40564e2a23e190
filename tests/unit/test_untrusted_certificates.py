"""What the doctor and `kvstreams top` say of a server with which they cannot speak TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from streams.cli.top import read_live
from streams.doctor.http_reading import HttpReading, call
from streams.errors import ProcessError

LIVE: dict[str, object] = {"router": {}, "samples": {}, "partitions": [], "workers": []}


async def served(context: ssl.SSLContext | None, use: Callable[[str], Awaitable[None]]) -> None:
    """Call `use` with the https URL of a server that speaks TLS if it has a context."""
    app = web.Application()
    app.router.add_get("/live", lambda _: asyncio.sleep(0, web.json_response(LIVE)))
    server = TestServer(app, host="localhost")
    await server.start_server(ssl=context)
    try:
        await use(f"https://localhost:{server.port}")
    finally:
        await server.close()


async def read_both(url: str) -> tuple[HttpReading, ProcessError | None]:
    """What the doctor's call returns, and the error of `kvstreams top` if there is one."""
    async with aiohttp.ClientSession() as http:
        answer = await call(http, f"{url}/live")
    try:
        await asyncio.to_thread(read_live, url, None)
    except ProcessError as exc:
        return answer, exc
    return answer, None


@pytest.fixture
def authority(monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """Give an authority that no trust store has."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "localhost")
    return trustme.CA()


@pytest.fixture
def context(authority: trustme.CA) -> ssl.SSLContext:
    """Give the context of a server whose certificate the authority has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


def test_a_certificate_of_an_unknown_authority_is_named_with_the_remedy(context: ssl.SSLContext) -> None:
    """OpenSSL's number for it is 1, which the system calls `Operation not permitted`."""

    async def check(url: str) -> None:
        answer, error = await read_both(url)
        assert answer.error is not None and error is not None
        for text in (answer.error, error.message):
            assert "its certificate is not trusted: unable to get local issuer certificate" in text
        assert "SSL_CERT_FILE" in answer.error
        assert error.remedy is not None and "SSL_CERT_FILE" in error.remedy

    asyncio.run(served(context, check))


def test_the_remedy_works_for_kvstreams_top(
    authority: trustme.CA, context: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the authority's file in SSL_CERT_FILE, the router is read. (aiohttp reads the variable once per process.)"""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))

    async def check(url: str) -> None:
        assert await asyncio.to_thread(read_live, url, None) == LIVE

    asyncio.run(served(context, check))


def test_a_server_without_tls_is_named_as_one() -> None:
    """Its URL is wrong in its first letters."""

    async def check(url: str) -> None:
        answer, error = await read_both(url)
        assert answer.error == "it does not speak TLS; its URL begins with http://"
        assert error is not None and answer.error in error.message

    asyncio.run(served(None, check))
