"""The memory format of a run tree: the words of its context, the fields of a run, and the limits.

What lives here: numbers. What must not: code that uses them. Kernels receive one integer, the address of the context.
The context is an array of int64 words: the addresses of the arenas, and all counters. The comments below define the
format; `streams/core/index/arenas.py` allocates it.

A block id is a position in the arenas LOCAL and SEQUENCE, which have one int64 word per block. A run is consecutive
blocks of one chain with one set of holders. Blocks do not store their run, which saves 4 bytes per block, and a split
rewrites no blocks. To find the run of a block, a kernel scans the bitmap STARTS backwards to the block at which the run
starts.
A granule is 16 blocks; GRANULES heads a list of the runs that start in each granule, and the kernel takes the one with
that start. Two more bitmaps above STARTS mark which of its words are not zero, so that the scan is short even in long
runs. Without them, a store that looked up each block of a run of 131,072 blocks took 1.4 s, mostly for scanning.
"""

from __future__ import annotations

# -- arenas: addresses --------------------------------------------------------
VERSION = 0  # odd while the tree changes
LOCAL = 1  # int64 per block: local hash
SEQUENCE = 2  # int64 per block: its sequence hash, by which the map BY_SEQUENCE finds it
STARTS = 3  # bit per block: a run starts here
GRANULES = 4  # int32 per granule of 16 blocks: 1 + a run that starts in it, 0 for none
RUNS = 5  # 64 bytes per run
WIDE = 6  # coverage words beyond the first four, WIDE_STRIDE words per run
WIDE_STRIDE = 7
N_WORDS = 8  # coverage words in use
LIVE = 9  # bit per column: assigned to a holder
ENDED = 10  # bit per column: its holder was cleared, and the sweep has not finished
COLUMN_OF = 11  # int32 per holder: its coverage column
RANK_OF = 12  # int32 per column: rank number
TIER_OF = 13  # int32 per column
COLUMN_FACTS = 14  # int64 per column: blocks held
COLUMN_CLAIMS = 16  # int64 per column: blocks that more than one record claims
HOLDERS_OF = 17  # four int32 per rank: 1 + its holder in each tier, 0 for none
HOLDER_RANK = 18  # int32 per holder: rank number
HOLDER_TIER = 19  # int32 per holder
SCRATCH = 20  # SCRATCH_WORDS int64 words for one record
SEGMENTS = 21  # 64 KiB per segment of a map
SEGMENT_META = 22  # two int32 per segment: entries, depth
CLAIMS = 24  # two int64 per entry of CLAIM_BLOCKS: column << 32 | block; number of additional records that claim it
RECORDS = 25  # 32 bytes per entry of RECORD_KEYS, see fold
FREE_STARTS = 26  # bit per block: a free span starts here
FREE_ENDS = 27  # bit per block: a free span ends here
FREE_COLUMNS = 28  # int32 stack of unused columns
DEFERRED = (
    30  # four int64 per entry: first block and number of blocks to remove from BY_SEQUENCE; a span and its length
)
PHANTOM_BITS = 31  # Bloom filter with one hash, a bit per tag: a phantom may have this tag; see tree.first_phantom
HOLDER_GENERATION = 29  # int64 per holder: number of clears, which marks records from before a clear

# -- counters -----------------------------------------------------------------
N_RUNS = 32  # high water of run ids
FREE_RUN = 33  # head of the list of free run ids, 0 for none: run 0 is the root
N_BLOCKS = 34  # high water of block ids
N_FREE_BLOCKS = 35  # blocks in free spans
N_FACTS = 36
N_LOWER_FACTS = 37  # facts in tiers below the device
N_SEGMENTS = 38
FREE_SEGMENT = 39  # 1 + head, 0 for none
N_CLAIMS = 42
FREE_CLAIM = 43
N_RECORDS = 44
FREE_RECORD = 45
N_FREE_COLUMNS = 46
N_COLUMNS = 47
N_ENDED = 48
SWEEP_AT = 49  # next run that the sweep examines
SWEEP_AGAIN = 50  # a run that the sweep had passed took over an ended column, so that another pass is needed
SUBSTITUTES = 51  # counter of made-up sequence hashes
N_PHANTOMS = 52
N_LIVE_RUNS = 53
FULL = 56  # 1 if the last call refused a record, since it does not fit
N_DEFERRED = 57
WAITING = 70  # queries that were interrupted by changes and ask the writer to pause
SALT = 59  # of all hashes of this tree's maps
N_CLASHES = 58  # new blocks whose sequence hash a phantom has

