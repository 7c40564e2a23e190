"""Events that are polled over HTTP: TensorRT-LLM's `/kv_cache_events`.

What lives here: asking for events, and passing them to the feeds of the engine's ranks. What must not: what an event
means (dialects), the order of batches and incarnations (feed, gap_filling).

Each answer empties the engine's queue of events, so that every event is sent once. Feeds read sockets, so an engine's
poller publishes on sockets of its own, which only this user can open: one batch per event, whose number is the engine's
own `event_id`. So an event that is lost is a gap in the numbers, whether the engine's queue was full, an answer was
lost on its way, or another client has asked for events. There is no replay, so a gap stays.

What the ranks hold is known as of the last answer. While that is too long ago, the feeds are behind, as they are when
live batches arrive late.

The engine is not asked before all ranks have subscribed. If the numbers begin again, the engine has restarted: the
sockets are opened anew, and the feeds find out which incarnation it is before they publish anything.

State: the number of each rank's last event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from streams.engines.address import EngineAddress, is_polled, port_above
from streams.engines.dialects.trtllm import events_of, rank_of_event
from streams.engines.engine_ranks import EngineRanks
from streams.engines.link_delay import LATE_S
from streams.engines.process_start import read_body
from streams.engines.replay import SEQUENCE
from streams.engines.wiring import EngineWiring
from streams.errors import BadRecord, KvStreamsError
from streams.kafka.outage import Outage, lasting

log = logging.getLogger(__name__)

#: Time between an answer and the next request. Events are late by half of it on average.
POLL_EVERY_S = 0.05

#: Pauses after requests that failed: the first one, doubled after each further one up to the last.
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.1, 5.0

#: An engine without events waits this long for the first one before it answers.
ENGINE_WAITS_S = 2.0

#: An answer may take this long.
ANSWER_TIMEOUT_S = 30.0

#: Bytes of an answer; a longer one is lost, which the numbers show.
ANSWER_BYTES_MAX = 64 * 1024 * 1024

#: Batches that wait in a rank's socket while its feed publishes. Beyond it, they are lost, which the numbers show.
SEND_HWM = 100_000

_ID_MAX = (1 << 63) - 1


@asynccontextmanager
async def polled(wiring: EngineWiring) -> AsyncIterator[EngineWiring]:
    """Poll an engine whose address of events is an HTTP URL; yield the wiring that its feeds use.

    For any other engine, that is the wiring itself.
    """
    engine = wiring.engine
    if not is_polled(engine):
        yield wiring
        return
    with tempfile.TemporaryDirectory(prefix="kvstreams-") as folder:
        poller = Poller(wiring.http, wiring.context, engine, Path(folder), wiring.ranks)
        polling = asyncio.create_task(poller.run())
        try:
            yield replace(wiring, engine=replace(engine, events=poller.address), is_late=poller.answers.are_late)
        finally:
            polling.cancel()
            await asyncio.wait({polling})
            poller.close()


@dataclass(slots=True)
class _Publisher:
    """The socket of one rank, and whether the rank's feed has subscribed to it."""

    socket: zmq.asyncio.Socket
    has_subscriber: bool = False


class Answers:
    """Whether an engine answers in time (pure; the clock is an argument)."""

    def __init__(self) -> None:
        self._answered_at_s: float | None = None  # when the events of the last answer had been passed on
        self._asked_at_s: float | None = None  # when the request began that follows an answer

    def asked(self, now_s: float) -> None:
        """Note that a request begins."""
        self._asked_at_s = now_s

    def answered(self, now_s: float) -> None:
        """Note that all events of an answer have been passed on."""
        self._answered_at_s, self._asked_at_s = now_s, None

    def failed(self) -> None:
        """Note that the request failed."""
        self._asked_at_s = None

    def are_late(self, now_s: float) -> bool:
        """Whether the engine may have reported events for too long that nobody has asked for.

        Before the first answer, the feeds have received nothing, and say so themselves.
        """
        if self._answered_at_s is None:
            return False
        if self._asked_at_s is None:
            return now_s - self._answered_at_s >= LATE_S
        return now_s - self._asked_at_s >= ENGINE_WAITS_S + LATE_S


