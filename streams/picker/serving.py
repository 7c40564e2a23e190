"""The ext_proc service of a picker: streams of gateways in, picks out.

What lives here: performing what the protocol says, the deadline of a body, and the limit of all bodies. What must not:
gRPC (grpc), the order of messages (protocol), and picks (picks).

State: the streams that gateways have open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from streams.errors import InvalidRequest, KvStreamsError, NotReady, Overloaded, RequestTimeout, RequestTooLarge
from streams.picker.grpc.call import Call
from streams.picker.grpc.words import Status
from streams.picker.lifetimes import Booked, Lifetimes
from streams.picker.messages import read_message
from streams.picker.picks import PATH, Picks, refused_by
from streams.picker.protocol import Action, Ended, Exchange, Finish, FirstByte, Pick, Send
from streams.process.metrics import Distribution
from streams.settings import PickerServerSettings

log = logging.getLogger(__name__)

#: The method that gateways call.
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

#: What gateways that ask too early write to their logs.
NOT_READY = "the picker is not ready"

#: A stream that ends within this time of the answer's first byte says nothing about the request's end.
EARLY_S = 0.05

#: Upper bounds of the time of a pick, in seconds.
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class ServingCounts:
    """What a picker counts of its streams. body_bytes: of the bodies that it has now."""

    streams: int = 0
    broken_streams: int = 0
    body_bytes: int = 0
    pick_seconds: Distribution = field(default_factory=lambda: Distribution(*_SECONDS))


class ExtProc:
    """The service. Used on one loop."""

    def __init__(
        self, settings: PickerServerSettings, picks: Picks, lifetimes: Lifetimes, is_ready: Callable[[], bool]
    ) -> None:
        """is_ready: whether the router decides. Otherwise gateways ask another picker, or go on without a pick."""
        self._is_ready = is_ready
        self.settings = settings
        self.picks = picks
        self.lifetimes = lifetimes
        self.counts = ServingCounts()
        self.picking: set[asyncio.Task[None]] = set()
        self.streams: set[ProcessStream] = set()
        self._is_leaving = False

    def open(self, call: Call) -> ProcessStream | None:
        """A gateway has opened a stream. None for another method."""
        if call.method != PROCESS:
            return None
        if not self._is_ready():
            call.finish(Status.UNAVAILABLE, NOT_READY)
            return None
        self.counts.streams += 1
        stream = ProcessStream(self, call)
        self.streams.add(stream)
        if self._is_leaving:
            stream.leave()
        return stream

    def leave(self) -> None:
        """The picker stops: end each stream as soon as it has its pick. What runs in engines goes on unseen."""
        self._is_leaving = True
        for stream in list(self.streams):
            stream.leave()


class ProcessStream:
    """One stream: one request of a gateway's client."""

    __slots__ = ("_booked", "_call", "_counted", "_deadline", "_exchange", "_first_byte_s", "_path", "_service")

    def __init__(self, service: ExtProc, call: Call) -> None:
        settings = service.settings
        self._service = service
        self._call = call
        self._exchange = Exchange(settings.body_bytes_max, ends_with_pick=settings.picker_ends_stream)
        self._booked: Booked | None = None
        self._counted = 0
        self._first_byte_s = float("-inf")
        self._path = ""
        # A gateway has no deadline for a body in full duplex.
        self._deadline = asyncio.get_running_loop().call_later(settings.body_timeout_s, self._late)

    # -- what gRPC calls -----------------------------------------------------------------------------------------------

    def received(self, raw: bytes) -> None:
        """A message came."""
        exchange = self._exchange
        try:
            message = read_message(raw)
            if not self._path:
                self._path = message.headers.get(PATH, "")
            actions = exchange.received(message)
            self._count_body(len(exchange.body))
        except (RequestTooLarge, Overloaded) as exc:
            actions = exchange.refused(refused_by(exc, self._path))
        except InvalidRequest as exc:
            self._service.counts.broken_streams += 1
            self._call.finish(Status.INVALID_ARGUMENT, str(exc))
            return
        self._perform(actions)

    def half_closed(self) -> None:
        """The gateway sends no more."""
        self._end()
        self._call.finish()

    def ended(self) -> None:
        """The stream is over, in whatever way. A pick that is being made goes on, so that its booking is ended."""
        self._service.streams.discard(self)
        self._deadline.cancel()
        self._end()
        self._count_body(0)

    def leave(self) -> None:
        """End as soon as the gateway has its pick."""
        self._perform(self._exchange.leave())

    def _end(self) -> None:
        is_early = asyncio.get_running_loop().time() - self._first_byte_s < EARLY_S
        self._perform(self._exchange.ended(is_early=is_early))

    # -- what follows --------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if type(action) is Send:
                self._call.send(action.message)
            elif type(action) is Pick:
                self._deadline.cancel()
                task = asyncio.create_task(self._pick(action))
                self._service.picking.add(task)
                task.add_done_callback(self._service.picking.discard)
            elif type(action) is FirstByte:
                self._first_byte_s = asyncio.get_running_loop().time()
                if self._booked is not None:
                    self._service.lifetimes.first_byte(self._booked, action.status, action.served)
            elif type(action) is Ended:
                if self._booked is not None:
                    self._service.lifetimes.ended(self._booked, is_seen=action.is_seen)
                    self._booked = None
            elif type(action) is Finish:
                self._call.finish()

    async def _pick(self, pick: Pick) -> None:
        service, exchange = self._service, self._exchange
        started_s = time.perf_counter()
        try:
            decided = await service.picks.decide(pick, lambda: not self._call.is_open)
        except NotReady as exc:  # since the stream was opened
            service.picks.outcomes[exc.code] += 1
            self._call.finish(Status.UNAVAILABLE, NOT_READY)
            return
        except KvStreamsError as exc:
            service.picks.outcomes[exc.code] += 1
            actions = exchange.refused(refused_by(exc, self._path))
        except Exception:  # a fault of one request must not leave its client waiting
            log.exception("a pick failed")
            error = KvStreamsError("a fault of the picker")
            service.picks.outcomes[error.code] += 1
            actions = exchange.refused(refused_by(error, self._path))
        else:
            service.picks.outcomes[PICKED] += 1
            self._booked = decided.booked
            actions = exchange.picked(decided.picked)
            if decided.booked is not None:
                service.lifetimes.picked(decided.booked)
                if not actions:  # the request has ended meanwhile
                    self._booked = None
                    service.lifetimes.ended(decided.booked, is_seen=True)
        service.counts.pick_seconds.observe(time.perf_counter() - started_s)
        self._perform(actions)
        self._count_body(0)

    def _late(self) -> None:
        timeout_s = self._service.settings.body_timeout_s
        exc = RequestTimeout(f"the body did not arrive within {timeout_s:g} s")
        actions = self._exchange.refused(refused_by(exc, self._path))
        if actions:
            self._service.picks.outcomes[exc.code] += 1
            self._perform(actions)
        else:  # it never sent the headers of a request
            self._call.finish(Status.DEADLINE_EXCEEDED, str(exc))
        self._count_body(0)

    def _count_body(self, n_bytes: int) -> None:
        """Count the bytes of this stream's body. Raises Overloaded if all bodies have too many."""
        counts = self._service.counts
        counts.body_bytes += n_bytes - self._counted
        self._counted = n_bytes
        if n_bytes and counts.body_bytes > self._service.settings.bodies_bytes_max:
            raise Overloaded("the bodies of all requests have more than bodies_bytes_max")


#: The outcome of a request that got an endpoint.
PICKED = "picked"
