"""`python -m tests.migrations`: streams under load whose engines fail at random points, and what must hold of each.

What lives here: the clients, the failures, and the checks. What must not: how processes start (streams.lab.stack).
Everything is real: a Kafka, a worker with its router, a bridge, a pool, engines and a front, each a process. Engines
are killed with SIGKILL from outside and on command at a random token, stall, and refuse a stream; they are started
again, with an empty cache. One is away at a time, and another one refuses streams meanwhile, so that streams move more
than once. One engine of six does not reach the pool. (A front does not return to an engine that has failed a stream, so
with fewer engines, a stream may have none left.)

Checked: every stream is complete, and has every token exactly once, equal to those of an undisturbed engine, or it met
two failures in short succession and ended with the reason that docs/front.md gives; no booking is left; every prefill
of a resumed stream computed exactly the tokens that neither the engine nor its pool held; and what the front says about
tokens that were prefilled again is what the engines did. The last two follow from the journals of engines and pool
(streams.lab.engines.journal), not from what the front or the router believe. A thousand migrations take about ten
minutes of two cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click
import numpy as np

from streams.client.failed_engines import BROKE_ENGINES
from streams.core.hashing import local_hashes, sequence_hashes
from streams.lab.demo.pooled_fleet import FOUR_PLACES, Place, PooledFleet, Streamed, read_stream
from streams.lab.engines.chat_template import render
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.faults import FaultKind
from streams.lab.engines.journal import CacheHistory
from streams.lab.engines.pool import PoolConfig
from streams.lab.engines.synthetic_tokens import answer_tokens, greedy_tokens, unpack_tokens
from streams.lab.kafka.broker import LocalKafka
from streams.lab.processes import Children
from streams.lab.stack import FrontProcess, RouterProcess, Stack, get_bytes
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.warming import WORKER, warm
from tests.helpers.broker import broker_config

MODEL = "m"
ENGINE = EngineConfig(block_size=16, n_blocks=4096)
#: Faster than the default, so that most blocks have arrived when an engine is killed.
POOL = PoolConfig("rack1", block_size=ENGINE.block_size, capacity_blocks=1 << 20, offload_gb_per_s=64.0, link="own")
#: An answer of 250 tokens takes 5 s of model time.
TIME_SCALE = 10.0

SIX_PLACES = (*FOUR_PLACES, Place(), Place(expert=9))

CLIENTS = 12
PROMPT_TOKENS = (40, 600)
ANSWER_TOKENS = (100, 400)
#: Beginnings that prompts share, so that engines have some blocks of their own.
SHARED_PREFIXES = 4

#: An engine that sends nothing for this long has stalled.
STALL_TIMEOUT_S = 1.5
#: How long a failure may wait for a stream that meets it.
FAULT_PATIENCE_S = 4.0
#: Within this time before its first token, a prefill looked up its blocks.
LOOKUP_S = 5.0

#: Streams that may meet two failures in so short a time that the front takes them for the cause. Failures are far more
#: frequent here than anywhere else.
BROKE_ENGINES_SHARE_MAX = 0.02

#: What a front needs so that no stream ends early while half of the engines are away.
FRONT: dict[str, Any] = {
    "front_stall_timeout_s": STALL_TIMEOUT_S,
    "front_migrations_max": 40,
    "front_migration_timeout_s": 60.0,
    "front_attempts_max": 10,
}


@dataclass(slots=True)
class Asked:
    """A request and its answer, as an undisturbed engine gives it. tokens: the prompt."""

    request_id: str
    path: str
    body: dict[str, Any]
    tokens: list[int]
    answer: list[int]
    streamed: Streamed = field(default_factory=Streamed)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill of one engine, from its journal. sent: whether its first token was sent."""

    worker_id: int
    at_ns: int
    prompt_tokens: int
    cached_tokens: int
    pooled_tokens: int
    sent: bool

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Requests:
    """Random requests, each with its expected answer."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._n = 0
        self._shared = [[rng.randrange(50_000) for _ in range(rng.randrange(32, 160))] for _ in range(SHARED_PREFIXES)]

    def next(self) -> Asked:
        """Return the next request."""
        rng = self._rng
        self._n += 1
        n_answer = rng.randint(*ANSWER_TOKENS)
        body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": n_answer}
        if rng.random() < 0.3:
            words = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(*PROMPT_TOKENS)))
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": words}]
            tokens = list(render(body).encode())
        else:
            path = "/v1/completions"
            tokens = rng.choice(self._shared) + [rng.randrange(50_000) for _ in range(rng.randint(*PROMPT_TOKENS))]
            body["prompt"] = tokens
        packed = np.asarray(tokens, dtype="<u4").tobytes()
        answer = greedy_tokens(packed, n_answer)
        if rng.random() < 0.3:
            body["seed"] = rng.randrange(1 << 31)
            answer = answer_tokens(body["seed"], len(tokens), n_answer)
        if rng.random() < 0.5:
            body["return_token_ids"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.3:
            body["min_tokens"] = rng.randrange(n_answer)
        return Asked(f"moving-{self._n}", path, body, tokens, unpack_tokens(answer))


class MigrationRun:
    """One run on a fleet whose engines and pool have journals. `run` makes at least so many migrations, and checks."""

    def __init__(self, fleet: PooledFleet, front: FrontProcess, seed: int) -> None:
        self.fleet = fleet
        self.front = front
        self.asked: list[Asked] = []
        self.faults: Counter[str] = Counter()
        self.n_migrations = 0
        self._rng = random.Random(seed)
        self._requests = Requests(random.Random(seed + 1))
        self._enough = asyncio.Event()
        self._broken: set[int] = set()

    async def run(self, n_migrations: int, clients: int = CLIENTS) -> None:
        """Serve requests and break engines until so many migrations were made; end with all engines running."""

        async def client() -> None:
            async with aiohttp.ClientSession() as http:
                while not self._enough.is_set():
                    await self._one(http, n_migrations)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
            group.create_task(self._break_engines(["sigkill", "sigkill", FaultKind.DIE, FaultKind.STALL]))
            group.create_task(self._break_engines([FaultKind.REFUSE]))

    async def _one(self, http: aiohttp.ClientSession, n_enough: int) -> None:
        asked = self._requests.next()
        self.asked.append(asked)
        headers = {"X-Request-Id": asked.request_id, "Content-Type": "application/json"}
        await read_stream(http, f"{self.front.url}{asked.path}", asked.body, headers, into=asked.streamed)
        self.n_migrations += asked.streamed.figures.get("migrations", 0)
        if self.n_migrations >= n_enough:
            self._enough.set()

    async def _break_engines(self, kinds: Sequence[str]) -> None:
        while not self._enough.is_set():
            worker_id = self._rng.choice([each for each in self.fleet.places if each not in self._broken])
            self._broken.add(worker_id)
            try:
                await self._break(worker_id, self._rng.choice(kinds))
            finally:
                self._broken.discard(worker_id)
            await asyncio.sleep(self._rng.random() * 0.5)

    async def _break(self, worker_id: int, kind: str) -> None:
        """Let one engine fail in one way, and bring it back."""
        fleet = self.fleet
        if kind == "sigkill":
            await asyncio.sleep(self._rng.random())
            fleet.engines[worker_id].child.kill()
            self.faults[kind] += 1
        else:
            await asyncio.to_thread(fleet.fault, worker_id, kind, self._rng.randrange(ANSWER_TOKENS[0]))
            if await self._met(worker_id):
                self.faults[kind] += 1
            if kind == FaultKind.STALL:
                await asyncio.sleep(STALL_TIMEOUT_S + 0.5)
        try:
            await asyncio.to_thread(fleet.fault, worker_id, "none")
        except OSError:  # it is dead, or met its fault just now
            await asyncio.to_thread(fleet.restart, worker_id)

    async def _met(self, worker_id: int) -> bool:
        """Wait until a stream has met the fault of an engine; returns whether one did in time."""
        until_s = time.monotonic() + FAULT_PATIENCE_S
        while time.monotonic() < until_s:
            if not self.fleet.engines[worker_id].child.running:
                return True
            try:
                fault = (await asyncio.to_thread(self.fleet.info, worker_id))["fault"]
            except OSError:
                continue  # it is dying
            if not fault["armed"]:
                return True
            await asyncio.sleep(0.05)
        return False

    # -- checks --------------------------------------------------------------------------------------------------------

    def wrong(self) -> list[str]:
        """Wait for the end of all bookings, and return what is wrong, one line for each."""
        try:
            self.fleet.until_free(20.0)
            left = []
        except Exception as exc:
            left = [f"bookings are left: {exc}"]
        truth = Truth(self.fleet)
        wrong = [*left, *truth.wrong, *(line for asked in self.asked for line in self._wrong_of(asked, truth))]
        n_broke_engines = sum(map(self._broke_engines, self.asked))
        if n_broke_engines > 1 + len(self.asked) * BROKE_ENGINES_SHARE_MAX:
            wrong.append(f"{n_broke_engines} streams ended as requests that break engines")
        return wrong

    def _wrong_of(self, asked: Asked, truth: Truth) -> Iterator[str]:
        got, body, who = asked.streamed, asked.body, asked.request_id
        if got.error is not None and (self._had_no_engine(asked) or self._broke_engines(asked)):
            return
        if got.error is not None:
            yield f"{who} ended with {got.error} after {len(got.text)} of {len(asked.answer)} tokens"
            return
        text = "".join(map(chr, asked.answer))
        if got.text != text:
            at = next((at for at, pair in enumerate(zip(got.text, text, strict=False)) if len(set(pair)) > 1), -1)
            yield f"{who} has another text from token {at} on, {len(got.text)} of {len(text)}: {got.figures}"
        if body.get("return_token_ids") and got.token_ids != asked.answer:
            yield f"{who} has other tokens: {len(got.token_ids)} of {len(asked.answer)}: {got.figures}"
        if (got.finish_reason, got.n_ends, len(got.ids)) != ("length", 1, 1):
            yield f"{who} ended with {got.finish_reason}, {got.n_ends} marks, and ids {got.ids}"
        if got.n_roles != ("messages" in body):
            yield f"{who} has {got.n_roles} roles"
        if "stream_options" in body:
            usage = got.usage or {}
            counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if counts != (len(asked.tokens), len(asked.answer)):
                yield f"{who} has usage {usage} for {len(asked.tokens)} and {len(asked.answer)} tokens"
        yield from truth.wrong_of(asked)

    def _had_no_engine(self, asked: Asked) -> bool:
        """Whether a stream ended properly because all engines had failed it but the one that may be away.

        Not with the six engines of `make migrations`, where each stream must be complete.
        """
        got, n_engines = asked.streamed, len(self.fleet.places)
        message = str((got.error or {}).get("message"))
        text = "".join(map(chr, asked.answer))
        n_failed = got.figures.get("migrations", 0) + 1
        return (
            n_engines < len(SIX_PLACES)
            and n_failed >= n_engines - 2
            and message.startswith("no other engine is left")
            and text.startswith(got.text)
            and (got.n_ends, got.finish_reason) == (1, None)
        )

    def _broke_engines(self, asked: Asked) -> bool:
        """Whether a stream ended properly because two engines broke before one of them had answered it much further.

        So ends a request that breaks engines; here it met two failures in short succession.
        """
        got = asked.streamed
        return (
            BROKE_ENGINES in str((got.error or {}).get("message"))
            and "".join(map(chr, asked.answer)).startswith(got.text)
            and (got.n_ends, got.finish_reason) == (1, None)
        )

    def summary(self) -> dict[str, Any]:
        """Return what happened."""
        figures = [asked.streamed.figures for asked in self.asked if asked.streamed.figures.get("migrations")]
        lost = sorted(each["lost_ms"] for each in figures)
        return {
            "streams": len(self.asked),
            "tokens": sum(len(asked.streamed.text) for asked in self.asked),
            "migrations": self.n_migrations,
            "streams_moved": len(figures),
            "most_in_one_stream": max((each["migrations"] for each in figures), default=0),
            "moved_more_than_once": sum(each["migrations"] > 1 for each in figures),
            "faults": dict(self.faults),
            "taken_for_the_cause": sum(map(self._broke_engines, self.asked)),
            "failures_met": self._failures_met(),
            "tokens_recovered": sum(each["tokens_recovered"] for each in figures),
            "tokens_prefilled_again": sum(each["tokens_prefilled_again"] for each in figures),
            "lost_ms_p50": statistics.median(lost) if lost else None,
            "lost_ms_max": lost[-1] if lost else None,
        }

    def _failures_met(self) -> dict[str, int]:
        """Count how streams met failures: their engine died, stalled or refused."""
        page = get_bytes(f"{self.front.url}/metrics").decode()
        found = re.findall(r'^kvstreams_front_engine_failures_total{how="(\w+)"} (\d+)', page, re.MULTILINE)
        return {how: int(n) for how, n in found}


class Truth:
    """What engines computed and what the pool held, from their journals. wrong: what the pool gave wrongly."""

    def __init__(self, fleet: PooledFleet) -> None:
        assert fleet.journals is not None
        self._fleet = fleet
        self.wrong: list[str] = []
        self.n_resumed = self.n_checked_in_pool = 0
        self._prefills: dict[str, list[Prefill]] = {}
        self._caches: dict[int, CacheHistory] = {}
        for worker_id in fleet.places:
            path = fleet.journals / f"{worker_id}.jsonl"
            self._caches[worker_id] = CacheHistory.read(path)
            for request, prefill in prefills_of(worker_id, path):
                self._prefills.setdefault(request, []).append(prefill)
        self._given: dict[tuple[str, ...], list[int]] = {}  # by keys asked for: how many were given, each time
        held: set[str] = set()
        for line in lines_of(fleet.journals / "pool.jsonl"):
            if "started" in line:
                held.clear()  # another process, in the place of one that was killed
            held.update(line.get("pooled", ()))
            held.difference_update(line.get("gone", ()))
            if "asked" in line:
                keys = tuple(line["asked"])
                n_held = next((at for at, key in enumerate(keys) if key not in held), len(keys))
                if n_held != line["n_given"]:
                    self.wrong.append(f"the pool held {n_held} of {len(keys)} blocks and gave {line['n_given']}")
                self._given.setdefault(keys, []).append(n_held)

    def wrong_of(self, asked: Asked) -> Iterator[str]:
        """Yield what is wrong about the prefills of a stream that has moved."""
        n_prompt = len(asked.tokens)
        resumed = [each for each in self._prefills.get(asked.request_id, ()) if each.prompt_tokens > n_prompt]
        self.n_resumed += len(resumed)
        for prefill in resumed:
            yield from self._wrong_prefill(asked, prefill)
        figures = asked.streamed.figures
        reported = figures.get("tokens_prefilled_again", 0)
        sent = sum(each.computed for each in resumed if each.sent)
        if reported != sent:
            figures_differ = f"{reported} tokens prefilled again for the front, {sent} for the engines"
            yield f"{asked.request_id}: {figures_differ}: {resumed}"

    def _wrong_prefill(self, asked: Asked, prefill: Prefill) -> Iterator[str]:
        """Compare what a resumed prefill computed with what the engine and the pool held."""
        size = self._fleet.config.block_size
        tokens = asked.tokens + asked.answer[: prefill.prompt_tokens - len(asked.tokens)]
        chain: list[int] = sequence_hashes(local_hashes(tokens, size)).tolist()
        n_most = (len(tokens) - 1) // size
        own, pooled = (prefill.cached_tokens - prefill.pooled_tokens) // size, prefill.pooled_tokens // size
        who = f"{asked.request_id} on engine {prefill.worker_id}"
        held = self._caches[prefill.worker_id].overlaps(chain, prefill.at_ns - int(LOOKUP_S * 1e9), prefill.at_ns)
        if own not in {min(n, n_most) for n in held}:
            yield f"{who} found {own} own blocks; it held {sorted(held)}"
        given = self._given.get(tuple(map(str, chain[own:n_most])), [])
        asks = own < n_most and prefill.worker_id in self._fleet.members
        if asks and pooled not in given:
            yield f"{who} loaded {pooled} of {n_most - own} blocks; the pool gave {given}"
        if not asks and pooled:
            yield f"{who} loaded {pooled} blocks from a pool that it does not reach"
        self.n_checked_in_pool += asks
        if prefill.computed != len(tokens) - size * (own + pooled):
            yield f"{who} computed {prefill.computed} of {len(tokens)} tokens with {own} and {pooled} blocks"


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a journal."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def prefills_of(worker_id: int, path: Path) -> list[tuple[str, Prefill]]:
    """Return the prefills of an engine, with the clients' ids of the requests."""
    found: list[tuple[str, dict[str, Any]]] = []
    for line in lines_of(path):
        if "prefilled" in line:
            figures = dict(line["prefilled"])
            request = str(figures.pop("request"))
            found.append((request, {**figures, "at_ns": line["at_ns"], "sent": False}))
        elif "sent" in line:
            for request, figures in reversed(found):
                if request == line["sent"]:
                    figures["sent"] = True
                    break
    return [(request, Prefill(worker_id, **figures)) for request, figures in found]


