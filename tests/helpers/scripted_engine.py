"""An engine reduced to its HTTP socket, for tests of the front that choose how an answer ends.

What lives here: a server on a thread of its own that streams a fixed answer, and breaks it off, stalls, or refuses as
its script says. What must not: tokens that mean anything; `kvstreams sim` has those.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import orjson
from aiohttp import web
from multidict import CIMultiDict

#: Events of an answer.
EVENTS = 40


def answer_bytes(n_events: int = EVENTS, padding: int = 0) -> bytes:
    """Return the body of a whole stream. padding: characters that each event has in addition."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    pages = [role]
    for at in range(n_events):
        finish = "length" if at == n_events - 1 else None
        pages.append(
            {"choices": [{"index": 0, "delta": {"content": f"t{at}" + "x" * padding}, "finish_reason": finish}]}
        )
    return b"".join(b"data: " + orjson.dumps(page) + b"\n\n" for page in pages) + b"data: [DONE]\n\n"


@dataclass(slots=True)
class Script:
    """What an engine does with its next requests. They all get the same answer.

    status: of the answer; other than 200, its body is `refusal`. breaks_at: bytes of the answer after which the
    connection is aborted. stalls_at: bytes after which nothing more comes. pause_s: between two pieces of the answer.
    piece: bytes of a piece. page: a JSON answer, in place of a stream.
    """

    status: int = 200
    refusal: bytes = b'{"error": {"message": "as the script says", "code": 503}}'
    breaks_at: int | None = None
    stalls_at: int | None = None
    pause_s: float = 0.0
    piece: int = 100
    answer: bytes = field(default_factory=answer_bytes)
    page: bytes | None = None


class ScriptedEngine:
    """A running engine. received: headers of its requests. counts: `begun`, `ended` (whole answers), `cancelled`."""

    def __init__(self) -> None:
        self.script = Script()
        self.url = ""
        self.received: list[CIMultiDict[str]] = []
        self.bodies: list[bytes] = []
        self.counts: Counter[str] = Counter()

    @property
    def n_open(self) -> int:
        """Requests that have neither ended nor been cancelled."""
        return self.counts["begun"] - self.counts["ended"] - self.counts["cancelled"] - self.counts["broken"]

    def routes(self) -> list[web.RouteDef]:
        """The calls that it serves."""
        return [web.post("/v1/completions", self._serve), web.post("/v1/chat/completions", self._serve)]

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        script = self.script
        self.received.append(CIMultiDict(http.headers))
        self.bodies.append(await http.read())
        self.counts["begun"] += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        try:
            if script.status != 200:
                self.counts["ended"] += 1
                return web.Response(body=script.refusal, status=script.status, content_type="application/json")
            if script.page is not None:
                self.counts["ended"] += 1
                return web.Response(body=script.page, content_type="application/json")
            await response.prepare(http)
            sent = 0
            while sent < len(script.answer):
                until = min(sent + script.piece, len(script.answer))
                for limit in (script.breaks_at, script.stalls_at):
                    until = until if limit is None else min(until, max(limit, sent))
                if until > sent:
                    await response.write(script.answer[sent:until])
                sent = until
                if script.breaks_at == sent:
                    self.counts["broken"] += 1
                    if http.transport is not None:
                        http.transport.close()  # what was written is sent first
                    return response
                if script.stalls_at == sent:
                    await asyncio.sleep(3600)
                await asyncio.sleep(script.pause_s)
            await response.write_eof()
            self.counts["ended"] += 1
            return response
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        except ConnectionError:  # the client left while a piece was written
            self.counts["cancelled"] += 1
            return response


_Engine = TypeVar("_Engine", bound=ScriptedEngine)


@contextmanager
def scripted_engines(n: int, make: type[_Engine]) -> Iterator[list[_Engine]]:
    """Run n engines on a thread until the block ends."""
    engines = [make() for _ in range(n)]
    started, over = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        runners = []
        for engine in engines:
            app = web.Application(client_max_size=1 << 30)
            app.add_routes(engine.routes())
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            runners.append(runner)
        loops.append(asyncio.get_running_loop())
        started.set()
        await over.wait()
        for runner in runners:
            await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="engines")
    thread.start()
    assert started.wait(30)
    try:
        yield engines
    finally:
        stop: Callable[[], None] = over.set
        loops[0].call_soon_threadsafe(stop)
        thread.join()
