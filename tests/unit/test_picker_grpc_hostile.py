"""The gRPC server of the picker, and peers that break HTTP/2, exceed its limits, or stop in the middle.

After each of them the server answers others, and holds no stream, no task and no buffer (helpers/grpc_server.py).
"""

from __future__ import annotations

import asyncio
import gzip
import random
import ssl
import struct
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import h2.events
import pytest
from h2.errors import ErrorCodes
from hpack import Encoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams.picker.grpc.connection import _LEAVE_PING
from streams.picker.grpc.frames import FrameWatch
from streams.picker.grpc.framing import HEAD_BYTES, MessageReader, Unreadable, framed
from streams.picker.grpc.limits import (
    EMPTY_FRAMES_BURST,
    FRAME_BYTES_MAX,
    FRAME_S,
    HEADER_BLOCK_BYTES_MAX,
    KEEPALIVE_ANSWER_S,
    KEEPALIVE_S,
    LINGER_S,
    MESSAGE_S,
    MIB,
    PREFACE_S,
    RAPID_RESETS_BURST,
    RAPID_RESETS_PER_S,
    STALL_S,
    STREAMS_AFTER_GOAWAY_MAX,
    Limits,
    Reason,
    Violation,
)
from streams.picker.grpc.words import Status
from streams.process.listener import TLS_HANDSHAKE_S
from streams.security.access import HTTP_2
from tests.helpers.grpc_server import (
    EACH,
    HOLD,
    LAST,
    RawClient,
    Running,
    frame,
    raw_client,
    request_headers,
    running,
    still_answers,
    until,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
BEGIN = PREFACE + frame(SETTINGS, 0, 0)


def _block(*headers: tuple[str, str]) -> bytes:
    return bytes(Encoder().encode(list(headers) or request_headers()))


def _opened(stream_id: int = 1) -> bytes:
    return frame(HEADERS, END_HEADERS, stream_id, _block())


async def _ended(server: Running, sent: bytes) -> tuple[int, str]:
    """Send these bytes; returns the code and the text of the GOAWAY that ends the connection."""
    async with raw_client(server) as client:
        client.begin_by_hand()
        client.write(sent)
        return await client.goaway()


# -- bytes that are not HTTP/2, or break its rules ---------------------------------------------------------------------

BROKEN = {
    "garbage": bytes(range(256)) * 40,
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    "a preface with one wrong byte": PREFACE[:-1] + b"x" + frame(SETTINGS, 0, 0),
    "no settings": PREFACE + frame(PING, 0, 0, bytes(8)),
    "headers first": PREFACE + _opened(),
    "DATA on an idle stream": BEGIN + frame(DATA, 0, 5, b"x"),
    "WINDOW_UPDATE on an idle stream": BEGIN + frame(WINDOW_UPDATE, 0, 5, struct.pack(">I", 1)),
    "WINDOW_UPDATE of 0": BEGIN + frame(WINDOW_UPDATE, 0, 0, bytes(4)),
    "a window over the maximum": BEGIN + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)),
    "SETTINGS of 5 bytes": BEGIN + frame(SETTINGS, 0, 0, bytes(5)),
    "SETTINGS on a stream": BEGIN + frame(SETTINGS, 0, 1),
    "a frame size out of range": BEGIN + frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)),
    "PING of 7 bytes": BEGIN + frame(PING, 0, 0, bytes(7)),
    "PING on a stream": BEGIN + frame(PING, 0, 1, bytes(8)),
    "RST_STREAM on an idle stream": BEGIN + frame(RST, 0, 0, bytes(4)),
    "a stream of the server": BEGIN + _opened(2),
    "a stream id that goes back": BEGIN + _opened(5) + frame(RST, 0, 5, bytes(4)) + _opened(3),
    "headers twice": BEGIN + _opened() + _opened(),
    "CONTINUATION alone": BEGIN + frame(CONTINUATION, END_HEADERS, 1, _block()),
    "DATA within headers": BEGIN + frame(HEADERS, 0, 1, _block()) + frame(DATA, 0, 1, b"x"),
    "CONTINUATION of another stream": BEGIN + frame(HEADERS, 0, 1, _block()) + frame(CONTINUATION, 4, 3),
    "padding longer than the frame": BEGIN + _opened() + frame(DATA, PADDED, 1, b"\xff\x00"),
    "PUSH_PROMISE": BEGIN + _opened() + frame(5, END_HEADERS, 1, struct.pack(">I", 2) + _block()),
    "a block that HPACK cannot read": BEGIN + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff"),
    "an index that HPACK does not have": BEGIN + frame(HEADERS, END_HEADERS, 1, b"\xfe"),
    "a table larger than allowed": BEGIN + frame(HEADERS, END_HEADERS, 1, b"\x3f\xe1\xff\xff\x03" + _block()),
    "Huffman that ends early": BEGIN + frame(HEADERS, END_HEADERS, 1, b"\x00\x85\xff\xff\xff\xff\xff\x00"),
    "no path": BEGIN + frame(HEADERS, END_HEADERS, 1, _block((":method", "POST"), (":scheme", "http"))),
    "a stream that depends on itself": BEGIN + frame(PRIORITY, 0, 1, struct.pack(">IB", 1, 0)),
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
async def test_a_peer_that_breaks_the_protocol_is_sent_away(sent: bytes) -> None:
    """GOAWAY names an error, the connection ends, and others are answered."""
    async with running(Limits(message_bytes_max=1024)) as server:
        async with raw_client(server) as client:
            client.begin_by_hand()
            client.write(sent)
            code, _ = await client.goaway()
            assert code != ErrorCodes.NO_ERROR
            assert server.server.tally.connections_ended.total() == 1
        await still_answers(server)


