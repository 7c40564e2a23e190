"""A request from its booking to its end: `Booking`, and `Generation`, which streams its tokens.

What lives here: what is reported when, and what happens if an engine fails or the caller goes away. What must not:
calls to routers (http, push), and the form of an engine's answer (engine).

A booking ends on every path: after the last token, on an error, when the caller's task is cancelled, when `close` is
called, and when the last reference to it is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import aiohttp

from streams.client.engine import EngineOptions, EngineStream
from streams.client.reports import BookingKey, Report
from streams.errors import EngineFailed, KvStreamsError

#: Tokens of an answer between two reports of its length. Each report also renews the booking.
OUTPUT_REPORT_TOKENS = 64


class Rerouting(Protocol):
    """What a booking needs of its client."""

    def report(self, key: BookingKey, report: Report) -> None:
        """Report in the background."""

    async def reroute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Route again at once, after the reports of this request have arrived. Raises KvStreamsError."""


class Booking:
    """A rank that was chosen and booked for one request. `async with` ends it; so does dropping it.

    worker_id, dp_rank, url: the chosen rank and where its engine takes requests. overlap_blocks, request_blocks: how
    many of the request's leading blocks it holds, of how many. cost: None if the id was booked before. mode,
    chosen_mode: how far the answer can be trusted, as in docs/http.md. `answer` is the router's whole answer.
    """

    def __init__(self, client: Rerouting, request: dict[str, Any], answer: dict[str, Any]) -> None:
        self._client = client
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._prefill_reported = False
        self._ended = False
        self._failed_worker_ids: list[int] = []
        self._take(answer)

    def _take(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.request_id: str = answer["request_id"]
        self._key = key_of(self._request)
        self.worker_id: int = answer["worker_id"]
        self.dp_rank: int = answer["dp_rank"]
        self.url: str | None = answer["url"]
        self.overlap_blocks: int = answer["overlap_blocks"]
        self.request_blocks: int = answer["request_blocks"]
        self.cost: float | None = answer["cost"]
        self.mode: str = answer["mode"]
        self.chosen_mode: str = answer["chosen_mode"]

    @property
    def ended(self) -> bool:
        """Whether the end of the request was reported."""
        return self._ended

    def prefill_complete(self) -> None:
        """Report that the prompt is computed, in the background; only the first call does anything."""
        if not self._prefill_reported and not self._ended:
            self._prefill_reported = True
            self._client.report(self._key, Report(prefill_complete=True))

    def output(self, output_tokens: int) -> None:
        """Report how many tokens the answer has so far, in the background."""
        if not self._ended:
            self._client.report(self._key, Report(output_tokens=output_tokens))

    def end(self) -> None:
        """Report that the request has ended, in the background; only the first call does anything."""
        if not self._ended:
            self._ended = True
            self._client.report(self._key, Report(free=True))

    def close(self) -> None:
        """Do what `end` does."""
        self.end()

    async def move(self) -> None:
        """Move the booking to another worker, because the engine of the current one failed.

        The request is routed again with every worker that failed it in excluded_worker_ids. Raises NoEligibleWorker if
        there is no other one; the booking then stays where it is.
        """
        self._failed_worker_ids.append(self.worker_id)
        excluded = [*self._request.get("excluded_worker_ids", ()), *self._failed_worker_ids]
        answer = await self._client.reroute({**self._request, "excluded_worker_ids": excluded})
        self._prefill_reported = False
        self._take(answer)

    async def move_to(self, worker_ids: list[int]) -> bool:
        """Move the booking to the best of these workers, which reach what the request needs; returns whether it moved.

        If none of them may be used, the booking stays where it is.
        """
        try:
            answer = await self._client.reroute({**self._request, "allowed_worker_ids": worker_ids})
        except KvStreamsError:
            return False
        self._prefill_reported = False
        self._take(answer)
        return True

    async def __aenter__(self) -> Booking:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __del__(self) -> None:
        _end_later(self._loop, self._ended, self.end)


class Generation:
    """The answer to one request: an async iterator of dicts with `token_ids`, `text` and `finish_reason`.

    `finish_reason` is None except in the last dict. `booking` has the chosen worker. `async with` closes it at the end
    of the block, which matters if the answer is not read to its end.

    Raises EngineFailed if the engine fails after the first token: the caller may then generate the rest elsewhere, from
    the prompt and the tokens so far, with the worker in excluded_worker_ids.
    """

    def __init__(self, booking: Booking, http: aiohttp.ClientSession, options: EngineOptions, body: bytes) -> None:
        self.booking = booking
        self._http = http
        self._options = options
        self._body = body
        self._stream: EngineStream | None = None
        self._attempts = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()
        #: Tokens of the answer so far.
        self.output_tokens = 0
        self._reported_tokens = 0

    async def open(self) -> None:
        """Send the request to the chosen engine, or to others if it fails. Raises EngineFailed, EngineRefused."""
        try:
            while self._stream is None:
                self._attempts += 1
                booking = self.booking
                try:
                    self._stream = await EngineStream.open(
                        self._http, booking.worker_id, booking.dp_rank, booking.url, self._body
                    )
                except EngineFailed as exc:
                    await self._move(exc)
        except BaseException:
            self.close()
            raise

    async def _move(self, failure: EngineFailed) -> None:
        """Move to another engine if the caller has no tokens yet; otherwise raise the failure."""
        booking = self.booking
        failure.detail.update(request_id=booking.request_id, output_tokens=self.output_tokens)
        if self.output_tokens or self._attempts >= self._options.attempts_max:
            raise failure
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        failed = booking.worker_id
        try:
            await booking.move()
        except KvStreamsError as exc:  # no other worker may be used, so the engine's failure is what went wrong
            raise failure from exc
        if booking.worker_id == failed:  # a router that does not move bookings
            raise failure

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> dict[str, Any]:
        """Return the next tokens; raises StopAsyncIteration, EngineFailed, EngineRefused."""
        if self._closed:
            raise StopAsyncIteration
        try:
            chunk = await self._next()
        except BaseException:  # a cancellation of the caller as well
            self.close()
            raise
        if chunk is None:
            self.close()
            raise StopAsyncIteration
        self._report(chunk)
        return chunk

    async def _next(self) -> dict[str, Any] | None:
        while True:
            if self._stream is None:
                await self.open()
            assert self._stream is not None
            try:
                return await self._stream.next()
            except EngineFailed as exc:
                await self._move(exc)

    def _report(self, chunk: dict[str, Any]) -> None:
        booking = self.booking
        booking.prefill_complete()
        self._body = b""  # it was needed for another engine; a prompt may be megabytes long
        self.output_tokens += len(chunk["token_ids"])
        if chunk["finish_reason"] is not None:
            booking.end()
        elif self.output_tokens - self._reported_tokens >= OUTPUT_REPORT_TOKENS:
            self._reported_tokens = self.output_tokens
            booking.output(self.output_tokens)

    def close(self) -> None:
        """End the request: close the engine's stream, which aborts it there, and free the booking."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self.booking.end()

    async def aclose(self) -> None:
        """Do what `close` does, as async generators do."""
        self.close()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        _end_later(self._loop, self._closed, self.close)


def key_of(request: Mapping[str, Any]) -> BookingKey:
    """Return the key of the booking that a route request makes. Its phase `both` books the whole request."""
    phase = request.get("phase")
    return BookingKey(request["request_id"], phase if phase in ("prefill", "decode") else None)


def _end_later(loop: asyncio.AbstractEventLoop, ended: bool, end: Callable[[], None]) -> None:
    """End what was dropped without being ended. The garbage collector may run on any thread."""
    if not ended and not loop.is_closed():
        loop.call_soon_threadsafe(end)
