"""The demo's load for an hour with random kills and misconfigurations: no answer may claim `exact` and be wrong.

What lives here: the load, the faults, and the check at the end. What must not: single faults with their expected
answers (tests/trust).

Simulated engines keep journals of their caches (streams/lab/engines/journal.py), which survive SIGKILL. Clients ask two
routers and record every answer. An answer whose `chosen_mode` is exact is wrong if the chosen engine held as many
leading blocks of the prompt as the answer says at no moment from one second before the request until the answer
arrived.

    python -m tests.trust_soak --minutes 60
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from streams.kafka.clients import ensure_topics
from streams.lab.engines.engine_messages import hash_prompt
from streams.lab.engines.journal import CacheHistory
from streams.lab.engines.synthetic_tokens import unpack_tokens
from streams.lab.kafka.broker import LocalKafka, LocalKafkaConfig
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Child, Children
from streams.lab.stack import READY_TIMEOUT_S, RouterProcess, Stack, is_ready, wait_workers
from streams.lab.trace import ChatShape, TraceRequest, generate, tokens_for
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from streams.topics import topics

MODEL = "soak"
BLOCK_SIZE = 16
N_ENGINES = 4

#: Small, so that blocks are evicted all the time, as on engines under load.
BLOCKS_PER_ENGINE = 4096

#: How old an answer's knowledge may be: an event needs some milliseconds to reach a router.
LATE_NS = 1_000_000_000

#: Pause between two faults, and how long a fault lasts.
PAUSE_S = (4.0, 12.0)
FAULT_S = (1.0, 15.0)

#: Requests of the load at once. While engines are dead or paused, further requests are dropped.
IN_FLIGHT_MAX = 64

_TIMEOUT = aiohttp.ClientTimeout(total=20.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer. prompt: number of the request in the trace. Times are Unix times in nanoseconds."""

    prompt: int
    sent_ns: int
    received_ns: int
    router: int
    worker_id: int
    chosen_mode: str
    mode: str
    overlap: int
    because: str


