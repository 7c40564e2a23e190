"""Restatements: when a rank's whole ledger is sent, and in which pieces (pure).

What lives here: which resync requests are answered, and the cutting of runs to chunks. What must not: Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streams.core.events import BEFORE_FIRST, RestatedRun, RestatementChunk, ResyncRequest
from streams.core.hashing import sequence_hashes
from streams.core.ids import Incarnation, SequenceHash

#: Bytes of hashes in one chunk: an eighth of what a record of kv-events may have, so that one transaction of an agent
#: holds a chunk beside other ranks' batches.
CHUNK_BYTES_MAX = 1024 * 1024

#: Two hashes a block; a run's start, parent, lengths and tier beside them, rounded up.
_BLOCK_BYTES = 16
_RUN_BYTES = 48

#: A request that a restatement has answered already is not answered again for so long: the answer may be on its way. An
#: agent that did not get it asks again, with a back-off.
ANSWERED_FOR_S = 5.0

#: Restatements of one rank come no faster than this, whatever is asked: each is a rewrite of the rank's whole table.
RESTATE_EVERY_S = 1.0


@dataclass(slots=True)
class Restatements:
    """Which requests of one rank's life are answered."""

    last_sequence: int | None = None
    last_at_s: float = 0.0

    def wanted(self, request: ResyncRequest, incarnation: Incarnation, published: int, now_s: float) -> bool:
        """Whether to restate. published: the last batch published of this life."""
        if request.incarnation != incarnation or published == BEFORE_FIRST:
            return False  # another life's, which is over here or not begun; or there is nothing to say yet
        if self.last_sequence is None:
            return True
        wait_s = ANSWERED_FOR_S if request.sequence <= self.last_sequence else RESTATE_EVERY_S
        return now_s - self.last_at_s >= wait_s

    def sent(self, published: int, now_s: float) -> None:
        """A restatement complete to `published` was sent."""
        self.last_sequence, self.last_at_s = published, now_s


def chunks(
    runs: Iterable[RestatedRun], restatement_id: int, *, exact: bool, bytes_max: int = CHUNK_BYTES_MAX
) -> list[RestatementChunk]:
    """Cut runs into the pieces of one restatement, in order; one without runs where nothing is held."""
    pieces = list(_packed(runs, bytes_max)) or [[]]
    return [
        RestatementChunk(restatement_id, number, len(pieces), exact, tuple(piece))
        for number, piece in enumerate(pieces)
    ]


def _packed(runs: Iterable[RestatedRun], bytes_max: int) -> Iterator[list[RestatedRun]]:
    assert bytes_max >= _RUN_BYTES + _BLOCK_BYTES
    piece: list[RestatedRun] = []
    room = bytes_max
    for whole in runs:
        run: RestatedRun | None = whole
        while run is not None:
            fitting = (room - _RUN_BYTES) // _BLOCK_BYTES
            if fitting < 1:
                yield piece
                piece, room = [], bytes_max
                continue
            head, run = _cut(run, fitting)
            piece.append(head)
            room -= _RUN_BYTES + _BLOCK_BYTES * len(head.local)
    if piece:
        yield piece


def _cut(run: RestatedRun, at: int) -> tuple[RestatedRun, RestatedRun | None]:
    """The first `at` blocks of a run, and the rest, which hangs on the last of them."""
    if len(run.local) <= at:
        return run, None
    head = RestatedRun(run.start, run.parent, run.engine[:at], run.local[:at], run.tier)
    last = SequenceHash(int(sequence_hashes(head.local, run.parent)[-1]))
    return head, RestatedRun(run.start + at, last, run.engine[at:], run.local[at:], run.tier)
