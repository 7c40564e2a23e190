"""A gRPC server in the test's own loop, with a service of every kind of stream, and a client of raw frames."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import h2.connection
import h2.events
from h2.config import H2Configuration

from streams.picker.grpc.call import Call, Service, Stream
from streams.picker.grpc.limits import Limits
from streams.picker.grpc.server import GrpcServer, Held
from streams.picker.grpc.words import Status
from streams.process.listener import Listener
from streams.security.access import HTTP_2, CertificateAccess
from streams.settings import AccessSettings

ECHO = "/test.Echo/"
EACH, LAST, HOLD, EAGER, FAIL, NOTHING = (ECHO + name for name in ("Each", "Last", "Hold", "Eager", "Fail", "Nothing"))

NOTHING_HELD = Held(connections=0, calls=0, buffered_bytes=0)


class EchoStream:
    """Records what it is called with, and answers by its method."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.messages: list[bytes] = []
        self.is_half_closed = False
        self.n_ended = 0

    def received(self, message: bytes) -> None:
        assert not self.n_ended, "a message arrived after the end"
        self.messages.append(message)
        match self.call.method:
            case "/test.Echo/Each":
                self.call.send(message)
            case "/test.Echo/Eager":
                self.call.send(message)
                self.call.finish()
            case "/test.Echo/Fail":
                raise ZeroDivisionError

    def half_closed(self) -> None:
        assert not self.n_ended
        self.is_half_closed = True
        match self.call.method:
            case "/test.Echo/Each":
                self.call.finish()
            case "/test.Echo/Last":
                self.call.send(self.messages[-1])
                self.call.finish()
            case "/test.Echo/Nothing":
                self.call.finish(Status.ABORTED, "100 % für nichts\n")

    def ended(self) -> None:
        self.n_ended += 1


class Echo:
    """A service that keeps the streams of its calls."""

    def __init__(self) -> None:
        self.streams: list[EchoStream] = []

    def __call__(self, call: Call) -> Stream | None:
        if call.method not in (EACH, LAST, HOLD, EAGER, FAIL, NOTHING):
            return None
        self.streams.append(EchoStream(call))
        return self.streams[-1]

    def all_ended(self) -> bool:
        """Whether every stream has ended, exactly once."""
        return all(stream.n_ended == 1 for stream in self.streams)


class Running:
    """A server that runs, and its address. echo: its service, unless a test has another one."""

    def __init__(self, server: GrpcServer, echo: Echo, address: tuple[str, int]) -> None:
        self.server = server
        self.echo = echo
        self.host, self.port = address
        self.target = f"{self.host}:{self.port}"


@asynccontextmanager
async def running(
    limits: Limits | None = None,
    service: Service | None = None,
    settings: AccessSettings | None = None,
    *,
    clients_stay: bool = False,
    self_signed: bool = False,
) -> AsyncIterator[Running]:
    """Serve while the block runs. Afterwards the server must hold nothing, and every stream must have ended once.

    clients_stay: their connections are closed by the server. The official client keeps one while a call of it exists.
    """
    echo = Echo()
    server = GrpcServer(service or echo, limits)
    listener = Listener("127.0.0.1", 0, "port", CertificateAccess(settings, HTTP_2, self_signed=self_signed))
    tasks = asyncio.all_tasks()
    await server.start(listener)
    try:
        yield Running(server, echo, listener.address)
        await until(lambda: _holds_nothing(server.held(), clients_stay), server.held)
        assert echo.all_ended()
    finally:
        await server.close()
    assert server.held() == NOTHING_HELD
    await asyncio.sleep(0)
    assert {task for task in asyncio.all_tasks() if not task.done()} <= tasks, "the server left a task"


def _holds_nothing(held: Held, clients_stay: bool) -> bool:
    return not (held.calls or held.buffered_bytes or (held.connections and not clients_stay))


async def until(condition: object, shown: object = None, patience_s: float = 20.0) -> None:
    """Wait until a function returns something true."""
    assert callable(condition)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + patience_s
    while not condition():
        assert loop.time() < until_s, shown() if callable(shown) else "nothing came"
        await asyncio.sleep(0.005)


def request_headers(method: str = EACH, others: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """The headers of a call. others: further ones, or other values; an empty text removes a header."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "test",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    headers |= others or {}
    return [(name, value) for name, value in headers.items() if value]


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a frame. length: another one than the payload's."""
    return struct.pack(">I", len(payload) if length is None else length)[1:] + struct.pack(
        ">BBI", kind, flags, stream_id
    ) + payload  # fmt: skip


class RawClient:
    """A connection whose frames a test chooses: by h2, by hand, or both. events: what h2 read so far.

    is_silent: whether h2 only reads, and a test sends all bytes itself.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.h2 = h2.connection.H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.events: list[h2.events.Event] = []
        self.received = b""
        self.is_silent = False

    def begin_by_hand(self) -> None:
        """Send nothing, and read what the server sends."""
        self.h2.initiate_connection()
        self.is_silent = True

    def begin(self) -> None:
        """Send the preface and settings."""
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        """Send what h2 has to send."""
        data = self.h2.data_to_send()
        if not self.is_silent:
            self.write(data)

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait until the server has read, or has gone."""
        try:
            await self._writer.drain()
        except OSError:
            pass

    def open(self, method: str = EACH, others: Mapping[str, str] | None = None, *, end_stream: bool = False) -> int:
        """Open a stream; returns its id."""
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, request_headers(method, others), end_stream=end_stream)
        self.flush()
        return stream_id

    def message(self, stream_id: int, message: bytes, *, end_stream: bool = False) -> None:
        """Send one message in one frame."""
        self.h2.send_data(stream_id, b"\0" + struct.pack(">I", len(message)) + message, end_stream=end_stream)
        self.flush()

    async def read(self) -> bool:
        """Read once; returns whether the connection is still open."""
        try:
            data = await self._reader.read(65_536)
        except OSError:
            return False
        if not data:
            return False
        self.received += data
        for event in self.h2.receive_data(data):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self.flush()
        return True

    async def read_raw(self) -> bool:
        """Read once without understanding it; returns whether the connection is still open."""
        async with asyncio.timeout(20):
            try:
                data = await self._reader.read(65_536)
            except OSError:
                return False
        self.received += data
        return bool(data)

    async def event(self, kind: type[h2.events.Event], stream_id: int | None = None) -> h2.events.Event:
        """Read until an event of this kind, of this stream, and return the first one."""
        async with asyncio.timeout(20):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                        return event
                assert await self.read(), f"the connection ended; there was no {kind.__name__}"

    async def goaway(self) -> tuple[int, str]:
        """Read until the server's GOAWAY and the end of the connection; returns its code and text."""
        event = await self.event(h2.events.ConnectionTerminated)
        async with asyncio.timeout(20):
            try:
                while await self._reader.read(65_536):
                    pass
            except OSError:
                pass
        self.close()
        return int(event.error_code or 0), (event.additional_data or b"").decode()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


@asynccontextmanager
async def raw_client(server: Running) -> AsyncIterator[RawClient]:
    """Connect while the block runs."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        client.close()
        try:
            await writer.wait_closed()
        except OSError:
            pass


async def still_answers(server: Running) -> None:
    """Make a call on a new connection, which must be answered."""
    async with raw_client(server) as client:
        client.begin()
        stream_id = client.open(EACH)
        client.message(stream_id, b"hello", end_stream=True)
        await client.event(h2.events.StreamEnded, stream_id)
        data = b"".join(event.data for event in client.events if isinstance(event, h2.events.DataReceived))
        assert data == b"\0\0\0\0\x05hello"
