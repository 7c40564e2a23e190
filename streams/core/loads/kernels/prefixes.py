"""The tree of active prefixes in the memory of kernels: what ActivePrefixes (active_prefixes) does in pure Python.

What lives here: adding, removing and matching chains of sequence hashes. What must not: bookings (bookings, plain),
and the sizes of spans (heap). A chain is an address of packed hashes, which need not be aligned, and its number of
blocks. Run 0 is the root; it has no blocks and no rows.

A run owns two spans of the heap. One has its blocks' hashes. The other has its capacity in words and then its rows, so
that RUN_USES is the address of the span's second word. Everything that may fail for lack of memory comes before the
first change that cannot be undone, so a chain that does not fit leaves the tree as it was.

A place of the table CHILDREN has 32 bits of hash (the tag), which give its home, above 32 bits of run. So probing reads
the runs that are wanted and few others, and growing the table reads none.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import int64, typeof, types
from numba.extending import intrinsic

from streams.core.index.kernels.tree import common_length
from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import (
    copy_words,
    leading_zeros,
    load,
    shift_right,
    store,
)
from streams.core.loads.kernels.heap import allocate, release
from streams.core.loads.kernels.layout import (
    CHILDREN,
    CHILDREN_PLACES,
    HEAP_CLASS_MIN,
    N_CHILDREN,
    RUN_BLOCKS,
    RUN_CHAIN,
    RUN_CHILDREN,
    RUN_CHILDREN_SUM,
    RUN_FREE,
    RUN_N_USES,
    RUN_PARENT,
    RUN_REQUESTS,
    RUN_USES,
    RUN_WORDS,
    RUNS,
    RUNS_MAX,
    RUNS_TOP,
    SCRATCH,
    SCRATCH_MAX,
)

#: Words that `match_chain` writes for each run: where it ends in blocks, its requests, how many rows, and its number.
MATCH_WORDS = 4

#: Returned instead of a run if the memory is exhausted.
NO_MEMORY = -1

# Offsets of a run's fields in bytes.
_PARENT, _CHAIN, _BLOCKS, _REQUESTS = RUN_PARENT << 3, RUN_CHAIN << 3, RUN_BLOCKS << 3, RUN_REQUESTS << 3
_CHILDREN, _CHILDREN_SUM = RUN_CHILDREN << 3, RUN_CHILDREN_SUM << 3
_USES, _N_USES = RUN_USES << 3, RUN_N_USES << 3
_RUN_BYTES = RUN_WORDS << 3

_TAG_BITS = 32
_RUN_MASK = (1 << 32) - 1

# Odd constants of splitmix64 and xxHash, as int64.
_MIX_PARENT = -0x61C8864680B583EB
_MIX_FIRST = -0x40A7B892E31B1A47
_MIX_BOTH = -0x6B2FB644ECCEEE15

#: Spans for rows up to this size are not made smaller: 31 rows.
_KEPT_WORDS = 64

_I1, _I8, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(64)


# -- instructions -----------------------------------------------------------------------------------------


@intrinsic
def address_of_bytes(typingctx: Any, raw: Any) -> Any:
    """Address of the first byte of a bytes object, which the caller of the kernel keeps alive."""
    if not isinstance(raw, types.Bytes):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_helper(builder, signature.args[0], args[0]).data, _I64)

    return types.int64(raw), codegen


@intrinsic
def move_words(typingctx: Any, target: Any, source: Any, n_words: Any) -> Any:
    """Copy int64 words between areas that may overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, _I64, _I1])
        function = builder.module.declare_intrinsic("llvm.memmove", [pointer, pointer, _I64], kind)
        n_bytes = builder.shl(args[2], _I64(3))
        builder.call(
            function, [builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer), n_bytes, _I1(0)]
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def zero_words(typingctx: Any, target: Any, n_words: Any) -> Any:
    """Write zeros: 0.03 us for 1,024 words, where a loop of stores takes 0.4 us."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I8, _I64, _I1])
        function = builder.module.declare_intrinsic("llvm.memset", [pointer, _I64], kind)
        builder.call(function, [builder.inttoptr(args[0], pointer), _I8(0), builder.shl(args[1], _I64(3)), _I1(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@inlined
def _run_at(context: int, run: int) -> int:
    """Address of a run."""
    return load(context + (RUNS << 3)) + run * _RUN_BYTES


@inlined
def _increase(address: int, by: int) -> None:
    store(address, load(address) + by)


# -- the table of children --------------------------------------------------------------------------------


@inlined
def _tag_of(context: int, parent: int, first: int) -> int:
    """32 bits of hash of a run's parent and first block."""
    # The address that the system chose for the runs is a salt: nobody outside can choose prompts that collide.
    mixed = ((first ^ load(context + (RUNS << 3))) * _MIX_FIRST) ^ (parent * _MIX_PARENT)
    mixed = (mixed ^ shift_right(mixed, 29)) * _MIX_BOTH
    return shift_right(mixed, 64 - _TAG_BITS)


