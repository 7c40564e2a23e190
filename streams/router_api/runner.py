"""How the HTTP API's application runs on a server, `kvstreams router` or the Faust worker.

What lives here: the runner, which brings together the limits of connections and the fast lane. What must not: both of
these (connections, fast_lane), and listening (http_server).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from streams.router_api.connections import LINGERING_S, Connections
from streams.router_api.fast_lane import FastLane, FastProtocol


class ApiRunner(web.AppRunner):
    """Runs the API's application within the limits of Connections. Bodies are decompressed by Bodies."""

    def __init__(
        self, app: web.Application, connections: Connections, shutdown_timeout_s: float, lane: FastLane | None = None
    ) -> None:
        """shutdown_timeout_s: limits the time that a stop takes. Requests that last for half of it are cut off.

        lane: answers short requests.
        """
        super().__init__(
            app,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGERING_S,
            shutdown_timeout=shutdown_timeout_s / 2,  # aiohttp waits twice: for answers, and after cutting requests off
        )
        self._connections = connections
        self._lane = lane

    @property
    def server(self) -> Callable[[], asyncio.BaseProtocol] | None:  # type: ignore[override]  # sites only call it
        """The factory of protocols that a site gives to the event loop."""
        server = super().server
        if server is None:
            return None
        lane, note_request = self._lane, self._connections.note_request

        def fast() -> web.RequestHandler:
            assert lane is not None
            return FastProtocol(lane, note_request, server, loop=server._loop, **server._kwargs)

        return self._connections.accepting_for(server, server if lane is None else fast)
