"""The limits of a gRPC server, and what happens to a peer that exceeds one.

What lives here: limits, the reasons for which a connection is ended, and counters for limits. What must not: I/O, and
the code that finds a violation (frames, connection).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from h2.errors import ErrorCodes

MIB = 1024 * 1024

#: The payload of a frame, as HTTP/2 has it by default. Larger frames would save little: h2 takes about 15 us per frame.
FRAME_BYTES_MAX = 16_384

#: Windows of flow control. Envoy sends a body of 6 MB in a few round trips with these.
STREAM_WINDOW_BYTES = MIB
CONNECTION_WINDOW_BYTES = 8 * MIB

#: A request's headers after and before their decompression. Envoy sends a few hundred bytes, and more only if it is
#: configured to pass headers of its own clients on as metadata.
HEADER_LIST_BYTES_MAX = 65_536
HEADER_BLOCK_BYTES_MAX = 65_536

#: A client must send the HTTP/2 preface and its settings within this time. TLS has a limit of its own
#: (process.listener).
PREFACE_S = 10.0

#: A frame, or the headers of a request, must be complete within this time of its first byte.
FRAME_S = 30.0

#: A message must be complete within this time of its first byte. Envoy sends what it has, so only a peer that stopped
#: in the middle needs longer.
MESSAGE_S = 30.0

#: A peer that does not read, or does not open its window, for this long while something waits to be sent loses the
#: stream, or the connection.
STALL_S = 30.0

#: A connection that received nothing for KEEPALIVE_S is sent a PING, and is ended if nothing arrives for another
#: KEEPALIVE_ANSWER_S. Idle connections stay open, since Envoy keeps them.
KEEPALIVE_S = 30.0
KEEPALIVE_ANSWER_S = 10.0

#: After GOAWAY, what a peer still sends is dropped for this long. Otherwise its system would drop the GOAWAY.
LINGER_S = 2.0

#: Frames that carry nothing: PING, SETTINGS, WINDOW_UPDATE, RST_STREAM, PRIORITY, CONTINUATION, unknown ones, and DATA
#: that is empty or padded. A connection may send this many at once, and this many per second. A new stream and a
#: sizeable DATA frame, in either direction, allow for PROGRESS_FRAMES more.
EMPTY_FRAMES_BURST = 2_000
EMPTY_FRAMES_PER_S = 200.0
PROGRESS_FRAMES = 4
#: DATA frames with less do not allow for more: a peer that opens its window byte by byte would earn what it spends.
PROGRESS_BYTES = 256

#: Streams that the peer resets within RAPID_S of opening them and before their answer begins. Envoy resets each stream
#: at the end of its request, so that resets after an answer say nothing. A gateway whose clients all leave at once
#: resets hundreds of others. Beyond this the connection accepts no further streams; those that are open go on,
#: because a gateway's connection also has requests of clients that did nothing wrong.
RAPID_S = 0.1
RAPID_RESETS_BURST = 1_000
RAPID_RESETS_PER_S = 100.0

#: Streams that a peer may open after a GOAWAY that refuses them. They were on their way, or it does not care.
STREAMS_AFTER_GOAWAY_MAX = 2_000

#: Bytes that the transport holds before messages are queued instead, and before a connection is ended whose peer makes
#: this server answer (PING, SETTINGS) and does not read.
WRITE_BYTES_HIGH = MIB
WRITE_BYTES_MAX = 4 * MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user of the server chooses. buffered: messages that are incomplete, and messages that wait to be sent.

    message_bytes_max: of one message that is received. streams_max: open at a time on one connection, as its SETTINGS
    announce. buffered_bytes_max: of one connection; all_buffered_bytes_max: of all. A stream that would exceed them
    ends with RESOURCE_EXHAUSTED.
    """

    message_bytes_max: int = 16 * MIB
    connections_max: int = 1024
    streams_max: int = 1024
    buffered_bytes_max: int = 64 * MIB
    all_buffered_bytes_max: int = 256 * MIB


class Reason(StrEnum):
    """Why a connection was ended or refused. These are values of a metric's label."""

    PROTOCOL_ERROR = "protocol_error"
    INTERNAL_ERROR = "internal_error"
    FRAME_TOO_LARGE = "frame_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    FRAME_FLOOD = "frame_flood"
    RAPID_RESETS = "rapid_resets"
    STREAMS_AFTER_GOAWAY = "streams_after_goaway"
    NO_PREFACE = "no_preface"
    NO_ALPN = "no_alpn"
    SLOW_FRAME = "slow_frame"
    NOT_READING = "not_reading"
    NO_KEEPALIVE = "no_keepalive"
    TOO_MANY_CONNECTIONS = "too_many_connections"


class Violation(Exception):
    """A peer exceeded a limit or broke the protocol. The connection is ended with GOAWAY."""

    def __init__(self, reason: Reason, code: ErrorCodes, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.code = code
        self.text = text


class Allowance:
    """So many at once, and so many per second. Time is an argument."""

    __slots__ = ("_at_s", "_burst", "_left", "_per_s")

    def __init__(self, burst: int, per_s: float, now_s: float) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._left = self._burst
        self._at_s = now_s

    def spend(self, n: int, now_s: float) -> bool:
        """Use n; returns whether they were allowed."""
        self._left -= n
        if self._left < 0:  # only then is the time looked at
            self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
        return self._left >= 0

    def earn(self, n: int) -> None:
        """Allow n more, up to the burst."""
        self._left = min(self._burst, self._left + n)


class Budget:
    """Bytes that are held, with a limit, as part of a larger budget."""

    __slots__ = ("_parent", "held", "held_max")

    def __init__(self, held_max: int, parent: Budget | None = None) -> None:
        self.held = 0
        self.held_max = held_max
        self._parent = parent

    def add(self, n: int) -> None:
        """Hold n more bytes, or fewer if n is negative."""
        self.held += n
        if self._parent is not None:
            self._parent.held += n

    def has_space(self, n: int) -> bool:
        """Whether n more bytes are within this budget and the larger one."""
        parent = self._parent
        return self.held + n <= self.held_max and (parent is None or parent.held + n <= parent.held_max)
