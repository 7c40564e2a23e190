"""One completion of an engine: POST /v1/completions with token ids, and its stream of tokens.

What lives here: the stream's events as chunks of tokens, and what counts as a failure of the engine. What must not:
choosing an engine (base), and bookings (generation).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from streams.client.trace_context import add_trace_context
from streams.errors import EngineFailed, EngineRefused, KvStreamsError

#: Bytes of one event. With return_token_ids, vLLM's first event repeats the prompt: about 8 bytes for each token.
EVENT_BYTES_MAX = 64 << 20

#: How long the end of an answer may follow its last event; then the connection is closed instead of being used again.
END_TIMEOUT_S = 0.1

#: Bytes of an engine's refusal that are read, and characters of it that become part of an error.
REFUSAL_BYTES_MAX = 64 << 10
REFUSAL_CHARS_MAX = 500

#: Statuses below 500 with which an engine refuses for now, so that another engine may accept: timeout, too many.
_BUSY_STATUSES = (408, 429)

#: Selects the data-parallel rank in vLLM, which refuses a number that it does not have.
RANK_HEADER = "X-data-parallel-rank"

_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a client talks to engines.

    headers: sent with each request, such as an API key. connections_max: open connections to all engines; a request
    beyond that waits for one. connect_timeout_s: time for a connection, after which another engine is tried.
    silence_timeout_s: time without a byte of an answer, after which the engine counts as failed; a request may wait for
    that long in the engine's own queue. attempts_max: engines that one request is sent to, before its first token.
    stall_timeout_s: the same silence after the first token, and while an answer resumes; set it above the time of the
    longest prefill. migrations_max: engines that an answer may migrate to after its first token; 0 for no
    migrations. migration_timeout_s: time that all migrations of one answer may take together.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    connections_max: int = 4096
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 600.0
    attempts_max: int = 3
    stall_timeout_s: float = 30.0
    migrations_max: int = 3
    migration_timeout_s: float = 60.0

    def session(self) -> aiohttp.ClientSession:
        """Open a session for engines on the running loop."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.connect_timeout_s, sock_read=self.silence_timeout_s
        )
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.connections_max), timeout=timeout, headers=dict(self.headers)
        )


class EventSplitter:
    """Splits a stream of server-sent events into the data of each event."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that are complete now. Raises ValueError beyond EVENT_BYTES_MAX."""
        events: list[bytes] = []
        self._rest += received
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end]).rstrip(b"\r")
            del self._rest[: end + 1]
            # OpenAI's API has one line of data for each event; names, ids and comments are not used.
            if line.startswith(b"data:"):
                events.append(line[5:].strip())
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ValueError(f"an event has more than {EVENT_BYTES_MAX} bytes")
        return events


