"""A client for HTTP/1.1 that takes little time for each request, and for each piece of an answer.

What lives here: connections and their reuse, requests as bytes, and answers as they arrive. What must not: which server
a request goes to, and what its answer means. httptools parses the answers, as it does in uvicorn.

A request with aiohttp's client takes 0.3 ms of a processor, and each token of a stream 15 us, for timers, for objects
and for the task that it wakes. Here a request takes a fourth of that, and a stream is passed on by a function that the
event loop calls with its bytes (`Answer.pump`). There are no redirects, cookies, proxies or compressed answers.

State: kept connections.
"""

from __future__ import annotations

import asyncio
import base64
import ssl as tls
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import quote, unquote, urlsplit

import httptools
from multidict import CIMultiDict

#: Bytes that may arrive before the end of an answer's headers.
HEAD_BYTES_MAX = 256 << 10

#: Bytes of an answer that wait for their reader. Beyond it nothing more is read from the connection.
WAITING_BYTES_MAX = 128 << 10

#: Addresses of servers that are remembered in the form in which requests need them.
ORIGINS_MAX = 4096

#: How long after a request another connection is opened. By then the server has the request, which otherwise would wait
#: while the server accepts a connection.
SPARE_DELAY_S = 0.002

#: Bodies beyond this size are not copied behind the headers.
SMALL_BODY_BYTES = 64 << 10

#: Characters of an address that stay as they are.
_PLAIN = "/:?&=%+$,;@!~*'()-._"


class ConnectFailed(OSError):
    """There is no connection, so the server has not seen the request."""


class ConnectionBroken(OSError):
    """The connection broke before the answer was complete, or what came is not HTTP."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A server's address. prefix: what its paths begin with. head: the headers that all its requests have."""

    host: str
    port: int
    uses_tls: bool
    prefix: str
    head: str


