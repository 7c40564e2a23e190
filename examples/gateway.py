"""A gateway: route each completion to the engine that holds most of its prompt, and stream the answer as it comes.

    kvstreams up                                          # Kafka, engines, a bridge and a router, in another terminal
    python examples/gateway.py http://127.0.0.1:8000      # the router's address, or several: they replace each other
    curl -N localhost:9000/v1/completions -d '{"prompt": [1, 2, 3], "max_tokens": 8, "stream": true}'

The prompt must be token ids, because this example does not tokenize.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator

from aiohttp import ClientSession, web

from streams.client import KvRouterClient
from streams.errors import KvStreamsError

ROUTER = web.AppKey("router", KvRouterClient)
HTTP = web.AppKey("http", ClientSession)


async def completions(request: web.Request) -> web.StreamResponse:
    """Route one request and forward it. The booking ends with the block, also if the caller hangs up."""
    body = await request.json()
    try:
        booking = await request.app[ROUTER].book(body["prompt"])
    except KvStreamsError as exc:
        return web.json_response({"error": {"code": exc.code, "message": str(exc)}}, status=exc.http_status)
    async with booking, request.app[HTTP].post(f"{booking.url}/v1/completions", json=body) as engine:
        response = web.StreamResponse(status=engine.status, headers={"Content-Type": engine.content_type})
        response.headers["X-Worker-Id"] = str(booking.worker_id)
        await response.prepare(request)
        async for chunk in engine.content.iter_any():
            booking.prefill_complete()
            await response.write(chunk)
        return response


def application(*routers: str) -> web.Application:
    """Build the gateway for the routers at these addresses."""

    async def clients(app: web.Application) -> AsyncIterator[None]:
        async with KvRouterClient(routers) as app[ROUTER], ClientSession() as app[HTTP]:
            yield

    app = web.Application()
    app.cleanup_ctx.append(clients)
    app.add_routes([web.post("/v1/completions", completions)])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router", nargs="+", help="the address of a router")
    routers = parser.parse_args().router
    web.run_app(application(*routers), host="127.0.0.1", port=9000, handler_cancellation=True)