class Watchdog:
    """Notices that an engine stalls: nothing comes for a time while its bytes are waited for.

    One timer for many tokens: it finds out when it fires whether something came in between. A caller that does not read
    is not waiting.
    """

    __slots__ = ("_content", "_limit_s", "_loop", "_since_s", "_timer")

    def __init__(self, content: aiohttp.StreamReader, limit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._content = content
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._timer = self._loop.call_later(limit_s, self._check)

    def waits(self, now_s: float) -> None:
        """The caller waits for bytes from now on."""
        self._since_s = now_s

    def heard(self) -> None:
        """Something came."""
        self._since_s = None

    def stop(self) -> None:
        """Forget the stream."""
        self._timer.cancel()

    def _check(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._since_s is None else self._since_s) + self._limit_s
        if due_s <= now_s:
            self._content.set_exception(TimeoutError(f"it was silent for {self._limit_s:g} s"))
        else:
            self._timer = self._loop.call_at(due_s, self._check)


class EngineStream:
    """The answer of one engine to one request. `close` may be called at any time, also from other callbacks."""

    def __init__(self, worker_id: int, response: aiohttp.ClientResponse) -> None:
        self._worker_id = worker_id
        self._response = response
        self._splitter = EventSplitter()
        self._events: deque[bytes] = deque()
        self._finished = False
        self._watchdog: Watchdog | None = None
        self._loop = asyncio.get_running_loop()
        #: When the last byte came, and the usage that the engine reported.
        self.heard_s = self._loop.time()
        self.usage: dict[str, Any] | None = None

    def watch(self, stall_timeout_s: float) -> None:
        """Treat a silence of this length as a failure from now on."""
        if self._watchdog is None:
            self._watchdog = Watchdog(self._response.content, stall_timeout_s)

    @classmethod
    async def open(
        cls, http: aiohttp.ClientSession, worker_id: int, rank_headers: Mapping[str, str], url: str | None, body: bytes
    ) -> EngineStream:
        """Send a request to an engine. rank_headers: see Booking.

        Raises EngineFailed, or EngineRefused if every engine would refuse it.
        """
        if url is None:
            raise EngineFailed(f"worker {worker_id} was removed from the registry", worker_id=worker_id)
        headers = {"Content-Type": "application/json", **rank_headers}
        add_trace_context(headers)
        try:
            response = await http.post(f"{url.rstrip('/')}/v1/completions", data=body, headers=headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise _failed(worker_id, exc) from exc
        if response.status == 200:
            return cls(worker_id, response)
        try:
            async with response:
                raw = await response.content.read(REFUSAL_BYTES_MAX)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise _failed(worker_id, exc) from exc
        raise _refusal(worker_id, response.status, raw)

    async def next(self) -> dict[str, Any] | None:
        """Return the next chunk, with `token_ids`, `text` and `finish_reason`; None at the end of the answer.

        Raises EngineFailed, also if the stream ends without a finish reason; EngineRefused.
        """
        while True:
            while self._events:
                event = self._events.popleft()
                if event == _DONE:
                    self._check_finished()
                    await self._read_end()
                    return None
                chunk = self._chunk(event)
                if chunk is not None:
                    self._finished = self._finished or chunk["finish_reason"] is not None
                    return chunk
            try:
                if self._watchdog is not None:
                    self._watchdog.waits(self._loop.time())
                received = await self._response.content.readany()
                self.heard_s = self._loop.time()
                if self._watchdog is not None:
                    self._watchdog.heard()
                self._events.extend(self._splitter.feed(received))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
                if self._finished:  # the answer is complete
                    return None
                raise _failed(self._worker_id, exc) from exc
            if not received and not self._events:
                self._check_finished()
                return None

    async def _read_end(self) -> None:
        """Read the end of the answer, so that its connection can be used again."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                while not self._response.content.at_eof():
                    await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass  # the answer itself is complete

    def close(self) -> None:
        """Give the connection back if the answer was read to its end; otherwise close it, which aborts the request."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()

    def _check_finished(self) -> None:
        if not self._finished:
            raise EngineFailed(
                f"the engine of worker {self._worker_id} ended its answer early", worker_id=self._worker_id
            )

    def _chunk(self, event: bytes) -> dict[str, Any] | None:
        """Read one event; None if it has no tokens, such as the one with the usage."""
        try:
            page = orjson.loads(event)
            if "error" in page:
                raise _refusal(self._worker_id, page["error"].get("code"), event)
            self.usage = page.get("usage") or self.usage
            if not page["choices"]:
                return None
            choice = page["choices"][0]
            token_ids, finish_reason, text = choice.get("token_ids"), choice.get("finish_reason"), choice.get("text")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as exc:
            raise EngineFailed(
                f"the engine of worker {self._worker_id} sent an event that is not a chunk of a completion",
                worker_id=self._worker_id,
            ) from exc
        if token_ids is None and text:
            raise EngineRefused(
                f"the engine of worker {self._worker_id} returns no token ids",
                remedy="Use an engine with the option return_token_ids, such as vLLM from 0.10.2",
                worker_id=self._worker_id,
            )
        if not token_ids and finish_reason is None:
            return None
        return {"token_ids": token_ids or [], "text": text or "", "finish_reason": finish_reason}


def _failed(worker_id: int, exc: Exception) -> EngineFailed:
    reason = str(exc) or type(exc).__name__
    return EngineFailed(f"the engine of worker {worker_id} failed: {reason[:REFUSAL_CHARS_MAX]}", worker_id=worker_id)


def _refusal(worker_id: int, status: Any, raw: bytes) -> KvStreamsError:
    """Return the error for a status that is not 200: of the request, or of this engine."""
    try:
        message = str(orjson.loads(raw)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = raw.decode(errors="replace")
    text = f"the engine of worker {worker_id} answered {status}: {message[:REFUSAL_CHARS_MAX]}"
    if isinstance(status, int) and 400 <= status < 500 and status not in _BUSY_STATUSES:
        return EngineRefused(text, worker_id=worker_id, status=status)
    return EngineFailed(text, worker_id=worker_id, status=status)
