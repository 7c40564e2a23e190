"""`python -m benchmarks.http`: the router over HTTP, next to Dynamo's selection service and a handler without work.

What lives here: which servers are started, what they are asked, and the report. What must not: the client (http_load),
and the engines (wire_engines). All servers read the same events from the same sockets, and are asked by turns. Exits 1
if they disagree about what engines hold, or if an answer is an error.

Dynamo's service is used if the interpreter that `--dynamo` names has it:

    python -m venv .venv-dynamo
    .venv-dynamo/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    .venv-dynamo/bin/pip install 'pydantic<2.13.6'
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import uvloop
from aiohttp import web
from confluent_kafka import TopicPartition

from benchmarks.http_load import Connection, Done, ask, connect, pair_loop, request, select_loop
from benchmarks.machinery import Machinery, compiler_seconds, cpu_seconds, machinery
from benchmarks.report import OURS, Bar, Report, Row, Samples, installed, wide_console
from benchmarks.wire_engines import (
    BLOCK_SIZE,
    LONG_TOKENS,
    MODEL,
    SHORT_TOKENS,
    Tokens,
    WireEngines,
    Workload,
    expected_overlap,
)
from streams.kafka.clients import reader
from streams.lab.kafka.ports import free_port, free_ports_in_a_row
from streams.lab.processes import Child, Children
from streams.lab.stack import RouterProcess, get_json, wait_workers
from streams.process.waiting import wait_for
from streams.settings import as_environ
from streams.topics import topics

N_WORKERS = 8
N_PROMPTS = 64
DYNAMO = "Dynamo 1.6.1"
FLOOR = "aiohttp and uvloop alone"
OCTETS = "application/octet-stream"
JSON = "application/json"

#: How long a booking is held before it is freed, so that its add and its free cannot cancel out.
HELD_S = 0.2
VISIBLE_TIMEOUT_S = 120.0

#: A worker of a model that is asked nothing else, so that its load shows whether one booking is known.
_PROBED_WORKER = 999
_PROBE_POLL_S = 0.002

#: How long each server books before bookings are measured. The JVM of a broker that was just started compiles its code
#: in the meantime: a pair takes it 0.1 to 0.5 ms of processor time at first, and a third of that once it is done. A
#: broker of a fleet runs for months. So our router books until the JVM's compiler used less than this share of a
#: processor, or for the longest time: 30 s on a fast machine, 90 s on a slow one.
_WARM_UP_S = 10.0
_COMPILING_SHARE = 0.05
_WARM_UP_MAX_S = 120.0

#: How long other bookings are made before a second router is measured, and then its processor time.
_SETTLED_S = 4.0

#: How long the processor time of a group is measured at a time, with and without bookings, and how often. The system
#: counts it in steps of 10 ms. One round alone gave between 6 and 14 us per booking.
_GROUP_S = 10.0
_GROUP_ROUNDS = 3


#: The metric that has a limit: what a process needs to know a booking that another process of its group made.
_PER_OTHERS_BOOKING = "processor time per booking of the other process"


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test. content_type: that of its prompts."""

    series: str
    url: str
    pid: int
    content_type: str

    def select(self, prompt: Tokens) -> bytes:
        """A request that books nothing."""
        if self.series == DYNAMO:
            return request(self.url, "POST", "/select", _json({"model_name": MODEL, "token_ids": prompt.tolist()}))
        if self.content_type == OCTETS:
            return request(self.url, "POST", f"/route?model={MODEL}&update_states=false", prompt.tobytes(), OCTETS)
        body = {"model": MODEL, "token_ids": prompt.tolist(), "update_states": False}
        return request(self.url, "POST", "/route", _json(body))

    def book(self, prompt: Tokens) -> bytes:
        """A request that books."""
        if self.series == DYNAMO:
            body = {"model_name": MODEL, "token_ids": prompt.tolist()}
            return request(self.url, "POST", "/select_and_reserve", _json(body))
        if self.content_type == OCTETS:
            return request(self.url, "POST", f"/route?model={MODEL}", prompt.tobytes(), OCTETS)
        return request(self.url, "POST", "/route", _json({"model": MODEL, "token_ids": prompt.tolist()}))

    def free(self, answer: bytes) -> bytes:
        """The request that ends the booking of an answer."""
        name, path = (b"selection_id", "/reservations") if self.series == DYNAMO else (b"request_id", "/loads")
        found = re.search(rb'"' + name + rb'":\s*"([^"]+)"', answer)
        assert found is not None, answer[:200]
        return request(self.url, "DELETE", f"{path}/{found[1].decode()}")

    def overlap(self, prompt: Tokens) -> int:
        """The sum over engines of the leading blocks that they hold, as the server knows it."""
        if self.series == DYNAMO:
            body = {"model_name": MODEL, "token_ids": prompt.tolist()}
            found = json.loads(ask(self.url, "POST", "/overlap_scores", _json(body)))
            return sum(each["device_blocks"] for each in found["workers"])
        body = {"model": MODEL, "token_ids": prompt.tolist(), "update_states": False, "explain": True}
        found = json.loads(ask(self.url, "POST", "/route", _json(body)))
        return sum(each["scores"] for each in found["candidates"])


