"""The live simulated engine: OpenAI's completions over HTTP, vLLM's KV events over ZMQ, one `EngineModel` behind them.

What lives here: the clock that turns wall time into model time, the HTTP routes, the event publisher and its replay
socket, and the wire forms. What must not: any rule of the engine (model) or of a shared pool (pool), and how a pool is
asked (pool_client); this file decodes, advances, and tells.

One asyncio loop owns everything. The model only goes on inside `SimServer._step`, which runs to its end without
awaiting, so events leave in the order in which they happened. Text is tokenised by bytes: one token for each byte of
its UTF-8, ids 0 to 255; answers are printable ASCII, so an answer's text is its tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import orjson
import xxhash
import zmq
import zmq.asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from streams.core.events import MoeLabels
from streams.core.hashing import pack_tokens
from streams.core.ids import U64_MASK
from streams.errors import InvalidRequest, KvStreamsError, SettingsError, UnknownModel
from streams.sim.clock import STEP_WALL_S, ScaledClock, check_time_scale, run_until_signalled
from streams.sim.model import (
    BYTES_PER_TOKEN,
    EngineConfig,
    EngineModel,
    Finished,
    FirstToken,
    KvCleared,
    KvRemoved,
    KvStored,
    ModelRequest,
    Output,
    PoolAsked,
    Rejected,
    answer_tokens,
)
from streams.sim.pool import CxlChanged
from streams.sim.pool_client import PoolLink

log = logging.getLogger(__name__)

HashDialect = Literal["int", "bytes32"]
EventDialect = Literal["array", "map", "map_batch"]

#: vLLM's `buffer_steps` default.
REPLAY_BUFFER_BATCHES = 10_000
#: vLLM's `hwm` default: beyond it PUB drops for a subscriber that does not read.
PUB_HWM_BATCHES = 100_000
#: The marker that ends a replay: sequence -1.
REPLAY_END = (-1).to_bytes(8, "big", signed=True)
#: vLLM is served from a ROUTER behind a REQ-like client: identity, empty delimiter, sequence.
REPLAY_REQUEST_FRAMES = 3

#: Wall time between two chunks of one stream; tokens that came in between share a chunk.
STREAM_CHUNK_WALL_S = 0.02
#: Requests in the house at once. vLLM queues without end; 1,000s already mean minutes of waiting.
LIVE_REQUESTS_MAX = 4096
#: A prompt of 1,000,000 tokens is some 8 MB of JSON.
BODY_BYTES_MAX = 32 << 20
#: How long open streams may take when the server stops.
SHUTDOWN_S = 1.0
#: Labels of experts travel as 32-bit integers.
LABEL_MAX = (1 << 31) - 1
#: OpenAI's default for completions.
MAX_TOKENS_DEFAULT = 16


@dataclass(frozen=True, slots=True)
class SimServerConfig:
    """One simulated engine process. Ports of 0 are chosen by the system.

    time_scale: model ms that pass in one wall ms. lora_names: adapters served beside `model`, each addressed as a
    model, as in vLLM. hash_dialect: block hashes as u64, or as 32 bytes that end in it, big-endian. event_dialect:
    `array` tags; `map` for events with names; `map_batch` for the batch too, as vLLM's main branch sends it. Ports are
    bound as given: the offset that vLLM adds for `dp_rank` is the caller's. pool: URL of a shared pool (pool_server).
    moe: labels of every block that the engine stores, for which only stores with names have room. Raises SettingsError.
    """

    host: str = "127.0.0.1"
    port: int = 0
    events_port: int = 0
    replay_port: int = 0
    worker: str = "sim-0"
    model: str = "sim-model"
    engine: EngineConfig = field(default_factory=EngineConfig)
    time_scale: float = 1.0
    dp_rank: int = 0
    topic: str = ""
    replay_buffer_batches: int = REPLAY_BUFFER_BATCHES
    hash_dialect: HashDialect = "int"
    event_dialect: EventDialect = "array"
    lora_names: tuple[str, ...] = ()
    pool: str | None = None
    moe: MoeLabels | None = None

    def __post_init__(self) -> None:
        check_time_scale(self.time_scale)
        if self.replay_buffer_batches < 1:
            raise SettingsError(f"replay_buffer_batches is {self.replay_buffer_batches}; it must be at least 1")
        if self.dp_rank < 0:
            raise SettingsError(f"dp_rank is {self.dp_rank}; it must not be negative")
        if self.hash_dialect not in get_args(HashDialect):
            raise SettingsError(f"hash_dialect is {self.hash_dialect!r}, not one of {get_args(HashDialect)}")
        if self.event_dialect not in get_args(EventDialect):
            raise SettingsError(f"event_dialect is {self.event_dialect!r}, not one of {get_args(EventDialect)}")
        if self.moe is not None and self.event_dialect == "array":
            raise SettingsError("events that are arrays have no room for labels", remedy="Set event_dialect to map")
        for name, label in () if self.moe is None else asdict(self.moe).items():
            if label is not None and not 0 <= label <= LABEL_MAX:
                raise SettingsError(f"{name} is {label}; it must be 0 to {LABEL_MAX}")
        if self.pool is not None and not self.pool.startswith("http://"):
            raise SettingsError(f"pool is {self.pool!r}, not http://HOST:PORT")


class OverloadedError(KvStreamsError):
    """More requests are live than the simulated engine keeps."""

    code = "overloaded"
    http_status = 503


class StoppingError(KvStreamsError):
    """The engine ends before the answer did."""

    code = "stopping"
    http_status = 503


class ResetRefusedError(KvStreamsError):
    """Blocks are in use, so the prefix cache stays as it is."""

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
    """Serve until SIGTERM or SIGINT. on_started: called once it listens, for whoever prints its ports."""
    run_until_signalled(lambda: serve(config), on_started)


class _Clock(ScaledClock):
    """Model time, and the anchor of explicit arrivals, which it owns.

    The model's own time starts at 0 and never turns back. Explicit arrivals are of the client's axis, which the first
    of them ties to the model's: that arrival is now. All others, and every time told, are moved by the same amount.
    """

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self._shift_ms: float | None = None  # model time - client's time; None until an explicit arrival

    def arrival_ms(self, explicit_ms: float | None) -> float:
        """Give a request's arrival in model time."""
        if explicit_ms is None:
            return self.now_ms()
        if self._shift_ms is None:
            # A whole number, so that whole arrivals stay whole and their differences exact.
            self._shift_ms = float(math.ceil(self.now_ms() - explicit_ms))
        return explicit_ms + self._shift_ms

    def reported_ms(self, model_ms: float) -> float:
        """Give a model time on the client's axis, to the nanosecond."""
        return round(model_ms - (self._shift_ms or 0.0), 6)


