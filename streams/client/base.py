"""The interface of both forms of the client, and what they share.

What lives here: the methods that users call, under the names that users of NVIDIA Dynamo know, retries of refused
requests, and the session with engines. What must not: how a router is reached (http, push).
"""

from __future__ import annotations

import asyncio
import random
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, Unpack

import aiohttp

from streams.client.booking import Booking, key_of
from streams.client.engine import EngineOptions
from streams.client.failed_engines import FailedEngines
from streams.client.generation import Generation
from streams.client.matches import OverlapScores, overlap_scores
from streams.client.payloads import (
    RequestOptions,
    RouteOptions,
    completion_fields,
    given,
    pack_tokens,
    unpack_tokens,
    with_prompt,
)
from streams.client.reports import BookingKey, OutstandingReport, Reports
from streams.errors import AllWorkersBusy, InvalidRequest, KvStreamsError, NoEligibleWorker, RouterUnavailable

#: How long a refused call is repeated before its error is raised.
RETRY_TIMEOUT_S = 10.0

#: How long a report on a booking is repeated. It may be late: it is monotone, and nobody waits for it.
REPORT_TIMEOUT_S = 60.0

#: How long booking a running request again may take. The request waits for it.
REBOOK_TIMEOUT_S = 1.0

#: How long closing a client waits for its last reports.
CLOSE_TIMEOUT_S = 5.0

#: Bounds of the pause between two rounds of calls. It is what the router's Retry-After says, within these bounds, and
#: up to half of it longer, so that clients that were refused together do not return together.
RETRY_PAUSE_S_MIN = 0.05
RETRY_PAUSE_S_MAX = 5.0

#: Characters of a request id; the limit of routers.
REQUEST_ID_CHARS_MAX = 512

#: Bookings whose router is remembered, so that it gets their reports first. A booking beyond it can report to any.
ROUTERS_REMEMBERED_MAX = 65_536

#: The calls that take a route request.
Call = Literal["/route", "/loads/potential", "/matches"]


class CallRefused(Exception):
    """A call that may succeed later. error: what to raise if it does not."""

    def __init__(self, error: KvStreamsError, retry_after_s: float) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


class Attempt:
    """What a caller must know about its calls of one request.

    router: the router that answered, if there are several. may_be_booked: a call was sent and not answered.
    """

    __slots__ = ("may_be_booked", "router")

    def __init__(self) -> None:
        self.router: int | None = None
        self.may_be_booked = False


class _Target(NamedTuple):
    """The client that makes a call, and what it adds to the overrides and to the fields of the request."""

    client: KvRouter
    override: dict[str, Any]
    fields: dict[str, Any]