def start_fleet(
    stack: Stack, router: RouterProcess, journals: Path, places: Sequence[Place] = FOUR_PLACES
) -> PooledFleet:
    """Start the engines, the pool and the bridge of a run."""
    journals.mkdir(parents=True, exist_ok=True)
    fleet = PooledFleet(
        stack, router, MODEL, ENGINE, pool=POOL, time_scale=TIME_SCALE, places=places, journals=journals
    )
    fleet.start()
    return fleet


def undisturbed(fleet: PooledFleet, worker_id: int, asked: Sequence[Asked]) -> list[str]:
    """Compare the expected answers of completions with those of an engine that nothing disturbs."""
    wrong = []
    for each in asked:
        if "prompt" in each.body and "seed" not in each.body:
            answer = fleet.complete(worker_id, each.tokens, len(each.answer))
            if answer["choices"][0]["token_ids"] != each.answer:
                wrong.append(f"{each.request_id} has another answer on an undisturbed engine")
    return wrong


@click.command()
@click.option("--migrations", default=1000, show_default=True)
@click.option("--clients", default=CLIENTS, show_default=True)
@click.option("--seed", type=int, default=None, help="default: a random one, which is printed")
@click.option("--kafka", default=None, help="address of a running Kafka; by default one is started")
@click.option("--keep", type=click.Path(path_type=Path), default=None, help="folder for logs and journals")
def main(migrations: int, clients: int, seed: int | None, kafka: str | None, keep: Path | None) -> None:
    """Exit with status 1 if a stream, a prefill or a booking is not as it must be."""
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which `timeout` sends: stop everything
    warm(WORKER)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep
        own = None if kafka is not None else LocalKafka(broker_config(folder / "kafka"))
        try:
            scope = Settings(
                kafka=own.up().bootstrap if own is not None else str(kafka),
                topic_prefix=f"moving-{seed}-",
                partitions=4,
                data_dir=str(folder / "state"),
            )
            with Children() as children:
                wrong = _run(Stack(scope, folder, children), folder / "journals", migrations, clients, seed)
        finally:
            if own is not None:
                own.down()
    for line in wrong[:50]:
        print(line)
    print(f"{len(wrong)} wrong")
    sys.exit(1 if wrong else 0)


def _run(stack: Stack, journals: Path, migrations: int, clients: int, seed: int) -> list[str]:
    worker = stack.worker()
    fleet = start_fleet(stack, worker, journals, SIX_PLACES)
    front = fleet.front("front", [worker], **FRONT)
    run = MigrationRun(fleet, front, seed)

    async def watch() -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(run.run(migrations, clients))
            while not running.done():
                await asyncio.wait([running], timeout=20.0)
                print(f"{run.n_migrations} migrations, {len(run.asked)} streams, {dict(run.faults)}", flush=True)

    began_s = time.monotonic()
    asyncio.run(watch())
    print(f"{time.monotonic() - began_s:.0f} s", flush=True)
    print(json.dumps(run.summary(), indent=2))
    wait_for(lambda: fleet.n_bookings() == 0, 60.0, "the end of every booking")
    return [*run.wrong(), *undisturbed(fleet, min(fleet.places), run.asked[:20])]


if __name__ == "__main__":
    main()