@pytest.mark.parametrize("n_bytes", range(0, 120, 7))
async def test_a_peer_may_leave_at_any_byte(n_bytes: int) -> None:
    """A connection that ends within the preface, a frame's head, headers or a message leaves nothing behind."""
    whole = BEGIN + _opened() + frame(DATA, 0, 1, b"\0\0\0\x10\0" + b"x" * 40)
    async with running() as server:
        async with raw_client(server) as client:
            client.write(whole[:n_bytes])
            await client.drain()
            await asyncio.sleep(0)
        await still_answers(server)


async def test_frames_in_single_bytes_are_read() -> None:
    """A call whose bytes arrive one by one is answered."""
    async with running() as server, raw_client(server) as client:
        client.h2.initiate_connection()
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, request_headers())
        client.h2.send_data(stream_id, framed(b"hello"), end_stream=True)
        for byte in client.h2.data_to_send():
            client.write(bytes([byte]))
            await asyncio.sleep(0)
        await client.event(h2.events.StreamEnded, stream_id)
        assert framed(b"hello") in client.received


# -- requests that are not gRPC ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "http", "grpc_status"),
    [
        ({"content-type": "application/json"}, "415", Status.UNKNOWN),
        ({"content-type": ""}, "415", Status.UNKNOWN),
        ({":method": "GET"}, "405", Status.INTERNAL),
        ({"te": ""}, "200", Status.INTERNAL),
        ({"grpc-timeout": "soon"}, "200", Status.INTERNAL),
        ({"grpc-timeout": "123456789S"}, "200", Status.INTERNAL),
        ({"grpc-timeout": "0n"}, "200", Status.DEADLINE_EXCEEDED),
    ],
)
async def test_requests_that_are_not_grpc_are_answered(headers: dict[str, str], http: str, grpc_status: int) -> None:
    """Each is answered on its stream, and the connection goes on."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        stream_id = client.open(HOLD, headers)
        answer = await client.event(h2.events.ResponseReceived, stream_id)
        named = dict(answer.headers)  # type: ignore[attr-defined]
        assert (named[":status"], named["grpc-status"]) == (http, str(int(grpc_status)))
        stream_id = client.open(LAST, {"content-type": "application/grpc+proto", "grpc-timeout": "99999999H"})
        client.message(stream_id, b"x", end_stream=True)
        await client.event(h2.events.StreamEnded, stream_id)


@pytest.mark.parametrize(
    ("sent", "grpc_status"),
    [
        (b"\0\0\0\0\x05hel", Status.INTERNAL),
        (b"\0\0\0", Status.INTERNAL),
        (b"\x01\0\0\0\x05hello", Status.UNIMPLEMENTED),
        (b"\x07\0\0\0\x05hello", Status.INTERNAL),
        (b"\0\xff\xff\xff\xff", Status.RESOURCE_EXHAUSTED),
    ],
)
async def test_messages_that_cannot_be_read_end_their_call(sent: bytes, grpc_status: int) -> None:
    """An incomplete, compressed, unknown or overlong message ends its call with a status."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        stream_id = client.open(LAST)
        client.h2.send_data(stream_id, sent, end_stream=True)
        client.flush()
        answer = await client.event(h2.events.ResponseReceived, stream_id)
        assert dict(answer.headers)["grpc-status"] == str(int(grpc_status))  # type: ignore[attr-defined]


