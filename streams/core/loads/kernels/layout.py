"""The memory format of bookings that kernels fold: the words of its context, and the fields of runs and bookings.

What lives here: numbers. What must not: code that uses them. Kernels receive one integer, the address of the context,
which is an array of int64 words: the addresses of the arenas, and all counters. `streams/core/loads/memory.py`
allocates it. All addresses are in bytes, and all fields are int64 words.
"""

from __future__ import annotations

# -- heap: spans of words, by classes of powers of two ------------------------
HEAP = 0  # address of the heap's arena
HEAP_TOP = 1  # words that were ever allocated
HEAP_MAX = 2  # words of the arena
HEAP_USED = 3  # words in spans that are in use
HEAP_FREE = 8  # for each class, the first free span: its address, 0 for none. A free span's first word is the next one
HEAP_CLASSES = 40
HEAP_CLASS_MIN = 2  # spans have at least 4 words

# -- the tree of active prefixes (see prefixes) -------------------------------
RUNS = 64  # address of the runs; run 0 is the root
RUNS_TOP = 65  # runs that were ever in use
RUNS_MAX = 66
RUN_FREE = 67  # the first free run, 0 for none
CHILDREN = 68  # address of the hash table of runs by parent and first block: 32 bits of hash and the run, or 0
CHILDREN_PLACES = 69  # places of it, a power of two
N_CHILDREN = 70  # entries of it
SCRATCH = 71  # address of words for the results of one call
SCRATCH_MAX = 72  # words of it

# -- bookings (see plain) -----------------------------------------------------
BOOKINGS = 96  # address of the bookings; booking 0 is never used
BOOKINGS_TOP = 97
BOOKINGS_MAX = 98
BOOKING_FREE = 99
REQUESTS = 100  # address of the hash table of bookings by request id
REQUESTS_PLACES = 101
N_BOOKINGS = 102
OLDEST = 103  # the booking whose last record was read first, 0 for none
NEWEST = 104
CLOCKS = 105  # address of four words per clock (see plain)
CLOCKS_MAX = 106
N_FALLS = 107  # since the last call
N_BYTES = 108  # of the bookings, as ActiveLoads counts them
LOADS = 109  # address of the table of loads, int64[4, n_rows]
N_ROWS = 110
PREFILLED = 111  # address of the table of rank times' row of the last prefill-complete
RANKS = 112  # address of the hash table of rows by rank: three words per place, worker id, dp_rank, row (0: free)
RANKS_PLACES = 113
N_RANKS = 114
ENDED = 115  # address of SHARD_WORDS words per shard of EndedBookings
ENDED_MASK = 116
SEED = 117  # of the digests of ids
FREED_LIST = 118  # address of four words per booking that `fold` freed: request, booking, when that expires, clock
N_FREED = 119
CHAIN = 120  # address of a copy of one chain, since those in records begin at any byte
CLOCKS_TOP = 121  # one more than the greatest clock of a booking
N_REQUESTS = 123  # entries of the table of requests
STOPPED = 122  # whether something may expire at the time of a record: STOPPED_BEFORE or STOPPED_AFTER, or 0

CONTEXT_WORDS = 128

#: Why `fold` stopped: at the time of the record that it returned, or after the one before that.
STOPPED_BEFORE = 1
STOPPED_AFTER = 2

#: Bookings that one call of `fold` frees at most, and blocks of a chain that it reads.
FREED_MAX = 256
CHAIN_MAX = 1 << 21

#: Partitions of router-loads whose bookings kernels fold.
CLOCKS_MAX_EVER = 1 << 16

# -- a run: its offsets are in words ------------------------------------------
# A free run has no blocks, and its parent is the next free one.
RUN_PARENT = 0
RUN_CHAIN = 1  # address of its blocks' hashes, in the heap
RUN_BLOCKS = 2  # how many
RUN_REQUESTS = 3  # requests that use it, on all rows
RUN_CHILDREN = 4  # how many runs follow it
RUN_CHILDREN_SUM = 5  # sum of their numbers, so that an only child is known without a search
RUN_USES = (
    6  # address of its rows: two words each, row and number of requests, in order. Before them, words of the span
)
RUN_N_USES = 7  # how many rows
RUN_WORDS = 8

