"""An engine's replay socket: requesting past batches, and the window of batches that are early.

What lives here: the protocol of a replay, and the window (pure). What must not: what is done with a batch (feed), and
when a replay is requested (gap_filling).

Versions of vLLM differ: an answer has three frames (empty, number, payload) or four (empty, topic, number, payload). A
replay ends with the number -1, which some versions follow with an empty payload. So frames are counted from the end.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import xxhash
import zmq
import zmq.asyncio

from streams.engines.connection import MESSAGE_BYTES_MAX
from streams.engines.continuity import ReplayCheck
from streams.errors import KvStreamsError

#: The engine's publishing thread answers the replay socket. It checks the socket every 100 ms.
REPLAY_TIMEOUT_S = 3.0

#: The longest wait for the first answer to a catch-up, and for a further answer of any replay. Over a slow link, one
#: batch of a long prompt takes seconds: 300 KB at 30 KB/s.
REPLAY_TIMEOUT_S_MAX = 24.0

#: Answers that wait in the socket. An engine keeps 10,000 batches by default.
REPLAY_HWM = 100_000

#: Batches buffered after a gap, and their bytes: several seconds of a busy engine. At either limit the gap is given up.
BUFFERED_BATCHES_MAX = 10_000
BUFFERED_BYTES_MAX = 64 * 1024 * 1024

#: Seconds before each further attempt to fill a gap, if the socket did not answer. After the last attempt the gap is
#: given up.
FILL_BACKOFF_S = (0.25, 0.5, 1.0)

SEQUENCE = struct.Struct(">Q")
END_MARKER = b"\xff" * SEQUENCE.size


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as the engine sent it."""

    sequence: int
    payload: bytes


class ReplaySilent(KvStreamsError):
    """The socket did not answer in time, or answered with unknown frames. Batches received before remain valid."""

    code = "replay_silent"


def read_answer(frames: list[bytes]) -> Batch | None:
    """Read one answer; None if it ends the replay. Raises ReplaySilent for frames that are not an answer."""
    # If the end marker has no payload, it is the last frame itself.
    if frames and (frames[-1] == END_MARKER or (len(frames) > 1 and frames[-2] == END_MARKER)):
        return None
    if not 2 <= len(frames) <= 4 or len(frames[-2]) != SEQUENCE.size:
        raise ReplaySilent(f"an answer has {len(frames)} frames and no sequence number")
    return Batch(SEQUENCE.unpack(frames[-2])[0], frames[-1])


class ReplayRequest:
    """One replay, for a loop that does other work while it waits for the answers.

    start: the first batch requested. answer: the next answer, which `take` reads. due_at_s: if it has not arrived by
    then, the socket counts as silent. timeout_s: for the first answer.
    """

    def __init__(
        self, context: zmq.asyncio.Context, address: str, start: int, timeout_s: float = REPLAY_TIMEOUT_S
    ) -> None:
        self.start = start
        self.began_at_s = time.monotonic()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, REPLAY_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self._socket.connect(address)
        # ZMQ queues the request until the connection is complete, so this future is done at once.
        self._sent = asyncio.ensure_future(self._socket.send_multipart([b"", SEQUENCE.pack(start)]))
        self._await_answer(timeout_s)

    def take(self) -> Batch | None:
        """Read the answer that has arrived; None if it ends the replay. Raises ReplaySilent for unknown frames."""
        batch = read_answer(self.answer.result())
        if batch is not None:
            self._await_answer(REPLAY_TIMEOUT_S_MAX)
        return batch

    def close(self) -> None:
        """Close the socket, with all answers that have not been read."""
        self._socket.close(linger=0)

    def _await_answer(self, timeout_s: float) -> None:
        self.answer: asyncio.Future[list[bytes]] = asyncio.ensure_future(self._socket.recv_multipart())
        self.due_at_s = time.monotonic() + timeout_s


async def replay(
    context: zmq.asyncio.Context, address: str, start: int, timeout_s: float = REPLAY_TIMEOUT_S
) -> AsyncGenerator[Batch]:
    """Yield the batches that the engine has kept from `start` on, in its order. Raises ReplaySilent."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, REPLAY_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        # ZMQ queues the request before the connection exists, but not after a peer of another type has refused it.
        socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        socket.connect(address)
        try:
            await socket.send_multipart([b"", SEQUENCE.pack(start)])
        except zmq.Again as exc:
            raise ReplaySilent(f"{address} takes no request; is it the port of events?") from exc
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
    """Request batch `sequence` and compare it with the known digest, which is xxh3_64 of its payload."""
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
    """The number of an incarnation's next batch, and the batches that arrived early."""

    def __init__(self, following: int) -> None:
        self.next = following
        self._early: dict[int, bytes] = {}
        self._early_bytes = 0

    def offer(self, batch: Batch) -> None:
        """Add a batch. A batch before the next one, or one that is buffered already, changes nothing."""
        if batch.sequence >= self.next and batch.sequence not in self._early:
            self._early[batch.sequence] = batch.payload
            self._early_bytes += len(batch.payload)

    def pass_next(self) -> bool:
        """Count the next batch as taken, which was never buffered; False, and nothing changes, if others are."""
        if self._early:
            return False
        self.next += 1
        return True

    def take(self) -> Batch | None:
        """Remove and return the next batch, None if it has not arrived."""
        payload = self._early.pop(self.next, None)
        if payload is None:
            return None
        self._early_bytes -= len(payload)
        self.next += 1
        return Batch(self.next - 1, payload)

    @property
    def gap_until(self) -> int | None:
        """The number of the first buffered batch, which ends the gap; None if no batch is buffered."""
        return min(self._early) if self._early else None

    @property
    def full(self) -> bool:
        """Whether a limit of the buffer is reached, so that the gap must be given up."""
        return len(self._early) >= BUFFERED_BATCHES_MAX or self._early_bytes >= BUFFERED_BYTES_MAX

    def skip_to(self, sequence: int) -> int:
        """Give up the batches missing before `sequence`; return how many. No buffered batch may be before it."""
        lost = sequence - self.next
        assert lost >= 0 and (self.gap_until is None or self.gap_until >= sequence)
        self.next = sequence
        return lost

    def drop(self) -> int:
        """Drop the buffered batches; return how many."""
        n, self._early_bytes = len(self._early), 0
        self._early.clear()
        return n
