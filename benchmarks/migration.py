"""`python -m benchmarks.migration`: the time from the death of an engine to the next token of its stream.

What lives here: engines of two classes of models in real time, killed at a context of 32,768 tokens, with everything in
a pool, without a pool, and with a backup that reads the pool in place; and a stall. What must not: the processes
(streams.lab.demo.pooled_fleet).

The engine stalls at a token first, until the router knows every block, so that the kill meets a stream of which
everything is pooled. The time is that of the client: from SIGKILL to the next token. It consists of the detection,
which an idle connection to the engine measures: the kernel closes the connections of a killed process; the load and one
step, which the engines' settings say; and all else, which is what the front, the router and their messages take. The
three ways take turns. Use an idle machine. Exits 1 if a stream differs from an undisturbed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import click
import numpy as np

from benchmarks.machinery import machinery
from benchmarks.report import OURS, Bar, Report, Row, Samples, wide_console
from streams.client import EngineOptions, KvRouterClient
from streams.lab.demo.pooled_fleet import Place, PooledFleet, Streamed, read_stream
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.pool import PoolConfig
from streams.lab.engines.speeds import DEVICES, MODELS, ModelClass
from streams.lab.engines.synthetic_tokens import greedy_tokens, unpack_tokens
from streams.lab.stack import FrontProcess, RouterProcess, Stack
from streams.process.waiting import wait_for

BLOCK = 16
#: Of prompt and answer when the engine is killed. The token after the last block has not been computed by anyone: to
#: compute it is the next step of any engine.
CONTEXT_TOKENS = 32_768
ANSWERED_TOKENS = 17
PROMPT_TOKENS = CONTEXT_TOKENS + 1 - ANSWERED_TOKENS
#: Tokens that come after the move, during which the blocks of the backup are counted.
MORE_TOKENS = 30
#: Before the kill, nothing else goes on for this long.
QUIET_S = 0.5

#: The most of the time without a pool that the move may take, by class.
RATIO_MAX: dict[str, float] = {"70b": 0.10, "8b": 0.20}
#: What may be added to detection, load and step.
REST_MS_MAX = 20.0
STALL_TIMEOUT_S = 1.0
VISIBLE_TIMEOUT_S = 60.0

POOLED, IN_PLACE, NO_POOL = WAYS = ("pool", "in place", "no pool")

#: Metrics that bars are about.
TO_NEXT_TOKEN = "from SIGKILL to the next token"
ALL_ELSE = "of it: all else"
PREFILLED_AGAIN = "tokens prefilled again"


def engine_of(model_class: ModelClass) -> EngineConfig:
    """Return an engine of a class, with blocks for four contexts. Reading in place takes what the bytes take."""
    speed = MODELS[model_class]
    return EngineConfig(
        block_size=BLOCK,
        n_blocks=4 * CONTEXT_TOKENS // BLOCK,
        prefill_ms_base=speed.prefill_ms_base,
        prefill_us_per_token=speed.prefill_us_per_token,
        decode_ms_per_token=speed.decode_ms_per_token,
    )


def pool_of(model_class: ModelClass, way: str) -> PoolConfig:
    """Return a pool at 64 GB/s for each worker."""
    bandwidth = DEVICES["cxl-x16"]
    return PoolConfig(
        f"pool-{model_class}-{way.replace(' ', '-')}",
        block_size=BLOCK,
        bytes_per_token=MODELS[model_class].bytes_per_token,
        capacity_blocks=1 << 18,
        offload_gb_per_s=bandwidth,
        load_gb_per_s=bandwidth,
        link="own",
    )


@dataclass(frozen=True, slots=True)
class Moved:
    """One move. took_ms: to the next token, since the kill, or since the last byte of an engine that stalled.

    detected_ms: from the kill until the kernel closed the engine's connections; 0 for a stall. computed: tokens that
    the second engine computed of its prompt. n_blocks: of its device that it used.
    """

    took_ms: float
    detected_ms: float
    computed: int
    n_blocks: int


class Bench:
    """One fleet of two engines, whose streams move from one to the other.

    A killed engine is started again in the background, while other fleets move streams; `ready` waits for it.
    """

    def __init__(
        self, stack: Stack, worker: RouterProcess, model_class: ModelClass, way: str, first_worker_id: int
    ) -> None:
        self.way = way
        self.config = engine_of(model_class)
        self.pool = pool_of(model_class, way)
        in_place_us = self.pool.bytes_per_token / self.pool.load_gb_per_s / 1e3 if way == IN_PLACE else 0.0
        options = ("--pool-reads", "in-place") if way == IN_PLACE else ()
        self.fleet = PooledFleet(
            stack,
            worker,
            f"{model_class}-{way.replace(' ', '-')}",
            replace(self.config, in_place_us_per_token=in_place_us),
            pool=None if way == NO_POOL else self.pool,
            time_scale=1.0,
            places=(Place(options=options), Place(options=options)),
            first_worker_id=first_worker_id,
        )
        self.wrong: list[str] = []
        self._restarting: Future[None] | None = None
        self._restarts = ThreadPoolExecutor(1)

    @property
    def load_ms(self) -> float:
        """Time that loading the whole context takes, by the settings."""
        if self.way == NO_POOL:
            return 0.0
        n_blocks = 0 if self.way == IN_PLACE else CONTEXT_TOKENS // BLOCK
        return n_blocks * self.pool.load_ms_per_block + self.pool.latency_ms

    @property
    def step_ms(self) -> float:
        """Time that one step takes, by the settings: the last token is computed."""
        return self.config.prefill_ms(1)

    def ready(self) -> None:
        """Wait until both engines run."""
        if self._restarting is not None:
            self._restarting.result()
            self._restarting = None

    def stop(self) -> None:
        """Stop the fleet."""
        self.ready()
        self._restarts.shutdown()
        self.fleet.stop()

    def move(self, front: FrontProcess | None, n_prompts: int, *, kills: bool = True) -> Moved:
        """Move one stream.

        front: None for the Python client's `generate`. n_prompts: of all moves before, since no two prompts may be
        equal. kills: the engine is killed; otherwise it stays stalled.
        """
        prompt = [(at * 31 + n_prompts) % 50_000 for at in range(PROMPT_TOKENS)]
        n_tokens = ANSWERED_TOKENS + MORE_TOKENS
        answer = unpack_tokens(greedy_tokens(np.asarray(prompt, dtype="<u4").tobytes(), n_tokens))
        streamed, moved, second = asyncio.run(self._move(front, prompt, answer, kills=kills))
        if streamed.error is not None or streamed.token_ids != answer or streamed.figures.get("migrations") != 1:
            self.wrong.append(f"{self.fleet.model}: {streamed.error}, {streamed.figures}, from engine {second}")
        self.fleet.until_free()
        for worker_id, engine in self.fleet.engines.items():
            if not engine.child.running:
                self._restarting = self._restarts.submit(self.fleet.restart, worker_id)
        return moved

    async def _move(
        self, front: FrontProcess | None, prompt: Sequence[int], answer: Sequence[int], *, kills: bool
    ) -> tuple[Streamed, Moved, int]:
        fleet, streamed = self.fleet, Streamed()
        if not kills:  # the stream moves as soon as its engine has stalled for long enough
            await asyncio.to_thread(self.ready)
            await asyncio.to_thread(
                wait_for, lambda: len(fleet.scores(prompt)) == len(fleet.places), VISIBLE_TIMEOUT_S, "both engines"
            )
        for worker_id, engine in fleet.engines.items():
            if engine.child.running:
                fleet.fault(worker_id, "stall", ANSWERED_TOKENS)
        read = self._read_generated if front is None else partial(self._read_stream, front)
        reading = asyncio.create_task(read(prompt, len(answer), streamed))
        first = await asyncio.to_thread(self._stalled)
        second = next(each for each in fleet.places if each != first)
        await asyncio.to_thread(self.ready)
        fleet.fault(second, "none")
        before = fleet.info(second)["computed_tokens"]
        began_s = detected_s = streamed.arrivals[-1][0]
        if kills:
            await asyncio.to_thread(self._await_known, [*prompt, *answer[:ANSWERED_TOKENS]], second)
            async with _closing(fleet.engines[first].url) as closed:
                await asyncio.sleep(QUIET_S)
                began_s = time.monotonic()
                fleet.engines[first].child.signal(signal.SIGKILL)
                detected_s = await closed
        while streamed.arrivals[-1][1] <= ANSWERED_TOKENS and not reading.done():
            await asyncio.sleep(0.05)
        info = fleet.info(second)
        await reading
        if not kills:
            fleet.fault(first, "none")
        next_s = next((at_s for at_s, n in streamed.arrivals if n > ANSWERED_TOKENS), float("inf"))
        times = (next_s - began_s) * 1000.0, (detected_s - began_s) * 1000.0
        return streamed, Moved(*times, info["computed_tokens"] - before, info["n_blocks_used"]), second

    async def _read_stream(self, front: FrontProcess, prompt: Sequence[int], n_tokens: int, streamed: Streamed) -> None:
        """Read an answer that a front passes on."""
        body, headers = self.fleet.request(prompt, n_tokens), {"Content-Type": "application/json"}
        async with aiohttp.ClientSession() as http:
            await read_stream(http, f"{front.url}/v1/completions", body, headers, into=streamed)

    async def _read_generated(self, prompt: Sequence[int], n_tokens: int, streamed: Streamed) -> None:
        """Read an answer of the Python client."""
        async with KvRouterClient(self.fleet.router.url, engine=EngineOptions(stall_timeout_s=60.0)) as client:
            generation = await client.generate(prompt, self.fleet.model, {"max_tokens": n_tokens})
            async for chunk in generation:
                streamed.token_ids += chunk["token_ids"]
                streamed.arrivals.append((time.monotonic(), len(streamed.token_ids)))
            streamed.figures = {"migrations": generation.figures.migrations}

    def _stalled(self) -> int:
        """Wait until an engine has stalled, and return its worker."""
        found: list[int] = []

        def has_stalled() -> bool:
            running = [each for each, engine in self.fleet.engines.items() if engine.child.running]
            found[:] = [each for each in running if self.fleet.info(each)["fault"]["stalled"]]
            return bool(found)

        wait_for(has_stalled, VISIBLE_TIMEOUT_S, "an engine to stall")
        return found[0]

    def _await_known(self, tokens: Sequence[int], second: int) -> None:
        """Wait until the router knows the second engine, and that it reaches everything if there is a pool."""
        n_blocks = 0 if self.fleet.pool is None else len(tokens) // BLOCK
        wait_for(
            lambda: sum(self.fleet.scores(tokens).get(second, (-1,))[:2]) == n_blocks,
            VISIBLE_TIMEOUT_S,
            "every block to be known as pooled",
        )


@contextlib.asynccontextmanager
async def _closing(url: str) -> AsyncIterator[Awaitable[float]]:
    """Open an idle connection to an engine; yields what waits until it is closed, and returns when that was."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)

    async def closed() -> float:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        return time.monotonic()

    waiting = asyncio.create_task(closed())
    try:
        yield waiting
    finally:
        waiting.cancel()
        writer.close()


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--class", "classes", type=click.Choice(["70b", "8b"]), multiple=True, default=("70b", "8b"))
@click.option("--way", "ways", type=click.Choice(WAYS), multiple=True, default=WAYS)
def main(json_path: Path | None, repeats: int, classes: tuple[ModelClass, ...], ways: tuple[str, ...]) -> None:
    """Measure, and say whether the bars are met."""
    samples, report, console = Samples(), Report("migration", {}, []), wide_console()
    began_s = time.monotonic()
    worker_ids, n_prompts = count(1, 2), count(1)
    with machinery(partitions=4) as parts:
        stack = parts.stack
        worker = stack.worker()
        for model_class in classes:
            benches = [Bench(stack, worker, model_class, way, next(worker_ids)) for way in ways]
            with ThreadPoolExecutor(len(benches)) as starting:
                list(starting.map(lambda bench: bench.fleet.start(), benches))
            fleet = benches[0].fleet  # fronts serve all of them
            front = fleet.front(f"front-{model_class}", [worker], front_stall_timeout_s=60.0)
            hasty = fleet.front(f"hasty-{model_class}", [worker], front_stall_timeout_s=STALL_TIMEOUT_S)
            for _ in range(repeats):
                for bench in benches:
                    moved = bench.move(front, next(n_prompts))
                    add(samples, model_class, bench, moved)
                    console.print(f"{time.monotonic() - began_s:5.0f} s, {bench.fleet.model}: {moved}")
            for bench in benches:
                if bench.way == POOLED:
                    name = f"stalled, with a limit of {STALL_TIMEOUT_S:g} s: to the next token"
                    moved = bench.move(hasty, next(n_prompts), kills=False)
                    samples.add(model_class, name, "ms", OURS, moved.took_ms)
                    add(samples, f"{model_class}, generate", bench, bench.move(None, next(n_prompts)))
                bench.stop()
                report.wrong += bench.wrong
            front.child.stop()
            hasty.child.stop()
    report.rows = samples.rows()
    report.bars += bars(report.rows)
    report.print(console)
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


