"""Messages in a stream of bytes: a flag, a length of four bytes, and the message.

What lives here: both directions, without I/O. What must not: flow control (call, connection).
"""

from __future__ import annotations

from streams.picker.grpc.words import Status

HEAD_BYTES = 5

_IDENTITY, _COMPRESSED = 0, 1


class Unreadable(Exception):
    """The peer sent what cannot be read as messages; the call ends with this status."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class MessageReader:
    """Cuts what a peer sends on one stream into messages. n_held: bytes of the message that is incomplete."""

    __slots__ = ("_message_bytes_max", "_partial", "_wanted", "n_held")

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        # Not a list of pieces: a peer that sends single bytes would make this process keep fifty times as many.
        self._partial = bytearray()
        self._wanted = HEAD_BYTES
        self.n_held = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with these bytes; raises Unreadable."""
        n = len(data)
        if not self.n_held and n >= HEAD_BYTES and n == HEAD_BYTES + self._length(data, 0):
            return [data[HEAD_BYTES:]]  # most messages come whole and alone in one frame
        self._partial += data
        messages: list[bytes] = []
        partial, at = self._partial, 0
        while len(partial) - at >= self._wanted:
            end = at + HEAD_BYTES + self._length(partial, at)
            if len(partial) < end:
                self._wanted = end - at
                break
            messages.append(bytes(memoryview(partial)[at + HEAD_BYTES : end]))
            at, self._wanted = end, HEAD_BYTES
        if at:
            del partial[:at]
        self.n_held = len(partial)
        return messages

    def _length(self, data: bytes | bytearray, at: int) -> int:
        """The length of the message that begins here; raises Unreadable."""
        flag = data[at]
        if flag != _IDENTITY:
            if flag == _COMPRESSED:
                raise Unreadable(Status.UNIMPLEMENTED, "compressed messages are not supported")
            raise Unreadable(Status.INTERNAL, f"a message begins with the flag {flag}")
        length = int.from_bytes(data[at + 1 : at + HEAD_BYTES], "big")
        if length > self._message_bytes_max:
            raise Unreadable(
                Status.RESOURCE_EXHAUSTED,
                f"a message has {length} bytes, and at most {self._message_bytes_max} are accepted",
            )
        return length


def framed(message: bytes) -> bytes:
    """A message with its flag and length."""
    return b"\0" + len(message).to_bytes(4, "big") + message