# -- floods ------------------------------------------------------------------------------------------------------------

_EMPTY_FRAMES = {
    "PING": frame(PING, 0, 0, bytes(8)),
    "SETTINGS": frame(SETTINGS, 0, 0),
    "SETTINGS acknowledged": frame(SETTINGS, ACK, 0),
    "empty DATA": frame(DATA, 0, 1),
    "padded DATA": frame(DATA, PADDED, 1, b"\x40" + bytes(64)),
    "WINDOW_UPDATE": frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1)),
    "PRIORITY": frame(PRIORITY, 0, 3, struct.pack(">IB", 1, 0)),
    "unknown": frame(0xEE, 0, 0, b"?" * 10),
    "GOAWAY": frame(GOAWAY, 0, 0, bytes(8)),
}


@pytest.mark.parametrize("empty", _EMPTY_FRAMES.values(), ids=_EMPTY_FRAMES)
async def test_a_flood_of_frames_that_carry_nothing_ends_the_connection(empty: bytes) -> None:
    """So many are accepted at once, and a connection that goes on is sent away."""
    async with running() as server:
        async with raw_client(server) as client:
            client.h2.initiate_connection()
            client.h2.send_headers(1, request_headers(HOLD))
            client.write(client.h2.data_to_send() + empty * (EMPTY_FRAMES_BURST // 2))
            client.h2.ping(b"answered")
            client.flush()
            await client.event(h2.events.PingAckReceived)
            assert server.server.held().calls == 1
            client.write(empty * EMPTY_FRAMES_BURST)
            code, text = await client.goaway()
            assert (code, server.server.tally.connections_ended[Reason.FRAME_FLOOD]) == (
                ErrorCodes.ENHANCE_YOUR_CALM,
                1,
            )
            assert "carry nothing" in text
        await still_answers(server)


async def test_headers_have_a_limit() -> None:
    """Headers of 6 MB end the connection after the limit of a block, sent at once or in small pieces."""
    for size in (FRAME_BYTES_MAX, 100):
        n_frames = 6 * MIB // size if size > 100 else 70
        async with running() as server:
            block = frame(HEADERS, 0, 1, b"x" * size) + frame(CONTINUATION, 0, 1, b"x" * size) * n_frames
            code, text = await _ended(server, BEGIN + block)
            if size > 100:
                assert (code, "headers" in text) == (ErrorCodes.ENHANCE_YOUR_CALM, True)
            else:  # h2's own limit of their number
                assert code == ErrorCodes.PROTOCOL_ERROR
            await still_answers(server)


async def test_headers_have_a_limit_after_decompression() -> None:
    """A block of 2 KB that decompresses to a megabyte ends the connection."""
    encoder = Encoder()
    first = bytes(encoder.encode([*request_headers(), ("x", "y" * 3000)]))
    bomb = bytes(encoder.encode([*request_headers(), *[("x", "y" * 3000)] * 400]))
    assert len(bomb) < 2000
    async with running() as server:
        sent = BEGIN + frame(HEADERS, END_HEADERS, 1, first) + frame(HEADERS, END_HEADERS, 3, bomb)
        code, _ = await _ended(server, sent)
        assert code == ErrorCodes.ENHANCE_YOUR_CALM
        await still_answers(server)


async def test_a_frame_that_announces_16_mb_is_refused_at_its_head() -> None:
    """Nothing of it is kept."""
    async with running() as server:
        code, _ = await _ended(server, BEGIN + _opened() + frame(DATA, 0, 1, b"x", length=2**24 - 1))
        assert code == ErrorCodes.FRAME_SIZE_ERROR
        assert server.server.tally.connections_ended[Reason.FRAME_TOO_LARGE] == 1
        await still_answers(server)


async def test_streams_that_are_reset_at_once_have_a_limit() -> None:
    """After so many, the connection accepts no more streams. An open one goes on, and then the connection ends."""
    began_s = time.monotonic()
    async with running() as server:
        async with raw_client(server) as client:
            client.begin()
            held = client.open(HOLD)
            for _ in range(RAPID_RESETS_BURST + 500):
                stream_id = client.h2.get_next_available_stream_id()
                client.h2.send_headers(stream_id, request_headers())
                client.h2.reset_stream(stream_id)
                if stream_id % 200 == 1:
                    client.flush()
                    await client.drain()
            client.write(client.h2.data_to_send())
            await until(lambda: server.server.tally.connections_ended[Reason.RAPID_RESETS])
            allowed = RAPID_RESETS_BURST + RAPID_RESETS_PER_S * (time.monotonic() - began_s)
            assert not server.echo.streams[0].n_ended
            server.echo.streams[0].call.send(b"still here")
            server.echo.streams[0].call.finish()
            while await client.read_raw():
                pass
            assert framed(b"still here") in client.received
            assert held == 1
        assert server.server.tally.reset_calls <= allowed
        await still_answers(server)


async def test_streams_that_are_reset_after_their_answer_have_none() -> None:
    """As Envoy does it with each request that an engine answers quickly."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        for _ in range(RAPID_RESETS_BURST + 500):
            stream_id = client.open()
            client.message(stream_id, b"picked?")
            await client.event(h2.events.DataReceived, stream_id)
            client.h2.reset_stream(stream_id)
            client.flush()
            client.events.clear()
        await until(lambda: server.server.tally.reset_calls == RAPID_RESETS_BURST + 500)
        assert not server.server.tally.connections_ended[Reason.RAPID_RESETS]


async def test_a_peer_that_ignores_goaway_is_cut_off() -> None:
    """Streams after the last GOAWAY are refused, and too many of them end the connection with its open calls."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        client.open(HOLD)
        await until(lambda: server.echo.streams)
        draining = asyncio.create_task(server.server.drain(20))
        for number in range(2 * STREAMS_AFTER_GOAWAY_MAX):
            stream_id = 3 + 2 * number
            client.write(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, _block()))
            if number % 100 == 0:
                await client.drain()
                await asyncio.sleep(0)
                client.write(frame(PING, ACK, 0, _LEAVE_PING))
        await until(lambda: server.server.tally.connections_ended[Reason.STREAMS_AFTER_GOAWAY])
        client.close()
        await draining


# -- limits of what is held --------------------------------------------------------------------------------------------


async def test_streams_over_the_limit_are_refused() -> None:
    """A peer that ignores the announced limit gets REFUSED_STREAM, and its other streams go on."""
    async with running(Limits(streams_max=3)) as server:
        async with raw_client(server) as client:
            client.begin()
            for _ in range(5):
                client.open(HOLD)
            for stream_id in (7, 9):
                reset = await client.event(h2.events.StreamReset, stream_id)
                assert reset.error_code == ErrorCodes.REFUSED_STREAM  # type: ignore[attr-defined]
            assert server.server.held().calls == 3
            assert server.server.tally.refused_calls == 2
        await still_answers(server)


async def test_connections_over_the_limit_are_closed() -> None:
    """A connection that is one too many is closed, and another one is accepted when one has ended."""
    async with running(Limits(connections_max=2)) as server, raw_client(server) as one:
        one.begin()
        async with raw_client(server) as two:
            two.begin()
            await until(lambda: server.server.held().connections == 2)
            async with raw_client(server) as three:
                three.begin()
                while await three.read_raw():
                    pass
            assert server.server.tally.connections_ended[Reason.TOO_MANY_CONNECTIONS] == 1
        for _ in range(3):  # those that have ended do not count
            await until(lambda: server.server.held().connections == 1)
            await still_answers(server)


async def test_connections_in_their_tls_handshake_count() -> None:
    """Peers that never finish their handshake take places, for the time of a handshake."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([HTTP_2])
    async with running(Limits(connections_max=2), self_signed=True) as server:
        for said in (b"", b"\x16\x03\x01"):
            _, silent = await asyncio.open_connection(server.host, server.port)
            silent.write(said)
            await silent.drain()
            silent.close()
        await until(lambda: len(server.server._owner.handshakes) == 2)
        for is_served in (False, True):
            reader, writer = await asyncio.open_connection(server.host, server.port, ssl=context)
            try:
                assert bool(await reader.read(1)) == is_served
            except OSError:
                assert not is_served
            writer.close()
            server.server._forget_handshakes(asyncio.get_running_loop().time() + TLS_HANDSHAKE_S + 1)
        assert server.server.tally.connections_ended == {Reason.TOO_MANY_CONNECTIONS: 1}


async def test_a_long_connection_keeps_nothing_of_ended_calls() -> None:
    """h2 forgets streams that have ended, and has no limit of streams of its own."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        held = [client.open(HOLD) for _ in range(150)]  # h2's own limit is 100
        for _ in range(1000):
            stream_id = client.open(EACH)
            client.message(stream_id, b"x", end_stream=True)
            if stream_id % 50 == 1:
                await client.event(h2.events.StreamEnded, stream_id)
        await client.event(h2.events.StreamEnded, stream_id)
        (connection,) = server.server._owner.connections
        assert server.server.held().calls == len(held)
        assert len(connection._h2.streams) < 1000
        assert server.server.tally.finished == {Status.OK: 1000}


@pytest.mark.parametrize("which", ["buffered_bytes_max", "all_buffered_bytes_max"])
async def test_incomplete_messages_have_a_budget(which: str) -> None:
    """A message that exceeds the bytes of a connection, or of the server, ends its call; others are held."""
    bounds = Limits(**{which: 40_000})
    async with running(bounds) as server:
        async with raw_client(server) as client:
            client.begin()
            for _ in range(6):
                stream_id = client.open(HOLD)
                client.h2.send_data(stream_id, b"\0" + struct.pack(">I", 20_000) + b"x" * 9_995)
                client.flush()
            for stream_id in (9, 11):
                answer = await client.event(h2.events.ResponseReceived, stream_id)
                assert dict(answer.headers)["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED))  # type: ignore[attr-defined]
            assert server.server.held().buffered_bytes == 40_000
            assert server.server.held().calls == 4
        await still_answers(server)


async def test_windows_open_in_any_order_and_in_any_steps() -> None:
    """What waits for the window of a stream, or of the connection, is sent when it opens, to the last byte."""
    small, streams = struct.pack(">HI", 4, 1000), (1, 3, 5)  # SETTINGS_INITIAL_WINDOW_SIZE
    async with running() as server, raw_client(server) as client:
        client.write(PREFACE + frame(SETTINGS, 0, 0, small) + b"".join(_opened_for(HOLD, each) for each in streams))
        await until(lambda: len(server.echo.streams) == len(streams))
        for stream in server.echo.streams:
            stream.call.send(bytes(100_000 - HEAD_BYTES))
            stream.call.finish()
        opened = [(1, 50_000), *[(3, 1)] * 100, (3, 98_900), (1, 49_000), (5, 99_000), *[(0, 4_891)] * 50]
        for stream_id, n in opened:
            client.write(frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">I", n)))
            if stream_id == 0:
                await client.drain()
                await asyncio.sleep(0)
        sizes, ended = _data_of(client.received)
        while len(ended) < len(streams):
            assert await client.read_raw()
            sizes, ended = _data_of(client.received)
        assert sizes == dict.fromkeys(streams, 100_000)
        assert server.server.held().buffered_bytes == 0