class Poller:
    """Polls one engine, and publishes its events on one socket per rank. All methods run on the loop."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        engine: EngineAddress,
        folder: Path,
        ranks: EngineRanks | None = None,
    ) -> None:
        """folder: of the sockets; only this user may have access to it."""
        self.address = f"ipc://{folder / 'events'}"
        self._http = http
        self._context = context
        self._engine = engine
        assert engine.events is not None  # otherwise it is not polled
        self._url = engine.events
        self._sockets: list[_Publisher] = []
        self._ranks = EngineRanks(engine.dp_size, engine.dp_start) if ranks is None else ranks
        self._last: dict[int, int] = {}  # by rank, the number of its last event
        self._rank_without_socket: int | None = None  # the first one that was logged
        self._outage = Outage()
        self.answers = Answers()

    def close(self) -> None:
        """Close the sockets; the feeds see that as a broken connection."""
        for publisher in self._sockets:
            publisher.socket.close(linger=0)
        self._sockets.clear()

    async def run(self) -> None:
        """Poll until cancelled."""
        pause_s, failed = BACKOFF_S_MIN, False
        self._open()
        while True:
            await self._await_subscribers()
            if not failed:  # otherwise the engine's events are late until it answers
                self.answers.asked(time.monotonic())
            try:
                events = await self._ask()
            except (aiohttp.ClientError, TimeoutError, KvStreamsError) as exc:
                failed = True
                self.answers.failed()
                self._note_failure(exc)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_S_MAX)
                continue
            lasted_s = self._outage.answered(time.monotonic())
            if lasted_s is not None:
                log.info("worker %d: %s answers after %.0f s", self._engine.worker_id, self._url, lasted_s)
            pause_s, failed = BACKOFF_S_MIN, False
            for dp_rank, batches in numbered(events).items():
                await self._publish(dp_rank, batches)
            self.answers.answered(time.monotonic())
            await asyncio.sleep(POLL_EVERY_S)

    def _note_failure(self, exc: Exception) -> None:
        lasted_s = self._outage.failed(time.monotonic())
        if lasted_s is not None:
            log.warning(
                "worker %d: no events can be polled from %s: %s%s",
                self._engine.worker_id,
                self._url,
                str(exc) or repr(exc),
                lasting(lasted_s),
            )

    def _open(self) -> None:
        """Open a socket for each rank."""
        for dp_rank in range(self._engine.dp_size):
            socket = self._context.socket(zmq.XPUB)
            socket.setsockopt(zmq.SNDHWM, SEND_HWM)
            socket.bind(port_above(self.address, dp_rank))
            self._sockets.append(_Publisher(socket))

    async def _await_subscribers(self) -> None:
        """Wait until the feeds of all ranks have subscribed; what is published before is lost."""
        for publisher in self._sockets:
            while not publisher.has_subscriber or await publisher.socket.poll(0):
                publisher.has_subscriber = (await publisher.socket.recv()).startswith(b"\x01")

    async def _ask(self) -> Sequence[Any]:
        """Return the events since the last answer. Raises BadRecord, ClientError, TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with self._http.post(self._url, timeout=timeout) as response:
            response.raise_for_status()
            body = await read_body(response, ANSWER_BYTES_MAX)
        if len(body) > ANSWER_BYTES_MAX:
            raise BadRecord("too_large", f"an answer has more than {ANSWER_BYTES_MAX} bytes")
        return events_of(body) if body.strip() else ()

    async def _publish(self, dp_rank: int, batches: Sequence[tuple[int, bytes]]) -> None:
        """Publish batches of one rank, with their numbers."""
        socket = self._ranks.socket_of(dp_rank)
        if socket is None or (len(self._sockets) == 1 and self._last.keys() - {dp_rank}):
            if self._rank_without_socket is None:
                self._rank_without_socket = dp_rank
                log.warning(
                    "worker %d: %s has events of rank %d, which are skipped: the engine is said to have %d ranks, "
                    "from %d on. Correct dp and dp_start of its --engine",
                    self._engine.worker_id,
                    self._url,
                    dp_rank,
                    self._engine.dp_size,
                    self._ranks.start,
                )
            return
        for number, payload in batches:
            if number <= self._last.get(dp_rank, -1):
                log.info("worker %d: the numbers of its events begin again", self._engine.worker_id)
                self._last.clear()
                self.close()
                self._open()
                await self._await_subscribers()
            self._last[dp_rank] = number
            await self._sockets[socket].socket.send_multipart([b"", SEQUENCE.pack(number), payload])


def numbered(events: Sequence[Any]) -> Mapping[int, list[tuple[int, bytes]]]:
    """Divide the events of an answer by rank, into batches with their numbers.

    An event without a number is part of the batch before it, or of the first one. If no event of a rank has one, they
    are lost, and a gap follows.
    """
    by_rank: dict[int, list[tuple[int, list[Any]]]] = {}
    unnumbered: dict[int, list[Any]] = {}
    for event in events:
        dp_rank = rank_of_event(event)
        batches = by_rank.setdefault(dp_rank, [])
        number = event.get("event_id") if isinstance(event, dict) else None
        if type(number) is int and 0 <= number <= _ID_MAX:
            batches.append((number, [*unnumbered.pop(dp_rank, ()), event]))
        elif batches:
            batches[-1][1].append(event)
        else:
            unnumbered.setdefault(dp_rank, []).append(event)
    return {
        rank: [(number, json.dumps(batch).encode()) for number, batch in batches] for rank, batches in by_rank.items()
    }