class _Publisher:
    """vLLM's ZmqEventPublisher as seen from outside: PUB, sequence numbers, replay buffer. Owns the ZMQ context."""

    def __init__(self, config: SimServerConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.replay_buffer_batches)
        self.next_sequence = 0
        self._context = zmq.Context()
        # Plain, not asyncio: sending to PUB never blocks, and without an await in between nothing can overtake.
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, PUB_HWM_BATCHES)
        self._replay = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
        # ROUTER drops silently beyond its mark, default 1,000; a replay is the whole buffer and its end.
        self._replay.setsockopt(zmq.SNDHWM, config.replay_buffer_batches + 1)
        try:
            self.events_endpoint = _bind(self._pub, config.host, config.events_port)
            self.replay_endpoint = _bind(self._replay, config.host, config.replay_port)
        except zmq.ZMQError as exc:
            self.close()
            raise SettingsError(f"cannot bind a ZMQ socket on {config.host}: {exc}") from exc

    def publish(self, events: list[Any]) -> None:
        """Send one batch and keep it for replay."""
        batch: Any = [time.time(), events, self._config.dp_rank]
        if self._config.event_dialect == "map_batch":
            batch = {"ts": batch[0], "events": events, "data_parallel_rank": self._config.dp_rank}
        payload = self._encoder.encode(batch)
        sequence = self.next_sequence
        self.next_sequence += 1
        self._buffer.append((sequence, payload))
        self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != REPLAY_REQUEST_FRAMES:
                log.warning("replay request of %d frames ignored; vLLM wants [client, empty, sequence]", len(frames))
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            # A copy: batches published while this one is being sent belong to PUB.
            for sequence, payload in [kept for kept in self._buffer if kept[0] >= first]:
                await self._replay.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", REPLAY_END, b""])

    def close(self) -> None:
        self._pub.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()


