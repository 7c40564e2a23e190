"""An engine's replay socket: asking for past batches, and the order of batches behind a gap.

What lives here: the wire of a replay, and the window of batches that came too early (pure). What must not: what is done
with a batch (feed).

Different versions of vLLM answer in three frames (empty, number, payload) or in four (empty, topic, number, payload);
both end with the number -1 and, some of them, an empty payload. So frames are counted from the end.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import xxhash
import zmq
import zmq.asyncio

from streams.engines.continuity import ReplayCheck
from streams.errors import KvStreamsError

#: The replay socket answers from the engine's publishing thread, which looks every 100 ms.
REPLAY_TIMEOUT_S = 3.0

#: Answers waiting in the socket; an engine keeps 10,000 batches by default.
REPLAY_HWM = 100_000

#: Batches held behind a gap, and their bytes: seconds of a busy engine. Beyond either the gap is given up.
HELD_BATCHES_MAX = 10_000
HELD_BYTES_MAX = 64 * 1024 * 1024

#: Seconds before each further attempt to fill a gap, when the socket was silent; then it is given up.
FILL_BACKOFF_S = (0.25, 0.5, 1.0)

SEQUENCE = struct.Struct(">Q")
END_MARKER = b"\xff" * SEQUENCE.size


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as the engine sent it."""

    sequence: int
    payload: bytes


class ReplaySilent(KvStreamsError):
    """The socket did not answer in time, or not in words that are known; what came before counts."""

    code = "replay_silent"


def read_answer(frames: list[bytes]) -> Batch | None:
    """One answer; None where it ends the replay. Raises ReplaySilent for what is no answer."""
    # The end marker's payload may be left out: then it is the last frame itself.
    if frames and (frames[-1] == END_MARKER or (len(frames) > 1 and frames[-2] == END_MARKER)):
        return None
    if not 2 <= len(frames) <= 4 or len(frames[-2]) != SEQUENCE.size:
        raise ReplaySilent(f"an answer of {len(frames)} frames without a number")
    return Batch(SEQUENCE.unpack(frames[-2])[0], frames[-1])


async def replay(
    context: zmq.asyncio.Context, address: str, start: int, timeout_s: float = REPLAY_TIMEOUT_S
) -> AsyncGenerator[Batch]:
    """Give what the engine has kept from `start` on, in its order. Raises ReplaySilent."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, REPLAY_HWM)
        socket.connect(address)
        await socket.send_multipart([b"", SEQUENCE.pack(start)])
        while True:
            if not await socket.poll(int(timeout_s * 1000)):
                raise ReplaySilent(f"{address} does not answer")
            batch = read_answer(await socket.recv_multipart())
            if batch is None:
                return
            yield batch


async def check_last_batch(
    context: zmq.asyncio.Context, address: str | None, sequence: int, digest: int
) -> ReplayCheck:
    """Ask for the batch `sequence` and compare it with what is known of it. digest: xxh3_64 of its payload."""
    if address is None:
        return ReplayCheck.SILENT
    try:
        async with aclosing(replay(context, address, sequence)) as answers:
            async for batch in answers:
                if batch.sequence > sequence:
                    return ReplayCheck.FORGOTTEN
                if batch.sequence == sequence:
                    return ReplayCheck.SAME if xxhash.xxh3_64_intdigest(batch.payload) == digest else ReplayCheck.OTHER
    except ReplaySilent:
        return ReplayCheck.SILENT
    return ReplayCheck.UNSENT


class Window:
    """The next batch wanted of one life, and those that came before their turn."""

    def __init__(self, following: int) -> None:
        self.next = following
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0

    def offer(self, batch: Batch) -> None:
        """Take a batch that may be early; one that had its turn, or is there already, changes nothing."""
        if batch.sequence >= self.next and batch.sequence not in self._held:
            self._held[batch.sequence] = batch.payload
            self._held_bytes += len(batch.payload)

    def take(self) -> Batch | None:
        """Give the next batch, if it is there."""
        payload = self._held.pop(self.next, None)
        if payload is None:
            return None
        self._held_bytes -= len(payload)
        self.next += 1
        return Batch(self.next - 1, payload)

    @property
    def gap_until(self) -> int | None:
        """The first batch held behind a gap; None where nothing is held."""
        return min(self._held) if self._held else None

    @property
    def full(self) -> bool:
        """Whether the gap must be given up for lack of room."""
        return len(self._held) >= HELD_BATCHES_MAX or self._held_bytes >= HELD_BYTES_MAX

    def skip_to(self, sequence: int) -> int:
        """Give up what is missing before `sequence`; returns how many batches. Nothing held may lie before it."""
        lost = sequence - self.next
        assert lost >= 0 and (self.gap_until is None or self.gap_until >= sequence)
        self.next = sequence
        return lost

    def drop(self) -> int:
        """Forget what is held; returns how many batches."""
        n, self._held_bytes = len(self._held), 0
        self._held.clear()
        return n