def _opened_for(method: str, stream_id: int) -> bytes:
    return frame(HEADERS, END_HEADERS, stream_id, _block(*request_headers(method)))


def _data_of(received: bytes) -> tuple[Counter[int], set[int]]:
    """Bytes of DATA by stream, and the streams that have ended, of what a server sent."""
    sizes: Counter[int] = Counter()
    ended: set[int] = set()
    while len(received) >= 9:
        length, kind, flags = int.from_bytes(received[:3], "big"), received[3], received[4]
        stream_id = int.from_bytes(received[5:9], "big")
        if kind == DATA:
            sizes[stream_id] += length
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            ended.add(stream_id)
        received = received[9 + length :]
    return sizes, ended


async def test_a_peer_that_does_not_read_its_answers_is_sent_away() -> None:
    """Answers to pings are held up to a limit: then the connection ends, whatever its allowance of frames."""
    async with running() as server:
        async with raw_client(server) as client:
            client.begin()
            client.open(HOLD)
            client.h2.increment_flow_control_window(2**30)
            client.h2.increment_flow_control_window(2**30, 1)
            client.flush()
            await until(lambda: server.echo.streams)
            call = server.echo.streams[0].call
            while call.is_open:  # the queue is full at some time, and the call ends with its own limit
                call.send(b"x" * MIB)
                await asyncio.sleep(0)
            assert server.server.held().buffered_bytes == 0
        await still_answers(server)


