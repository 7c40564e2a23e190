"""Engines that report a made-up cache over vLLM's sockets, so that every router under test can subscribe to the same.

What lives here: documents with shared prefixes, the events that store them, and the sockets. What must not: routers.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import msgpack
import numpy as np
import numpy.typing as npt
import zmq

from streams.core.hashing import local_hashes, sequence_hashes
from streams.engines.replay import END_MARKER, SEQUENCE

MODEL = "m"
BLOCK_SIZE = 16

#: Blocks per event and events per batch, as a busy engine sends them.
_EVENT_BLOCKS = 128
_BATCH_EVENTS = 4

_PREFIX_TOKENS = 1024
_FAMILIES = 100
#: Of ten documents one is long.
SHORT_TOKENS, LONG_TOKENS = 2048, 32768
_EVERY_LONG = 10
_POLL_MS = 50

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt in the cache of one engine: a prefix of its family, and a tail of its own."""

    worker_id: int
    family: int
    tokens: Tokens


@dataclass
class Workload:
    """Documents dealt to engines at random until these store `n_blocks` blocks."""

    n_workers: int
    n_blocks: int
    seed: int = 7
    documents: list[Document] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.prefixes = [self.tokens(_PREFIX_TOKENS) for _ in range(_FAMILIES)]
        self.holders: dict[int, set[int]] = {}
        stored = 0
        while stored < self.n_blocks:
            worker_id = int(self.rng.integers(self.n_workers)) + 1
            family = int(self.rng.integers(_FAMILIES))
            n_tokens = LONG_TOKENS if len(self.documents) % _EVERY_LONG == _EVERY_LONG - 1 else SHORT_TOKENS
            tail = self.tokens(n_tokens - _PREFIX_TOKENS)
            self.documents.append(Document(worker_id, family, np.concatenate([self.prefixes[family], tail])))
            stored += tail.size // BLOCK_SIZE
            if worker_id not in self.holders.setdefault(family, set()):
                self.holders[family].add(worker_id)
                stored += _PREFIX_TOKENS // BLOCK_SIZE

    def tokens(self, n: int) -> Tokens:
        """Return n random tokens."""
        return self.rng.integers(0, 1 << 16, size=n, dtype=np.uint32)

    def prompts(self, n_tokens: int, n: int) -> list[Tokens]:
        """Return n prompts: half are cached to their ends, half have a cached prefix and a new tail."""
        cached = [each.tokens for each in self.documents if each.tokens.size == n_tokens][: n // 2]
        tails = (self.tokens(n_tokens - _PREFIX_TOKENS) for _ in range(n - len(cached)))
        return cached + [np.concatenate([self.prefixes[at % _FAMILIES], tail]) for at, tail in enumerate(tails)]

    def batches(self) -> dict[int, list[bytes]]:
        """Return each engine's payloads. An engine stores the prefix of a family once."""
        events: dict[int, list[object]] = {number: [] for number in range(1, self.n_workers + 1)}
        stored: set[tuple[int, int]] = set()
        for each in self.documents:
            names = (sequence_hashes(local_hashes(each.tokens, BLOCK_SIZE)) >> np.uint64(1)).tolist()
            begin = 0
            if (each.worker_id, each.family) in stored:
                begin = _PREFIX_TOKENS // BLOCK_SIZE
            stored.add((each.worker_id, each.family))
            for first in range(begin, len(names), _EVENT_BLOCKS):
                chosen = names[first : first + _EVENT_BLOCKS]
                tokens = each.tokens[first * BLOCK_SIZE : (first + len(chosen)) * BLOCK_SIZE].tolist()
                parent = names[first - 1] if first else None
                events[each.worker_id].append(["BlockStored", chosen, parent, tokens, BLOCK_SIZE, None, "GPU"])
        return {
            number: [
                msgpack.packb([time.time(), own[first : first + _BATCH_EVENTS], 0])
                for first in range(0, len(own), _BATCH_EVENTS)
            ]
            for number, own in events.items()
        }


class WireEngine:
    """The sockets of one engine: events, and a replay of all of them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], worker_id: int, url: str) -> None:
        self.worker_id = worker_id
        self.url = f"{url}/{worker_id}"
        self._events = context.socket(zmq.PUB)
        self._events.setsockopt(zmq.SNDHWM, 0)
        self._replay = context.socket(zmq.ROUTER)
        for socket in (self._events, self._replay):
            socket.bind("tcp://127.0.0.1:*")
        self.events, self.replay = (
            socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
            for socket in (self._events, self._replay)
        )
        self._payloads: list[bytes] = []

    @property
    def replay_socket(self) -> zmq.Socket[bytes]:
        """The socket on which replays are asked for."""
        return self._replay

    def publish(self, payload: bytes) -> None:
        """Send one batch."""
        self._payloads.append(payload)
        self._events.send_multipart([b"", SEQUENCE.pack(len(self._payloads) - 1), payload])

    def answer(self) -> None:
        """Answer one request for a replay."""
        client, *_, start = self._replay.recv_multipart()
        for number, payload in enumerate(self._payloads[:]):
            if number >= SEQUENCE.unpack(start)[0]:
                self._replay.send_multipart([client, b"", SEQUENCE.pack(number), payload])
        self._replay.send_multipart([client, b"", END_MARKER, b""])


class WireEngines:
    """All engines of a workload, in this process."""

    def __init__(self, n: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._http = _serve_http()
        url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.engines = [WireEngine(self._context, number, url) for number in range(1, n + 1)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def publish(self, batches: dict[int, list[bytes]]) -> None:
        """Send all batches, the engines by turns."""
        longest = max(map(len, batches.values()))
        for at in range(longest):
            for engine in self.engines:
                if at < len(batches[engine.worker_id]):
                    engine.publish(batches[engine.worker_id][at])

    def _answer(self) -> None:
        poller = zmq.Poller()
        by_socket = {engine.replay_socket: engine for engine in self.engines}
        for socket in by_socket:
            poller.register(socket, zmq.POLLIN)
        while not self._stopping.is_set():
            for socket, _ in poller.poll(_POLL_MS):
                by_socket[socket].answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._http.shutdown()
        self._http.server_close()
        self._context.destroy(linger=0)


def _serve_http() -> http.server.ThreadingHTTPServer:
    """Serve what a bridge asks every engine: its model, and since when its process has been running."""
    started = f"process_start_time_seconds {time.time()}\n".encode()
    models = json.dumps({"data": [{"id": MODEL}]}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = models if self.path.endswith("/v1/models") else started
            with suppress(BrokenPipeError, ConnectionResetError):  # the bridge has closed the connection
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def expected_overlap(workload: Workload, prompts: Sequence[Tokens]) -> int:
    """The sum over prompts and engines of the leading blocks that each engine holds of each prompt."""
    total = 0
    full = {each.tokens.tobytes(): each for each in workload.documents}
    prefixes = {prefix.tobytes(): family for family, prefix in enumerate(workload.prefixes)}
    for prompt in prompts:
        holders = workload.holders.get(prefixes[prompt[:_PREFIX_TOKENS].tobytes()], set())
        total += len(holders) * (_PREFIX_TOKENS // BLOCK_SIZE)
        if prompt.tobytes() in full:
            total += (prompt.size - _PREFIX_TOKENS) // BLOCK_SIZE
    return total
