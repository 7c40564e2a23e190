"""A rank that is booked for one request, from the router's answer to the request's end.

What lives here: what is reported about the request, and reassigning its booking to another worker. What must not: calls
to routers (http, push), and what an engine answers (generation, and the front's proxy).

A booking ends when `end` or `close` is called, at the end of `async with`, or when the last reference to it is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from streams.client.engine import RANK_HEADER
from streams.client.failed_engines import FailedEngines, Failing, RequestFailures
from streams.client.payloads import PromptUsage, given, pack_tokens, prompt_usage
from streams.client.reports import BookingKey, OutstandingReport
from streams.errors import KvStreamsError

log = logging.getLogger(__name__)

#: Fields of a route request that let it wait; a request that runs does not.
_OF_THE_QUEUE = ("queue", "queue_timeout_ms")


class Rerouting(Protocol):
    """What a booking needs of its client. failed_engines: the engines that failed its requests."""

    failed_engines: FailedEngines

    def report(self, key: BookingKey, report: OutstandingReport) -> None:
        """Report in the background."""

    async def reroute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Route again at once, after the reports of this request have arrived. Raises KvStreamsError."""

    async def rebook(self, request: dict[str, Any]) -> dict[str, Any]:
        """Free the booking of this request, and book it again. Raises KvStreamsError."""