@kernel()
def find_child(context: int, parent: int, first: int) -> int:
    """The run that follows a run and begins with this hash; 0 if there is none."""
    table = load(context + (CHILDREN << 3))
    mask = load(context + (CHILDREN_PLACES << 3)) - 1
    tag = _tag_of(context, parent, first)
    place = tag & mask
    while True:
        slot = load(table + (place << 3))
        if slot == 0:
            return 0
        if shift_right(slot, _TAG_BITS) == tag:
            run = slot & _RUN_MASK
            at = _run_at(context, run)
            if load(at + _PARENT) == parent and load(load(at + _CHAIN)) == first:
                return run
        place = (place + 1) & mask


@inlined
def _find_slot(context: int, tag: int, run: int) -> int:
    """Address of the place of a run, which is in the table."""
    table = load(context + (CHILDREN << 3))
    mask = load(context + (CHILDREN_PLACES << 3)) - 1
    wanted = (tag << _TAG_BITS) | run
    place = tag & mask
    while load(table + (place << 3)) != wanted:
        place = (place + 1) & mask
    return table + (place << 3)


@inlined
def _insert_slot(table: int, mask: int, slot: int) -> None:
    place = shift_right(slot, _TAG_BITS) & mask
    while load(table + (place << 3)) != 0:
        place = (place + 1) & mask
    store(table + (place << 3), slot)


@kernel()
def insert_child(context: int, run: int) -> None:
    """Insert a run by its parent and its first block. `reserve_children` comes before."""
    at = _run_at(context, run)
    tag = _tag_of(context, load(at + _PARENT), load(load(at + _CHAIN)))
    mask = load(context + (CHILDREN_PLACES << 3)) - 1
    _insert_slot(load(context + (CHILDREN << 3)), mask, (tag << _TAG_BITS) | run)
    _increase(context + (N_CHILDREN << 3), 1)


@kernel()
def delete_child(context: int, run: int) -> None:
    """Delete a run by its parent and its first block, and move later entries of its cluster up."""
    at = _run_at(context, run)
    table = load(context + (CHILDREN << 3))
    mask = load(context + (CHILDREN_PLACES << 3)) - 1
    address = _find_slot(context, _tag_of(context, load(at + _PARENT), load(load(at + _CHAIN))), run)
    gap = (address - table) >> 3
    place = gap
    while True:
        place = (place + 1) & mask
        slot = load(table + (place << 3))
        if slot == 0:
            break
        home = shift_right(slot, _TAG_BITS) & mask
        if ((place - home) & mask) >= ((place - gap) & mask):
            store(table + (gap << 3), slot)
            gap = place
    store(table + (gap << 3), 0)
    _increase(context + (N_CHILDREN << 3), -1)