class Requests(ABC):
    """What takes requests: a client, or a client in one mode. A mode's own worker and override are used in any case."""

    @abstractmethod
    def _target(self) -> _Target: ...

    async def generate(
        self,
        token_ids: Sequence[int],
        model: str | None = None,
        stop_conditions: Mapping[str, Any] | None = None,
        sampling_options: Mapping[str, Any] | None = None,
        router_config_override: Mapping[str, Any] | None = None,
        worker_id: int | None = None,
        *,
        request_id: str | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Route a prompt, send it to the chosen engine, and return an async iterator of dicts with `token_ids`.

        stop_conditions, sampling_options: as in payloads.STOP_CONDITIONS and SAMPLING_OPTIONS. router_config_override,
        options: fields of the route request (docs/http.md). worker_id: use this worker. request_id: repeating the id of
        a live booking gets the same worker. extra_args: further fields of the completion.

        Prefill-complete, the number of tokens and the end are reported to the router in the background, also if the
        caller is cancelled. If the engine fails, the request or the rest of its answer goes to another one. Raises
        InvalidRequest and the other errors of routing, EngineFailed, EngineRefused.
        """
        client, override, fields = self._target()
        packed = pack_tokens(token_ids)
        lora_name = options.get("lora_name")
        completion = completion_fields(lora_name or model, stop_conditions, sampling_options, extra_args)
        body = with_prompt(completion, unpack_tokens(packed))
        expected = (stop_conditions or {}).get("max_tokens")
        if expected is not None:
            options.setdefault("expected_output_tokens", expected)
        booking = await client._book(
            packed,
            given({**options, "model": model, "worker_id": worker_id, **fields}),
            {**(router_config_override or {}), **override},
            request_id,
        )
        generation = Generation(booking, client._engine_session(), client._engine_options, body, completion, packed)
        client._live.add(generation)
        await generation.open()
        return generation

    async def book(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        worker_id: int | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RouteOptions],
    ) -> Booking:
        """Choose a rank and book it, for a caller that talks to the engine itself.

        Use the booking with `async with`, and call its `prefill_complete` at the first token.
        """
        client, override, fields = self._target()
        return await client._book(
            pack_tokens(token_ids),
            given({**options, "worker_id": worker_id, **fields}),
            {**(router_config_override or {}), **override},
            request_id,
        )

    async def best_worker_id(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        **options: Unpack[RouteOptions],
    ) -> tuple[int, int]:
        """Return (worker_id, overlap_blocks) of the best rank, without booking it."""
        client, override, fields = self._target()
        override = {**(router_config_override or {}), **override}
        worker_id, _, overlap_blocks = await client.best_worker(token_ids, override, **fields, **options)
        return worker_id, overlap_blocks


class KvRouter(Requests):
    """Routes requests and generates, through routers elsewhere (KvRouterClient) or in this process (KvPushRouter).

    Use it with `async with`, on one event loop. Methods raise the errors of streams.errors that docs/client.md lists.
    Every routing method also accepts the fields of RouteOptions, such as `model` and `excluded_worker_ids`.
    """

    def __init__(
        self,
        engine: EngineOptions | None = None,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        no_worker_timeout_s: float | None = None,
    ) -> None:
        """retry_timeout_s: how long a refused call is repeated before its error is raised; 0 for never.

        no_worker_timeout_s: the same for a call that no worker may serve at the moment; None for retry_timeout_s.
        """
        self._no_worker_timeout_s = retry_timeout_s if no_worker_timeout_s is None else no_worker_timeout_s
        self._engine_options = engine or EngineOptions()
        self._retry_timeout_s = retry_timeout_s
        self._engines: aiohttp.ClientSession | None = None
        self._reports = Reports(self._send_report)
        #: Engines that failed requests of this client.
        self.failed_engines = FailedEngines(self)
        self._routed_by: dict[BookingKey, int] = {}  # the router of each live booking, if there are several
        self._live = weakref.WeakSet[Booking | Generation]()

    def _target(self) -> _Target:
        return _Target(self, {}, {})

    # -- what each form provides ---------------------------------------------------------------------------------------

    @abstractmethod
    async def _call(self, call: Call, fields: dict[str, Any], packed: bytes, attempt: Attempt) -> dict[str, Any]:
        """Make one call, at each router once if there are several.

        Raises Refused if it may succeed later, and any other KvStreamsError if it will not.
        """

    @abstractmethod
    async def avoid(self, worker_id: int) -> bool:
        """Let all routers avoid a worker for a short time (router_avoid_s), because its engine has failed a request.

        Returns whether they do: at most a third of a model's ranks, or one worker, is avoided at a time. Raises
        UnknownId, and the errors of routers that are away.
        """

    @abstractmethod
    async def _send_report(self, key: BookingKey, report: OutstandingReport) -> None:
        """Send one report, repeating it for REPORT_TIMEOUT_S; raises KvStreamsError."""

    # -- the client ----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Open what the client needs. `async with` calls it."""
        if self._engines is None:
            self._engines = self._engine_options.session()
        return self

    async def close(self) -> None:
        """End what is still running, send the last reports for at most CLOSE_TIMEOUT_S, and close all connections."""
        for unfinished in list(self._live):
            unfinished.close()
        await self.failed_engines.close()
        await self._reports.close(CLOSE_TIMEOUT_S)
        if self._engines is not None:
            await self._engines.close()
            self._engines = None

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def reports_lost(self) -> int:
        """Reports that no router accepted in time. Their bookings end by their TTL."""
        return self._reports.lost

    # -- modes ---------------------------------------------------------------------------------------------------------

    def random(self) -> OneMode:
        """Choose any worker: `await client.random().generate(token_ids=...)`."""
        return OneMode(self, {"router_mode": "random"})

    def round_robin(self) -> OneMode:
        """Choose workers by turns: `await client.round_robin().generate(token_ids=...)`."""
        return OneMode(self, {"router_mode": "round-robin"})

    def direct(self, worker_id: int) -> OneMode:
        """Use this worker, and the least loaded of its ranks: `await client.direct(7).generate(token_ids=...)`."""
        return OneMode(self, {"router_mode": "direct"}, worker_id)

    # -- routing -------------------------------------------------------------------------------------------------------

    async def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        worker_id: int | None = None,
        **options: Unpack[RouteOptions],
    ) -> tuple[int, int, int]:
        """Return (worker_id, dp_rank, overlap_blocks) of the best rank.

        With a request_id the rank is booked, and the caller calls `mark_prefill_complete` and `free` with that id.
        """
        fields = given({**options, "worker_id": worker_id})
        packed = pack_tokens(token_ids)
        if request_id is None:
            answer = await self._ask("/route", packed, {**fields, "update_states": False}, router_config_override)
        else:
            answer, _ = await self._route(packed, fields, router_config_override, request_id)
        return answer["worker_id"], answer["dp_rank"], answer["overlap_blocks"]

    async def get_potential_loads(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        **options: Unpack[RouteOptions],
    ) -> list[dict[str, Any]]:
        """Return the load that each eligible rank would have with this request, without booking it.

        Each dict has `worker_id`, `dp_rank`, `potential_prefill_tokens` and `potential_decode_blocks`.
        """
        packed = pack_tokens(token_ids)
        answer = await self._ask("/loads/potential", packed, given(options), router_config_override)
        loads: list[dict[str, Any]] = answer["loads"]
        return loads

    async def find_matches_for_request(
        self,
        token_ids: Sequence[int],
        moe_query: Mapping[str, Any] | None = None,
        **options: Unpack[RouteOptions],
    ) -> OverlapScores:
        """Return how many blocks of this prompt each worker and rank has. moe_query: whose labels are counted."""
        override = None if moe_query is None else {"moe_query": moe_query}
        return overlap_scores(await self._ask("/matches", pack_tokens(token_ids), given(options), override))

    def mark_prefill_complete(self, request_id: str, phase: str | None = None) -> None:
        """Report that the prompt of a booked request is computed, in the background. phase: as in `free`."""
        _check_id(request_id)
        self.report(BookingKey(request_id, phase), OutstandingReport(prefill_complete=True))

    def free(self, request_id: str, phase: str | None = None) -> None:
        """Report that a booked request has ended, in the background.

        phase: `prefill` or `decode` for one of its two bookings; None for all that it has.
        """
        _check_id(request_id)
        self.report(BookingKey(request_id, phase), OutstandingReport(free=True))

    # -- bookings ------------------------------------------------------------------------------------------------------

    async def book_packed(
        self,
        packed: bytes,
        router_config_override: Mapping[str, Any] | None = None,
        **options: Unpack[RouteOptions],
    ) -> Booking:
        """Do what `book` does, without copies of a long prompt. packed: its tokens as u32 little-endian."""
        return await self._book(packed, given(options), router_config_override, None)

    def report(self, key: BookingKey, report: OutstandingReport) -> None:
        """Report in the background. Bookings call it."""
        report.router = self._routed_by.pop(key, None) if report.free else self._routed_by.get(key)
        self._reports.add(key, report)

    async def rebook(self, request: dict[str, Any]) -> dict[str, Any]:
        """Free a booking, and book its request again at the same router, which knows of both at once.

        Raises KvStreamsError, also if that takes longer than REBOOK_TIMEOUT_S.
        """
        key = key_of(request)
        router = self._routed_by.pop(key, None)
        await self._reports.settle(key)
        try:
            async with asyncio.timeout(REBOOK_TIMEOUT_S):
                await self._send_report(key, OutstandingReport(router, free=True))
                return await self.reroute(request, router)
        except TimeoutError as exc:
            raise RouterUnavailable(f"no router booked the request again within {REBOOK_TIMEOUT_S:g} s") from exc

    async def reroute(self, request: dict[str, Any], router: int | None = None) -> dict[str, Any]:
        """Route a booked request again, once. Bookings call it after their engine has failed.

        router: the first one to ask; None for any.
        """
        packed = request["packed"]
        fields = {name: value for name, value in request.items() if name != "packed"}
        # A report on the first engine must not arrive after the booking was reassigned to the second one.
        key = key_of(fields)
        await self._reports.settle(key)
        attempt = Attempt()
        attempt.router = router
        try:
            answer = await self._call("/route", fields, packed, attempt)
        except CallRefused as exc:
            raise exc.error from exc
        self._note_router(key, attempt.router)
        return answer

    async def _book(
        self,
        packed: bytes,
        fields: dict[str, Any],
        router_config_override: Mapping[str, Any] | None,
        request_id: str | None,
    ) -> Booking:
        answer, request = await self._route(packed, fields, router_config_override, request_id)
        booking = Booking(self, {**request, "packed": packed}, answer)
        self._live.add(booking)
        return booking

    async def _route(
        self,
        packed: bytes,
        fields: dict[str, Any],
        router_config_override: Mapping[str, Any] | None,
        request_id: str | None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Choose and book; return the answer and the request as it was sent."""
        is_own = request_id is None
        if request_id is None:
            # The client chooses the id, so that a call whose answer was lost can be repeated without booking twice.
            request_id = uuid.uuid4().hex
        else:
            _check_id(request_id)
        request = _with_override({**fields, "request_id": request_id}, router_config_override)
        key = key_of(request)
        await self._reports.settle(key)  # the end of an earlier request of this id must not end this one
        attempt = Attempt()
        try:
            answer = await self._retrying("/route", request, packed, attempt, renews_id=is_own)
        except BaseException:
            if attempt.may_be_booked:
                self.report(key_of(request), OutstandingReport(free=True))
            raise
        self._note_router(key_of(request), attempt.router)
        return answer, request

    def _note_router(self, key: BookingKey, router: int | None) -> None:
        if router is None:
            return
        if len(self._routed_by) >= ROUTERS_REMEMBERED_MAX:
            del self._routed_by[next(iter(self._routed_by))]
        self._routed_by[key] = router

    async def _ask(
        self,
        call: Call,
        packed: bytes,
        fields: dict[str, Any],
        router_config_override: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        return await self._retrying(call, _with_override(fields, router_config_override), packed, Attempt())

    async def _retrying(
        self, call: Call, request: dict[str, Any], packed: bytes, attempt: Attempt, *, renews_id: bool = False
    ) -> dict[str, Any]:
        """Make a call until it is not refused, for at most retry_timeout_s.

        renews_id: repeat a refused request under another id, which replaces that of `request`. A router takes a DELETE
        that comes before the repetition for one of the refused request; if the call is cancelled, it may.
        """
        self._engine_session()  # the client must be open
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            try:
                return await self._call(call, request, packed, attempt)
            except CallRefused as exc:
                pause_s = min(max(exc.retry_after_s, RETRY_PAUSE_S_MIN), RETRY_PAUSE_S_MAX)
                pause_s *= 1.0 + random.random() / 2.0
                may_serve_later = isinstance(exc.error, NoEligibleWorker) and not isinstance(exc.error, AllWorkersBusy)
                timeout_s = self._no_worker_timeout_s if may_serve_later else self._retry_timeout_s
                if loop.time() + pause_s > began_s + timeout_s:
                    raise exc.error from exc
            await asyncio.sleep(pause_s)
            if renews_id and not attempt.may_be_booked:
                request["request_id"] = uuid.uuid4().hex

    def _engine_session(self) -> aiohttp.ClientSession:
        if self._engines is None:
            raise RouterUnavailable("the client is not open", remedy="Use `async with`, or call start() first")
        return self._engines


class OneMode(Requests):
    """A client in one router mode, whatever the mode of the routers is. `worker_id`: the worker of mode direct."""

    def __init__(self, client: KvRouter, override: dict[str, Any], worker_id: int | None = None) -> None:
        self._client = client
        self._override = override
        self._fields: dict[str, Any] = {} if worker_id is None else {"worker_id": worker_id}

    def _target(self) -> _Target:
        return _Target(self._client, self._override, self._fields)


def _check_id(request_id: str) -> None:
    if not 0 < len(request_id) <= REQUEST_ID_CHARS_MAX:
        raise InvalidRequest(f"a request id has 1 to {REQUEST_ID_CHARS_MAX} characters")


def _with_override(fields: dict[str, Any], override: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**fields, "router_config_override": dict(override)} if override else fields
