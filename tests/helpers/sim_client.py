"""A simulated engine in this process, with a client for each of its ports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from streams.core.hashing import local_hashes, sequence_hashes
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.server import SimServer, SimServerConfig, serve

ENGINE = EngineConfig(block_size=4, n_blocks=256)

#: 1,000 model ms per wall ms: an answer of one model second is complete in one step.
FAST = SimServerConfig(engine=ENGINE, time_scale=1000.0)
PROMPT = list(range(1, 15))

#: Only a hang is a failure. Nothing here is a measurement.
PATIENCE_S = 20.0


class Client:
    """One server with a subscriber, a replay socket and an HTTP session."""

    def __init__(self, server: SimServer, http: aiohttp.ClientSession, context: zmq.asyncio.Context) -> None:
        self.server = server
        self.http = http
        self.events = context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, b"")
        self.events.connect(server.events_endpoint)
        self.replays = context.socket(zmq.DEALER)
        self.replays.connect(server.replay_endpoint)

    def close(self) -> None:
        """Close the sockets; a context that is destroyed leaves their asyncio halves open."""
        self.events.close(linger=0)
        self.replays.close(linger=0)

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.post(self.server.http_url + path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None

    async def get(self, path: str) -> Any:
        async with self.http.get(self.server.http_url + path) as response:
            assert response.status == 200
            return await response.json()

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, page = await self.post("/v1/completions", {"model": "sim-model", "prompt": PROMPT, **body})
        assert status == 200, page
        assert isinstance(page, dict)
        return page

    async def replay(self, start: int) -> list[tuple[int, bytes]]:
        """Request a replay as vLLM's subscribers do, and read to the end marker."""
        await self.replays.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, bytes]] = []
        while True:
            empty, sequence, payload = await self.replays.recv_multipart()
            assert empty == b""
            if sequence == b"\xff" * 8:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(sequence, "big"), payload))


@asynccontextmanager
async def started(config: SimServerConfig = FAST) -> AsyncIterator[Client]:
    """Give a client of a new engine, and check the engine's invariants afterwards."""
    server = await serve(config)
    context = zmq.asyncio.Context()
    try:
        async with aiohttp.ClientSession() as http:
            client = Client(server, http, context)
            try:
                yield client
            finally:
                client.close()
        server.model.check()
    finally:
        context.destroy(linger=0)
        await server.stop()


def prompt_hashes(tokens: list[int]) -> list[int]:
    hashes: list[int] = sequence_hashes(local_hashes(tokens, ENGINE.block_size)).tolist()
    return hashes
