"""The calls of one connection: what h2 reports becomes messages of calls, and messages become frames.

What lives here: opening and ending calls, flow control, and the budgets of bytes. What must not: the transport, and
limits on frames (connection, frames).

State: the open calls of one connection, and what waits to be sent on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived
from h2.exceptions import ProtocolError

from streams.picker.grpc.call import Call, Service
from streams.picker.grpc.framing import MessageReader, Unreadable, framed
from streams.picker.grpc.limits import MESSAGE_S, RAPID_S, STALL_S, WRITE_BYTES_HIGH, Budget, Limits, Reason
from streams.picker.grpc.words import (
    RESPONSE_HEADERS,
    Header,
    Refused,
    Status,
    only_trailers,
    read_request,
    trailers,
)

log = logging.getLogger(__name__)

#: A deadline that is further away needs no timer.
DEADLINE_S_MAX = 86_400.0


class Tally:
    """What a server counted since it started."""

    __slots__ = ("calls", "connections", "connections_ended", "finished", "refused_calls", "reset_calls")

    def __init__(self) -> None:
        self.connections = 0
        self.calls = 0  # that a service has got
        self.refused_calls = 0  # that no service has got: not gRPC, or more than there may be
        self.reset_calls = 0  # that the peer reset, or whose connection was lost
        self.finished: Counter[Status] = Counter()
        self.connections_ended: Counter[Reason] = Counter()


class CallTable:
    """The calls of one connection. is_paused: whether the transport holds so much that messages are queued."""

    __slots__ = (
        "_blocked",
        "_budget",
        "_h2",
        "_is_window_closed",
        "_limits",
        "_loop",
        "_sent",
        "_service",
        "_tally",
        "_unwritten_bytes",
        "_wake",
        "calls",
        "is_paused",
        "now_s",
    )

    def __init__(
        self,
        h2: H2Connection,
        service: Service,
        limits: Limits,
        budget: Budget,
        tally: Tally,
        wake: Callable[[], None],
        sent: Callable[[int], None],
    ) -> None:
        """wake: called when h2 has something to send. sent: called with the size of each DATA frame."""
        self._h2 = h2
        self._service = service
        self._limits = limits
        self._budget = budget
        self._tally = tally
        self._wake = wake
        self._sent = sent
        self._loop = asyncio.get_running_loop()
        self._blocked: dict[Call, None] = {}  # calls with a queue, in the order of their turns
        self._is_window_closed = False  # that of the connection
        self._unwritten_bytes = 0  # that h2 has since the last write
        self.calls: dict[int, Call] = {}
        self.is_paused = False
        self.now_s = 0.0  # of the step that runs

    # -- what the peer does --------------------------------------------------------------------------------------------

    def requested(self, event: RequestReceived) -> None:
        """A stream was opened."""
        stream_id, has_ended = event.stream_id, event.stream_ended is not None
        if len(self.calls) >= self._limits.streams_max:
            self.refuse(stream_id)
            return
        try:
            request = read_request(event.headers)
        except Refused as refused:
            self._tally.refused_calls += 1
            self._answer(stream_id, refused.headers, has_ended)
            return
        self._tally.calls += 1
        call = Call(self, request.method, stream_id, MessageReader(self._limits.message_bytes_max), self.now_s)
        self.calls[stream_id] = call
        try:
            stream = self._service(call)
        except Exception:
            log.exception("the service of %s failed", call.method)
            call.finish(Status.INTERNAL, "the service failed")
            return
        if stream is None:
            call.finish(Status.UNIMPLEMENTED, f"there is no method {call.method}")
        elif not call.is_open:
            call.stream = stream
            self._notify_ended(call)
        else:
            call.stream = stream
            if request.timeout_s is not None and request.timeout_s < DEADLINE_S_MAX:
                call.deadline = self._loop.call_later(request.timeout_s, self._expire, call)

    def refuse(self, stream_id: int) -> None:
        """Refuse a stream that no service has got; the peer may open it again elsewhere."""
        self._tally.refused_calls += 1
        self._reset(stream_id, ErrorCodes.REFUSED_STREAM)

    def data(self, event: DataReceived) -> None:
        """Bytes of a stream arrived."""
        if event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        call = self.calls.get(event.stream_id)
        if call is None or not call.is_open or call.stream is None:
            return
        reader = call.reader
        held = reader.n_held
        try:
            messages = reader.feed(event.data)
        except Unreadable as exc:
            call.finish(exc.status, exc.text)
            return
        n_more = reader.n_held - held
        if n_more:
            has_space = n_more < 0 or self._budget.has_space(n_more)
            self._budget.add(n_more)
            if not has_space:
                call.finish(Status.RESOURCE_EXHAUSTED, "too many incomplete messages")
                return
            if messages or not held:
                call.incomplete_since_s = self.now_s
        try:
            for message in messages:
                if call.is_open:
                    call.stream.received(message)
        except Exception:
            self._failed(call)

    def half_closed(self, stream_id: int) -> None:
        """The peer has sent all of a stream."""
        call = self.calls.get(stream_id)
        if call is None:
            return
        call.is_half_closed = True
        if not call.is_open or call.stream is None:
            return
        if call.reader.n_held:
            call.finish(Status.INTERNAL, "the last message is incomplete")
            return
        try:
            call.stream.half_closed()
        except Exception:
            self._failed(call)

    def was_reset(self, stream_id: int) -> bool:
        """The peer reset a stream; returns whether it did so at once after opening it, and before its answer began."""
        call = self.calls.get(stream_id)
        if call is None:
            return False
        was_unanswered = call.is_open and not call.has_headers
        self._lose(call)
        return was_unanswered and self.now_s - call.opened_s < RAPID_S

    def written(self) -> None:
        """What h2 had to send was written. More of what waits may follow."""
        self._unwritten_bytes = 0
        self.unblock()

    def window_opened(self, stream_id: int) -> None:
        """The peer accepts more of a stream, or of the connection if stream_id is 0.

        A peer that opens a window byte by byte must not make this look at all its streams each time.
        """
        if stream_id:
            call = self.calls.get(stream_id)
            if call is not None and call in self._blocked:
                self._send_queue(call)
        elif self._is_window_closed:
            self._is_window_closed = False
            self.unblock()

    def unblock(self) -> None:
        """Send what waits, as far as the transport and the peer's windows allow it now."""
        if self._blocked:
            for call in list(self._blocked):
                if self.is_paused or self._is_window_closed or self._unwritten_bytes >= WRITE_BYTES_HIGH:
                    break
                self._send_queue(call)

    def check(self, now_s: float) -> None:
        """End calls whose peer stopped in the middle of a message, or does not accept what is sent."""
        self.now_s = now_s
        for call in list(self.calls.values()):
            if call.queue and now_s - call.stalled_since_s > STALL_S:
                self._abort(call, ErrorCodes.CANCEL)
            elif call.is_open and call.reader.n_held and now_s - call.incomplete_since_s > MESSAGE_S:
                call.finish(Status.DEADLINE_EXCEEDED, f"a message was not complete within {MESSAGE_S:.0f} s")

    def lose_all(self) -> None:
        """The connection is gone."""
        for call in list(self.calls.values()):
            self._lose(call)

    # -- what services do (Carrier) ------------------------------------------------------------------------------------

    def send(self, call: Call, message: bytes) -> None:
        """Send a message, or queue what the peer does not accept yet."""
        data = memoryview(framed(message))
        try:
            if not call.has_headers:
                self._h2.send_headers(call.stream_id, RESPONSE_HEADERS)
                call.has_headers = True
            if not call.queue:
                data = self._send_now(call, data)
        except ProtocolError:  # the peer has reset the stream; the event that says so comes next
            return
        self._wake()
        if not data:
            return
        if not self._budget.has_space(len(data)):
            self._abort(call, ErrorCodes.ENHANCE_YOUR_CALM)  # clients read this as RESOURCE_EXHAUSTED
            return
        if not call.queue:
            call.stalled_since_s = self._loop.time()
            self._blocked[call] = None
        call.queue.append(data)
        call.queued_bytes += len(data)
        self._budget.add(len(data))

    def finish(self, call: Call, status: Status, text: str) -> None:
        """End a call after what was sent."""
        headers = trailers(status, text) if call.has_headers else only_trailers(status, text)
        self._tally.finished[status] += 1
        self._close(call)
        if call.queue:
            call.last_headers = headers
        else:
            self._send_last(call, headers)
        self._notify_ended(call)

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send_now(self, call: Call, data: memoryview) -> memoryview:
        """Send as much as the transport and the windows allow; returns the rest. Raises ProtocolError."""
        h2 = self._h2
        while data and not self.is_paused and self._unwritten_bytes < WRITE_BYTES_HIGH:
            n = min(len(data), h2.local_flow_control_window(call.stream_id), h2.max_outbound_frame_size)
            if n <= 0:
                self._is_window_closed = h2.outbound_flow_control_window <= 0
                break
            h2.send_data(call.stream_id, data[:n])
            self._sent(n)
            self._unwritten_bytes += n
            data = data[n:]
        return data

    def _send_queue(self, call: Call) -> None:
        """Send what waits on a call, and its end."""
        del self._blocked[call]
        n_before = call.queued_bytes
        try:
            while call.queue:
                first = call.queue[0]
                rest = self._send_now(call, first)
                call.queued_bytes -= len(first) - len(rest)
                if rest:
                    call.queue[0] = rest
                    break
                call.queue.popleft()
        except ProtocolError:
            # The peer has reset the stream. The event that says so comes next, unless the call was over.
            self._budget.add(call.queued_bytes - n_before)
            if not call.is_open:
                self._forget(call)
            else:
                self._blocked[call] = None
            return
        n_sent = n_before - call.queued_bytes
        if n_sent:
            self._budget.add(-n_sent)
            call.stalled_since_s = self.now_s
            self._wake()
        if call.queue:
            self._blocked[call] = None
        elif call.last_headers is not None:
            self._send_last(call, call.last_headers)

    def _send_last(self, call: Call, headers: list[Header]) -> None:
        self._answer(call.stream_id, headers, call.is_half_closed)
        self._forget(call)

    def _answer(self, stream_id: int, headers: list[Header], is_half_closed: bool) -> None:
        """Send the last headers of a stream. The reset says that what the client still sends is not needed."""
        try:
            self._h2.send_headers(stream_id, headers, end_stream=True)
        except ProtocolError:  # the peer has reset the stream
            return
        if is_half_closed:
            self._wake()
        else:
            self._reset(stream_id, ErrorCodes.NO_ERROR)

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        try:
            self._h2.reset_stream(stream_id, code)
        except ProtocolError:  # the peer was faster
            return
        self._wake()

    # -- how calls end -------------------------------------------------------------------------------------------------

    def _expire(self, call: Call) -> None:
        call.deadline = None
        if call.queue:
            self._abort(call, ErrorCodes.CANCEL)
        else:
            call.finish(Status.DEADLINE_EXCEEDED, "the deadline of the client has passed")

    def _failed(self, call: Call) -> None:
        """A service raised an exception, which is being handled."""
        log.exception("the service of %s failed", call.method)
        call.finish(Status.INTERNAL, "the service failed")

    def _abort(self, call: Call, code: ErrorCodes) -> None:
        """Reset a call, with what waits to be sent on it."""
        self._reset(call.stream_id, code)
        self._lose(call)

    def _lose(self, call: Call) -> None:
        """A call is over without an answer."""
        was_open = call.is_open
        self._close(call)
        self._forget(call)
        if was_open:
            self._tally.reset_calls += 1
            self._notify_ended(call)

    def _close(self, call: Call) -> None:
        """Nothing more is received, or expected, on a call."""
        call.is_open = False
        if call.deadline is not None:
            call.deadline.cancel()
            call.deadline = None

    def _forget(self, call: Call) -> None:
        """A call needs no state any more."""
        del self.calls[call.stream_id]
        self._blocked.pop(call, None)
        n_held = call.reader.n_held + call.queued_bytes
        if n_held:
            self._budget.add(-n_held)

    def _notify_ended(self, call: Call) -> None:
        stream, call.stream = call.stream, None
        if stream is None:
            return
        try:
            stream.ended()
        except Exception:
            log.exception("the service of %s failed at the end of a call", call.method)
