"""Requests that wait for a rank: `queue=on` of POST /route (docs/queue.md).

What lives here: when waiting requests are examined, and how each of them ends: with a rank, an error, its deadline, or
a client that disconnected. What must not: their order and limits (core.routing.queue), which ranks are open to them
(core.routing.admission), choosing and booking (router), and HTTP (handlers).

All state belongs to the event loop that serves requests. Nothing runs while no request waits.

State: the waiting requests of one router.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass

import msgspec

from streams.core.routing.admission import Gate
from streams.core.routing.queue import QueueLimits, QueueRefusal, RequestQueue, Waiting
from streams.core.routing.saturation import NOTHING_QUEUED, Queued
from streams.core.workers import Role
from streams.errors import AllWorkersBusy, InvalidRequest, KvStreamsError, NotReady, QueueFull, QueueTimeout
from streams.process.metrics import Distribution
from streams.router_api.deciding.prepared_request import PreparedRequest
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer import RouteAnswer
from streams.router_api.messages.requests import NAME_CHARS_MAX

log = logging.getLogger(__name__)

#: Changes of load within this time are served together. A thousand requests per second that end would otherwise cause a
#: thousand pumps.
PUMP_INTERVAL_S = 0.005

#: Deadlines, disconnected clients and turns of other routers are checked at this interval, and what causes no
#: notification: load that falls with time, reports of engines, and new workers.
CHECK_INTERVAL_S = 0.05

#: Waiting requests that one pump examines, in their order.
LOOKAHEAD = 64

#: The estimate of what a waiting request must compute is renewed at this interval if the index changed. It decides
#: about the order. Before a request leaves, its overlap is looked up in any case.
ESTIMATE_MS = 250.0

#: Bookings from which a router knows the other routers, and the interval at which it looks.
RECENT_BOOKINGS = 256
ROUTERS_MS = 1000.0

#: Upper bounds of the time that requests wait, in seconds.
WAIT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

#: Memory of a waiting request by parts: its connection, task and fields; a block's local and sequence hash and its copy
#: in the booking; a rank's score; and a worker id in a filter, in the request and in the set.
WAITING_BYTES, _BLOCK_BYTES, _SCORE_BYTES, _ID_BYTES = 16 * 1024, 24, 100, 100

#: Every rank is closed to requests that pass it. An active booking of a repeated id is returned all the same.
_SHUT = Gate(lambda: "", -1.0)


class Outcome(enum.StrEnum):
    """What became of a request with `queue` on."""

    AT_ONCE = "at_once"
    ROUTED = "routed"
    FULL = "full"
    BYTES = "bytes"
    TENANT = "tenant"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    REFUSED = "refused"


_REFUSALS = {QueueRefusal.FULL: Outcome.FULL, QueueRefusal.BYTES: Outcome.BYTES, QueueRefusal.TENANT: Outcome.TENANT}
_LIMITS = {
    QueueRefusal.FULL: "router_queue_requests_max",
    QueueRefusal.BYTES: "router_queue_bytes_max",
    QueueRefusal.TENANT: "router_queue_tenant_requests_max",
}


def may_wait(prepared: PreparedRequest) -> bool:
    """Whether a request asks to wait. One that books nothing is answered at once."""
    return prepared.request.queue == "on" and prepared.request.update_states


@dataclass(slots=True)
class _Entry:
    """A waiting request. changes: of the view, when the request was last matched; matched_ms: the time of that.

    context: of its task, so that a trace of its decision belongs to it and not to the task that serves the queue.
    """

    prepared: PreparedRequest
    answer: asyncio.Future[RouteAnswer]
    is_gone: Callable[[], bool]
    changes: int
    matched_ms: float
    context: Context


class Admission:
    """The queue of one router.

    outcomes: requests with `queue` on by what became of them, since the router started. waited_s: how long those
    waited that got a rank after it.
    """

    def __init__(self, router: Router) -> None:
        settings = router.settings
        self._router = router
        limits = QueueLimits(
            settings.router_queue_requests_max,
            settings.router_queue_bytes_max,
            settings.router_queue_tenant_requests_max,
        )
        self._timeout_ms = settings.router_queue_timeout_s * 1000.0
        self._queue = RequestQueue(settings.router_queue_policy, limits, settings.prefill_us_per_token)
        self._gate = router.new_gate()
        self._entries: dict[int, _Entry] = {}
        # Requests of this turn of the event loop. They are in memory already, so that there is no other limit.
        self._together: list[tuple[PreparedRequest, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._is_woken = False
        self._pumping: asyncio.Task[None] | None = None
        self._checked_ms = 0.0
        self._router_ids: list[str] = []
        self._router_ids_ms = -ROUTERS_MS
        self.outcomes: Counter[Outcome] = Counter()
        self.waited_s = Distribution(*WAIT_BOUNDS)

    @property
    def n_bytes(self) -> int:
        """About how much memory the waiting requests take."""
        return self._queue.n_bytes

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._entries)

    def lengths(self) -> dict[int, int]:
        """How many requests wait, by priority."""
        return self._queue.lengths()

    def queued(self) -> dict[tuple[str, Role | None], Queued]:
        """What waits here, by model and phase. 1,000 requests take about a millisecond."""
        found: dict[tuple[str, Role | None], Queued] = {}
        for number, entry in self._entries.items():
            key = entry.prepared.filters.model, entry.prepared.request.phase
            tokens, blocks = self._queue.waiting(number).uncached_tokens, entry.prepared.routing.prompt.request_blocks
            found[key] = found.get(key, NOTHING_QUEUED).plus(Queued(1, tokens, blocks))
        return found

    async def route(self, prepared: PreparedRequest, tenant: str, is_gone: Callable[[], bool]) -> RouteAnswer:
        """Choose a rank and book it, as soon as one is open to the request.

        is_gone: whether the client has disconnected. Raises QueueFull, QueueTimeout, NoEligibleWorker, NotReady once
        the router is stopping, InvalidRequest for a long name of a tenant, and the other errors of `Router.try_book`.
        """
        try:
            if len(tenant) > NAME_CHARS_MAX:
                raise InvalidRequest(f"the tenant's name (header X-Tenant) has more than {NAME_CHARS_MAX} characters")
            if not self._queue:
                await self._turn(prepared)
            answer = self._at_once(prepared)
            if answer is not None:
                self.outcomes[Outcome.AT_ONCE] += 1
                return answer
            number, entry = self._enter(prepared, tenant, is_gone)
        except BaseException:  # its task may be cancelled while it waits for its turn
            self._router.note_refused(prepared)
            raise
        del prepared  # the entry has it without what was only needed until now
        try:
            return await entry.answer
        finally:
            if number in self._entries:  # this request's task was cancelled, because the server ends
                self._leave(number, Outcome.CANCELLED)

    async def _turn(self, prepared: PreparedRequest) -> None:
        """Let requests that came together begin in the order of the queue.

        They are those of one turn of the event loop, so that none waits for another one to come. Without this, the
        first prompt of a burst would take the rank that holds the cache of the next one.
        """
        loop = asyncio.get_running_loop()
        if not self._together:
            loop.call_soon(self._begin_together)
        turn = loop.create_future()
        self._together.append((prepared, turn))
        await turn

    def _begin_together(self) -> None:
        """Wake those that came together, one after the other: each one runs up to its booking before the next."""
        together, self._together = self._together, []
        order: Sequence[int] = range(len(together))
        if len(together) > 1:
            try:
                order = self._order_of([prepared for prepared, _ in together])
            except Exception:  # a fault of one request must not stop the others
                log.exception("requests that came together could not be ordered")
        for number in order:
            turn = together[number][1]
            if not turn.done():  # its task may have been cancelled
                turn.set_result(None)

    def _order_of(self, together: Sequence[PreparedRequest]) -> list[int]:
        """In which order to route requests that came together, by their positions."""
        now_ms = _monotonic_ms()
        self._queue.ms_per_token = self._router.ms_per_token()
        return self._queue.together(
            Waiting(
                number,
                now_ms,
                now_ms,
                self._router.uncached_tokens(prepared),
                0,
                prepared.request.priority,
                prepared.request.priority_jump,
            )
            for number, prepared in enumerate(together)
        )

    def _at_once(self, prepared: PreparedRequest) -> RouteAnswer | None:
        """Route a request that need not wait: it repeats an id, or nothing waits and its rank is open."""
        gate = self._gate
        if self._queue:
            gate = _SHUT
        else:
            now_ms = _monotonic_ms()
            if now_ms - self._router_ids_ms >= ROUTERS_MS:
                self._find_routers(now_ms)
            gate.begin(now_ms, _wall_ms(), self._router_ids)
        try:
            return self._router.try_admit(prepared, gate)
        except AllWorkersBusy:
            return None
        except KvStreamsError:
            self.outcomes[Outcome.REFUSED] += 1
            raise

    def _enter(self, prepared: PreparedRequest, tenant: str, is_gone: Callable[[], bool]) -> tuple[int, _Entry]:
        """Let a request wait; raises QueueFull, or NotReady once the router is stopping."""
        if self._router.stopping:
            self.outcomes[Outcome.REFUSED] += 1
            raise _stopping()
        now_ms = _monotonic_ms()
        request = prepared.request
        n_bytes = _bytes_of(prepared)
        refused = self._queue.refusal(tenant, n_bytes)
        if refused is not None:
            self.outcomes[_REFUSALS[refused]] += 1
            raise QueueFull(
                f"all ranks are busy, and {len(self._queue)} requests wait already",
                remedy=f"Try again after retry_after_s; {_LIMITS[refused]} is the limit",
                limit=_LIMITS[refused],
                waiting=len(self._queue),
                retry_after_s=self._queue.retry_after_s(now_ms),
            )
        timeout_ms = self._timeout_ms
        if request.queue_timeout_ms is not None:
            timeout_ms = min(timeout_ms, request.queue_timeout_ms)
        number = next(self._numbers)
        self._queue.add(
            Waiting(
                number,
                now_ms,
                now_ms + timeout_ms,
                self._router.uncached_tokens(prepared),
                n_bytes,
                request.priority,
                request.priority_jump,
                tenant,
            )
        )
        slim = msgspec.structs.replace(request, token_ids=None, block_hashes=None)
        answer = asyncio.get_running_loop().create_future()
        entry = _Entry(prepared._replace(request=slim), answer, is_gone, -1, now_ms, copy_context())
        self._entries[number] = entry
        if self._pumping is None:
            self._pumping = asyncio.create_task(self._pump_while_waiting())
        self._wake.set()
        return number, entry

    def refuse_all(self) -> None:
        """Refuse every request that waits, since the router is stopping: another router may have a rank for it."""
        for number in list(self._entries):
            _fail(self._leave(number, Outcome.REFUSED), _stopping())
        self._wake.set()

    def _leave(self, number: int, outcome: Outcome) -> _Entry:
        """Take out a request that gets no rank."""
        self._queue.remove(number)
        self.outcomes[outcome] += 1
        entry = self._entries.pop(number)
        self._router.note_refused(entry.prepared)
        return entry

    # -- pumps ---------------------------------------------------------------------------------------------------------

    async def _pump_while_waiting(self) -> None:
        loop = asyncio.get_running_loop()

        def on_load_fell() -> None:
            # Called under the lock of the loads, by any thread. One call wakes the loop for all until the next pump.
            if not self._is_woken:
                self._is_woken = True
                try:
                    loop.call_soon_threadsafe(self._wake.set)
                except RuntimeError:  # the loop has ended, and everything that waited with it
                    pass

        end_listening = self._router.loads.listen(on_load_fell)
        try:
            while self._entries:
                try:
                    async with asyncio.timeout(CHECK_INTERVAL_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                self._is_woken = False
                self._pump()
                await asyncio.sleep(PUMP_INTERVAL_S)
        finally:
            end_listening()
            self._gate.end()
            self._pumping = None
            for number in list(self._entries):  # only if this task was cancelled
                _fail(self._leave(number, Outcome.CANCELLED), _stopping())

    def _pump(self) -> None:
        """Send every waiting request to its rank that is open to it, in the order of the queue."""
        if self._router.stopping:
            self.refuse_all()
            return
        now_ms = _monotonic_ms()
        if now_ms - self._checked_ms >= CHECK_INTERVAL_S * 1000.0:
            self._checked_ms = now_ms
            self._check(now_ms)
        self._gate.begin(now_ms, _wall_ms(), self._router_ids)
        for number in list(itertools.islice(self._queue.in_order(), LOOKAHEAD)):
            entry = self._entries[number]
            try:
                self._serve(number, entry, now_ms)
            except AllWorkersBusy:
                pass  # its engines report that they are full
            except KvStreamsError as exc:
                _fail(self._leave(number, Outcome.REFUSED), exc)
            except Exception as exc:  # a fault of one request must not stop the others
                log.exception("a waiting request failed")
                _fail(self._leave(number, Outcome.REFUSED), exc)

    def _serve(self, number: int, entry: _Entry, now_ms: float) -> None:
        """Send one request to its rank if that is open to it."""
        router = self._router
        if entry.changes != router.view.changes and now_ms - entry.matched_ms >= ESTIMATE_MS:
            self._match(number, entry, now_ms)
        if entry.prepared.routing.matches.refusal is None:
            with router.loads.locked() as loads:
                if not self._gate.may_go(entry.prepared.routing.matches.ranks, loads):
                    return
        if entry.is_gone():
            self._drop_gone(number)
            return
        snapshot = entry.prepared.routing.matches.snapshot
        if entry.changes != router.view.changes or (snapshot is not None and router.view.is_outdated(snapshot)):
            self._match(number, entry, now_ms)
        answer = entry.context.run(router.try_admit, entry.prepared, self._gate)
        if answer is None:
            return
        del self._entries[number]
        waiting = self._queue.leave(number, self._queue.waiting(number).uncached_tokens, now_ms)
        queued_ms = now_ms - waiting.arrival_ms
        self.outcomes[Outcome.ROUTED] += 1
        self.waited_s.observe(queued_ms / 1000.0)
        if not entry.answer.done():
            entry.answer.set_result(answer._replace(queued_ms=round(queued_ms, 3)))

    def _match(self, number: int, entry: _Entry, now_ms: float) -> None:
        """Look up again which ranks may serve a request and what they hold of it."""
        entry.changes = self._router.view.changes  # before the lookup: what changes meanwhile is looked up again
        entry.matched_ms = now_ms
        entry.prepared = self._router.refresh(entry.prepared)
        self._queue.revalue(number, self._router.uncached_tokens(entry.prepared))

    def _check(self, now_ms: float) -> None:
        """Take out late requests and those of disconnected clients, and find out which other routers there are."""
        for number in self._queue.late(now_ms):
            waited_ms = now_ms - self._queue.waiting(number).arrival_ms
            entry = self._leave(number, Outcome.TIMEOUT)
            _fail(
                entry,
                QueueTimeout(
                    f"no rank became free within {waited_ms / 1000.0:.3f} s",
                    remedy="Try again after retry_after_s; router_queue_timeout_s and queue_timeout_ms set the time",
                    waiting=len(self._queue),
                    retry_after_s=self._queue.retry_after_s(now_ms),
                ),
            )
        self._queue.ms_per_token = self._router.ms_per_token()
        for number in [number for number, entry in self._entries.items() if entry.is_gone()]:
            self._drop_gone(number)
        if now_ms - self._router_ids_ms >= ROUTERS_MS:
            self._find_routers(now_ms)

    def _find_routers(self, now_ms: float) -> None:
        with self._router.loads.locked() as loads:
            self._router_ids, self._router_ids_ms = sorted(loads.recent_routers(RECENT_BOOKINGS)), now_ms

    def _drop_gone(self, number: int) -> None:
        _fail(
            self._leave(number, Outcome.CANCELLED), InvalidRequest("the client disconnected while its request waited")
        )


def _fail(entry: _Entry, error: Exception) -> None:
    if not entry.answer.done():
        entry.answer.set_exception(error)


def _stopping() -> NotReady:
    return NotReady("the router is stopping", remedy="Ask another router")


def _bytes_of(prepared: PreparedRequest) -> int:
    """About how much memory a request takes while it waits."""
    request = prepared.request
    n_ids = len(request.allowed_worker_ids or ()) + len(request.excluded_worker_ids or ())
    n_ids += len(request.required_taints or ())
    matches = prepared.routing.matches
    scores = 0 if matches.snapshot is None else len(matches.scores.scores)
    return WAITING_BYTES + _BLOCK_BYTES * len(prepared.blocks.local) + _SCORE_BYTES * scores + 2 * _ID_BYTES * n_ids


def _monotonic_ms() -> float:
    return time.monotonic() * 1000.0


def _wall_ms() -> float:
    return time.time() * 1000.0
