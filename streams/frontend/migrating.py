"""Streams that migrate: a stream whose engine fails after its first token goes on at another engine.

What lives here: performing what a stream's Migration decides, and noticing that an engine died, stalls or refuses. What
must not: the decisions (streams.client.migration), the form of events (resuming), and everything before the first token
(proxy).

A client that leaves ends its request at any of these steps, by the cancellation of its handler: nothing migrates then.

State: the streams that may move.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Mapping

import orjson

from streams.client.booking import Booking
from streams.client.engine import END_TIMEOUT_S
from streams.client.failed_engines import BROKE_ENGINES, Failing
from streams.client.migration import (
    ChooseWorker,
    EngineEnded,
    Failure,
    Finish,
    FinishWithError,
    Instruction,
    MigrationLimits,
    Resume,
    StreamEngineFailed,
    obstacle,
)
from streams.client.payloads import token_array
from streams.client.plain_http import ConnectFailed, HttpAnswer, PlainHttp
from streams.client.reassignment import choose_worker
from streams.errors import EngineFailed
from streams.frontend import metrics
from streams.frontend.answers import error_event
from streams.frontend.client_stream import ClientStream
from streams.frontend.exchange import Exchange, MigratingStream
from streams.frontend.fleet import Fleet
from streams.frontend.metrics import FrontCounts
from streams.frontend.resuming import StreamRelay, figures_of, resumed_request
from streams.frontend.spans import Spans
from streams.prompts.calls import Kind
from streams.prompts.request_fields import FIELDS, Effect
from streams.prompts.tokenizing import Tokenizing
from streams.settings import FrontSettings

#: Time for a connection to an engine, after which another engine is tried.
CONNECT_TIMEOUT_S = 5.0

#: Tokens of an answer between two reports of its length.
OUTPUT_REPORT_TOKENS = 64

#: Engines that are asked to tokenize a text, if no token ids were reported.
TOKENIZING_ATTEMPTS_MAX = 3

#: Engines of which it is remembered that they refuse to be asked for token ids. Beyond it, they are asked again.
WITHOUT_IDS_MAX = 4096

#: Statuses with which an engine refuses a request that has a field it does not know.
UNKNOWN_FIELD = (400, 422)

#: Fields with which the engine's prompt is another one than the front's.
_CHANGE_THE_PROMPT = tuple(name for name, effect in FIELDS.items() if effect is Effect.OTHER_PROMPT)

#: What follows in the stream was resumed from text. Clients ignore lines of this form.
_BY_TEXT = b": resumed from text, since the engine reports no token ids\n\n"

#: How a connection to an engine fails.
ENGINE_FAILURES = (TimeoutError, OSError)


class StreamMigrator:
    """Passes on streams of all requests of a front, from engine to engine. Used on one loop."""

    def __init__(
        self,
        settings: FrontSettings,
        tokenizing: Tokenizing,
        fleet: Fleet,
        counts: FrontCounts,
        spans: Spans,
        http: PlainHttp,
    ) -> None:
        """http: for the requests, and for calls of engines' `/tokenize`."""
        self._settings = settings
        self._tokenizing = tokenizing
        self._fleet = fleet
        self._counts = counts
        self._spans = spans
        self._http = http
        self._without_ids: set[str] = set()  # URLs of engines

    def limits(self) -> MigrationLimits:
        """How often, and for how long, a stream may migrate."""
        return MigrationLimits(self._settings.front_migrations_max, self._settings.front_migration_timeout_s)

    async def carry(
        self,
        exchange: Exchange,
        stream: MigratingStream,
        answer: HttpAnswer,
        data: bytes,
        client: ClientStream,
        *,
        with_figures: bool,
    ) -> None:
        """Pass on a stream whose first token is in `data`, to its end, from one engine after the other if they fail.

        client: its headers were sent. with_figures: whether the client asked for the figures of its migrations. Sets
        the exchange's outcome.
        """
        loop, booking = asyncio.get_running_loop(), exchange.booking
        assert booking is not None
        relay = stream.relay = StreamRelay(stream.kind, stream.body, booking.worker_id, self.limits())
        migration = relay.migration
        source: HttpAnswer | None = answer
        instruction: Instruction
        try:
            while True:
                assert source is not None
                failure = await self._copy(exchange, stream, source, data, client)
                if relay.diverged:
                    instruction = FinishWithError(
                        f"the answer cannot go on after {relay.n_tokens} tokens: the next engine generates other text "
                        "for tokens that the failed one had not shown completely"
                    )
                elif failure is None:
                    instruction = migration.handle(EngineEnded(loop.time()))
                    break
                else:
                    source.close()
                    source, data = None, b""
                    instruction, source = await self._migrate(exchange, stream, failure, client)
                if not isinstance(instruction, Resume):
                    break
            await client.end(self._ending(exchange, stream, relay, instruction, with_figures=with_figures))
            if source is not None:
                await _read_end(source)
        finally:
            if source is not None:
                source.close()
            self._count(relay)

    async def _migrate(
        self, exchange: Exchange, stream: MigratingStream, failure: Failure, client: ClientStream
    ) -> tuple[Instruction, HttpAnswer | None]:
        """Go on at another engine; returns what to do next, and with Resume the engine's answer."""
        booking = exchange.booking
        assert booking is not None
        with self._spans.child("migration") as attributes:
            attributes["kvstreams.failed_worker_id"] = str(booking.worker_id)
            attributes["kvstreams.failure"] = failure.value
            await self._prepare(stream, booking)
            instruction, source = self._failed(booking, stream, failure), None
            while isinstance(instruction, ChooseWorker):
                instruction, source = await self._resume(exchange, stream, instruction, client)
            if source is not None:
                attributes["kvstreams.worker_id"] = str(booking.worker_id)
            return instruction, source

    def _ending(
        self,
        exchange: Exchange,
        stream: MigratingStream,
        relay: StreamRelay,
        instruction: Instruction,
        *,
        with_figures: bool,
    ) -> bytes:
        """Return the last bytes of a stream, and set the exchange's outcome."""
        figures = figures_of(relay.migration.figures, by_text=relay.by_text) if with_figures else None
        if isinstance(instruction, Finish):
            exchange.outcome = metrics.COMPLETED
            prompt = self._prompt(stream)
            return relay.ending(0 if prompt is None else len(prompt), instruction.finish_reason, figures)
        assert isinstance(instruction, FinishWithError)
        exchange.outcome = metrics.BROKEN
        reason = instruction.reason if relay.refusal is None else f"{instruction.reason}; the engine: {relay.refusal}"
        return relay.figures_event(figures) + error_event(EngineFailed.http_status, reason, EngineFailed.code)

    async def _copy(
        self, exchange: Exchange, stream: MigratingStream, source: HttpAnswer, data: bytes, client: ClientStream
    ) -> Failure | None:
        """Pass on the stream of one engine. Returns how it failed, or None if the answer is complete."""
        loop, relay, booking = asyncio.get_running_loop(), stream.relay, exchange.booking
        assert relay is not None and booking is not None

        def take(received: bytes) -> bool:
            """Pass bytes on; returns whether more may come now."""
            stream.heard_s = at_s = loop.time()
            shown = relay.feed(received, at_s)
            keeps_up = not shown or client.write(shown)
            booking.prefill_complete()
            n_tokens = exchange.n_tokens = relay.n_tokens
            booking.answered(n_tokens - exchange.resumed_tokens)
            if n_tokens - exchange.reported_tokens >= OUTPUT_REPORT_TOKENS:
                exchange.reported_tokens, exchange.reported_s = n_tokens, at_s
                booking.output(n_tokens - exchange.resumed_tokens)
            return keeps_up and not (relay.done or relay.diverged or relay.refusal is not None)

        source.limit_silence(self._settings.front_stall_timeout_s)
        try:
            if data:
                take(data)
            while not (relay.done or relay.diverged or relay.refusal is not None or source.at_eof):
                await client.drained()
                await source.pump(take)
        except ValueError:  # an endless event
            failure = Failure.REFUSED
        except TimeoutError:
            failure = Failure.STALLED
        except ENGINE_FAILURES:
            failure = Failure.DIED
        else:
            if relay.done or relay.diverged:
                booking.served()
                return None
            failure = Failure.DIED if relay.refusal is None else Failure.REFUSED
        return None if relay.finished else failure

    def _failed(
        self, booking: Booking, stream: MigratingStream, failure: Failure, failing: Failing = Failing.BROKE
    ) -> Instruction:
        assert stream.relay is not None
        loop = asyncio.get_running_loop()
        booking.note_failure(failing)
        if booking.failures.is_withheld:
            stream.relay.migration.note_obstacle(BROKE_ENGINES)
        stream.failed[booking.worker_id] = self._fleet.incarnation(booking.worker_id)
        self._counts.engine_failures[failure.value] += 1
        now_s = loop.time()
        return stream.relay.migration.handle(StreamEngineFailed(now_s, failure, stream.heard_s))

    async def _prepare(self, stream: MigratingStream, booking: Booking) -> None:
        """Find out whether the answer can be resumed, and its token ids if the engine reported none."""
        relay = stream.relay
        assert relay is not None
        migration = relay.migration
        if not stream.fields:  # a long prompt takes a millisecond to read
            stream.fields = orjson.loads(stream.body)
            reason = obstacle(stream.fields)
            if reason is not None:
                migration.note_obstacle(reason)
            stream.fields.pop("prompt", None)
            if any(stream.fields.get(name) is not None for name in _CHANGE_THE_PROMPT):
                stream.prompt = None
        prompt = self._prompt(stream)
        if prompt is None:
            migration.note_obstacle("neither the engine nor the front knows the token ids of the whole prompt")
        else:
            migration.note_prompt(len(prompt))
        if migration.has_obstacle or not relay.by_text:
            return
        if migration.shown.rewound:
            migration.note_obstacle("include_stop_str_in_output needs an engine that reports token ids")
            return
        token_ids = await self._tokens_of(stream, migration.shown.text, booking.url)
        if token_ids is None:
            migration.note_obstacle("the engine reports no token ids, and its text could not be tokenized")
        else:
            migration.shown.restate(token_ids)

    async def _tokens_of(self, stream: MigratingStream, text: str, failed_url: str | None) -> array[int] | None:
        """Tokenize a part of an answer, with the model's files or by an engine that has not failed."""
        key = stream.headers.get("Authorization", "").removeprefix("Bearer ") or None
        for _ in range(TOKENIZING_ATTEMPTS_MAX):
            engine = self._fleet.engine(stream.model)
            if engine is not None and failed_url is not None and engine == failed_url.rstrip("/"):
                engine = self._fleet.engine(stream.model)
            packed = await self._tokenizing.text(text, stream.model, engine, self._http, key)
            if packed is not None:
                return token_array(packed)
        return None

    @staticmethod
    def _prompt(stream: MigratingStream) -> array[int] | None:
        """Return the prompt's token ids: the engine's, otherwise those that the front computed."""
        if stream.relay is not None and stream.relay.prompt_ids is not None:
            return stream.relay.prompt_ids
        return None if stream.prompt is None else token_array(stream.prompt)

    async def _resume(
        self, exchange: Exchange, stream: MigratingStream, choose: ChooseWorker, client: ClientStream
    ) -> tuple[Instruction, HttpAnswer | None]:
        """Reassign the booking, and send the answer so far to the chosen engine; returns what to do next.

        With Resume comes the engine's answer, which has begun.
        """
        relay, booking = stream.relay, exchange.booking
        prompt = self._prompt(stream)
        assert relay is not None and booking is not None and prompt is not None
        loop, migration = asyncio.get_running_loop(), relay.migration
        token_ids = prompt + migration.shown.token_ids[: choose.n_kept]
        tokens_max = relay.options.tokens_max
        expected = None if tokens_max is None else tokens_max - choose.n_kept
        for worker_id, failed in list(stream.failed.items()):
            now = self._fleet.incarnation(worker_id)
            if failed is not None and now is not None and now > failed:
                booking.allow_again(worker_id)
                del stream.failed[worker_id]
        chosen = await choose_worker(booking, token_ids, expected, migration.deadline_s)
        instruction = migration.handle(chosen)
        if not isinstance(instruction, Resume):
            return instruction, None
        self._counts.migrations += 1
        exchange.resumed_tokens = exchange.reported_tokens = instruction.n_kept
        exchange.reported_s = loop.time()
        relay.resume(instruction)
        fields, prompt_ids = stream.fields, token_ids.tolist()

        def body(asks_for_ids: bool) -> bytes:
            return resumed_request(fields, prompt_ids, instruction, asks_for_ids=asks_for_ids)

        try:
            source = await self.post(
                booking, Kind.COMPLETION, body, stream.headers, self._settings.front_stall_timeout_s
            )
        except ENGINE_FAILURES as exc:
            failure = Failure.STALLED if isinstance(exc, TimeoutError) else Failure.DIED
            failing = Failing.UNREACHABLE if isinstance(exc, ConnectFailed) else Failing.BROKE
            return self._failed(booking, stream, failure, failing), None
        if source.status != 200 or source.content_type != "text/event-stream":
            source.close()
            return self._failed(booking, stream, Failure.REFUSED, Failing.REFUSED), None
        if relay.by_text:
            client.write(_BY_TEXT)
        return instruction, source

    async def post(
        self, booking: Booking, kind: Kind, body: Callable[[bool], bytes], headers: Mapping[str, str], timeout_s: float
    ) -> HttpAnswer:
        """Send a request to the engine that is booked. body: makes it, given whether it asks for token ids.

        An engine that refuses a request which asks for them gets one that does not.
        """
        assert booking.url is not None
        url = booking.url.rstrip("/")
        asks = url not in self._without_ids
        answer = await self._post_one(url, kind, body(asks), booking, headers, timeout_s)
        if asks and answer.status in UNKNOWN_FIELD:
            answer.close()
            answer = await self._post_one(url, kind, body(False), booking, headers, timeout_s)
            if answer.status == 200 and len(self._without_ids) < WITHOUT_IDS_MAX:
                self._without_ids.add(url)
        return answer

    async def _post_one(
        self, url: str, kind: Kind, body: bytes, booking: Booking, headers: Mapping[str, str], timeout_s: float
    ) -> HttpAnswer:
        sent = {**headers, **self._spans.context(), **booking.rank_headers}
        return await self._http.request("POST", url, kind, sent, body, timeout_s)

    def _count(self, relay: StreamRelay) -> None:
        figures = relay.migration.figures
        if figures.migrations:
            moved = self._counts.moved
            moved.streams += 1
            moved.tokens_recovered += figures.tokens_recovered
            moved.tokens_prefilled_again += figures.tokens_prefilled_again
            moved.lost_seconds.observe(figures.lost_s)


async def _read_end(source: HttpAnswer) -> None:
    """Read the end of an answer, so that its connection can be used again."""
    with contextlib.suppress(*ENGINE_FAILURES):
        async with asyncio.timeout(END_TIMEOUT_S):
            await source.read()
