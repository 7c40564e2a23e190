"""The answer to a request, from its booking to its last token: `Generation`.

What lives here: what is reported when, and what happens if an engine fails or the caller goes away. What must not:
the booking itself (booking), calls to routers (http, push), and the form of an engine's answer (engine).

The booking ends on every path: after the last token, on an error, when the caller's task is cancelled, when `close` is
called, and when the last reference to it is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from streams.client import migration
from streams.client.booking import Booking, end_later
from streams.client.engine import EngineOptions, EngineStream
from streams.client.failed_engines import BROKE_ENGINES, DIGEST_BYTES, Failing, how_failed
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
from streams.client.payloads import token_array, with_prompt
from streams.client.reassignment import choose_worker
from streams.errors import EngineFailed, EngineRefused, KvStreamsError

#: Tokens of an answer between two reports of its length. Each report also renews the booking.
OUTPUT_REPORT_TOKENS = 64

#: How long a booking waits for the engine's usage after the last token.
USAGE_TIMEOUT_S = 1.0

#: What makes an engine report what it found of a resumed prompt with its first tokens.
_REPORTING_USAGE = {"include_usage": True, "continuous_usage_stats": True}

#: OpenAI's default for completions.
_MAX_TOKENS_DEFAULT = 16


class Generation:
    """The answer to one request: an async iterator of dicts with `token_ids`, `text` and `finish_reason`.

    `finish_reason` is None except in the last dict. `booking` has the chosen worker. `async with` closes it at the end
    of the block, which matters if the answer is not read to its end. `figures` says how often it migrated, and what
    that cost.

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
        self._resumed_tokens = 0  # of the answer, those that the booking counts as its prompt
        self._stream: EngineStream | None = None
        self._attempts = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()
        booking.failures.identify = self._digest
        #: Tokens of the answer so far.
        self.output_tokens = 0
        self._reported_tokens = 0

    async def open(self) -> None:
        """Send the request to the chosen engine, or to others if it fails. Raises EngineFailed, EngineRefused."""
        try:
            if not self._attempts and self.booking.failures.is_withheld:
                raise EngineFailed(BROKE_ENGINES, request_id=self.booking.request_id)
            while self._stream is None:
                self._attempts += 1
                booking = self.booking
                try:
                    self._stream = await EngineStream.open(
                        self._http, booking.worker_id, booking.rank_headers, booking.url, self._body
                    )
                except EngineFailed as exc:
                    await self._try_another(exc)
        except BaseException:
            self.close()
            raise

    @property
    def figures(self) -> MigrationFigures:
        """How often the answer migrated to another engine so far, and what that cost."""
        return MigrationFigures() if self._migration is None else self._migration.figures

    async def _try_another(self, failure: EngineFailed) -> None:
        """Send the request to another engine if the caller has no tokens yet; otherwise raise the failure."""
        booking = self.booking
        self._note_failure(failure)
        failure.detail.update(request_id=booking.request_id, output_tokens=self.output_tokens)
        if self.output_tokens or self._attempts >= self._options.attempts_max or booking.failures.is_withheld:
            raise failure
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        failed = booking.worker_id
        try:
            await booking.reassign()
        except KvStreamsError as exc:  # no other worker may be used, so the engine's failure is what went wrong
            raise failure from exc
        if booking.worker_id == failed:  # a router that does not reassign bookings
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
                    await self._try_another(exc)
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

    def _digest(self) -> bytes:
        """Return what identifies the request if a caller repeats it."""
        digest = hashlib.blake2b(self._packed, digest_size=DIGEST_BYTES)
        digest.update(orjson.dumps(self._fields, option=orjson.OPT_SORT_KEYS))
        return digest.digest()

    def _note_failure(self, failure: EngineFailed) -> None:
        booking = self.booking
        booking.note_failure(Failing.UNREACHABLE if booking.url is None else how_failed(failure))
        if self._migration is not None and booking.failures.is_withheld:
            self._migration.note_obstacle(BROKE_ENGINES)

    def _report(self, chunk: dict[str, Any]) -> None:
        booking = self.booking
        booking.prefill_complete()
        self._body = b""  # it was needed for another engine; a prompt may be megabytes long
        self.output_tokens += len(chunk["token_ids"])
        booking.answered(self.output_tokens - self._resumed_tokens)
        if chunk["finish_reason"] is not None:
            booking.served()
            if self._stream is None:
                self.close()
            else:  # the usage follows the last token, and the caller may not ask for what follows
                self._loop.call_later(USAGE_TIMEOUT_S, booking.end)
        elif self.output_tokens - self._reported_tokens >= OUTPUT_REPORT_TOKENS:
            self._reported_tokens = self.output_tokens
            booking.output(self.output_tokens - self._resumed_tokens)

    # -- migrating -----------------------------------------------------------------------------------------------------

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
            self.booking.note_usage(stream.usage)
            computed = prompt_computed(stream.usage, self._heard_s)
            stream.usage = None
            if computed is not None:
                self._migration.handle(computed)

    async def _migrate(self, stream: Migration, failure: EngineFailed) -> dict[str, Any] | None:
        """Go on at another engine. Returns the end of the answer if only that was missing.

        Raises the failure if the answer cannot go on.
        """
        instruction = stream.handle(self._event(failure))
        while True:
            if self._stream is not None:
                self._stream.close()
                self._stream = None
            match instruction:
                case ChooseWorker(n_kept=n_kept):
                    token_ids = token_array(self._packed) + stream.shown.token_ids[:n_kept]
                    left = self._tokens_max - n_kept
                    chosen = await choose_worker(self.booking, token_ids, left, stream.deadline_s)
                    instruction = stream.handle(chosen)
                case Resume():
                    try:
                        await self._resume(stream, instruction)
                        return None
                    except EngineFailed as exc:
                        instruction = stream.handle(self._event(exc))
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

    async def _resume(self, stream: Migration, resume: Resume) -> None:
        """Send the prompt and the answer so far to the chosen engine. Raises EngineFailed, also if it refuses."""
        booking, options = self.booking, self._options
        self._known = KnownPart(stream.shown, resume.skip_characters)
        self._resumed_tokens = resume.n_kept
        fields = {**self._fields, "max_tokens": resume.max_tokens, "stream_options": _REPORTING_USAGE}
        if fields.get("min_tokens"):
            fields["min_tokens"] = resume.min_tokens
        token_ids = (token_array(self._packed) + stream.shown.token_ids).tolist()
        try:
            async with asyncio.timeout(options.stall_timeout_s):
                self._stream = await EngineStream.open(
                    self._http, booking.worker_id, booking.rank_headers, booking.url, with_prompt(fields, token_ids)
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
        self._note_failure(failure)
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
        end_later(self._loop, self._closed, self.close)
