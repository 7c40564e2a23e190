"""`python -m benchmarks.rolling_restart`: two routers are restarted in turn while a client books through both.

What lives here: the load, the restarts, and the checks: no request is lost, and loads are right at the end. What must
not: the client (streams.client). Exits 1 if a request fails, a report is lost, or a load is wrong.

A request is booked, reported as prefilled, and freed 200 ms after its booking, so that a booking and its end never meet
in a queue. There are no engines: what they do has no part in it.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import uvloop
from aiohttp import ClientSession

from benchmarks.machinery import machinery
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams.client import Booking, KvRouterClient
from streams.errors import KvStreamsError
from streams.lab.stack import READY_TIMEOUT_S, RouterProcess, get_json, is_ready

MODEL = "m"
BLOCK_SIZE = 16
WORKERS = 8
PROMPT_TOKENS = 512
PROMPTS = 64

#: How long each request is active.
ACTIVE_S = 0.2

#: How long the client repeats a refused call. A router is back within seconds.
RETRY_TIMEOUT_S = 60.0

#: Bookings that are left active at the end, so that right loads are not just empty ones.
KEPT = 50

#: How long bookings may take to reach every router.
SYNC_TIMEOUT_S = 30.0


class Load:
    """Requests at a fixed rate, and what became of them."""

    def __init__(self, client: KvRouterClient, rate: float, seed: int) -> None:
        self._client = client
        self._rate = rate
        self._prompts = [[base * 1000 + n for n in range(PROMPT_TOKENS)] for base in range(PROMPTS)]
        self._rng = random.Random(seed)
        self._running: set[asyncio.Task[None]] = set()
        self.over = False
        self.sent = 0
        self.latencies_ms: list[float] = []
        self.failures: Counter[str] = Counter()

    async def run(self) -> None:
        """Send requests until `over` is set, and wait for the last one."""
        began_s = time.perf_counter()
        while not self.over:
            due_s = began_s + self.sent / self._rate
            late_s = due_s - time.perf_counter()
            if late_s > 0.0:
                await asyncio.sleep(late_s)
            self.sent += 1
            task = asyncio.create_task(self._request())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.gather(*self._running)

    async def _request(self) -> None:
        began_s = time.perf_counter()
        try:
            booking = await self._client.book(self._rng.choice(self._prompts))
        except KvStreamsError as exc:
            self.failures[f"{type(exc).__name__}: {exc}"] += 1
            return
        self.latencies_ms.append((time.perf_counter() - began_s) * 1000.0)
        async with booking:
            booking.prefill_complete()
            await asyncio.sleep(ACTIVE_S)


async def restart(router: RouterProcess) -> float:
    """Restart a router as a rollout does; returns the seconds without it."""
    began_s = time.perf_counter()
    await asyncio.to_thread(router.child.stop)
    router.child.start()
    await asyncio.to_thread(router.child.wait_ready, lambda: is_ready(router.url), READY_TIMEOUT_S)
    return time.perf_counter() - began_s


async def loads(router: RouterProcess) -> dict[int, int]:
    """Active requests of each worker that has any."""
    rows: list[dict[str, Any]] = (await asyncio.to_thread(get_json, f"{router.url}/loads"))["loads"]
    return {row["worker_id"]: row["active_requests"] for row in rows if row["active_requests"]}


async def wrong_loads(routers: list[RouterProcess], expected: dict[int, int]) -> list[str]:
    """Wait until every router has these loads; returns what is still wrong after SYNC_TIMEOUT_S."""
    until_s = time.perf_counter() + SYNC_TIMEOUT_S
    while True:
        found = [await loads(router) for router in routers]
        if all(each == expected for each in found):
            return []
        if time.perf_counter() > until_s:
            return [
                f"{router.url} has the loads {each}, not {expected}"
                for router, each in zip(routers, found, strict=True)
            ]
        await asyncio.sleep(0.05)


async def measure(routers: list[RouterProcess], rate: float, rounds: int, settle_s: float, report: Report) -> Samples:
    """Restart every router `rounds` times under load, and check what is left."""
    samples = Samples()
    async with KvRouterClient([router.url for router in routers], retry_timeout_s=RETRY_TIMEOUT_S) as client:
        load = Load(client, rate, seed=1)
        sending = asyncio.create_task(load.run())
        began_s = time.perf_counter()
        for _ in range(rounds):
            for router in routers:
                await asyncio.sleep(settle_s)
                samples.add("restart", "seconds without the router", "s", OURS, await restart(router))
        await asyncio.sleep(settle_s)
        load.over = True
        elapsed_s = time.perf_counter() - began_s
        await sending
        kept: list[Booking] = [await client.book([n] * PROMPT_TOKENS) for n in range(KEPT)]
        report.wrong += await wrong_loads(routers, dict(Counter(booking.worker_id for booking in kept)))
        for booking in kept:
            booking.end()
        report.wrong += await wrong_loads(routers, {})
        report.wrong += [f"{n} requests failed: {what}" for what, n in load.failures.items()]
        if client.reports_lost:
            report.wrong.append(f"{client.reports_lost} reports were lost")
    latencies = sorted(load.latencies_ms)
    if latencies:
        for name, share in (("p50", 0.5), ("p99", 0.99), ("greatest", 1.0)):
            at = min(len(latencies) - 1, int(share * len(latencies)))
            samples.add("booking", f"{name} latency", "ms", OURS, latencies[at])
    samples.add("load", "requests", "", OURS, float(load.sent))
    samples.add("load", "requests per second", "1/s", OURS, load.sent / elapsed_s)
    samples.add("load", "requests lost", "", OURS, float(sum(load.failures.values())))
    report.bars.append(Bar("no request is lost", not load.failures, f"{sum(load.failures.values())} of {load.sent}"))
    report.bars.append(Bar("loads are right at the end", not report.wrong, f"{len(report.wrong)} faults"))
    return samples


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--rate", default=500.0, show_default=True, help="Requests per second.")
@click.option("--rounds", default=3, show_default=True, help="Restarts of each of the two routers.")
@click.option("--settle", "settle_s", default=5.0, show_default=True, help="Seconds between two restarts.")
def main(json_path: Path | None, rate: float, rounds: int, settle_s: float) -> None:
    """Restart two routers in turn at a fixed rate of requests."""
    report = Report("rolling restart", {}, [])
    with machinery(block_size=BLOCK_SIZE) as parts:
        worker = parts.stack.worker("agents", router=False)
        routers = [parts.stack.router("first"), parts.stack.router("second")]
        samples = uvloop.run(_with_workers(routers, rate, rounds, settle_s, report))
        if not worker.child.running:
            report.wrong.append("the Faust worker ended")
    report.rows = samples.rows()
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


async def _with_workers(
    routers: list[RouterProcess], rate: float, rounds: int, settle_s: float, report: Report
) -> Samples:
    """Register the workers, and measure once both routers have them."""
    async with ClientSession() as http:
        for worker_id in range(1, WORKERS + 1):
            body = {"url": f"http://engine{worker_id}:8000", "model": MODEL, "block_size": BLOCK_SIZE}
            async with http.put(f"{routers[0].url}/workers/{worker_id}", json=body) as answer:
                answer.raise_for_status()
    until_s = time.perf_counter() + READY_TIMEOUT_S
    while any(len(get_json(f"{router.url}/workers")["workers"]) < WORKERS for router in routers):
        if time.perf_counter() > until_s:
            raise KvStreamsError("the workers did not reach every router")
        await asyncio.sleep(0.1)
    return await measure(routers, rate, rounds, settle_s, report)


if __name__ == "__main__":
    main()
