"""Which rank each of an engine's event sockets has (pure).

What lives here: the ranks' numbers, and what a batch that names another rank than expected means. What must not:
sockets (connection), and what is done with such a batch (batch_publishing, bridged_engine).

An engine numbers its ranks itself, and its batches and metrics name them. The order of its ports only suggests which
rank a socket has, and the first rank may have any number: one engine of a larger deployment may have the ranks 8 to 15.
An engine with one rank for us needs no number, so any that its batches name is right.

The first batch of a socket is believed at once. If it was damaged, the next ones contradict it; once AGREEING_BATCHES
in a row name the same other rank, they are believed instead.

A contradiction lasts until the socket's rank is known again: its engine has begun anew, or has reported an empty cache,
and for CONTRADICTION_S no batch has named another rank. Otherwise one damaged batch would cost `exact` for good.

State: the ranks of an engine's sockets.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection

from streams.core.ids import DpRank
from streams.core.workers import DP_SIZE_MAX, DP_START_MAX
from streams.errors import KvStreamsError

#: For how long no batch may have named another rank before a rank that has reported an empty cache is trusted again.
CONTRADICTION_S = 5.0

#: Batches in a row that are believed against an earlier one. Two may be damaged in the same way, for example by an
#: engine that writes a field twice; each further batch that is awaited is lost.
AGREEING_BATCHES = 3

#: How often the batches of one socket may move ranks. If two ranks share a socket, they would do so for ever.
MOVES_MAX = 3


class RanksMoved(KvStreamsError):
    """A batch has shown that the engine's sockets have other ranks; its feeds must start again."""

    code = "ranks_moved"


class Naming(enum.Enum):
    """What a batch shows by the rank that it names."""

    FITS = "the socket has the rank"
    MOVED = "the sockets have other ranks than assumed until now"
    CONTRADICTS = "it cannot be known which rank the socket has"


class EngineRanks:
    """The ranks of one engine's sockets, for as long as the bridge has the engine."""

    def __init__(self, dp_size: int = DP_SIZE_MAX, dp_start: int | None = None) -> None:
        """dp_start: the number of the first rank; None to learn it from the engine."""
        self._dp_size = dp_size
        self._is_fixed = dp_start is not None
        self.start = dp_start or 0
        self._of_socket: dict[int, DpRank] = {}  # of sockets that do not have the rank that their port suggests
        self._named: dict[int, DpRank] = {}  # by socket, what the batches of its process name
        self._moves: Counter[int] = Counter()  # by socket, how often its batches have moved ranks
        self._contrary: dict[int, tuple[int, int]] = {}  # by socket, what its last batches name instead, how many
        self._contradicted_s: dict[int, float] = {}  # by socket, when a batch named another rank; monotonic
        self._not_cleared: set[int] = set()  # contradicted sockets whose rank has not reported an empty cache since
        self._is_new: set[int] = set()  # sockets whose ranks were moved, and that have not been fed since

    def of(self, socket: int) -> DpRank:
        """Return the rank of a socket; sockets are counted from 0, in the order of their ports."""
        return self._of_socket.get(socket, DpRank(self.start + socket))

    def socket_of(self, dp_rank: int) -> int | None:
        """Return the socket of a rank of an engine that reports all ranks together, None if it has no such rank."""
        socket = 0 if self._dp_size == 1 else dp_rank - self.start
        return socket if 0 <= socket < self._dp_size else None

    def are_contradicted(self, now_s: float) -> bool:
        """Whether it is not known of some batch which rank it is about."""
        if not self._contradicted_s:
            return False
        return bool(self._not_cleared) or now_s < max(self._contradicted_s.values()) + CONTRADICTION_S

    def on_clear(self, socket: int) -> None:
        """Note that a socket's rank has reported an empty cache, in a batch that fits."""
        self._not_cleared.discard(socket)

    def is_moved(self, socket: int) -> bool:
        """Whether the socket's rank was fed from another socket until now."""
        return socket in self._is_new

    def begin(self, socket: int) -> None:
        """Note that a socket's rank begins or resumes an incarnation."""
        self._named.pop(socket, None)
        self._contrary.pop(socket, None)
        self._contradicted_s.pop(socket, None)
        self._not_cleared.discard(socket)
        self._is_new.discard(socket)

    def on_page(self, numbers: Collection[int]) -> None:
        """Take the ranks that the engine's metrics page names, before anything is fed."""
        if self._is_fixed or self._dp_size == 1 or self._named or len(numbers) != self._dp_size:
            return
        first = min(numbers)
        if max(numbers) == first + self._dp_size - 1 and first <= DP_START_MAX:
            self.start = first
            self._of_socket.clear()

    def on_batch(self, socket: int, named: int, now_s: float) -> Naming:
        """Take the rank that a batch of a socket names. now_s: monotonic."""
        if self._named.get(socket) == named:
            self._contrary.pop(socket, None)
            return Naming.FITS
        dp_rank = DpRank(named)
        if any(rank == dp_rank for other, rank in self._named.items() if other != socket):
            return self._contradict(socket, now_s)
        is_contrary = socket in self._named or (self._moves[socket] and self.of(socket) != dp_rank)
        if is_contrary and not self._agree(socket, named):
            return self._contradict(socket, now_s)
        before = self._named.pop(socket, None)
        self._contrary.pop(socket, None)
        if self._dp_size == 1 or self.of(socket) == dp_rank:
            self._named[socket] = dp_rank
            return Naming.FITS
        if self._moves[socket] == MOVES_MAX or not self._move(socket, dp_rank):
            if before is not None:
                self._named[socket] = before
            return self._contradict(socket, now_s)
        self._moves[socket] += 1
        self._named[socket] = dp_rank
        self._is_new.update(range(self._dp_size))
        return Naming.MOVED

    def _agree(self, socket: int, named: int) -> bool:
        """Whether a socket's last batches all name this rank, which is not the expected one."""
        before, n = self._contrary.get(socket, (named, 0))
        n = n + 1 if before == named else 1
        self._contrary[socket] = named, n
        return n >= AGREEING_BATCHES

    def _contradict(self, socket: int, now_s: float) -> Naming:
        self._contradicted_s[socket] = now_s
        self._not_cleared.add(socket)
        return Naming.CONTRADICTS

    def _move(self, socket: int, dp_rank: DpRank) -> bool:
        """Give a socket the rank that its batch names; returns whether that is possible."""
        other = next((n for n in range(self._dp_size) if self.of(n) == dp_rank), None)
        if other is not None:
            self._of_socket[other], self._of_socket[socket] = self.of(socket), dp_rank
            return True
        first = dp_rank - socket
        if self._is_fixed or self._named or self._of_socket or not 0 <= first <= DP_START_MAX:
            return False
        self.start = first
        return True
