"""The live simulated engine: OpenAI's completions over HTTP, vLLM's KV events over ZMQ, one `EngineModel` inside.

What lives here: the process. It turns wall time into model time, routes HTTP calls, hands the model's outputs to
waiting requests, the event publisher and the shared pool, and performs the failures that it is asked for. What must
not: the rules of the engine (model) or of a pool (pool), the shapes of requests and answers (openai), the form of
events (event_publisher), calls to a pool (pool_client), and which stream meets a failure (faults).

One asyncio loop owns everything. The model advances only inside `SimServer._advance`, and events are sent in the order
in which they happened.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, assert_never

import numpy as np
import orjson
from aiohttp import web

from streams.core.events import MoeLabels
from streams.errors import InvalidRequest, KvStreamsError, SettingsError
from streams.lab.engines import kv_transfer, openai
from streams.lab.engines import prometheus_page as metrics
from streams.lab.engines.clock import STEP_WALL_S, ScaledClock, check_time_scale, run_until_signalled
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import (
    Finished,
    FirstToken,
    KvCleared,
    KvRemoved,
    KvReused,
    KvStored,
    ModelRequest,
    Output,
    PoolAsked,
    Rejected,
)
from streams.lab.engines.event_publisher import (
    BlockEvent,
    EventDialect,
    EventPublisher,
    HashDialect,
    KvCacheReportMode,
    PublisherConfig,
    WireForm,
)
from streams.lab.engines.faults import Fault, FaultKind, Faults, parse_fault
from streams.lab.engines.journal import Journal
from streams.lab.engines.model import EngineModel
from streams.lab.engines.pool import CxlChanged
from streams.lab.engines.pool_client import PoolLink

log = logging.getLogger(__name__)

#: Wall time between two chunks of one stream. Tokens that are due in between share a chunk.
STREAM_CHUNK_WALL_S = 0.02
#: Requests that wait or run at once. vLLM has no such limit, but thousands of requests already take minutes.
LIVE_REQUESTS_MAX = 4096
#: A prompt of 1,000,000 tokens is about 8 MB of JSON.
BODY_BYTES_MAX = 32 << 20
#: How long a start waits for the pool. Without one, the engine serves requests and attaches when the pool comes.
ATTACH_WAIT_S = 1.0
#: How long open streams may take to end when the server stops.
SHUTDOWN_S = 1.0

PoolWrites = Literal["all", "prompt", "none"]
PoolReads = Literal["load", "in-place"]

_Parse = Callable[[dict[str, Any], openai.ServedModels], openai.CompletionCall]


@dataclass(frozen=True, slots=True)
class SimServerConfig(PublisherConfig):
    """One simulated engine process. Ports of 0 are chosen by the system.

    time_scale: model ms per wall ms. lora_names: adapters served in addition to `model`, each addressed as a model, as
    in vLLM. hash_dialect, event_dialect, page_size, moe, accessible_workers: see WireForm. Ports are bound as given:
    vLLM adds an offset for `dp_rank`, which is left to the caller. pool: URL of a shared pool (pool_server).
    pool_writes: which full blocks are written to it: those of prompts and answers, of prompts alone, or none.
    pool_reads: whether a request loads the pooled blocks of its prompt, or reads them in place while it runs. fault:
    armed from the start (faults). kv_cache_report_mode: for requests that do not set it; `full` also reports the cached
    blocks that a request reuses, in the form of a store, as in vLLM. journal: file that every change of the cache is
    appended to (journal). chat_style: default argument of the chat template. Raises SettingsError.
    """

    host: str = "127.0.0.1"
    port: int = 0
    worker: str = "sim-0"
    model: str = "sim-model"
    engine: EngineConfig = field(default_factory=EngineConfig)
    time_scale: float = 1.0
    dp_rank: int = 0
    hash_dialect: HashDialect = "int"
    event_dialect: EventDialect = "array"
    page_size: int = 0
    lora_names: tuple[str, ...] = ()
    pool: str | None = None
    moe: MoeLabels | None = None
    kv_cache_report_mode: KvCacheReportMode = "incremental"
    journal: Path | None = None
    accessible_workers: tuple[int, ...] = ()
    pool_writes: PoolWrites = "all"
    pool_reads: PoolReads = "load"
    fault: Fault | None = None
    chat_style: str = ""

    def __post_init__(self) -> None:
        check_time_scale(self.time_scale)
        if self.replay_buffer_batches < 1:
            raise SettingsError(f"replay_buffer_batches is {self.replay_buffer_batches}; it must be at least 1")
        if self.dp_rank < 0:
            raise SettingsError(f"dp_rank is {self.dp_rank}; it must not be negative")
        if self.pool is not None and not self.pool.startswith("http://"):
            raise SettingsError(f"pool is {self.pool!r}, not http://HOST:PORT")
        if self.wire_form().is_paged and self.pool_reads == "in-place":
            raise SettingsError("events of this dialect cannot carry blocks that are read in place")

    def wire_form(self) -> WireForm:
        """Return the form of the events. Raises SettingsError."""
        return WireForm(
            block_size=self.engine.block_size,
            dp_rank=self.dp_rank,
            hash_dialect=self.hash_dialect,
            event_dialect=self.event_dialect,
            page_size=self.page_size,
            lora_names=self.lora_names,
            moe=self.moe,
            accessible_workers=self.accessible_workers,
        )


class OverloadedError(KvStreamsError):
    """The simulated engine has as many active requests as it accepts."""

    code = "overloaded"
    http_status = 503


class StoppingError(KvStreamsError):
    """The engine stopped before the answer was complete."""

    code = "stopping"
    http_status = 503


class RefusedError(KvStreamsError):
    """The stream met a fault that ends it."""

    code = "refused"
    http_status = 500


class ResetRefusedError(KvStreamsError):
    """The prefix cache was not reset, because blocks are in use."""

    code = "blocks_in_use"
    http_status = 409


async def serve(config: SimServerConfig) -> SimServer:
    """Start one engine on the running loop; it listens when this returns. Stop it with `await server.stop()`."""
    server = SimServer(config)
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server


def run(config: SimServerConfig, on_started: Callable[[SimServer], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. on_started: called once the engine listens, for example to print its ports."""
    run_until_signalled(lambda: serve(config), on_started)


