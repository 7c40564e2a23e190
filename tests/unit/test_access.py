"""Tokens and TLS on real sockets: who is refused, with what, and what happens when the files change."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography.hazmat.primitives import serialization

from streams.errors import SettingsError
from streams.lab.kafka.ports import free_port
from streams.process.http_server import HttpServer, Startup, monitoring_app, starting_app
from streams.process.metrics import MetricsRegistry, gauge
from streams.process.waiting import wait_for
from streams.router_api.http.calls import CALLS
from streams.security.access import Access
from streams.settings import Settings
from tests.helpers.authority import Authority
from tests.helpers.local_router import local_router

READER, ROUTER, OPERATOR = (f"{name}-0123456789abcdef" for name in ("reader", "router", "operator"))
RIGHT_OF = {READER: "read", ROUTER: "route", OPERATOR: "operate"}

REGISTRY = MetricsRegistry((gauge("kvstreams_x", "X", float),), lambda: 7)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check files for changes often."""
    monkeypatch.setattr("streams.process.listener.CHECK_S", 0.05)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    """Give a file with a token for each right."""
    file = tmp_path / "tokens.toml"
    file.write_text(
        "".join(f'[{right}]\ntoken = "{token}"\nrights = ["{right}"]\n' for token, right in RIGHT_OF.items())
    )
    return file


