"""An engine whose events are polled over HTTP, as trtllm-serve has them, for tests that choose what it reports.

What lives here: the endpoint `/kv_cache_events`, which empties a bounded queue with each answer, a metrics page, and
the list of models. What must not: a cache.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Any, Self

from aiohttp import web

from streams.lab.kafka.ports import free_port


class PolledEngine:
    """One engine process. queue_max: events that it keeps until it is asked; further ones push out the oldest."""

    def __init__(self, model: str, queue_max: int = 1000) -> None:
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"{self.url}/kv_cache_events"
        self.n_asked = 0
        self.status = 200  # of the answers that have events
        self.hangs = False  # whether these answers are held back
        self._queue: deque[dict[str, Any]] = deque(maxlen=queue_max)
        self._next: dict[int, int] = {}
        self._started_s = time.time()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="polled engine")
        self._runner: web.AppRunner | None = None

    def report(self, *events: dict[str, Any]) -> None:
        """Queue events, with the engine's next numbers in their ranks. No answer is sent in between."""
        self._run(self._report(events))

    async def _report(self, events: tuple[dict[str, Any], ...]) -> None:
        for event in events:
            rank = event.get("attention_dp_rank") or 0
            number = self._next.get(rank, 0)
            self._next[rank] = number + 1
            self._queue.append(event | {"event_id": number})

    def restart(self) -> None:
        """Replace the process by another one on the same port, which numbers its events from 0."""
        self._stop()
        self._queue.clear()
        self._next.clear()
        self._started_s = time.time()
        self._run(self._start())

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _stop(self) -> None:
        assert self._runner is not None
        self._run(self._runner.cleanup())

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/kv_cache_events", self._events)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _events(self, _: web.Request) -> web.Response:
        self.n_asked += 1
        while self.hangs:
            await asyncio.sleep(0.02)
        if self.status != 200:
            return web.Response(status=self.status)
        found = list(self._queue)
        self._queue.clear()
        return web.json_response(found)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {self._started_s}\n")
