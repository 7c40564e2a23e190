"""Reading the bodies of requests: how large they may be, how long they may take, and how many are read at a time.

What lives here: those limits, decompression, and the threads on which large bodies are parsed. What must not: the
meaning of bodies (requests, body_parsing) and connections without a request (connections).

Owner of the count of bytes; everything but decompression and parsing runs on the loop that serves the API.

State: the number of bytes of bodies in memory.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from aiohttp import web

from streams.errors import InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge, UnsupportedEncoding
from streams.process.connections import LINGERING_S
from streams.settings import HttpSettings

#: Bodies up to this size are read even if all others together are over their limit, so that ordinary requests pass
#: while large uploads are refused. `connections_max` limits their number.
UNCOUNTED_BODY_BYTES = 64 * 1024

#: Refused bodies whose rest is received and dropped, so that a client that first sends everything reads the answer. The
#: rest of further ones stays in the system's buffers: 2,000 of them at once would delay all other requests.
DRAINED_MAX = 32

#: Threads that parse large bodies and decompress bodies. They share the interpreter with the loop, so that more of them
#: would only delay it.
THREADS = 2

#: Most bytes of a body that contains neither tokens nor hashes. 256 taints of 512 characters are 800 KB as JSON.
SHORT_BODY_BYTES_MAX = 1024 * 1024

#: Values of Content-Encoding that are read, with zlib's code of the format. `deflate` means zlib's own format.
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}

_T = TypeVar("_T")


class Bodies:
    """Reads bodies within the limits of the settings. bytes_held: of the counted bodies that are in memory."""

    def __init__(self, settings: HttpSettings) -> None:
        self.bytes_held = 0
        self._timeout_s = settings.body_timeout_s
        self._body_bytes_max = settings.body_bytes_max
        self._bytes_max = max(settings.bodies_bytes_max, settings.body_bytes_max)  # so that one body always fits
        self._n_drained = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bodies")

    def of(self, request: web.Request, bytes_max: int | None = None) -> _Body:
        """The body of a request, for `async with`. It counts as held until the block ends.

        bytes_max: its own limit, if that is lower than the general one. Entering the block raises RequestTooLarge,
        RequestTimeout, Overloaded, UnsupportedEncoding, InvalidRequest.
        """
        return _Body(self, request, min(bytes_max or self._body_bytes_max, self._body_bytes_max))

    async def on_thread(self, call: Callable[..., _T], *args: object) -> _T:
        """Call a function on one of the threads for large bodies."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def read(self, request: web.Request, body: _Body) -> bytes:
        """Read a body completely; see `of`."""
        declared = request.content_length
        if declared is not None and declared > body.bytes_max:
            raise _too_large(body.bytes_max)
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity") and encoding not in _ENCODINGS:
            raise UnsupportedEncoding(
                f"the body has Content-Encoding {encoding[:40]!r}",
                remedy=f"Use one of {', '.join(_ENCODINGS)}, or none",
            )
        try:
            data = await self._receive(request, body)
        except (OSError, web.RequestPayloadError) as exc:  # the client disconnected, or its encoding is not as declared
            raise InvalidRequest("the body was not received completely") from exc
        if encoding not in _ENCODINGS or not data:
            return data
        data = await self.on_thread(_decompressed, data, _ENCODINGS[encoding], body.bytes_max)
        self.hold(body, body.n_bytes + len(data))
        return data

    async def _receive(self, request: web.Request, body: _Body) -> bytes:
        content = request.content
        if content.is_eof():  # it came together with the headers, as short bodies do
            data = content.read_nowait()
            if len(data) > body.bytes_max:
                raise _too_large(body.bytes_max)
            return data
        received = bytearray()  # and not a list of chunks, since each chunk may be a single byte
        try:
            async with asyncio.timeout(self._timeout_s):
                while chunk := await content.readany():
                    received += chunk
                    if len(received) > body.bytes_max:
                        raise _too_large(body.bytes_max)
                    self.hold(body, len(received))
        except TimeoutError as exc:
            raise RequestTimeout(
                f"the body did not arrive within {self._timeout_s:g} s; {len(received)} bytes of it did",
                remedy="Send it faster, or raise body_timeout_s",
            ) from exc
        return bytes(received)

    def hold(self, body: _Body, n_bytes: int) -> None:
        """Count the bytes that a body has so far; raises Overloaded if all bodies together have too many."""
        if n_bytes <= UNCOUNTED_BODY_BYTES:
            return
        more = n_bytes - body.n_bytes
        if self.bytes_held + more > self._bytes_max:
            raise Overloaded(
                f"the router is reading {self.bytes_held} bytes of other bodies; the limit is {self._bytes_max}",
                remedy="Try again, or raise bodies_bytes_max",
            )
        self.bytes_held += more
        body.n_bytes = n_bytes

    def refuse(self, request: web.Request) -> None:
        """Receive what is left of a body and drop it, or stop receiving it if too many others are dropped already."""
        if self._n_drained < DRAINED_MAX:
            self._n_drained += 1
            asyncio.get_running_loop().call_later(LINGERING_S, self._drained)
        elif isinstance(request.transport, asyncio.Transport):
            request.transport.pause_reading()

    def _drained(self) -> None:
        self._n_drained -= 1

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Body:
    """One body, from when it is read until its request has been answered. n_bytes: how many of them are counted."""

    __slots__ = ("_bodies", "_request", "bytes_max", "n_bytes")

    def __init__(self, bodies: Bodies, request: web.Request, bytes_max: int) -> None:
        self._bodies = bodies
        self._request = request
        self.bytes_max = bytes_max
        self.n_bytes = 0

    async def __aenter__(self) -> bytes:
        try:
            return await self._bodies.read(self._request, self)
        except BaseException:
            self._release()
            if not self._request.content.is_eof():
                self._bodies.refuse(self._request)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._bodies.bytes_held -= self.n_bytes
        self.n_bytes = 0


def _decompressed(data: bytes, format_code: int, bytes_max: int) -> bytes:
    """Decompress a body on a thread; zlib lets other threads run meanwhile. Raises InvalidRequest, RequestTooLarge."""
    stream = zlib.decompressobj(format_code)
    try:
        plain = stream.decompress(data, bytes_max + 1)
    except zlib.error as exc:
        raise InvalidRequest(f"the body does not have the format that Content-Encoding says: {exc}") from exc
    if len(plain) > bytes_max:
        raise _too_large(bytes_max)
    if not stream.eof or stream.unused_data:
        raise InvalidRequest("the compressed body is cut off, or has more data after its end")
    return plain


def _too_large(bytes_max: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {bytes_max} bytes, the limit of this call", limit=bytes_max)
