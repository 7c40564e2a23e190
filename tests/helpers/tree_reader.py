"""A whole run tree as Python values, and the check of its invariants.

What lives here: slow and simple walks over the arenas. No thread may write during a walk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from streams.core.ids import U32_MAX, Int64Array
from streams.core.index.arenas import TreeMemory
from streams.core.index.kernels import layout
from streams.core.index.kernels.by_sequence import find_block
from streams.core.index.kernels.entries import find_claim, find_record
from streams.core.index.kernels.runs import find_child, run_of


class RunRow(NamedTuple):
    """One run's fields; see layout."""

    run: int
    start: int
    length: int
    capacity: int
    parent: int
    direct: int
    children: int
    sibling: int
    coverage: int


class TreeReader:
    """A snapshot of a tree as Python values."""

    def __init__(self, memory: TreeMemory) -> None:
        self._memory = memory
        self._context = memory.context
        n_runs = self._word(layout.N_RUNS)
        fields = memory.words(layout.RUNS)[: n_runs * 8].view(np.int32).reshape(n_runs, 16)
        coverage = self._coverage(n_runs)
        self.runs: dict[int, RunRow] = {}
        for run, row in enumerate(fields.tolist()):
            if run and row[layout.RUN_LENGTH // 4] > 0:
                start, length, capacity, parent, direct, children, _, sibling = row[:8]
                self.runs[run] = RunRow(
                    run, start, length, capacity, parent, direct, children, sibling, coverage.get(run, 0)
                )
        start, length, capacity, parent, direct, children = fields[0, :6].tolist()
        self.root = RunRow(0, start, length, capacity, parent, direct, children, 0, 0)
        self.stray_coverage = [run for run in coverage if run not in self.runs]
        self.claims = self._claims()

    def _word(self, word: int) -> int:
        return int(self._context[word])

    def _coverage(self, n_runs: int) -> dict[int, int]:
        memory, stride = self._memory, self._word(layout.WIDE_STRIDE)
        inline = memory.words(layout.RUNS)[: n_runs * 8].reshape(n_runs, 8)[:, 4:]
        wide = memory.words(layout.WIDE)[: n_runs * stride].reshape(n_runs, stride)
        beyond = max(0, self._word(layout.N_WORDS) - layout.INLINE_WORDS)
        rows = np.concatenate((inline, wide[:, :beyond]), axis=1).view(np.uint64)
        found: dict[int, int] = {}
        for run in np.flatnonzero(rows.any(axis=1)).tolist():
            found[run] = int.from_bytes(rows[run].tobytes(), "little")
        return found

    def _claims(self) -> dict[int, tuple[int, int]]:
        n = self._word(layout.N_CLAIMS)
        rows = self._memory.words(layout.CLAIMS)[: n * 2].reshape(n, 2).tolist()
        return {entry: (key, more) for entry, (key, more) in enumerate(rows) if more != -1}

    def bits(self, coverage: int) -> Iterator[int]:
        """Iterate over the column numbers in a coverage."""
        while coverage:
            lowest = coverage & -coverage
            yield lowest.bit_length() - 1
            coverage ^= lowest

    # -- invariants -------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError with the first broken invariant."""
        self._check_runs()
        self._check_spans()
        self._check_blocks()
        self._check_coverage()
        self._check_maps()
        self._check_records()

    def _check_runs(self) -> None:
        address = self._memory.address
        require(self._word(layout.VERSION) % 2 == 0, "no change is under way")
        require(self._word(layout.N_DEFERRED) == 0, "no blocks or spans wait to be freed")
        require(self._word(layout.N_LIVE_RUNS) == len(self.runs), "runs in use are counted")
        children: dict[int, list[int]] = defaultdict(list)
        for row in self.runs.values():
            phantom = row.capacity == layout.PHANTOM
            require(phantom == (row.parent < 0), "phantoms have no parent, and all other runs have one", row)
            require(phantom or row.capacity >= row.length, "a run fits its span", row)
            require(row.children == 0 or phantom or row.capacity == row.length, "runs with children do not grow", row)
            require(row.coverage != 0 or row.children > 0, "a run without holders has children", row)
            if not phantom:
                children[row.parent].append(row.run)
        n_in_map = 0
        for parent, below in children.items():
            above = self.root if parent == 0 else self.runs.get(parent)
            require(above is not None and above.children == len(below), "children are counted", above)
            assert above is not None
            require(above.direct < 0 or above.direct in below, "the direct child is a child", above)
            n_in_map += len(below) - (above.direct >= 0)
            for run in below:
                first = int(self._memory.words(layout.LOCAL)[self.runs[run].start])
                require(find_child(address, parent, first) == run, "a child is found by its first block", run)
            if parent and above.capacity == layout.PHANTOM:
                listed, run = [], above.sibling
                while run:
                    listed.append(run - 1)
                    run = self.runs[run - 1].sibling
                require(sorted(listed) == sorted(below), "a phantom lists its children", above)
        counted = {row.run: row.children for row in (self.root, *self.runs.values()) if row.children}
        require(set(counted) == set(children), "exactly the parents count children")
        require(self._word(layout.CHILDREN + layout.MAP_ENTRIES) == n_in_map, "the map of children has all of them")
        phantoms = sum(row.capacity == layout.PHANTOM for row in self.runs.values())
        require(self._word(layout.N_PHANTOMS) == phantoms, "phantoms are counted")

    def _set_bits(self, word: int, n_bits: int) -> list[int]:
        words = self._memory.words(word)[: n_bits // 64 + 1]
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()

    def _check_spans(self) -> None:
        address, n_blocks = self._memory.address, self._word(layout.N_BLOCKS)
        starts = sorted(row.start for row in self.runs.values())
        require(self._set_bits(layout.STARTS, n_blocks) == starts, "the starts of runs are marked")
        words = sorted({start >> 6 for start in starts})
        require(self._set_bits(layout.STARTS_ABOVE, n_blocks // 64 + 1) == words, "words with starts are marked")
        lines = sorted({word >> 6 for word in words})
        require(self._set_bits(layout.STARTS_TOP, n_blocks // 4096 + 1) == lines, "lines with starts are marked")
        spans = [(row.start, max(1, row.capacity)) for row in self.runs.values()]
        for row in self.runs.values():
            for block in {row.start, row.start + row.length - 1, row.start + row.length // 2}:
                require(run_of(address, block) == row.run, "a block finds its run", row)
        lengths, local = self._memory.words(layout.SEQUENCE), self._memory.words(layout.LOCAL)
        free = {start: int(lengths[start]) for start in self._set_bits(layout.FREE_STARTS, n_blocks)}
        ends = sorted(start + length - 1 for start, length in free.items())
        require(self._set_bits(layout.FREE_ENDS, n_blocks) == ends, "ends of free spans are marked")
        require(self._word(layout.N_FREE_BLOCKS) == sum(free.values()), "free blocks are counted")
        listed = []
        for number in range(layout.N_SPAN_CLASSES):
            head = self._word(layout.SPAN_CLASSES + number)
            while head:
                require(free.get(head - 1, 0).bit_length() - 1 == number, "a free span is in its class", head - 1)
                listed.append(head - 1)
                head = int(local[head - 1]) & U32_MAX
        require(sorted(listed) == sorted(free), "free spans are listed")
        at = 0
        for start, length in sorted([*spans, *free.items()]):
            require(start == at, "spans are adjacent, without gaps or overlaps", at)
            at += length
        require(at == n_blocks, "spans fill the arena", at)

    def _check_blocks(self) -> None:
        address, n_blocks = self._memory.address, 0
        hashes = self._memory.words(layout.SEQUENCE)
        for row in self.runs.values():
            n_blocks += row.length
            for block in range(row.start, row.start + row.length):
                require(find_block(address, int(hashes[block])) == block, "a block is found by its hash", block)
        require(self._word(layout.BY_SEQUENCE + layout.MAP_ENTRIES) == n_blocks, "the map by hash has every block")
        counts: dict[int, int] = defaultdict(int)
        for entry, (key, more) in self.claims.items():
            column, block = key >> 32, key & U32_MAX
            counts[column] += 1
            row = self.runs[run_of(address, block)]
            require(row.coverage >> column & 1 != 0 and more > 0, "a claimed block is held", key)
            require(find_claim(address, key) == entry, "a claim is found", key)
        self._check_counts(layout.COLUMN_CLAIMS, counts, "claims")

    def _check_counts(self, word: int, counts: dict[int, int], what: str) -> None:
        for column, counted in enumerate(self._memory.words(word)[: self._word(layout.N_COLUMNS)].tolist()):
            require(counted == counts.get(column, 0), f"a column's {what} are counted", column)

    def _check_coverage(self) -> None:
        words = self._word(layout.N_WORDS)
        live = int.from_bytes(self._memory.words(layout.LIVE)[:words].tobytes(), "little")
        ended = int.from_bytes(self._memory.words(layout.ENDED)[:words].tobytes(), "little")
        require(live & ended == 0, "no column is both live and ended")
        require(not self.stray_coverage, "free runs have no holders", self.stray_coverage)
        facts: dict[int, int] = defaultdict(int)
        lower = total = 0
        for row in self.runs.values():
            require(row.coverage & ~(live | ended) == 0, "the holders of a run are columns in use", row)
            for column in self.bits(row.coverage & live):
                facts[column] += row.length
        counts = self._memory.words(layout.COLUMN_FACTS)
        tiers = self._memory.words(layout.TIER_OF).view(np.int32)
        for column in self.bits(live):
            require(int(counts[column]) == facts.get(column, 0), "a column's facts are counted", column)
            total += facts.get(column, 0)
            lower += facts.get(column, 0) if tiers[column] else 0
        require(self._word(layout.N_FACTS) == total, "facts are counted")
        require(self._word(layout.N_LOWER_FACTS) == lower, "facts below the device are counted")
        require(ended.bit_count() == self._word(layout.N_ENDED) or ended == 0, "ended columns are counted")

    def _check_maps(self) -> None:
        n_segments = self._word(layout.N_SEGMENTS)
        meta = self._memory.words(layout.SEGMENT_META)[:n_segments].view(np.int32).reshape(n_segments, 2).tolist()
        slots: Int64Array = self._memory.words(layout.SEGMENTS)[: n_segments * layout.SEGMENT_SLOTS]
        used = np.count_nonzero(slots.reshape(n_segments, layout.SEGMENT_SLOTS), axis=1).tolist()
        for number, (entries, depth) in enumerate(meta):
            require(depth < 0 or entries == used[number], "a segment's entries are counted", number)

    def _check_records(self) -> None:
        address = self._memory.address
        live = 0
        n = self._word(layout.N_RECORDS)
        for entry, row in enumerate(self._memory.words(layout.RECORDS)[: n * 4].reshape(n, 4).tolist()):
            first, where, present, _ = row
            if present == 0:
                continue
            live += 1
            require(find_record(address, where >> 32, first) == entry, "a record is found by its key", entry)
        require(self._word(layout.RECORD_KEYS + layout.MAP_ENTRIES) == live, "records are counted")


def require(sound: bool, invariant: str, where: object = None) -> None:
    """Raise AssertionError unless an invariant holds."""
    if not sound:
        raise AssertionError(f"broken invariant: {invariant}" + ("" if where is None else f" (at {where})"))