@dataclass
class EngineSlot:
    """One engine: its ports and journal stay the same when its process is replaced."""

    worker_id: int
    ports: tuple[int, int, int]
    journal: Path
    child: Child | None = None
    deaths_ns: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Address of its HTTP API."""
        return f"http://127.0.0.1:{self.ports[0]}"


class Fleet:
    """The processes of the soak, and the faults that can be done to them."""

    def __init__(self, stack: Stack, children: Children, broker_pid: int, directory: Path, rng: random.Random) -> None:
        self._stack = stack
        self._children = children
        self._broker_pid = broker_pid
        self._directory = directory
        self._rng = rng
        self.engines = [
            EngineSlot(number, (free_port(), free_port(), free_port()), directory / f"journal-{number}")
            for number in range(1, N_ENGINES + 1)
        ]
        self.bridges: list[Child] = []
        self.worker: RouterProcess
        self.router: RouterProcess
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Start everything as it should be."""
        self.worker = self._stack.worker()
        self.router = self._stack.router("router")
        for slot in self.engines:
            self.start_engine(slot)
        # Two bridges, so that one without faults always feeds half of the engines.
        self.bridges = [self._bridge(number, {}) for number in range(2)]
        for router in (self.worker, self.router):
            wait_workers(router.url, N_ENGINES)

    def start_engine(self, slot: EngineSlot, *options: str) -> None:
        """Start an engine on its ports."""
        http, events, replay = slot.ports
        arguments = [
            *("-m", "streams.cli", "sim", "--worker", str(slot.worker_id), "--model", MODEL),
            *("--port", str(http), "--events-port", str(events), "--replay-port", str(replay)),
            *("--blocks", str(BLOCKS_PER_ENGINE), "--time-scale", "2", "--journal", str(slot.journal), *options),
        ]
        log = self._directory / "logs" / f"engine-{slot.worker_id}.log"
        slot.child = self._children.add(Child(f"engine-{slot.worker_id}", arguments, log, {})).start()

    def kill_engine(self, slot: EngineSlot) -> None:
        """End an engine with SIGKILL, and note when its cache was gone."""
        assert slot.child is not None
        slot.child.kill()
        slot.deaths_ns.append(time.time_ns())

    def _option(self, slot: EngineSlot, fault: str) -> str:
        _, events, replay = slot.ports
        if fault == "swapped ports":
            events, replay = replay, events
        if fault == "no events":
            events = free_port()
        parts = [f"id={slot.worker_id}", f"url={slot.url}", f"events=tcp://127.0.0.1:{events}"]
        if fault != "no replay":
            parts.append(f"replay=tcp://127.0.0.1:{replay}")
        return ",".join(parts)

    def _bridge(self, number: int, faults: dict[int, str]) -> Child:
        arguments = ["-m", "streams.cli", "bridge"]
        for slot in self.engines[number::2]:
            arguments += ["--engine", self._option(slot, faults.get(slot.worker_id, ""))]
        log = self._directory / "logs" / f"bridge-{number}.log"
        return self._children.add(Child("bridge", arguments, log, as_environ(self._stack.settings))).start()

    # -- faults, each of which ends as it should be --------------------------------------------------------------------

    async def engine_killed(self, lasts_s: float) -> None:
        """An engine is killed and starts again with an empty cache."""
        slot = self._rng.choice(self.engines)
        self.kill_engine(slot)
        await asyncio.sleep(lasts_s)
        self.start_engine(slot)

    async def engine_paused(self, lasts_s: float) -> None:
        """An engine stops for a while and continues."""
        slot = self._rng.choice(self.engines)
        assert slot.child is not None
        await _paused(slot.child, lasts_s)

    async def engine_with_other_blocks(self, lasts_s: float) -> None:
        """An engine is replaced by one with another block size, and back."""
        slot = self._rng.choice(self.engines)
        self.kill_engine(slot)
        self.start_engine(slot, "--block-size", "32")
        await asyncio.sleep(lasts_s)
        self.kill_engine(slot)
        self.start_engine(slot)

    async def bridge_killed(self, lasts_s: float) -> None:
        """A bridge is killed and starts again."""
        number = self._rng.randrange(2)
        self.bridges[number].kill()
        await asyncio.sleep(lasts_s)
        self.bridges[number] = self._bridge(number, {})

    async def bridge_paused(self, lasts_s: float) -> None:
        """A bridge stops for a while and continues."""
        await _paused(self._rng.choice(self.bridges), lasts_s)

    async def bridge_misconfigured(self, lasts_s: float) -> None:
        """A bridge starts again with a wrong address of one engine, and later with the right one."""
        number = self._rng.randrange(2)
        slot = self._rng.choice(self.engines[number::2])
        fault = self._rng.choice(("swapped ports", "no events", "no replay"))
        self.counts[fault] += 1
        self.bridges[number].kill()
        self.bridges[number] = self._bridge(number, {slot.worker_id: fault})
        await asyncio.sleep(lasts_s + 5.0)
        self.bridges[number].kill()
        self.bridges[number] = self._bridge(number, {})

    async def worker_killed(self, lasts_s: float) -> None:
        """The worker is killed and starts again, one time in three without its RocksDB."""
        self.worker.child.kill()
        if self._rng.random() < 1 / 3:
            shutil.rmtree(self.worker.settings.data_dir, ignore_errors=True)
        await asyncio.sleep(lasts_s)
        await asyncio.to_thread(self._stack.restart_worker, self.worker)

    async def worker_paused(self, lasts_s: float) -> None:
        """The worker stops for a while and continues."""
        await _paused(self.worker.child, lasts_s)

    async def second_worker(self, lasts_s: float) -> None:
        """Another worker joins, so that partitions move, and leaves."""
        self.counts["workers"] += 1
        second = self._stack.worker(f"second-{self.counts['workers']}", router=False)
        await asyncio.sleep(lasts_s + 5.0)
        self._rng.choice((second.child.kill, second.child.stop))()

    async def router_restarted(self, lasts_s: float) -> None:
        """A router is killed and starts again."""
        self.router.child.kill()
        await asyncio.sleep(lasts_s)
        self.router.child.start()
        await asyncio.to_thread(wait_for, lambda: is_ready(self.router.url), READY_TIMEOUT_S, "the router to be ready")

    async def router_with_other_blocks(self, lasts_s: float) -> None:
        """A router with another block size must not start; if it does, it never ends by itself."""
        del lasts_s
        self.counts["routers"] += 1
        other = self._stack.router(f"other-{self.counts['routers']}", wait=False, block_size=32)
        await asyncio.to_thread(wait_for, lambda: not other.child.running, READY_TIMEOUT_S, "the router to be refused")

    async def broker_paused(self, lasts_s: float) -> None:
        """The broker stops for a while and continues."""
        os.kill(self._broker_pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            os.kill(self._broker_pid, signal.SIGCONT)

    async def cache_cleared(self, lasts_s: float) -> None:
        """An engine's cache is cleared by its operator."""
        del lasts_s
        slot = self._rng.choice(self.engines)
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as http, http.post(f"{slot.url}/reset_prefix_cache"):
            pass

    def faults(self, only: str = "") -> list[Callable[[float], Awaitable[None]]]:
        """Every fault whose name contains `only`."""
        every = (
            self.engine_killed,
            self.engine_paused,
            self.engine_with_other_blocks,
            self.bridge_killed,
            self.bridge_paused,
            self.bridge_misconfigured,
            self.worker_killed,
            self.worker_paused,
            self.second_worker,
            self.router_restarted,
            self.router_with_other_blocks,
            self.broker_paused,
            self.cache_cleared,
        )
        return [fault for fault in every if only in fault.__name__]


async def _paused(child: Child, lasts_s: float) -> None:
    child.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        child.signal(signal.SIGCONT)


class Load:
    """Clients that route each request of a trace, let the chosen engine compute it, and free it."""

    def __init__(self, fleet: Fleet, requests: Sequence[TraceRequest], speedup: float) -> None:
        self._fleet = fleet
        self._requests = requests
        self._speedup = speedup
        self._in_flight = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked: list[Asked] = []
        self.failures: Counter[str] = Counter()

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Send requests at the times of the trace until it ends or this is cancelled."""
        began_s = time.monotonic()
        for number, request in enumerate(self._requests):
            due_s = request.timestamp_ms / 1000.0 / self._speedup
            await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
            if self._in_flight.locked():
                self.failures["dropped"] += 1
                continue
            task = asyncio.create_task(self._one(http, number, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """End the requests that are still running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self, http: aiohttp.ClientSession, number: int, request: TraceRequest) -> None:
        async with self._in_flight:
            router = number % 2
            url = (self._fleet.worker, self._fleet.router)[router].url
            tokens = tokens_for(request)
            try:
                choice = await self._route(http, router, url, number, tokens)
                if choice is None:
                    return
                body = {
                    "prompt": unpack_tokens(tokens),
                    "max_tokens": max(1, request.output_length),
                    "seed": number,
                }
                async with http.post(f"{choice['url']}/v1/completions", data=orjson.dumps(body)) as response:
                    await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                self.failures[type(exc).__name__] += 1
            finally:
                try:
                    async with http.delete(f"{url}/loads/s{number}"):
                        pass
                except (aiohttp.ClientError, TimeoutError, OSError):
                    pass  # the booking's TTL ends it

    async def _route(
        self, http: aiohttp.ClientSession, router: int, url: str, number: int, tokens: bytes
    ) -> dict[str, Any] | None:
        sent_ns = time.time_ns()
        async with http.post(
            f"{url}/route",
            params={"request_id": f"s{number}", "model": MODEL},
            data=tokens,
            headers={"Content-Type": "application/octet-stream"},
        ) as response:
            answer: dict[str, Any] = orjson.loads(await response.read())
            received_ns = time.time_ns()
            if response.status != 200:
                self.failures[str(answer.get("error", {}).get("code"))] += 1
                return None
        self.asked.append(
            Asked(
                number,
                sent_ns,
                received_ns,
                router,
                answer["worker_id"],
                answer["chosen_mode"],
                answer["mode"],
                answer["overlap_blocks"],
                str(answer.get("chosen_degraded_because", "")),
            )
        )
        return answer


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that claims to be exact, and what the engine really held.

    true_until_ns: until when, before the request, the answer would have been right; None if it was never right.
    """

    asked: Asked
    held: set[int]
    true_until_ns: int | None

    @property
    def age(self) -> str:
        """How old the answer's knowledge was when the request was sent."""
        if self.true_until_ns is None:
            return "which was never so"
        return f"which was so until {(self.asked.sent_ns - self.true_until_ns) / 1e9:.2f} s before the request"


