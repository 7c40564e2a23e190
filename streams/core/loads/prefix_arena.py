"""Active prefixes in the memory of kernels: ActivePrefixes (active_prefixes) with the same answers, for numba.

What lives here: the calls from Python, and checking the memory. What must not: the algorithms (kernels.prefixes) and
bookings. The memory belongs to the caller, whose bookings are in it as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

from streams.core.ids import Int64Array
from streams.core.loads.kernels import layout
from streams.core.loads.kernels.prefixes import MATCH_WORDS, add_bytes, find_child, match_bytes, remove_chain
from streams.core.loads.memory import BookingMemory, span_words
from streams.errors import IndexCorrupt, IndexFull

_CHILD_MASK = (1 << 32) - 1


class ArenaRun(NamedTuple):
    """A run: its length in blocks, and the number of requests that use it, by row."""

    n_blocks: int
    uses: dict[int, int]


class PrefixArena:
    """The tree of one BookingMemory. Chains are packed u64, 8 bytes per block. A run is a number, 0 for no blocks."""

    def __init__(self, memory: BookingMemory) -> None:
        self._memory = memory  # which the address is valid with
        self._address = memory.address
        self._scratch = memory.scratch
        self._words: memoryview = memory.scratch.data  # the same words: reading a few takes half as long

    def add(self, row: int, chain: bytes) -> tuple[int, int]:
        """Add a request on this row that uses these blocks from the root.

        Returns the run at its end, which `remove` takes, and how many of the blocks the row did not use before. Raises
        IndexFull; nothing is added then.
        """
        added = add_bytes(self._address, row, chain)
        if added[0] < 0:
            raise IndexFull("the memory of active prefixes is full", row=row, n_blocks=len(chain) // 8)
        return added

    def remove(self, row: int, run: int) -> int:
        """Remove a request by the run that `add` returned for it; return how many blocks the row no longer uses.

        Raises IndexCorrupt if the row does not use the run.
        """
        n_ended = remove_chain(self._address, row, run)
        if n_ended < 0:
            raise IndexCorrupt("a request ends that its run does not have", row=row, run=run)
        return n_ended

    def shared(self, chain: bytes, n_rows: int) -> Int64Array:
        """How many leading blocks of a chain each row has in use: int64[n_rows]. Rows from n_rows on are left out."""
        self._match(chain, n_rows)
        return self._scratch[:n_rows].copy()

    def shared_and_users(self, chain: bytes, n_rows: int) -> tuple[Int64Array, list[tuple[int, int, int]]]:
        """The same, and how many requests use these blocks, on how many rows: (blocks, requests, rows) for each run."""
        n_runs = self._match(chain, n_rows)
        words = self._words[n_rows : n_rows + n_runs * MATCH_WORDS].tolist()
        users = [(words[at], words[at + 1], words[at + 2]) for at in range(0, len(words), MATCH_WORDS)]
        return self._scratch[:n_rows].copy(), users

    def match(self, chain: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """What ActivePrefixes.match returns. Slow, since it makes sets of rows."""
        n_runs = self._match(chain, 0)
        found: list[tuple[int, int]] = []
        users: list[tuple[int, int, int]] = []
        begin = 0
        for end, requests, n_rows, run in self._scratch[: n_runs * MATCH_WORDS].reshape(-1, MATCH_WORDS).tolist():
            bits = sum(1 << row for row in self._uses(self._run(run)))
            if found and found[-1][0] == bits:
                found[-1] = (bits, found[-1][1] + end - begin)
            else:
                found.append((bits, end - begin))
            users.append((end, requests, n_rows))
            begin = end
        return found, users

    def nodes(self) -> Iterator[ArenaRun]:
        """Every run, parents first. For tests and debugging."""
        for run in self._reachable():
            words = self._run(run)
            yield ArenaRun(words[layout.RUN_BLOCKS], self._uses(words))

    def check(self, other_words: int = 0, *, are_joined: bool = True) -> None:
        """Raise IndexCorrupt, which names the first broken invariant. Slow; for tests and debugging.

        other_words: how many words of spans others have in use in the heap, rounded up to the sizes of spans.
        are_joined: False if a heap that was full may have kept runs from being joined.
        """
        runs = {run: self._run(run) for run in self._reachable()}
        for run, words in runs.items():
            self._check_run(run, words)
        self._check_shape(runs, are_joined)
        self._check_free_runs(runs)
        self._check_heap(runs, other_words)

    def _match(self, chain: bytes, n_rows: int) -> int:
        n_runs = match_bytes(self._address, chain, n_rows)
        if n_runs < 0:
            raise IndexFull(
                "the scratch memory of active prefixes is too small", n_rows=n_rows, n_blocks=len(chain) // 8
            )
        return n_runs

    # -- reading the memory, for debugging ----------------------------------------------------------------

    def _word(self, word: int) -> int:
        return int(self._memory.context[word])

    def _run(self, run: int) -> list[int]:
        return _read(self._word(layout.RUNS) + run * layout.RUN_WORDS * 8, layout.RUN_WORDS)

    @staticmethod
    def _uses(words: list[int]) -> dict[int, int]:
        pairs = _read(words[layout.RUN_USES], 2 * words[layout.RUN_N_USES])
        return dict(zip(pairs[::2], pairs[1::2], strict=True))

    def _reachable(self) -> list[int]:
        """The runs of the table, parents first. Raises IndexCorrupt if one of them is not below the root."""
        slots = _read(self._word(layout.CHILDREN), self._word(layout.CHILDREN_PLACES))
        runs = [slot & _CHILD_MASK for slot in slots if slot]
        if len(runs) != self._word(layout.N_CHILDREN) or 2 * len(runs) > len(slots):
            raise IndexCorrupt("the entries of the table are miscounted", found=len(runs))
        if len(set(runs)) != len(runs) or not all(0 < run < self._word(layout.RUNS_TOP) for run in runs):
            raise IndexCorrupt("the table has a run twice, or one that does not exist")
        below: dict[int, list[int]] = {}
        for run in runs:
            below.setdefault(self._run(run)[layout.RUN_PARENT], []).append(run)
        reached = [0]
        for run in reached:
            reached += below.get(run, ())
        if len(reached) != len(runs) + 1:
            raise IndexCorrupt("a run of the table is not below the root")
        return reached[1:]

    def _check_run(self, run: int, words: list[int]) -> None:
        n_blocks, n_uses = words[layout.RUN_BLOCKS], words[layout.RUN_N_USES]
        if n_blocks < 1 or n_uses < 1:
            raise IndexCorrupt("a run is empty", run=run)
        uses = self._uses(words)
        if list(uses) != sorted(uses) or len(uses) != n_uses or min(uses) < 0 or min(uses.values()) < 1:
            raise IndexCorrupt("the rows of a run are wrong", run=run, uses=uses)
        if words[layout.RUN_REQUESTS] != sum(uses.values()):
            raise IndexCorrupt("the requests of a run are miscounted", run=run, requests=words[layout.RUN_REQUESTS])
        capacity = _capacity(words)
        if capacity != span_words(capacity) or capacity < 2 * n_uses + 1:
            raise IndexCorrupt("the capacity for the rows of a run is wrong", run=run, words=capacity)
        first = _read(words[layout.RUN_CHAIN], 1)[0]
        if find_child(self._address, words[layout.RUN_PARENT], first) != run:
            raise IndexCorrupt("a run is not found by its parent and its first block", run=run)

    def _check_shape(self, runs: dict[int, list[int]], are_joined: bool) -> None:
        below: dict[int, list[int]] = {run: [] for run in (0, *runs)}
        for run, words in runs.items():
            below[words[layout.RUN_PARENT]].append(run)
        for run, children in below.items():
            words = self._run(run)
            if words[layout.RUN_CHILDREN] != len(children) or words[layout.RUN_CHILDREN_SUM] != sum(children):
                raise IndexCorrupt("the children of a run are miscounted", run=run, children=children)
            if run == 0:
                continue
            uses = self._uses(words)
            through: dict[int, int] = {}
            for child in children:
                for row, n_requests in self._uses(runs[child]).items():
                    through[row] = through.get(row, 0) + n_requests
            if any(n_requests > uses.get(row, 0) for row, n_requests in through.items()):
                raise IndexCorrupt("more requests leave a run than enter it", run=run)
            if are_joined and len(children) == 1 and through == uses:
                raise IndexCorrupt("two runs should have been joined", run=run)

    def _check_free_runs(self, runs: dict[int, list[int]]) -> None:
        free: set[int] = set()
        run, top = self._word(layout.RUN_FREE), self._word(layout.RUNS_TOP)
        while run:
            words = self._run(run)
            if run in runs or run in free or not 0 < run < top or words[layout.RUN_BLOCKS]:
                raise IndexCorrupt("the list of free runs has one that is in use, or one twice", run=run)
            free.add(run)
            run = words[layout.RUN_PARENT]
        if len(runs) + len(free) + 1 != top or top > self._word(layout.RUNS_MAX):
            raise IndexCorrupt("a run is neither in use nor free", runs=len(runs), free=len(free), top=top)

    def _check_heap(self, runs: dict[int, list[int]], other_words: int) -> None:
        begin, top = self._word(layout.HEAP), self._word(layout.HEAP_TOP)
        spans = [(self._word(layout.CHILDREN), self._word(layout.CHILDREN_PLACES))]
        for words in runs.values():
            spans.append((words[layout.RUN_CHAIN], span_words(words[layout.RUN_BLOCKS])))
            spans.append((words[layout.RUN_USES] - 8, _capacity(words)))
        used = sum(n_words for _, n_words in spans) + other_words
        if used != self._word(layout.HEAP_USED):
            raise IndexCorrupt("the words in use are miscounted", found=used, counted=self._word(layout.HEAP_USED))
        n_free = 0
        for size_class in range(layout.HEAP_CLASSES):
            span = self._word(layout.HEAP_FREE + size_class)
            while span:
                if not begin <= span < begin + 8 * top or n_free > top:
                    raise IndexCorrupt("a list of free spans leaves the heap, or has no end", size_class=size_class)
                spans.append((span, 1 << size_class))
                n_free += 1 << size_class
                span = _read(span, 1)[0]
        if used + n_free != top or top > self._word(layout.HEAP_MAX):
            raise IndexCorrupt("a span is neither in use nor free", used=used, free=n_free, top=top)
        at = begin
        for span, n_words in sorted(spans):
            if span < at:
                raise IndexCorrupt("two spans overlap", at=span, words=n_words)
            at = span + 8 * n_words
        if at > begin + 8 * top:
            raise IndexCorrupt("a span is outside the heap", words=top)


def _read(address: int, n_words: int) -> list[int]:
    """The int64 at an address."""
    return list((ctypes.c_int64 * n_words).from_address(address))


def _capacity(words: list[int]) -> int:
    """The words of the span of a run's rows, which are before the rows."""
    return _read(words[layout.RUN_USES] - 8, 1)[0]