class _Call:
    """One HTTP request's wait for the model. Owned by its handler; `_step` sets `first` and `done`."""

    __slots__ = ("done", "first", "request")

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.first = asyncio.Event()  # the first token is there, or there will be none
        self.done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()

    def fail(self, error: KvStreamsError) -> None:
        self.first.set()
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # marks it as seen: a client that hung up leaves nobody to look

    def text(self, start: int, end: int) -> str:
        """Give the answer's tokens start..end as text, which of printable ASCII is one character each."""
        return "".join(map(chr, self.token_ids(start, end)))

    def token_ids(self, start: int, end: int) -> list[int]:
        n_prompt = len(self.request.tokens) // BYTES_PER_TOKEN
        return _unpack(answer_tokens(self.request.output_seed, n_prompt + start, end - start))


class SimServer:
    """A running engine. `start` binds everything; `stop` may be called at any time and closes everything."""

    def __init__(self, config: SimServerConfig) -> None:
        self.config = config
        self.model = EngineModel(config.engine)
        self.http_url = ""
        self.events_endpoint = ""
        self.replay_endpoint = ""
        self._clock = _Clock(config.time_scale)
        self._started_at_s = time.time()
        self._calls: dict[str, _Call] = {}  # by request id; at most LIVE_REQUESTS_MAX
        self._wake = asyncio.Event()
        self._publisher: _Publisher | None = None
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._generated_tokens = 0
        self._n_finished = 0
        self._n_transitions = 0
        self._link: PoolLink | None = None
        self._asking: asyncio.Task[None] | None = None  # prefills are serial: one at most waits for the pool
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Metrics(self))

    async def start(self) -> None:
        """Bind the sockets and begin. Raises SettingsError where a port cannot be had."""
        self._publisher = _Publisher(self.config)
        self.events_endpoint = self._publisher.events_endpoint
        self.replay_endpoint = self._publisher.replay_endpoint
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors_as_openai])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.config.host, self.config.port).start()
        except OSError as exc:
            raise SettingsError(f"cannot listen on {self.config.host}:{self.config.port}: {exc}") from exc
        port = self._runner.addresses[0][1]
        self.http_url = f"http://{self.config.host}:{port}"
        self._tasks = [
            asyncio.create_task(self._run_engine(), name=f"{self.config.worker}-engine"),
            asyncio.create_task(self._publisher.serve_replays(), name=f"{self.config.worker}-replay"),
        ]
        if self.config.pool is not None:
            self._link = PoolLink(self.config.pool, self.config, self._on_pool_change)
            self._tasks.append(asyncio.create_task(self._link.run(), name=f"{self.config.worker}-pool"))
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        log.info("%s: http %s events %s replay %s", self.config.worker, *self.info().values())

    async def stop(self) -> None:
        """Fail what is live, close every socket."""
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

    def routes(self) -> list[web.RouteDef]:
        """Give what is served over HTTP."""
        return [
            web.post("/v1/completions", self._completions),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.get("/sim/cache", self._sim_cache),
            web.get("/sim/info", self._sim_info),
        ]

    def info(self) -> dict[str, str]:
        """Give the three addresses, as `GET /sim/info` does."""
        return {"http": self.http_url, "events": self.events_endpoint, "replay": self.replay_endpoint}

    # -- the engine ----------------------------------------------------------------------------------------------------

    async def _run_engine(self) -> None:
        """Step whenever something is due or a request came, but never more often than STEP_WALL_S."""
        while True:
            self._wake.clear()
            self._step()
            await asyncio.sleep(STEP_WALL_S)
            due_ms = self.model.next_event_ms()
            wait_s = None if due_ms is None else self._clock.wall_s_until(due_ms)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _step(self, *, clear: bool = False) -> bool:
        """Bring the model to now and tell everybody. clear: then reset the cache. Returns False if that was refused."""
        now_ms = self._clock.now_ms()
        outputs = self.model.advance(now_ms)
        cleared = self.model.clear(now_ms) if clear else []
        self._publish(self._with_offloads([*outputs, *cleared]))
        for output in outputs:
            self._deliver(output)
        return not clear or bool(cleared)

    def _with_offloads(self, outputs: Sequence[Output]) -> Iterator[Output | CxlChanged]:
        """Begin to offload what was stored, and say so right behind the store: later its name may be gone."""
        for output in outputs:
            yield output
            changed = self._link.stored(output) if self._link is not None and isinstance(output, KvStored) else None
            if changed is not None:
                yield changed

    def _publish(self, outputs: Iterable[Output | CxlChanged]) -> None:
        """Send what is the wire's business as one batch."""
        events: list[Any] = []
        for output in outputs:
            self._n_transitions += isinstance(output, CxlChanged)
            events += _wire_events([output], self.config, self._n_transitions)
        if events and self._publisher is not None:
            self._publisher.publish(events)

    def _on_pool_change(self, changed: CxlChanged | None, attached: bool) -> None:
        """The pool was found, or is gone, or told what became of blocks."""
        self.model.use_pool(attached)
        if changed is not None:
            self._publish([changed])

    async def _ask_pool(self, link: PoolLink, asked: PoolAsked) -> None:
        """Answer the request that waits for the pool; with nothing where there is no pool any more."""
        n_blocks, wait_ms = await link.load(asked.keys)
        self.model.pool_answered(asked.request_id, n_blocks, wait_ms)
        self._wake.set()

    def _deliver(self, output: Output) -> None:
        """Hand a request's output to the handler that waits for it."""
        if isinstance(output, PoolAsked):
            assert self._link is not None  # else nobody asks
            self._asking = asyncio.create_task(self._ask_pool(self._link, output), name=f"{self.config.worker}-load")
            self._asking.add_done_callback(self._load_ended)
        elif isinstance(output, FirstToken):
            if output.request_id in self._calls:
                self._calls[output.request_id].first.set()
        elif isinstance(output, Finished):
            self._generated_tokens += output.n_output_tokens
            self._n_finished += 1
            call = self._calls.pop(output.request_id, None)
            if call is not None and not call.done.done():
                call.done.set_result(output)
        elif isinstance(output, Rejected):
            call = self._calls.pop(output.request_id, None)
            if call is not None:
                call.fail(InvalidRequest(output.reason))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a fault: say so, and let nobody wait for it."""
        if task.cancelled():
            return
        log.error("%s: task %s ended", self.config.worker, task.get_name(), exc_info=task.exception())
        for call in self._calls.values():
            call.fail(StoppingError("the engine failed"))

    def _load_ended(self, task: asyncio.Task[None]) -> None:
        """A load ends; where it failed, so did the engine: its request would hold the GPU for ever."""
        if not task.cancelled() and task.exception() is not None:
            self._task_ended(task)

    def _submit(self, body: dict[str, Any]) -> _Call:
        """Check a completion request and queue it. Raises InvalidRequest, UnknownModel, OverloadedError."""
        if len(self._calls) >= LIVE_REQUESTS_MAX:
            raise OverloadedError(f"{len(self._calls)} requests are live, the most there may be")
        model = body.get("model", self.config.model)
        if model != self.config.model and model not in self.config.lora_names:
            raise UnknownModel(f"The model `{model}` does not exist.")
        tokens = _prompt_tokens(body.get("prompt"))
        n_output = _whole(body, "max_tokens", MAX_TOKENS_DEFAULT, least=1)
        n_prompt = len(tokens) // BYTES_PER_TOKEN
        limit = self.config.engine.n_tokens_max
        if n_prompt + n_output > limit:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens. However, you requested {n_prompt + n_output} "
                f"tokens ({n_prompt} in the prompt, {n_output} in the completion)."
            )
        for name, only in (("n", 1), ("echo", False)):
            if body.get(name, only) not in (only, None):
                raise InvalidRequest(f"the simulated engine knows {name} = {only} only")
        # Like greedy decoding: equal prompts get equal answers. A client that gives a seed keeps one answer going when
        # it resumes on another engine with what it has so far (see answer_tokens).
        seed = _whole(body, "seed", None, least=None)
        output_seed = xxhash.xxh3_64_intdigest(tokens) if seed is None else seed & U64_MASK
        arrival = body.get("kvstreams_arrival_ms")
        if arrival is not None and (
            isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < float("inf")
        ):
            raise InvalidRequest(f"kvstreams_arrival_ms is {arrival!r}, not model milliseconds")
        lora_name = None if model == self.config.model else str(model)
        request = ModelRequest(f"cmpl-{uuid.uuid4().hex}", tokens, n_output, output_seed, lora_name)
        call = _Call(request)
        self.model.submit(self._clock.arrival_ms(arrival), request)
        self._calls[request.request_id] = call
        self._wake.set()
        return call

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        try:
            body = orjson.loads(await http.read())
        except orjson.JSONDecodeError as exc:
            raise InvalidRequest(f"the body is no JSON: {exc}") from exc
        if not isinstance(body, dict):
            raise InvalidRequest("the body is no JSON object")
        call = self._submit(body)
        frame = {
            "id": call.request.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": call.request.lora_name or self.config.model,
        }
        with_ids = bool(body.get("return_token_ids"))
        if body.get("stream"):
            options = body.get("stream_options") or {}
            with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
            return await self._stream(http, call, frame, with_ids=with_ids, with_usage=with_usage)
        finished = await call.done
        choice = _choice(call, 0, finished.n_output_tokens, "length", with_ids=with_ids)
        if with_ids:
            choice["prompt_token_ids"] = _unpack(call.request.tokens)
        return _json({**frame, "choices": [choice], "usage": _usage(finished), "kvstreams": self._figures(finished)})

    async def _stream(
        self, http: web.Request, call: _Call, frame: dict[str, Any], *, with_ids: bool, with_usage: bool
    ) -> web.StreamResponse:
        """Send chunks as tokens come, those of STREAM_CHUNK_WALL_S together; the last carries the figures."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        request = call.request
        n_sent = 0
        try:
            await call.first.wait()
            while not call.done.done():
                # The last token is kept for the chunk that says why it is the last.
                n_out = min(self.model.n_decoded(request.request_id, self._clock.now_ms()), request.n_output_tokens - 1)
                if n_out > n_sent:
                    choice = _choice(call, n_sent, n_out, None, with_ids=with_ids)
                    await response.write(_sse({**frame, "choices": [choice]}))
                    n_sent = n_out
                await asyncio.wait([call.done], timeout=STREAM_CHUNK_WALL_S)
            finished = call.done.result()
        except KvStreamsError as exc:
            # The status is out already, so the fault is an event of its own, as vLLM sends it.
            await response.write(_sse(_openai_error(exc.http_status, str(exc))))
        else:
            choice = _choice(call, n_sent, finished.n_output_tokens, "length", with_ids=with_ids)
            figures = {"kvstreams": self._figures(finished)}
            await response.write(_sse({**frame, "choices": [choice], **figures}))
            if with_usage:
                await response.write(_sse({**frame, "choices": [], "usage": _usage(finished), **figures}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _figures(self, finished: Finished) -> dict[str, float]:
        """Give what happened in model time, which no machine's scheduler has a part in."""
        return {
            "model_ttft_ms": round(finished.ttft_ms, 6),
            "model_latency_ms": round(finished.latency_ms, 6),
            "model_finish_ms": self._clock.reported_ms(finished.at_ms),
            "cached_tokens": finished.cached_tokens,
            "pooled_tokens": finished.pooled_tokens,
            "prompt_tokens": finished.prompt_tokens,
        }

    async def _models(self, _http: web.Request) -> web.Response:
        names = (self.config.model, *self.config.lora_names)
        rows = [
            {
                "id": name,
                "object": "model",
                "created": int(self._started_at_s),
                "owned_by": "vllm",
                "root": name,
                "parent": None if name == self.config.model else self.config.model,
                "max_model_len": self.config.engine.n_tokens_max,
            }
            for name in names
        ]
        return _json({"object": "list", "data": rows})

    async def _health(self, _http: web.Request) -> web.Response:
        alive = bool(self._tasks) and not any(task.done() for task in self._tasks)
        return web.Response(status=200 if alive else 503)

    async def _metrics(self, _http: web.Request) -> web.Response:
        self._step()
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _reset_prefix_cache(self, _http: web.Request) -> web.Response:
        if not self._step(clear=True):
            raise ResetRefusedError(f"{self.model.stats().n_blocks_used} blocks are in use")
        return web.Response(status=200)

    async def _sim_cache(self, _http: web.Request) -> web.Response:
        """Ground truth, for checks: each distinct findable block, and the first sequence number it does not include."""
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

    async def _sim_info(self, _http: web.Request) -> web.Response:
        config = self.config
        page: dict[str, Any] = {
            **self.info(),
            "worker": config.worker,
            "model": config.model,
            "dp_rank": config.dp_rank,
            "block_size": config.engine.block_size,
            "n_blocks": config.engine.n_blocks,
            "time_scale": config.time_scale,
            "model_ms": self._clock.reported_ms(self._clock.now_ms()),
            "computed_tokens": self.model.stats().computed_tokens,
            "loaded_tokens": self.model.stats().loaded_tokens,
            "pool": None if self._link is None else self._link.info(),
        }
        return _json(page)


class _Metrics(Collector):
    """vLLM's names over the model's own counts, read when scraped. What vLLM renamed is told under both names."""

    def __init__(self, server: SimServer) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        config, stats = self._server.config, self._server.model.stats()
        usage = stats.n_blocks_used / stats.n_blocks_total
        labels = {"model_name": config.model, "engine": str(config.dp_rank)}
        for name, text, value in (
            ("vllm:num_requests_running", "Requests prefilling or decoding.", stats.n_running),
            ("vllm:num_requests_waiting", "Requests waiting to be processed.", stats.n_waiting),
            ("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage),
            ("vllm:gpu_cache_usage_perc", "KV-cache usage, its name before vLLM 0.11.", usage),
        ):
            yield _one(GaugeMetricFamily(name, text, labels=list(labels)), labels, value)
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prefix cache queries, in tokens.", stats.queried_tokens),
            ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", stats.hit_tokens),
            ("vllm:external_prefix_cache_queries", "Shared pool queries, in tokens.", stats.pool_queried_tokens),
            ("vllm:external_prefix_cache_hits", "Shared pool hits, in tokens.", stats.loaded_tokens),
            ("vllm:prompt_tokens", "Prefill tokens processed.", stats.queried_tokens),
            ("vllm:generation_tokens", "Generation tokens processed.", self._server._generated_tokens),
            ("vllm:request_success", "Successfully processed requests.", self._server._n_finished),
        ):
            yield _one(CounterMetricFamily(name, text, labels=list(labels)), labels, value)
        cache = {**labels, "block_size": str(config.engine.block_size), "num_gpu_blocks": str(config.engine.n_blocks)}
        cache["enable_prefix_caching"] = "True"
        info = GaugeMetricFamily("vllm:cache_config_info", "LLMEngine's CacheConfig.", labels=list(cache))
        yield _one(info, cache, 1)
        # Gauges carry no labels here: the client's own process collector writes this name the same way.
        start = GaugeMetricFamily("process_start_time_seconds", "Start time of the process since unix epoch.")
        yield _one(start, {}, self._server._started_at_s)


@web.middleware
async def _errors_as_openai(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Tell every fault in OpenAI's shape."""
    try:
        return await handler(request)
    except KvStreamsError as exc:
        return _json(_openai_error(exc.http_status, str(exc)), status=exc.http_status)
    except web.HTTPException as exc:
        return _json(_openai_error(exc.status, exc.reason), status=exc.status)


#: vLLM's names for what went wrong, by status.
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError", 503: "ServiceUnavailableError"}


def _openai_error(status: int, message: str) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _wire_events(outputs: Sequence[Output | CxlChanged], config: SimServerConfig, event_id: int = 0) -> Iterator[Any]:
    """Put cache events into vLLM's form, in order; other outputs are none of the wire's business.

    event_id: of a transition among them.
    """
    as_map = config.event_dialect != "array"
    medium = "GPU"
    for output in outputs:
        if isinstance(output, KvStored):
            hashes = _wire_hashes(output.engine.tolist(), config)
            parent = None if output.parent is None else _wire_hashes([output.parent], config)[0]
            name = output.lora_name
            stored: dict[str, Any] = {
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": _unpack(output.tokens),
                "block_size": config.engine.block_size,
                "lora_id": None if name is None else config.lora_names.index(name) + 1,
                "medium": medium,
                "lora_name": name,
            }
            if config.moe is not None:
                stored["moe"] = asdict(config.moe)
            yield {"type": "BlockStored", **stored} if as_map else ["BlockStored", *stored.values()]
        elif isinstance(output, KvRemoved):
            # One event a block, as vLLM's pool emits them.
            for value in _wire_hashes(output.engine.tolist(), config):
                removed = {"block_hashes": [value], "medium": medium}
                yield {"type": "BlockRemoved", **removed} if as_map else ["BlockRemoved", *removed.values()]
        elif isinstance(output, CxlChanged):
            moved = {
                "event_id": event_id,
                "block_hashes": _wire_hashes(output.engine.tolist(), config),
                "new_state": output.state.value,
                "pool_id": output.pool_id,
            }
            yield {"type": "CxlStateTransition", **moved} if as_map else ["CxlStateTransition", *moved.values()]
        elif isinstance(output, KvCleared):
            yield {"type": "AllBlocksCleared"} if as_map else ["AllBlocksCleared"]


def _wire_hashes(hashes: list[int], config: SimServerConfig) -> list[int] | list[bytes]:
    """Engine hashes in the dialect; of the 32 bytes the last 8, big-endian, are the u64 (docs/architecture.md)."""
    if config.hash_dialect == "int":
        return hashes
    raw = [value.to_bytes(8, "big") for value in hashes]
    return [xxhash.xxh3_128_digest(tail) + xxhash.xxh3_64_digest(tail) + tail for tail in raw]


def _prompt_tokens(prompt: object) -> bytes:
    """Take a prompt as u32 LE tokens: a list of ids, or text by its bytes. Raises InvalidRequest."""
    if isinstance(prompt, str) and prompt:
        return np.frombuffer(prompt.encode(), dtype=np.uint8).astype("<u4").tobytes()
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], list | str):
        return pack_tokens(prompt)
    raise InvalidRequest("prompt must be a text or a list of token ids, and not empty; several prompts are not served")


def _whole(body: dict[str, Any], name: str, default: int | None, least: int | None) -> Any:
    """Read an optional whole number. Raises InvalidRequest."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        raise InvalidRequest(f"{name} is {value!r}, not a whole number" + (f" from {least} up" if least else ""))
    return value


def _choice(call: _Call, start: int, end: int, reason: str | None, *, with_ids: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "text": call.text(start, end),
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": None,
    }
    if with_ids:
        choice["token_ids"] = call.token_ids(start, end)
    return choice


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "total_tokens": finished.prompt_tokens + finished.n_output_tokens,
        "completion_tokens": finished.n_output_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def _one(family: Any, labels: dict[str, str], value: float) -> Metric:
    """Give a family with its one sample."""
    family.add_metric(list(labels.values()), value)
    assert isinstance(family, Metric)
    return family


def _unpack(tokens: bytes) -> list[int]:
    values: list[int] = np.frombuffer(tokens, dtype="<u4").tolist()
    return values


def _json(page: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(page), status=status, content_type="application/json")


def _sse(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> str:
    socket.bind(f"tcp://{host}:{port or '*'}")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")