# -- peers that are slow, silent or dead: the server's clock is moved --------------------------------------------------


class _Clock:
    """Moves the time of a server's checks, which run once a second otherwise."""

    def __init__(self, server: Running) -> None:
        self._server = server.server
        self._loop = asyncio.get_running_loop()

    def after(self, seconds: float) -> None:
        """Check all connections as if so much time had passed."""
        for each in list(self._server._owner.connections):
            each.check(self._loop.time() + seconds)


_SLOW: dict[str, tuple[bytes, float, Reason]] = {
    "no preface": (b"", PREFACE_S, Reason.NO_PREFACE),
    "half a preface": (PREFACE[:10], PREFACE_S, Reason.NO_PREFACE),
    "no settings": (PREFACE, PREFACE_S, Reason.NO_PREFACE),
    "half a head": (BEGIN + b"\0\0", FRAME_S, Reason.SLOW_FRAME),
    "half a frame": (BEGIN + _opened() + frame(DATA, 0, 1, b"xy", length=9), FRAME_S, Reason.SLOW_FRAME),
    "half the headers": (BEGIN + frame(HEADERS, 0, 1, _block()), FRAME_S, Reason.SLOW_FRAME),
}


@pytest.mark.parametrize(("sent", "limit_s", "reason"), _SLOW.values(), ids=_SLOW)
async def test_a_peer_that_stops_in_the_middle_is_sent_away(sent: bytes, limit_s: float, reason: Reason) -> None:
    """It keeps its connection for its time, and no longer."""
    async with running() as server:
        async with raw_client(server) as client:
            client.write(sent)
            await until(lambda: server.server.held().connections)
            await asyncio.sleep(0.05)
            clock = _Clock(server)
            clock.after(limit_s - 1)
            assert not server.server.tally.connections_ended
            clock.after(limit_s + 1)
            assert server.server.tally.connections_ended == {reason: 1}
            assert server.server.held().calls == 0
            while await client.read_raw():
                pass
        await still_answers(server)


