"""One request of a client, from its arrival to its end: route, send to the engine, copy the answer, free the booking.

What lives here: the order of these steps, retries before the first token, and what ends a request. What must not:
reading bodies and headers (requests), events (answers), tokens (tokenizing), and the server (server).

Every path ends in `finally`: the booking is freed, and the engine's connection is closed unless its answer was read to
its end, which makes the engine cancel its request.

State: the requests that the front serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from aiohttp import web

from streams.client.booking import Booking
from streams.client.failed_engines import BROKE_ENGINES, Failing, how_failed
from streams.client.http import KvRouterClient
from streams.client.payloads import RouteOptions
from streams.client.plain_http import HttpAnswer, PlainHttp
from streams.errors import (
    AllWorkersBusy,
    EngineFailed,
    Forbidden,
    KvStreamsError,
    NoEligibleWorker,
    RouterUnavailable,
    Unauthorized,
)
from streams.frontend import metrics
from streams.frontend.answers import StreamWatch, may_be_served_elsewhere, usage_tokens
from streams.frontend.apis import APIS
from streams.frontend.auditing import Auditing
from streams.frontend.client_stream import ClientGone, ClientStream, FrontResponse
from streams.frontend.cors import Cors
from streams.frontend.disaggregation import decode_body
from streams.frontend.exchange import Exchange, MigratingStream
from streams.frontend.fleet import Fleet
from streams.frontend.headers import DETAILS, client_headers, engine_headers
from streams.frontend.metrics import FrontCounts
from streams.frontend.migrating import (
    CONNECT_TIMEOUT_S,
    ENGINE_FAILURES,
    OUTPUT_REPORT_TOKENS,
    UNKNOWN_FIELD,
    StreamMigrator,
)
from streams.frontend.prefilling import PrefillFailed, Prefilling, RemotePrefill
from streams.frontend.protocol import kind_of
from streams.frontend.pulling import pulling_body, rank_name, source_to_pull, sources_header
from streams.frontend.spans import Attributes, Spans
from streams.frontend.usage import (
    USAGE_FIELD,
    EventUsageWatch,
    UsageWatch,
    usage_fields,
    usage_of_page,
    usage_options,
    with_fields,
)
from streams.prompts.calls import CALLS, Kind
from streams.prompts.engine_keys import KeyOf
from streams.prompts.request_fields import request_digest
from streams.prompts.requests import ClientRequest
from streams.prompts.route_fields import REQUEST_ID, load_options, route_options
from streams.prompts.tokenizing import NONE, Tokenizing
from streams.security.tokens import Grant
from streams.settings import FrontServerSettings

#: Connections to engines that no request uses are closed after this time. uvicorn, which serves vLLM and SGLang, closes
#: them after 5 s; a request that is sent at that moment would fail.
KEEPALIVE_S = 4.0

#: Bytes of an answer that are held back until it may begin: an answer that was not streamed, or an engine's error. A
#: longer one is copied as it comes, and can no longer be replaced by another engine's.
HELD_BYTES_MAX = 4 << 20

#: Time for an engine that refused a request to say whether it works.
HEALTH_TIMEOUT_S = 2.0

#: The longest time between two reports of an answer's length, which renew the booking.
OUTPUT_REPORT_S = 60.0

#: Calls whose streams report their usage if they are asked for it; those of the others do so by themselves.
_WITH_OPTIONS = (Kind.CHAT, Kind.COMPLETION)


@dataclass(slots=True)
class _Refusal:
    """An engine's answer that is passed on if no other engine has a better one.

    error_status: the status of the error, which may be an event of a stream.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    error_status: int