# -- limits -------------------------------------------------------------------
BLOCKS_MAX = 60
RUNS_MAX = 61
SEGMENTS_MAX = 62
COLUMNS_MAX = 63
SMALL_MAX = 65  # entries of CLAIMS and RECORDS, each

# -- maps: directory address, depth, entries ----------------------------------
BY_SEQUENCE = 72
CHILDREN = 75
CLAIM_BLOCKS = 84
RECORD_KEYS = 87
MAPS = (BY_SEQUENCE, CHILDREN, CLAIM_BLOCKS, RECORD_KEYS)
MAP_DIRECTORY, MAP_DEPTH, MAP_ENTRIES = 0, 1, 2

# -- free spans of blocks: 1 + head of the list of each class, class = floor(log2(length)) -----------------------
SPAN_CLASSES = 96
N_SPAN_CLASSES = 32

STARTS_ABOVE = 90  # bit per word of STARTS: it is not zero
STARTS_TOP = 91  # bit per word of STARTS_ABOVE: it is not zero

#: Tags and segments of the blocks that are processed together, two words each.
AHEAD = 128
AHEAD_MAX = 32

CONTEXT_WORDS = 192

#: Scratch for one record of at most 32 blocks: first the blocks to release and the sequence hashes, 64 words each; then
#: what a store lists for each of its blocks, which is a stretch of three words or a clash.
SCRATCH_SEQUENCE = 64
SCRATCH_STORE = 128
SCRATCH_WORDS = 512

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

#: Slots per segment: 64 KiB. A map grows by splitting one segment (about 25 us) and is never rehashed as a whole:
#: rehashing 500,000 entries at once blocked the writer for 8.5 ms.
SEGMENT_SLOTS = 8192
SEGMENT_SHIFT = 16
#: A segment is split when it is half full. At a load of 0.8, a miss probes 13 slots and a deletion moves several, which
#: processors do not predict (35 ns per insertion at half load, 44 ns at 0.8), and the split of a fuller segment moves
#: more of the entries that it keeps. Growth costs 7 ns per block at half load, 9 at 0.6 and 17 at 0.7. Since a slot has
#: 8 bytes, even a load of one third costs few bytes per block.
SEGMENT_ENTRIES_MAX = 4096
#: Two halves are joined when together they fill a quarter of a segment, so that they are not soon split again.
SEGMENT_ENTRIES_JOINED_MAX = 2048
#: A tag has 32 bits: 19 choose one of 2^19 segments, and 13 one of 8,192 slots.
DEPTH_MAX = 19

#: Spare space after a new run, in blocks, so that decode extends the run in place: the run's own length, within these
#: bounds. With 12 % of the run's length instead, a decode workload made 38,000 runs where it now makes 5,000.
SLACK_MIN = 16
SLACK_MAX = 128
#: A run gets no spare space once less than this share of all blocks is left, 1 in 1 << 2. Spare space turns one block
#: into 17, so an index of single blocks was full at a seventeenth of its limit.
SLACK_LEFT_SHIFT = 2
#: A run that shrank keeps at most this much spare space.
SLACK_KEPT_MAX = 256

#: Checks of WAITING after which the writer continues regardless: about 20 us, in which the queries of many threads end.
PAUSE_CHECKS_MAX = 320
#: Interrupted tries after which a query asks the writer to pause. A writer of small records changes the tree every
#: 2 us, about as long as a long query takes. Without this request, one query in a hundred waited 190 us.
TRIES_BEFORE_WAITING = 2

#: Tries after which a query, or a writer that waits for queries, yields the processor between tries, since the thread
#: that it waits for may need the same processor.
TRIES_BEFORE_YIELDING = 256

#: Runs removed by one change whose blocks leave BY_SEQUENCE after it. Beyond this, they do so within the change, while
#: queries wait.
DEFERRED_MAX = 65_536

#: Bits of the filter that rules out phantoms for most blocks: 512 KiB, which stays in the cache during a recovery.
PHANTOM_FILTER_BITS = 1 << 22

#: Free spans of the needed length's own class that are tried before a span of a greater class is cut.
SPAN_TRIES_MAX = 4

N_TIERS = 4

#: 16,384 ranks in four tiers.
COLUMNS_MAX_EVER = 65_536
