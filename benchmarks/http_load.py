"""An HTTP client for benchmarks that costs little next to the server: one request at a time on each connection.

What lives here: connections, loops of requests, and loops of bookings that are freed some time later. What must not:
the URLs and bodies of a server.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop


class Connection(asyncio.Protocol):
    """A connection that is kept alive. It reads answers with a Content-Length."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._length: int | None = None
        self._begin = 0
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being a subclass

    def data_received(self, data: bytes) -> None:
        """Collect an answer."""
        self._buffer += data
        if self._length is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            _, found, rest = head.partition(b"content-length:")
            self._begin = end + 4
            self._length = int(rest.split(b"\r\n", 1)[0]) if found else 0
        if len(self._buffer) < self._begin + self._length:
            return
        status, body = int(self._buffer[9:12]), bytes(self._buffer[self._begin : self._begin + self._length])
        del self._buffer[: self._begin + self._length]
        self._length = None
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result((status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that waits."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request; the result is the status and the body of its answer."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def request(url: str, method: str, path: str, body: bytes = b"", content_type: str = "application/json") -> bytes:
    """The bytes of one request."""
    host = urlsplit(url).netloc
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class Done:
    """What a loop did. latencies: seconds of each request or booking. statuses: how many answers were no success."""

    latencies: list[float] = field(default_factory=list)
    n_pairs: int = 0
    took_s: float = 0.0
    statuses: dict[int, int] = field(default_factory=dict)

    def note(self, status: int) -> bool:
        """Whether an answer is a success; others are counted."""
        if 200 <= status < 300:
            return True
        self.statuses[status] = self.statuses.get(status, 0) + 1
        return False

    def quantile(self, share: float) -> float:
        """A quantile of the latencies, in seconds."""
        found = sorted(self.latencies)
        return found[min(len(found) - 1, int(len(found) * share))]


def ask(url: str, method: str, path: str, body: bytes = b"", content_type: str = "application/json") -> bytes:
    """One request; returns the body and raises ConnectionError for another status than success."""

    async def once() -> tuple[int, bytes]:
        (connection,) = await connect(url, 1)
        try:
            return await connection.ask(request(url, method, path, body, content_type))
        finally:
            connection.close()

    status, answer = uvloop.run(once())
    if not 200 <= status < 300:
        raise ConnectionError(f"{method} {path}: {status} {answer[:300]!r}")
    return answer


def select_loop(url: str, requests: Sequence[bytes], clients: int, seconds: float) -> Done:
    """Each client asks one request after another."""

    async def one(done: Done, connection: Connection, at: int, until: float) -> None:
        while (began := time.perf_counter()) < until:
            status, _ = await connection.ask(requests[at % len(requests)])
            if done.note(status):
                done.latencies.append(time.perf_counter() - began)
            at += 1

    return _run(url, clients, seconds, one)


def pair_loop(
    url: str,
    book: Callable[[int], bytes],
    free: Callable[[bytes], bytes],
    clients: int,
    seconds: float,
    held_s: float,
    every_s: float = 0.0,
) -> Done:
    """Each client books, and frees each booking held_s after it was made, while it goes on booking.

    book: the request with this number. free: the request that ends the booking of an answer. every_s: the shortest time
    between two bookings of a client. Pairs are counted when they are freed; those that are left at the end are freed
    too, outside the time that is measured.
    """
    numbers = iter(range(1 << 62))

    async def one(done: Done, connection: Connection, at: int, until: float) -> None:  # noqa: ARG001
        held: deque[tuple[float, bytes]] = deque()
        next_at = 0.0
        while True:
            now = time.perf_counter()
            if held and (now >= held[0][0] or now >= until):
                status, _ = await connection.ask(free(held.popleft()[1]))
                if done.note(status) and now < until:
                    done.n_pairs += 1
            elif now >= until:
                return
            elif now < next_at:
                await asyncio.sleep(min(next_at, held[0][0] if held else next_at) - now)
            else:
                next_at = now + every_s
                status, body = await connection.ask(book(next(numbers)))
                if done.note(status):
                    done.latencies.append(time.perf_counter() - now)
                    held.append((time.perf_counter() + held_s, body))

    return _run(url, clients, seconds, one)


def _run(url: str, clients: int, seconds: float, one: Callable[..., Any]) -> Done:
    async def all_() -> Done:
        connections = await connect(url, clients)
        done = Done()
        began = time.perf_counter()
        await asyncio.gather(*(one(done, each, 7 * at, began + seconds) for at, each in enumerate(connections)))
        done.took_s = seconds
        for each in connections:
            each.close()
        return done

    return uvloop.run(all_())


async def connect(url: str, n: int) -> list[Connection]:
    """Open n connections."""
    host, _, port = urlsplit(url).netloc.partition(":")
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, host, int(port)))[1] for _ in range(n)]
