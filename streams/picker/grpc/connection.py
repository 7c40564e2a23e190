"""One connection: bytes of its transport become events of h2, and one write per step answers them.

What lives here: the steps, GOAWAY in both directions, keepalive, and how a connection ends. What must not: calls and
messages (calls), and how connections are accepted (server).

State: one connection. Its server calls `check` once a second.

h2 knows no graceful end: it neither sends nor receives anything after a GOAWAY. So GOAWAY frames are written here, and
those of the peer are kept from h2 (frames).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from enum import IntEnum
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from streams.picker.grpc.call import Service
from streams.picker.grpc.calls import CallTable, Tally
from streams.picker.grpc.frames import FrameWatch
from streams.picker.grpc.limits import (
    CONNECTION_WINDOW_BYTES,
    FRAME_S,
    HEADER_LIST_BYTES_MAX,
    KEEPALIVE_ANSWER_S,
    KEEPALIVE_S,
    LINGER_S,
    PREFACE_S,
    RAPID_RESETS_BURST,
    RAPID_RESETS_PER_S,
    STALL_S,
    STREAM_WINDOW_BYTES,
    STREAMS_AFTER_GOAWAY_MAX,
    WRITE_BYTES_HIGH,
    WRITE_BYTES_MAX,
    Allowance,
    Budget,
    Limits,
    Reason,
    Violation,
)
from streams.security.access import HTTP_2

log = logging.getLogger(__name__)


_KEEPALIVE_PING = b"kvsalive"
_LEAVE_PING = b"kvsleave"
#: The first GOAWAY accepts every stream that is on its way; the second one follows when the peer has read the first, or
#: after this time.
_LEAVE_NOTICE_S = 1.0
_ANY_STREAM = 2**31 - 1

_CONFIG = H2Configuration(client_side=False, header_encoding=None, validate_outbound_headers=False,
                          normalize_outbound_headers=False)  # fmt: skip


class _H2(H2Connection):
    """h2 without its limit of streams, for which it counts all of them at each new one. CallTable has the limit."""

    #: Only frames that arrive on a stream after its end need its entry. h2's own 65,536 take 10 MB per connection.
    MAX_CLOSED_STREAMS = 4096

    _sweep_at = 64

    @property
    def open_inbound_streams(self) -> int:
        """None, as far as h2's limit is concerned. The count, which removes closed streams, is taken now and then."""
        if len(self.streams) >= self._sweep_at:
            self._sweep_at = 64 + 2 * super().open_inbound_streams
        return 0


class Leaving(IntEnum):
    """How far a connection has come with its end."""

    NO = 0
    NOTICED = 1  # GOAWAY was sent; streams that are on their way are accepted
    REFUSING = 2  # the last GOAWAY was sent; open streams go on
    ENDED = 3  # what arrives is dropped


