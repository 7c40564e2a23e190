"""`python -m benchmarks.front`: what the front adds to a stream, next to a direct connection and to nginx.

What lives here: the clients, the rounds, and the checks: every byte is the engine's. What must not: the engine
(token_engine). The three ways take turns, several rounds each, so that all of them meet the same machine. Delays are
differences of medians and of 99th percentiles; the engine stamps each token when it is sent, and clients read the same
clock. Exits 1 if a byte differs or a booking is left.

The added time to the first token is a difference of `Stream.way_ms`: the time from the request to the first token,
without the engine's part of it. Clients and the engine wait with timers that count whole milliseconds of one clock. So
a difference of the whole times is nearly a whole number of milliseconds, whatever was added.

Clients and the engine stand for other machines. They run in real time where that is allowed, so that they do
not wait for a processor that the measured process has: that wait would count as its delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import click
import orjson
import psutil
import uvloop
import xxhash
from aiohttp import ClientSession

from benchmarks.machinery import machinery
from benchmarks.report import OURS, Bar, Report, Samples, installed, wide_console
from benchmarks.token_engine import ARRIVAL, STAMP, STAMP_DIGITS
from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Child
from streams.lab.stack import RouterProcess, Stack, get_json, wait_workers
from streams.process.interpreter import run_in_real_time
from streams.process.waiting import wait_for

MODEL = "m"
DIRECT, NGINX, FRONT, MOVING = "direct", "nginx", "front", "front with migration"

#: Characters of the system prompt that all requests share, and of each request's own message.
SYSTEM_CHARS, MESSAGE_CHARS = 4000, 400

#: The engine's first token comes after this time; the front's work is in addition to it.
PREFILL_MS = 50.0

#: Requests of a round begin within this time, at random moments, which are the same for all ways. At even distances,
#: the tokens of all streams would come in a few groups, and requests always together with one of them.
SPREAD_S = 2.0
SEED = 19

#: What begins and ends messages. These are special tokens, as they are for chat models: a tokenizer caches what is
#: between them, such as the system prompt. The simulated engine, whose tokenizer it is otherwise, has none.
MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

PATIENCE_S = 120.0


@dataclass(slots=True)
class Stream:
    """What one client saw. delays_ns: of each token, from the engine's stamp to the client.

    arrived_ns: when the engine had the request.
    """

    request_id: str
    sent_ns: int = 0
    first_ns: int = 0
    arrived_ns: int = 0
    delays_ns: list[int] = field(default_factory=list)
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    status: bytes = b""

    @property
    def ttft_ms(self) -> float:
        """Time from the request to the first token."""
        return (self.first_ns - self.sent_ns) / 1e6

    @property
    def way_ms(self) -> float:
        """Time that the request took to the engine, and the first token back."""
        return (self.arrived_ns - self.sent_ns + self.delays_ns[0]) / 1e6


class Reader(asyncio.Protocol):
    """Reads one chunked answer. Not a library's client: it must not take more time than what is measured."""

    def __init__(self, stream: Stream, request: bytes) -> None:
        self._stream = stream
        self._request = request
        self._buffer = b""
        self._in_body = False
        self._body = b""
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # it is a TCP connection
        self._stream.sent_ns = time.monotonic_ns()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        self._buffer += data
        if not self._in_body:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            self._stream.status = head.split(b" ", 2)[1]
            self._in_body, self._buffer = True, rest
        while (at := self._buffer.find(b"\r\n")) >= 0:
            size = int(self._buffer[:at], 16)
            end_at = at + 2 + size + 2
            if len(self._buffer) < end_at:
                return
            if size == 0:
                self._finish()
                return
            self._take(self._buffer[at + 2 : end_at - 2], now_ns)
            self._buffer = self._buffer[end_at:]

    def _take(self, piece: bytes, now_ns: int) -> None:
        stream = self._stream
        stream.digest.update(piece)
        self._body += piece
        while (at := self._body.find(b"\n\n")) >= 0:
            event, self._body = self._body[:at], self._body[at + 2 :]
            stamp = event.rfind(STAMP)
            if stamp >= 0:
                if not stream.first_ns:
                    stream.first_ns, stream.arrived_ns = now_ns, _number(event, ARRIVAL)
                stream.delays_ns.append(now_ns - _number(event, STAMP))

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if not self.done.done():
            self.done.set_result(None)


