"""`--probe`: one small prompt to each engine, and whether its blocks get the hashes that a router computes.

What lives here: the prompt, the engine's events that it causes, and the question to the routers. What must not: what is
wrong with the result (checks).

The prompt is random text, or random token ids, so that no cache has it. The engine computes one token. Neither the
prompt nor its hashes are logged or written anywhere.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import aiohttp
import zmq.asyncio

from streams.core.events import BlocksStored
from streams.core.hashing import local_hashes
from streams.core.workers import Worker
from streams.doctor.engine_reading import _TICK_S, _of_ranks
from streams.doctor.http_reading import call
from streams.doctor.observations import EngineSeen, ProbeSeen
from streams.engines.connection import Change, EventConnection
from streams.engines.dialects.registry import DEFAULT_DIALECT
from streams.errors import BadRecord

#: Blocks of the prompt. Engines compute the last token again, so one more token follows them.
PROBE_BLOCKS = 2

#: Token ids of the prompt of an engine without `/tokenize`. Nearly every vocabulary has them, and special tokens are
#: usually below.
_TOKEN_IDS = range(1000, 20_000)

#: How long the events of the prompt may take, and then the routers.
EVENTS_TIMEOUT_S = 2.0
ROUTERS_TIMEOUT_S = 3.0

#: Engines that are probed at a time.
PROBES_AT_ONCE = 8


async def probe_engines(
    http: aiohttp.ClientSession,
    engines: Sequence[EngineSeen],
    routers: Sequence[str],
    headers: Mapping[str, str],
    router_headers: Mapping[str, str],
) -> tuple[EngineSeen, ...]:
    """Probe the engines that answer. headers, router_headers: with the keys that engines and routers require."""
    turns = asyncio.Semaphore(PROBES_AT_ONCE)
    context = zmq.asyncio.Context()

    async def one(engine: EngineSeen) -> EngineSeen:
        if engine.error is not None:
            return engine
        async with turns:
            return replace(engine, probe=await _probe(http, context, engine, routers, headers, router_headers))

    try:
        return tuple(await asyncio.gather(*map(one, engines)))
    finally:
        context.destroy(linger=0)


async def _probe(
    http: aiohttp.ClientSession,
    context: zmq.asyncio.Context,
    engine: EngineSeen,
    routers: Sequence[str],
    headers: Mapping[str, str],
    router_headers: Mapping[str, str],
) -> ProbeSeen:
    worker = engine.worker
    size = worker.block_size
    tokens = await _new_prompt(http, worker, headers, PROBE_BLOCKS * size + 1)
    n_blocks = (len(tokens) - 1) // size
    wanted = set(local_hashes(tokens[: n_blocks * size], size).tolist())
    prompt = {"model": worker.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    with ExitStack() as stack:
        listeners = [
            _Listener(stack.enter_context(EventConnection(context, address)), size)
            for address, seen in zip(_of_ranks(worker, worker.events_endpoint), engine.events, strict=False)
            if seen.error is None
        ]
        for listener in listeners:
            await listener.connected()
        answer = await call(http, f"{worker.url}/v1/completions", headers, prompt)
        if not answer.ok:
            return ProbeSeen(error=answer.error or f"the status of its answer is {answer.status}")
        until_s = time.monotonic() + EVENTS_TIMEOUT_S
        stored: set[int] = set()
        while listeners and time.monotonic() < until_s and not wanted <= stored:
            await asyncio.sleep(_TICK_S)
            for listener in listeners:
                listener.attend()
                stored |= listener.stored
        n_events = sum(listener.n_events for listener in listeners)
    matched = {url: await _matched(http, url, engine, tokens, n_blocks, router_headers) for url in routers}
    return ProbeSeen(None, n_blocks, len(wanted & stored) if listeners else None, n_events, matched)


async def _new_prompt(http: aiohttp.ClientSession, worker: Worker, headers: Mapping[str, str], n: int) -> list[int]:
    """Token ids of a prompt that no engine has computed yet: those of random text, as the engine itself has them."""
    text = " ".join(random.randbytes(4).hex() for _ in range(n))
    answer = await call(http, f"{worker.url}/tokenize", headers, {"model": worker.model, "prompt": text})
    known = answer.json() if answer.ok else None
    tokens = known.get("tokens") if isinstance(known, dict) else None
    if isinstance(tokens, list) and len(tokens) >= n and all(isinstance(token, int) for token in tokens):
        return tokens[:n]
    return random.sample(_TOKEN_IDS, min(n, len(_TOKEN_IDS)))


class _Listener:
    """The events of one rank during the probe. stored: local hashes of the blocks that they store."""

    def __init__(self, connection: EventConnection, block_size: int) -> None:
        self._connection = connection
        self._decoder = DEFAULT_DIALECT.decoder(block_size)
        self.stored: set[int] = set()
        self.n_events = 0

    async def connected(self) -> None:
        """Wait until the connection is complete, or for a moment."""
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            if self._connection.attend(time.monotonic()) is Change.COMPLETED:
                # A publisher sends to a subscriber once it has read the subscription, which follows the handshake.
                await asyncio.sleep(0.1)
                return
            await asyncio.sleep(_TICK_S)

    def attend(self) -> None:
        """Take what has arrived."""
        self._connection.attend(time.monotonic())
        if not self._connection.has_message:
            return
        frames = self._connection.take()
        self.n_events += 1
        try:
            batch = self._decoder.decode(frames[-1])
        except BadRecord:
            return
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self.stored.update(event.local.tolist())


async def _matched(
    http: aiohttp.ClientSession,
    url: str,
    engine: EngineSeen,
    tokens: list[int],
    n_blocks: int,
    headers: Mapping[str, str],
) -> int | str:
    """Blocks of the prompt that a router finds on the worker, or why it does not answer."""
    until_s, matched = time.monotonic() + ROUTERS_TIMEOUT_S, 0
    body = {"model": engine.worker.model, "token_ids": tokens}
    while True:
        answer = await call(http, f"{url.rstrip('/')}/matches", headers, body)
        if not answer.ok:
            return answer.error or f"the status of its answer is {answer.status}"
        rows = (answer.json() or {}).get("workers", [])
        matched = max((row["scores"] for row in rows if row["worker_id"] == engine.worker.worker_id), default=0)
        if matched >= n_blocks or time.monotonic() >= until_s:
            return matched
        await asyncio.sleep(0.1)
