"""`python -m benchmarks.steady_client`: one client that sends requests at a steady rate and measures each answer.

What lives here: a client on one kept connection, in a process of its own, so that its work and its pauses are not those
of what it measures. It runs in real time where that is allowed, because a client on another machine would not wait for
a processor of this one. What must not: what the figures are compared with (under_load).

A latency counts from the moment at which the request was due. A request that waits because the one before it is late
counts this wait as well. If the client itself wakes up late for a request, that is not the router's latency: it is
reported by itself. Reads one JSON object per line from its input, and writes one for each.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import numpy as np

from streams.process.interpreter import run_in_real_time

_HEADERS_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Run:
    """What to send. n_tokens: of each prompt; the bodies are packed tokens. book: book, and free at once."""

    url: str
    model: str
    rate: float
    seconds: float
    n_tokens: int
    book: bool = False
    seed: int = 1


class Connection:
    """A kept HTTP connection that sends prepared bytes; a client library would take longer than the router."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname or "", address.port or 80), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, request: bytes) -> bytes:
        """Send a request and return the answer's body; raises OSError for any status but 200."""
        self._socket.sendall(request)
        received = self._socket.recv(65_536)
        while _HEADERS_END not in received:
            received += self._more()
        head, _, body = received.partition(_HEADERS_END)
        if not head.startswith(b"HTTP/1.1 200"):
            raise OSError(received.decode(errors="replace"))
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        while len(body) < length:
            body += self._more()
        return body

    def _more(self) -> bytes:
        more = self._socket.recv(65_536)
        if not more:
            raise OSError("the server has closed the connection")
        return more


def prompts(seed: int, n: int, n_tokens: int) -> list[bytes]:
    """Prompts as packed tokens; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 128_000, n_tokens, dtype=np.uint32).tobytes() for _ in range(n)]


def run(wanted: Run) -> dict[str, object]:
    """Send the requests; return what it took of each, in milliseconds, and how many answers had each mode.

    late_ms: how late the client woke up for each request, which is not in latencies_ms.
    """
    bodies = prompts(wanted.seed, 64, wanted.n_tokens)
    connection = Connection(wanted.url)
    latencies: list[float] = []
    late: list[float] = []
    modes: dict[str, int] = {}
    began = time.perf_counter()
    for number in range(int(wanted.rate * wanted.seconds)):
        body = bodies[number % len(bodies)]
        name = f"{wanted.seed}-{began}-{number}"
        path = f"/route?model={wanted.model}&request_id={name}" + ("" if wanted.book else "&update_states=false")
        request = b"POST %b HTTP/1.1\r\nHost: r\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"
        due = began + number / wanted.rate
        ahead = due - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)
            late.append((time.perf_counter() - due) * 1e3)
            due = time.perf_counter()
        answer = connection.call(request % (path.encode(), len(body)) + body)
        latencies.append((time.perf_counter() - due) * 1e3)
        mode = json.loads(answer)["mode"]
        modes[mode] = modes.get(mode, 0) + 1
        if wanted.book:
            connection.call(f"DELETE /loads/{name} HTTP/1.1\r\nHost: r\r\n\r\n".encode())
    return {"latencies_ms": latencies, "late_ms": late or [0.0], "modes": modes}


def command(wanted: Run) -> str:
    """The line that asks for a run."""
    return json.dumps(asdict(wanted)) + "\n"


def main() -> None:
    """Run what each line of the input asks for."""
    run_in_real_time()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(Run(**json.loads(line)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