class Proxy:
    """Serves the calls that generate. Used on one loop."""

    def __init__(
        self,
        settings: FrontServerSettings,
        router: KvRouterClient,
        tokenizing: Tokenizing,
        fleet: Fleet,
        key_of: KeyOf,
        counts: FrontCounts,
        spans: Spans,
    ) -> None:
        self._settings = settings
        self._spans = spans
        self._router = router
        self._tokenizing = tokenizing
        self._fleet = fleet
        self._key_of = key_of
        self.counts = counts
        self.cors = Cors(settings.front_cors_origins)
        self._http = PlainHttp(keepalive_s=KEEPALIVE_S, connect_timeout_s=CONNECT_TIMEOUT_S, keeps_spares=True)
        self._prefilling = Prefilling(settings, router, fleet, counts, self._http)
        self.auditing = Auditing(self._http, key_of, counts.renders)
        self._live: set[Exchange] = set()
        self._migrator = StreamMigrator(settings, tokenizing, fleet, counts, spans, self._http)

    async def close(self) -> None:
        """Close all connections to engines."""
        await self.auditing.close()
        self._http.close()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def failures_reported(self) -> int:
        """Reports of failed engines that a router accepted."""
        return self._router.failed_engines.n_reported

    def check(self) -> None:
        """Renew bookings of long requests, and disconnect clients that do not read. Called about once a second."""
        now_s = asyncio.get_running_loop().time()
        for exchange in self._live:
            since_s = exchange.writing_since_s
            if since_s is not None and now_s - since_s > self._settings.front_client_timeout_s:
                exchange.outcome = metrics.CLIENT_SLOW
                if exchange.http.transport is not None:
                    exchange.http.transport.abort()  # which cancels the handler
            elif now_s - exchange.reported_s > OUTPUT_REPORT_S and exchange.booking is not None:
                exchange.reported_s = now_s
                exchange.booking.output(max(1, exchange.n_tokens - exchange.resumed_tokens))

    async def serve(self, http: web.Request, request: ClientRequest, body: bytes, grant: Grant) -> web.StreamResponse:
        """Answer a request. Raises KvStreamsError for what the front or the router refuses."""
        loop = asyncio.get_running_loop()
        exchange = Exchange(http, loop.time(), reported_s=loop.time())
        self._live.add(exchange)
        self.counts.active += 1
        try:
            with self._spans.request(request.kind, http.headers) as attributes:
                try:
                    return await self._serve(exchange, request, body, grant)
                finally:
                    attributes["gen_ai.request.model"] = request.model
                    attributes["gen_ai.usage.output_tokens"] = exchange.n_tokens
                    attributes["kvstreams.outcome"] = exchange.outcome
        except ClientGone as exc:
            if exchange.outcome == metrics.COMPLETED:  # only its last bytes did not arrive
                exchange.outcome = metrics.CLIENT_GONE
            return exc.response
        except KvStreamsError as exc:
            if exchange.outcome != metrics.WITHHELD:
                exchange.outcome = metrics.FAILED if isinstance(exc, EngineFailed) else metrics.REFUSED
            raise
        finally:
            self.auditing.ended(exchange)
            if exchange.booking is not None:
                exchange.booking.end()
            self._live.discard(exchange)
            self.counts.active -= 1
            self.counts.outcomes[exchange.outcome] += 1
            self.counts.output_tokens += exchange.n_tokens

    async def _serve(self, exchange: Exchange, request: ClientRequest, body: bytes, grant: Grant) -> web.StreamResponse:
        headers, settings = exchange.http.headers, self._settings
        options = route_options(request, headers, grant, settings)
        model, adapter = self._fleet.resolve(request.model)
        if adapter is not None:
            options |= {"model": model, "lora_name": adapter}
        key = self._key_of(model)
        failed_engines = self._router.failed_engines
        if failed_engines.withholds_any and failed_engines.breaks_engines(request_digest(request.kind, body)):
            exchange.outcome = metrics.WITHHELD
            raise EngineFailed(BROKE_ENGINES)
        at_s = time.perf_counter()  # the loop's time stands still while the loop tokenizes
        engine = self._fleet.engine(model)
        prompt = await self._tokenizing.prompt(request, body, model, engine, self._http, key)
        exchange.model, exchange.prompt = model, prompt
        self.counts.tokenize_seconds.observe(time.perf_counter() - at_s)
        self.counts.prompt_tokens += len(prompt.tokens) // 4
        api, call = APIS[request.kind], CALLS[request.kind]
        if not call.generates:
            options.pop("expected_output_tokens", None)
        if call.generates and self._prefilling.splits(options.get("model")):
            options["phase"] = "decode"
        at_s = time.perf_counter()
        with self._spans.child("route") as attributes:
            load = load_options(request, body, prompt)
            routing = {**options, **load, **self._spans.context()}
            if settings.front_kv_pull_tokens_min or DETAILS in headers:
                routing["kv_sources"] = True
            booking = exchange.booking = await self._book(prompt.tokens, routing, may_wait=call.computes)
            booking.failures.identify = partial(request_digest, request.kind, body)
            attributes |= _booked(booking)
        self.counts.route_seconds.observe(time.perf_counter() - at_s)
        request_id = headers.get(REQUEST_ID) or booking.request_id
        sent = engine_headers(headers, request_id, key)
        remote: RemotePrefill | None = None
        known = prompt.tokens if api.splits and prompt.source != NONE else None
        if booking.phase is not None:
            remote = await self._prefilling.begin(booking, request.kind, body, known, {**options, **load}, sent)
        if self._settings.front_migration and request.stream and api.migrates:
            exchange.migrating = MigratingStream(
                request.kind, body, sent, model, prompt.tokens if prompt.whole else None
            )
        refusal: _Refusal | EngineFailed | None = None
        for attempt in range(self._settings.front_attempts_max):
            if attempt and (booking.failures.is_withheld or not await self._reassigned(booking)):
                break
            try:
                with self._spans.child("engine") as attributes:
                    attributes |= _booked(booking)
                    to_engine = {**sent, **self._spans.context()}
                    # What has failed once is sent to the next engine as it came.
                    exchange.pulls_from = None
                    pulls = api.splits and remote is None and not attempt
                    asked = self._pulling(exchange, body) if pulls else body
                    answer = await self._attempt_with(remote, exchange, request, asked, to_engine, request_id)
            except EngineFailed as exc:
                booking.note_failure(Failing.UNREACHABLE if booking.url is None else how_failed(exc))
                refusal, remote = exc, None
                continue
            if isinstance(answer, _Refusal):
                booking.note_failure(await self._how_refused(booking, answer, sent))
                refusal, remote = answer, None
                continue
            return answer
        if isinstance(refusal, _Refusal):
            exchange.outcome = metrics.COMPLETED
            return await self._whole(exchange, refusal, request_id)
        if refusal is not None and booking.failures.is_withheld:
            exchange.outcome = metrics.WITHHELD
            raise EngineFailed(f"{BROKE_ENGINES}; {refusal}") from refusal
        raise refusal or EngineFailed("front_attempts_max is 0")

    async def _book(self, tokens: bytes, options: dict[str, Any], *, may_wait: bool) -> Booking:
        """Book a rank. may_wait: in the router's queue, until one has room."""
        if may_wait and self._settings.front_queue:
            options["queue"] = "on"
        try:
            try:
                return await self._router.book_packed(tokens, **cast(RouteOptions, options))
            except NoEligibleWorker as exc:
                if isinstance(exc, AllWorkersBusy) or options.pop("phase", None) is None:
                    raise
                # The decode workers are gone, and the front has not read that yet. One worker then does everything.
                return await self._router.book_packed(tokens, **cast(RouteOptions, options))
        except (Unauthorized, Forbidden) as exc:
            # The client's token is not the problem, and must not seem to be.
            raise RouterUnavailable("the router refuses the front's token", remedy="Set --router-token-file") from exc

    async def _how_refused(self, booking: Booking, refusal: _Refusal, sent: Mapping[str, str]) -> Failing:
        """Find out whether a request broke the engine that answered it with an error.

        An engine whose core has ended may answer 500 before its process ends.
        """
        if refusal.error_status != web.HTTPInternalServerError.status_code or booking.url is None:
            return Failing.REFUSED
        key = {name: value for name, value in sent.items() if name == "Authorization"}
        try:
            health = await self._http.request("GET", booking.url, "/health", key, None, HEALTH_TIMEOUT_S, is_short=True)
            health.close()
        except ENGINE_FAILURES:
            return Failing.BROKE
        return Failing.BROKE if health.status >= 500 else Failing.REFUSED

    async def _reassigned(self, booking: Booking) -> bool:
        """Reassign a booking to an engine that has not failed the request; returns whether there is one."""
        failed = booking.worker_id
        try:
            await booking.reassign()
        except KvStreamsError:
            return False
        if booking.worker_id == failed:
            return False
        self.counts.retries += 1
        return True

    def _pulling(self, exchange: Exchange, body: bytes) -> bytes:
        """Return a request with another engine from which its own is to pull blocks, or as it came if there is none."""
        booking, roles = exchange.booking, self._fleet.roles(exchange.model)
        assert booking is not None
        tokens_min = self._settings.front_kv_pull_tokens_min
        source = None if roles is None else source_to_pull(booking.answer, roles.block_size, tokens_min)
        asked = None if source is None else pulling_body(body, source)
        if source is None or asked is None:
            return body
        exchange.pulls_from = rank_name(source)
        self.counts.pulls += 1
        return asked

    async def _attempt_with(
        self,
        remote: RemotePrefill | None,
        exchange: Exchange,
        request: ClientRequest,
        body: bytes,
        sent: Mapping[str, str],
        request_id: str,
    ) -> web.StreamResponse | _Refusal:
        """Send the request to the engine that is booked, which gets the KV cache of the prompt from elsewhere."""
        if remote is not None:
            exchange.prefilled_on = remote.worker
            attempt = self._attempt(exchange, request, decode_body(body, remote.more), sent, request_id)
            try:
                return await remote.alongside(attempt, lambda: exchange.answering)
            except PrefillFailed:  # this engine gets the request again, and computes the prompt itself
                assert exchange.booking is not None
                await exchange.booking.prefill_again()
        exchange.prefilled_on = None
        return await self._attempt(exchange, request, body, sent, request_id)

    async def _attempt(
        self, exchange: Exchange, request: ClientRequest, body: bytes, sent: Mapping[str, str], request_id: str
    ) -> web.StreamResponse | _Refusal:
        """Send the request to the engine that is booked. Returns the client's response once the answer has ended.

        Returns a _Refusal, or raises EngineFailed, if another engine may serve the request.
        """
        booking, settings = exchange.booking, self._settings
        assert booking is not None
        if booking.url is None:
            raise EngineFailed(f"worker {booking.worker_id} was removed from the registry", worker_id=booking.worker_id)
        timeout_s = settings.front_silence_timeout_s if request.stream else settings.front_answer_timeout_s
        answer: HttpAnswer | None = None
        try:
            answer = await self._post(exchange, request, body, sent, timeout_s)
            if answer.status == 200 and answer.content_type == "text/event-stream":
                return await self._stream(exchange, answer, request_id)
            return await self._page(exchange, request, answer, request_id)
        except ENGINE_FAILURES as exc:
            reason = str(exc) or ("it was silent for too long" if isinstance(exc, TimeoutError) else type(exc).__name__)
            raise EngineFailed(
                f"the engine of worker {booking.worker_id} failed: {reason}", worker_id=booking.worker_id
            ) from exc
        finally:
            if answer is not None:
                answer.close()  # which cancels the request in the engine, unless it has ended

    async def _post(
        self, exchange: Exchange, request: ClientRequest, body: bytes, sent: Mapping[str, str], timeout_s: float
    ) -> HttpAnswer:
        """Send the request to the engine that is booked.

        A stream is asked for its usage as well, and for token ids if it may migrate.
        """
        booking = exchange.booking
        assert booking is not None and booking.url is not None
        more = usage_fields(usage_options(body)) if request.stream and request.kind in _WITH_OPTIONS else {}
        exchange.hides_usage = bool(more)
        if exchange.migrating is not None:
            more["return_token_ids"] = True

            def asking(asks_for_ids: bool) -> bytes:
                return with_fields(body, more) if asks_for_ids else body

            return await self._migrator.post(booking, request.kind, asking, sent, timeout_s)
        to_engine = {**sent, **booking.rank_headers}
        asked = with_fields(body, more)
        answer = await self._http.request("POST", booking.url, request.kind, to_engine, asked, timeout_s)
        if more and answer.status in UNKNOWN_FIELD:
            refusal = bytes(await _held(answer))
            if USAGE_FIELD in refusal:
                answer.close()
                return await self._http.request("POST", booking.url, request.kind, to_engine, body, timeout_s)
            answer.unread(refusal)  # it is about the client's request
        return answer

    async def _page(
        self, exchange: Exchange, request: ClientRequest, answer: HttpAnswer, request_id: str
    ) -> web.StreamResponse | _Refusal:
        """Pass on an answer that is not a stream: whole, so that until then another engine can replace it."""
        assert exchange.booking is not None
        body = await _held(answer)
        page = _Refusal(answer.status, client_headers(answer.headers), bytes(body), answer.status)
        if may_be_served_elsewhere(answer.status):
            return page
        exchange.booking.prefill_complete()
        if answer.status == 200:
            exchange.booking.served()
        if len(body) <= HELD_BYTES_MAX:
            if answer.status == 200 and CALLS[request.kind].generates:
                exchange.usage = usage_of_page(page.body)
                exchange.n_tokens = usage_tokens(exchange.usage)
            exchange.outcome = metrics.COMPLETED
            return await self._whole(exchange, page, request_id)
        client = ClientStream(exchange, self._response(exchange, answer.status, page.headers, request_id))
        await client.begin(page.body)
        return await self._copy(exchange, answer, client, None)

    async def _stream(self, exchange: Exchange, answer: HttpAnswer, request_id: str) -> web.StreamResponse | _Refusal:
        """Pass on a stream. It begins with the first token, so that until then another engine can replace it."""
        loop, booking, watch = asyncio.get_running_loop(), exchange.booking, StreamWatch()
        assert booking is not None
        usage = None if exchange.migrating is not None else _usage_watch(exchange)
        head = bytearray()
        # What can be made before the first token has no part in the time until it is passed on.
        headers = client_headers(answer.headers)
        client = ClientStream(exchange, self._response(exchange, answer.status, headers, request_id))
        await client.prepare()
        begins_at_once = exchange.migrating is None and client.response.prepared

        def take(received: bytes) -> bool:
            """Hold bytes back until the first token, and send it in the step of the loop in which it arrives."""
            shown = received if usage is None else usage.feed(received)
            head.extend(shown)
            watch.feed(shown)
            if watch.has_token and begins_at_once and not _may_be_replaced(watch):
                client.write(bytes(head))
            return not watch.has_token

        try:
            while not watch.has_token and not answer.at_eof:
                await answer.pump(take)
            if not watch.has_token and usage is not None:
                take(usage.rest())
            if not watch.has_token:
                raise EngineFailed(
                    f"the engine of worker {booking.worker_id} ended its answer before the first token",
                    worker_id=booking.worker_id,
                )
            if _may_be_replaced(watch):
                client.discard()
                return _Refusal(200, headers, bytes(head + await _held(answer)), watch.error_status)
        except BaseException:
            client.discard()
            raise
        booking.prefill_complete()
        if not watch.error_status:
            booking.answered(1)
        self.counts.first_token_seconds.observe(loop.time() - exchange.began_s)
        if exchange.migrating is not None:
            return await self._carry(exchange, exchange.migrating, answer, client, bytes(head))
        if not begins_at_once:
            await client.begin(bytes(head))
        return await self._copy(exchange, answer, client, watch, usage)

    async def _carry(
        self, exchange: Exchange, stream: MigratingStream, answer: HttpAnswer, client: ClientStream, data: bytes
    ) -> web.StreamResponse:
        """Pass on a stream that goes on at another engine if its engine fails. data: its beginning."""
        await client.begin()
        with_figures = DETAILS in exchange.http.headers
        try:
            await self._migrator.carry(exchange, stream, answer, data, client, with_figures=with_figures)
        finally:  # many clients leave at the stream's last mark
            exchange.usage = None if stream.relay is None else stream.relay.usage
        return client.response

    async def _copy(
        self,
        exchange: Exchange,
        answer: HttpAnswer,
        client: ClientStream,
        watch: StreamWatch | None,
        usage: UsageWatch | EventUsageWatch | None = None,
    ) -> web.StreamResponse:
        """Copy the rest of an answer as it comes. The client has its beginning, which `watch` and `usage` have seen."""
        loop, booking = asyncio.get_running_loop(), exchange.booking
        assert booking is not None
        reported_events = 0

        def take(received: bytes) -> bool:
            """Pass bytes on; returns whether the client keeps up."""
            shown = received if usage is None else usage.feed(received)
            keeps_up = not shown or client.write(shown)
            if watch is not None:
                watch.feed(shown)
                note_tokens(watch)
            return keeps_up

        def note_tokens(watch: StreamWatch) -> None:
            nonlocal reported_events
            n_events = watch.n_events
            exchange.n_tokens = max(exchange.n_tokens, n_events)
            booking.answered(n_events)
            if n_events - reported_events >= OUTPUT_REPORT_TOKENS:
                reported_events = n_events
                exchange.n_tokens = exchange.reported_tokens = watch.n_tokens
                exchange.reported_s = loop.time()
                booking.output(exchange.n_tokens)

        if watch is not None:
            note_tokens(watch)
        while not answer.at_eof:
            await client.drained()
            try:
                await answer.pump(take)
            except ENGINE_FAILURES as exc:
                return await self._broken(exchange, client, watch, exc)
        if usage is not None:
            exchange.usage = usage.usage
        await client.end(b"" if usage is None else usage.rest())
        if watch is not None:
            exchange.n_tokens = usage_tokens(exchange.usage) or watch.n_tokens
            error = watch.error_status or watch.last_error()
            if not error:
                booking.served()
            elif may_be_served_elsewhere(error):
                booking.note_failure(Failing.BROKE)
        exchange.outcome = metrics.COMPLETED
        return client.response

    async def _broken(
        self, exchange: Exchange, client: ClientStream, watch: StreamWatch | None, exc: Exception
    ) -> web.StreamResponse:
        """End an answer that its engine broke off: by an error event, or else by breaking the client's connection."""
        assert exchange.booking is not None
        exchange.booking.note_failure(Failing.BROKE)
        exchange.outcome = metrics.BROKEN
        if watch is not None and watch.at_boundary:
            silent = isinstance(exc, TimeoutError)
            message = f"the engine failed after {exchange.n_tokens} tokens: it {'is silent' if silent else 'ended'}"
            kind = kind_of(exchange.http)
            if self._settings.front_migration and not APIS[kind].migrates:
                message += f". Streams of {kind} do not migrate"
            n_events = watch.n_before + watch.n_events
            event = APIS[kind].error_event(EngineFailed.http_status, message, EngineFailed.code, n_events)
            await client.end(event)
        elif exchange.http.transport is not None:
            exchange.http.transport.abort()
        return client.response

    async def _whole(self, exchange: Exchange, page: _Refusal, request_id: str) -> web.StreamResponse:
        """Answer with a whole page."""
        response = self._response(exchange, page.status, page.headers, request_id)
        response.content_length = len(page.body)
        client = ClientStream(exchange, response)
        await client.begin()
        await client.end(page.body)
        return response

    def _response(
        self, exchange: Exchange, status: int, headers: list[tuple[str, str]], request_id: str
    ) -> web.StreamResponse:
        booking = exchange.booking
        assert booking is not None
        response = FrontResponse(status=status)
        for name, value in headers:
            response.headers.add(name, value)
        response.headers.setdefault(REQUEST_ID, request_id)
        response.headers.update(self.cors.headers(exchange.http.headers))
        if DETAILS in exchange.http.headers:
            response.headers["X-Kvstreams-Worker"] = f"{booking.worker_id}/{booking.dp_rank}"
            response.headers["X-Kvstreams-Overlap-Blocks"] = f"{booking.overlap_blocks}/{booking.request_blocks}"
            response.headers["X-Kvstreams-Mode"] = booking.chosen_mode
            if exchange.prefilled_on is not None:
                response.headers["X-Kvstreams-Prefill-Worker"] = exchange.prefilled_on
            if booking.answer.get("kv_sources"):
                response.headers["X-Kvstreams-Kv-Sources"] = sources_header(booking.answer["kv_sources"])
            if exchange.pulls_from is not None:
                response.headers["X-Kvstreams-Pulls-From"] = exchange.pulls_from
        return response


def _usage_watch(exchange: Exchange) -> UsageWatch | EventUsageWatch:
    """Return what reads the usage of a stream, whose events have names in the calls that agents use."""
    if CALLS[kind_of(exchange.http)].becomes_chat:
        return EventUsageWatch()
    return UsageWatch(hides=exchange.hides_usage)


def _may_be_replaced(watch: StreamWatch) -> bool:
    """Whether a stream begins with an error that another engine may not have."""
    return bool(watch.error_status) and may_be_served_elsewhere(watch.error_status)


def _booked(booking: Booking) -> Attributes:
    """Return what a span says of a booking. Attributes are signed, and ids are not."""
    return {
        "kvstreams.request_id": booking.request_id,
        "kvstreams.worker_id": str(booking.worker_id),
        "kvstreams.dp_rank": booking.dp_rank,
    }


async def _held(answer: HttpAnswer) -> bytearray:
    """Read an answer to its end, or until it is longer than HELD_BYTES_MAX."""
    body = bytearray()
    while len(body) <= HELD_BYTES_MAX and (data := await answer.readany()):
        body += data
    return body
