"""Sending the requests of a comparison to a live fleet, and measuring them.

What lives here: arrivals, one request from its route to its end, and what is noted of it. What must not: which mode
routes it (plan), and figures (estimates).

Times are those of the client: from the call of the router, which includes waiting in its queue, to the first token of
the engine.

State: the measurements of one comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
import orjson

from streams.client.booking import Booking
from streams.client.engine import RANK_HEADER, EngineOptions, EventSplitter
from streams.client.http import KvRouterClient
from streams.client.payloads import unpack_tokens
from streams.errors import EngineFailed, KvStreamsError, SettingsError
from streams.lab.compare.estimates import ComparedRequest
from streams.lab.compare.plan import Plan, Turn
from streams.lab.compare.variants import Variant
from streams.lab.trace import TraceRequest, tokens_for

#: Requests at the same time. If more arrive, the fleet does not keep up, and requests wait in this process.
IN_FLIGHT_MAX = 2048

#: After so many failures without a success in between, the fleet is not in a state in which modes can be compared.
FAILURES_MAX = 20

#: How often the length of an answer is reported to the router, in tokens, as the client does.
_OUTPUT_REPORT_TOKENS = 64

#: Ids of a trace are below this; a multiple of it makes the prompts of each run different from those of others.
_IDS_PER_RUN = 1 << 40
RUNS_MAX = 1 << 14


@dataclass(frozen=True, slots=True)
class TrafficConfig:
    """Where requests go, and how they come.

    urls: of routers. model: None for the only one. concurrency: requests at the same time, each followed by the next
    one; 0: at the times of the trace, divided by speedup. vocabulary: prompts have tokens below this. run: prompts of
    runs with different numbers share nothing. token: for the routers, with the rights route and read. engine_key: that
    engines require.
    """

    urls: Sequence[str]
    model: str | None = None
    concurrency: int = 0
    speedup: float = 1.0
    vocabulary: int = 32_000
    run: int = 0
    token: str | None = None
    engine_key: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.concurrency <= IN_FLIGHT_MAX:
            raise SettingsError(f"--concurrency is {self.concurrency}; it must be 0 to {IN_FLIGHT_MAX}")
        if not self.speedup > 0.0:
            raise SettingsError(f"--speedup is {self.speedup}; it must be above 0")
        if self.vocabulary < 2:
            raise SettingsError(f"--vocabulary is {self.vocabulary}; it must be at least 2")


@dataclass(slots=True)
class Measured:
    """What a run has measured so far. failures: by mode and message. washout: answers in wash-outs, by mode.

    n_unreported: answers without cached tokens.
    n_held_back: requests that waited in this process, because too many were in flight. in_flight_max: the most at the
    same time.
    """

    samples: list[ComparedRequest] = field(default_factory=list)  # at most the plan's requests
    n_ended: int = 0
    failures: Counter[tuple[int, str]] = field(default_factory=Counter)
    washout: Counter[int] = field(default_factory=Counter)
    n_unreported: int = 0
    n_held_back: int = 0
    in_flight_max: int = 0
    worker_ids: Sequence[int] = ()


async def run(
    requests: Sequence[TraceRequest],
    variants: Sequence[Variant],
    plan: Plan,
    config: TrafficConfig,
    measured: Measured,
    progress: Callable[[], None],
) -> None:
    """Send the requests of the plan and note what happens in `measured`, which is valid at any time.

    progress: called after each request. Raises KvStreamsError if the fleet cannot be reached or only fails.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def client_of(urls: Sequence[str]) -> KvRouterClient:
            return await stack.enter_async_context(KvRouterClient(list(urls), token=config.token))

        common = await client_of(config.urls)
        clients = [common if variant.url is None else await client_of([variant.url]) for variant in variants]
        workers = await common.workers()
        model = config.model or _only_model(workers)
        measured.worker_ids = [worker["worker_id"] for worker in workers if worker["model"] == model]
        if not measured.worker_ids:
            raise SettingsError(f"the fleet has no worker of model {model}", remedy="Name another one with --model")
        headers = {} if config.engine_key is None else {"Authorization": f"Bearer {config.engine_key}"}
        engines = await stack.enter_async_context(EngineOptions(headers).session())
        await _Run(requests, variants, plan, config, measured, progress, clients, model, engines).run()


def _only_model(workers: Sequence[Mapping[str, Any]]) -> str:
    models = sorted({worker["model"] for worker in workers})
    if len(models) != 1:
        raise SettingsError(
            f"the fleet serves {len(models)} models: {', '.join(models) or 'no worker is registered'}",
            remedy="Name one with --model",
        )
    return str(models[0])


