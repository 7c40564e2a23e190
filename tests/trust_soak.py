"""The demo's load for an hour with random kills and misconfigurations: no answer may claim `exact` and be wrong.

What lives here: the load, the faults, and the check at the end. What must not: single faults with their expected
answers (tests/trust).

Simulated engines keep journals of their caches (streams/lab/engines/journal.py), which survive SIGKILL. Clients ask two
routers and record every answer. An answer whose `chosen_mode` is exact is wrong if the chosen engine held as many
leading blocks of the prompt as the answer says at no moment from one second before the request until the answer
arrived.

    python -m tests.trust_soak --minutes 60
    KVSTREAMS_REAL_VLLM=FOLDER python -m tests.trust_soak --real 2 --minutes 36

With --real, so many of the engines are real vLLM servers, and the load is one that a CPU can compute. Their journals
are written from their own events (tests/real/journaled_engine.py).
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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from streams.kafka.clients import ensure_topics
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
from tests.helpers.exact_answers import Asked, Wrong, wrong_answers
from tests.real.engine import BLOCK_SIZE as REAL_BLOCK_SIZE
from tests.real.environment import FULL, missing
from tests.real.journaled_engine import JournaledEngine

N_ENGINES = 4

#: Of scopes with simulated engines only. A real vLLM on a CPU takes multiples of 32.
BLOCK_SIZE = 16

#: Small, so that blocks are evicted all the time, as on engines under load. Real engines compute shorter prompts.
BLOCKS_PER_ENGINE = 4096
REAL_BLOCKS_PER_ENGINE = 600

#: What a real engine on a CPU can compute: prompts of up to 2,500 tokens.
REAL_SHAPE = ChatShape(
    n_system_prompts=8,
    system_prompt_blocks_max=2,
    first_text_mean=200,
    next_text_mean=80,
    output_mean=8,
    output_max=16,
    input_max=2_500,
)

#: Tokens of the real engines' model.
REAL_TOKENS = 1_900

#: Pause between two faults, and how long a fault lasts.
PAUSE_S = (4.0, 12.0)
FAULT_S = (1.0, 15.0)

#: Requests of the load at once. While engines are dead or paused, further requests are dropped.
IN_FLIGHT_MAX = 64

#: vLLM refuses a body that is not said to be JSON.
_JSON = {"Content-Type": "application/json"}

_TIMEOUT = aiohttp.ClientTimeout(total=20.0)


@dataclass
class EngineSlot:
    """One simulated engine: its addresses and its journal stay the same when its process is replaced."""

    worker_id: int
    model: str
    block_size: int
    n_blocks: int
    directory: Path
    children: Children
    deaths_ns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ports = free_port(), free_port(), free_port()
        self._child: Child | None = None
        self.url, self.events, self.replay = (
            f"{scheme}://127.0.0.1:{port}" for scheme, port in zip(("http", "tcp", "tcp"), self._ports, strict=True)
        )
        self.journal = self.directory / f"journal-{self.worker_id}"

    def start(self, *, block_size: int | None = None) -> None:
        """Start a process."""
        http, events, replay = self._ports
        arguments = [
            *("-m", "streams.cli", "sim", "--worker", str(self.worker_id), "--model", self.model),
            *("--port", str(http), "--events-port", str(events), "--replay-port", str(replay)),
            *("--blocks", str(self.n_blocks), "--time-scale", "2", "--journal", str(self.journal)),
            *("--block-size", str(block_size or self.block_size)),
        ]
        log = self.directory / "logs" / f"engine-{self.worker_id}.log"
        self._child = self.children.add(Child(f"engine-{self.worker_id}", arguments, log, {})).start()

    def kill(self) -> None:
        """End the process with SIGKILL, and note when its cache was gone."""
        assert self._child is not None
        self._child.kill()
        self.deaths_ns.append(time.time_ns())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self._child is not None
        self._child.signal(number)

    def wait_ready(self) -> None:
        """Nothing is waited for: the process is registered once it answers."""

    def close(self) -> None:
        """`children` ends the process."""


class Fleet:
    """The processes of the soak, and the faults that can be done to them."""

    def __init__(
        self,
        stack: Stack,
        children: Children,
        broker_pid: int,
        engines: Sequence[EngineSlot | JournaledEngine],
        rng: random.Random,
    ) -> None:
        self._stack = stack
        self._children = children
        self._broker_pid = broker_pid
        self._rng = rng
        self.engines = engines
        self.bridges: list[Child] = []
        self.worker: RouterProcess
        self.router: RouterProcess
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Start everything as it should be."""
        self.worker = self._stack.worker()
        self.router = self._stack.router("router")
        for slot in self.engines:
            slot.start()
        for slot in self.engines:
            slot.wait_ready()
        # Two bridges, so that one without faults always feeds half of the engines.
        self.bridges = [self._bridge(number, {}) for number in range(2)]
        for router in (self.worker, self.router):
            wait_workers(router.url, N_ENGINES)

    def _option(self, slot: EngineSlot | JournaledEngine, fault: str) -> str:
        events, replay = slot.events, slot.replay
        if fault == "swapped ports":
            events, replay = replay, events
        if fault == "no events":
            events = f"tcp://127.0.0.1:{free_port()}"
        parts = [f"id={slot.worker_id}", f"url={slot.url}", f"events={events}"]
        if fault != "no replay":
            parts.append(f"replay={replay}")
        return ",".join(parts)

    def _bridge(self, number: int, faults: dict[int, str]) -> Child:
        arguments = ["-m", "streams.cli", "bridge"]
        for slot in self.engines[number::2]:
            arguments += ["--engine", self._option(slot, faults.get(slot.worker_id, ""))]
        log = self._stack.directory / "logs" / f"bridge-{number}.log"
        return self._children.add(Child("bridge", arguments, log, as_environ(self._stack.settings))).start()

    # -- faults, each of which ends as it should be --------------------------------------------------------------------

    async def engine_killed(self, lasts_s: float) -> None:
        """An engine is killed and starts again with an empty cache."""
        slot = self._rng.choice(self.engines)
        slot.kill()
        await asyncio.sleep(lasts_s)
        slot.start()

    async def engine_paused(self, lasts_s: float) -> None:
        """An engine stops for a while and continues."""
        await _paused(self._rng.choice(self.engines), lasts_s)

    async def engine_with_other_blocks(self, lasts_s: float) -> None:
        """An engine is replaced by one with another block size, and back."""
        slot = self._rng.choice(self.engines)
        slot.kill()
        slot.start(block_size=2 * self._stack.settings.block_size)
        await asyncio.sleep(lasts_s)
        slot.kill()
        slot.start()

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
        other = self._stack.router(
            f"other-{self.counts['routers']}", wait=False, block_size=2 * self._stack.settings.block_size
        )
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