@kernel()
def reserve_children(context: int, n_more: int) -> bool:
    """Grow the table until so many more runs leave half of it free; False if the heap is full."""
    while True:
        places = load(context + (CHILDREN_PLACES << 3))
        if (load(context + (N_CHILDREN << 3)) + n_more) << 1 <= places:
            return True
        larger = allocate(context, places << 1)
        if larger == 0:
            return False
        table = load(context + (CHILDREN << 3))
        zero_words(larger, places << 1)
        for place in range(places):
            slot = load(table + (place << 3))
            if slot != 0:
                _insert_slot(larger, (places << 1) - 1, slot)
        release(context, table, places)
        store(context + (CHILDREN << 3), larger)
        store(context + (CHILDREN_PLACES << 3), places << 1)


# -- the rows of a run ------------------------------------------------------------------------------------


@inlined
def _use_words(n_uses: int) -> int:
    """Words of the span of so many rows: its capacity, and two for each row."""
    return 2 * n_uses + 1


@inlined
def _allocate_uses(context: int, n_uses: int) -> int:
    """What RUN_USES is for a new span of so many rows; 0 if the heap is full."""
    n_words = _use_words(n_uses)
    span = allocate(context, n_words)
    if span == 0:
        return 0
    capacity = 1 << HEAP_CLASS_MIN
    if n_words > capacity:
        capacity = 1 << (64 - leading_zeros(n_words - 1))
    store(span, capacity)
    return span + 8


@inlined
def _release_uses(context: int, uses: int) -> None:
    release(context, uses - 8, load(uses - 8))


@kernel()
def move_uses(context: int, at: int, n_uses_max: int) -> bool:
    """Move the rows of a run, by its address, to a span for up to n_uses_max; False if the heap is full."""
    uses = load(at + _USES)
    moved = _allocate_uses(context, n_uses_max)
    if moved == 0:
        return False
    copy_words(moved, uses, load(at + _N_USES) << 1)
    _release_uses(context, uses)
    store(at + _USES, moved)
    return True


@inlined
def _find_use(uses: int, n_uses: int, row: int) -> int:
    """Address of the first row that is not below `row`; the end if there is none."""
    low, high = 0, n_uses
    while low < high:
        middle = (low + high) >> 1
        if load(uses + (middle << 4)) < row:
            low = middle + 1
        else:
            high = middle
    return uses + (low << 4)


@kernel()
def add_use(context: int, at: int, row: int) -> int:
    """Count a request of a row for a run, by its address.

    Returns 1 if the row did not use it before, 0 if it did, and NO_MEMORY if the heap is full and nothing was changed.
    """
    uses, n_uses = load(at + _USES), load(at + _N_USES)
    use = _find_use(uses, n_uses, row)
    end = uses + (n_uses << 4)
    if use < end and load(use) == row:
        _increase(use + 8, 1)
        _increase(at + _REQUESTS, 1)
        return 0
    if _use_words(n_uses + 1) > load(uses - 8):
        if not move_uses(context, at, n_uses + 1):
            return NO_MEMORY
        use += load(at + _USES) - uses
        end += load(at + _USES) - uses
    move_words(use + 16, use, (end - use) >> 3)
    store(use, row)
    store(use + 8, 1)
    store(at + _N_USES, n_uses + 1)
    _increase(at + _REQUESTS, 1)
    return 1


@kernel()
def drop_use(context: int, at: int, row: int) -> int:
    """Uncount a request of a row for a run, by its address; returns 1 if the row no longer uses the run, else 0."""
    uses, n_uses = load(at + _USES), load(at + _N_USES)
    use = _find_use(uses, n_uses, row)
    _increase(at + _REQUESTS, -1)
    if load(use + 8) > 1:
        _increase(use + 8, -1)
        return 0
    move_words(use, use + 16, (uses + (n_uses << 4) - use - 16) >> 3)
    store(at + _N_USES, n_uses - 1)
    # Half of a span is returned when a quarter is used, so that a row which comes and goes moves nothing. If the heap
    # is full, the span remains as it is.
    capacity = load(uses - 8)
    if capacity > _KEPT_WORDS and _use_words(n_uses - 1) <= capacity >> 2:
        move_uses(context, at, (capacity >> 2) - 1)
    return 1


