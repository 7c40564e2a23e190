"""A gateway: route each completion to the engine that holds most of its prompt, and stream the answer.

    kvstreams up                                          # Kafka, engines, a bridge and a router, in another terminal
    python examples/gateway.py http://127.0.0.1:8000      # the router's address, as `kvstreams up` prints it
    curl -N localhost:9000/v1/completions -d '{"prompt": [1, 2, 3], "max_tokens": 8, "stream": true}'

The prompt must be token ids, because this example does not tokenize.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator

from aiohttp import ClientSession, web

ROUTER = web.AppKey("router", str)
HTTP = web.AppKey("http", ClientSession)


async def completions(request: web.Request) -> web.StreamResponse:
    """Route one request, forward it, and report its progress to the router."""
    app, body = request.app, await request.json()
    router, http = app[ROUTER], app[HTTP]
    request_id = uuid.uuid4().hex
    wanted = {"request_id": request_id, "token_ids": body["prompt"]}
    async with http.post(f"{router}/route", json=wanted) as answer:
        if answer.status != 200:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        choice = await answer.json()
    booking = f"{router}/loads/{request_id}"
    try:
        async with http.post(f"{choice['url']}/v1/completions", json=body) as engine:
            response = web.StreamResponse(status=engine.status, headers={"Content-Type": engine.content_type})
            response.headers["X-Worker-Id"] = str(choice["worker_id"])
            await response.prepare(request)
            first = True
            async for chunk in engine.content.iter_any():
                if first:
                    first = False
                    await http.post(f"{booking}/prefill-complete")
                await response.write(chunk)
            return response
    finally:
        await http.delete(booking)


async def client_of(app: web.Application) -> AsyncIterator[None]:
    """Keep one HTTP session for as long as the gateway runs."""
    async with ClientSession() as app[HTTP]:
        yield


def application(router: str) -> web.Application:
    """Build the gateway for the router at this address."""
    app = web.Application()
    app[ROUTER] = router
    app.cleanup_ctx.append(client_of)
    app.add_routes([web.post("/v1/completions", completions)])
    return app


if __name__ == "__main__":
    web.run_app(application(sys.argv[1]), host="127.0.0.1", port=9000, handler_cancellation=True)
