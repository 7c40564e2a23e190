"""An engine reduced to its sockets, for tests that choose what it reports, drops and no longer keeps.

What lives here: vLLM's three surfaces (PUB socket, replay ROUTER socket, HTTP) around a list of batches. What must not:
a cache. The test decides what is stored; `held` records it.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Self

import msgpack
import zmq

from streams.core.hashing import local_hashes
from streams.core.ids import Tier
from streams.engines.replay import END_MARKER, SEQUENCE
from streams.lab.kafka.ports import free_port
from tests.helpers.reference import chain_hashes

BLOCK_SIZE = 16

#: How often the replay thread checks whether it must stop.
_POLL_MS = 20

#: ZMQ closes a socket within milliseconds.
_BIND_TIMEOUT_S = 5.0


class EngineDouble:
    """One engine process.

    reports_start: whether /metrics contains the start time. kept: how many batches the replay buffer holds. prefix: the
    frames before the sequence number in a replay's answers. model: the model that /v1/models names. ports: of HTTP,
    events and replays; free ones for None.
    """

    def __init__(
        self,
        *,
        reports_start: bool = True,
        kept: int = 10_000,
        prefix: tuple[bytes, ...] = (b"",),
        model: str = "m",
        ports: tuple[int | None, int | None, int | None] = (None, None, None),
    ) -> None:
        self.reports_start = reports_start
        self.model = model
        self._prefix = list(prefix)
        self._ports = [free_port() if port is None else port for port in ports]
        self.url, self.events, self.replay = (
            f"{scheme}://127.0.0.1:{port}" for scheme, port in zip(("http", "tcp", "tcp"), self._ports, strict=True)
        )
        self._context = zmq.Context()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.held: dict[int, int] = {}  # engine hash to sequence hash
        self.sequence = -1
        self.started_s = time.time()
        self.gauges = ""  # further lines of /metrics
        self.answers = threading.Event()  # while it is not set, /metrics does not answer
        self.answers.set()
        self.status = 200  # of all answers over HTTP
        self.key: str | None = None  # without which /v1 answers 401
        self.keys_seen: set[tuple[str, str | None]] = set()  # the paths that were asked for, and with which header
        self.models_body = json.dumps({"data": [{"id": model}]})  # the answer of /v1/models
        self._replays = threading.Event()
        self._replays.set()
        self._start()

    def stop_replays(self) -> None:
        """Answer no further request for a replay."""
        self._replays.clear()

    def answer_replays(self) -> None:
        """Answer requests for a replay again."""
        self._replays.set()

    def _start(self) -> None:
        self._start_core()
        self.listen_for_http()

    def listen_for_http(self) -> None:
        """Listen at the HTTP port."""
        self._http = _serve(self, self._ports[0])

    def _start_core(self) -> None:
        self._stopping.clear()
        self._pub = self._context.socket(zmq.PUB)
        self._bind(self._pub, self.events)
        self._replaying = threading.Thread(target=self._answer)
        self._replaying.start()

    def _bind(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Bind a socket as soon as ZMQ's thread has closed the one of the process before."""
        deadline_s = time.monotonic() + _BIND_TIMEOUT_S
        while True:
            try:
                socket.bind(address)
                return
            except zmq.ZMQError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_POLL_MS / 1000)

    def _stop_core(self) -> None:
        self._stopping.set()
        self._replaying.join()
        self._pub.close(linger=0)

    def stop(self) -> None:
        """End the process."""
        self.answers.set()
        self._stop_core()
        self._http.shutdown()
        self._http.server_close()

    def restart(self) -> None:
        """Replace the process by another on the same ports, with an empty cache and buffer, and numbers from 0."""
        self.stop()
        self.start_again()

    def start_again(self) -> None:
        """Start the second process of `restart` after a call of `stop`."""
        self._empty()
        self.started_s = time.time()
        self._start()

    def replace_core(self) -> None:
        """Replace only what publishes events; the HTTP server goes on, and reports the same start time."""
        self._stop_core()
        self._empty()
        self._start_core()

    def _empty(self) -> None:
        self._buffer.clear()
        self.held.clear()
        self.sequence = -1

    def publish(self, *events: Any, live: bool = True) -> int:
        """Publish one batch in vLLM's dialect; see `send`."""
        return self.send(msgpack.packb([time.time(), list(events), 0]), live=live)

    def send(self, payload: bytes, *, live: bool = True) -> int:
        """Publish one payload and return its number. live: False puts it only into the replay buffer."""
        with self._lock:
            self.sequence += 1
            self._buffer.append((self.sequence, payload))
            if live:
                self._pub.send_multipart([b"kv", SEQUENCE.pack(self.sequence), payload])
            return self.sequence

    def send_stray(self, sequence: int) -> None:
        """Send a batch that the engine does not know of, as if another process had sent it."""
        payload = msgpack.packb([time.time(), [["AllBlocksCleared"]], 0])
        with self._lock:
            self._pub.send_multipart([b"kv", SEQUENCE.pack(sequence), payload])

    def store(self, first_token: int, n_blocks: int = 2, *, live: bool = True) -> int:
        """Store the blocks of a prompt that no other call uses, with engine hashes derived from its first token."""
        tokens = list(range(first_token, first_token + n_blocks * BLOCK_SIZE))
        names = [first_token * 1000 + n for n in range(n_blocks)]
        chain = chain_hashes(local_hashes(tokens, BLOCK_SIZE, 1337).tolist(), None)
        self.held.update(zip(names, chain, strict=True))
        return self.publish(["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU"], live=live)

    def remove(self, first_token: int, n: int = 0, *, live: bool = True) -> int:
        """Remove block `n` of such a prompt."""
        name = first_token * 1000 + n
        del self.held[name]
        return self.publish(["BlockRemoved", [name], "GPU"], live=live)

    def forget(self) -> None:
        """Drop all batches but the last one from the replay buffer."""
        with self._lock:
            while len(self._buffer) > 1:
                self._buffer.popleft()

    def clear(self) -> int:
        """Clear the cache."""
        self.held.clear()
        return self.publish(["AllBlocksCleared"])

    @property
    def truth(self) -> set[tuple[Tier, int]]:
        """Return every block that the engine holds."""
        return {(Tier.DEVICE, block) for block in self.held.values()}

    def _answer(self) -> None:
        with self._context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            self._bind(socket, self.replay)
            while not self._stopping.is_set():
                if not socket.poll(_POLL_MS):
                    continue
                frames = socket.recv_multipart()
                if len(frames) != 3:
                    continue  # from a socket of another test, whose engine had this port before
                client, _, start = frames
                if not self._replays.is_set():
                    continue
                with self._lock:
                    kept = list(self._buffer)
                for sequence, payload in kept:
                    if sequence >= SEQUENCE.unpack(start)[0]:
                        socket.send_multipart([client, *self._prefix, SEQUENCE.pack(sequence), payload])
                socket.send_multipart([client, *self._prefix, END_MARKER, b""])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._context.destroy(linger=0)


def offload_placeholder(engine_hash: int) -> dict[str, Any]:
    """Return what vLLM's offloading connector reports of a block by default, by vLLM's source."""
    return {
        "type": "BlockStored",
        "block_hashes": [engine_hash],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "group_idx": 0,
    }


def _serve(engine: EngineDouble, port: int) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, sent = engine.status, self.headers.get("Authorization")
            engine.keys_seen.add((self.path, sent))
            if engine.key is not None and self.path.startswith("/v1/") and sent != f"Bearer {engine.key}":
                status, body = 401, json.dumps({"error": "Unauthorized"})
            elif self.path == "/v1/models":
                body = engine.models_body
            else:
                engine.answers.wait()
                start = f"process_start_time_seconds {engine.started_s}" if engine.reports_start else "up 1"
                body = f"# TYPE x gauge\n{start}\n{engine.gauges}"
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if self.path == "/v1/models" else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has closed the connection
                self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