# -- a booking ----------------------------------------------------------------
BOOKING_REQUEST = 0  # digest of its request id
BOOKING_ID = 1  # address of its head, the bytes of its records that name it, followed by the model's name
BOOKING_ID_BYTES = 2  # of the head
BOOKING_MODEL_BYTES = 3
BOOKING_ROW = 4
BOOKING_RUN = 5  # the end of its chain in the tree
BOOKING_COUNTED = 6  # prefill tokens that its row is charged
BOOKING_PREFILL = 7  # prefill tokens of its last add
BOOKING_REQUEST_BLOCKS = 8
BOOKING_OVERLAP = 9
BOOKING_EXPECTED = 10  # output tokens, -1 if it is not known
BOOKING_OUTPUT = 11  # blocks
BOOKING_WORKER = 12
BOOKING_DP_RANK = 13
BOOKING_SINCE = 14  # time of its last add
BOOKING_EXPIRES = 15
BOOKING_CLOCK = 16
BOOKING_PREFILLED = 17  # 1 if its prefill was reported
BOOKING_PREFILLED_MS = 18
BOOKING_OLDER = 19  # neighbours in the order in which last records were read
BOOKING_NEWER = 20
BOOKING_BEFORE = 21  # neighbours in the order in which the bookings of its clock expire
BOOKING_AFTER = 22
BOOKING_BYTES = 23  # of memory, as ActiveLoads counts them
BOOKING_HEAD_AT = 24  # where in its head the router id begins, its bytes, and the counter
BOOKING_ROUTER_BYTES = 25
BOOKING_COUNTER = 26
BOOKING_REQUEST_AT = 27  # where in its head the request id begins, and its bytes
BOOKING_REQUEST_BYTES = 28
BOOKING_WORDS = 32

# -- a shard of EndedBookings: addresses of its columns, and numbers -----------
SHARD_REQUEST = 0
SHARD_EXPIRES = 1
SHARD_BOOKING = 2
SHARD_CLOCK = 3
SHARD_USED = 4  # address of how many of its places are in use
SHARD_USED_MAX = 5
SHARD_BITS = 6
SHARD_WORDS = 8

#: Places of a shard after the last one that a digest can name.
SHARD_TAIL = 64

# -- what the table of requests says of a request id --------------------------
KNOWN = -1  # ActiveLoads has its bookings as objects
FREED = -2  # its booking was freed in the last call of `fold`

# -- a record of router-loads, as numbers: one row of FIELD_WORDS -------------
FIELD_KIND = 0
FIELD_HEAD = 1  # address and bytes of what names the booking: request id, router id and counter
FIELD_HEAD_BYTES = 2
FIELD_REQUEST = 3  # address and bytes
FIELD_REQUEST_BYTES = 4
FIELD_ROUTER = 5  # address and bytes
FIELD_ROUTER_BYTES = 6
FIELD_COUNTER = 7
FIELD_WORKER = 8
FIELD_DP_RANK = 9
FIELD_MODEL = 10  # address and bytes
FIELD_MODEL_BYTES = 11
FIELD_PREFILL = 12
FIELD_REQUEST_BLOCKS = 13
FIELD_OVERLAP = 14
FIELD_CHAIN = 15  # address and blocks of its sequence hashes
FIELD_BLOCKS = 16
FIELD_EXPECTED = 17
FIELD_OUTPUT = 18
FIELD_AT_MS = 19
FIELD_CLOCK = 20
FIELD_REQUEST_AT = 21  # where its request id begins in the buffer of all records
FIELD_WORDS = 24

#: What a record is: one that a kernel leaves to Python; one without content; and the three phases.
OTHER = 0
TICK = 1
ADD = 2
PREFILL = 3
FREE = 4

#: Ids that a kernel reads have so many bytes, all of them ASCII; other records are left to Python.
ID_BYTES_MIN = 4
ID_BYTES_MAX = 240

#: The greatest number of tokens, blocks or time in a record: a million of them can be added up. Records with a greater
#: one are refused, as are those with a longer name.
NUMBER_MAX = 1 << 40
NAME_BYTES_MAX = 4096

#: Bits of the digest of a request id. It is never negative as an int64.
DIGEST_BITS = 63