def _json(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


@dataclass
class Bench:
    """One run."""

    parts: Machinery
    engines: WireEngines
    workload: Workload
    servers: list[Server]
    seconds: float
    repeats: int
    samples: Samples
    wrong: list[str]
    idle_cpu_s: float | None = None  # of a second router in _SETTLED_S, without bookings
    warm_up_s: float = _WARM_UP_S
    warm_up_max_s: float = _WARM_UP_MAX_S

    def check_overlaps(self) -> None:
        """Check that all servers know the same blocks, and exactly those of the workload."""
        for n_tokens in (SHORT_TOKENS, LONG_TOKENS):
            prompts = self.workload.prompts(n_tokens, N_PROMPTS)
            expected = expected_overlap(self.workload, prompts)
            for server in {each.url: each for each in self.servers if each.series != FLOOR}.values():
                found = sum(map(server.overlap, prompts))
                if found != expected:
                    self.wrong.append(f"{server.series}, {n_tokens} tokens: {found} blocks, not {expected}")

    def selects(self) -> None:
        """Measure decisions that book nothing."""
        for n_tokens in (SHORT_TOKENS, LONG_TOKENS):
            prompts = self.workload.prompts(n_tokens, N_PROMPTS)
            requests = [[each.select(prompt) for prompt in prompts] for each in self.servers]
            for clients in (1, 8):
                for at in range(-1, self.repeats):  # the first round is not counted
                    for server, asked in zip(self.servers, requests, strict=True):
                        seconds = self.seconds if at >= 0 else 0.3
                        done, cpu_s, _ = self._timed(server, lambda: select_loop(server.url, asked, clients, seconds))  # noqa: B023
                        if at >= 0:
                            self._note_selects(server, n_tokens, clients, done, cpu_s)

    def _note_selects(self, server: Server, n_tokens: int, clients: int, done: Done, cpu_s: float) -> None:
        for case in self._cases(server, f"select, {n_tokens:,} tokens, {clients} clients"):
            add = self.samples.add
            if clients == 1:
                add(case, "p50", "ms", server.series, done.quantile(0.5) * 1e3)
                add(case, "p99", "ms", server.series, done.quantile(0.99) * 1e3)
            add(case, "requests", "1/s", server.series, len(done.latencies) / done.took_s)
            add(case, "server's processor time", "ms", server.series, cpu_s / len(done.latencies) * 1e3)

    def pairs(self) -> None:
        """Measure bookings that are freed 200 ms later; the floor answers the same requests."""
        prompts = self.workload.prompts(SHORT_TOKENS, N_PROMPTS)
        requests = [[each.book(prompt) for prompt in prompts] for each in self.servers]
        case = f"book and free, {SHORT_TOKENS:,} tokens, 8 clients"
        for server, asked in zip(self.servers, requests, strict=True):
            self._warm_up(server, asked, case)
        for _ in range(self.repeats):
            for server, asked in zip(self.servers, requests, strict=True):
                before = self._n_records()
                done, cpu_s, broker_s = self._book_and_free(server, asked, self.seconds)
                n_booked = len(done.latencies)
                for name in self._cases(server, case):
                    add = self.samples.add
                    add(name, "pairs", "1/s", server.series, done.n_pairs / done.took_s)
                    add(name, "booking, p50", "ms", server.series, done.quantile(0.5) * 1e3)
                    add(name, "booking, p99", "ms", server.series, done.quantile(0.99) * 1e3)
                    add(name, "server's processor time", "ms", server.series, cpu_s / n_booked * 1e3)
                    if server.series == OURS:
                        add(name, "broker's processor time", "ms", OURS, broker_s / n_booked * 1e3)
                        add(name, "records per pair", "", OURS, (self._n_records() - before) / n_booked)
                if server.series == OURS:
                    self._await_no_loads(server.url)

    def _warm_up(self, server: Server, asked: Sequence[bytes], case: str) -> None:
        if server.series != OURS:
            self._book_and_free(server, asked, self.warm_up_s)
            return

        def book() -> None:
            done, _, broker_s = self._book_and_free(server, asked, self.warm_up_s)
            for name in self._cases(server, case):
                metric = "broker's, while it warms up"
                self.samples.add(name, metric, "ms", OURS, broker_s / len(done.latencies) * 1e3)
            self._await_no_loads(server.url)

        self._until_compiled(book)

    def _until_compiled(self, pass_time: Callable[[], object]) -> None:
        """Call `pass_time`, which takes `warm_up_s`, until the broker's compiler was hardly busy meanwhile."""
        left_s = self.warm_up_max_s
        while left_s > 0:
            left_s -= self.warm_up_s
            before_s = compiler_seconds(self.parts.broker_pid)
            pass_time()
            after_s = compiler_seconds(self.parts.broker_pid)
            if before_s is None or after_s is None or after_s - before_s < _COMPILING_SHARE * self.warm_up_s:
                return

    def _book_and_free(self, server: Server, asked: Sequence[bytes], seconds: float) -> tuple[Done, float, float]:
        return self._timed(
            server,
            lambda: pair_loop(server.url, lambda number: asked[number % len(asked)], server.free, 8, seconds, HELD_S),
        )

    def processes(self, pairs_per_s: float) -> None:
        """Measure decisions that book nothing, with one process and with two on one port; and bookings of one of two.

        Two are faster only where there are cores for both, for the client and for what else runs.
        """
        one = next(each for each in self.servers if each.series == OURS and each.content_type == OCTETS)
        group = self.parts.stack.router("group", processes=2, process_port=free_ports_in_a_row(2))
        wait_workers(group.url, N_WORKERS)
        pids = [child.pid for child in psutil.Process(group.child.pid).children()]
        requests = [one.select(prompt) for prompt in self.workload.prompts(SHORT_TOKENS, N_PROMPTS)]
        urls = {"1 process": (one.url, [one.pid]), "2 processes": (group.url, pids)}
        for at in range(-1, self.repeats):
            for name, (url, of) in urls.items():
                before_s = sum(map(cpu_seconds, of))
                done = select_loop(url, requests, 8, self.seconds if at >= 0 else 0.5)
                used_s = sum(map(cpu_seconds, of)) - before_s
                if at >= 0:
                    case = f"select, {SHORT_TOKENS:,} tokens, 8 clients, {name}"
                    self.samples.add(case, "requests", "1/s", OURS, len(done.latencies) / done.took_s)
                    self.samples.add(
                        case,
                        "processor time per request, all processes",
                        "us",
                        OURS,
                        used_s / len(done.latencies) * 1e6,
                    )
        if pairs_per_s:
            self._group_bookings(group, pairs_per_s)
        group.child.stop()

    def _group_bookings(self, group: RouterProcess, pairs_per_s: float) -> None:
        """Measure what a booking of one process, and its end, cost the other one, which is asked nothing meanwhile.

        What it needs without bookings is measured by turns, and subtracted.
        """
        own = [f"http://{group.settings.host}:{group.settings.process_port + number}" for number in range(2)]
        named = dict(re.findall(r"process (\d) has pid (\d+)", group.child.log_path.read_text()))
        other = int(named["2"])
        for url in own:
            wait_workers(url, N_WORKERS)
        idle_s = used_s = n_pairs = 0.0
        for _ in range(_GROUP_ROUNDS):  # by turns, since what is subtracted is several times the difference
            time.sleep(_SETTLED_S)
            idle_s += self._used_s(other)
            load = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.http", "--load", own[0]),
                    *("--seconds", str(_GROUP_S + 3 * _SETTLED_S)),  # it is ended before that
                    *("--rate", str(pairs_per_s)),
                ]
            )
            try:
                time.sleep(_SETTLED_S)
                before = self._n_records()
                used_s += self._used_s(other)
                n_pairs += (self._n_records() - before) / 2
            finally:
                load.terminate()
                load.wait()
        case = f"bookings of one of two processes, {pairs_per_s:.0f} pairs/s"
        took_s = _GROUP_ROUNDS * _GROUP_S
        self.samples.add(case, "pairs", "1/s", OURS, n_pairs / took_s)
        self.samples.add(case, _PER_OTHERS_BOOKING, "us", OURS, (used_s - idle_s) / n_pairs * 1e6)
        self.samples.add(case, "other process, without bookings", "ms/s", OURS, idle_s / took_s * 1e3)

    @staticmethod
    def _used_s(pid: int) -> float:
        """Processor time that a process uses in _GROUP_S."""
        before_s = cpu_seconds(pid)
        time.sleep(_GROUP_S)
        return cpu_seconds(pid) - before_s

    def visibility(self, n_probes: int, pairs_per_s: float) -> None:
        """Measure when a second router knows a booking, while other bookings are made at this rate.

        And what each of these costs it, if the rate is not 0 and 0 was measured before.
        """
        ours = next(each for each in self.servers if each.series == OURS and each.content_type == OCTETS)
        second = self.parts.stack.router("second")
        wait_workers(second.url, N_WORKERS)
        worker = {"url": "http://probed", "model": "probed", "block_size": BLOCK_SIZE}
        ask(ours.url, "PUT", f"/workers/{_PROBED_WORKER}", _json(worker))
        wait_workers(second.url, N_WORKERS + 1)
        case = f"a booking at another router, {pairs_per_s:.0f} pairs/s"
        load = subprocess.Popen(  # in a process of its own, so that the probe is not delayed by it
            [
                *(sys.executable, "-m", "benchmarks.http", "--load", ours.url),
                *("--seconds", str(self.warm_up_max_s + n_probes + 3 * _SETTLED_S)),  # it is ended before that
                *("--rate", str(pairs_per_s)),
            ]
        )
        try:
            time.sleep(_SETTLED_S)
            if pairs_per_s:  # a second reader makes the broker do what it has not done before
                self._until_compiled(lambda: time.sleep(self.warm_up_s))
            before_s, records_before = cpu_seconds(second.child.pid), self._n_records()
            time.sleep(_SETTLED_S)
            cpu_s, n_records = cpu_seconds(second.child.pid) - before_s, self._n_records() - records_before
            found = sorted(uvloop.run(self._probe(ours.url, second.url, n_probes)))
        finally:
            load.terminate()
            load.wait()
            second.child.stop()
        self.samples.add(case, "known after, p50", "ms", OURS, found[len(found) // 2] * 1e3)
        self.samples.add(case, "known after, p99", "ms", OURS, found[int(len(found) * 0.99)] * 1e3)
        self.samples.add(case, "other router's processor time", "ms/s", OURS, cpu_s / _SETTLED_S * 1e3)
        if not pairs_per_s:
            self.idle_cpu_s = cpu_s
            return
        self.samples.add(case, "pairs read there", "1/s", OURS, n_records / 2 / _SETTLED_S)
        if self.idle_cpu_s is not None and n_records:
            per_pair_us = (cpu_s - self.idle_cpu_s) / (n_records / 2) * 1e6
            self.samples.add(case, "other router's processor time per pair", "us", OURS, per_pair_us)

    @staticmethod
    async def _probe(first: str, second: str, n_probes: int) -> list[float]:
        """Book at one router, and look at the other one until it knows that; returns the seconds of each probe.

        Over one connection to each: what the probe itself needs delays what it measures.
        """
        (there,), (here,) = await connect(first, 1), await connect(second, 1)
        look = request(second, "GET", "/loads")

        async def call(connection: Connection, asked: bytes) -> bytes:
            status, body = await connection.ask(asked)
            if not 200 <= status < 300:
                raise ConnectionError(f"{status} {body[:300]!r}")
            return body

        async def await_requests(n: int) -> None:
            while True:
                rows = json.loads(await call(here, look))["loads"]
                if sum(row["active_requests"] for row in rows if row["worker_id"] == _PROBED_WORKER) == n:
                    return
                await asyncio.sleep(_PROBE_POLL_S)

        found = []
        for number in range(n_probes):
            path, body = f"/loads/probe-{number}", {"worker_id": _PROBED_WORKER, "block_hashes": [number + 1]}
            began = time.perf_counter()
            await call(there, request(first, "POST", path, _json(body)))
            await await_requests(1)
            found.append(time.perf_counter() - began)
            await call(there, request(first, "DELETE", path))
            await await_requests(0)
        for each in (there, here):
            each.close()
        return found

    def _timed(self, server: Server, run: Callable[[], Done]) -> tuple[Done, float, float]:
        """Run a loop; return what it did, and the processor time of the server and of the broker."""
        before_s, broker_before_s = cpu_seconds(server.pid), cpu_seconds(self.parts.broker_pid)
        done = run()
        if done.statuses:
            self.wrong.append(f"{server.series}: answers with status {done.statuses}")
        cpu_s, broker_s = cpu_seconds(server.pid) - before_s, cpu_seconds(self.parts.broker_pid) - broker_before_s
        return done, cpu_s, broker_s

    def _cases(self, server: Server, case: str) -> list[str]:
        """Names of the cases to which a figure belongs: ours has one for each form of a prompt."""
        forms = {JSON: "JSON", OCTETS: "octets"}
        if server.series == DYNAMO:  # it takes JSON only
            return [f"{case}, {form}" for form in forms.values()]
        return [f"{case}, {forms[server.content_type]}"]

    def _n_records(self) -> int:
        topic = topics(self.parts.settings).router_loads
        consumer = reader(self.parts.settings)
        try:
            ends = [consumer.get_watermark_offsets(TopicPartition(topic.name, n)) for n in range(topic.partitions)]
        finally:
            consumer.close()
        return sum(end[1] for end in ends if end is not None)

    @staticmethod
    def _await_no_loads(url: str) -> None:
        def none() -> bool:
            return not any(row["active_requests"] for row in get_json(f"{url}/loads")["loads"])

        wait_for(none, VISIBLE_TIMEOUT_S, "all bookings to be freed")


def _load_process(url: str, seconds: float, rate: float) -> None:
    """Book and free at a rate until the time is over."""
    if rate <= 0:
        time.sleep(seconds)
        return
    prompts = Workload(N_WORKERS, 1, seed=11).prompts(SHORT_TOKENS, N_PROMPTS)
    server = Server(OURS, url, 0, OCTETS)
    requests = [server.book(prompt) for prompt in prompts]
    pair_loop(url, lambda number: requests[number % len(requests)], server.free, 4, seconds, HELD_S, 4 / rate)


def _serve_floor(port: int) -> None:
    """Serve a handler that reads the body and answers with a constant."""
    answer = _json({"request_id": "r", "worker_id": 1, "dp_rank": 0, "overlap_blocks": 93, "request_blocks": 128})

    async def handle(asked: web.Request) -> web.Response:
        await asked.read()
        return web.Response(body=answer, content_type=JSON)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/route", handle)
    app.router.add_delete("/loads/{request_id}", handle)
    web.run_app(app, host="127.0.0.1", port=port, loop=uvloop.new_event_loop(), print=None, access_log=None)


def _has_dynamo(python: str) -> bool:
    found = subprocess.run([python, "-c", "import dynamo.select_service.main"], capture_output=True, check=False)
    return found.returncode == 0


def _answers(url: str) -> bool:
    try:
        get_json(url)
    except ValueError:
        return True  # an answer that is not JSON
    except OSError:
        return False
    return True


@contextmanager
def servers_of(
    parts: Machinery, engines: WireEngines, dynamo: str | None, children: Children
) -> Iterator[list[Server]]:
    """Start the servers under test."""
    logs = parts.stack.directory / "logs"
    parts.stack.worker(router=False)
    router = parts.stack.router("router")
    arguments = ["-m", "streams.cli", "bridge"]
    for each in engines.engines:
        arguments += ["--engine", f"id={each.worker_id},url={each.url},events={each.events},replay={each.replay}"]
    children.add(Child("bridge", arguments, logs / "bridge.log", as_environ(parts.settings))).start()
    wait_workers(router.url, N_WORKERS)
    servers = [Server(OURS, router.url, router.child.pid, form) for form in (JSON, OCTETS)]
    port = free_port()
    floor = children.add(
        Child("floor", ["-m", "benchmarks.http", "--floor", str(port)], logs / "floor.log", {})
    ).start()
    servers += [Server(FLOOR, f"http://127.0.0.1:{port}", floor.pid, form) for form in (JSON, OCTETS)]
    wait_for(lambda: _answers(servers[-1].url), 30.0, "the floor to listen")
    with ExitStack() as stack:
        if dynamo is not None:
            servers.append(_start_dynamo(dynamo, engines, logs / "dynamo.log", stack))
        time.sleep(1.5)  # subscriptions reach the sockets
        yield servers


def _start_dynamo(python: str, engines: WireEngines, log_path: Path, stack: ExitStack) -> Server:
    url = f"http://127.0.0.1:{free_port()}"
    command = [python, "-m", "dynamo.select_service", "--port", url.rpartition(":")[2]]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "DYN_LOG": "error"})
    stack.callback(process.wait)
    stack.callback(process.terminate)
    wait_for(lambda: _answers(url), 60.0, "Dynamo to listen")
    for each in engines.engines:
        body = {
            "worker_id": each.worker_id, "model_name": MODEL, "endpoint": each.url, "block_size": BLOCK_SIZE,
            "kv_events_endpoint": each.events, "replay_endpoint": each.replay, "total_kv_blocks": 1_000_000,
            "max_num_batched_tokens": 8192,
        }  # fmt: skip
        ask(url, "POST", "/workers", _json(body))
    return Server(DYNAMO, url, process.pid, JSON)


