"""Memory of bookings that kernels fold: address space that is reserved at the start, and pages allocated when touched.

What lives here: reserving it, and its format when it is empty. What must not: the meaning of its content (kernels).
"""

from __future__ import annotations

import numpy as np

from streams.core.ids import Int64Array
from streams.core.index.arenas import Arena
from streams.core.loads.booking_hashes import SEED
from streams.core.loads.kernels import layout

#: Address space for spans: hashes, rows and ids. Bookings take at most 2 GiB by their own count, but spans are rounded
#: up to powers of two, and a free one is only used again for its own size.
HEAP_BYTES = 32 << 30

#: A prompt of 16 million blocks. The results of one call take at most four words per run and 64 per run and 4,096 rows.
SCRATCH_BYTES = 256 << 20

#: Places of a hash table at first.
TABLE_PLACES_FIRST = 1024


def span_words(n_words: int) -> int:
    """The words of a span that was allocated for so many, as in kernels.heap."""
    return max(1 << layout.HEAP_CLASS_MIN, 1 << (n_words - 1).bit_length())


class BookingMemory:
    """The arenas of one ActiveLoads. `address` is what kernels take."""

    def __init__(self, bookings_max: int) -> None:
        """bookings_max: at most so many are in the tree at once."""
        self._context = Arena(layout.CONTEXT_WORDS * 8)
        self.context: Int64Array = self._context.words
        self.address = self._context.address
        self._arenas: list[Arena] = []
        runs_max = 2 * bookings_max + 2  # a booking's own run, and the one that it splits
        self.context[layout.HEAP] = self._reserve(HEAP_BYTES)
        self._heap: memoryview = self._arenas[-1].words.view(np.uint8).data
        self.context[layout.HEAP_MAX] = HEAP_BYTES // 8
        self.context[layout.RUNS] = self._reserve(runs_max * layout.RUN_WORDS * 8)
        self.context[layout.RUNS_MAX] = runs_max
        self.context[layout.RUNS_TOP] = 1
        self.context[layout.SCRATCH] = self._reserve(SCRATCH_BYTES)
        self.context[layout.SCRATCH_MAX] = SCRATCH_BYTES // 8
        self.scratch: Int64Array = self._arenas[-1].words
        self.context[layout.CHILDREN] = self.zeroed(TABLE_PLACES_FIRST)
        self.context[layout.CHILDREN_PLACES] = TABLE_PLACES_FIRST
        self.context[layout.BOOKINGS] = self._reserve((bookings_max + 1) * layout.BOOKING_WORDS * 8)
        self.context[layout.BOOKINGS_MAX] = bookings_max + 1
        self.context[layout.BOOKINGS_TOP] = 1
        self.bookings: Int64Array = self._arenas[-1].words
        self.context[layout.CLOCKS] = self._reserve(layout.CLOCKS_MAX_EVER * 4 * 8)
        self.context[layout.CLOCKS_MAX] = layout.CLOCKS_MAX_EVER
        self.clocks: Int64Array = self._arenas[-1].words.reshape(-1, 4)
        self.context[layout.FREED_LIST] = self._reserve(layout.FREED_MAX * 4 * 8)
        self.freed: Int64Array = self._arenas[-1].words.reshape(-1, 4)
        self.context[layout.CHAIN] = self._reserve((layout.CHAIN_MAX + 1) * 8)
        self.chain: Int64Array = self._arenas[-1].words
        self.context[layout.SEED] = SEED

    @property
    def n_bytes(self) -> int:
        """About how much of it was written to and is in use."""
        n_words = int(self.context[layout.HEAP_USED])
        n_words += int(self.context[layout.RUNS_TOP]) * layout.RUN_WORDS
        return 8 * (n_words + int(self.context[layout.BOOKINGS_TOP]) * layout.BOOKING_WORDS)

    def _reserve(self, n_bytes: int) -> int:
        arena = Arena(n_bytes)
        self._arenas.append(arena)
        return arena.address

    def zeroed(self, n_words: int) -> int:
        """Address of a span that holds zeros; n_words: a power of two. Call it before anything was freed."""
        top = int(self.context[layout.HEAP_TOP])
        self.context[layout.HEAP_TOP] = top + n_words
        self.context[layout.HEAP_USED] += n_words
        return int(self.context[layout.HEAP]) + 8 * top

    def text(self, address: int, n_bytes: int) -> bytes:
        """Bytes in the heap."""
        at = address - int(self.context[layout.HEAP])
        return self._heap[at : at + n_bytes].tobytes()
