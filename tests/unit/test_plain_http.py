"""The client for HTTP/1.1 against servers on real sockets whose bytes the tests choose."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trustme
import uvloop

from streams.client import plain_http
from streams.client.plain_http import ConnectFailed, ConnectionBroken, HttpAnswer, PlainHttp

#: Only a hang is a failure.
PATIENCE_S = 20.0

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

NewLoop = Callable[[], asyncio.AbstractEventLoop]

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True, params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> NewLoop:
    """Give each event loop that the client is used on; the test runs on it."""
    new_loop: NewLoop = request.param
    return new_loop


class Server:
    """A server whose connections are handled by the test. url: its address. n_connections: that it has accepted."""

    def __init__(self) -> None:
        self.url = ""
        self.n_connections = 0
        self.requests: list[bytes] = []

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """Read a request with its body; b"" if the client has closed the connection."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
        self.requests.append(head + await reader.readexactly(length))
        return self.requests[-1]


@asynccontextmanager
async def serving(serve: Callable[[Server], Serve], context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Run a server until the block ends, over TLS if there is a context for it."""
    server = Server()
    handle = serve(server)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.n_connections += 1
        try:
            await handle(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=context)
    scheme = "http" if context is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, asyncio.timeout(PATIENCE_S):
        yield server


def answering(*answers: bytes, piece: int = 1 << 20) -> Callable[[Server], Serve]:
    """Answer requests with these bytes in turn, of which each connection gets as many as it asks for."""

    def serve(server: Server) -> Serve:
        left = list(answers)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while left and await server.request(reader):
                answer = left.pop(0)
                for at in range(0, len(answer), piece):
                    writer.write(answer[at : at + piece])
                    await writer.drain()
                    await asyncio.sleep(0)
                if b"ength" not in answer and b"chunked" not in answer:
                    return

        return handle

    return serve


@asynccontextmanager
async def client(**options: float) -> AsyncIterator[PlainHttp]:
    http = PlainHttp(**{"keepalive_s": 5.0, "connect_timeout_s": 5.0, **options})  # type: ignore[arg-type]
    try:
        yield http
    finally:
        http.close()


async def get(http: PlainHttp, server: Server, silence_s: float = PATIENCE_S, **options: bool) -> HttpAnswer:
    return await http.request("GET", server.url, "/", {}, None, silence_s, **options)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (OK, 200, b"ok"),
        (b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", 404, b""),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nT: x\r\n\r\n",
            200,
            b"abcde",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil it closes", 200, b"until it closes"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil it closes", 200, b"until it closes"),
    ],
)
async def test_every_form_of_an_answer_is_read(raw: bytes, status: int, body: bytes, piece: int) -> None:
    """The status and the whole body arrive, wherever the bytes are cut."""
    async with serving(answering(raw, piece=piece)) as server, client() as http:
        answer = await get(http, server)
        assert (answer.status, await answer.read()) == (status, body)
        assert answer.at_eof and await answer.readany() == b""


async def test_requests_arrive_as_they_were_given() -> None:
    """Path, query, headers and body are sent, with the host and the length; a line break is refused."""
    async with serving(answering(OK, OK)) as server, client() as http:
        headers = {"X-One": "é", "Content-Type": "text/plain"}
        answer = await http.request("POST", f"{server.url}/base/", "/p?q=1", headers, b"body", PATIENCE_S)
        assert await answer.read() == b"ok"
        host = server.url.removeprefix("http://")
        assert server.requests == [
            f"POST /base/p?q=1 HTTP/1.1\r\nHost: {host}\r\nX-One: é\r\nContent-Type: text/plain\r\n"
            "Content-Length: 4\r\n\r\nbody".encode()
        ]
        with pytest.raises(ValueError, match="X-Two"):
            await http.request("GET", server.url, "/", {"X-Two": "a\r\nX-Three: b"}, None, PATIENCE_S)
        large = bytes(range(256)) * 4096
        await (await http.request("POST", server.url, "/", {}, large, PATIENCE_S)).read()
        assert server.requests[-1].endswith(b"\r\n\r\n" + large)


async def test_a_connection_is_used_again_until_it_was_idle_for_too_long() -> None:
    """One connection serves requests one after the other; an idle one is closed after keepalive_s."""
    async with serving(answering(*[OK] * 4)) as server, client(keepalive_s=0.2) as http:
        for _ in range(3):
            assert await (await get(http, server)).read() == b"ok"
        assert (server.n_connections, len(http)) == (1, 1)
        while len(http):
            await asyncio.sleep(0.01)
        assert await (await get(http, server)).read() == b"ok"
        assert server.n_connections == 2


async def test_a_server_in_use_has_a_connection_ready_for_the_next_request() -> None:
    """Long answers take a connection each. The second request in a row opens one for the third, and so on."""
    async with serving(answering(*[ENDLESS] * 4)) as server, client(keepalive_s=0.5, keeps_spares=True) as http:
        first = await get(http, server)
        assert len(http) == 1  # a server that is used once gets no further connection
        second = await get(http, server)
        while len(http) < 3 or http._spares:
            await asyncio.sleep(0.001)
        third = await get(http, server)
        while len(http) < 4 or http._spares:
            await asyncio.sleep(0.001)
        assert (server.n_connections, len(server.requests)) == (4, 3)
        while len(http) > 3:  # the spare one was idle for keepalive_s
            await asyncio.sleep(0.01)
        assert [answer.status for answer in (first, second, third)] == [200] * 3


async def test_a_spare_connection_that_the_server_closes_is_not_used() -> None:
    """The next request opens one of its own, and those that are under way go on."""

    def serve(server: Server) -> Serve:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if server.n_connections == 3:
                return
            await server.request(reader)
            writer.write(ENDLESS)
            await reader.read()

        return handle

    async with serving(serve) as server, client(keeps_spares=True) as http:
        answers = [await get(http, server), await get(http, server)]
        while server.n_connections < 3 or http._spares or len(http) > 2:
            await asyncio.sleep(0.001)
        answers.append(await get(http, server))
        assert server.n_connections == 4
        assert not any(answer.at_eof or answer.status != 200 for answer in answers)
        for answer in answers:
            answer.close()


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_kept_connection_that_the_server_closes_fails_or_is_replaced(repeatable: bool) -> None:
    """A request that may be repeated is sent again on another connection; any other fails."""

    def serve(server: Server) -> Serve:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_first = server.n_connections == 1
            while await server.request(reader):
                if is_first and len(server.requests) == 2:
                    return  # it closes the connection in place of an answer
                writer.write(OK)

        return handle

    async with serving(serve) as server, client() as http:
        await (await get(http, server)).read()
        if repeatable:
            assert await (await get(http, server, repeatable=True)).read() == b"ok"
            assert (server.n_connections, len(server.requests)) == (2, 3)
        else:
            with pytest.raises(ConnectionBroken):
                await get(http, server)


@pytest.mark.parametrize(
    ("raw", "before"),
    [
        (b"", None),
        (b"HTTP/1.1 200 OK\r\nX: cut", None),
        (b"this is not HTTP at all\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 400_000, None),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", b"half"),
        (ENDLESS + b"4\r\nhalf\r\n", b"half"),
        (ENDLESS + b"4\r\nhalf\r\nZZ\r\n", b"half"),
    ],
)
async def test_a_broken_answer_is_not_taken_for_a_whole_one(raw: bytes, before: bytes | None) -> None:
    """ConnectionBroken is raised after what arrived. before: that part of the body, None without headers."""

    def serve(server: Server) -> Serve:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(raw)
            await writer.drain()

        return handle

    async with serving(serve) as server, client() as http:
        if before is None:
            with pytest.raises(ConnectionBroken):
                await get(http, server)
        else:
            answer, got = await get(http, server), bytearray()
            with pytest.raises(ConnectionBroken):
                await read_into(got, answer)
            assert got == before and not answer.at_eof
        assert len(http) == 0 or await gone(http)


async def read_into(got: bytearray, answer: HttpAnswer) -> None:
    """Read an answer to its end."""
    while data := await answer.readany():
        got += data


async def pump_all(answer: HttpAnswer, take: Callable[[bytes], bool]) -> None:
    """Pump an answer to its end."""
    while not answer.at_eof:
        await answer.pump(take)


async def gone(http: PlainHttp) -> bool:
    """Wait until no connection is open."""
    while len(http):
        await asyncio.sleep(0.01)
    return True


async def test_a_server_that_is_not_there_has_not_seen_the_request() -> None:
    """A refused connection, and an address that is none, raise ConnectFailed."""
    async with client() as http:
        for url in ("http://127.0.0.1:1", "ftp://127.0.0.1", "http://", "http://[", "http://127.0.0.1:99999"):
            with pytest.raises(ConnectFailed):
                await http.request("GET", url, "/", {}, None, PATIENCE_S)


def silent(server: Server) -> Serve:
    """Send the headers and one chunk, and then nothing, until the client leaves."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(ENDLESS + b"2\r\nab\r\n")
        server.requests.append(await reader.read())

    return handle


async def test_silence_counts_while_it_is_waited_for() -> None:
    """A reader gets TimeoutError after silence_s; an answer that nobody reads does not fail."""
    async with serving(silent) as server, client() as http:
        answer = await get(http, server, silence_s=0.1)
        await asyncio.sleep(0.3)
        assert await answer.readany() == b"ab"
        with pytest.raises(TimeoutError):
            await answer.readany()
        assert await gone(http)
        answer = await get(http, server)
        answer.limit_silence(0.1)
        with pytest.raises(TimeoutError):
            await answer.pump(lambda _: True)


async def test_a_short_answer_must_be_complete_in_time() -> None:
    """Bytes that arrive do not extend the time, as they do for a stream."""

    def trickling(server: Server) -> Serve:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(ENDLESS)
            while not writer.is_closing():
                writer.write(b"2\r\nab\r\n")
                await asyncio.sleep(0.01)

        return handle

    async with serving(trickling) as server, client() as http:
        answer = await get(http, server, silence_s=0.2, is_short=True)
        with pytest.raises(TimeoutError):
            await answer.read()
        assert await gone(http)


async def test_closing_an_answer_closes_its_connection() -> None:
    """The server sees the end of the connection, and the reader that waits is released."""
    async with serving(silent) as server, client() as http:
        answer = await get(http, server)
        waiting = asyncio.create_task(answer.read())
        await asyncio.sleep(0.05)
        answer.close()
        with pytest.raises(ConnectionBroken):
            await waiting
        while server.requests[-1] != b"":
            await asyncio.sleep(0.01)


async def test_a_cancelled_request_closes_its_connection() -> None:
    """Nothing of it is left, and the next request has a connection of its own."""

    def serve(server: Server) -> Serve:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            if server.n_connections > 1:
                writer.write(OK)
            await reader.read()

        return handle

    async with serving(serve) as server, client() as http:
        asking = asyncio.create_task(get(http, server))
        while not server.requests:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await gone(http)
        assert await (await get(http, server)).read() == b"ok"


async def test_a_pump_passes_everything_on_until_it_is_stopped() -> None:
    """Bytes come in order; what arrives after a stop is kept for the next pump; what the function raises is raised."""
    pieces = [b"%03d" % number for number in range(100)]
    got = bytearray()

    def serve(server: Server) -> Serve:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await server.request(reader):
                writer.write(ENDLESS)
                for number, piece in enumerate(pieces):
                    writer.write(b"3\r\n%b\r\n" % piece)
                    while number % 10 == 9 and len(server.requests) == 1 and len(got) < 3 * (number + 1):
                        await asyncio.sleep(0)  # otherwise all of it would come at once
                writer.write(b"0\r\n\r\n")

        return handle

    async with serving(serve) as server, client() as http:
        answer, n_pumps, n_taken = await get(http, server), 0, 0

        def take(data: bytes) -> bool:
            nonlocal n_taken
            n_taken += 1
            got.extend(data)
            return n_taken % 2 == 0

        while not answer.at_eof:
            n_pumps += 1
            await answer.pump(take)
            await asyncio.sleep(0.001)
        assert bytes(got) == b"".join(pieces) and 5 < n_pumps < n_taken
        answer = await get(http, server)

        def fail(data: bytes) -> bool:
            raise KeyError(data[:1])

        with pytest.raises(KeyError):
            await pump_all(answer, fail)
        answer.close()


async def test_a_pump_raises_what_breaks_the_answer() -> None:
    """The bytes before it were passed on."""
    got = bytearray()

    def take(data: bytes) -> bool:
        got.extend(data)
        return True

    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"

    def serve(server: Server) -> Serve:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(raw)
            await asyncio.sleep(0.05)

        return handle

    async with serving(serve) as server, client() as http:
        answer = await get(http, server)
        with pytest.raises(ConnectionBroken):
            await pump_all(answer, take)
        assert got == b"half"


async def test_a_reader_that_does_not_read_stops_the_server() -> None:
    """At most WAITING_BYTES_MAX and one read are kept; then everything arrives."""
    total = 64 << 20

    def serve(server: Server) -> Serve:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            for _ in range(total >> 20):
                writer.write(bytes(1 << 20))
                await writer.drain()
                server.requests.append(b"sent")
            await reader.read()

        return handle

    async with serving(serve) as server, client() as http:
        answer = await get(http, server)
        await asyncio.sleep(0.3)
        assert len(server.requests) < total >> 21
        assert 0 < answer._n_waiting <= plain_http.WAITING_BYTES_MAX + (1 << 20)
        assert len(await answer.read()) == total


async def test_closing_the_client_fails_what_is_under_way() -> None:
    """Its connections are closed, and it takes no further requests."""
    async with serving(silent) as server, client() as http:
        answer = await get(http, server)
        http.close()
        assert await answer.readany() == b"ab"
        with pytest.raises(ConnectionBroken):
            await answer.readany()
        with pytest.raises(ConnectFailed):
            await get(http, server)
        assert await gone(http)


async def test_a_server_is_asked_over_tls_if_its_certificate_is_trusted() -> None:
    """Kept connections and pumps work as without TLS; with another authority, there is no connection."""
    ours, others = trustme.CA(), trustme.CA()
    serves = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.issue_cert("127.0.0.1").configure_cert(serves)

    def trusting(authority: trustme.CA) -> PlainHttp:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        return PlainHttp(keepalive_s=5.0, connect_timeout_s=5.0, ssl=context)

    async with serving(answering(OK, OK), serves) as server:
        http, got = trusting(ours), bytearray()
        assert await (await get(http, server)).read() == b"ok"
        answer = await get(http, server)

        def take(data: bytes) -> bool:
            got.extend(data)
            return True

        await pump_all(answer, take)
        assert got == b"ok" and server.n_connections == 1
        http.close()
        http = trusting(others)
        with pytest.raises(ConnectFailed):
            await get(http, server)
        http.close()
        assert await gone(http)
