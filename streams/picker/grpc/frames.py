"""What a peer sends, looked at frame by frame before h2 gets it.

What lives here: the limits on frames that h2 does not have, and the frames that h2 must not see. What must not: the
meaning of frames, which is h2's.

State: the position within the frames of one connection.

h2 holds a frame of up to 16 MB before it refuses its length, puts no limit on frames that carry nothing, and accepts no
frame after a GOAWAY, although open streams go on after one.
"""

from __future__ import annotations

from h2.errors import ErrorCodes

from streams.picker.grpc.limits import (
    EMPTY_FRAMES_BURST,
    EMPTY_FRAMES_PER_S,
    FRAME_BYTES_MAX,
    HEADER_BLOCK_BYTES_MAX,
    PROGRESS_BYTES,
    PROGRESS_FRAMES,
    Allowance,
    Reason,
    Violation,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_HEAD_BYTES = 9
_DATA, _HEADERS, _SETTINGS, _GOAWAY, _CONTINUATION = 0, 1, 4, 7, 9
_END_STREAM, _END_HEADERS, _PADDED = 0x1, 0x4, 0x8


class FrameWatch:
    """Checks frames. has_settings: whether the preface and the client's first frame arrived.

    peer_leaves: whether it sent GOAWAY.
    """

    __slots__ = ("_allowance", "_began_s", "_block_bytes", "_drops", "_head", "_left", "_preface_left", "has_settings",
                 "peer_leaves")  # fmt: skip

    def __init__(self, now_s: float) -> None:
        self.has_settings = False
        self.peer_leaves = False
        self._preface_left = PREFACE
        self._head = b""  # the beginning of a frame's head
        self._left = 0  # bytes of the current frame that are still to come
        self._drops = False  # whether the current frame is kept from h2
        self._block_bytes = 0  # of headers that CONTINUATION frames complete; 0 if there are none
        self._began_s = now_s  # when the current frame, or block of headers, began
        self._allowance = Allowance(EMPTY_FRAMES_BURST, EMPTY_FRAMES_PER_S, now_s)

    @property
    def incomplete_since_s(self) -> float | None:
        """When the frame, or the block of headers, that is incomplete began; None if none is."""
        return self._began_s if self._left or self._head or self._block_bytes else None

    def sent(self, n_bytes: int) -> None:
        """A DATA frame was sent, for which the peer may send WINDOW_UPDATEs."""
        if n_bytes >= PROGRESS_BYTES:
            self._allowance.earn(PROGRESS_FRAMES)

    def check(self, data: bytes, now_s: float) -> bytes:
        """What h2 may have of these bytes, mostly all of them; raises Violation."""
        had_head = bool(self._head)
        if had_head:
            data, self._head = self._head + data, b""
        n = len(data)
        at = 0
        if self._preface_left:
            at = min(len(self._preface_left), n)
            if not self._preface_left.startswith(data[:at]):
                raise Violation(Reason.PROTOCOL_ERROR, ErrorCodes.PROTOCOL_ERROR, "this is not HTTP/2")
            self._preface_left = self._preface_left[at:]
        dropped: list[tuple[int, int]] = []
        while True:
            if self._left:
                step = min(self._left, n - at)
                if self._drops:
                    dropped.append((at, at + step))
                at += step
                self._left -= step
                if self._left:
                    break
            self._drops = False
            if n - at < _HEAD_BYTES:
                break
            self._left = self._begin(data, at, now_s)
            if self._drops:
                dropped.append((at, at + _HEAD_BYTES))
            at += _HEAD_BYTES
        if at < n:
            if not (self._block_bytes or (had_head and at == 0)):
                self._began_s = now_s
            self._head = data[at:]
            dropped.append((at, n))
        return _without(data, dropped) if dropped else data

    def _begin(self, data: bytes, at: int, now_s: float) -> int:
        """Check the head of a frame; returns the length of its payload."""
        length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
        kind, flags = data[at + 3], data[at + 4]
        if length > FRAME_BYTES_MAX:
            raise Violation(Reason.FRAME_TOO_LARGE, ErrorCodes.FRAME_SIZE_ERROR, f"a frame has {length} bytes")
        if kind != _CONTINUATION:
            self._began_s = now_s
        if not self.has_settings:
            if kind != _SETTINGS:
                raise Violation(Reason.PROTOCOL_ERROR, ErrorCodes.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self.has_settings = True
        if kind == _DATA and not flags & _PADDED:
            if length >= PROGRESS_BYTES:
                self._allowance.earn(PROGRESS_FRAMES)
            if length or flags & _END_STREAM:
                return length
        elif kind == _HEADERS:
            self._allowance.earn(PROGRESS_FRAMES)
            self._block_bytes = 0 if flags & _END_HEADERS else max(1, length)
            return length
        elif kind == _CONTINUATION:
            self._block_bytes += length
            if self._block_bytes > HEADER_BLOCK_BYTES_MAX:
                raise Violation(
                    Reason.HEADERS_TOO_LARGE,
                    ErrorCodes.ENHANCE_YOUR_CALM,
                    f"headers have more than {HEADER_BLOCK_BYTES_MAX} bytes",
                )
            if flags & _END_HEADERS:
                self._block_bytes = 0
        elif kind == _GOAWAY and not self._block_bytes:
            self.peer_leaves = self._drops = True
        if not self._allowance.spend(1, now_s):
            raise Violation(
                Reason.FRAME_FLOOD, ErrorCodes.ENHANCE_YOUR_CALM, f"too many frames that carry nothing (kind {kind})"
            )
        return length


def _without(data: bytes, dropped: list[tuple[int, int]]) -> bytes:
    """The bytes outside of these ranges, which are in order."""
    starts = [0, *(end for _, end in dropped)]
    ends = [*(start for start, _ in dropped), len(data)]
    return b"".join(data[start:end] for start, end in zip(starts, ends, strict=True))
