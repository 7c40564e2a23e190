"""Overlaps that were promised, compared with what engines found (docs/architecture.md).

What lives here: what a router remembers of its decisions until an engine reports on them, the outcomes, and which ranks
contradict too often. What must not: the fold of the index, which says what became of a prompt's blocks
(router_api.knowledge.run_changes), clocks (times are arguments), and the trust in answers
(router_api.knowledge.rank_trust).

Owner of the state: the router that decided. `promise` runs for every decision and `report` for every end; everything
else runs in the router's tick, once the records of what the engine did before its answer can have been read.

State: promises, and reports that wait.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from streams.core.ids import RankId
from streams.core.routing.request import PromptBlocks

#: Promises without a report. Beyond it the oldest counts as not reported. At 1,000 decisions/s it is that of a minute
#: ago, and requests that last longer are few.
PROMISES_MAX = 65_536

#: Reports that wait until they are judged. Beyond it the oldest is judged at once.
WAITING_MAX = 16_384

#: How long a report waits: an exact answer may be 0.75 s older than the log, and the agent and the reader need some
#: time as well. Records of a step that evicted blocks are then folded, or the rank is degraded.
SETTLE_MS = 1_000

#: Reports that are judged in one tick and that differ from their promise: each takes 50 to 200 us.
DIFFERENT_PER_TICK_MAX = 128

#: Reports of a rank that are looked back on, and how many of them must be `over` before its answers are approximate:
#: fewer may be races that no record shows.
WINDOW = 200
OVER_MIN = 5
OVER_SHARE_MIN = 0.02

#: Judged requests of which it is remembered when they ran, to find those that ran at the same time as another one.
ENDED_MAX = 4_096

#: Ranks whose reports are looked back on. Beyond it the one that was added first begins anew.
RANKS_MAX = 16_384

#: Tokens at the end of a prompt that engines compute even if all of it is cached: every dialect says so
#: (engines.dialects.interface.Dialect.computed_tokens_min, which a test compares).
COMPUTED_TOKENS_MIN = 1


class AuditOutcome(enum.StrEnum):
    """How an overlap compares with what the engine found. The values are those of a label."""

    __hash__ = str.__hash__  # that of Enum is a Python function, which every look-up by a member would call

    AGREED = "agreed"
    OVER = "over"  # the engine found less, and nothing explains it
    UNDER = "under"  # the engine found more, and nothing explains it
    EXCUSED = "excused"  # it found something else, which a removal, a preemption or another request's store explains
    NOT_REPORTED = "not_reported"


class Fate(enum.Enum):
    """What the records since a decision say of the blocks that were promised.

    KEPT: no record is about them. TOUCHED: a run of them was written again and has all of them, which happens when the
    request itself extends it, and when a block is removed and stored again within one transaction. CHANGED: one of them
    was removed, or it cannot be known.
    """

    KEPT = enum.auto()
    TOUCHED = enum.auto()
    CHANGED = enum.auto()


class Promise(NamedTuple):
    """What a decision promised. number: of the decision. since: position in the log of the index before it was made."""

    rank: RankId
    overlap_blocks: int
    prompt: PromptBlocks
    is_exact: bool
    since: int
    number: int


#: The fields of a Promise.
_Kept = tuple[RankId, int, PromptBlocks, bool, int, int]


class _Reported(NamedTuple):
    """A promise with what the engine found. number: of the last decision when it was reported."""

    promise: Promise
    promised_blocks: int
    found_blocks: int
    same_prompt: bool
    number: int


class RankRecord:
    """The last reports of one rank in one state of its cache. key: that state; see `Evidence.cache_of`."""

    __slots__ = ("key", "n", "over")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.n = 0
        self.over: deque[int] = deque()

    def note(self, *, is_over: bool) -> bool:
        """Add a report; returns whether the rank contradicts too often."""
        self.n += 1
        if is_over:
            self.over.append(self.n)
        while self.over and self.over[0] <= self.n - WINDOW:
            self.over.popleft()
        return is_over and len(self.over) >= max(OVER_MIN, OVER_SHARE_MIN * min(self.n, WINDOW))


class Evidence(NamedTuple):
    """What an audit asks the router's view.

    fate: what became of the first n blocks of a prompt on a rank since a position in the log. holds: how many leading
    blocks of a prompt a rank holds now. is_known: whether a rank's records are complete up to now. cache_of: what stays
    the same until the engine clears its cache or restarts; None if the rank is not known. is_alone: whether this router
    makes all recent decisions.
    """

    fate: Callable[[RankId, bytes, int, int], Fate]
    holds: Callable[[RankId, bytes], int]
    is_known: Callable[[RankId], bool]
    cache_of: Callable[[RankId], Hashable | None]
    is_alone: Callable[[], bool]


class _Concurrent:
    """Which requests ran at the same time, made when it is first asked for: few reports need it."""

    def __init__(self, intervals: Callable[[], Iterator[tuple[RankId, int, int]]]) -> None:
        self._intervals = intervals
        self._by_rank: dict[RankId, list[tuple[int, int]]] | None = None

    def has_other(self, rank: RankId, first: int, last: int) -> bool:
        """Whether another request than that of decision `first` was on a rank between two decisions."""
        if self._by_rank is None:
            self._by_rank = {}
            for on_rank, began, ended in self._intervals():
                self._by_rank.setdefault(on_rank, []).append((began, ended))
        of_rank = self._by_rank.get(rank, ())
        return any(began != first and began <= last and ended >= first for began, ended in of_rank)


class Audit:
    """The audit of one router. Used on the thread that decides.

    outcomes: of all promises. exact: of those that were `exact`. disagreeing: ranks whose answers are approximate, each
    with the state of its cache (`Evidence.cache_of`) to which this applies.
    """

    def __init__(self, evidence: Evidence, disagreeing: dict[RankId, Hashable], ttl_ms: int) -> None:
        """ttl_ms: a promise that is older counts as not reported."""
        self._evidence = evidence
        self._ttl_ms = ttl_ms
        self.outcomes: Counter[AuditOutcome] = Counter()
        self.exact: Counter[AuditOutcome] = Counter()
        self.disagreeing = disagreeing
        # By request id, or that and a phase, in the order of the decisions.
        self._promises: dict[str | tuple[str, str], _Kept] = {}
        # Each with prompt tokens, cached tokens, the number of the last decision, and when it is due.
        self._waiting: deque[tuple[_Kept, int, int, int, int]] = deque()
        self._ranks: dict[RankId, RankRecord] = {}
        self._ended: deque[tuple[RankId, int, int]] = deque(maxlen=ENDED_MAX)
        self._number = 0
        self._numbers: deque[tuple[int, int]] = deque()  # the last decision at each tick, within ttl_ms

    def __len__(self) -> int:
        """Promises without a report, and reports that wait."""
        return len(self._promises) + len(self._waiting)

    # -- what runs for every request -----------------------------------------------------------------------------------

    def promise(
        self,
        request_id: str,
        phase: str | None,
        rank: RankId,
        overlap_blocks: int,
        prompt: PromptBlocks,
        is_exact: bool,
        since: int,
    ) -> None:
        """Remember a decision. A former one of the same request and phase ends without a report."""
        self._number = number = self._number + 1
        promises, key = self._promises, request_id if phase is None else (request_id, phase)
        if key in promises:
            self._end(promises.pop(key))
        # A plain tuple is made in a quarter of the time; it becomes a Promise when it is reported on.
        promises[key] = (rank, overlap_blocks, prompt, is_exact, since, number)
        if len(promises) > PROMISES_MAX:
            for oldest in list(itertools.islice(promises, max(1, PROMISES_MAX // 16))):
                self._end(promises.pop(oldest))

    def report(self, request_id: str, phase: str | None, prompt_tokens: int, cached_tokens: int, now_ms: int) -> bool:
        """Take in what an engine found of a request's prompt; returns whether that was waited for.

        Only the first report counts.
        """
        promise = self._promises.pop(request_id if phase is None else (request_id, phase), None)
        if promise is None:
            return False
        waiting = self._waiting
        waiting.append((promise, prompt_tokens, cached_tokens, self._number, now_ms + SETTLE_MS))
        if len(waiting) > WAITING_MAX:
            self._end(waiting.popleft()[0])
        return True

    def ended(self, request_id: str, phase: str | None) -> None:
        """Take in that a request has ended. phase: None for all of its phases."""
        promises = self._promises
        keys = (
            (request_id, (request_id, "prefill"), (request_id, "decode")) if phase is None else ((request_id, phase),)
        )
        for key in keys:
            promise = promises.pop(key, None)
            if promise is not None:
                self._end(promise)
                if key is request_id:
                    return  # it has no phases

    def _end(self, kept: _Kept) -> None:
        promise = Promise(*kept)
        self._count(promise, AuditOutcome.NOT_REPORTED)
        self._ended.append((promise.rank, promise.number, self._number))

    def _count(self, promise: Promise, outcome: AuditOutcome) -> None:
        self.outcomes[outcome] += 1
        if promise.is_exact:
            self.exact[outcome] += 1

    # -- what runs in the tick -----------------------------------------------------------------------------------------

    def judge_due(self, now_ms: int) -> list[RankId]:
        """Judge the reports that have waited long enough; returns the ranks that contradict too often from now on."""
        self._expire(now_ms)
        waiting, different, disagreeing = self._waiting, 0, []
        concurrent = _Concurrent(self._all_intervals)
        while waiting and waiting[0][4] <= now_ms and different < DIFFERENT_PER_TICK_MAX:
            reported = _compared(*waiting.popleft())
            different += reported.found_blocks != reported.promised_blocks
            if self._judge(reported, concurrent):
                disagreeing.append(reported.promise.rank)
        return disagreeing

    def _expire(self, now_ms: int) -> None:
        """End the promises whose bookings have expired."""
        numbers, promises = self._numbers, self._promises
        if not numbers or numbers[-1][1] != self._number:
            numbers.append((now_ms, self._number))
        while numbers and numbers[0][0] <= now_ms - self._ttl_ms:
            _, last = numbers.popleft()
            for key in [key for key, kept in promises.items() if kept[5] <= last]:
                self._end(promises.pop(key))

    def _judge(self, reported: _Reported, concurrent: _Concurrent) -> bool:
        """Count a report; returns whether its rank contradicts too often from now on."""
        promise, rank = reported.promise, reported.promise.rank
        outcome = self._outcome(reported, concurrent)
        self._count(promise, outcome)
        self._ended.append((rank, promise.number, reported.number))
        if not promise.is_exact:
            return False
        key = self._evidence.cache_of(rank)
        if key is None:
            self._ranks.pop(rank, None)
            return False
        record = self._ranks.get(rank)
        if record is None or record.key != key:
            record = self._ranks[rank] = RankRecord(key)
            if len(self._ranks) > RANKS_MAX:
                del self._ranks[next(iter(self._ranks))]
        if not record.note(is_over=outcome is AuditOutcome.OVER) or self.disagreeing.get(rank) == key:
            return False
        self.disagreeing[rank] = key
        return True

    def _outcome(self, reported: _Reported, concurrent: _Concurrent) -> AuditOutcome:
        promise, found, promised = reported.promise, reported.found_blocks, reported.promised_blocks
        if found == promised:
            return AuditOutcome.AGREED
        evidence, rank, sequence = self._evidence, promise.rank, promise.prompt.sequence
        if not reported.same_prompt or not evidence.is_known(rank):
            return AuditOutcome.EXCUSED
        if found > promised:
            # The request itself stores what the engine did not find. What it found and this router did not know of was
            # stored by another request if the index has it by now.
            is_explained = (
                evidence.holds(rank, sequence) >= found
                or evidence.fate(rank, sequence, found, promise.since) is Fate.CHANGED
            )
            return AuditOutcome.EXCUSED if is_explained else AuditOutcome.UNDER
        fate = evidence.fate(rank, sequence, promised, promise.since)
        if fate is Fate.CHANGED or (fate is Fate.TOUCHED and self._was_shared(reported, concurrent)):
            return AuditOutcome.EXCUSED
        return AuditOutcome.OVER

    def _was_shared(self, reported: _Reported, concurrent: _Concurrent) -> bool:
        """Whether the rank may have had another request in between, which can evict blocks before this one begins."""
        first = reported.promise.number
        if not self._evidence.is_alone() or (len(self._ended) == ENDED_MAX and self._ended[0][2] > first):
            return True
        return concurrent.has_other(reported.promise.rank, first, reported.number)

    def _all_intervals(self) -> Iterator[tuple[RankId, int, int]]:
        """Each request's rank, the number of its decision, and the number of the last one when it ended."""
        yield from self._ended
        for kept, _, _, number, _ in self._waiting:
            yield kept[0], kept[5], number
        for kept in self._promises.values():
            yield kept[0], kept[5], self._number

    def share_agreed(self) -> float | None:
        """The share of the exact answers, of those with a report, whose overlap the engine found; None without any."""
        reported = self.exact.total() - self.exact[AuditOutcome.NOT_REPORTED]
        return self.exact[AuditOutcome.AGREED] / reported if reported else None


def promised_blocks(overlap_blocks: int, prompt_tokens: int, block_size: int) -> int:
    """Return how many of a prompt's blocks an engine that holds its first `overlap_blocks` takes from its cache."""
    return min(overlap_blocks, max(0, prompt_tokens - COMPUTED_TOKENS_MIN) // block_size)


def _compared(kept: _Kept, prompt_tokens: int, cached_tokens: int, number: int, _due_ms: int) -> _Reported:
    promise = Promise(*kept)
    prompt = promise.prompt
    # A prompt that was given as hashes has between one and block_size tokens in its last block.
    same_prompt = prompt_tokens == prompt.n_tokens or (
        not prompt.n_tokens % prompt.block_size and 0 <= prompt_tokens - prompt.n_tokens < prompt.block_size
    )
    promised = promised_blocks(promise.overlap_blocks, prompt_tokens, prompt.block_size)
    return _Reported(promise, promised, cached_tokens // prompt.block_size, same_prompt, number)