class _Clock(ScaledClock):
    """Model time, and the client's time axis for explicit arrivals.

    Model time starts at 0 and never goes back. Explicit arrivals are on a time axis of the client. The first one ties
    this axis to model time: its arrival is now. All later arrivals, and all reported times, are shifted by the same
    amount.
    """

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self._shift_ms: float | None = None  # model time - client's time; None until an explicit arrival

    def arrival_ms(self, explicit_ms: float | None) -> float:
        """Return a request's arrival in model time."""
        if explicit_ms is None:
            return self.now_ms()
        if self._shift_ms is None:
            # Rounded to a whole number, so that whole arrivals stay whole and their differences stay exact.
            self._shift_ms = float(math.ceil(self.now_ms() - explicit_ms))
        return explicit_ms + self._shift_ms

    def reported_ms(self, model_ms: float) -> float:
        """Return a model time on the client's axis, to the nanosecond."""
        return round(model_ms - (self._shift_ms or 0.0), 6)


class _Call:
    """One HTTP request that waits for the model. Owned by its handler; the server sets the rest.

    client_id: the id that the client gave the request, for the journal.
    """

    __slots__ = ("client_id", "done", "first", "prefilled", "request")

    def __init__(self, request: ModelRequest, client_id: str | None) -> None:
        self.request = request
        self.client_id = client_id
        self.prefilled: FirstToken | None = None  # set before `first`, if there is a token
        self.first = asyncio.Event()  # the first token is out, or there will be none
        self.done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()

    def fail(self, error: KvStreamsError) -> None:
        """End the request with an error, unless it has ended already."""
        self.first.set()
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # marks it as retrieved: if the client hung up, no handler awaits it


