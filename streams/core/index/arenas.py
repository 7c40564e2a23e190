"""Memory of a run tree: address space that is reserved at the start, and pages that are allocated when touched.

What lives here: reserving, addressing and returning memory; the context that kernels read. What must not: the meaning
of its content. Arenas never move, so growth needs no protocol and a reader's address stays valid. Address space, 74 GB
by default, costs nothing until it is written to.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass

import numpy as np

from streams.core.ids import Int64Array
from streams.core.index.kernels import layout
from streams.errors import SettingsError

PAGE_BYTES = mmap.PAGESIZE

_LIBC = ctypes.CDLL(None)

#: Linux's flag for address space without reserved memory; the mmap module of Python 3.11 has no name for it.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

#: Coverage columns (one per rank and tier) before the rows of `WIDE` have to be made longer. Rows for 1,024 columns
#: take 96 bytes per run, and none is touched below 257 columns.
COLUMNS_MAX_FIRST = 1024
COLUMNS_MAX = layout.COLUMNS_MAX_EVER
RANKS_MAX = COLUMNS_MAX // 4

#: Most blocks in an index, including spare space: 16 bytes each, and 15 more for finding the block by its hash. 100
#: million memberships of blocks that no two ranks share take 1.6 GB here and 1.5 GB there.
BLOCKS_MAX = 1 << 28

#: Free spans of fewer blocks keep their pages: 32 KiB, eight pages.
RELEASED_BLOCKS_MIN = 4096
#: Blocks and segments whose pages are returned in one step: a huge page of each, well below a millisecond.
RELEASED_BLOCKS_MAX = 262_144
RELEASED_SEGMENTS_MAX = 32


class Arena:
    """One stretch of zeroed address space."""

    def __init__(self, n_bytes: int, huge_pages: bool = False) -> None:
        self.n_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._memory = mmap.mmap(-1, self.n_bytes, flags=flags)
        except OSError as exc:
            raise SettingsError(
                f"the system refused {self.n_bytes:,} bytes of address space for an index ({exc.strerror})",
                remedy="use TreeLimits with a smaller blocks_max or columns_max, or raise the system's limit (ulimit "
                "-v, vm.overcommit_memory, vm.max_map_count)",
                n_bytes=self.n_bytes,
            ) from exc
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.words: Int64Array = np.frombuffer(self._memory, dtype=np.int64)
        self.address = int(self.words.ctypes.data)

    def resident_bytes(self, n_bytes: int | None = None) -> int:
        """Bytes of its first `n_bytes` whose pages are in memory; all of them if the system does not report this."""
        n_bytes = self.n_bytes if n_bytes is None else min(self.n_bytes, -(-n_bytes // PAGE_BYTES) * PAGE_BYTES)
        if not hasattr(_LIBC, "mincore"):
            return n_bytes
        in_memory = np.zeros(n_bytes // PAGE_BYTES, dtype=np.uint8)
        address, length = ctypes.c_void_p(self.address), ctypes.c_size_t(n_bytes)
        if _LIBC.mincore(address, length, ctypes.c_void_p(in_memory.ctypes.data)):
            return n_bytes
        return int(np.count_nonzero(in_memory & 1)) * PAGE_BYTES

    def release(self, first_byte: int, last_byte: int) -> int:
        """Return the whole pages between two bytes to the system, which then read as zeros; returns their bytes."""
        first = -(-first_byte // PAGE_BYTES) * PAGE_BYTES
        last = last_byte // PAGE_BYTES * PAGE_BYTES
        if last <= first:
            return 0
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        return last - first


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Limits of a tree, beyond which a record is refused. huge_pages: use 2 MiB pages for blocks, runs and maps.

    Raises SettingsError.
    """

    blocks_max: int = BLOCKS_MAX
    columns_max: int = COLUMNS_MAX
    huge_pages: bool = True

    def __post_init__(self) -> None:
        for name in ("blocks_max", "columns_max"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise SettingsError(f"{name} is {value!r}, not a whole number")
        if not isinstance(self.huge_pages, bool):
            raise SettingsError(f"huge_pages is {self.huge_pages!r}, not True or False")
        if not 1024 <= self.blocks_max <= BLOCKS_MAX:
            raise SettingsError(f"blocks_max is {self.blocks_max}, not within 1024..{BLOCKS_MAX}")
        if not 64 <= self.columns_max <= COLUMNS_MAX or self.columns_max % 64:
            raise SettingsError(f"columns_max is {self.columns_max}, not a multiple of 64 within 64..{COLUMNS_MAX}")


DEFAULT_LIMITS = TreeLimits()


class TreeMemory:
    """The arenas of one tree and its context; `context[word]` reads and writes a counter."""

    def __init__(self, limits: TreeLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        blocks = -(-limits.blocks_max // 1024) * 1024
        runs = blocks + 4096  # a block is in one run, and a change needs two more temporarily
        # A segment that was split has about 2,048 entries. There are enough segments for every block by its hash, every
        # block as a child, and a quarter as many claims and records. So the maps never fill up before the blocks.
        segments = blocks // 768 + 256
        small = blocks // 4 + 1024
        self.arenas: dict[int, Arena] = {}
        self._context = Arena(layout.CONTEXT_WORDS * 8)
        self.context = self._context.words
        self.address = self._context.address
        columns = COLUMNS_MAX
        huge = limits.huge_pages
        for word, n_bytes, pages in (
            (layout.LOCAL, blocks * 8, huge),
            (layout.SEQUENCE, blocks * 8, huge),
            (layout.STARTS, blocks // 8, False),
            (layout.STARTS_ABOVE, blocks // 512 + 8, False),
            (layout.STARTS_TOP, blocks // 32_768 + 8, False),
            (layout.GRANULES, blocks // 4, False),
            (layout.RUNS, runs * layout.RUN_BYTES, huge),
            (layout.LIVE, columns // 8, False),
            (layout.ENDED, columns // 8, False),
            (layout.COLUMN_OF, columns * 4, False),
            (layout.RANK_OF, columns * 4, False),
            (layout.TIER_OF, columns * 4, False),
            (layout.COLUMN_FACTS, columns * 8, False),
            (layout.COLUMN_CLAIMS, columns * 8, False),
            (layout.HOLDERS_OF, columns * 4, False),
            (layout.HOLDER_RANK, columns * 4, False),
            (layout.HOLDER_TIER, columns * 4, False),
            (layout.HOLDER_GENERATION, columns * 8, False),
            (layout.FREE_COLUMNS, columns * 4, False),
            (layout.SCRATCH, layout.SCRATCH_WORDS * 8, False),
            (layout.DEFERRED, layout.DEFERRED_MAX * 32, False),
            (layout.SEGMENTS, segments << layout.SEGMENT_SHIFT, huge),
            (layout.SEGMENT_META, segments * 8, False),
            (layout.CLAIMS, small * 16, False),
            (layout.RECORDS, small * 32, False),
            (layout.FREE_STARTS, blocks // 8, False),
            (layout.PHANTOM_BITS, layout.PHANTOM_FILTER_BITS // 8, False),
            (layout.FREE_ENDS, blocks // 8, False),
        ):
            self._reserve(word, n_bytes, pages)
        self._directories = [Arena(4 << layout.DEPTH_MAX) for _ in layout.MAPS]
        for number, (which, directory) in enumerate(zip(layout.MAPS, self._directories, strict=True)):
            self.context[which + layout.MAP_DIRECTORY] = directory.address
            directory.words[:1].view(np.int32)[0] = number
        self.context[layout.N_SEGMENTS] = len(layout.MAPS)
        self.context[layout.BLOCKS_MAX] = blocks
        self.context[layout.RUNS_MAX] = runs
        self.context[layout.SEGMENTS_MAX] = segments
        self.context[layout.SMALL_MAX] = small
        self.context[layout.N_WORDS] = 1
        # The address that the system chose is random enough for a salt.
        self.context[layout.SALT] = np.int64(hash((self.address, "salt")))
        self.context[layout.SWEEP_AT] = 1
        # Run 0 is the root: it has no blocks, no holders and no parent.
        self.context[layout.N_RUNS] = 1
        root = self.words(layout.RUNS)[:8].view(np.int32)
        root[layout.RUN_PARENT // 4] = -1
        root[layout.RUN_DIRECT // 4] = -1
        self._runs_max = runs
        self._retired: list[Arena] = []
        self._blocks_seen = 0  # high water since pages were last returned
        self._released_blocks = self._released_segments = 0  # how far the current pass of returning pages has come
        self.widen(min(COLUMNS_MAX_FIRST, limits.columns_max))

    def _reserve(self, word: int, n_bytes: int, huge_pages: bool) -> None:
        arena = Arena(n_bytes, huge_pages)
        self.arenas[word] = arena
        self.context[word] = arena.address

    def words(self, word: int) -> Int64Array:
        """An arena as int64."""
        return self.arenas[word].words

    def widen(self, columns_max: int) -> None:
        """Make the rows of coverage longer, for more columns. The caller must be the only writer."""
        stride = max(0, columns_max // 64 - layout.INLINE_WORDS)
        old, n_runs = self.arenas.get(layout.WIDE), int(self.context[layout.N_RUNS])
        new = Arena(max(1, stride * 8 * self._runs_max))
        if old is not None:
            before = int(self.context[layout.WIDE_STRIDE])
            rows = new.words[: n_runs * stride].reshape(n_runs, stride)
            rows[:, :before] = old.words[: n_runs * before].reshape(n_runs, before)
            # A query may still read the old rows. They stay mapped, and the query notices the change by the version.
            self._retired.append(old)
        version = int(self.context[layout.VERSION])
        self.context[layout.VERSION] = version | 1
        self.arenas[layout.WIDE] = new
        self.context[layout.WIDE] = new.address
        self.context[layout.WIDE_STRIDE] = stride
        self.context[layout.COLUMNS_MAX] = columns_max
        self.context[layout.VERSION] = (version | 1) + 1
        if old is not None:
            old.release(0, old.n_bytes)

    def release_free(self) -> bool:
        """Return some pages of free blocks and free segments to the system; returns whether none are left.

        The caller must be the only writer. The first and last words of a free span, and the first word of a free
        segment, are in use. Each step looks up what is free, since it may have been allocated since the last step.
        """
        context = self.context
        n_blocks = int(context[layout.N_BLOCKS])
        lengths = self.words(layout.SEQUENCE)  # of free spans
        bits = np.unpackbits(self.words(layout.FREE_STARTS)[: n_blocks // 64 + 1].view(np.uint8), bitorder="little")
        spans = [(start + 1, start + int(lengths[start]) - 1) for start in np.flatnonzero(bits).tolist()]
        for start, end in [*spans, (n_blocks, max(n_blocks, self._blocks_seen))]:
            start = max(start, self._released_blocks)
            # Return whole huge pages if they are in use, since the system keeps a page that is returned in part.
            end = min(end, (start // RELEASED_BLOCKS_MAX + 1) * RELEASED_BLOCKS_MAX)
            if end - start >= RELEASED_BLOCKS_MIN:
                self._released_blocks = end
                self.arenas[layout.LOCAL].release(start * 8, end * 8)
                self.arenas[layout.SEQUENCE].release(start * 8, end * 8)
                return False
        segments, free = self.words(layout.SEGMENTS), int(context[layout.FREE_SEGMENT]) - 1
        for position in range(self._released_segments + RELEASED_SEGMENTS_MAX):
            if free < 0:
                self._released_blocks = self._released_segments = self._blocks_seen = 0
                return True
            first = free << layout.SEGMENT_SHIFT
            if position >= self._released_segments:
                self.arenas[layout.SEGMENTS].release(first + 8, first + (1 << layout.SEGMENT_SHIFT))
            free = int(segments[first // 8]) - 1
        self._released_segments += RELEASED_SEGMENTS_MAX
        return False

    def note_blocks(self) -> None:
        """Record the high water of blocks, since the pages up to there may have been touched."""
        self._blocks_seen = max(self._blocks_seen, int(self.context[layout.N_BLOCKS]))

    def resident_bytes(self) -> int:
        """Bytes of memory that all arenas take, as the system reports it if it does."""
        context = self.context
        n_blocks = max(int(context[layout.N_BLOCKS]), self._blocks_seen)
        n_runs, n_segments = int(context[layout.N_RUNS]), int(context[layout.N_SEGMENTS])
        # Only as far as each can have been touched, since examining all of their address space takes 20 ms.
        reached = {
            layout.LOCAL: n_blocks * 8,
            layout.SEQUENCE: n_blocks * 8,
            layout.STARTS: n_blocks // 8 + 8,
            layout.FREE_STARTS: n_blocks // 8 + 8,
            layout.FREE_ENDS: n_blocks // 8 + 8,
            layout.GRANULES: n_blocks // 4 + 4,
            layout.RUNS: n_runs * layout.RUN_BYTES,
            layout.WIDE: n_runs * int(context[layout.WIDE_STRIDE]) * 8,
            layout.SEGMENTS: n_segments << layout.SEGMENT_SHIFT,
            layout.SEGMENT_META: n_segments * 8,
            layout.CLAIMS: int(context[layout.N_CLAIMS]) * 16,
            layout.RECORDS: int(context[layout.N_RECORDS]) * 32,
        }
        arenas = [self._context, *self._retired, *self._directories]
        return sum(arena.resident_bytes() for arena in arenas) + sum(
            arena.resident_bytes(reached.get(word, arena.n_bytes)) for word, arena in self.arenas.items()
        )