def wrong_answers(
    asked: Iterable[Asked], requests: Sequence[TraceRequest], histories: dict[int, CacheHistory]
) -> list[Wrong]:
    """Return the answers that claim to be exact and were true at no moment of the last second."""
    wrong: list[Wrong] = []
    for answer in asked:
        if answer.chosen_mode != "exact":
            continue
        sequence = hash_prompt(tokens_for(requests[answer.prompt]), BLOCK_SIZE).sequence.tolist()
        held = histories[answer.worker_id].overlaps(sequence, answer.sent_ns - LATE_NS, answer.received_ns)
        if answer.overlap not in held:
            true_until_ns = histories[answer.worker_id].last_held_ns(sequence, answer.overlap, answer.sent_ns)
            wrong.append(Wrong(answer, held, true_until_ns))
    return wrong


async def run(
    fleet: Fleet, load: Load, seconds: float, only: str, rng: random.Random, events: list[tuple[int, str]]
) -> None:
    """Run the load and one fault after another for so many seconds. only: as in Fleet.faults."""
    until_s = time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as http:
        running = asyncio.create_task(load.run(http))
        try:
            while time.monotonic() < until_s and not running.done():
                await asyncio.sleep(rng.uniform(*PAUSE_S))
                fault = rng.choice(fleet.faults(only))
                lasts_s = rng.uniform(*FAULT_S)
                events.append((time.time_ns(), f"{fault.__name__} for {lasts_s:.1f} s"))
                print(f"{time.strftime('%H:%M:%S')} {len(load.asked):7,} answers; {events[-1][1]}", flush=True)
                try:
                    await fault(lasts_s)
                except (aiohttp.ClientError, OSError) as exc:
                    print(f"  the fault itself failed: {exc!r}", flush=True)
                events.append((time.time_ns(), f"{fault.__name__} ends"))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await load.cancel()