class SimServer:
    """A running engine. `start` binds everything; `stop` may be called at any time and closes everything."""

    def __init__(self, config: SimServerConfig) -> None:
        self.config = config
        self.model = EngineModel(config.engine)
        self.http_url = ""
        self._endpoints = ("", "")  # of events and replays
        self._served = openai.ServedModels(
            config.model, config.lora_names, config.engine.n_tokens_max, config.chat_style
        )
        self._clock = _Clock(config.time_scale)
        self._started_at_s = time.time()
        self._calls: dict[str, _Call] = {}  # by request id; at most LIVE_REQUESTS_MAX
        self._wake = asyncio.Event()
        self._unpublished: list[Output] = []  # handed out, and empty again within the same turn of the loop or the next
        self._publisher: EventPublisher | None = None
        self._journal = None if config.journal is None else Journal(config.journal)
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._link: PoolLink | None = None
        self._asking: asyncio.Task[None] | None = None  # prefills are serial, so at most one waits for the pool
        self._faults = Faults(config.fault)
        self._unstalled = asyncio.Event()
        self._unstalled.set()
        self.die: Callable[[], None] = _die_as_by_sigkill  # tests that run the server in their process replace it
        self._metrics = metrics.SimulatedMetrics(
            config.engine, config.model, config.dp_rank, self._started_at_s, self.model.stats
        )

    @property
    def events_endpoint(self) -> str:
        """Address of the events; empty before `start`."""
        return self._endpoints[0]

    @property
    def replay_endpoint(self) -> str:
        """Address of the replay socket; empty before `start`."""
        return self._endpoints[1]

    async def start(self) -> None:
        """Bind the sockets and begin to serve. Raises SettingsError if a port is not available."""
        config = self.config
        self._publisher = EventPublisher(config.wire_form(), config.host, config)
        self._endpoints = (self._publisher.events_endpoint, self._publisher.replay_endpoint)
        if config.pool is not None:
            # Before it listens: a request that comes at once uses the pool.
            self._link = PoolLink(config.pool, config, self._on_pool_change)
            self._tasks.append(asyncio.create_task(self._link.run(), name=f"{config.worker}-pool"))
            await self._link.wait_attached(ATTACH_WAIT_S)
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors_as_openai])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.host, config.port).start()
        except OSError as exc:
            raise SettingsError(f"cannot listen on {config.host}:{config.port}: {exc}") from exc
        self.http_url = f"http://{config.host}:{self._runner.addresses[0][1]}"
        self._tasks += [
            asyncio.create_task(self._run_engine(), name=f"{config.worker}-engine"),
            asyncio.create_task(self._publisher.serve_replays(), name=f"{config.worker}-replay"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        log.info("%s: http %s events %s replay %s", config.worker, *self.info().values())

    async def stop(self) -> None:
        """Fail all active requests and close every socket."""
        for call in self._calls.values():
            call.fail(StoppingError("the engine is stopping"))
        self._calls.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        tasks = self._tasks if self._asking is None else [*self._tasks, self._asking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks, self._asking = [], None
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes."""
        return [
            web.post("/v1/completions", self._serve_completion),
            web.post("/v1/chat/completions", self._serve_chat),
            web.post("/tokenize", self._serve_tokenize),
            web.get("/v1/models", self._serve_models),
            web.get("/health", self._serve_health),
            web.get("/metrics", self._serve_metrics),
            web.post("/reset_prefix_cache", self._serve_reset),
            web.get("/sim/cache", self._serve_cache),
            web.get("/sim/info", self._serve_info),
            web.post("/sim/fault", self._serve_fault),
        ]

    def info(self) -> dict[str, str]:
        """Return the three addresses, as `GET /sim/info` does."""
        return {"http": self.http_url, "events": self.events_endpoint, "replay": self.replay_endpoint}

    # -- the engine ----------------------------------------------------------------------------------------------------

    async def _run_engine(self) -> None:
        """Step whenever something is due or a request came, but never more often than every STEP_WALL_S."""
        while True:
            self._wake.clear()
            self._advance()
            # Waiting handlers send their tokens before the events of a long prompt are encoded, which takes
            # milliseconds. In vLLM, a thread does that.
            await asyncio.sleep(0)
            self._publish_outputs()
            await asyncio.sleep(STEP_WALL_S)
            due_ms = self.model.next_event_ms()
            wait_s = None if due_ms is None else self._clock.wall_s_until(due_ms)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _step(self, *, clear: bool = False) -> bool:
        """Advance the model to now, hand out its outputs, and publish their events.

        clear: then reset the cache. Returns False if the reset was refused.
        """
        now_ms = self._advance()
        cleared = self.model.clear(now_ms) if clear else []
        self._hand_out(cleared)
        self._publish_outputs()
        return not clear or bool(cleared)

    def _advance(self) -> float:
        """Advance the model to now, and hand out its outputs, whose events are still to be published. Returns now."""
        now_ms = self._clock.now_ms()
        self._hand_out(self.model.advance(now_ms))
        return now_ms

    def _hand_out(self, outputs: Sequence[Output]) -> None:
        """Note outputs in the journal, and hand them to those who wait for them."""
        self._unpublished += outputs
        for output in outputs:
            if self._journal is not None:
                self._journal.note([output])
            self._deliver(output)

    def _publish_outputs(self) -> None:
        """Publish the events of all outputs so far, in the order in which they happened."""
        outputs, self._unpublished = self._unpublished, []
        self._publish(list(self._block_events(outputs)))

    def _block_events(self, outputs: Sequence[Output]) -> Iterator[BlockEvent]:
        """Yield the events of the outputs, in order, and begin to offload stored blocks.

        A transition to `in_transit` directly follows its store, because the GPU may evict the block, and with it the
        block's engine hash, at any later time.
        """
        for output in outputs:
            if not isinstance(output, KvStored | KvReused | KvRemoved | KvCleared):
                continue
            yield output
            if self._link is not None and isinstance(output, KvStored) and self._writes_to_pool(output):
                changed = self._link.stored(output)
                if changed is not None:
                    yield changed

    def _writes_to_pool(self, stored: KvStored) -> bool:
        writes = self.config.pool_writes
        return stored.medium == "GPU" and (writes == "all" or (writes == "prompt" and not stored.generated))

    def _publish(self, events: Sequence[BlockEvent]) -> None:
        if self._publisher is not None:
            self._publisher.publish(events)

    def _on_pool_change(self, changed: CxlChanged | None, attached: bool) -> None:
        """Publish what became of pooled blocks. attached: whether requests may ask the pool from now on."""
        self.model.use_pool(attached, self.config.pool_reads == "in-place")
        if changed is not None:
            self._publish_outputs()
            self._publish([changed])

    async def _ask_pool(self, link: PoolLink, asked: PoolAsked) -> None:
        """Answer the request that waits for the pool; without a session, the answer is that it has no blocks."""
        n_blocks, wait_ms = await link.load(asked.keys, in_place=self.config.pool_reads == "in-place")
        self.model.pool_answered(asked.request_id, n_blocks, wait_ms)
        self._wake.set()

    def _deliver(self, output: Output) -> None:
        """Hand a request's output to the handler that waits for it."""
        match output:
            case PoolAsked():
                assert self._link is not None  # the model asks only where a pool is in use
                self._asking = asyncio.create_task(
                    self._ask_pool(self._link, output), name=f"{self.config.worker}-load"
                )
                self._asking.add_done_callback(self._load_ended)
            case FirstToken():
                call = self._calls.get(output.request_id)
                if call is not None:
                    call.prefilled = output
                    call.first.set()
                    if self._journal is not None:
                        self._journal.note_prefill(call.client_id, output)
            case Finished():
                call = self._calls.pop(output.request_id, None)
                if call is not None and not call.done.done():
                    call.done.set_result(output)
            case Rejected():
                call = self._calls.pop(output.request_id, None)
                if call is not None:
                    call.fail(InvalidRequest(output.reason))
            case KvStored() | KvReused() | KvRemoved() | KvCleared():
                pass  # published as events
            case _:
                assert_never(output)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Log a task that ended by itself, which is a fault, and fail all requests that wait."""
        if task.cancelled():
            return
        log.error("%s: task %s ended", self.config.worker, task.get_name(), exc_info=task.exception())
        for call in self._calls.values():
            call.fail(StoppingError("the engine failed"))

    def _load_ended(self, task: asyncio.Task[None]) -> None:
        """Treat a failed load as a failed engine, because its request would hold the GPU forever."""
        if not task.cancelled() and task.exception() is not None:
            self._task_ended(task)

    def _submit(self, asked: openai.CompletionCall, client_id: str | None) -> _Call:
        """Queue a checked completion request."""
        request = ModelRequest(
            f"{asked.id_prefix}{uuid.uuid4().hex}",
            asked.tokens,
            asked.n_output_tokens,
            asked.output_seed,
            asked.lora_name,
            reports_reuse=(asked.report_mode or self.config.kv_cache_report_mode) == "full",
            answer=asked.answer,
            n_transferred_blocks=asked.transfer.n_blocks,
        )
        call = _Call(request, client_id)
        self.model.submit(self._clock.arrival_ms(asked.arrival_ms), request)
        self._calls[request.request_id] = call
        self._wake.set()
        return call

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _serve_completion(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, openai.parse_completion)

    async def _serve_chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, openai.parse_chat)

    async def _answer(self, http: web.Request, parse: _Parse) -> web.StreamResponse:
        body = openai.parse_body(await http.read())
        if len(self._calls) >= LIVE_REQUESTS_MAX:
            raise OverloadedError(f"{len(self._calls)} requests are active, which is the limit")
        asked = parse(body, self._served)
        call = self._submit(asked, http.headers.get("X-Request-Id"))
        try:
            frame = openai.frame(call.request, asked, asked.lora_name or self.config.model, int(time.time()))
            if asked.stream:
                return await self._stream(http, call, frame, asked)
            finished = await call.done
            await self._unstalled.wait()
        finally:
            self._cancel(call)
        usage = openai.usage(finished, finished.n_output_tokens, self._link is not None)
        figures = {"usage": usage, "kvstreams": self._figures(finished)}
        if asked.transfer.is_read_later:
            n_blocks = finished.prompt_tokens // self.config.engine.block_size
            figures[kv_transfer.FIELD] = kv_transfer.answered_transfer(self.config.worker, self.http_url, n_blocks)
        return _json({**frame, **openai.whole_answer(call.request, asked), **figures})

    def _cancel(self, call: _Call) -> None:
        """End the request of a client that hung up. A request that has ended is not changed."""
        if self._calls.pop(call.request.request_id, None) is not None:
            self._step()  # the tokens that are out by now are in the cache
            self.model.cancel(self._clock.now_ms(), call.request.request_id)
            self._wake.set()

    async def _stream(
        self, http: web.Request, call: _Call, frame: dict[str, Any], asked: openai.CompletionCall
    ) -> web.StreamResponse:
        """Send chunks as tokens come, at most one per STREAM_CHUNK_WALL_S. The last chunk carries the figures."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        request = call.request
        n_sent = 0
        is_noted = self._journal is None

        async def send(n_out: int, more: Mapping[str, Any] | None = None) -> None:
            """Send the tokens up to n_out, unless the stream meets a fault before or after them."""
            nonlocal n_sent, is_noted
            await self._unstalled.wait()
            fault_at = None if more else self._faults.tokens_before(n_sent, n_out)
            end = n_out if fault_at is None else fault_at
            if end > n_sent and not is_noted and self._journal is not None:
                self._journal.note_sent(call.client_id)
                is_noted = True
            if end > n_sent:
                page = openai.chunk(request, asked, n_sent, end)
                if asked.with_continuous_usage and call.prefilled is not None:
                    page["usage"] = openai.usage(call.prefilled, end, self._link is not None)
                await response.write(openai.stream_event({**frame, **page, **(more or {})}))
                n_sent = end
            if fault_at is not None:
                await self._fail(http)

        try:
            await call.first.wait()
            await self._unstalled.wait()
            for page in openai.first_chunks(request, asked):
                await response.write(openai.stream_event({**frame, **page}))
            while not call.done.done():
                # The last token is kept for the chunk that carries the finish reason.
                await send(
                    min(self.model.n_decoded(request.request_id, self._clock.now_ms()), request.n_output_tokens - 1)
                )
                await asyncio.wait([call.done], timeout=STREAM_CHUNK_WALL_S)
            finished = call.done.result()
            figures = {"kvstreams": self._figures(finished)}
            if self._faults.armed is not None:
                await send(finished.n_output_tokens - 1)
            await send(finished.n_output_tokens, figures)
        except KvStreamsError as exc:
            # The HTTP status has been sent, so the error is an event of its own, as in vLLM.
            await response.write(openai.stream_event(openai.error(exc.http_status, str(exc))))
        else:
            if asked.with_usage:
                counts = openai.usage(finished, finished.n_output_tokens, self._link is not None)
                await response.write(openai.stream_event({**frame, "choices": [], "usage": counts, **figures}))
        await response.write(openai.STREAM_END)
        await response.write_eof()
        return response

    async def _fail(self, http: web.Request) -> None:
        """Begin the fault that a stream has met, and return if that stream may go on. Raises RefusedError."""
        match self._faults.begin():
            case FaultKind.DIE:
                # What was written to the stream reaches its client, as it would if the engine died a moment later.
                while http.transport is not None and http.transport.get_write_buffer_size():
                    await asyncio.sleep(0)
                self._publish_outputs()
                self.die()
            case FaultKind.STALL:
                self._unstalled.clear()
                await self._unstalled.wait()
            case FaultKind.REFUSE:
                raise RefusedError("the engine refuses to go on")

    async def _serve_fault(self, http: web.Request) -> web.Response:
        """Arm a fault, begin one, or end it."""
        fault = parse_fault(openai.parse_body(await http.read()))
        begun = self._faults.arm(fault)
        self._unstalled.set()
        if begun is FaultKind.STALL:
            self._faults.begin()
            self._unstalled.clear()
        elif begun is FaultKind.DIE:
            self.die()
        return _json({"armed": self._faults.armed is not None, "stalled": self._faults.stalled})

    async def _serve_tokenize(self, http: web.Request) -> web.Response:
        return _json(openai.tokenize(openai.parse_body(await http.read()), self._served))

    def _figures(self, finished: Finished) -> dict[str, float]:
        """Return the figures of a request in model time, which does not depend on the speed of this machine."""
        return {
            "model_ttft_ms": round(finished.ttft_ms, 6),
            "model_latency_ms": round(finished.latency_ms, 6),
            "model_finish_ms": self._clock.reported_ms(finished.at_ms),
            "cached_tokens": finished.cached_tokens,
            "pooled_tokens": finished.pooled_tokens,
            "prompt_tokens": finished.prompt_tokens,
        }

    async def _serve_models(self, _http: web.Request) -> web.Response:
        return _json(openai.model_list(self._served, int(self._started_at_s)))

    async def _serve_health(self, _http: web.Request) -> web.Response:
        healthy = bool(self._tasks) and not any(task.done() for task in self._tasks)
        return web.Response(status=200 if healthy else 503)

    async def _serve_metrics(self, _http: web.Request) -> web.Response:
        self._step()
        return web.Response(body=self._metrics.page(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _serve_reset(self, _http: web.Request) -> web.Response:
        if not self._step(clear=True):
            raise ResetRefusedError(f"{self.model.stats().n_blocks_used} blocks are in use")
        return web.Response(status=200)

    async def _serve_cache(self, _http: web.Request) -> web.Response:
        """Return the true content of the cache, for checks.

        Each distinct block appears once. `next_sequence` is the first sequence number that this page does not include.
        """
        self._step()
        blocks = self.model.cached_blocks()
        _, first = np.unique(blocks.sequence, return_index=True)
        page = {
            "tier": "device",
            "block_size": self.config.engine.block_size,
            "sequence_hashes": [str(value) for value in blocks.sequence[first].tolist()],
            "engine_hashes": [str(value) for value in blocks.engine[first].tolist()],
            "positions": blocks.position[first].tolist(),
            "n_copies": len(blocks.sequence),
            "next_sequence": 0 if self._publisher is None else self._publisher.next_sequence,
        }
        return _json(page)

    async def _serve_info(self, _http: web.Request) -> web.Response:
        config, stats = self.config, self.model.stats()
        page: dict[str, Any] = {
            **self.info(),
            "worker": config.worker,
            "model": config.model,
            "dp_rank": config.dp_rank,
            "block_size": config.engine.block_size,
            "n_blocks": config.engine.n_blocks,
            "time_scale": config.time_scale,
            "model_ms": self._clock.reported_ms(self._clock.now_ms()),
            "computed_tokens": stats.computed_tokens,
            "loaded_tokens": stats.loaded_tokens,
            "in_place_tokens": stats.in_place_tokens,
            "fault": {"armed": self._faults.armed is not None, "stalled": self._faults.stalled},
            "n_blocks_used": stats.n_blocks_used,
            "n_blocks_used_max": stats.n_blocks_used_max,
            "pool": None if self._link is None else self._link.info(),
        }
        return _json(page)


def _die_as_by_sigkill() -> None:
    """End this process at once, without a farewell to anyone."""
    os.kill(os.getpid(), signal.SIGKILL)


@web.middleware
async def _errors_as_openai(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error in OpenAI's shape."""
    try:
        return await handler(request)
    except KvStreamsError as exc:
        return _json(openai.error(exc.http_status, str(exc)), status=exc.http_status)
    except web.HTTPException as exc:
        return _json(openai.error(exc.status, exc.reason), status=exc.status)


def _json(page: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(page), status=status, content_type="application/json")
