"""Reads routers over their HTTP API, with the right `read`.

What lives here: the calls. What must not: what is wrong with the answers (checks). Each router is read in several
rounds: what differs in all of them is no record that is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from streams.core.workers import RenderOutcome, RenderPart
from streams.doctor.http_reading import NOT_ALLOWED, call, read_page
from streams.doctor.observations import PageSeen, RankDigest, RouterSeen

#: Rounds, and the time between two of them. Routers read a record within 50 ms of each other.
ROUNDS = 3
ROUND_EVERY_S = 0.4


async def read_routers(
    http: aiohttp.ClientSession, urls: Sequence[str], headers: Mapping[str, str]
) -> tuple[RouterSeen, ...]:
    """Read all routers at the same time, so that their rounds can be compared."""
    return tuple(await asyncio.gather(*(_read_router(http, url.rstrip("/"), headers) for url in urls)))


async def read_pages(
    http: aiohttp.ClientSession, urls: Sequence[str], headers: Mapping[str, str]
) -> tuple[PageSeen, ...]:
    """Read the metrics of other processes."""
    return tuple(await asyncio.gather(*(read_page(http, _page_url(url), headers) for url in urls)))


def _page_url(url: str) -> str:
    return url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"


async def _read_router(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> RouterSeen:
    ready = await call(http, f"{url}/ready", headers)
    if ready.error is not None:
        return RouterSeen(url, ready.error)
    body = ready.json()
    if not isinstance(body, dict) or "ready" not in body:
        return RouterSeen(url, f"GET /ready is answered with {ready.status}, and not as a router does")
    if not body["ready"]:
        return RouterSeen(url, not_ready=str(body.get("reason", "no reason is given")), clock=ready.clock)
    rounds: list[dict[str, Any]] = []
    for number in range(ROUNDS):
        await asyncio.sleep(ROUND_EVERY_S if number else 0.0)
        names = ("state", "workers", "loads", "live")
        answers = await asyncio.gather(*(call(http, f"{url}/{name}", headers) for name in names))
        for name, answer in zip(names, answers, strict=True):
            if answer.status in NOT_ALLOWED:
                return RouterSeen(url, refused=answer.status, clock=ready.clock)
            if not answer.ok:
                return RouterSeen(url, answer.error or f"GET /{name} is answered with {answer.status}")
        answered = dict(zip(names, (answer.json() for answer in answers), strict=True))
        if not all(isinstance(page, dict) for page in answered.values()):
            return RouterSeen(url, "its answers are not JSON objects")
        rounds.append(answered)
    try:
        return RouterSeen(
            url,
            in_sync=tuple(bool(pages["loads"]["in_sync"]) for pages in rounds),
            workers=tuple(frozenset(row["worker_id"] for row in pages["workers"]["workers"]) for pages in rounds),
            digests=tuple(_digests(pages["state"]) for pages in rounds),
            degraded=tuple(_degraded(pages["live"]) for pages in rounds),
            silent=tuple(
                frozenset(row["worker_id"] for row in pages["workers"]["workers"] if row["silent_dp_ranks"])
                for pages in rounds
            ),
            differing=_differing(rounds[-1]["workers"]["workers"]),
            page=await read_page(http, f"{url}/metrics", headers),
            clock=ready.clock,
        )
    except (KeyError, TypeError, ValueError) as exc:
        return RouterSeen(url, f"its answers have another form than this version's: {exc!r}")


def _digests(state: dict[str, Any]) -> dict[tuple[int, int], RankDigest]:
    return {
        (row["worker_id"], row["dp_rank"]): RankDigest(
            (row["incarnation"], row["generation"], row["sequence"]), row["digest"]
        )
        for row in state["ranks"]
        if row["health"] != "removed"
    }


def _differing(workers: list[dict[str, Any]]) -> dict[int, tuple[str, int]]:
    renders = {row["worker_id"]: row.get("render") or {} for row in workers}  # an earlier version has no `render`
    return {
        worker_id: (RenderPart(render["part"]).words, int(render["from_token"]))
        for worker_id, render in renders.items()
        if render.get("outcome") == RenderOutcome.DIFFERS
    }


def _degraded(live: dict[str, Any]) -> frozenset[tuple[str, int]]:
    return frozenset(
        (str(row["reason"]), int(row["worker_id"])) for row in live["workers"] if row["reason"] is not None
    )
