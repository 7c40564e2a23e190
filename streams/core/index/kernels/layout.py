"""Where everything of a run tree lies: the words of its context, the fields of a run, the limits.

What lives here: numbers. What must not: code that uses them. A kernel gets one integer, the address of the context:
int64 words that hold the addresses of the arenas and all counters. The comments below are the reference of the format;
`streams/core/index/run_tree.py` allocates it.

Block id = position in the arenas LOCAL and NAME, int64 words each. A run is consecutive blocks of one chain with one
set of holders; it is found from a block by scanning the bitmap STARTS backwards and taking, from the chain of runs that
start in that granule of 16 blocks, the one that starts there: so no block stores its owner (4 bytes each), and a split
rewrites no owners. Two bitmaps above STARTS tell which of its words are not zero, so that the scan of a long run is as
short as any: without them a store that looks up each block of a run of 131,072 took 1.4 s, most of it scanning.
"""

from __future__ import annotations

# -- arenas: addresses --------------------------------------------------------
VERSION = 0  # odd while the tree changes
LOCAL = 1  # int64 a block: local hash
NAME = 2  # int64 a block: the name under which NAMES knows it
STARTS = 3  # bit a block: a run starts here
GRANULES = 4  # int32 a granule of 16 blocks: 1 + a run that starts in it, 0 for none
RUNS = 5  # 64 bytes a run
WIDE = 6  # coverage words beyond the first four, WIDE_STRIDE words a run
WIDE_STRIDE = 7
N_WORDS = 8  # coverage words in use
LIVE = 9  # coverage columns that count
ENDED = 10  # coverage columns of cleared ranks, not swept yet
COLUMN_OF = 11  # int32 a holder: its coverage column
RANK_OF = 12  # int32 a column: rank number
TIER_OF = 13  # int32 a column
COLUMN_FACTS = 14  # int64 a column: blocks held
COLUMN_ALIASES = 15  # int64 a column: blocks held under a name of its own
COLUMN_CLAIMS = 16  # int64 a column: blocks that more than one record claims
HOLDERS_OF = 17  # int32 * 4 a rank: 1 + its holder in each tier, 0 for none
HOLDER_RANK = 18  # int32 a holder: rank number
HOLDER_TIER = 19  # int32 a holder
SCRATCH = 20  # int64 words for one event
SEGMENTS = 21  # 64 KiB a segment of a map
SEGMENT_META = 22  # two int32 a segment: entries, depth
ALIASES = 23  # two int64 an entry of ALIAS_NAMES and ALIAS_BLOCKS: name; column << 32 | block
CLAIMS = 24  # two int64 an entry of CLAIM_BLOCKS: column << 32 | block; how many more records claim it
RECORDS = 25  # 32 bytes an entry of RECORD_KEYS, see fold
FREE_STARTS = 26  # bit a block: a free span starts here
FREE_ENDS = 27  # bit a block: a free span ends here
FREE_COLUMNS = 28  # int32 stack of columns that nobody uses
DEFERRED = 30  # four int64 an entry: first block and number of names to forget, first block and length of a span
PHANTOM_BITS = 31  # bit a hash: a phantom may have it; see tree.may_be_phantom
HOLDER_GENERATION = 29  # int64 a holder: number of clears, so that records of older ones are known

# -- counters -----------------------------------------------------------------
N_RUNS = 32  # high water of run ids
FREE_RUN = 33  # head of the list of free run ids, 0 for none: run 0 is the root
N_BLOCKS = 34  # high water of block ids
N_FREE_BLOCKS = 35  # blocks in free spans
N_FACTS = 36
N_LOWER_FACTS = 37  # facts in tiers below the device
N_SEGMENTS = 38
FREE_SEGMENT = 39  # 1 + head, 0 for none
N_ALIASES = 40
FREE_ALIAS = 41  # 1 + head
N_CLAIMS = 42
FREE_CLAIM = 43
N_RECORDS = 44
FREE_RECORD = 45
N_FREE_COLUMNS = 46
N_COLUMNS = 47
N_ENDED = 48
SWEEP_AT = 49  # next run that the sweep looks at
SWEEP_AGAIN = 50  # a run behind the sweep took over an ended column
SYNTHETIC = 51  # counter of made-up names
N_PHANTOMS = 52
N_LIVE_RUNS = 53
UNKNOWN_PARENTS = 54  # of the last call
UNKNOWN_REMOVALS = 55
FULL = 56  # the event was refused, for want of: FULL_BLOCKS, FULL_SEGMENTS or FULL_ALIASES; 0 where there was room
FULL_NEED = 68  # blocks of the event that was refused
STALE = 67  # 1 + an event of the last call whose holder is nobody's, 0 for none
N_DEFERRED = 57
WAITING = 70  # queries that were disturbed and ask the writer for a moment
SALT = 59  # of all hashes of this tree's maps
N_TAKEN = 58  # names of new blocks that are another's

# -- limits -------------------------------------------------------------------
BLOCKS_MAX = 60
RUNS_MAX = 61
SEGMENTS_MAX = 62
COLUMNS_MAX = 63
SCRATCH_MAX = 64
SMALL_MAX = 65  # entries of CLAIMS and RECORDS, each
ALIASES_MAX = 66  # entries of ALIASES; within one event there is room for as many more