@kernel()
def use_path(context: int, row: int, run: int) -> int:
    """Count a request for a run and all before it; returns how many of their blocks the row did not use before.

    Returns NO_MEMORY if the heap is full; nothing is counted then.
    """
    n_fresh, each = 0, run
    while each != 0:
        at = _run_at(context, each)
        added = add_use(context, at, row)
        if added < 0:
            while run != each:
                at = _run_at(context, run)
                drop_use(context, at, row)
                run = load(at + _PARENT)
            return NO_MEMORY
        n_fresh += added * load(at + _BLOCKS)
        each = load(at + _PARENT)
    return n_fresh


# -- runs -------------------------------------------------------------------------------------------------


@kernel()
def new_run(context: int, chain: int, n_blocks: int, n_uses_max: int) -> int:
    """A run with these blocks, with space for so many rows, and attached to nothing; 0 if memory is exhausted."""
    run = load(context + (RUN_FREE << 3))
    top = load(context + (RUNS_TOP << 3))
    if run == 0 and top >= load(context + (RUNS_MAX << 3)):
        return 0
    span = allocate(context, n_blocks)
    if span == 0:
        return 0
    uses = _allocate_uses(context, n_uses_max)
    if uses == 0:
        release(context, span, n_blocks)
        return 0
    if run == 0:
        run = top
        store(context + (RUNS_TOP << 3), top + 1)
        at = _run_at(context, run)
    else:
        at = _run_at(context, run)
        store(context + (RUN_FREE << 3), load(at + _PARENT))
    copy_words(span, chain, n_blocks)
    store(at + _PARENT, 0)
    store(at + _CHAIN, span)
    store(at + _BLOCKS, n_blocks)
    store(at + _REQUESTS, 0)
    store(at + _CHILDREN, 0)
    store(at + _CHILDREN_SUM, 0)
    store(at + _USES, uses)
    store(at + _N_USES, 0)
    return run


@kernel()
def free_run(context: int, run: int) -> None:
    """Free a run that is attached to nothing, with its spans. A free run has no blocks; its parent is the next one."""
    at = _run_at(context, run)
    release(context, load(at + _CHAIN), load(at + _BLOCKS))
    _release_uses(context, load(at + _USES))
    store(at + _BLOCKS, 0)
    store(at + _PARENT, load(context + (RUN_FREE << 3)))
    store(context + (RUN_FREE << 3), run)


@inlined
def _attach(context: int, run: int, parent: int) -> None:
    """Attach a run. `reserve_children` comes before."""
    store(_run_at(context, run) + _PARENT, parent)
    insert_child(context, run)
    above = _run_at(context, parent)
    _increase(above + _CHILDREN, 1)
    _increase(above + _CHILDREN_SUM, run)


@inlined
def _detach(context: int, run: int) -> None:
    delete_child(context, run)
    above = _run_at(context, load(_run_at(context, run) + _PARENT))
    _increase(above + _CHILDREN, -1)
    _increase(above + _CHILDREN_SUM, -run)


@inlined
def _replace(context: int, old: int, new: int) -> None:
    """Attach a run with the same first block in the place of another one."""
    at = _run_at(context, old)
    parent = load(at + _PARENT)
    tag = _tag_of(context, parent, load(load(at + _CHAIN)))
    store(_find_slot(context, tag, old), (tag << _TAG_BITS) | new)
    store(_run_at(context, new) + _PARENT, parent)
    _increase(_run_at(context, parent) + _CHILDREN_SUM, new - old)