async def test_a_message_that_does_not_go_on_ends_its_call() -> None:
    """A call whose message is incomplete for its time ends with DEADLINE_EXCEEDED; a call without one may wait."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        waiting, stopped = client.open(HOLD), client.open(HOLD)
        client.message(waiting, b"whole")
        client.h2.send_data(stopped, b"\0\0\0\x01\0" + b"x" * 100)
        client.flush()
        await until(lambda: server.server.held().buffered_bytes)
        clock = _Clock(server)
        clock.after(MESSAGE_S - 1)
        assert server.server.held().calls == 2
        clock.after(MESSAGE_S + 1)
        answer = await client.event(h2.events.ResponseReceived, stopped)
        assert dict(answer.headers)["grpc-status"] == str(int(Status.DEADLINE_EXCEEDED))  # type: ignore[attr-defined]
        assert [stream.n_ended for stream in server.echo.streams] == [0, 1]
        assert server.server.held().buffered_bytes == 0


async def test_a_peer_that_keeps_its_window_closed_loses_the_call() -> None:
    """What waits for a window is dropped after its time, with its call, even if the service has finished it."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        for _ in range(2):
            client.open(HOLD)
        await until(lambda: len(server.echo.streams) == 2)
        for stream in server.echo.streams:
            stream.call.send(b"x" * 100_000)  # the window is 65,535
        server.echo.streams[0].call.finish()
        assert server.server.held().buffered_bytes > 100_000
        _Clock(server).after(STALL_S + 1)
        assert (server.server.held().buffered_bytes, server.server.held().calls) == (0, 0)
        assert server.echo.all_ended()
        await client.event(h2.events.StreamReset, 1)
        await client.event(h2.events.StreamReset, 3)