@lru_cache(maxsize=ORIGINS_MAX)
def origin_of(url: str) -> Origin:
    """Read an address such as http://host:8000. Raises ConnectFailed if it is not one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ConnectFailed(f"{url!r} is not a URL: {exc}") from exc
    if parts.scheme not in ("http", "https") or not host:
        raise ConnectFailed(f"{url!r} is not a URL with http or https and a host")
    uses_tls = parts.scheme == "https"
    head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        head += f"Authorization: Basic {base64.b64encode(secret.encode()).decode()}\r\n"
    prefix = quote(parts.path.rstrip("/"), safe=_PLAIN)
    return Origin(host, port or (443 if uses_tls else 80), uses_tls, prefix, head)


class PlainHttp:
    """Sends requests over connections that are kept for the next ones. Used on one loop."""

    def __init__(
        self,
        *,
        keepalive_s: float,
        connect_timeout_s: float,
        ssl: tls.SSLContext | None = None,
        keeps_spares: bool = False,
    ) -> None:
        """keepalive_s: unused connections are closed after this time. ssl: in place of the system's authorities.

        keeps_spares: when a server's last idle connection is taken, open another one in the background, if the server
        was used within keepalive_s before. For long answers, of which each takes a connection of its own: then requests
        do not wait for connections.
        """
        self._keeps_spares = keeps_spares
        self._spares: dict[Origin, asyncio.TimerHandle | asyncio.Task[None]] = {}  # those that are being opened
        self._used_s: dict[Origin, float] = {}
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self._ssl = ssl
        self._idle: dict[Origin, deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        """Open connections."""
        return len(self._open)

    def close(self) -> None:
        """Close all connections. Requests that are under way fail with ConnectionBroken."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for opening in self._spares.values():
            opening.cancel()
        for connection in list(self._open):
            connection.abandon()
        self._idle.clear()

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        silence_s: float,
        *,
        repeatable: bool = False,
        is_short: bool = False,
    ) -> HttpAnswer:
        """Send a request; return its answer when the headers have come. url: of the server. path: with the query.

        silence_s: a server that sends nothing for so long, while it is waited for, has failed. is_short: so has one
        whose answer is not complete by then. repeatable: the request may be sent a second time, if the server has
        closed a kept connection at the moment at which it was used.
        Raises ConnectFailed; ConnectionBroken; TimeoutError.
        """
        origin = origin_of(url)
        sent = _head(method, origin, path, headers, body)
        while True:
            connection = self._kept(origin)
            is_new = connection is None
            if connection is None:
                connection = await self._connect(origin)
            answer = connection.ask(sent, body, silence_s, is_short=is_short)
            if self._keeps_spares:
                self._open_spare(origin)
            try:
                await answer.begun()
            except ConnectionBroken:
                if is_new or not repeatable or answer.status:
                    raise
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    def _kept(self, origin: Origin) -> _Connection | None:
        """Return a connection that can be used again, the last one that was."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
            connection.abandon()
        return None

    def _open_spare(self, origin: Origin) -> None:
        """Open a connection for the next request to a server that is in use, unless one is idle or being opened."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        used_s = self._used_s.pop(origin, float("-inf"))
        if len(self._used_s) >= ORIGINS_MAX:
            del self._used_s[next(iter(self._used_s))]
        self._used_s[origin] = now_s
        if now_s - used_s <= self._keepalive_s and not self._idle.get(origin) and origin not in self._spares:
            self._spares[origin] = loop.call_later(SPARE_DELAY_S, self._begin_spare, origin)

    def _begin_spare(self, origin: Origin) -> None:
        connecting = self._connect_spare(origin)
        self._spares[origin] = asyncio.get_running_loop().create_task(connecting, name="kvstreams-spare-connection")

    async def _connect_spare(self, origin: Origin) -> None:
        try:
            connection = await self._connect(origin)
        except ConnectFailed:
            pass  # the next request tries it itself
        else:
            self._keep(connection)
        finally:
            del self._spares[origin]

    async def _connect(self, origin: Origin) -> _Connection:
        if self._closed:
            raise ConnectFailed("the client is closed")
        loop = asyncio.get_running_loop()
        context: tls.SSLContext | None = None
        if origin.uses_tls:
            self._ssl = self._ssl or tls.create_default_context()
            context = self._ssl
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, origin, loop), origin.host, origin.port, ssl=context
                )
        except TimeoutError as exc:
            raise ConnectFailed(f"no connection to {origin.host}:{origin.port} in time") from exc
        except OSError as exc:
            raise ConnectFailed(f"no connection to {origin.host}:{origin.port}: {exc.strerror or exc}") from exc
        return connection

    def _made(self, connection: _Connection) -> None:
        self._open.add(connection)

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)

    def _keep(self, connection: _Connection) -> None:
        """Keep a connection whose answer is complete."""
        if self._closed:
            connection.abandon()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._keepalive_s, self._sweep)

    def _sweep(self) -> None:
        """Close connections that have not been used for keepalive_s."""
        loop = asyncio.get_running_loop()
        before_s = loop.time() - self._keepalive_s
        next_s = float("inf")
        for origin, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since_s <= before_s or not idle[0].is_usable):
                idle.popleft().abandon()
            if idle:
                next_s = min(next_s, idle[0].idle_since_s + self._keepalive_s)
            else:
                del self._idle[origin]
        self._sweeping = loop.call_at(next_s, self._sweep) if self._idle else None