@kernel()
def split_run(context: int, run: int, n_first: int) -> int:
    """Split a run after so many blocks and return the new run with its first part; 0 if memory is exhausted.

    `run` becomes the second part, since requests that end in it refer to it. The first part has space for another row.
    `reserve_children` comes before.
    """
    at = _run_at(context, run)
    chain, n_blocks, n_uses = load(at + _CHAIN), load(at + _BLOCKS), load(at + _N_USES)
    rest = allocate(context, n_blocks - n_first)
    if rest == 0:
        return 0
    head = new_run(context, chain, n_first, n_uses + 1)
    if head == 0:
        release(context, rest, n_blocks - n_first)
        return 0
    above = _run_at(context, head)
    copy_words(load(above + _USES), load(at + _USES), n_uses << 1)
    store(above + _N_USES, n_uses)
    store(above + _REQUESTS, load(at + _REQUESTS))
    _replace(context, run, head)
    copy_words(rest, chain + (n_first << 3), n_blocks - n_first)
    release(context, chain, n_blocks)
    store(at + _CHAIN, rest)
    store(at + _BLOCKS, n_blocks - n_first)
    _attach(context, run, head)
    return head


@kernel()
def join_only_child(context: int, run: int) -> None:
    """Join a run with its only child if the same requests use both, so that no request ends in the run.

    The child remains, since requests refer to it. If the heap is full, nothing is joined.
    """
    at = _run_at(context, run)
    child = load(at + _CHILDREN_SUM)
    below = _run_at(context, child)
    # All requests of the child use the run as well. So if they are as many, the rows and their counts are equal.
    if load(below + _REQUESTS) != load(at + _REQUESTS):
        return
    n_first, n_rest = load(at + _BLOCKS), load(below + _BLOCKS)
    joined = allocate(context, n_first + n_rest)
    if joined == 0:
        return
    copy_words(joined, load(at + _CHAIN), n_first)
    copy_words(joined + (n_first << 3), load(below + _CHAIN), n_rest)
    delete_child(context, child)
    _replace(context, run, child)
    release(context, load(below + _CHAIN), n_rest)
    store(below + _CHAIN, joined)
    store(below + _BLOCKS, n_first + n_rest)
    free_run(context, run)


# -- chains -----------------------------------------------------------------------------------------------


@kernel()
def find_end(context: int, chain: int, n_blocks: int) -> tuple[int, int, int, int]:
    """How far a chain is in the tree.

    Returns the last run that is in it as a whole, the number of blocks up to its end, the next run if the chain has a
    part of its blocks (0 if not), and how many.
    """
    run, n_found = 0, 0
    while n_found < n_blocks:
        child = find_child(context, run, load(chain + (n_found << 3)))
        if child == 0:
            break
        at = _run_at(context, child)
        length = load(at + _BLOCKS)
        same = common_length(load(at + _CHAIN), chain + (n_found << 3), min(length, n_blocks - n_found))
        if same < length:
            return run, n_found, child, same
        run = child
        n_found += same
    return run, n_found, 0, 0


@kernel()
def add_chain(context: int, row: int, chain: int, n_blocks: int) -> tuple[int, int]:
    """Add a request on this row that uses these blocks from the root.

    Returns the run at its end, which `remove_chain` takes, and how many of the blocks the row did not use before.
    Returns (NO_MEMORY, 0) if memory is exhausted; no run, row or number is changed then.
    """
    run, n_found, partial, n_same = find_end(context, chain, n_blocks)
    n_found += n_same
    leaf = 0
    if (partial != 0 or n_found < n_blocks) and not reserve_children(context, 2):
        return NO_MEMORY, 0
    if n_found < n_blocks:
        leaf = new_run(context, chain + (n_found << 3), n_blocks - n_found, 1)
        if leaf == 0:
            return NO_MEMORY, 0
    n_fresh = use_path(context, row, run)
    if n_fresh < 0:
        if leaf != 0:
            free_run(context, leaf)
        return NO_MEMORY, 0
    if partial != 0:
        head = split_run(context, partial, n_same)
        if head == 0:
            while run != 0:
                at = _run_at(context, run)
                drop_use(context, at, row)
                run = load(at + _PARENT)
            if leaf != 0:
                free_run(context, leaf)
            return NO_MEMORY, 0
        n_fresh += add_use(context, _run_at(context, head), row) * n_same
        run = head
    if leaf != 0:
        n_fresh += add_use(context, _run_at(context, leaf), row) * (n_blocks - n_found)
        _attach(context, leaf, run)
        run = leaf
    return run, n_fresh


