"""`python -m benchmarks.picker_engine`: many engines in one process, which answer at once.

What lives here: the addresses, the answers, and the events of a cache that engines report. What must not: measuring.
Each engine has a loopback address of its own (127.0.0.1 and the following ones) and the same port, since a gateway
tells endpoints apart by their addresses.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import click
import msgpack
import numpy as np
import uvloop
import zmq
import zmq.asyncio

from streams.core.hashing import local_hashes, sequence_hashes
from streams.engines.replay import END_MARKER, SEQUENCE
from streams.process.interpreter import run_in_real_time

MODEL = "m"
BLOCK_SIZE = 16
_EVENT_BLOCKS = 128

_ANSWER = json.dumps({"id": "cmpl-0", "object": "chat.completion", "model": MODEL, "choices": []}).encode()


def host_of(number: int) -> str:
    """The loopback address of an engine, which are numbered from 1 on."""
    return f"127.0.{number // 250}.{number % 250 + 1}"


class Answers(asyncio.Protocol):
    """One connection of a gateway or a bridge. It reads requests with a Content-Length, one after the other."""

    def __init__(self, started: bytes) -> None:
        self._started = started
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # it is a TCP connection

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            lower = head.lower()
            if b"transfer-encoding: chunked" in lower:  # a gateway in full duplex removes the length
                if not rest.endswith(b"0\r\n\r\n"):
                    return
                self._buffer = b""
            else:
                _, found, after = lower.partition(b"content-length:")
                n_body = int(after.split(b"\r\n", 1)[0]) if found else 0
                if len(rest) < n_body:
                    return
                self._buffer = rest[n_body:]
            path = head.split(b" ", 2)[1]
            page = _ANSWER
            if path == b"/v1/models":
                page = json.dumps({"data": [{"id": MODEL}]}).encode()
            elif path == b"/metrics":
                page = self._started
            assert self._transport is not None
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(page), page)
            )


class Events:
    """The event sockets of one engine."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._events, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._events.setsockopt(zmq.SNDHWM, 0)
        self.addresses = []
        for socket in (self._events, self._replay):
            socket.bind("tcp://127.0.0.1:*")
            endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            self.addresses.append(endpoint.decode().rstrip("\0"))
        self._payloads: list[bytes] = []

    async def hold(self, tokens: np.ndarray) -> None:
        """Report that the engine holds a prompt's full blocks."""
        names = (sequence_hashes(local_hashes(tokens, BLOCK_SIZE)) >> np.uint64(1)).tolist()
        for first in range(0, len(names), _EVENT_BLOCKS):
            chosen = names[first : first + _EVENT_BLOCKS]
            own = tokens[first * BLOCK_SIZE : (first + len(chosen)) * BLOCK_SIZE].tolist()
            event = ["BlockStored", chosen, names[first - 1] if first else None, own, BLOCK_SIZE, None, "GPU"]
            self._payloads.append(msgpack.packb([time.time(), [event], 0]))
            await self._events.send_multipart([b"", SEQUENCE.pack(len(self._payloads) - 1), self._payloads[-1]])

    async def replay(self) -> None:
        """Answer requests for a replay, until cancelled."""
        while True:
            client, *_, start = await self._replay.recv_multipart()
            for number, payload in enumerate(self._payloads[:]):
                if number >= SEQUENCE.unpack(start)[0]:
                    await self._replay.send_multipart([client, b"", SEQUENCE.pack(number), payload])
            await self._replay.send_multipart([client, b"", END_MARKER, b""])


async def run(n: int, port: int, info: Path, prompts: Path) -> None:
    """Serve until cancelled. prompts: read once it is there; each prompt goes to one engine, by turns."""
    run_in_real_time()  # the engines stand for other machines
    loop = asyncio.get_running_loop()
    started = f"process_start_time_seconds {time.time()}\n".encode()
    engines = [Events(zmq.asyncio.Context.instance()) for _ in range(n)]
    for number in range(1, n + 1):
        await loop.create_server(lambda: Answers(started), host_of(number), port, backlog=1024)
    replays = [asyncio.create_task(engine.replay()) for engine in engines]
    info.write_text(json.dumps([engine.addresses for engine in engines]))
    while not prompts.exists():
        await asyncio.sleep(0.1)
    for at, row in enumerate(np.load(prompts, allow_pickle=True)):
        await engines[at % n].hold(row)
    await asyncio.gather(*replays)


@click.command()
@click.option("--engines", default=64)
@click.option("--port", type=int, required=True)
@click.option("--info", type=click.Path(path_type=Path), required=True)
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
def main(engines: int, port: int, info: Path, prompts: Path) -> None:
    """Serve."""
    uvloop.run(run(engines, port, info, prompts))


if __name__ == "__main__":
    sys.exit(main())