def call(
    port: int,
    method: str,
    path: str,
    token: str | None = None,
    body: Any = None,
    context: ssl.SSLContext | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    address = ("127.0.0.1", port)
    connection = HTTPConnection(*address, timeout=20) if context is None else HTTPSConnection(
        *address, timeout=20, context=context
    )  # fmt: skip
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {**headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def status(*arguments: Any, **options: Any) -> int:
    return call(*arguments, **options)[0]


NewLoop = Callable[[], asyncio.AbstractEventLoop]

#: Routers and bridges run on uvloop, and Faust workers on asyncio's own loop.
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@contextmanager
def running(scenario: Any, new_loop: NewLoop) -> Iterator[None]:
    """Run a coroutine function with an event that ends it on a loop of its own, as long as the block runs."""
    loop = new_loop()
    over, started = asyncio.Event(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(scenario(started, over))
        except BaseException as exc:
            failures.append(exc)
        finally:
            started.set()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(20)
    try:
        if failures:
            raise failures[0]
        yield
    finally:
        if not failures:
            loop.call_soon_threadsafe(over.set)
        thread.join()


@contextmanager
def monitored(settings: Settings, new_loop: NewLoop = asyncio.new_event_loop) -> Iterator[int]:
    """Serve the pages of a process without an HTTP API; give the port."""
    access = Access(settings)
    port = free_port()

    async def scenario(started: threading.Event, over: asyncio.Event) -> None:
        server = HttpServer("127.0.0.1", port, "metrics_port", access)
        await server.serve(starting_app(Startup()))
        await server.serve(monitoring_app(lambda: None, [REGISTRY], access))
        started.set()
        await over.wait()
        await server.close()

    with running(scenario, new_loop):
        yield port


def path_of(pattern: str) -> str:
    """A path that the API accepts."""
    ids = {"request_id": "r1", "worker_id": "1", "pool_id": "pool", "dp_rank": "0"}
    return pattern.format_map(ids)


def test_each_call_of_a_router_needs_the_right_that_the_table_names(tokens_file: Path) -> None:
    """Without a token: 401 for all calls but those that need none; with one that lacks the right: 403; never a 500."""
    with local_router(Settings(tokens_file=str(tokens_file))) as local:
        port = int(local.api.url.rpartition(":")[2])
        for each in CALLS:
            path = path_of(each.path)
            if each.right is None:
                assert status(port, each.method, path) < 500, path
                continue
            code, headers, body = call(port, each.method, path)
            assert (code, headers["www-authenticate"]) == (401, "Bearer"), path
            assert json.loads(body)["error"]["code"] == "unauthorized"
            assert status(port, each.method, path, "x" * 30) == 401
            for token, right in RIGHT_OF.items():
                if right != each.right:
                    code, _, body = call(port, each.method, path, token)
                    error = json.loads(body)["error"]
                    assert (code, error["code"], error["detail"]) == (403, "forbidden", {"right": str(each.right)}), (
                        path
                    )
                    assert token not in body.decode()


def test_a_token_with_the_right_is_served(tokens_file: Path) -> None:
    """The answer is that of a router without tokens, also for HEAD."""
    with local_router(Settings(tokens_file=str(tokens_file))) as local:
        port = int(local.api.url.rpartition(":")[2])
        code, _, body = call(port, "POST", "/route", ROUTER, {"request_id": "r1", "token_ids": [1] * 32})
        assert (code, json.loads(body)["request_id"]) == (200, "r1")
        assert status(port, "GET", "/loads", READER) == 200
        assert status(port, "HEAD", "/loads", READER) == 200
        assert status(port, "HEAD", "/loads", ROUTER) == 403
        assert status(port, "GET", "/healthz") == 200
        assert status(port, "GET", "/ready") == 200


def test_paths_that_do_not_exist_are_shown_to_known_tokens_only(tokens_file: Path) -> None:
    """A stranger gets 401 for any path or method."""
    with local_router(Settings(tokens_file=str(tokens_file))) as local:
        port = int(local.api.url.rpartition(":")[2])
        assert status(port, "GET", "/nothing") == 401
        assert status(port, "DELETE", "/route") == 401
        assert status(port, "GET", "/nothing", READER) == 404
        assert status(port, "DELETE", "/route", READER) == 405


def test_without_tokens_no_request_is_checked() -> None:
    """The application has no middleware for it, so that a check costs nothing."""
    assert Access(Settings()).middlewares(lambda _: "read") == []
    with local_router(Settings()) as local:
        port = int(local.api.url.rpartition(":")[2])
        assert status(port, "GET", "/loads") == 200


def test_a_changed_file_counts_soon_and_a_broken_one_changes_nothing(tokens_file: Path) -> None:
    """A token that is no longer in the file is refused; one that was added is accepted."""
    with monitored(Settings(tokens_file=str(tokens_file))) as port:
        assert status(port, "GET", "/metrics", READER) == 200
        assert status(port, "GET", "/metrics", ROUTER) == 403
        assert status(port, "GET", "/metrics") == 401
        assert (status(port, "GET", "/healthz"), status(port, "GET", "/ready")) == (200, 200)
        tokens_file.write_text("broken")
        time.sleep(0.3)
        assert status(port, "GET", "/metrics", READER) == 200
        tokens_file.write_text('[new]\ntoken = "a-new-token-0123456789"\nrights = ["read"]\n')
        wait_for(lambda: status(port, "GET", "/metrics", READER) == 401, 20, "the old token to be refused")
        assert status(port, "GET", "/metrics", "a-new-token-0123456789") == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_an_address_that_others_reach_needs_tokens_or_a_setting_that_accepts_that(host: str, tokens_file: Path) -> None:
    """The error names the settings to change; loopback needs neither."""
    if host == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with pytest.raises(SettingsError, match=r"there are no tokens.*tokens_file.*allow_anonymous"):
        HttpServer(host, free_port(), access=Access(Settings()))
    for settings in (Settings(allow_anonymous=True), Settings(tokens_file=str(tokens_file))):
        asyncio.run(HttpServer(host, free_port(), access=Access(settings)).close())
    for loopback in ("127.0.0.1", "localhost", "127.0.0.2"):
        asyncio.run(HttpServer(loopback, free_port(), access=Access(Settings())).close())


def test_a_process_that_would_be_open_to_everyone_ends_with_one_line(tmp_path: Path) -> None:
    """The line says what to set."""
    done = subprocess.run(
        [sys.executable, "-m", "streams.cli", "router", "--host", "0.0.0.0", "--port", str(free_port())],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvstreams: ")]
    assert len(lines) == 1 and "there are no tokens" in lines[0]


@LOOPS
def test_a_changed_certificate_is_used_for_new_connections_and_old_ones_go_on(
    new_loop: NewLoop, tmp_path: Path
) -> None:
    """The server gives the new certificate within seconds; a connection from before answers still."""
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    served = tmp_path / "served.pem"
    served.write_bytes(Path(first.sign("one", "127.0.0.1")).read_bytes())
    trusts_first, trusts_second = (ssl.create_default_context(cafile=each.file) for each in (first, second))
    with monitored(Settings(tls_certificate=str(served)), new_loop) as port:
        assert status(port, "GET", "/healthz", context=trusts_first) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            call(port, "GET", "/healthz", context=trusts_second)
        before = HTTPSConnection("127.0.0.1", port, context=trusts_first, timeout=20)
        before.request("GET", "/healthz")
        assert before.getresponse().read()

        served.write_text("half a file")
        time.sleep(0.3)
        assert status(port, "GET", "/healthz", context=trusts_first) == 200
        served.write_bytes(Path(second.sign("two", "127.0.0.1")).read_bytes())

        def renewed() -> bool:
            try:
                return status(port, "GET", "/healthz", context=trusts_second) == 200
            except ssl.SSLCertVerificationError:
                return False

        wait_for(renewed, 20, "the new certificate")
        before.request("GET", "/metrics")
        assert before.getresponse().status == 200
        before.close()


@LOOPS
def test_a_client_without_a_certificate_of_the_authority_is_refused(new_loop: NewLoop, tmp_path: Path) -> None:
    """mTLS: the handshake fails without a certificate and with one of another authority."""
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    settings = Settings(tls_certificate=ours.sign("server", "127.0.0.1"), tls_client_ca=ours.file)
    with monitored(settings, new_loop) as port:
        for certificate, allowed in (
            (ours.sign("a", "a.example"), True),
            (others.sign("b", "b.example"), False),
            ("", False),
        ):
            context = ssl.create_default_context(cafile=ours.file)
            if certificate:
                context.load_cert_chain(certificate)
            if allowed:
                assert status(port, "GET", "/healthz", context=context) == 200
            else:
                with pytest.raises(OSError):  # noqa: PT011 - an alert, or a closed connection
                    call(port, "GET", "/healthz", context=context)


@LOOPS
def test_a_router_serves_tls_within_its_limits(
    new_loop: NewLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection too many gets 503 over TLS; a client that does not shake hands is closed after some time."""
    authority = Authority(tmp_path, "a")
    certificate = authority.sign("server", "127.0.0.1")
    settings = Settings(tls_certificate=certificate, connections_max=3, first_request_timeout_s=1.0)
    context = ssl.create_default_context(cafile=authority.file)
    monkeypatch.setattr("streams.process.listener.TLS_HANDSHAKE_S", 1.0)
    with local_router(settings, new_loop=new_loop) as local:
        port = int(local.api.url.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3)]
        wait_for(lambda: status(port, "GET", "/healthz", context=context) == 503, 20, "the limit to count handshakes")
        for each in silent:
            assert each.recv(1) == b""  # closed by the server, at the end of the time for a handshake
            each.close()
        wait_for(lambda: status(port, "GET", "/healthz", context=context) == 200, 20, "room for a connection")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"tls_certificate": "missing.pem"}, r"tls_certificate \(.*missing.pem\) cannot be used: No such file"),
        ({"tls_certificate": "text.pem"}, "must contain a certificate and a key in PEM format"),
        (
            {"tls_certificate": "a.pem", "tls_key": "b.pem"},
            "tls_key .*belongs to another certificate",
        ),
        ({"tls_certificate": "a.pem", "tls_client_ca": "text.pem"}, "tls_client_ca .*contains no certificate"),
        ({"tls_key": "a.pem"}, "tls_key is set, but tls_certificate is not"),
        ({"tls_client_ca": "a.pem"}, "tls_client_ca is set, but tls_certificate is not"),
        ({"tls_certificate": "locked.pem"}, "the key must have no password"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(names: dict[str, str], reason: str, tmp_path: Path) -> None:
    """The error has the setting, the file and what is wrong with it; nobody is asked for a password."""
    authority = Authority(tmp_path, "ca")
    for name in ("a", "b"):
        authority.sign(name, "127.0.0.1")
    (tmp_path / "text.pem").write_text("hello\n")
    with_certificate = b"".join((tmp_path / "a.pem").read_bytes().partition(b"-----BEGIN CERT")[1:])
    (tmp_path / "locked.pem").write_bytes(encrypted(tmp_path / "a.pem") + with_certificate)
    settings = replace(Settings(), **{name: str(tmp_path / file) for name, file in names.items()})  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=reason):
        Access(settings)


def encrypted(key: Path) -> bytes:
    """A key with a password."""
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