# It keeps the GIL, as `add_bytes` does; see there.
@kernel(nogil=False)
def remove_chain(context: int, row: int, run: int) -> int:
    """Remove a request by the run that `add_chain` returned for it; returns how many blocks the row no longer uses.

    Returns -1 if the row does not use the run; nothing is changed then.
    """
    if run != 0:
        at = _run_at(context, run)
        use = _find_use(load(at + _USES), load(at + _N_USES), row)
        if use >= load(at + _USES) + (load(at + _N_USES) << 4) or load(use) != row:
            return -1
    n_ended = 0
    while run != 0:
        at = _run_at(context, run)
        above = load(at + _PARENT)
        n_ended += drop_use(context, at, row) * load(at + _BLOCKS)
        if load(at + _N_USES) == 0:
            _detach(context, run)
            free_run(context, run)
        elif load(at + _CHILDREN) == 1:
            join_only_child(context, run)
        run = above
    return n_ended


@inlined
def _share(shared: int, n_rows: int, at: int, n_blocks: int) -> None:
    """Write a number of blocks for each row of a run, by its address."""
    uses, n_uses = load(at + _USES), load(at + _N_USES)
    while n_uses > 0 and load(uses + ((n_uses - 1) << 4)) >= n_rows:
        n_uses -= 1
    for number in range(n_uses):
        store(shared + (load(uses + (number << 4)) << 3), n_blocks)


@kernel()
def match_chain(context: int, chain: int, n_blocks: int, n_rows: int) -> int:
    """Find how many leading blocks of a chain each row has in use, and which runs they are in.

    The scratch memory then has n_rows words, the blocks by row, and MATCH_WORDS words for each run with blocks of the
    chain, in order: the blocks up to its end or to the end of the match, how many requests use it, on how many rows,
    and its number. Returns the number of runs; -1 if the scratch memory is too small. Rows from n_rows on are ignored.
    """
    shared = load(context + (SCRATCH << 3))
    free_words = load(context + (SCRATCH_MAX << 3)) - n_rows
    if free_words < 0:
        return -1
    zero_words(shared, n_rows)
    found = shared + (n_rows << 3)
    n_runs, run, n_found = 0, 0, 0
    # The rows of a run are a subset of those of the run before it. So only the last of several runs with equally many
    # rows is written to the rows.
    last = 0
    while n_found < n_blocks:
        child = find_child(context, run, load(chain + (n_found << 3)))
        if child == 0:
            break
        free_words -= MATCH_WORDS
        if free_words < 0:
            return -1
        at = _run_at(context, child)
        length, n_uses = load(at + _BLOCKS), load(at + _N_USES)
        if last != 0 and load(last + _N_USES) != n_uses:
            _share(shared, n_rows, last, n_found)
        last = at
        same = common_length(load(at + _CHAIN), chain + (n_found << 3), min(length, n_blocks - n_found))
        n_found += same
        store(found, n_found)
        store(found + 8, load(at + _REQUESTS))
        store(found + 16, n_uses)
        store(found + 24, child)
        found += MATCH_WORDS << 3
        n_runs += 1
        if same < length:
            break
        run = child
    if last != 0:
        _share(shared, n_rows, last, n_found)
    return n_runs


# -- what Python calls ------------------------------------------------------------------------------------


# These keep the GIL: they take about a microsecond, and asking for the GIL again can take milliseconds.
@kernel(types.UniTuple(int64, 2)(int64, int64, typeof(b"")), nogil=False)
def add_bytes(context: int, row: int, chain: bytes) -> tuple[int, int]:
    """`add_chain` for a chain in a bytes object."""
    return add_chain(context, row, address_of_bytes(chain), len(chain) >> 3)


@kernel(int64(int64, typeof(b""), int64), nogil=False)
def match_bytes(context: int, chain: bytes, n_rows: int) -> int:
    """`match_chain` for a chain in a bytes object."""
    return match_chain(context, address_of_bytes(chain), len(chain) >> 3, n_rows)
