"""`python -m benchmarks.migration`: the time from the death of an engine to the next token of its stream.

What lives here: engines of two classes of models in real time, killed at a context of 32,768 tokens, with everything in
a pool, without a pool, and with a backup that reads the pool in place; and a stall. What must not: the processes
(streams.local.moving).

The engine stalls at a token first, until the router knows every block, so that the kill meets a stream of which
everything is pooled. The time is that of the client: from SIGKILL to the next token. Besides the load and one step of
the engine, it has to find out, to route, to send the context, and to read it. Use an idle machine. Exits 1 if a stream
differs from an undisturbed one.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import click
import numpy as np

from benchmarks.machinery import machinery
from benchmarks.report import OURS, Bar, Report, Row, Samples, wide_console
from streams.local.moving import Place, PooledFleet, Streamed, read_stream
from streams.local.stack import FrontProcess
from streams.sim.engine_config import EngineConfig
from streams.sim.pool import PoolConfig
from streams.sim.speeds import DEVICES, MODELS, ModelClass
from streams.sim.synthetic_tokens import greedy_tokens, unpack_tokens
from streams.waiting import wait_for

BLOCK = 16
#: Of prompt and answer when the engine is killed. The token after the last block has not been computed by anyone: to
#: compute it is the next step of any engine.
CONTEXT_TOKENS = 32_768
ANSWERED_TOKENS = 65
PROMPT_TOKENS = CONTEXT_TOKENS + 1 - ANSWERED_TOKENS
#: Tokens that come after the move, during which the blocks of the backup are counted.
MORE_TOKENS = 60

#: The most of the time without a pool that the move may take, by class.
RATIO_MAX: dict[ModelClass, float] = {"70b": 0.10, "8b": 0.20}
#: What may be added to load and step.
REST_MS_MAX = 20.0
STALL_TIMEOUT_S = 1.0
VISIBLE_TIMEOUT_S = 60.0

POOLED, IN_PLACE, NO_POOL = "pool", "in place", "no pool"


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


def pool_of(model_class: ModelClass) -> PoolConfig:
    """Return a pool at 64 GB/s for each worker."""
    bandwidth = DEVICES["cxl-x16"]
    return PoolConfig(
        f"pool-{model_class}",
        block_size=BLOCK,
        bytes_per_token=MODELS[model_class].bytes_per_token,
        capacity_blocks=1 << 18,
        offload_gb_per_s=bandwidth,
        load_gb_per_s=bandwidth,
        link="own",
    )


class Bench:
    """One fleet of two engines, whose streams move from one to the other."""

    def __init__(self, fleet: PooledFleet, front: FrontProcess, n_prompts: int) -> None:
        """n_prompts: of all benches before, since no two prompts may be equal."""
        self.fleet = fleet
        self.front = front
        self.n_prompts = n_prompts
        self.wrong: list[str] = []

    def move(self, *, kills: bool = True) -> tuple[float, int, int]:
        """Move one stream; return the ms to the next token, the tokens computed, and the blocks of the backup.

        kills: the engine is killed; otherwise it stays stalled, and the time is from its last byte.
        """
        self.n_prompts += 1
        prompt = [(at * 31 + self.n_prompts) % 50_000 for at in range(PROMPT_TOKENS)]
        n_tokens = ANSWERED_TOKENS + MORE_TOKENS
        answer = unpack_tokens(greedy_tokens(np.asarray(prompt, dtype="<u4").tobytes(), n_tokens))
        streamed, took_s, second, n_blocks, computed = asyncio.run(self._move(prompt, answer, n_tokens, kills))
        if streamed.error is not None or streamed.token_ids != answer or streamed.figures.get("migrations") != 1:
            self.wrong.append(f"{self.fleet.model}: {streamed.error}, {streamed.figures}, from engine {second}")
        for worker_id, engine in self.fleet.engines.items():
            if not engine.child.running:
                self.fleet.restart(worker_id)
        self.fleet.until_free()
        return took_s * 1000.0, computed, n_blocks

    async def _move(
        self, prompt: Sequence[int], answer: Sequence[int], n_tokens: int, kills: bool
    ) -> tuple[Streamed, float, int, int, int]:
        fleet = self.fleet
        body = fleet.request(prompt, n_tokens)
        streamed = Streamed()
        for worker_id in fleet.places:
            fleet.fault(worker_id, "stall", ANSWERED_TOKENS)
        async with aiohttp.ClientSession() as http:
            url = f"{self.front.url}/v1/completions"
            reading = asyncio.create_task(
                read_stream(http, url, body, {"Content-Type": "application/json"}, into=streamed)
            )
            first = await asyncio.to_thread(self._stalled)
            second = next(each for each in fleet.places if each != first)
            fleet.fault(second, "none")
            before = fleet.info(second)["computed_tokens"]
            if kills:
                await asyncio.to_thread(self._await_known, [*prompt, *answer[:ANSWERED_TOKENS]], second)
                await asyncio.sleep(0.5)  # nothing else is going on
                began_s = time.monotonic()
                fleet.engines[first].child.signal(signal.SIGKILL)
            else:
                began_s = streamed.arrivals[-1][0]
            while not streamed.arrivals or streamed.arrivals[-1][1] <= ANSWERED_TOKENS:
                await asyncio.sleep(0.05)
                if reading.done():
                    break
            info = fleet.info(second)
            await reading
            if not kills:
                fleet.fault(first, "none")
        next_s = next((at_s for at_s, n in streamed.arrivals if n > ANSWERED_TOKENS), float("inf"))
        return streamed, next_s - began_s, second, info["n_blocks_used"], info["computed_tokens"] - before

    def _stalled(self) -> int:
        """Wait until an engine has stalled, and return its worker."""
        found: list[int] = []

        def has_stalled() -> bool:
            found[:] = [each for each in self.fleet.places if self.fleet.info(each)["fault"]["stalled"]]
            return bool(found)

        wait_for(has_stalled, VISIBLE_TIMEOUT_S, "an engine to stall")
        return found[0]

    def _await_known(self, tokens: Sequence[int], second: int) -> None:
        """Wait until the router knows that the second engine reaches everything, if there is a pool."""
        if self.fleet.pool is not None:
            n_blocks = len(tokens) // BLOCK
            wait_for(
                lambda: sum(self.fleet.scores(tokens)[second][:2]) == n_blocks,
                VISIBLE_TIMEOUT_S,
                "every block to be known as pooled",
            )


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--class", "classes", type=click.Choice(["70b", "8b"]), multiple=True, default=("70b", "8b"))
def main(json_path: Path | None, repeats: int, classes: tuple[ModelClass, ...]) -> None:
    """Measure, and say whether the bars are met."""
    samples, report, console = Samples(), Report("migration", {}, []), wide_console()
    n_prompts = 0
    worker_ids = iter(range(1, 1000, 2))
    with machinery(partitions=4) as parts:
        stack = parts.stack
        worker = stack.worker()
        for model_class in classes:
            config, pool = engine_of(model_class), pool_of(model_class)
            in_place_us = pool.bytes_per_token / pool.load_gb_per_s / 1e3
            for way, pools, options in (
                (POOLED, pool, ()),
                (IN_PLACE, replace(pool, pool_id=f"{pool.pool_id}-in-place"), ("--pool-reads", "in-place")),
                (NO_POOL, None, ()),
            ):
                fleet = PooledFleet(
                    stack,
                    worker,
                    f"{model_class}-{way.replace(' ', '-')}",
                    replace(config, in_place_us_per_token=in_place_us if way == IN_PLACE else 0.0),
                    pool=pools,
                    time_scale=1.0,
                    places=(Place(options=options), Place(options=options)),
                    first_worker_id=next(worker_ids),
                )
                fleet.start()
                front = fleet.front(f"front-{fleet.model}", [worker], front_stall_timeout_s=60.0)
                bench = Bench(fleet, front, n_prompts)
                for _ in range(repeats):
                    took_ms, computed, n_blocks = bench.move()
                    step_ms = config.prefill_ms(1)
                    load_ms = CONTEXT_TOKENS // BLOCK * pool.load_ms_per_block if way == POOLED else 0.0
                    samples.add(model_class, "from SIGKILL to the next token", "ms", _series(way), took_ms)
                    samples.add(model_class, "tokens prefilled again", "", _series(way), computed - 1.0)
                    samples.add(model_class, "blocks on the backup", "", _series(way), float(n_blocks))
                    if way == POOLED:
                        samples.add(model_class, "of it: load", "ms", OURS, load_ms + pool.latency_ms)
                        samples.add(model_class, "of it: one step", "ms", OURS, step_ms)
                        rest_ms = took_ms - load_ms - pool.latency_ms - step_ms
                        samples.add(model_class, "of it: detection and all else", "ms", OURS, rest_ms)
                    console.print(f"{fleet.model}: {took_ms:.1f} ms, {computed} tokens computed, {n_blocks} blocks")
                front.child.stop()
                if way == POOLED:
                    hasty = fleet.front(f"hasty-{fleet.model}", [worker], front_stall_timeout_s=STALL_TIMEOUT_S)
                    bench.front = hasty
                    for _ in range(max(1, repeats // 2)):
                        took_ms, _, _ = bench.move(kills=False)
                        name = f"stalled, with a limit of {STALL_TIMEOUT_S:g} s: to the next token"
                        samples.add(model_class, name, "ms", OURS, took_ms)
                    hasty.child.stop()
                n_prompts = bench.n_prompts
                report.wrong += bench.wrong
                fleet.stop()
    report.rows = samples.rows()
    report.bars += bars(report.rows, classes)
    report.print(console)
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


def _series(way: str) -> str:
    """Name the way of a figure: ours is the pool, and others are what it is compared with."""
    return OURS if way == POOLED else way


def bars(rows: Sequence[Row], classes: Sequence[ModelClass]) -> list[Bar]:
    """Return the requirements of each class."""
    found: list[Bar] = []
    for model_class in classes:
        of_class = [row for row in rows if row.case == model_class]
        took = next(row for row in of_class if row.metric.startswith("from SIGKILL") and row.peer == NO_POOL)
        most = RATIO_MAX[model_class]
        ratio = took.ratio or float("inf")
        found.append(
            Bar(f"{model_class}: at most {most:.0%} of the time without a pool", ratio <= most, f"{ratio:.1%}")
        )
        rest = next(row for row in of_class if row.metric.startswith("of it: detection"))
        found.append(
            Bar(f"{model_class}: detection and all else at most 20 ms", rest.value <= REST_MS_MAX, f"{rest.value:.1f}")
        )
        again = next(row for row in of_class if row.metric.startswith("tokens prefilled"))
        found.append(Bar(f"{model_class}: no token prefilled again", again.value == 0, f"{again.value:.0f}"))
    return found


if __name__ == "__main__":
    main()