def report(load: Load, wrong: Sequence[Wrong], events: Sequence[tuple[int, str]]) -> None:
    """Print what was answered, and each wrong answer with the last fault before it."""
    print(f"{len(load.asked):,} answers by chosen_mode: {dict(Counter(answer.chosen_mode for answer in load.asked))}")
    print(f"by mode: {dict(Counter(answer.mode for answer in load.asked))}")
    print(f"why degraded: {dict(Counter(answer.because for answer in load.asked if answer.because))}")
    print(f"not answered: {dict(load.failures)}")
    print(f"exact and wrong: {len(wrong)}")
    for each in wrong[:50]:
        answer = each.asked
        before = [(at_ns, what) for at_ns, what in events if at_ns <= answer.received_ns][-2:]
        when = "; ".join(f"{what} {(answer.received_ns - at_ns) / 1e9:.2f} s before" for at_ns, what in before)
        print(
            f"  request {answer.prompt}: router {answer.router} says that worker {answer.worker_id} holds "
            f"{answer.overlap} blocks, {each.age}; it held {sorted(each.held)}; {when}"
        )


def main() -> int:
    """Run the soak; the exit code is 1 if any answer claimed to be exact and was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--rate", type=float, default=14.0, help="requests per second")
    parser.add_argument("--only", default="", help="only faults whose names contain this")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder with journals and logs even if no answer was wrong"
    )
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    n_requests = round(options.minutes * 60.0 * options.rate * 1.2) + 100
    requests = generate(n_requests, np.random.default_rng(seed), ChatShape())
    rate = len(requests) / (requests[-1].timestamp_ms / 1000.0)
    directory = Path(tempfile.mkdtemp(prefix="kvstreams-trust-soak-"))
    kafka = LocalKafka(LocalKafkaConfig(directory / "kafka"))
    wrong: list[Wrong] = []
    try:
        broker = kafka.up()
        settings = Settings(kafka=broker.bootstrap, partitions=4, session_timeout_s=6.0)
        ensure_topics(settings, topics(settings).all())
        with Children() as children:
            fleet = Fleet(Stack(settings, directory, children), children, broker.pid, directory, rng)
            fleet.start()
            load = Load(fleet, requests, options.rate / rate)
            events: list[tuple[int, str]] = []
            try:
                asyncio.run(run(fleet, load, options.minutes * 60.0, options.only, rng, events))
            finally:
                histories = {slot.worker_id: CacheHistory.read(slot.journal, slot.deaths_ns) for slot in fleet.engines}
                wrong = wrong_answers(load.asked, requests, histories)
                report(load, wrong, events)
                print(f"faults: {dict(Counter(what.split()[0] for _, what in events if ' for ' in what))}")
    finally:
        kafka.down()
        if options.keep or wrong:
            print(f"journals and logs are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