class Connection(asyncio.Protocol):
    """A connection of a client. calls: its calls. leaving: how far it has come with its end."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, None)  # until the connection is made
        now_s = self._loop.time()
        self._watch = FrameWatch(now_s)
        self._h2 = _H2(_CONFIG)
        self._resets = Allowance(RAPID_RESETS_BURST, RAPID_RESETS_PER_S, now_s)
        self._budget = Budget(owner.limits.buffered_bytes_max, owner.budget)
        self.calls = CallTable(
            self._h2, owner.service, owner.limits, self._budget, owner.tally, self._wake, self._watch.sent
        )
        self.leaving = Leaving.NO
        self._left_at_s = 0.0  # when `leaving` changed
        self._made_at_s = now_s
        self._heard_at_s = now_s
        self._pinged_at_s: float | None = None  # since nothing was heard
        self._paused_at_s: float | None = None
        self._in_step = False
        self._flush_is_due = False
        self._n_late = 0  # streams that were opened after the last GOAWAY

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport for TLS is no subclass
        self._owner.made(self)
        self._made_at_s = self._heard_at_s = self._loop.time()
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != HTTP_2:
            self._owner.tally.connections_ended[Reason.NO_ALPN] += 1
            self._enter(Leaving.ENDED)
            self._transport.close()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BYTES_HIGH)
        h2 = self._h2
        announced = {
            SettingCodes.MAX_CONCURRENT_STREAMS: self._owner.limits.streams_max,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            SettingCodes.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
        }
        # In force at once: what the peer sends before it has read them is within HTTP/2's defaults, which are lower.
        h2.local_settings = Settings(client=False, initial_values=announced)
        h2.decoder.max_header_list_size = HEADER_LIST_BYTES_MAX
        h2.initiate_connection()
        h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - h2.inbound_flow_control_window)
        self._flush()
        if self._owner.is_leaving:  # it was accepted just before
            self.leave()

    def data_received(self, data: bytes) -> None:
        if self.leaving is Leaving.ENDED:
            return
        self.calls.now_s = self._heard_at_s = now_s = self._loop.time()
        self._pinged_at_s = None
        self._in_step = True
        try:
            for event in self._h2.receive_data(self._watch.check(data, now_s)):
                self._handle(event)
            if self._transport.get_write_buffer_size() > WRITE_BYTES_MAX:
                raise Violation(Reason.NOT_READING, ErrorCodes.ENHANCE_YOUR_CALM, "answers are not read")
        except Violation as violation:
            self._end(violation)
        except ProtocolError as exc:
            self._h2.clear_outbound_data_buffer()  # the GOAWAY of h2, which has no text
            self._end(Violation(Reason.PROTOCOL_ERROR, exc.error_code, f"{type(exc).__name__}: {exc}"))
        except Exception:  # of a library: only this connection ends
            log.exception("what %s sent cannot be processed", self._peer())
            self._end(Violation(Reason.INTERNAL_ERROR, ErrorCodes.INTERNAL_ERROR, "internal error"))
        finally:
            self._in_step = False
        self._flush()
        self._end_if_done()

    def eof_received(self) -> bool:
        return False  # a client that sends no more has no open call; the transport is closed

    def pause_writing(self) -> None:
        self.calls.is_paused = True
        self._paused_at_s = self._loop.time()

    def resume_writing(self) -> None:
        self.calls.is_paused = False
        self._paused_at_s = None
        if self.leaving is not Leaving.ENDED:
            self.calls.now_s = self._loop.time()
            self.calls.unblock()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.leaving = Leaving.ENDED
        self.calls.lose_all()
        self._owner.lost(self)

    # -- what its server does ------------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Once a second: find a peer that is dead, or too slow."""
        if self.leaving is Leaving.ENDED:
            if now_s - self._left_at_s > LINGER_S:
                self._transport.abort()
            return
        violation = self._violation(now_s)
        if violation is not None:
            self._end(violation)
            return
        self.calls.check(now_s)
        if self.leaving is Leaving.NOTICED and now_s - self._left_at_s > _LEAVE_NOTICE_S:
            self._refuse_streams()
        if self._pinged_at_s is None and now_s - self._heard_at_s > KEEPALIVE_S:
            self._pinged_at_s = now_s
            self._h2.ping(_KEEPALIVE_PING)
        self._flush()
        self._end_if_done()

    def leave(self) -> None:
        """Accept no further streams, and end the connection when its calls have ended."""
        if self.leaving is not Leaving.NO:
            return
        if not self._watch.has_settings:  # it may never send any; whatever it opened is refused
            self._write_goaway(ErrorCodes.NO_ERROR, 0, "")
            self._close()
            return
        self._enter(Leaving.NOTICED)
        self._write_goaway(ErrorCodes.NO_ERROR, _ANY_STREAM, "")
        self._h2.ping(_LEAVE_PING)
        self._flush()

    def cut(self) -> None:
        """End the connection now; its calls are lost."""
        self.calls.lose_all()
        if self.leaving is not Leaving.ENDED:
            self._write_goaway(ErrorCodes.NO_ERROR, self._h2.highest_inbound_stream_id, "")
            self._close()

    def abort(self) -> None:
        """Drop the connection, with what it has not sent."""
        self._transport.abort()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        """One thing that the peer did; raises Violation."""
        calls = self.calls
        kind = type(event)
        if kind is DataReceived:
            calls.data(cast(DataReceived, event))
        elif kind is RequestReceived:
            if self.leaving is Leaving.REFUSING:
                self._refuse(cast(RequestReceived, event).stream_id)
            else:
                calls.requested(cast(RequestReceived, event))
        elif kind is StreamEnded:
            calls.half_closed(cast(StreamEnded, event).stream_id)
        elif kind is StreamReset:
            if calls.was_reset(cast(StreamReset, event).stream_id) and not self._resets.spend(1, calls.now_s):
                self._refuse_rapid()
        elif kind is WindowUpdated:
            calls.window_opened(cast(WindowUpdated, event).stream_id)
        elif kind is RemoteSettingsChanged:
            calls.unblock()
        elif kind is PingAckReceived:
            self._ping_answered(cast(PingAckReceived, event).ping_data)

    def _wake(self) -> None:
        """h2 has something to send: at the end of this step, or, outside of one, before the loop waits again."""
        if not (self._in_step or self._flush_is_due):
            self._flush_is_due = True
            self._loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_is_due = False
        self._flush()
        self._end_if_done()

    def _flush(self) -> None:
        """Write what h2 has to send: at once, but for messages of megabytes."""
        if self.leaving is Leaving.ENDED:
            return
        while data := self._h2.data_to_send():
            self._transport.write(data)
            self.calls.written()

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _violation(self, now_s: float) -> Violation | None:
        """For what a peer did not do in time."""
        began_s = self._watch.incomplete_since_s
        if not self._watch.has_settings and now_s - self._made_at_s > PREFACE_S:
            return Violation(Reason.NO_PREFACE, ErrorCodes.PROTOCOL_ERROR, f"no HTTP/2 within {PREFACE_S:.0f} s")
        if began_s is not None and now_s - began_s > FRAME_S:
            return Violation(Reason.SLOW_FRAME, ErrorCodes.ENHANCE_YOUR_CALM, f"no whole frame in {FRAME_S:.0f} s")
        if self._paused_at_s is not None and now_s - self._paused_at_s > STALL_S:
            return Violation(Reason.NOT_READING, ErrorCodes.ENHANCE_YOUR_CALM, f"nothing was read for {STALL_S:.0f} s")
        if self._pinged_at_s is not None and now_s - self._pinged_at_s > KEEPALIVE_ANSWER_S:
            return Violation(Reason.NO_KEEPALIVE, ErrorCodes.NO_ERROR, "a ping was not answered")
        return None

    def _ping_answered(self, data: bytes) -> None:
        if data == _LEAVE_PING and self.leaving is Leaving.NOTICED:
            self._refuse_streams()

    def _refuse(self, stream_id: int) -> None:
        """A stream was opened after the last GOAWAY; raises Violation."""
        self._n_late += 1
        if self._n_late > STREAMS_AFTER_GOAWAY_MAX:
            raise Violation(Reason.STREAMS_AFTER_GOAWAY, ErrorCodes.ENHANCE_YOUR_CALM, "GOAWAY was ignored")
        self.calls.refuse(stream_id)

    def _refuse_rapid(self) -> None:
        if self.leaving is Leaving.REFUSING:
            return
        self._owner.tally.connections_ended[Reason.RAPID_RESETS] += 1
        log.info("%s resets streams as soon as it has opened them; it may open no more", self._peer())
        self._refuse_streams(ErrorCodes.ENHANCE_YOUR_CALM, "too many streams were reset at once")

    def _refuse_streams(self, code: ErrorCodes = ErrorCodes.NO_ERROR, text: str = "") -> None:
        """Send the last GOAWAY; open streams go on."""
        self._enter(Leaving.REFUSING)
        self._write_goaway(code, self._h2.highest_inbound_stream_id, text)

    def _end_if_done(self) -> None:
        """End a connection that one of the sides is leaving, once there are no calls."""
        if (self.leaving is Leaving.REFUSING or self._watch.peer_leaves) and not self.calls.calls:
            self._close()

    def _end(self, violation: Violation) -> None:
        """Tell a peer why, and end the connection."""
        self._owner.tally.connections_ended[violation.reason] += 1
        log.info("the connection of %s is ended (%s): %s", self._peer(), violation.reason, violation.text)
        self.calls.lose_all()
        self._write_goaway(violation.code, self._h2.highest_inbound_stream_id, violation.text)
        self._close()

    def _write_goaway(self, code: ErrorCodes, last_stream_id: int, text: str) -> None:
        frame = GoAwayFrame(0, last_stream_id=last_stream_id, error_code=code, additional_data=text[:256].encode())
        self._transport.write(self._h2.data_to_send() + frame.serialize())

    def _close(self) -> None:
        """Send what is written, and close. What the peer sends meanwhile is dropped, so that it gets what was sent."""
        if self.leaving is Leaving.ENDED:
            return
        self._flush()
        self._enter(Leaving.ENDED)
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # TLS has no half-closed connections
                self._transport.close()
        except OSError:  # the peer has reset the connection
            self._transport.abort()

    def _enter(self, leaving: Leaving) -> None:
        self.leaving = leaving
        self._left_at_s = self._loop.time()

    def _peer(self) -> str:
        name = self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a peer"


class ConnectionOwner:
    """What the connections of one server share. Server is one; it keeps the list."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service = service
        self.limits = limits
        self.budget = Budget(limits.all_buffered_bytes_max)
        self.tally = Tally()
        self.connections: set[Connection] = set()
        # Connections in their TLS handshake, and when it ends at the latest. asyncio does not say if it fails.
        self.handshakes: dict[Connection, float] = {}
        self.is_leaving = False

    def made(self, connection: Connection) -> None:
        """A connection is open: its TLS handshake, if any, has ended."""
        self.handshakes.pop(connection, None)
        self.tally.connections += 1
        self.connections.add(connection)

    def lost(self, connection: Connection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