def add(samples: Samples, case: str, bench: Bench, moved: Moved) -> None:
    """Note what a move took, and its parts."""
    series = OURS if bench.way == POOLED else bench.way
    samples.add(case, TO_NEXT_TOKEN, "ms", series, moved.took_ms)
    computed_ms = bench.step_ms if bench.way != NO_POOL else bench.config.prefill_ms(CONTEXT_TOKENS + 1)
    rest_ms = moved.took_ms - moved.detected_ms - bench.load_ms - computed_ms
    for name, value in (
        ("of it: detection", moved.detected_ms),
        ("of it: load", bench.load_ms),
        ("of it: one step, or the prefill", computed_ms),
        (ALL_ELSE, rest_ms),
    ):
        samples.add(case, name, "ms", series, value)
    samples.add(case, PREFILLED_AGAIN, "", series, moved.computed - 1.0)
    samples.add(case, "blocks on the backup", "", series, float(moved.n_blocks))


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the requirements of what was measured. No ratio is required of the client's `generate`."""
    found: list[Bar] = []
    for row in rows:
        if row.metric == TO_NEXT_TOKEN and row.peer == NO_POOL:
            most, ratio = RATIO_MAX[row.case], row.ratio or float("inf")
            found.append(
                Bar(f"{row.case}: at most {most:.0%} of the time without a pool", ratio <= most, f"{ratio:.1%}")
            )
    for metric, most, unit in ((ALL_ELSE, REST_MS_MAX, " ms"), (PREFILLED_AGAIN, 0.0, "")):
        values = {row.case: row.value for row in rows if row.metric == metric}
        for case, value in values.items():
            name = f"{case}: {metric.removeprefix('of it: ')} at most {most:g}{unit}"
            found.append(Bar(name, value <= most, f"{value:.1f}"))
    return found


if __name__ == "__main__":
    main()