class Booking:
    """A rank that was chosen and booked for one request. `async with` ends it; so does dropping it.

    worker_id, dp_rank, url: the chosen rank and where its engine takes requests. rank_headers: of a request to it; they
    select the rank. overlap_blocks, request_blocks: how many of the request's leading blocks it holds, of how many.
    cost: None if the id was booked before. mode, chosen_mode: how far the answer can be trusted, as in docs/http.md.
    `answer` is the router's whole answer. failures: of the engines that had the request.
    """

    def __init__(
        self,
        client: Rerouting,
        request: dict[str, Any],
        answer: dict[str, Any],
        failures: RequestFailures | None = None,
    ) -> None:
        """failures: of another booking of the same request, which shares them."""
        self._client = client
        self.failures = failures or RequestFailures(client.failed_engines)
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._prefill_reported = False
        self._ended = False
        self._failed_worker_ids: list[int] = []
        self._take(answer)

    def _take(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self._usage: PromptUsage | None = None
        self.request_id: str = answer["request_id"]
        self._key = key_of(self._request)
        self.worker_id: int = answer["worker_id"]
        self.dp_rank: int = answer["dp_rank"]
        # An engine with a single rank needs none, and may know its rank by another number. Older routers do not say.
        self.rank_headers: dict[str, str] = {} if answer.get("dp_size") == 1 else {RANK_HEADER: str(self.dp_rank)}
        self.url: str | None = answer["url"]
        self.overlap_blocks: int = answer["overlap_blocks"]
        self.request_blocks: int = answer["request_blocks"]
        self.cost: float | None = answer["cost"]
        self.mode: str = answer["mode"]
        self.chosen_mode: str = answer["chosen_mode"]

    @property
    def phase(self) -> str | None:
        """Which part of the request is booked, `prefill` or `decode`; None for all of it."""
        return self._key.phase

    @property
    def ended(self) -> bool:
        """Whether the end of the request was reported."""
        return self._ended

    def prefill_complete(self) -> None:
        """Report that the prompt is computed, in the background; only the first call does anything."""
        if not self._prefill_reported and not self._ended:
            self._prefill_reported = True
            self._client.report(self._key, OutstandingReport(prefill_complete=True, usage=self._usage))

    def note_usage(self, usage: Any, *, is_cached_here: bool = True) -> None:
        """Note the usage of the engine's answer, which the next report has: the router compares it with its overlap.

        is_cached_here: False if cached tokens are not those of the booked rank's own cache.
        """
        found = prompt_usage(usage)
        if found is not None and (self._usage is None or found.cached_tokens is not None):
            self._usage = found if is_cached_here else PromptUsage(found.prompt_tokens)

    def output(self, output_tokens: int) -> None:
        """Report how many tokens the answer has so far, in the background."""
        if not self._ended:
            self._client.report(self._key, OutstandingReport(output_tokens=output_tokens))

    def end(self) -> None:
        """Report that the request has ended, in the background; only the first call does anything."""
        if not self._ended:
            self._ended = True
            self._client.report(self._key, OutstandingReport(free=True, usage=self._usage))

    def close(self) -> None:
        """Do what `end` does."""
        self.end()

    def note_failure(self, failing: Failing) -> None:
        """Note how the engine failed this request. All routers avoid the worker for a while once that was its fault."""
        self.failures.failed(self.worker_id, failing)

    def answered(self, n_tokens: int) -> None:
        """Note how many tokens the engine has generated so far, which shows that it serves requests."""
        self.failures.answered(self.worker_id, n_tokens)

    def served(self) -> None:
        """Note that the engine has answered the request to its end."""
        self.failures.ended(self.worker_id)

    async def reassign(self, token_ids: Sequence[int] | None = None, **fields: Any) -> None:
        """Reassign the booking to another worker, because the engine of the current one failed.

        The request is routed again with every worker that failed it in excluded_worker_ids. token_ids: replace the
        prompt: it is followed by the answer so far, if the engine failed in the middle of it. fields: of the route
        request, for this call; those that are None are left out. Raises NoEligibleWorker if there is no other one; the
        booking then stays where it is.
        """
        if self.worker_id not in self._failed_worker_ids:
            self._failed_worker_ids.append(self.worker_id)
        excluded = [*self._request.get("excluded_worker_ids", ()), *self._failed_worker_ids]
        request = self._request if token_ids is None else {**self._request, "packed": pack_tokens(token_ids)}
        answer = await self._client.reroute({**request, **given(fields), "excluded_worker_ids": excluded})
        self._request = request
        self._prefill_reported = False
        self._take(answer)

    async def reassign_to(self, worker_ids: list[int]) -> bool:
        """Reassign the booking to the best of these workers, which reach what the request needs.

        Returns whether that was possible: if none of them may be used, the booking stays where it is.
        """
        try:
            answer = await self._client.reroute({**self._request, "allowed_worker_ids": worker_ids})
        except KvStreamsError:
            return False
        self._prefill_reported = False
        self._take(answer)
        return True

    async def prefill_again(self) -> None:
        """Book the same rank anew, with a prompt that is not computed: what was to compute it elsewhere has failed.

        If no router takes that, the request goes on without a booking.
        """
        if not self._prefill_reported or self._ended:
            return
        self._prefill_reported = False
        kept = {name: value for name, value in self._request.items() if name not in _OF_THE_QUEUE}
        try:
            self._take(await self._client.rebook({**kept, "worker_id": self.worker_id, "dp_rank": self.dp_rank}))
        except KvStreamsError as exc:
            log.debug("request %s goes on without a booking: %s", self.request_id, exc)

    def allow_again(self, worker_id: int) -> None:
        """Let the booking be reassigned to a worker that failed the request, because its engine was restarted since."""
        if worker_id in self._failed_worker_ids:
            self._failed_worker_ids.remove(worker_id)

    async def __aenter__(self) -> Booking:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __del__(self) -> None:
        end_later(self._loop, self._ended, self.end)


def key_of(request: Mapping[str, Any]) -> BookingKey:
    """Return the key of the booking that a route request makes. Its phase `both` books the whole request."""
    phase = request.get("phase")
    return BookingKey(request["request_id"], phase if phase in ("prefill", "decode") else None)


def end_later(loop: asyncio.AbstractEventLoop, ended: bool, end: Callable[[], None]) -> None:
    """End what was dropped without being ended. The garbage collector may run on any thread."""
    if not ended and not loop.is_closed():
        loop.call_soon_threadsafe(end)
