"""`python -m benchmarks.decision_log`: what the decision log costs a router.

What lives here: routers with the log and routers without, which are asked by turns, and the report. What must not: the
client (http_load).

Two processes that run the same program can differ by more than the log costs, because their memory lies elsewhere.
Therefore a router with the log is compared with itself: it records a share of all requests, chosen by their ids, and
short turns of requests that it records alternate with turns of requests that it does not. What differs is the
processor time per request, of the whole process and of the thread that answers: throughput of a router whose answering
thread is saturated is the inverse of the latter. The floor is what the same comparison finds where there is no
difference, in routers without the log.

A machine becomes faster and slower within seconds: turns of the same router differ by 10 %, and two neighbours by less.
Each turn that is recorded is therefore compared with its neighbour that is not, and the cost is the median of these
ratios. Medians over all turns of each kind, compared with each other, would vary by three times as much: by 3 % with 24
turns. A router encodes what it noted in batches of 256 decisions, so a turn has a multiple of that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np
import uvloop

from benchmarks.http_load import Connection, ask, connect, request
from benchmarks.machinery import Machinery, machinery
from benchmarks.report import OURS, Bar, Report, Samples, installed, wide_console
from streams.core.routing.selection import RouterMode
from streams.lab.processes import Children
from streams.lab.stack import Stack, get_bytes, wait_workers
from streams.topics import topics

BLOCK_SIZE = 16
MODEL = "m"
N_PROMPTS = 64
N_TOKENS = 2048
OCTETS = "application/octet-stream"

#: The share of requests that a router with the log records. Which ones, follows from their ids.
SHARE = 0.5

#: Bookings that each client holds, and the number of clients.
HELD = 4
CLIENTS = 8

#: A router encodes what it noted within a quarter of a second.
SETTLE_S = 0.5

#: The requirement of the project: the log costs at most this share of the throughput.
COST_MAX = 0.05

#: The thread that answers is the one that uses most.
METRICS = ("answering thread", "whole process")

#: Pairs of turns of each router that are not counted.
WARM_UP = 2

#: Of a normal distribution: standard deviations between its quartiles, and the standard error of the median of one
#: value.
_QUARTILES_SDS, _MEDIAN_ERROR = 1.349, 1.253

_NS = 1e9
_RECORDED = re.compile(rb"^kvstreams_decisions_(un)?recorded_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Server:
    """A router under test. times: processor time per request of each turn in us, by metric and by what is recorded."""

    name: str
    has_log: bool
    prefix: str
    url: str
    pid: int
    ids: Mapping[bool, Iterator[str]]
    connections: list[Connection] = field(default_factory=list)
    times: dict[str, dict[bool, list[float]]] = field(
        default_factory=lambda: {metric: {True: [], False: []} for metric in METRICS}
    )

    def counts(self) -> tuple[int, int]:
        """Decisions that were recorded, and those that were dropped."""
        found = {un: float(value) for un, value in _RECORDED.findall(get_bytes(f"{self.url}/metrics"))}
        return int(found[b""]), int(found[b"un"])


def ids(is_recorded: bool) -> Iterator[str]:
    """Request ids that a router with this share records, or those that it does not."""
    for number in itertools.count():
        found = f"request-{number}"
        if (zlib.crc32(found.encode()) < round(SHARE * (1 << 32))) is is_recorded:
            yield found


def thread_times(pid: int) -> dict[int, float]:
    """Processor time of each thread of a process, in seconds."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / _NS
        except (OSError, ProcessLookupError):  # the thread has ended
            continue
    return found


def cost(servers: Sequence[Server], metric: str) -> tuple[float, float]:
    """The share of the throughput that recording costs in these routers, by neighbouring turns, and its standard error.

    The error is that of a median of many values, estimated from their quartiles.
    """
    shares = [
        1.0 - without / recorded
        for server in servers
        for recorded, without in zip(server.times[metric][True], server.times[metric][False], strict=True)
    ]
    lower, middle, upper = statistics.quantiles(shares, n=4)
    return middle, (upper - lower) / _QUARTILES_SDS * _MEDIAN_ERROR / len(shares) ** 0.5


def _server(parts: Machinery, children: Children, mode: str, n_workers: int, name: str, *, log: bool) -> Server:
    settings = replace(
        parts.settings,
        topic_prefix=f"{parts.settings.topic_prefix}{mode}-{n_workers}-{name}-",
        router_mode=RouterMode(mode),
        decision_log_share=SHARE,
    )
    router = Stack(settings, parts.stack.directory / f"{mode}-{n_workers}-{name}", children).router(
        "router", decision_log=log
    )
    for number in range(n_workers):
        worker = {"url": f"http://engine-{number}", "model": MODEL, "block_size": BLOCK_SIZE}
        ask(router.url, "PUT", f"/workers/{number + 1}", json.dumps(worker).encode())
    wait_workers(router.url, n_workers)
    return Server(name, log, settings.topic_prefix, router.url, router.child.pid, {True: ids(True), False: ids(False)})