class _Connection(asyncio.Protocol):
    """One connection, which has one request at a time."""

    def __init__(self, http: PlainHttp, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.idle_since_s = 0.0
        self._http = http
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: HttpAnswer | None = None
        self._is_reusable = True
        self._is_paused = False
        # Of the answer that is being parsed.
        self._headers: list[tuple[str, str]] = []
        self._head_bytes = 0
        self._has_head = False
        self._has_length = False  # the answer says where it ends, otherwise it ends with the connection
        self._is_interim = False  # a status below 200, which another answer follows
        self._is_complete = False
        self._pieces: list[bytes] = []

    @property
    def is_usable(self) -> bool:
        """Whether it can take the next request."""
        return self._is_reusable and self._transport is not None and not self._transport.is_closing()

    def ask(self, head: bytes, body: bytes | None, silence_s: float, *, is_short: bool = False) -> HttpAnswer:
        """Send a request."""
        answer = self._answer = HttpAnswer(self, self._loop, silence_s, is_short=is_short)
        self._headers, self._pieces = [], []
        self._head_bytes = 0
        self._has_head = self._has_length = self._is_interim = self._is_complete = False
        transport = self._transport
        if transport is None:  # it was lost in the meantime
            self._answer = None
            answer.fail(ConnectionBroken("the connection was closed"))
        elif body is None:
            transport.write(head)
        elif len(body) <= SMALL_BODY_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        return answer

    def abandon(self) -> None:
        """Close the connection, and fail its request."""
        self._break(ConnectionBroken("the client was closed"))

    def leave(self) -> None:
        """Close the connection, because the rest of its answer is not wanted."""
        self._answer = None
        self._is_reusable = False
        if self._transport is not None:
            self._transport.close()

    def pause(self) -> None:
        """Read nothing for now."""
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._is_paused:
            self._is_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def _break(self, error: Exception) -> None:
        answer = self._answer
        self.leave()
        if answer is not None:
            answer.fail(error)

    # -- of the event loop ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._http._made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._http._lost(self)
        self._transport = None
        answer = self._answer
        if answer is None:
            self._is_reusable = False
        elif exc is None and self._has_head and not self._has_length and not self._is_interim:
            self.leave()
            answer.end()
        else:
            reason = "" if exc is None else f": {exc}"
            self._break(ConnectionBroken(f"the server closed the connection{reason}"))

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.leave()  # nothing was asked
            return
        if not self._has_head:
            self._head_bytes += len(data)
        is_http = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            is_http = False
        pieces = self._pieces
        if pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            answer.feed(piece)
        if not is_http and not self._is_complete:
            # Without the parser's message, which may quote the answer.
            self._break(ConnectionBroken("the server's answer is not HTTP"))
        elif self._is_complete:
            self._is_reusable = self._is_reusable and is_http
            self._finish(answer)
        elif not self._has_head and self._head_bytes > HEAD_BYTES_MAX:
            self._break(ConnectionBroken(f"the headers have more than {HEAD_BYTES_MAX} bytes"))

    def _finish(self, answer: HttpAnswer) -> None:
        if self._answer is not answer:
            return  # its reader has closed it
        self._answer = None
        self.resume()
        if self.is_usable:
            self._http._keep(self)
        else:
            self.leave()
        answer.end()

    # -- of the parser -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._is_reusable = False  # it sends more than it was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._headers.append((name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        if self._is_complete or self._answer is None:
            return
        status = self._parser.get_status_code()
        headers, self._headers = CIMultiDict(self._headers), []
        self._is_interim = status < 200
        if not self._is_interim:
            self._has_head = True
            self._has_length = "Content-Length" in headers or "Transfer-Encoding" in headers
            self._answer.begin(status, headers)

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if not self._is_interim and not self._is_complete:
            self._is_complete = True
            self._is_reusable = self._is_reusable and self._parser.should_keep_alive()


class HttpAnswer:
    """The answer to one request, as it arrives. status, headers: once it has begun.

    One caller at a time waits for it. Closing it before its end closes the connection, so that the server may cancel
    the request.
    """

    __slots__ = (
        "_connection",
        "_ended",
        "_error",
        "_heard_s",
        "_is_short",
        "_loop",
        "_n_waiting",
        "_pieces",
        "_silence_s",
        "_take",
        "_timer",
        "_waiter",
        "headers",
        "status",
    )

    def __init__(
        self, connection: _Connection, loop: asyncio.AbstractEventLoop, silence_s: float, *, is_short: bool = False
    ) -> None:
        """is_short: silence_s limits the time until its end."""
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._connection = connection
        self._loop = loop
        self._pieces: list[bytes] = []
        self._n_waiting = 0
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._silence_s = silence_s
        self._is_short = is_short
        self._heard_s = loop.time()
        self._timer = loop.call_later(silence_s, self._check_silence)

    @property
    def content_type(self) -> str:
        """The type of the body, in lower case and without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def at_eof(self) -> bool:
        """Whether it was read to its end."""
        return self._ended and not self._pieces

    # -- for its reader ------------------------------------------------------------------------------------------------

    async def begun(self) -> None:
        """Wait for the status and the headers."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def readany(self) -> bytes:
        """Return what has arrived, as soon as something has; b"" at the end."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._n_waiting = 0
        self._connection.resume()
        return data

    async def read(self, bytes_max: int | None = None) -> bytes:
        """Return the rest of the body; more than bytes_max bytes of it if it is longer than that."""
        parts, n_bytes = [], 0
        while data := await self.readany():
            parts.append(data)
            n_bytes += len(data)
            if bytes_max is not None and n_bytes > bytes_max:
                break
        return b"".join(parts)

    def unread(self, data: bytes) -> None:
        """Give bytes back that were read last, so that they are read again."""
        if data:
            self._pieces.insert(0, data)
            self._n_waiting += len(data)

    async def pump(self, take: Callable[[bytes], bool]) -> None:
        """Call `take` with the bytes that have arrived and with all that arrive, until it returns False, or the end.

        It is called by the event loop, so it must not wait. What arrives after it has returned False is kept.
        """
        while self._pieces:
            if not take(await self.readany()):
                return
        if self._error is not None:
            raise self._error
        if self._ended:
            return
        self._take = take
        try:
            await self._wait()
        finally:
            stopped, self._take = self._take is None, None
        if self._error is not None and not stopped:
            raise self._error

    def limit_silence(self, silence_s: float) -> None:
        """Treat a silence of this length as a failure from now on."""
        self._silence_s = silence_s
        if not self._ended and self._error is None:
            self._timer.cancel()
            self._timer = self._loop.call_later(silence_s, self._check_silence)

    def close(self) -> None:
        """End the request. Nothing happens if the answer has come to its end."""
        if not self._ended and self._error is None:
            self._connection.leave()
            self.fail(ConnectionBroken("the answer was closed"))

    async def _wait(self) -> None:
        self._heard_s = self._loop.time()  # what was silent while nobody waited does not count
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._waiter is None else self._heard_s) + self._silence_s
        if due_s <= now_s or self._is_short:
            self._connection.leave()
            self.fail(TimeoutError())
        else:
            self._timer = self._loop.call_at(due_s, self._check_silence)

    # -- for its connection --------------------------------------------------------------------------------------------

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Take the status and the headers."""
        self.status = status
        self.headers = headers
        self._wake()

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self._heard_s = self._loop.time()
        take = self._take
        if take is None:
            self._pieces.append(data)
            self._n_waiting += len(data)
            if self._n_waiting > WAITING_BYTES_MAX:
                self._connection.pause()
            self._wake()
            return
        try:
            goes_on = take(data)
        except Exception as exc:
            self._take = None
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(exc)
            return
        if not goes_on:
            self._take = None
            self._wake()

    def end(self) -> None:
        """The body is complete."""
        self._ended = True
        self._timer.cancel()
        self._wake()

    def fail(self, error: Exception) -> None:
        """The rest of the answer will not come."""
        if not self._ended and self._error is None:
            self._error = error
            self._timer.cancel()
            self._wake()


def _head(method: str, origin: Origin, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return a request's first line and headers. Raises ValueError for one that would become several."""
    lines = [f"{method} {origin.prefix}{path} HTTP/1.1\r\n{origin.head}"]
    for name, value in headers.items():
        if "\n" in value or "\r" in value or "\0" in value:
            raise ValueError(f"the header {name} has a line break")
        lines.append(f"{name}: {value}\r\n")
    lines.append("\r\n" if body is None else f"Content-Length: {len(body)}\r\n\r\n")
    return "".join(lines).encode("utf-8", "surrogateescape")
