"""Reads the engines of the registry: their HTTP servers, their event sockets and their replay sockets.

What lives here: these calls and sockets, with the bridge's own code for both protocols. What must not: what is wrong
with them (checks), and the probe (probe).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress

import aiohttp
import zmq.asyncio

from streams.core.workers import Worker
from streams.doctor.http_reading import HttpReading, call
from streams.doctor.observations import EngineSeen, SocketSeen
from streams.engines.address import BIND, rank_endpoints
from streams.engines.connection import Change, EventConnection
from streams.engines.metrics import parse_block_size, tokens_processed
from streams.engines.replay import ReplaySilent, replay
from streams.errors import BadRecord

#: Engines that are read at a time; each needs up to three sockets per rank.
ENGINES_AT_ONCE = 32

#: How long the events of an engine are listened to. The metrics page is read before and after it.
LISTEN_S = 1.0

#: A replay socket answers within 100 ms.
REPLAY_TIMEOUT_S = 2.0

#: Attempts to connect to an event socket. One may fail while an engine starts.
_ATTEMPTS = 2

#: A batch number that no engine has reached: its request is answered at once, without a batch.
_BEYOND_ALL = (1 << 63) - 1

_TICK_S = 0.02

#: How names of metrics of LMCache's connector begin, which vLLM shows on its own page.
_LMCACHE = b"\nlmcache:"


async def read_engines(
    http: aiohttp.ClientSession, workers: Sequence[Worker], headers: Mapping[str, str]
) -> tuple[EngineSeen, ...]:
    """Read all engines. headers: with the key that they require, if any."""
    turns = asyncio.Semaphore(ENGINES_AT_ONCE)
    context = zmq.asyncio.Context()

    async def one(worker: Worker) -> EngineSeen:
        async with turns:
            return await _read_engine(http, context, worker, headers)

    try:
        return tuple(await asyncio.gather(*map(one, workers)))
    finally:
        context.destroy(linger=0)


async def _read_engine(
    http: aiohttp.ClientSession, context: zmq.asyncio.Context, worker: Worker, headers: Mapping[str, str]
) -> EngineSeen:
    page, models, version = await asyncio.gather(
        *(call(http, f"{worker.url}{path}", headers) for path in ("/metrics", "/v1/models", "/version"))
    )
    events, replays = await asyncio.gather(
        asyncio.gather(*(_listen(context, address) for address in _of_ranks(worker, worker.events_endpoint))),
        asyncio.gather(*(_ask_replay(context, address) for address in _of_ranks(worker, worker.replay_endpoint))),
    )
    after = await call(http, f"{worker.url}/metrics", headers) if page.ok else page
    return EngineSeen(
        worker,
        error=_http_error(page, models),
        block_size=parse_block_size(page.body) if page.ok else None,
        models=_models(models),
        version=_version(version),
        has_lmcache=page.ok and _LMCACHE in page.body,
        tokens_grew=_tokens(after, worker) > _tokens(page, worker),
        clock=page.clock or models.clock,
        events=tuple(events),
        replays=tuple(replays),
    )


def _http_error(page: HttpReading, models: HttpReading) -> str | None:
    """Why an engine does not answer. One that has no metrics page, or wants a key for its models, does answer."""
    if page.error is not None and models.error is not None:
        return page.error
    statuses = [answer.status for answer in (page, models) if answer.error is None]
    return f"its answers have the status {statuses[0]}" if min(statuses) >= 500 else None


def _models(answer: HttpReading) -> tuple[str, ...] | None:
    body = answer.json() if answer.ok else None
    rows = body.get("data") if isinstance(body, dict) else None
    if not isinstance(rows, list):
        return None
    names = [row.get("id") for row in rows if isinstance(row, dict)]
    return tuple(name for name in names if isinstance(name, str)) or None


def _version(answer: HttpReading) -> str | None:
    body = answer.json() if answer.ok else None
    version = body.get("version") if isinstance(body, dict) else None
    return version if isinstance(version, str) else None


def _tokens(answer: HttpReading, worker: Worker) -> float:
    if not answer.ok:
        return 0.0
    with suppress(BadRecord):
        return sum(tokens_processed(answer.body, dp_size=worker.dp_size, dp_start=worker.dp_start).values())
    return 0.0


def _of_ranks(worker: Worker, endpoint: str | None) -> list[str]:
    """The ZMQ addresses of all ranks. Events over HTTP have none: reading them would take them from the bridge.

    An address at which the bridge listens has no other listener.
    """
    if endpoint is None or endpoint.startswith(("http://", "https://", BIND)):
        return []
    return rank_endpoints(endpoint, worker.dp_size)


async def _listen(context: zmq.asyncio.Context, address: str) -> SocketSeen:
    """Connect to an event socket, and count what arrives."""
    error, n_messages, attempts = "", 0, 0
    with EventConnection(context, address) as connection:
        until_s = time.monotonic() + LISTEN_S
        while True:
            now_s = time.monotonic()
            change = connection.attend(now_s)
            if change in (Change.FAILED, Change.BROKEN):
                error, attempts = connection.reason, attempts + 1
                if attempts >= _ATTEMPTS:
                    return SocketSeen(address, error, n_messages)
                connection.reopen(now_s)
            elif change is Change.COMPLETED:
                until_s = now_s + LISTEN_S
            while connection.has_message:
                connection.take()
                n_messages += 1
                await asyncio.sleep(0)
            if connection.completed_at_s is not None and now_s >= until_s:
                return SocketSeen(address, None, n_messages)
            await asyncio.sleep(_TICK_S)


async def _ask_replay(context: zmq.asyncio.Context, address: str) -> SocketSeen:
    try:
        async with aclosing(replay(context, address, _BEYOND_ALL, REPLAY_TIMEOUT_S)) as answers:
            async for _ in answers:
                pass
    except (ReplaySilent, zmq.ZMQError) as exc:
        return SocketSeen(address, str(exc))
    return SocketSeen(address, None)
