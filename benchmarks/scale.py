"""`python -m benchmarks.scale PART`: up to which size one router holds.

What lives here: the parts, each a command. `ranks` compares a fleet of 64 ranks with larger ones: matches, decisions
with their bookings, the calls that list the fleet, and memory. What must not: the fleet (decision), and the steps of a
decision. A part exits with 1 if an answer is wrong, and prints which bars are met.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import orjson

from benchmarks.decision import BLOCK_SIZE, RouterFleet
from benchmarks.memory import resident_bytes
from benchmarks.ours import WEIGHTS, clock
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams import __version__
from streams.core.hashing import request_hashes
from streams.core.ids import Tier, WorkerId
from streams.core.index.interface import Candidates
from streams.core.loads.bookings import BookingPhase
from streams.core.routing.trust import AnswerMode
from streams.core.workers import Cordon
from streams.kafka.records import CORDONS
from streams.process.http_server import HttpServer
from streams.process.interpreter import exempt_from_collection, prefer_request_threads
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import RouteRequest
from streams.router_api.processes.server import api_runner

MIB = 1024 * 1024

#: The fleet with which others are compared.
SMALL = 64

#: By number of ranks, how many times as long as in the small fleet a decision may take, at p50 and at p99.
RATIOS_MAX = {1_000: (3.0, 4.0), 10_000: (20.0, 30.0)}

#: Requests that each rank runs while decisions are measured.
RUNNING = 4

#: What they generate, so that they still run at the end.
OUTPUT_TOKENS = 1_000_000

#: Decisions between two records that keep answers exact.
PROVEN_EVERY = 50

#: The calls that list the fleet, and how often each is made in a repetition.
PAGES = ("/loads", "/workers", "/scale", "/metrics", "/live")
PAGES_ASKED = 5

#: Settings of a router that answers exactly although nothing was read while another fleet was measured.
PATIENT = {"behind_after_ms": 3_600_000, "stale_after_ms": 3_600_000}

#: Changes of the fleet in a repetition.
CHANGES = 20


@click.group(help=__doc__)
def main() -> None:
    pass


# -- ranks -------------------------------------------------------------------------------------------------------------


class Measured:
    """A fleet, and what was measured of it, in ns.

    changed: decisions that came first after a change of the fleet. pages: by path, until the last byte came. pauses: by
    path, the longest time in which the loop that answers decisions did nothing else.
    """

    def __init__(self, n_ranks: int, n_tokens: int) -> None:
        """The ranks run requests, which the router itself has booked."""
        before = resident_bytes()
        self.n_ranks = n_ranks
        self.fleet = fleet = RouterFleet(n_ranks, n_tokens, (Tier.DEVICE, Tier.HOST), **PATIENT)
        self.candidates = Candidates(tuple(fleet.router.view.fleet.all_ranks()))
        for number in range(RUNNING * n_ranks):
            self.prove(number)
            prompt = fleet.prompts[number % len(fleet.prompts)]
            fleet.router.route(
                RouteRequest(request_id=f"running-{number}", expected_output_tokens=OUTPUT_TOKENS), prompt
            )
        for worker_id in fleet.worker_ids:
            fleet.renew(worker_id)
        self.memory_bytes = resident_bytes() - before
        self.forget()

    def forget(self) -> None:
        """Begin to measure."""
        self.match: list[int] = []
        self.decide: list[int] = []
        self.changed: list[int] = []
        self.pages: dict[str, list[int]] = {path: [] for path in PAGES}
        self.pauses: dict[str, list[int]] = {path: [] for path in PAGES}

    def prove(self, number: int) -> None:
        """Keep answers exact; number: counts the calls, most of which have nothing to do."""
        if number % PROVEN_EVERY == 0:
            self.fleet.prove()

    def prompt(self, number: int) -> bytes:
        """A prompt that a rank holds, or a new one, by turns."""
        held = self.fleet.prompts
        return held[int(self.fleet.rng.integers(len(held)))] if number % 2 else self.fleet.prompt()

    def measure(self, n_decisions: int) -> None:
        """Measure decisions while records arrive, and those that follow a change of the fleet."""
        for number in range(n_decisions):
            self.prove(number)
            self.fleet.renew(self.fleet.worker_ids[number * 7 % self.n_ranks])
            prompt = self.prompt(number)
            local, _ = request_hashes(prompt, BLOCK_SIZE)
            begun = clock()
            scores, _ = self.fleet.router.view.overlap(local)
            scores.columns(self.candidates, WEIGHTS)
            self.match.append(clock() - begun)
            self.decide.append(self.time_decision(number, prompt))
        for number in range(CHANGES):
            worker_id = WorkerId(self.fleet.worker_ids[number // 2])
            cordon = None if number % 2 else CORDONS.encode(Cordon(worker_id, 0))
            self.fleet.router.view.fold_worker(CORDONS.keys.pack(worker_id), cordon)
            self.changed.append(self.time_decision(number, self.prompt(number)))

    def time_decision(self, number: int, prompt: bytes) -> int:
        """Time one decision from the parsed request to the answer's JSON, with its booking."""
        router, request_id = self.fleet.router, f"asked-{number}"
        begun = clock()
        answer = router.route(RouteRequest(request_id=request_id), prompt)
        orjson.dumps(answer_json(answer))
        taken = clock() - begun
        if answer.trust.mode is not AnswerMode.EXACT:
            raise SystemExit(f"an answer of an exact fleet is {answer.trust}")
        router.report_phase(request_id, BookingPhase.FREE)
        return taken

    async def ask_pages(self) -> None:
        """Ask for the pages that list the fleet, over HTTP."""
        server = HttpServer("127.0.0.1", 0)
        await server.serve(api_runner(self.fleet.router))
        try:
            for path in PAGES * PAGES_ASKED:
                begun = clock()
                page = asyncio.create_task(asyncio.to_thread(_read, server.url + path))
                longest, turn = 0, clock()
                while not page.done():
                    await asyncio.sleep(0)
                    now = clock()
                    longest, turn = max(longest, now - turn), now
                self.pages[path].append(clock() - begun)
                self.pauses[path].append(longest)
                await page
        finally:
            await server.close()

    def add_to(self, samples: Samples) -> None:
        """Add the figures."""
        case, runs = f"{self.n_ranks} ranks", self.fleet.router.view.index.runs
        for name, taken in (("match", self.match), ("decide", self.decide)):
            samples.add(case, f"{name} p50", "us", OURS, statistics.median(taken) / 1e3)
            samples.add(case, f"{name} p99", "us", OURS, p99(taken) / 1e3)
        samples.add(case, "decide, after a change of the fleet, p50", "ms", OURS, statistics.median(self.changed) / 1e6)
        for path in PAGES:
            samples.add(case, f"GET {path}", "ms", OURS, statistics.median(self.pages[path]) / 1e6)
            samples.add(case, f"GET {path}, pause", "ms", OURS, statistics.median(self.pauses[path]) / 1e6)
        with self.fleet.router.loads.locked() as loads:
            samples.add(case, "bookings", "MiB", OURS, loads.n_bytes / MIB)
        samples.add(case, "index", "MiB", OURS, runs.memory_bytes() / MIB)
        samples.add(case, "memory of the router", "MiB", OURS, self.memory_bytes / MIB)