async def _pairs(server: Server, is_recorded: bool, n: int, prompts: Sequence[bytes]) -> dict[int, int]:
    """Book and free n requests with several clients; return statuses that are no success."""
    if not server.connections:
        server.connections = await connect(server.url, CLIENTS)
    numbers = iter(range(n))
    wrong: dict[int, int] = {}

    async def ask_(connection: Connection, asked: bytes) -> None:
        status, _ = await connection.ask(asked)
        if not 200 <= status < 300:
            wrong[status] = wrong.get(status, 0) + 1

    async def one(connection: Connection) -> None:
        held: deque[str] = deque()
        for number in numbers:
            name = next(server.ids[is_recorded])
            held.append(name)
            path = f"/route?model={MODEL}&request_id={name}"
            await ask_(connection, request(server.url, "POST", path, prompts[number % len(prompts)], OCTETS))
            if len(held) > HELD:
                await ask_(connection, request(server.url, "DELETE", f"/loads/{held.popleft()}"))
        while held:
            await ask_(connection, request(server.url, "DELETE", f"/loads/{held.popleft()}"))

    await asyncio.gather(*map(one, server.connections))
    return wrong


def _turn(
    runner: asyncio.Runner, server: Server, is_recorded: bool, n: int, prompts: Sequence[bytes], *, counts: bool
) -> dict[int, int]:
    """One turn of a router; return statuses that are no success. counts: whether its time is kept."""
    before = thread_times(server.pid)
    wrong = runner.run(_pairs(server, is_recorded, n, prompts))
    used = {thread: at - before.get(thread, 0.0) for thread, at in thread_times(server.pid).items()}
    if counts:
        for metric, used_s in zip(METRICS, (max(used.values()), sum(used.values())), strict=True):
            server.times[metric][is_recorded].append(used_s / n * 1e6)
    return wrong


def _measure(servers: Sequence[Server], case: str, n: int, repeats: int) -> list[str]:
    """Ask the routers by turns; return what went wrong."""
    rng = np.random.default_rng(1)
    prompts = [each.tobytes() for each in rng.integers(0, 1 << 17, (N_PROMPTS, N_TOKENS), dtype=np.uint32)]
    wrong = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for at in range(-WARM_UP, repeats):
            for server in servers if at % 2 else list(reversed(servers)):
                # A turn and its neighbour make a pair. Which comes first changes, so that a drift is in both.
                for is_recorded in (True, False) if at % 4 < 2 else (False, True):
                    statuses = _turn(runner, server, is_recorded, n, prompts, counts=at >= 0)
                    if statuses:
                        wrong.append(f"{case}, {server.name}: answers with status {statuses}")
        for server in servers:
            for each in server.connections:
                each.close()
    return wrong


def _check(parts: Machinery, samples: Samples, case: str, server: Server, n: int) -> list[str]:
    """Add the size of a recorded decision; return what went wrong. n: how many decisions are to be recorded."""
    recorded, dropped = server.counts()
    name = topics(replace(parts.settings, topic_prefix=server.prefix)).router_decisions.name
    samples.add(case, "bytes per decision", "", OURS, parts.topic_bytes(name) / max(1, recorded))
    if dropped or recorded != n:
        return [f"{case}, {server.name}: {recorded} of {n} decisions recorded, {dropped} dropped"]
    return []


def _note(samples: Samples, case: str, servers: Sequence[Server]) -> list[Bar]:
    """Add the rows of a case; return its bars."""
    bars = []
    for metric in METRICS:
        with_log = [each for each in servers if each.has_log]
        without = [each for each in servers if not each.has_log]
        for each in servers:
            for is_recorded, times in each.times[metric].items():
                series = (OURS if is_recorded else "not recorded") if each.has_log else "router without the log"
                for time_us in times:
                    samples.add(case, f"{metric}, per request", "us", series, time_us)
        (middle, error), (floor, _) = cost(with_log, metric), cost(without, metric)
        by_router = ", ".join(f"{cost([each], metric)[0]:.1%}" for each in with_log)
        levels = [statistics.median(each.times[metric][False]) for each in servers]
        bars.append(
            Bar(
                f"{case}: the log's share of the throughput, {metric}",
                middle <= COST_MAX,
                f"at most {COST_MAX:.0%}; {middle:.1%} ± {error:.1%} ({by_router} by router; floor {floor:+.1%}; "
                f"identical routers differ by {max(levels) / min(levels) - 1.0:.0%})",
            )
        )
    return bars


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--requests", "n", default=512, show_default=True, help="Requests of each turn.")
@click.option("--repeats", default=60, show_default=True, help="Pairs of turns of each router.")
@click.option("--routers", default=2, show_default=True, help="Routers with the log, and as many without.")
@click.option("--workers", "fleets", default="8,64", show_default=True, help="Numbers of ranks.")
@click.option("--mode", "modes", default="kv,expected-time", show_default=True, help="Router modes.")
def main(json_path: Path | None, n: int, repeats: int, routers: int, fleets: str, modes: str) -> None:
    """Measure the processor time of requests that the decision log records, and of those that it does not."""
    report = Report("decision_log", installed("aiohttp", "uvloop", "confluent-kafka"), [])
    samples = Samples()
    with machinery(block_size=BLOCK_SIZE) as parts:
        for mode in modes.split(","):
            for n_workers in map(int, fleets.split(",")):
                case = f"{mode}, {n_workers} ranks"
                with Children() as children:
                    servers = [
                        _server(parts, children, mode, n_workers, f"{'on' if log else 'off'}-{number}", log=log)
                        for number in range(routers)
                        for log in (True, False)
                    ]
                    report.wrong += _measure(servers, case, n, repeats)
                    report.bars += _note(samples, case, servers)
                    time.sleep(SETTLE_S)
                    for server in servers:
                        if server.has_log:
                            report.wrong += _check(parts, samples, case, server, (repeats + WARM_UP) * n)
    report.rows = samples.rows()
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
