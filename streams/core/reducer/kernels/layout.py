"""The memory format of a store of runs: words of its context, of a run, of a rank, of an event row.

What lives here: numbers. What must not: code that uses them. A kernel takes one integer, the address of the context:
int64 words with the addresses of the arenas and all counters. One thread uses a store, without concurrent readers, so
there is no version and no memory fence.

A block's slot is run << 5 | offset. BY_ENGINE maps a column and an engine hash to the slot of a held block. BY_SEQUENCE
maps a column and a sequence hash to the slot of any block in a run. A column is a rank in one tier: rank number << 2 |
tier.
"""

from __future__ import annotations

from streams.core.runs import RUN_BLOCKS_MAX

# -- context ------------------------------------------------------------------
RUNS = 0  # RUN_WORDS per run
SPANS = 1  # words of the runs' blocks: capacity local hashes, as many engine hashes, as many sequence hashes
RANKS = 2  # RANK_WORDS per rank
COLUMNS = 3  # COLUMN_WORDS per column
DIRTY = 4  # one int64 per run changed since the last take; an id that was freed and reused may occur twice
EMPTIED = 5  # two int64 per run that ended since then: column, first sequence hash
STALE = 6  # two int64 per run of an ended epoch whose tombstone is pending: column, first sequence hash
BY_ENGINE = 7  # a map: its address; mask; entries
BY_SEQUENCE = 10
N_RUNS = 13  # high watermark
FREE_RUN = 14  # 1 + head of the list of free runs, 0 for none
N_SPAN_WORDS = 15  # high watermark
FREE_SPANS = 16  # five words: 1 + head of the free spans of each class
N_DIRTY = 21
N_EMPTIED = 22
STALE_BEGIN = 23
STALE_END = 24
SALT = 25
RUNS_MAX = 26
SPAN_WORDS_MAX = 27
STALE_MAX = 28
FOUND = 29  # what the events of one call found: the four words from here on
N_UNKNOWN_PARENTS = 29
PARENTS_BEFORE_CLEAR = 30
N_UNKNOWN_REMOVALS = 31
N_CLEARS = 32
FOUND_END = 33
CONTEXT_WORDS = 64

# -- a map --------------------------------------------------------------------
MAP_ADDRESS, MAP_MASK, MAP_ENTRIES = 0, 1, 2

# -- a run --------------------------------------------------------------------
RUN_FIRST = 0
RUN_PARENT = 1
RUN_SPAN = 2  # word of SPANS at which its blocks begin
RUN_COLUMN = 3  # -1 for a free run
RUN_START = 4
RUN_PRESENT = 5
RUN_SHAPE = 6  # length | class << 8 | HAS_PARENT | IS_DIRTY
RUN_PREVIOUS = 7  # 1 + the run before it in its column; of a free run, the next free one
RUN_NEXT = 8
RUN_LABELS = 9  # 1 + word of SPANS at which its labels begin, 0 for none: three words per block
RUN_LABELLED = 10  # one bit per block: whether it has labels
RUN_WORDS = 12
LENGTH_MASK = 255
CLASS_SHIFT = 8
HAS_PARENT = 1 << 16
IS_DIRTY = 1 << 17

#: Blocks of a span of class 0; each further class holds twice as many.
SPAN_BLOCKS_MIN = 2
N_CLASSES = 5
LARGEST_CLASS = N_CLASSES - 1
assert SPAN_BLOCKS_MIN << LARGEST_CLASS == RUN_BLOCKS_MAX == 32
SLOT_SHIFT = 5
OFFSET_MASK = 31

#: A label without a value.
NO_LABEL = -(1 << 63)
LABEL_WORDS = 3

# -- a rank -------------------------------------------------------------------
RANK_WORKER, RANK_DP, RANK_INCARNATION, RANK_GENERATION = 0, 1, 2, 3
RANK_WORDS = 4

# -- a column -----------------------------------------------------------------
COLUMN_HEAD = 0  # 1 + its first run
COLUMN_HELD = 1  # number of held blocks
COLUMN_WORDS = 2
N_TIERS = 4

# -- rows of events -----------------------------------------------------------
EVENT_KIND = 0
EVENT_TIER = 1
EVENT_HAS_PARENT = 2
EVENT_PARENT = 3  # engine hash
EVENT_BLOCKS = 4  # number of blocks
EVENT_ENGINE = 5  # address of their engine hashes, aligned or not
EVENT_LOCAL = 6
EVENT_LABELLED = 7
EVENT_LABELS = 8  # three words
EVENT_WORDS = 12
STORED, REMOVED, CLEARED = 0, 1, 2

# -- return codes -------------------------------------------------------------
#: The maps must grow first; nothing was done.
GROW = -1
#: Over capacity in runs, blocks or pending tombstones; nothing was done.
FULL = -2