async def _paused(child: Child | EngineSlot | JournaledEngine, lasts_s: float) -> None:
    child.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        child.signal(signal.SIGCONT)


class Load:
    """Clients that route each request of a trace, let the chosen engine compute it, and free it."""

    def __init__(self, fleet: Fleet, model: str, requests: Sequence[TraceRequest], speedup: float) -> None:
        self._fleet = fleet
        self._model = model
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

    def tokens_of(self, number: int) -> bytes:
        """Return the prompt of a request, u32 LE."""
        tokens = tokens_for(self._requests[number])
        if self._model != FULL:
            return tokens
        return (np.frombuffer(tokens, dtype="<u4") % REAL_TOKENS).astype("<u4").tobytes()

    async def cancel(self) -> None:
        """End the requests that are still running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self, http: aiohttp.ClientSession, number: int, request: TraceRequest) -> None:
        async with self._in_flight:
            router = number % 2
            url = (self._fleet.worker, self._fleet.router)[router].url
            tokens = self.tokens_of(number)
            try:
                choice = await self._route(http, router, url, number, tokens)
                if choice is None:
                    return
                body = {
                    "prompt": unpack_tokens(tokens),
                    "max_tokens": max(1, request.output_length),
                    "seed": number,
                }
                url_of_engine, sent = f"{choice['url']}/v1/completions", orjson.dumps(body)
                async with http.post(url_of_engine, data=sent, headers=_JSON) as response:
                    await response.read()
                    if response.status != 200:
                        self.failures[f"engine: {response.status}"] += 1
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
            params={"request_id": f"s{number}", "model": self._model},
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
    print(f"by worker: {dict(sorted(Counter(answer.worker_id for answer in load.asked).items()))}")
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
    parser.add_argument("--rate", type=float, default=None, help="requests per second; 14 by default")
    parser.add_argument("--real", type=int, default=0, help="so many of the engines are real; at 3 requests per second")
    parser.add_argument("--only", default="", help="only faults whose names contain this")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder with journals and logs even if no answer was wrong"
    )
    options = parser.parse_args()
    reason = missing()
    if options.real and reason is not None:
        parser.error(reason)
    model, block_size = (FULL, REAL_BLOCK_SIZE) if options.real else ("soak", BLOCK_SIZE)
    n_blocks = REAL_BLOCKS_PER_ENGINE if options.real else BLOCKS_PER_ENGINE
    if options.rate is None:
        options.rate = 3.0 if options.real else 14.0
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    n_requests = round(options.minutes * 60.0 * options.rate * 1.2) + 100
    requests = generate(n_requests, np.random.default_rng(seed), REAL_SHAPE if options.real else ChatShape())
    rate = len(requests) / (requests[-1].timestamp_ms / 1000.0)
    directory = Path(tempfile.mkdtemp(prefix="kvstreams-trust-soak-"))
    kafka = LocalKafka(LocalKafkaConfig(directory / "kafka"))
    wrong: list[Wrong] = []
    try:
        broker = kafka.up()
        settings = Settings(kafka=broker.bootstrap, partitions=4, session_timeout_s=6.0, block_size=block_size)
        ensure_topics(settings, topics(settings).all())
        with Children() as children:
            engines = [
                JournaledEngine(number, directory, ("--num-gpu-blocks-override", str(REAL_BLOCKS_PER_ENGINE)))
                if number <= options.real
                else EngineSlot(number, model, block_size, n_blocks, directory, children)
                for number in range(1, N_ENGINES + 1)
            ]
            fleet = Fleet(Stack(settings, directory, children), children, broker.pid, engines, rng)
            load = Load(fleet, model, requests, options.rate / rate)
            events: list[tuple[int, str]] = []
            try:
                fleet.start()
                asyncio.run(run(fleet, load, options.minutes * 60.0, options.only, rng, events))
            finally:
                for slot in engines:
                    slot.close()
                histories = {slot.worker_id: CacheHistory.read(slot.journal, slot.deaths_ns) for slot in engines}
                wrong = wrong_answers(load.asked, load.tokens_of, block_size, histories)
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
