"""`python -m benchmarks.decision_log`: what the decision log costs a router.

What lives here: two routers, one with the log and one without, which are asked by turns, and the report. What must not:
the client (http_load). Each router has a scope of its own, so that neither reads the other's bookings.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

from benchmarks.http_load import ask, pair_loop, request
from benchmarks.machinery import Machinery, cpu_seconds, machinery
from benchmarks.report import OURS, Bar, Report, Row, Samples, installed, wide_console
from streams.core.routing.selection import RouterMode
from streams.local.processes import Children
from streams.local.stack import Stack, get_bytes, wait_workers
from streams.topics import topics

BLOCK_SIZE = 16
MODEL = "m"
N_PROMPTS = 64
N_TOKENS = 2048
OCTETS = "application/octet-stream"

#: The series of the router without the log.
WITHOUT = "without the log"

#: As in benchmarks.http.
HELD_S = 0.2
CLIENTS = 8

#: The requirement of the project: the log costs at most this share of the throughput.
COST_MAX = 0.05

_RECORDED = re.compile(rb"^kvstreams_decisions_(un)?recorded_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Server:
    """A router under test."""

    series: str
    url: str
    pid: int

    def counts(self) -> tuple[int, int]:
        """Decisions that were recorded, and those that were dropped."""
        found = {un: float(value) for un, value in _RECORDED.findall(get_bytes(f"{self.url}/metrics"))}
        return int(found[b""]), int(found[b"un"])


def _server(parts: Machinery, children: Children, mode: str, n_workers: int, *, log: bool) -> Server:
    name = f"{mode}-{n_workers}-{'on' if log else 'off'}"
    settings = replace(
        parts.settings, topic_prefix=f"{parts.settings.topic_prefix}{name}-", router_mode=RouterMode(mode)
    )
    router = Stack(settings, parts.stack.directory / name, children).router("router", decision_log=log)
    for number in range(n_workers):
        worker = {"url": f"http://engine-{number}", "model": MODEL, "block_size": BLOCK_SIZE}
        ask(router.url, "PUT", f"/workers/{number + 1}", json.dumps(worker).encode())
    wait_workers(router.url, n_workers)
    return Server(OURS if log else WITHOUT, router.url, router.child.pid)


def _free(url: str, answer: bytes) -> bytes:
    found = re.search(rb'"request_id":\s*"([^"]+)"', answer)
    assert found is not None, answer[:200]
    return request(url, "DELETE", f"/loads/{found[1].decode()}")


def _measure(servers: Sequence[Server], case: str, seconds: float, repeats: int, samples: Samples) -> list[str]:
    """Ask the servers by turns; return what went wrong."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 1 << 17, (N_PROMPTS, N_TOKENS), dtype=np.uint32)
    wrong = []
    for at in range(-1, repeats):  # the first round is not counted
        for server in servers if at % 2 else reversed(servers):
            asked = [request(server.url, "POST", f"/route?model={MODEL}", each.tobytes(), OCTETS) for each in prompts]
            before_s = cpu_seconds(server.pid)
            done = pair_loop(
                server.url,
                lambda number: asked[number % N_PROMPTS],  # noqa: B023
                lambda answer: _free(server.url, answer),  # noqa: B023
                CLIENTS,
                seconds if at >= 0 else 1.0,
                HELD_S,
            )
            cpu_s = cpu_seconds(server.pid) - before_s
            if done.statuses:
                wrong.append(f"{case}, {server.series}: answers with status {done.statuses}")
            if at >= 0:
                samples.add(case, "pairs", "1/s", server.series, done.n_pairs / done.took_s)
                samples.add(case, "processor time", "us", server.series, cpu_s / len(done.latencies) * 1e6)
                samples.add(case, "booking, p99", "ms", server.series, done.quantile(0.99) * 1e3)
    return wrong


def _bar(row: Row) -> Bar:
    limit = 1.0 / (1.0 - COST_MAX)
    held = None if row.ratio is None else row.ratio <= limit
    cost = "" if row.ratio is None else f"; {1.0 - 1.0 / row.ratio:.1%}"
    return Bar(f"{row.case}: the log's share of the throughput", held, f"at most {COST_MAX:.0%}{cost}")


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--seconds", default=4.0, show_default=True, help="Duration of each run.")
@click.option("--repeats", default=7, show_default=True, help="Runs of each case, by turns.")
@click.option("--workers", "fleets", default="8,64", show_default=True, help="Numbers of ranks.")
@click.option("--mode", "modes", default="kv,expected-time", show_default=True, help="Router modes.")
def main(json_path: Path | None, seconds: float, repeats: int, fleets: str, modes: str) -> None:
    """Measure bookings that are freed 200 ms later, with the decision log and without it."""
    report = Report("decision_log", installed("aiohttp", "uvloop", "confluent-kafka"), [])
    samples = Samples()
    with machinery(block_size=BLOCK_SIZE) as parts:
        for mode in modes.split(","):
            for n_workers in map(int, fleets.split(",")):
                case = f"{mode}, {n_workers} ranks"
                with Children() as children:
                    servers = [_server(parts, children, mode, n_workers, log=log) for log in (False, True)]
                    report.wrong += _measure(servers, case, seconds, repeats, samples)
                    recorded, dropped = servers[1].counts()
                    if dropped or not recorded:
                        report.wrong.append(f"{case}: {recorded} decisions recorded, {dropped} dropped")
                    prefix = f"{parts.settings.topic_prefix}{mode}-{n_workers}-on-"
                    name = topics(replace(parts.settings, topic_prefix=prefix)).router_decisions.name
                    samples.add(case, "bytes per decision", "", OURS, parts.topic_bytes(name) / max(1, recorded))
    report.rows = samples.rows()
    report.bars = [_bar(row) for row in report.rows if row.metric == "processor time"]
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
