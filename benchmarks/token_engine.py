"""`python -m benchmarks.token_engine`: an engine that streams tokens at a fixed rate, and stamps each with its time.

What lives here: the process, which `benchmarks.front` starts. What must not: measuring. It does as little as it can
for each token, so that it does not slow down what is measured on the same machine. It counts the bytes that it sent by
request, as a hash, which a client compares with what it received. Token ids that a front asks for are not counted: they
must not reach the client.

The first token also says when its request had arrived: uvloop's timers count whole milliseconds, so the engine's own
time until then is not always the same. It is subtracted for each request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

import click
import uvloop
import xxhash

from streams.process.interpreter import run_in_real_time

#: Digests that are kept for clients to ask for.
DIGESTS_MAX = 100_000

#: What precedes the time in each event, and its digits: of time.monotonic_ns.
STAMP = b'"t":"'
STAMP_DIGITS = 20

#: What precedes the time in the first event at which the request had arrived. It has as many digits.
ARRIVAL = b'"r":"'

_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,'
    b'"token_ids":null}],"t":"%020d"}\n\n'
)
#: What the chunks of a request that asks for token ids have in addition, and where.
_ASKS_FOR_IDS = b'"return_token_ids":true'
_NO_IDS, _IDS = b',"token_ids":null', b',"token_ids":[12345]'
_PROMPT_IDS = b',"prompt_token_ids":[%s]}' % b",".join([b"12345"] * 1000)

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"connection: %s\r\n\r\n"
)
_DONE = b"data: [DONE]\n\n"


class Engine:
    """What all connections share. n_tokens: of an answer; gap_s: between two; prefill_s: before the first."""

    def __init__(self, n_tokens: int, gap_s: float, prefill_s: float) -> None:
        self.n_tokens = n_tokens
        self.gap_s = gap_s
        self.prefill_s = prefill_s
        self.digests: OrderedDict[bytes, bytes] = OrderedDict()


class Connection(asyncio.Protocol):
    """One connection: requests one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_ids = False
        self._arrived_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # it is a TCP connection

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        if len(body) < int(headers.get(b"content-length", b"0")):
            return
        self._received = b""
        self._arrived_ns = time.monotonic_ns()
        if head.startswith(b"GET /digest/"):
            digest = self._engine.digests.get(head.split(b" ", 2)[1].rpartition(b"/")[2], b"")
            self._write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(digest), digest))
            return
        self._has_ids = _ASKS_FOR_IDS in body
        self._begin(headers.get(b"x-request-id", b""))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _begin(self, request_id: bytes) -> None:
        loop = asyncio.get_running_loop()
        first_s = loop.time() + self._engine.prefill_s
        self._write(_HEAD % b"keep-alive")
        self._next(0, first_s, xxhash.xxh3_64(), request_id)

    def _next(self, sent: int, first_s: float, digest: xxhash.xxh3_64, request_id: bytes) -> None:
        at_s = first_s + sent * self._engine.gap_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._send, sent, first_s, digest, request_id)

    def _send(self, sent: int, first_s: float, digest: xxhash.xxh3_64, request_id: bytes) -> None:
        event = _EVENT % time.monotonic_ns()
        if sent == 0:
            event = event.replace(STAMP, b'%b%020d",%b' % (ARRIVAL, self._arrived_ns, STAMP))
        if self._has_ids:
            digest.update(event.replace(_NO_IDS, b""))
            event = event.replace(_NO_IDS, _IDS)
            if sent == 0:
                event = event[: -len(b"}\n\n")] + _PROMPT_IDS + b"\n\n"
        else:
            digest.update(event)
        sent += 1
        if sent < self._engine.n_tokens:
            self._write(b"%x\r\n%s\r\n" % (len(event), event))
            self._next(sent, first_s, digest, request_id)
            return
        digest.update(_DONE)
        self._write(b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(event), event, len(_DONE), _DONE))
        digests = self._engine.digests
        digests[request_id] = digest.hexdigest().encode()
        if len(digests) > DIGESTS_MAX:
            digests.popitem(last=False)


@click.command()
@click.option("--port", required=True, type=int)
@click.option("--tokens", required=True, type=int)
@click.option("--gap-ms", required=True, type=float)
@click.option("--prefill-ms", required=True, type=float)
def main(port: int, tokens: int, gap_ms: float, prefill_ms: float) -> None:
    """Serve until terminated."""

    async def serve() -> None:
        engine = Engine(tokens, gap_ms / 1000, prefill_ms / 1000)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
        await server.serve_forever()

    run_in_real_time()
    uvloop.run(serve())


if __name__ == "__main__":
    main()