def p99(taken: Sequence[int]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(taken, n=100)[98]


PERCENTILES: dict[str, Callable[[Sequence[int]], float]] = {"p50": statistics.median, "p99": p99}


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        page: bytes = answer.read()
    return page


@main.command()
@click.option("--tokens", default=2048, show_default=True)
@click.option("--decisions", default=500, show_default=True, help="of one fleet in one repetition")
@click.option("--repeats", default=6, show_default=True)
@click.option("--large", "sizes", multiple=True, type=int, default=tuple(RATIOS_MAX), show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def ranks(tokens: int, decisions: int, repeats: int, sizes: tuple[int, ...], json_path: Path | None) -> None:
    """Fleets of several sizes by turns, whose ranks hold prompts on their devices and in their hosts' memory."""
    prefer_request_threads()
    exempt_from_collection()  # as a router does before it reads its topics
    fleets = [Measured(n_ranks, tokens) for n_ranks in (SMALL, *sizes)]
    for repeat in range(repeats + 1):
        for measured in fleets:
            gc.collect()
            measured.measure(decisions)
            asyncio.run(measured.ask_pages())
            if repeat == 0:  # caches are filled
                measured.forget()
    samples, bars, small = Samples(), [], fleets[0]
    for measured in fleets:
        measured.add_to(samples)
    for measured in fleets[1:]:
        for (name, of), most in zip(PERCENTILES.items(), RATIOS_MAX.get(measured.n_ranks, ()), strict=False):
            ratio = of(measured.decide) / of(small.decide)
            title = f"a decision at {measured.n_ranks} ranks takes at most {most:g} times as long as at {SMALL}, {name}"
            bars.append(Bar(title, ratio <= most, f"{ratio:.2f}"))
    report = Report("scale ranks", {"kvstreams": __version__}, samples.rows(), bars)
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)


if __name__ == "__main__":
    main()