def _await_blocks(servers: Sequence[Server], workload: Workload) -> None:
    last = {each.worker_id: each.tokens for each in workload.documents}
    prompts = list(last.values())
    expected = expected_overlap(workload, prompts)
    for server in {each.url: each for each in servers if each.series != FLOOR}.values():
        wait_for(
            lambda: sum(map(server.overlap, prompts)) == expected,  # noqa: B023
            VISIBLE_TIMEOUT_S,
            f"all blocks at {server.series}",
        )


def _bars(rows: Sequence[Row]) -> list[Bar]:
    """The requirements of the project on these figures."""

    def value(case: str, metric: str, peer: str = "") -> Row | None:
        return next(
            (row for row in rows if row.case == case and row.metric == metric and peer in (row.peer or "")), None
        )

    bars = []

    def ratio(name: str, case: str, metric: str, limit: float, *, least: bool = False) -> None:
        row = value(case, metric, DYNAMO)
        found = None if row is None else row.ratio
        held = None if found is None else found >= limit if least else found <= limit
        words = "at least" if least else "at most"
        bars.append(Bar(name, held, f"{words} {limit:g} times Dynamo's" + ("" if found is None else f"; {found:.2f}")))

    def most(name: str, case: str, metric: str, limit: float, unit: str) -> None:
        row = value(case, metric)
        figures = f"at most {limit:g} {unit}" + ("" if row is None else f"; {row.value:.3f}")
        bars.append(Bar(name, None if row is None else row.value <= limit, figures))

    for form, short_p50, long_p50 in (("octets", 1.0, 0.2), ("JSON", 1.1, 0.5)):
        short, long = (f"select, {n:,} tokens, 1 clients, {form}" for n in (SHORT_TOKENS, LONG_TOKENS))
        ratio(f"{form}: p50 at {SHORT_TOKENS:,} tokens", short, "p50", short_p50)
        ratio(f"{form}: p50 at {LONG_TOKENS:,} tokens", long, "p50", long_p50)
        if form == "octets":
            ratio(f"{form}: p99 at {SHORT_TOKENS:,} tokens", short, "p99", short_p50)
            ratio(f"{form}: p99 at {LONG_TOKENS:,} tokens", long, "p99", long_p50)
            for n_tokens, least in ((SHORT_TOKENS, 0.8), (LONG_TOKENS, 6.0)):
                case = f"select, {n_tokens:,} tokens, 8 clients, {form}"
                ratio(f"{form}: requests per second at {n_tokens:,} tokens", case, "requests", least, least=True)
    case = f"book and free, {SHORT_TOKENS:,} tokens, 8 clients, octets"
    ratio("book and free: pairs per second", case, "pairs", 0.45, least=True)
    most("book and free: the router's processor time", case, "server's processor time", 0.3, "ms per pair")
    most("book and free: the broker's processor time", case, "broker's processor time", 0.1, "ms per pair")
    records = value(case, "records per pair")
    if records is not None:
        bars.append(Bar("each pair is two records", records.value >= 1.99, f"at least 1.99; {records.value:.2f}"))
    one, two = (
        value(f"select, {SHORT_TOKENS:,} tokens, 8 clients, {n}", "requests") for n in ("1 process", "2 processes")
    )
    if one is not None and two is not None:
        # Not a bar where client, broker and both processes share fewer cores.
        ratio_found = two.value / one.value
        held = ratio_found >= 1.7 if (os.cpu_count() or 1) >= 8 else None
        bars.append(
            Bar("two processes on one port: requests per second", held, f"at least 1.7 times; {ratio_found:.2f}")
        )
    for row in rows:
        if row.metric == "known after, p99":
            most(row.case, row.case, row.metric, 100.0, "ms at p99")
        if row.metric == _PER_OTHERS_BOOKING:
            most(f"{row.case}: processor time of the other one", row.case, row.metric, 60.0, "us per pair")
    return bars


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--quick", is_flag=True, help="A smoke test: few blocks, short runs.")
@click.option("--dynamo", default=".venv-dynamo/bin/python", show_default=True, help="Interpreter that has Dynamo.")
@click.option("--seconds", default=4.0, show_default=True, help="Duration of each run.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each case, by turns.")
@click.option("--blocks", default=200_000, show_default=True, help="Blocks that the engines store.")
@click.option("--case", "cases", multiple=True, type=click.Choice(["select", "pairs", "visible", "processes"]))
@click.option(
    "--visible-rate",
    default=1000.0,
    show_default=True,
    help="Pairs per second next to others.",
)
@click.option("--floor", type=int, hidden=True, help="Serve the floor on this port.")
@click.option("--load", hidden=True, help="Only book and free at this router.")
@click.option("--rate", default=0.0, hidden=True)
def main(
    json_path: Path | None,
    quick: bool,
    dynamo: str,
    seconds: float,
    repeats: int,
    blocks: int,
    cases: tuple[str, ...],
    visible_rate: float,
    floor: int | None,
    load: str | None,
    rate: float,
) -> None:
    """Measure decisions and bookings over HTTP, next to Dynamo's selection service."""
    if floor is not None:
        _serve_floor(floor)
        return
    if load is not None:
        _load_process(load, seconds, rate)
        return
    if quick:
        seconds, repeats, blocks = min(seconds, 1.0), 1, min(blocks, 20_000)
    report = Report("http", installed("aiohttp", "uvloop", "confluent-kafka"), [])
    samples = Samples()
    python = dynamo if Path(dynamo).exists() and _has_dynamo(dynamo) else None
    if python is None:
        report.missing.append(f"{DYNAMO}: {dynamo} is not an interpreter that has it")
    workload = Workload(N_WORKERS, blocks)
    with (
        machinery(block_size=BLOCK_SIZE) as parts,
        WireEngines(N_WORKERS) as engines,
        Children() as children,
        servers_of(parts, engines, python, children) as servers,
    ):
        engines.publish(workload.batches())
        _await_blocks(servers, workload)
        bench = Bench(parts, engines, workload, servers, seconds, repeats, samples, report.wrong)
        if quick:
            bench.warm_up_s = bench.warm_up_max_s = 1.0
        bench.check_overlaps()
        if not cases or "pairs" in cases:
            bench.pairs()
        if not cases or "select" in cases:
            bench.selects()
        if not cases or "processes" in cases:
            bench.processes(visible_rate)
        if not cases or "visible" in cases:
            for pairs_per_s in (0.0, visible_rate):
                bench.visibility(30 if quick else 1000, pairs_per_s)
        bench.check_overlaps()
    report.rows = samples.rows()
    report.bars = _bars(report.rows)
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