# -- maps: directory address, depth, entries ----------------------------------
NAMES = 72
CHILDREN = 75
ALIAS_NAMES = 78
ALIAS_BLOCKS = 81
CLAIM_BLOCKS = 84
RECORD_KEYS = 87
MAPS = (NAMES, CHILDREN, ALIAS_NAMES, ALIAS_BLOCKS, CLAIM_BLOCKS, RECORD_KEYS)
MAP_DIRECTORY, MAP_DEPTH, MAP_ENTRIES = 0, 1, 2

# -- free spans of blocks: 1 + head of the list of each class, class = floor(log2(length)) -----------------------
SPAN_CLASSES = 96
N_SPAN_CLASSES = 32

STARTS_ABOVE = 90  # bit a word of STARTS: it is not zero
STARTS_TOP = 91  # bit a word of STARTS_ABOVE: it is not zero
HOLDER_NUMBERS = 92  # int64 a holder: 1 + the number that callers have of it, 0 where its rank is gone; see tagged

#: Tags and segments of the names worked on in one go, two words each.
AHEAD = 128
AHEAD_MAX = 32

CONTEXT_WORDS = 192

#: What a store lists of each of its blocks at most: a stretch of three words or a name that is another's, and twice a
#: block that lost its name, two words each.
SCRATCH_BYTES_PER_BLOCK = 64
#: Words of SCRATCH that the fold of records uses; stores list what they will change behind them.
SCRATCH_OF_FOLD = 128

# -- a run: int32 fields at these bytes, then four coverage words ---------------
RUN_BYTES = 64
RUN_START = 0
RUN_LENGTH = 4
RUN_CAPACITY = 8  # PHANTOM for a placeholder of one block
RUN_PARENT = 12  # -1 for a phantom
RUN_DIRECT = 16  # a child that needs no entry in CHILDREN, -1 for none
RUN_CHILDREN = 20  # number, the direct one included
RUN_NEXT = 24  # 1 + next run that starts in the same granule
RUN_SIBLING = 28  # of a phantom: 1 + first child; of a phantom's child: 1 + next one
RUN_COVERAGE = 32
INLINE_WORDS = 4
PHANTOM = -1

FULL_BLOCKS, FULL_SEGMENTS, FULL_ALIASES = 1, 2, 3

# -- events in columns ----------------------------------------------------------
STORED_AT_ROOT, STORED, REMOVED, CLEARED = 0, 1, 2, 3

#: Slots of a segment: 64 KiB. A map grows by splitting one segment (some 25 us), never as a whole: a rehash of
#: 500,000 entries at once held up the writer for 8.5 ms.
SEGMENT_SLOTS = 8192
SEGMENT_SHIFT = 16
#: A segment is split at half: at 0.8 a miss probes 13 slots and a deletion moves several, both beyond what a
#: processor predicts (35 ns an insertion against 44), and a split of a fuller one moves more of what it keeps: growing
#: costs 7 ns a block here, 9 at 0.6, 17 at 0.7. Slots of 8 bytes a third full are still few bytes a name.
SEGMENT_ENTRIES_MAX = 4096
#: Two halves are joined where both together fill a segment to a quarter: far from being split again.
SEGMENT_ENTRIES_JOINED_MAX = 2048
#: 2^19 segments of 8,192 slots use up the 32 bits of a tag.
DEPTH_MAX = 19

#: Spare room behind a new run, in blocks, so that decode extends it in place: the run's own length between these.
#: With 12 % of it a decode workload made 38,000 runs of what are 5,000 now.
SLACK_MIN = 16
SLACK_MAX = 128
#: A run gets no spare room where less than this share of all blocks is left, 1 in 1 << 2: a single block takes 17 with
#: it, so that an index of single blocks was full at a seventeenth of its limit.
SLACK_LEFT_SHIFT = 2
#: A run that shrank keeps at most this much spare room.
SLACK_KEPT_MAX = 256

#: Looks at WAITING before the writer goes on all the same: some 20 us, in which the queries of many threads end.
PATIENCE = 320
#: Disturbed tries after which a query asks for a moment. A writer of small events changes the tree every 2 us, which is
#: what a long query takes: without asking, every hundredth waited 190 us.
TRIES_BEFORE_WAITING = 2

#: Tries after which a query, or a writer that waits for queries, lets go of the processor between two: the other may
#: be waiting for this very processor.
TRIES_BEFORE_YIELDING = 256

#: Runs removed by one event whose names wait for its end; with more of them queries wait a little.
DEFERRED_MAX = 65_536

#: Bits by which most names are known to be no phantom's: 512 KiB, which a recovery of many keeps in the cache.
PHANTOM_FILTER_BITS = 1 << 22

#: Free spans shorter than a class looked at before a bigger class is broken up.
SPAN_TRIES_MAX = 4

N_TIERS = 4

#: A caller's number of a holder: its place in the arrays of holders in these bits, and above them how many ranks had
#: that place before.
HOLDER_PLACE_BITS = 32
HOLDER_PLACE_MASK = (1 << 16) - 1

#: 16,384 ranks in four tiers.
COLUMNS_MAX_EVER = 65_536
