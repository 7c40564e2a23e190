"""The answer that one client is being sent, and whether the client keeps up with it.

What lives here: the headers and the end of an answer, which aiohttp writes, and the bytes in between, which go to the
client's connection in the step of the event loop in which they arrive. What must not: where the bytes come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from aiohttp import web

from streams.frontend.exchange import Exchange


class ClientGone(Exception):
    """The client's connection is closed. response: what it was being sent."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__("the client's connection is closed")
        self.response = response


class FrontResponse(web.StreamResponse):
    """An answer whose headers and first bytes are sent together, which saves a system call. aiohttp's own pages do so.

    The attribute is aiohttp's own. In a version without it, headers are sent as soon as they are made, which is not
    before the first bytes are there.
    """

    _send_headers_immediately = False


class ClientStream:
    """What one client is being sent. Each method raises ClientGone once its connection is closed.

    The headers can be made early with `prepare`, and are sent together with the first bytes. While the client is waited
    for, the exchange's `writing_since_s` says since when.
    """

    __slots__ = ("_exchange", "_is_chunked", "_protocol", "_transport", "response")

    def __init__(self, exchange: Exchange, response: web.StreamResponse) -> None:
        self.response = response
        self._exchange = exchange
        self._is_chunked = False
        self._protocol = exchange.http.protocol
        self._transport: asyncio.Transport | None = None

    async def prepare(self) -> None:
        """Make the headers, but send nothing yet: `write` sends them, or `discard` drops them.

        Does nothing if the installed version of aiohttp would send them; `begin` has to be called then.
        """
        if hasattr(web.StreamResponse, "_send_headers_immediately"):
            await self._send(self.response.prepare(self._exchange.http))

    def discard(self) -> None:
        """Drop headers that were made and not sent, so that the client can get another answer."""
        writer = self._exchange.http.writer
        if not writer.output_size:
            writer.chunked, writer.length = False, None  # type: ignore[attr-defined]  # aiohttp has no other writers

    async def begin(self, data: bytes = b"") -> None:
        """Send the headers and the first bytes; they may wait for the end if there are none."""
        http, self._exchange.answering = self._exchange.http, True
        await self._send(self.response.prepare(http))
        if data:
            await self._send(self.response.write(data))

    def write(self, data: bytes) -> bool:
        """Send bytes, of which there is at least one; returns whether the client keeps up. It does not wait.

        aiohttp's own method takes several times as long. Like that, the bytes become one chunk, if the client's version
        of HTTP has chunks.
        """
        transport = self._transport or self._open()
        if transport.is_closing():
            raise ClientGone(self.response)
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        return not self._protocol.writing_paused

    def _open(self) -> asyncio.Transport:
        """Send the headers, if they have not been sent with the first bytes, and return the client's connection."""
        http, self._exchange.answering = self._exchange.http, True
        transport = http.transport
        if transport is None or transport.is_closing():
            raise ClientGone(self.response)
        http.writer.send_headers()
        self._is_chunked = getattr(http.writer, "chunked", False)
        self._transport = transport
        return transport

    async def drained(self) -> None:
        """Wait until the client keeps up."""
        if self._protocol.writing_paused:
            await self._send(self._exchange.http.writer.drain())

    async def end(self, data: bytes = b"") -> None:
        """Send the last bytes, and the end of the answer."""
        await self._send(self.response.write_eof(data))

    async def _send(self, sending: Awaitable[Any]) -> None:
        """Wait until the client has taken what it is being sent."""
        self._exchange.writing_since_s = asyncio.get_running_loop().time()
        try:
            await sending
        except ConnectionError as exc:
            raise ClientGone(self.response) from exc
        self._exchange.writing_since_s = None