async def test_idle_connections_stay_and_dead_ones_are_found() -> None:
    """A connection without streams stays while its peer answers pings, and ends when it does not."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        await client.event(h2.events.SettingsAcknowledged)
        clock = _Clock(server)
        clock.after(KEEPALIVE_S + 1)
        await client.event(h2.events.PingReceived)  # h2 answers it
        await until(lambda: all(each._pinged_at_s is None for each in server.server._owner.connections))
        clock.after(KEEPALIVE_S + 1)
        clock.after(KEEPALIVE_S + KEEPALIVE_ANSWER_S)
        assert server.server.held().connections == 1
        clock.after(KEEPALIVE_S + KEEPALIVE_ANSWER_S + 2)
        assert server.server.tally.connections_ended == {Reason.NO_KEEPALIVE: 1}
        clock.after(KEEPALIVE_S + LINGER_S + 1)  # a dead peer does not close its side
        await until(lambda: not server.server.held().connections)


async def test_a_stopped_process_blames_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that comes late, because the process was stopped, ends no connection."""
    async with running() as server, raw_client(server):
        await until(lambda: server.server.held().connections)
        server.server._check_due_s -= 100
        for each in server.server._owner.connections:
            monkeypatch.setattr(each, "_made_at_s", each._made_at_s - 100)
        server.server._check()
        assert server.server.held().connections == 1
        server.server._check()
        assert server.server.tally.connections_ended == {Reason.NO_PREFACE: 1}


async def test_a_client_that_says_goodbye_gets_its_answers() -> None:
    """After a GOAWAY of the client, its open streams go on, and then the connection ends."""
    async with running() as server, raw_client(server) as client:
        client.begin()
        stream_id = client.open(LAST)
        client.write(frame(GOAWAY, 0, 0, bytes(8) + b"bye")[:12])
        await client.drain()
        await asyncio.sleep(0.01)
        client.write(frame(GOAWAY, 0, 0, bytes(8) + b"bye")[12:])
        client.message(stream_id, b"last words", end_stream=True)
        await client.event(h2.events.StreamEnded, stream_id)
        while await client.read_raw():
            pass
        assert framed(b"last words") in client.received
        assert not server.server.tally.connections_ended


# -- what is pure ------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=12), st.randoms(use_true_random=False))
def test_messages_are_cut_from_any_pieces(messages: list[bytes], chance: random.Random) -> None:
    """Whatever pieces they come in, the messages are the same, and nothing is held after the last one."""
    reader, data, read = MessageReader(300), b"".join(map(framed, messages)), []
    while data:
        n = chance.choice((1, 2, HEAD_BYTES, 50, len(data)))
        read += reader.feed(data[:n])
        data = data[n:]
    assert read == messages
    assert reader.n_held == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_unreadable(data: bytes) -> None:
    """A reader of arbitrary bytes never fails otherwise, and holds at most one message."""
    reader = MessageReader(100)
    try:
        reader.feed(data)
    except Unreadable:
        return
    assert reader.n_held < HEAD_BYTES + 100


