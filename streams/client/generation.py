"""A request from its booking to its end: `Booking`, and `Generation`, which streams its tokens.

What lives here: what is reported when, and what happens if an engine fails or the caller goes away. What must not:
calls to routers (http, push), and the form of an engine's answer (engine).

A booking ends on every path: after the last token, on an error, when the caller's task is cancelled, when `close` is
called, and when the last reference to it is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import aiohttp

from streams.client import migration
from streams.client.engine import EngineOptions, EngineStream
from streams.client.migration import (
    ChooseWorker,
    Failure,
    Finish,
    FinishWithError,
    KnownPart,
    Migration,
    MigrationFigures,
    MigrationLimits,
    Resume,
    TokensShown,
    prompt_computed,
)
from streams.client.payloads import given, pack_tokens, token_array, with_prompt
from streams.client.reassignment import choose_worker
from streams.client.reports import BookingKey, OutstandingReport
from streams.errors import EngineFailed, EngineRefused, KvStreamsError

log = logging.getLogger(__name__)

#: Tokens of an answer between two reports of its length. Each report also renews the booking.
OUTPUT_REPORT_TOKENS = 64

#: What makes an engine report what it found of a resumed prompt with its first tokens.
_REPORTING_USAGE = {"include_usage": True, "continuous_usage_stats": True}

#: Fields of a route request that let it wait; a request that runs does not.
_OF_THE_QUEUE = ("queue", "queue_timeout_ms")

#: OpenAI's default for completions.
_MAX_TOKENS_DEFAULT = 16


class Rerouting(Protocol):
    """What a booking needs of its client."""

    def report(self, key: BookingKey, report: OutstandingReport) -> None:
        """Report in the background."""

    def note_failed(self, worker_id: int) -> None:
        """Let all routers avoid a worker whose engine failed, in the background."""

    async def reroute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Route again at once, after the reports of this request have arrived. Raises KvStreamsError."""

    async def rebook(self, request: dict[str, Any]) -> dict[str, Any]:
        """Free the booking of this request, and book it again. Raises KvStreamsError."""


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
            self._client.report(self._key, OutstandingReport(prefill_complete=True))

    def output(self, output_tokens: int) -> None:
        """Report how many tokens the answer has so far, in the background."""
        if not self._ended:
            self._client.report(self._key, OutstandingReport(output_tokens=output_tokens))

    def end(self) -> None:
        """Report that the request has ended, in the background; only the first call does anything."""
        if not self._ended:
            self._ended = True
            self._client.report(self._key, OutstandingReport(free=True))

    def close(self) -> None:
        """Do what `end` does."""
        self.end()

    def note_failure(self, failure: EngineFailed) -> None:
        """Let all routers avoid the worker for a while if its engine failed this request.

        An engine that answers with an error status can be reached; it may be busy, or refuse this request alone.
        """
        if "status" not in failure.detail:
            self._client.note_failed(self.worker_id)

    async def move(self, token_ids: Sequence[int] | None = None, **fields: Any) -> None:
        """Move the booking to another worker, because the engine of the current one failed.

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
        """Let the booking move to a worker that failed the request, because its engine was restarted since."""
        if worker_id in self._failed_worker_ids:
            self._failed_worker_ids.remove(worker_id)

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
    of the block, which matters if the answer is not read to its end. `figures` says how often it moved, and what that
    cost.

    If the engine fails after the first token, the rest of the answer comes from another one, and each token comes once.
    Raises EngineFailed if that is not possible: the caller may then generate the rest, from the prompt and the tokens
    so far, with the worker in excluded_worker_ids.
    """

    def __init__(
        self,
        booking: Booking,
        http: aiohttp.ClientSession,
        options: EngineOptions,
        body: bytes,
        fields: dict[str, Any],
        packed: bytes,
    ) -> None:
        """body: of the completion. fields, packed: the same without the prompt; the prompt, u32 LE."""
        self.booking = booking
        self._http = http
        self._options = options
        self._body = body
        self._fields = fields
        self._packed = packed
        self._migration: Migration | None = None  # from the first token on
        self._known = KnownPart()
        self._heard_s = 0.0
        self._tokens_max: int = fields.get("max_tokens", _MAX_TOKENS_DEFAULT)
        self._moved_tokens = 0  # of the answer, those that the booking counts as its prompt
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

    @property
    def figures(self) -> MigrationFigures:
        """How often the answer moved to another engine so far, and what that cost."""
        return MigrationFigures() if self._migration is None else self._migration.figures

    async def _move(self, failure: EngineFailed) -> None:
        """Move to another engine if the caller has no tokens yet; otherwise raise the failure."""
        booking = self.booking
        booking.note_failure(failure)
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
                chunk = await self._stream.next()
            except EngineFailed as exc:
                if self._migration is None:
                    await self._move(exc)
                    continue
                ending = await self._migrate(self._migration, exc)
                if ending is None:
                    continue
                return ending
            if chunk is None:
                self._note_usage(self._stream)
                return None
            self._heard_s = self._stream.heard_s
            new = self._shown(chunk)
            self._note_usage(self._stream)
            if new["token_ids"] or new["text"] or new["finish_reason"] is not None:
                return new

    def _report(self, chunk: dict[str, Any]) -> None:
        booking = self.booking
        booking.prefill_complete()
        self._body = b""  # it was needed for another engine; a prompt may be megabytes long
        self.output_tokens += len(chunk["token_ids"])
        if chunk["finish_reason"] is not None:
            booking.end()
        elif self.output_tokens - self._reported_tokens >= OUTPUT_REPORT_TOKENS:
            self._reported_tokens = self.output_tokens
            booking.output(self.output_tokens - self._moved_tokens)

    # -- moving --------------------------------------------------------------------------------------------------------

    def _begin(self) -> Migration:
        """Begin to note what the caller gets."""
        fields, options = self._fields, self._options
        return Migration(
            self.booking.worker_id,
            len(self._packed) // 4,
            max_tokens=self._tokens_max,
            min_tokens=fields.get("min_tokens") or 0,
            held_back=migration.held_back_characters(fields),
            rewound=migration.rewound_characters(fields),
            obstacle=migration.obstacle(fields),
            limits=MigrationLimits(options.migrations_max, options.migration_timeout_s),
        )

    def _shown(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Return what is new of a chunk, and note it. Raises EngineFailed if a resumed answer does not fit."""
        stream = self._stream
        assert stream is not None
        if self._migration is None:
            self._migration = self._begin()
            stream.watch(self._options.stall_timeout_s)
        token_ids, finish_reason = chunk["token_ids"], chunk["finish_reason"]
        new_ids, text = self._known.skip(token_ids, chunk["text"], ends=finish_reason is not None)
        if self._known.diverged:
            raise EngineFailed(
                f"the engine of worker {self.booking.worker_id} generates other tokens than the one that failed, for "
                "those that it had not shown completely",
                worker_id=self.booking.worker_id,
                request_id=self.booking.request_id,
                output_tokens=self.output_tokens,
            )
        # As in the front: without greedy decoding, tokens that are dropped would not come again.
        whole = None if len(token_ids) > 1 and self._fields.get("temperature") == 0 else True
        self._migration.handle(TokensShown(self._heard_s, token_ids, text, whole))
        return {"token_ids": list(new_ids), "text": text, "finish_reason": finish_reason}

    def _note_usage(self, stream: EngineStream) -> None:
        """Note what the last engine found of the prompt, if it said so."""
        if stream.usage is not None and self._migration is not None:
            found = prompt_computed(stream.usage, self._heard_s)
            stream.usage = None
            if found is not None:
                self._migration.handle(found)

    async def _migrate(self, moving: Migration, failure: EngineFailed) -> dict[str, Any] | None:
        """Go on at another engine. Returns the end of the answer if only that was missing.

        Raises the failure if the answer cannot go on.
        """
        instruction = moving.handle(self._event(failure))
        while True:
            if self._stream is not None:
                self._stream.close()
                self._stream = None
            match instruction:
                case ChooseWorker(n_kept=n_kept):
                    token_ids = token_array(self._packed) + moving.shown.token_ids[:n_kept]
                    left = self._tokens_max - n_kept
                    chosen = await choose_worker(self.booking, token_ids, left, moving.deadline_s)
                    instruction = moving.handle(chosen)
                case Resume():
                    try:
                        await self._resume(moving, instruction)
                        return None
                    except EngineFailed as exc:
                        instruction = moving.handle(self._event(exc))
                case Finish(finish_reason=finish_reason):
                    return {"token_ids": [], "text": "", "finish_reason": finish_reason}
                case FinishWithError(reason=reason):
                    booking = self.booking
                    failure.detail.update(
                        request_id=booking.request_id, output_tokens=self.output_tokens, not_moved_because=reason
                    )
                    raise failure
                case _:
                    raise AssertionError(f"a failure leads to {instruction}")

    async def _resume(self, moving: Migration, resume: Resume) -> None:
        """Send the prompt and the answer so far to the chosen engine. Raises EngineFailed, also if it refuses."""
        booking, options = self.booking, self._options
        self._known = KnownPart(moving.shown, resume.skip_characters)
        self._moved_tokens = resume.n_kept
        fields = {**self._fields, "max_tokens": resume.max_tokens, "stream_options": _REPORTING_USAGE}
        if fields.get("min_tokens"):
            fields["min_tokens"] = resume.min_tokens
        token_ids = (token_array(self._packed) + moving.shown.token_ids).tolist()
        try:
            async with asyncio.timeout(options.stall_timeout_s):
                self._stream = await EngineStream.open(
                    self._http, booking.worker_id, booking.dp_rank, booking.url, with_prompt(fields, token_ids)
                )
        except EngineRefused as exc:
            raise EngineFailed(str(exc), **exc.detail) from exc
        except TimeoutError as exc:
            raise EngineFailed(
                f"the engine of worker {booking.worker_id} does not resume the answer", worker_id=booking.worker_id
            ) from exc
        self._stream.watch(options.stall_timeout_s)

    def _event(self, failure: EngineFailed) -> migration.StreamEngineFailed:
        """Report a failed engine, and return the failure as the migration takes it."""
        self.booking.note_failure(failure)
        how = Failure.DIED
        if isinstance(failure.__cause__, TimeoutError):
            how = Failure.STALLED
        elif "status" in failure.detail:
            how = Failure.REFUSED
        return migration.StreamEngineFailed(self._loop.time(), how, self._heard_s)

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
