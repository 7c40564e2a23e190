"""Driving a trace through the live system over HTTP, as clients would.

What lives here: one client per request, which asks the router, sends the prompt to the chosen engine, and reports the
first token and the end to the router. What must not: starting processes (stack) and evaluating the result (figures).

Requests arrive at the times of the trace, `speedup` model seconds per second. Each request carries its arrival in model
time, and engines answer in model time, so that no figure depends on how this machine schedules processes.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import orjson

from streams.client.plain_http import PlainHttp
from streams.errors import KvStreamsError
from streams.lab.simulation.results import RequestOutcome
from streams.lab.simulation.trace_runs import LiveTimes
from streams.lab.stack import bearer
from streams.lab.trace import TraceRequest, tokens_for

#: Concurrent requests. If a trace needs more, its requests arrive faster than any fleet on one machine can serve them.
IN_FLIGHT_MAX = 512

#: How long a server may send nothing, how long a connection may take, and for how long an unused one is kept.
_SILENCE_S, _CONNECT_TIMEOUT_S, _KEEPALIVE_S = 600.0, 30.0, 30.0


@dataclass(frozen=True, slots=True)
class LiveOutcome:
    """The result of one request.

    outcome: as from the laboratory. times: of its decision and of the client's reports. route_ms: wall time of
    POST /route.
    """

    outcome: RequestOutcome
    times: LiveTimes
    mode: str
    overlap_blocks: int
    request_blocks: int
    route_ms: float


class ModelClock:
    """The model clock of the demo, shared by every trace that it drives. It starts at 0 and never goes back."""

    def __init__(self, speedup: float) -> None:
        self.speedup = speedup
        self._started = time.monotonic()

    def now_ms(self) -> float:
        """The current model time."""
        return (time.monotonic() - self._started) * 1000.0 * self.speedup

    async def sleep_until(self, at_ms: float) -> None:
        """Wait until a model time."""
        await asyncio.sleep(max(0.0, (at_ms - self.now_ms()) / 1000.0 / self.speedup))


async def drive(
    requests: Sequence[TraceRequest],
    router_url: str,
    engines: Mapping[int, str],
    clock: ModelClock,
    name: str,
    progress: Callable[[], None],
    token: str | None = None,
) -> list[LiveOutcome]:
    """Send every request at its time; returns outcomes in the order of the trace. Raises KvStreamsError if one fails.

    engines: worker id to URL. name: prefix of the request ids, which must differ between calls. progress: called after
    each request. token: of the router's API.
    """
    begin_ms = clock.now_ms() + 100.0 * clock.speedup  # a tenth of a second for the first connections
    room = asyncio.Semaphore(IN_FLIGHT_MAX)
    with closing(PlainHttp(keepalive_s=_KEEPALIVE_S, connect_timeout_s=_CONNECT_TIMEOUT_S)) as http:
        client = _Client(http, router_url, engines, bearer(token), lambda: clock.now_ms() - begin_ms)

        async def one(number: int, request: TraceRequest) -> LiveOutcome:
            tokens = tokens_for(request)
            arrival_ms = begin_ms + request.timestamp_ms
            await clock.sleep_until(arrival_ms)
            async with room:
                outcome = await client.run(number, f"{name}-{number}", request, tokens, arrival_ms)
            progress()
            return outcome

        tasks: list[asyncio.Task[LiveOutcome]] = []
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                # Tokens are generated shortly before they are sent: 2,000 prompts at once would take 100 MB.
                await clock.sleep_until(begin_ms + request.timestamp_ms - 500.0 * clock.speedup)
                tasks.append(group.create_task(one(number, request)))
        return [task.result() for task in tasks]


class _Client:
    def __init__(
        self,
        http: PlainHttp,
        router_url: str,
        engines: Mapping[int, str],
        authorization: Mapping[str, str],
        now_ms: Callable[[], float],
    ) -> None:
        """authorization: a header for the router. Engines do not get it. now_ms: model time since the trace began."""
        self._http = http
        self._authorization = authorization
        self._router = router_url
        self._engines = engines
        self._now_ms = now_ms

    async def run(
        self, number: int, request_id: str, request: TraceRequest, tokens: bytes, arrival_ms: float
    ) -> LiveOutcome:
        """Run one request, from its route to its end."""
        started = time.perf_counter()
        choice = await self._route(request_id, tokens)
        route_ms = (time.perf_counter() - started) * 1000.0
        decided_ms = self._now_ms()
        found = ""
        try:
            figures, first_reported_ms = await self._complete(
                request_id, choice["worker_id"], number, request, tokens, arrival_ms
            )
            found = f"?prompt_tokens={figures['prompt_tokens']}&cached_tokens={figures['cached_tokens']}"
        finally:
            await self._notify_router("DELETE", f"/loads/{request_id}{found}")
        return LiveOutcome(
            outcome=RequestOutcome(
                request=number,
                worker_id=choice["worker_id"],
                prompt_tokens=figures["prompt_tokens"],
                cached_tokens=figures["cached_tokens"],
                output_tokens=max(1, request.output_length),
                ttft_ms=figures["model_ttft_ms"],
                latency_ms=figures["model_latency_ms"],
            ),
            times=LiveTimes(decided_ms, first_reported_ms, self._now_ms()),
            mode=choice["mode"],
            overlap_blocks=choice["overlap_blocks"],
            request_blocks=choice["request_blocks"],
            route_ms=route_ms,
        )

    async def _route(self, request_id: str, tokens: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/octet-stream", **self._authorization}
        path = f"/route?request_id={request_id}"
        response = await self._http.request("POST", self._router, path, headers, tokens, _SILENCE_S)
        answer: dict[str, Any] = orjson.loads(await response.read())
        if response.status != 200:
            raise KvStreamsError(f"POST /route of {request_id} answered {response.status}: {answer}")
        return answer

    async def _complete(
        self, request_id: str, worker_id: int, number: int, request: TraceRequest, tokens: bytes, arrival_ms: float
    ) -> tuple[dict[str, Any], float]:
        """Stream a completion, and report its first token to the router; return its figures and the report's time."""
        body = orjson.dumps(
            {
                "prompt": array("I", tokens).tolist(),
                "max_tokens": max(1, request.output_length),
                "stream": True,
                "seed": number,
                "kvstreams_arrival_ms": arrival_ms,
            }
        )
        figures: dict[str, Any] = {}
        first_reported_ms: float | None = None
        headers = {"Content-Type": "application/json"}
        response = await self._http.request(
            "POST", self._engines[worker_id], "/v1/completions", headers, body, _SILENCE_S
        )
        if response.status != 200:
            raise KvStreamsError(f"{request_id}: engine {worker_id} answered {(await response.read()).decode()}")
        rest = b""
        while data := await response.readany():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                if first_reported_ms is None:
                    await self._notify_router("POST", f"/loads/{request_id}/prefill-complete")
                    first_reported_ms = self._now_ms()
                if b'"kvstreams"' in line:
                    figures = orjson.loads(line[len(b"data: ") :])["kvstreams"] or figures
        if not figures or first_reported_ms is None:
            raise KvStreamsError(f"{request_id}: engine {worker_id} ended its answer early")
        return figures, first_reported_ms

    async def _notify_router(self, method: str, path: str) -> None:
        response = await self._http.request(method, self._router, path, self._authorization, None, _SILENCE_S)
        body = await response.read()
        if response.status not in (200, 202):
            raise KvStreamsError(f"{method} {path} answered {response.status}: {body.decode()}")
