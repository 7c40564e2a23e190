"""Restatements: when a rank's whole ledger is published, and in which chunks (pure).

What lives here: which resync requests are answered, and how runs are cut into chunks. What must not: Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from streams.core.events import BEFORE_FIRST, BlockFacts, RestatedRun, RestatementChunk, ResyncRequest
from streams.core.hashing import sequence_hashes
from streams.core.ids import Incarnation, SequenceHash

#: Bytes of hashes in one chunk: an eighth of the largest record of kv-events, so that one transaction of an agent can
#: contain a chunk as well as other ranks' batches.
CHUNK_BYTES_MAX = 1024 * 1024

#: A block has two hashes. A run has its start, parent, lengths and tier, rounded up. Facts that blocks have in common
#: are two numbers and three labels, and further bytes if the blocks are in CXL memory.
_BLOCK_BYTES = 16
_RUN_BYTES = 48
_FACTS_BYTES = 32
_PLACEMENT_BYTES = 32
_WORKER_BYTES = 10

#: A request that a restatement has answered is not answered again for this long, since the answer may be on its way. An
#: agent that did not get it repeats the request with a growing delay.
ANSWERED_FOR_S = 5.0

#: The shortest time between two restatements of one rank, since each rewrites all of the rank's rows.
RESTATE_EVERY_S = 1.0


@dataclass(slots=True)
class Restatements:
    """Decides which requests are answered, within one incarnation of a rank."""

    last_sequence: int | None = None
    last_at_s: float = 0.0

    def answers(
        self,
        request: ResyncRequest,
        incarnation: Incarnation,
        published: int,
        now_s: float,
        *,
        is_proven: bool = False,
    ) -> bool:
        """Return whether to restate.

        published: the last batch published in this incarnation. is_proven: whether the engine's event stream has been
        proven, so that without a batch the engine is known to hold nothing.
        """
        if request.incarnation != incarnation or (published == BEFORE_FIRST and not is_proven):
            return False  # the request is for another incarnation, or nothing is known about this one yet
        if self.last_sequence is None:
            return True
        wait_s = ANSWERED_FOR_S if request.sequence <= self.last_sequence else RESTATE_EVERY_S
        return now_s - self.last_at_s >= wait_s

    def sent(self, published: int, now_s: float) -> None:
        """Note that a restatement complete to batch `published` was sent."""
        self.last_sequence, self.last_at_s = published, now_s


def chunks(
    runs: Iterable[RestatedRun], restatement_id: int, *, exact: bool, bytes_max: int = CHUNK_BYTES_MAX
) -> list[RestatementChunk]:
    """Cut runs into the chunks of one restatement, in order; if no block is held, one chunk without runs."""
    pieces = list(_packed(runs, bytes_max)) or [[]]
    return [
        RestatementChunk(restatement_id, number, len(pieces), exact, tuple(piece))
        for number, piece in enumerate(pieces)
    ]


def _packed(runs: Iterable[RestatedRun], bytes_max: int) -> Iterator[list[RestatedRun]]:
    assert bytes_max >= _RUN_BYTES + _BLOCK_BYTES
    piece: list[RestatedRun] = []
    free_bytes = bytes_max
    for whole in runs:
        run: RestatedRun | None = whole
        while run is not None:
            fitting = _fitting(run, free_bytes - _RUN_BYTES)
            if fitting < 1 and piece:
                yield piece
                piece, free_bytes = [], bytes_max
                continue
            head, run = _cut(run, max(fitting, 1))
            piece.append(head)
            free_bytes -= _RUN_BYTES + _BLOCK_BYTES * len(head.local) + sum(map(_bytes_of, head.facts))
    if piece:
        yield piece


def _fitting(run: RestatedRun, free_bytes: int) -> int:
    """Return how many leading blocks of a run fit, with their facts."""
    for facts in run.facts:
        free_after = free_bytes - _bytes_of(facts)
        if free_after < (facts.first + 1) * _BLOCK_BYTES:
            return min(free_bytes // _BLOCK_BYTES, facts.first)
        free_bytes = free_after
    return min(free_bytes // _BLOCK_BYTES, len(run.local))


def _bytes_of(facts: BlockFacts) -> int:
    if facts.cxl is None:
        return _FACTS_BYTES
    n_workers = len(facts.cxl.accessible_workers)
    return _FACTS_BYTES + _PLACEMENT_BYTES + len((facts.cxl.pool_id or "").encode()) + _WORKER_BYTES * n_workers


def _cut(run: RestatedRun, n_kept: int) -> tuple[RestatedRun, RestatedRun | None]:
    """Return the first `n_kept` blocks of a run, and the rest, whose parent is the last of them."""
    if len(run.local) <= n_kept:
        return run, None
    before, after = [], []
    for facts in run.facts:
        end = facts.first + facts.n_blocks
        if facts.first < n_kept:
            before.append(replace(facts, n_blocks=min(end, n_kept) - facts.first))
        if end > n_kept:
            first = max(facts.first - n_kept, 0)
            after.append(replace(facts, first=first, n_blocks=end - n_kept - first))
    head = RestatedRun(run.start, run.parent, run.engine[:n_kept], run.local[:n_kept], run.tier, tuple(before))
    last = SequenceHash(int(sequence_hashes(head.local, run.parent)[-1]))
    return head, RestatedRun(run.start + n_kept, last, run.engine[n_kept:], run.local[n_kept:], run.tier, tuple(after))