@given(
    st.lists(st.tuples(st.sampled_from([DATA, HEADERS, PING, GOAWAY, 0xEE]), st.binary(max_size=40)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_the_watch_passes_all_frames_but_goaway(frames: list[tuple[int, bytes]], chance: random.Random) -> None:
    """In any pieces, h2 gets every byte but those of GOAWAY frames, and the end of an incomplete head."""
    sent = [frame(kind, END_HEADERS, 1, payload) for kind, payload in frames]
    data = BEGIN + b"".join(sent)
    wanted = BEGIN + b"".join(each for (kind, _), each in zip(frames, sent, strict=True) if kind != GOAWAY)
    watch, passed = FrameWatch(0.0), b""
    while data:
        n = chance.choice((1, 3, 9, 25, len(data)))
        passed += watch.check(data[:n], 1.0)
        data = data[n:]
    assert passed == wanted
    assert watch.incomplete_since_s is None
    assert watch.peer_leaves == any(kind == GOAWAY for kind, _ in frames)


def test_a_slow_head_does_not_begin_anew_with_each_byte() -> None:
    """The time of an incomplete frame is that of its first byte, or of its head's last one."""
    watch = FrameWatch(0.0)
    watch.check(BEGIN, 1.0)
    assert watch.incomplete_since_s is None
    for at_s, byte in enumerate(frame(DATA, 0, 1, b"xyz")[:8], 2):
        watch.check(bytes([byte]), float(at_s))
        assert watch.incomplete_since_s == 2.0
    watch.check(b"\x01x", 20.0)
    assert watch.incomplete_since_s == 20.0
    watch.check(b"y", 21.0)
    assert watch.incomplete_since_s == 20.0
    watch.check(b"z", 22.0)
    assert watch.incomplete_since_s is None


def test_the_limit_of_a_block_counts_all_its_frames() -> None:
    """A block of exactly the limit passes, and one byte more does not."""
    for more, is_refused in ((0, False), (1, True)):
        watch = FrameWatch(0.0)
        n_left = HEADER_BLOCK_BYTES_MAX - 10 + more
        data = BEGIN + frame(HEADERS, 0, 1, b"x" * 10)
        while n_left:
            n = min(n_left, FRAME_BYTES_MAX)
            n_left -= n
            data += frame(CONTINUATION, 0 if n_left else END_HEADERS, 1, b"x" * n)
        if is_refused:
            with pytest.raises(Violation, match="headers"):
                watch.check(data, 1.0)
        else:
            assert watch.check(data, 1.0) == data


# -- recorded streams with changed bytes -------------------------------------------------------------------------------


def _recording() -> list[bytes]:
    """What a client sends in a few calls, in the pieces of its writes."""
    pieces: list[bytes] = []
    client = RawClient(cast(Any, None), cast(Any, SimpleNamespace(write=pieces.append)))
    client.begin()
    for number in range(4):
        stream_id = client.open((EACH, LAST, HOLD, "/test.Echo/Other")[number], {"x-more": "y" * number})
        for _ in range(3):
            client.message(stream_id, bytes([number]) * (10 ** (number + 1) % 9_000))
        if number % 2:
            client.h2.end_stream(stream_id)
        else:
            client.h2.reset_stream(stream_id)
        client.h2.ping(bytes(8))
        client.flush()
    return pieces


RECORDED = _recording()


def _mutated(pieces: list[bytes], chance: random.Random) -> list[bytes]:
    """A few changes: bytes, bits, lengths; pieces that are missing, doubled, swapped or cut."""
    pieces = list(pieces)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(pieces))
        piece = bytearray(pieces[at])
        if not piece:
            continue
        where = chance.randrange(len(piece))
        match chance.randrange(7):
            case 0:
                piece[where] = chance.randrange(256)
            case 1:
                piece[where] ^= 1 << chance.randrange(8)
            case 2:
                del piece[where : where + chance.randint(1, 9)]
            case 3:
                piece[where:where] = chance.randbytes(chance.randint(1, 9))
            case 4:
                piece = piece * 2
            case 5:
                pieces[at], pieces[0] = pieces[0], pieces[at]
                continue
            case _:
                piece[where:] = gzip.compress(bytes(piece[where:]))
        pieces[at] = bytes(piece)
    return pieces


async def _survives(seeds: range, jobs: int = 20) -> None:
    """Send mutated recordings, several at a time; the server answers afterwards, and holds nothing."""
    async with running(Limits(message_bytes_max=8_000)) as server:

        async def send(seed: int) -> None:
            chance = random.Random(seed)
            async with raw_client(server) as client:
                for piece in _mutated(RECORDED, chance):
                    client.write(piece)
                    if chance.random() < 0.3:
                        await client.drain()
                        await asyncio.sleep(0)
                await client.drain()

        for first in range(seeds.start, seeds.stop, jobs):
            await asyncio.gather(*(send(seed) for seed in range(first, min(first + jobs, seeds.stop))))
        for stream in server.echo.streams:  # those that were not ended by anyone
            stream.call.finish()
        await still_answers(server)
        assert not server.server.tally.connections_ended[Reason.INTERNAL_ERROR]


@given(st.integers(0, 10**9))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_changed_recordings_leave_nothing_behind(seed: int) -> None:
    """Whatever bytes of a client are changed, the server goes on."""
    asyncio.run(_survives(range(seed, seed + 5)))


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_many_changed_recordings_leave_nothing_behind() -> None:
    """The same with 10,000 recordings on one server."""
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    asyncio.run(_survives(range(seed, seed + 10_000)))