def _number(event: bytes, name: bytes) -> int:
    """Return the time in an event that follows this."""
    first = event.rindex(name) + len(name)
    return int(event[first : first + STAMP_DIGITS])


def request_of(number: int, request_id: str) -> bytes:
    """Return a chat with a system prompt that all share."""
    messages = [
        {"role": "system", "content": "You are careful. " * (SYSTEM_CHARS // 17)},
        {"role": "user", "content": f"{number}: " + "What is a stream? " * (MESSAGE_CHARS // 18)},
    ]
    body = orjson.dumps({"model": MODEL, "messages": messages, "stream": True, "max_tokens": 500})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def one_round(url: str, n_streams: int) -> list[Stream]:
    """Run n streams at once and return what their clients saw."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    loop, chance = asyncio.get_running_loop(), random.Random(SEED)
    starts_s = [chance.random() * SPREAD_S for _ in range(n_streams)]

    async def one(number: int) -> Stream:
        await asyncio.sleep(starts_s[number])
        stream = Stream(uuid.uuid4().hex)
        _, reader = await loop.create_connection(
            lambda: Reader(stream, request_of(number, stream.request_id)), host, port
        )
        await reader.done
        return stream

    return await asyncio.gather(*map(one, range(n_streams)))


async def wrong_bytes(streams: Sequence[Stream], engine_url: str, n_tokens: int) -> list[str]:
    """Compare what clients received with what the engine sent."""
    wrong = []
    async with ClientSession() as http:
        for stream in streams:
            async with http.get(f"{engine_url}/digest/{stream.request_id}") as response:
                sent = await response.text()
            if sent != stream.digest.hexdigest() or len(stream.delays_ns) != n_tokens:
                wrong.append(
                    f"status {stream.status.decode()}, {len(stream.delays_ns)} of {n_tokens} tokens, or other bytes"
                )
    return wrong


def share(values: Sequence[float], part: float) -> float:
    """Return a percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


class Processor:
    """Processor time of a process and its children, from now on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began_s = self._seconds()

    def _seconds(self) -> float:
        parent = psutil.Process(self._pid)
        total = 0.0
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def used_s(self) -> float:
        return self._seconds() - self._began_s


@contextlib.contextmanager
def nginx_of(engine_url: str, folder: Path) -> Iterator[tuple[str, int] | None]:
    """Run nginx as a plain proxy of the engine, with one process, and give its URL and pid; None if it is missing."""
    program = os.environ.get("NGINX_PROGRAM") or shutil.which("nginx")
    if program is None:
        yield None
        return
    port = free_port()
    engine = urlsplit(engine_url).netloc
    temporary = "".join(
        f"{name}_temp_path {folder}/{name}; " for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        "events { worker_connections 20000; }\n"
        f"http {{ access_log off; {temporary}\n"
        f" upstream engine {{ server {engine}; keepalive 512; }}\n"
        f" server {{ listen 127.0.0.1:{port} backlog=4096;\n"
        " location / { proxy_pass http://engine; proxy_http_version 1.1;\n"
        ' proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 600s; } } }\n'
    )
    with subprocess.Popen([program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]) as process:
        try:
            wait_for(lambda: _listens(port), PATIENCE_S, "nginx")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def measure(
    ways: dict[str, tuple[str, int | None]],
    engine_url: str,
    router: RouterProcess,
    n_streams: int,
    n_tokens: int,
    rounds: int,
    report: Report,
) -> Samples:
    """Run rounds by turns. ways: by name, the URL and the process whose time counts."""
    samples = Samples()
    ttft: dict[str, list[float]] = {way: [] for way in ways}
    on_the_way: dict[str, list[float]] = {way: [] for way in ways}
    delay: dict[str, list[float]] = {way: [] for way in ways}
    gaps: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, (url, pid) in ways.items():
            processor = None if pid is None else Processor(pid)
            streams = await one_round(url, n_streams)
            used_s = 0.0 if processor is None else processor.used_s()
            report.wrong += [f"{way}: {each}" for each in await wrong_bytes(streams, engine_url, n_tokens)]
            if turn == 0:
                continue  # caches and connections are warm after it
            begun = [stream for stream in streams if stream.delays_ns]
            ttft[way] += [stream.ttft_ms for stream in begun]
            on_the_way[way] += [stream.way_ms for stream in begun]
            delays = [[each / 1e6 for each in stream.delays_ns] for stream in streams]
            delay[way] += [each for per_stream in delays for each in per_stream]
            # The engine's own unevenness is not in it: how much later a token came than the one before it.
            gaps[way] += [abs(b - a) for per_stream in delays for a, b in itertools.pairwise(per_stream)]
            cpu[way].append(used_s / (n_streams * n_tokens) * 1e6)
    case = f"{n_streams} streams of {n_tokens} tokens"
    for way in ways:
        series = OURS if way == FRONT else f"{OURS}, migration" if way == MOVING else way
        for name, part in (("p50", 0.5), ("p99", 0.99)):
            samples.add(case, f"time to first token, {name}", "ms", series, share(ttft[way], part))
            samples.add(case, f"delay of a token, {name}", "ms", series, share(delay[way], part))
            samples.add(case, f"unevenness between tokens, {name}", "ms", series, share(gaps[way], part))
        if way != DIRECT:
            samples.add(case, "processor time per token", "us", series, statistics.median(cpu[way]))
    added = {
        (name, part): share(values[FRONT], part) - share(values[DIRECT], part)
        for name, values in (("ttft", on_the_way), ("delay", delay))
        for part in (0.5, 0.99)
    }
    for way, series in ((NGINX, NGINX), (MOVING, f"{OURS}, migration")):
        for part, name in ((0.5, "p50"), (0.99, "p99")) if way in ways else ():
            added_ms = share(on_the_way[way], part) - share(on_the_way[DIRECT], part)
            samples.add(case, f"added time to first token, {name}", "ms", series, added_ms)
    per_token_us = statistics.median(cpu[FRONT])
    for name, value, most, unit in (
        ("added time to first token, p50", added["ttft", 0.5], 2.0, "ms"),
        ("added time to first token, p99", added["ttft", 0.99], 15.0, "ms"),
        ("added delay of a token, p50", added["delay", 0.5], 1.0, "ms"),
        ("added delay of a token, p99", added["delay", 0.99], None, "ms"),
        ("processor time per token", per_token_us, 60.0, "us"),
    ):
        samples.add(case, name, unit, OURS, value)
        if most is not None:
            report.bars.append(Bar(name, value <= most, f"at most {most:g} {unit}; {value:.2f}"))
    if MOVING in ways:
        with_ids_us = statistics.median(cpu[MOVING])
        name = "processor time per token with ids"
        samples.add(case, name, "us", OURS, with_ids_us)
        report.bars.append(Bar(name, with_ids_us <= 60.0, f"at most 60 us; {with_ids_us:.2f}"))
    for step, mean_ms in steps(ways[FRONT][0]).items():
        samples.add(case, f"time to {step} before the first token, mean", "ms", OURS, mean_ms)
    samples.add(case, "processes for 10,000 streams at 20 tokens/s", "", OURS, 10_000 * 20 * per_token_us / 1e6)
    wait_for(lambda: _active(router) == 0, PATIENCE_S, "the end of every booking")
    return samples


def steps(front_url: str) -> dict[str, float]:
    """Return how long a front's requests took to be tokenized and routed, in milliseconds."""
    with urlopen(f"{front_url}/metrics") as response:
        lines = [line.split() for line in response.read().decode().splitlines()]
    values = {fields[0]: float(fields[1]) for fields in lines if len(fields) == 2}
    found = {}
    for step in ("tokenize", "route"):
        name = f"kvstreams_front_{step}_seconds"
        found[step] = values[f"{name}_sum"] / values[f"{name}_count"] * 1e3
    return found


def _active(router: RouterProcess) -> int:
    return sum(row["active_requests"] for row in get_json(f"{router.url}/loads")["loads"])


def write_tokenizer(folder: Path) -> None:
    """Write the files of a tokenizer with one token per byte, and MARKERS."""
    for name, text in tokenizer_files().items():
        if name == "tokenizer.json":
            tokenizer = orjson.loads(text)
            n_tokens = len(tokenizer["model"]["vocab"])
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            tokenizer["added_tokens"] = [
                {"id": n_tokens + at, "content": marker, **flags} for at, marker in enumerate(MARKERS)
            ]
            text = orjson.dumps(tokenizer).decode()
        (folder / name).write_text(text)


def _start_engine(stack: Stack, n_tokens: int, rate: float) -> str:
    port = free_port()
    arguments = ["-m", "benchmarks.token_engine", "--port", str(port), "--tokens", str(n_tokens)]
    arguments += ["--gap-ms", str(1000 / rate), "--prefill-ms", str(PREFILL_MS)]
    child = Child("engine", arguments, stack.directory / "logs" / "engine.log", {})
    stack._children.add(child).start()
    child.wait_ready(lambda: _listens(port), PATIENCE_S)
    return f"http://127.0.0.1:{port}"


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--streams", default=200, show_default=True, help="Streams at once.")
@click.option("--tokens", default=500, show_default=True, help="Tokens of each stream.")
@click.option("--rate", default=20.0, show_default=True, help="Tokens per second of each stream.")
@click.option("--migration", is_flag=True, help="Measure a front with front_migration, too.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of each way, after one that is not counted.")
def main(json_path: Path | None, streams: int, tokens: int, rate: float, migration: bool, rounds: int) -> None:
    """Measure what the front adds. NGINX_PROGRAM names the program if it is not in the PATH."""
    report = Report("front", installed("aiohttp", "uvloop", "tokenizers"), [])
    with machinery() as parts:
        stack = parts.stack
        stack.worker("agents", router=False)
        router = stack.router("router")
        engine_url = _start_engine(stack, tokens, rate)
        uvloop.run(_register(router, engine_url))
        wait_workers(router.url, 1)
        folder = stack.directory / "model"
        folder.mkdir()
        write_tokenizer(folder)
        front = stack.front("front", [router], ["--tokenizer", f"{MODEL}={folder}"])
        moving = None
        if migration:
            options = ["--tokenizer", f"{MODEL}={folder}", "--front-migration"]
            moving = stack.front("front-migration", [router], options)
        with nginx_of(engine_url, stack.directory) as nginx:
            ways: dict[str, tuple[str, int | None]] = {DIRECT: (engine_url, None), FRONT: (front.url, front.child.pid)}
            if moving is not None:
                ways[MOVING] = (moving.url, moving.child.pid)
            if nginx is None:
                report.missing.append("nginx: it is not installed")
            else:
                ways[NGINX] = nginx
            run_in_real_time()  # only now: the processes above have inherited the usual priority
            samples = uvloop.run(measure(ways, engine_url, router, streams, tokens, rounds, report))
    report.rows = samples.rows()
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


async def _register(router: RouterProcess, engine_url: str) -> None:
    body: dict[str, Any] = {"url": engine_url, "model": MODEL, "block_size": 16}
    async with ClientSession() as http, http.put(f"{router.url}/workers/1", json=body) as answer:
        answer.raise_for_status()


if __name__ == "__main__":
    main()
