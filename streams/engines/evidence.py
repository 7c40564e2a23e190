"""Finds out whether an engine is still the same process, in a task of its own.

What lives here: asking the engine's HTTP server and its replay socket. What must not: when they are asked, and what
follows from the answers (feed_machine, continuity).

An HTTP server may take seconds to answer, or never answer, while the engine's batches arrive. So the feed starts the
task, continues its work, and takes the evidence once it is there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from dataclasses import replace

import aiohttp

from streams.core.events import BEFORE_FIRST
from streams.core.ids import RankId
from streams.engines.continuity import Evidence, KnownIncarnation, ReplayCheck
from streams.engines.feed_machine import Ask
from streams.engines.process_start import read_process_start, refuses_connections
from streams.engines.replay import check_last_batch
from streams.engines.wiring import EngineWiring

log = logging.getLogger(__name__)

#: A batch number that no engine has reached. Its request is answered at once, and shows that the engine is running.
_BEYOND_ALL = (1 << 63) - 1

#: The HTTP server is given up after this time. Other evidence may arrive in the meantime.
HTTP_TIMEOUT_S = 5.0

#: While the replay socket does not answer, the HTTP server is asked again after this time.
HTTP_AGAIN_S = 0.5


class EvidenceReader:
    """Asks one engine on behalf of one of its ranks, one question at a time."""

    def __init__(
        self,
        wiring: EngineWiring,
        replay_address: str | None,
        rank: RankId,
        on_http: Callable[[Evidence], None] = lambda _: None,
    ) -> None:
        """on_http: takes at once what the HTTP server shows; a replay socket may take seconds."""
        self._on_http = on_http
        self._wiring = wiring
        self._replay_address = replay_address
        self._rank = rank
        self._task: asyncio.Task[tuple[Ask, Evidence]] | None = None

    @property
    def pending(self) -> asyncio.Task[tuple[Ask, Evidence]] | None:
        """The running task; `take` returns its result."""
        return self._task

    def ask(self, question: Ask) -> None:
        """Start to ask. At most one question may be pending.

        The replay socket is asked for the batch that the question names; without one, only whether it answers.
        """
        assert self._task is None
        self._task = asyncio.create_task(self._ask(question))

    def take(self) -> tuple[Ask, Evidence] | None:
        """Return what was asked and what was found out, None if the task is still running."""
        if self._task is None or not self._task.done():
            return None
        task, self._task = self._task, None
        return task.result()

    def close(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _ask(self, question: Ask) -> tuple[Ask, Evidence]:
        known = question.known
        if self._replay_address is None:
            return question, await self._over_http()
        if known is None or known.sequence == BEFORE_FIRST:
            return question, await self._signs_of_life()
        checking: asyncio.Task[ReplayCheck] | None = None
        reading = asyncio.create_task(self._over_http())
        try:
            if question.at_once:
                checking = asyncio.create_task(self._check_replay(known))
                await asyncio.wait({reading, checking}, return_when=asyncio.FIRST_COMPLETED)
                if checking.done() and not reading.done() and checking.result() is ReplayCheck.SAME:
                    # Identical bytes decide on their own, so the HTTP server need not be waited for.
                    return question, Evidence(False, None, ReplayCheck.SAME)
            evidence = await reading
            if question.is_answered_by(evidence):
                return question, evidence
            checking = checking or asyncio.create_task(self._check_replay(known))
            return question, await self._with_replay(evidence, checking)
        finally:
            reading.cancel()
            if checking is not None:
                checking.cancel()

    async def _signs_of_life(self) -> Evidence:
        """Ask the HTTP server, and the replay socket if that does not answer."""
        evidence = await self._over_http()
        # An engine that refuses HTTP is still starting, or has exited. It must not get requests yet.
        if evidence.reachable or evidence.refused:
            return evidence
        checking = asyncio.create_task(check_last_batch(self._wiring.context, self._replay_address, _BEYOND_ALL, 0))
        try:
            return await self._with_replay(evidence, checking)
        finally:
            checking.cancel()

    async def _with_replay(self, evidence: Evidence, checking: asyncio.Task[ReplayCheck]) -> Evidence:
        """Return evidence with what the replay socket shows.

        The sockets of a process that ends close one after the other, so the HTTP server is asked again meanwhile.
        """
        while not (checking.done() or evidence.reachable or evidence.refused):
            await asyncio.wait({checking}, timeout=HTTP_AGAIN_S)
            if not checking.done():
                evidence = await self._over_http()
        return replace(evidence, replay_check=await checking)

    async def _over_http(self) -> Evidence:
        evidence = await evidence_over_http(self._wiring, f"rank {self._rank}")
        self._on_http(evidence)
        return evidence

    async def _check_replay(self, known: KnownIncarnation) -> ReplayCheck:
        return await check_last_batch(self._wiring.context, self._replay_address, known.sequence, known.digest)


async def evidence_over_http(wiring: EngineWiring, whose: str) -> Evidence:
    """Ask an engine's HTTP server when its process started. whose: names the engine or its rank in the log."""
    engine = wiring.engine
    try:
        async with asyncio.timeout(HTTP_TIMEOUT_S):
            return await read_process_start(wiring.http, engine.metrics_url, engine.models_url)
    except aiohttp.ClientConnectorError as exc:
        refused = exc.os_error.errno == errno.ECONNREFUSED
        if refused and engine.metrics is not None:  # the server of the metrics may be another one
            refused = await refuses_connections(wiring.http, engine.models_url)
        return Evidence(reachable=False, started=None, refused=refused)
    except (aiohttp.ClientError, TimeoutError):
        return Evidence(reachable=False, started=None)
    except Exception:  # whatever an HTTP server sends, it must not end the feed
        log.debug("%s: the engine's HTTP server cannot be read", whose, exc_info=True)
        return Evidence(reachable=False, started=None)