class _Run:
    def __init__(
        self,
        requests: Sequence[TraceRequest],
        variants: Sequence[Variant],
        plan: Plan,
        config: TrafficConfig,
        measured: Measured,
        progress: Callable[[], None],
        clients: Sequence[KvRouterClient],
        model: str,
        engines: aiohttp.ClientSession,
    ) -> None:
        self._requests, self._variants, self._plan = requests, variants, plan
        self._config, self._measured, self._progress = config, measured, progress
        self._clients, self._model, self._engines = clients, model, engines
        self._name = uuid.uuid4().hex[:8]
        self._in_flight = 0
        self._failed_in_a_row = 0

    async def run(self) -> None:
        try:
            if self._config.concurrency:
                numbers = iter(range(self._plan.n_requests))
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._config.concurrency):
                        group.create_task(self._one_after_the_other(numbers))
            else:
                await self._by_time()
        except ExceptionGroup as group_of:
            raise group_of.exceptions[0] from group_of

    async def _one_after_the_other(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._send(number)

    async def _by_time(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        first_ms = self._requests[0].timestamp_ms
        room = asyncio.Semaphore(IN_FLIGHT_MAX)

        async def one(number: int) -> None:
            try:
                await self._send(number)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for number in range(self._plan.n_requests):
                at_s = (self._requests[number].timestamp_ms - first_ms) / 1000.0 / self._config.speedup
                await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
                if room.locked():
                    self._measured.n_held_back += 1
                await room.acquire()
                group.create_task(one(number))

    async def _send(self, number: int) -> None:
        """Send one request, and note how it ended."""
        turn, measured = self._plan.turn(number), self._measured
        self._in_flight += 1
        measured.in_flight_max = max(measured.in_flight_max, self._in_flight)
        try:
            sample = await self._measure(number, turn)
        except (KvStreamsError, aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as exc:
            message = str(exc) or type(exc).__name__
            measured.failures[turn.variant, message[:200]] += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= FAILURES_MAX:
                raise EngineFailed(
                    f"{FAILURES_MAX} requests failed one after the other; the last one because of: {message}",
                    remedy="Let `kvstreams doctor` examine the fleet",
                ) from exc
        else:
            self._failed_in_a_row = 0
            if turn.counts:
                measured.samples.append(sample)
            else:
                measured.washout[turn.variant] += 1
        finally:
            self._in_flight -= 1
            measured.n_ended += 1
            self._progress()

    async def _measure(self, number: int, turn: Turn) -> ComparedRequest:
        request, variant = self._requests[number], self._variants[turn.variant]
        packed = self._tokens(request)
        n_output = max(1, request.output_length)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        booking = await self._clients[turn.variant].book(
            unpack_tokens(packed),
            variant.override,
            request_id=f"compare-{self._name}-{number}",
            model=self._model,
            expected_output_tokens=n_output,
            **variant.options,
        )
        async with booking:
            answer = await self._complete(booking, packed, n_output)
        cached = answer.cached_tokens
        if cached is None:  # the router's index is what is left to go by
            self._measured.n_unreported += 1
            cached = booking.overlap_blocks * request.input_length // max(1, booking.request_blocks)
        return ComparedRequest(
            turn.round,
            turn.variant,
            booking.worker_id,
            (answer.first_s - began_s) * 1000.0,
            request.input_length,
            min(cached, request.input_length),
            n_output,
        )

    async def _complete(self, booking: Booking, packed: bytes, n_output: int) -> _Answer:
        """Stream a completion of the chosen engine, and report it to the router as a client does."""
        if booking.url is None:
            raise EngineFailed(f"worker {booking.worker_id} was removed", worker_id=booking.worker_id)
        body = {
            "model": self._model,
            "prompt": unpack_tokens(packed),
            "max_tokens": n_output,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json", RANK_HEADER: str(booking.dp_rank)}
        url = f"{booking.url.rstrip('/')}/v1/completions"
        loop, splitter, answer, n_chunks = asyncio.get_running_loop(), EventSplitter(), _Answer(), 0
        async with self._engines.post(url, data=orjson.dumps(body), headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise EngineFailed(f"{url} answered {response.status}: {text}", worker_id=booking.worker_id)
            async for received in response.content.iter_any():
                for event in splitter.feed(received):
                    if event == b"[DONE]":
                        continue
                    page = orjson.loads(event)
                    if page["choices"]:
                        if not n_chunks:
                            answer.first_s = loop.time()
                            booking.prefill_complete()
                        n_chunks += 1
                        if not n_chunks % _OUTPUT_REPORT_TOKENS:
                            booking.output(n_chunks)
                    details = (page.get("usage") or {}).get("prompt_tokens_details") or {}
                    answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
        if not n_chunks:
            raise EngineFailed(f"{url} ended its answer early", worker_id=booking.worker_id)
        return answer

    def _tokens(self, request: TraceRequest) -> bytes:
        ids = tuple(hash_id % _IDS_PER_RUN + self._config.run * _IDS_PER_RUN for hash_id in request.hash_ids)
        tokens = np.frombuffer(tokens_for(replace(request, hash_ids=ids)), dtype="<u4")
        return (tokens % np.uint32(self._config.vocabulary)).astype("<u4").tobytes()


@dataclass(slots=True)
class _Answer:
    """first_s: when its first token arrived. cached_tokens: of the prompt; None if the engine does not report them."""

    first_s: float = 0.0
    cached_tokens: int | None = None
