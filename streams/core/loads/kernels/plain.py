"""Folding records of other routers' bookings: the first add of a request id, its updates, its prefill and its free.

What lives here: bookings of fixed size, found by the digest of their request id, in two lists: by the time of their
last record, and by when they expire. What must not: the bytes of records on Kafka (tables.kernels.loads), and
bookings that need more: those of this router, with a forecast, of one part of a request, or one of several of their id.
ActiveLoads has these as objects, and `fold` leaves to it every record that concerns one.

It has the same effects as `ActiveLoads.add`, `prefill_complete` and `free`, step by step.
"""

from __future__ import annotations

from numba import uint64

from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import copy_words, load, load_byte, shift_right, signed, store, store32
from streams.core.kernels.xxh3 import digest_short, load_u64, store_u64
from streams.core.loads.kernels.heap import allocate, release
from streams.core.loads.kernels.layout import (
    ADD,
    BOOKING_AFTER,
    BOOKING_BEFORE,
    BOOKING_BYTES,
    BOOKING_CLOCK,
    BOOKING_COUNTED,
    BOOKING_COUNTER,
    BOOKING_DP_RANK,
    BOOKING_EXPECTED,
    BOOKING_EXPIRES,
    BOOKING_FREE,
    BOOKING_HEAD_AT,
    BOOKING_ID,
    BOOKING_ID_BYTES,
    BOOKING_MODEL_BYTES,
    BOOKING_NEWER,
    BOOKING_OLDER,
    BOOKING_OUTPUT,
    BOOKING_OVERLAP,
    BOOKING_PREFILL,
    BOOKING_PREFILLED,
    BOOKING_PREFILLED_MS,
    BOOKING_REQUEST,
    BOOKING_REQUEST_AT,
    BOOKING_REQUEST_BLOCKS,
    BOOKING_REQUEST_BYTES,
    BOOKING_ROUTER_BYTES,
    BOOKING_ROW,
    BOOKING_RUN,
    BOOKING_SINCE,
    BOOKING_WORDS,
    BOOKING_WORKER,
    BOOKINGS,
    BOOKINGS_MAX,
    BOOKINGS_TOP,
    CHAIN,
    CLOCKS,
    CLOCKS_MAX,
    CLOCKS_TOP,
    DIGEST_BITS,
    ENDED,
    ENDED_MASK,
    FIELD_AT_MS,
    FIELD_BLOCKS,
    FIELD_CHAIN,
    FIELD_CLOCK,
    FIELD_COUNTER,
    FIELD_DP_RANK,
    FIELD_EXPECTED,
    FIELD_HEAD,
    FIELD_HEAD_BYTES,
    FIELD_KIND,
    FIELD_MODEL,
    FIELD_MODEL_BYTES,
    FIELD_OUTPUT,
    FIELD_OVERLAP,
    FIELD_PREFILL,
    FIELD_REQUEST,
    FIELD_REQUEST_BLOCKS,
    FIELD_REQUEST_BYTES,
    FIELD_ROUTER,
    FIELD_ROUTER_BYTES,
    FIELD_WORDS,
    FIELD_WORKER,
    FREE,
    FREED,
    FREED_LIST,
    FREED_MAX,
    KNOWN,
    LOADS,
    N_BOOKINGS,
    N_BYTES,
    N_FALLS,
    N_FREED,
    N_RANKS,
    N_REQUESTS,
    N_ROWS,
    NEWEST,
    OLDEST,
    OTHER,
    PREFILL,
    PREFILLED,
    RANKS,
    RANKS_PLACES,
    REQUESTS,
    REQUESTS_PLACES,
    RUN_BLOCKS,
    RUN_CHAIN,
    RUN_PARENT,
    RUN_WORDS,
    RUNS,
    SEED,
    SHARD_BITS,
    SHARD_BOOKING,
    SHARD_CLOCK,
    SHARD_EXPIRES,
    SHARD_REQUEST,
    SHARD_TAIL,
    SHARD_USED,
    SHARD_USED_MAX,
    SHARD_WORDS,
    STOPPED,
    STOPPED_AFTER,
    STOPPED_BEFORE,
    TICK,
)
from streams.core.loads.kernels.prefixes import add_chain, remove_chain

#: The rows of the table of loads.
_PREFILL, _DECODE, _REQUESTS, _OUTPUT = range(4)

#: Words of an entry: of the table of requests (digest and value; 0 as value marks a free place), of that of ranks
#: (worker id, dp_rank and row), and of FREED_LIST.
_REQUEST_WORDS = 2
_RANK_WORDS = 3
_FREED_WORDS = 4

#: Words of a clock: the bookings that expire first and last, its latest time, and when anything else of it may expire,
#: 0 for never.
_CLOCK_WORDS = 4
_LATEST, _LIMIT = 2, 3

# Mixed into the part of an id that is not the request id; `booking_hashes` has the same numbers.
ROUTER_FACTOR = 0x2545F4914F6CDD1D
COUNTER_FACTOR = 0x1B873593CC9E2D51
_ID_SHIFT = 32
_ID_BITS = (1 << 32) - 1


@inlined
def _word(context: int, word: int) -> int:
    return load(context + (word << 3))


@inlined
def _set_word(context: int, word: int, value: int) -> None:
    store(context + (word << 3), value)


@inlined
def _add_word(context: int, word: int, change: int) -> None:
    store(context + (word << 3), load(context + (word << 3)) + change)


@inlined
def _booking(context: int, number: int) -> int:
    """The address of a booking."""
    return load(context + (BOOKINGS << 3)) + number * (BOOKING_WORDS << 3)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@inlined
def _copy_bytes(target: int, source: int, n_bytes: int) -> None:
    """Copy to a span that has room for whole words; the source is followed by at least seven bytes."""
    for at in range(0, n_bytes, 8):
        store_u64(target + at, load_u64(source + at))


@inlined
def _same_bytes(left: int, right: int, n_bytes: int) -> bool:
    at = 0
    while at + 8 <= n_bytes:
        if load_u64(left + at) != load_u64(right + at):
            return False
        at += 8
    while at < n_bytes:
        if load_byte(left + at) != load_byte(right + at):
            return False
        at += 1
    return True


@kernel()
def _digest(context: int, address: int, n_bytes: int) -> int:
    seed = uint64(_word(context, SEED))
    return shift_right(signed(digest_short(address, n_bytes, seed)), 64 - DIGEST_BITS)


# ---- the table of requests ------------------------------------------------------------------------------------------


@kernel()
def _place_of(context: int, request: int) -> int:
    """The address of a request's entry, or of the free place where it belongs."""
    table, mask = _word(context, REQUESTS), _word(context, REQUESTS_PLACES) - 1
    position = request & mask
    while True:
        place = table + position * (_REQUEST_WORDS << 3)
        if load(place + 8) == 0 or load(place) == request:
            return place
        position = (position + 1) & mask


@inlined
def _delete(context: int, place: int) -> None:
    """Delete an entry, and move later entries of its cluster up."""
    table, mask = _word(context, REQUESTS), _word(context, REQUESTS_PLACES) - 1
    gap = (place - table) // (_REQUEST_WORDS << 3)
    position = gap
    while True:
        position = (position + 1) & mask
        at = table + position * (_REQUEST_WORDS << 3)
        if load(at + 8) == 0:
            break
        home = load(at) & mask
        if ((position - home) & mask) >= ((position - gap) & mask):
            copy_words(table + gap * (_REQUEST_WORDS << 3), at, _REQUEST_WORDS)
            gap = position
    store(table + gap * (_REQUEST_WORDS << 3) + 8, 0)
    _add_word(context, N_REQUESTS, -1)


@kernel()
def make_room(context: int) -> bool:
    """Double the table of requests if it is half full; returns whether there is room for another entry."""
    table, places = _word(context, REQUESTS), _word(context, REQUESTS_PLACES)
    if _word(context, N_REQUESTS) * 2 < places:
        return True
    n_words = 2 * places * _REQUEST_WORDS
    new = allocate(context, n_words)
    if new == 0:
        return False
    for at in range(n_words):
        store(new + (at << 3), 0)
    _set_word(context, REQUESTS, new)
    _set_word(context, REQUESTS_PLACES, 2 * places)
    for number in range(places):
        old = table + number * (_REQUEST_WORDS << 3)
        if load(old + 8) != 0:
            copy_words(_place_of(context, load(old)), old, _REQUEST_WORDS)
    release(context, table, places * _REQUEST_WORDS)
    return True


@inlined
def _put(context: int, request: int, value: int) -> None:
    """Write an entry. `make_room` was called, if it is new."""
    place = _place_of(context, request)
    if load(place + 8) == 0:
        _add_word(context, N_REQUESTS, 1)
    store(place, request)
    store(place + 8, value)


@kernel(nogil=False)
def find(context: int, request: int) -> int:
    """What the table says of a request id: a booking's number, KNOWN, FREED, or 0 for nothing."""
    return load(_place_of(context, request) + 8)


@kernel(nogil=False)
def note(context: int, request: int, value: int) -> bool:
    """Write what is known of a request id, 0 for nothing; returns False if there is no room."""
    if value != 0:
        if not make_room(context):
            return False
        _put(context, request, value)
        return True
    place = _place_of(context, request)
    if load(place + 8) != 0:
        _delete(context, place)
    return True


@inlined
def _forget_freed(context: int) -> None:
    """Delete what the last call noted of bookings that it freed; the caller has taken them over since."""
    freed = _word(context, FREED_LIST)
    for nth in range(_word(context, N_FREED)):
        place = _place_of(context, load(freed + nth * (_FREED_WORDS << 3)))
        if load(place + 8) == FREED:
            _delete(context, place)
    _set_word(context, N_FREED, 0)


# ---- the two lists --------------------------------------------------------------------------------------------------


@inlined
def _clock(context: int, clock: int) -> int:
    return _word(context, CLOCKS) + clock * (_CLOCK_WORDS << 3)


@kernel()
def _append(context: int, number: int) -> None:
    """Put a booking at the end of both lists. It expires no earlier than the others of its clock."""
    booking = _booking(context, number)
    newest = _word(context, NEWEST)
    _set_word(booking, BOOKING_OLDER, newest)
    _set_word(booking, BOOKING_NEWER, 0)
    if newest:
        _set_word(_booking(context, newest), BOOKING_NEWER, number)
    else:
        _set_word(context, OLDEST, number)
    _set_word(context, NEWEST, number)
    clock = _clock(context, _word(booking, BOOKING_CLOCK))
    last = load(clock + 8)
    _set_word(booking, BOOKING_BEFORE, last)
    _set_word(booking, BOOKING_AFTER, 0)
    if last:
        _set_word(_booking(context, last), BOOKING_AFTER, number)
    else:
        store(clock, number)
    store(clock + 8, number)


@kernel()
def _unlink(context: int, number: int) -> None:
    booking = _booking(context, number)
    older, newer = _word(booking, BOOKING_OLDER), _word(booking, BOOKING_NEWER)
    if older:
        _set_word(_booking(context, older), BOOKING_NEWER, newer)
    else:
        _set_word(context, OLDEST, newer)
    if newer:
        _set_word(_booking(context, newer), BOOKING_OLDER, older)
    else:
        _set_word(context, NEWEST, older)
    clock = _clock(context, _word(booking, BOOKING_CLOCK))
    before, after = _word(booking, BOOKING_BEFORE), _word(booking, BOOKING_AFTER)
    if before:
        _set_word(_booking(context, before), BOOKING_AFTER, after)
    else:
        store(clock, after)
    if after:
        _set_word(_booking(context, after), BOOKING_BEFORE, before)
    else:
        store(clock + 8, before)


@inlined
def _is_last(context: int, clock: int, expires_ms: int) -> bool:
    """Whether no booking of a clock expires later."""
    last = load(_clock(context, clock) + 8)
    return last == 0 or _word(_booking(context, last), BOOKING_EXPIRES) <= expires_ms


# ---- loads ----------------------------------------------------------------------------------------------------------


@inlined
def _charge(context: int, which: int, row: int, change: int) -> None:
    cell = _word(context, LOADS) + ((which * _word(context, N_ROWS) + row) << 3)
    store(cell, load(cell) + change)


@inlined
def _row_of(context: int, worker_id: int, dp_rank: int) -> int:
    """The row of a rank; 0 if it has none."""
    table, mask = _word(context, RANKS), _word(context, RANKS_PLACES) - 1
    position = _rank_home(worker_id, dp_rank) & mask
    while True:
        place = table + position * (_RANK_WORDS << 3)
        row = load(place + 16)
        if row == 0 or (load(place) == worker_id and load(place + 8) == dp_rank):
            return row
        position = (position + 1) & mask


@inlined
def _rank_home(worker_id: int, dp_rank: int) -> int:
    mixed = (worker_id ^ (dp_rank * COUNTER_FACTOR)) * ROUTER_FACTOR
    return shift_right(mixed, 32)


@kernel()
def add_ranks(context: int, ranks: int, n_ranks: int) -> bool:
    """Add ranks that the table does not have, each as in `set_ranks`; False, and nothing changes, if it is too full."""
    table, places = _word(context, RANKS), _word(context, RANKS_PLACES)
    if 2 * (_word(context, N_RANKS) + n_ranks) > places:
        return False
    for nth in range(n_ranks):
        rank = ranks + nth * (_RANK_WORDS << 3)
        position = _rank_home(load(rank), load(rank + 8)) & (places - 1)
        while load(table + position * (_RANK_WORDS << 3) + 16) != 0:
            position = (position + 1) & (places - 1)
        copy_words(table + position * (_RANK_WORDS << 3), rank, _RANK_WORDS)
    _add_word(context, N_RANKS, n_ranks)
    return True


@kernel()
def set_ranks(context: int, ranks: int, n_ranks: int) -> bool:
    """Replace the table of rows by rank. ranks: address of worker id, dp_rank and row of each; False without memory."""
    places = _word(context, RANKS_PLACES)
    wanted = max(places, 64)
    while wanted < 2 * n_ranks:
        wanted *= 2
    if wanted != places:
        new = allocate(context, wanted * _RANK_WORDS)
        if new == 0:
            return False
        if places:
            release(context, _word(context, RANKS), places * _RANK_WORDS)
        _set_word(context, RANKS, new)
        _set_word(context, RANKS_PLACES, wanted)
    table = _word(context, RANKS)
    for at in range(wanted * _RANK_WORDS):
        store(table + (at << 3), 0)
    _set_word(context, N_RANKS, 0)
    return add_ranks(context, ranks, n_ranks)


@kernel()
def _uncount(context: int, number: int) -> None:
    booking = _booking(context, number)
    row, output = _word(booking, BOOKING_ROW), _word(booking, BOOKING_OUTPUT)
    n_ended = remove_chain(context, row, _word(booking, BOOKING_RUN))
    _charge(context, _PREFILL, row, -_word(booking, BOOKING_COUNTED))
    _charge(context, _DECODE, row, -(n_ended + output))
    _charge(context, _REQUESTS, row, -1)
    _charge(context, _OUTPUT, row, -output)


@inlined
def _drop(context: int, number: int) -> None:
    """Free the memory of a booking that is in no list and no table any more."""
    booking = _booking(context, number)
    release(context, _word(booking, BOOKING_ID), _id_words(booking))
    _add_word(context, N_BYTES, -_word(booking, BOOKING_BYTES))
    _add_word(context, N_BOOKINGS, -1)
    _set_word(booking, 0, _word(context, BOOKING_FREE))
    _set_word(context, BOOKING_FREE, number)


@inlined
def _id_words(booking: int) -> int:
    return _words_of(_word(booking, BOOKING_ID_BYTES) + _word(booking, BOOKING_MODEL_BYTES))


@inlined
def _words_of(n_bytes: int) -> int:
    """Words for so many bytes, and for those that `_copy_bytes` writes after them."""
    return (n_bytes + 15) >> 3


# ---- records --------------------------------------------------------------------------------------------------------


@inlined
def _shard_of(context: int, request: int) -> int:
    return _word(context, ENDED) + (request & _word(context, ENDED_MASK)) * (SHARD_WORDS << 3)


@inlined
def _may_have_ended(context: int, request: int) -> bool:
    """EndedBookings.may_know."""
    shard = _shard_of(context, request)
    requests, expires_ms = _word(shard, SHARD_REQUEST), _word(shard, SHARD_EXPIRES)
    place = shift_right(request, DIGEST_BITS - _word(shard, SHARD_BITS))
    while load(expires_ms + (place << 3)) != 0:
        if load(requests + (place << 3)) == request:
            return True
        place += 1
    return False


@inlined
def _is_of(booking: int, record: int) -> bool:
    """Whether a record names a booking."""
    n_bytes = _word(record, FIELD_HEAD_BYTES)
    return n_bytes == _word(booking, BOOKING_ID_BYTES) and _same_bytes(
        _word(booking, BOOKING_ID), _word(record, FIELD_HEAD), n_bytes
    )


@inlined
def _renew(context: int, number: int, expires_ms: int) -> None:
    """Note that a record of a booking was read; it is the last one of its clock, or no later than the one before."""
    _unlink(context, number)
    booking = _booking(context, number)
    if expires_ms > _word(booking, BOOKING_EXPIRES):
        _set_word(booking, BOOKING_EXPIRES, expires_ms)
    _append(context, number)


@inlined
def _can_renew(context: int, booking: int, record: int, expires_ms: int) -> bool:
    """Whether a record is of the booking's clock, and the booking can be put at the end of its list."""
    clock = _word(booking, BOOKING_CLOCK)
    return clock == _word(record, FIELD_CLOCK) and _is_last(
        context, clock, max(expires_ms, _word(booking, BOOKING_EXPIRES))
    )


@inlined
def _has_chain(context: int, run: int, chain: int, n_blocks: int) -> bool:
    """Whether the blocks from the root to the end of a run are exactly these."""
    end = n_blocks
    while run != 0:
        node = _word(context, RUNS) + run * (RUN_WORDS << 3)
        n_own = _word(node, RUN_BLOCKS)
        if n_own > end:
            return False
        end -= n_own
        if not _same_bytes(_word(node, RUN_CHAIN), chain + (end << 3), n_own << 3):
            return False
        run = _word(node, RUN_PARENT)
    return end == 0


@inlined
def _update(context: int, number: int, record: int, expires_ms: int) -> bool:
    """The add of a booking that is known already: with more output, or only to renew it."""
    booking = _booking(context, number)
    row = _word(booking, BOOKING_ROW)
    model_bytes = _word(record, FIELD_MODEL_BYTES)
    if (
        not _is_of(booking, record)
        or not _can_renew(context, booking, record, expires_ms)
        or _row_of(context, _word(record, FIELD_WORKER), _word(record, FIELD_DP_RANK)) != row
        or _word(booking, BOOKING_WORKER) != _word(record, FIELD_WORKER)
        or _word(booking, BOOKING_DP_RANK) != _word(record, FIELD_DP_RANK)
        or model_bytes != _word(booking, BOOKING_MODEL_BYTES)
        or not _same_bytes(
            _word(booking, BOOKING_ID) + _word(booking, BOOKING_ID_BYTES), _word(record, FIELD_MODEL), model_bytes
        )
        or not _has_chain(context, _word(booking, BOOKING_RUN), _word(record, FIELD_CHAIN), _word(record, FIELD_BLOCKS))
    ):
        return False
    _renew(context, number, expires_ms)
    prefill, output = _word(record, FIELD_PREFILL), _word(record, FIELD_OUTPUT)
    counted, before = _word(booking, BOOKING_COUNTED), _word(booking, BOOKING_OUTPUT)
    if counted > prefill or before > output:
        _add_word(context, N_FALLS, 1)
    now_counted = 0 if _word(booking, BOOKING_PREFILLED) else prefill
    _charge(context, _PREFILL, row, now_counted - counted)
    _charge(context, _DECODE, row, output - before)
    _charge(context, _OUTPUT, row, output - before)
    _set_word(booking, BOOKING_COUNTED, now_counted)
    _set_word(booking, BOOKING_SINCE, _word(record, FIELD_AT_MS))
    _write_numbers(booking, record)
    return True


@inlined
def _write_numbers(booking: int, record: int) -> None:
    _set_word(booking, BOOKING_PREFILL, _word(record, FIELD_PREFILL))
    _set_word(booking, BOOKING_REQUEST_BLOCKS, _word(record, FIELD_REQUEST_BLOCKS))
    _set_word(booking, BOOKING_OVERLAP, _word(record, FIELD_OVERLAP))
    _set_word(booking, BOOKING_EXPECTED, _word(record, FIELD_EXPECTED))
    _set_word(booking, BOOKING_OUTPUT, _word(record, FIELD_OUTPUT))


@inlined
def _add(context: int, record: int, ttl_ms: int, room: int, bytes_room: int, own_bytes: int, block_bytes: int) -> bool:
    """Fold an add; returns False and changes nothing if it is left to Python."""
    request_bytes = _word(record, FIELD_REQUEST_BYTES)
    request = _digest(context, _word(record, FIELD_REQUEST), request_bytes)
    expires_ms = _word(record, FIELD_AT_MS) + ttl_ms
    known = load(_place_of(context, request) + 8)
    if known > 0:
        return _update(context, known, record, expires_ms)
    n_blocks, clock = _word(record, FIELD_BLOCKS), _word(record, FIELD_CLOCK)
    row = _row_of(context, _word(record, FIELD_WORKER), _word(record, FIELD_DP_RANK))
    n_bytes = own_bytes + request_bytes + block_bytes * n_blocks
    if (
        known != 0
        or row == 0
        or clock >= _word(context, CLOCKS_MAX)
        or _word(context, N_BOOKINGS) >= room
        or _word(context, N_BYTES) + n_bytes > bytes_room
        or not _is_last(context, clock, expires_ms)
        or _may_have_ended(context, request)
        or not make_room(context)
    ):
        return False
    number = _word(context, BOOKING_FREE)
    if number == 0 and _word(context, BOOKINGS_TOP) >= _word(context, BOOKINGS_MAX):
        return False
    id_bytes, model_bytes = _word(record, FIELD_HEAD_BYTES), _word(record, FIELD_MODEL_BYTES)
    span = allocate(context, _words_of(id_bytes + model_bytes))
    if span == 0:
        return False
    chain = _word(context, CHAIN)
    _copy_bytes(chain, _word(record, FIELD_CHAIN), n_blocks << 3)
    run, n_fresh = add_chain(context, row, chain, n_blocks)
    if run < 0:
        release(context, span, _words_of(id_bytes + model_bytes))
        return False
    if number:
        _set_word(context, BOOKING_FREE, _word(_booking(context, number), 0))
    else:
        number = _word(context, BOOKINGS_TOP)
        _set_word(context, BOOKINGS_TOP, number + 1)
    booking = _booking(context, number)
    _copy_bytes(span, _word(record, FIELD_HEAD), id_bytes)
    _copy_bytes(span + id_bytes, _word(record, FIELD_MODEL), model_bytes)
    output = _word(record, FIELD_OUTPUT)
    _set_word(booking, BOOKING_REQUEST, request)
    _set_word(booking, BOOKING_ID, span)
    _set_word(booking, BOOKING_ID_BYTES, id_bytes)
    _set_word(booking, BOOKING_MODEL_BYTES, model_bytes)
    _set_word(booking, BOOKING_ROW, row)
    _set_word(booking, BOOKING_RUN, run)
    _set_word(booking, BOOKING_COUNTED, _word(record, FIELD_PREFILL))
    _write_numbers(booking, record)
    _set_word(booking, BOOKING_WORKER, _word(record, FIELD_WORKER))
    _set_word(booking, BOOKING_DP_RANK, _word(record, FIELD_DP_RANK))
    _set_word(booking, BOOKING_SINCE, _word(record, FIELD_AT_MS))
    _set_word(booking, BOOKING_EXPIRES, expires_ms)
    _set_word(booking, BOOKING_CLOCK, clock)
    _set_word(booking, BOOKING_PREFILLED, 0)
    _set_word(booking, BOOKING_PREFILLED_MS, 0)
    _set_word(booking, BOOKING_BYTES, n_bytes)
    _set_word(booking, BOOKING_REQUEST_AT, _word(record, FIELD_REQUEST) - _word(record, FIELD_HEAD))
    _set_word(booking, BOOKING_REQUEST_BYTES, request_bytes)
    _set_word(booking, BOOKING_HEAD_AT, _word(record, FIELD_ROUTER) - _word(record, FIELD_HEAD))
    _set_word(booking, BOOKING_ROUTER_BYTES, _word(record, FIELD_ROUTER_BYTES))
    _set_word(booking, BOOKING_COUNTER, _word(record, FIELD_COUNTER))
    if clock >= _word(context, CLOCKS_TOP):
        _set_word(context, CLOCKS_TOP, clock + 1)
    _append(context, number)
    _put(context, request, number)
    _add_word(context, N_BOOKINGS, 1)
    _add_word(context, N_BYTES, n_bytes)
    _charge(context, _PREFILL, row, _word(record, FIELD_PREFILL))
    _charge(context, _DECODE, row, n_fresh + output)
    _charge(context, _REQUESTS, row, 1)
    _charge(context, _OUTPUT, row, output)
    return True


@inlined
def _free(context: int, record: int, ttl_ms: int) -> bool:
    """Fold a free; returns False and changes nothing if it is left to Python."""
    request = _digest(context, _word(record, FIELD_REQUEST), _word(record, FIELD_REQUEST_BYTES))
    place = _place_of(context, request)
    number = load(place + 8)
    n_freed = _word(context, N_FREED)
    if number <= 0 or n_freed >= FREED_MAX:
        return False
    booking = _booking(context, number)
    if not _is_of(booking, record):
        return False
    _uncount(context, number)
    _unlink(context, number)
    expires_ms = max(_word(booking, BOOKING_EXPIRES), _word(record, FIELD_AT_MS) + ttl_ms)
    router = _digest(context, _word(record, FIELD_ROUTER), _word(record, FIELD_ROUTER_BYTES))
    mixed = request + router * ROUTER_FACTOR + _word(record, FIELD_COUNTER) * COUNTER_FACTOR
    clock = _clock(context, _word(booking, BOOKING_CLOCK))
    limit_ms = _word(clock, _LIMIT)
    if limit_ms == 0 or expires_ms < limit_ms:
        _set_word(clock, _LIMIT, expires_ms)
    freed = _word(context, FREED_LIST) + n_freed * (_FREED_WORDS << 3)
    store(freed, request)
    store(freed + 8, (mixed ^ shift_right(mixed, _ID_SHIFT)) & _ID_BITS)
    store(freed + 16, expires_ms)
    store(freed + 24, _word(booking, BOOKING_CLOCK))
    _set_word(context, N_FREED, n_freed + 1)
    store(place + 8, FREED)
    _drop(context, number)
    _add_word(context, N_FALLS, 1)
    return True


@inlined
def _prefill(context: int, record: int, ttl_ms: int) -> bool:
    """Fold a prefill-complete; returns False and changes nothing if it is left to Python."""
    request = _digest(context, _word(record, FIELD_REQUEST), _word(record, FIELD_REQUEST_BYTES))
    number = load(_place_of(context, request) + 8)
    at_ms = _word(record, FIELD_AT_MS)
    if number <= 0:
        return False
    booking = _booking(context, number)
    if not _is_of(booking, record) or not _can_renew(context, booking, record, at_ms + ttl_ms):
        return False
    _renew(context, number, at_ms + ttl_ms)
    row = _word(booking, BOOKING_ROW)
    if not _word(booking, BOOKING_PREFILLED):
        _charge(context, _PREFILL, row, -_word(booking, BOOKING_COUNTED))
        _set_word(booking, BOOKING_COUNTED, 0)
        _add_word(context, N_FALLS, 1)
    last = _word(context, PREFILLED) + (row << 3)
    if at_ms > load(last):
        store(last, at_ms)
    if at_ms > _word(booking, BOOKING_PREFILLED_MS):
        _set_word(booking, BOOKING_PREFILLED_MS, at_ms)
    _set_word(booking, BOOKING_PREFILLED, 1)
    return True


@inlined
def _is_due(context: int, clock: int) -> bool:
    """Whether something of a clock expires at its latest time. clock: the address of its words."""
    latest_ms, limit_ms, first = _word(clock, _LATEST), _word(clock, _LIMIT), load(clock)
    if limit_ms and latest_ms >= limit_ms:
        return True
    return first != 0 and latest_ms >= _word(_booking(context, first), BOOKING_EXPIRES)


@kernel(nogil=False)
def fold(
    context: int,
    fields: int,
    first: int,
    n_records: int,
    ttl_ms: int,
    room: int,
    bytes_room: int,
    own_bytes: int,
    block_bytes: int,
) -> int:
    """Fold records in their order, from the one at `first` on; returns the first one that is left to the caller.

    fields: address of n_records rows, as `tables.kernels.loads.read_records` writes them. The word STOPPED says that
    something may expire at the time of the record that is returned (STOPPED_BEFORE), or of the one before it, which
    came so late that it was due at once (STOPPED_AFTER): the caller then lets everything of its clock expire that is
    due, and calls again. So a record is folded into what has not expired by its time, whatever the log had before it.
    What it frees is listed (FREED_LIST), and the caller notes it as ended before anything else happens.

    room, bytes_room: at most so many bookings, and bytes of them. own_bytes: what one takes besides its request id and
    its blocks. block_bytes: what each block takes.
    """
    _forget_freed(context)
    _set_word(context, STOPPED, 0)
    for at in range(first, n_records):
        record = fields + at * (FIELD_WORDS << 3)
        kind = _word(record, FIELD_KIND)
        number = _word(record, FIELD_CLOCK)
        if kind == OTHER or number >= _word(context, CLOCKS_MAX):
            return at
        clock = _clock(context, number)
        at_ms = _word(record, FIELD_AT_MS)
        if at_ms > _word(clock, _LATEST):
            _set_word(clock, _LATEST, at_ms)
            if _is_due(context, clock):  # the next call finds this time noted, and goes on
                _set_word(context, STOPPED, STOPPED_BEFORE)
                return at
        if kind == ADD:
            done = _add(context, record, ttl_ms, room, bytes_room, own_bytes, block_bytes)
        elif kind == FREE:
            done = _free(context, record, ttl_ms)
        elif kind == PREFILL:
            done = _prefill(context, record, ttl_ms)
        else:
            done = kind == TICK
        if not done:
            return at
        if at_ms < _word(clock, _LATEST) and _is_due(context, clock):
            _set_word(context, STOPPED, STOPPED_AFTER)
            return at + 1
    return n_records


@kernel(nogil=False)
def put_freed(context: int, first: int) -> int:
    """Keep what `fold` freed, from the entry at `first` on, in the shards of EndedBookings; returns the first one that
    is left to it: its shard is full, or has its request id already."""
    freed = _word(context, FREED_LIST)
    for nth in range(first, _word(context, N_FREED)):
        entry = freed + nth * (_FREED_WORDS << 3)
        request = load(entry)
        shard = _shard_of(context, request)
        requests, expires_ms = _word(shard, SHARD_REQUEST), _word(shard, SHARD_EXPIRES)
        bits, n_used = _word(shard, SHARD_BITS), _word(shard, SHARD_USED)
        place = shift_right(request, DIGEST_BITS - bits)
        while load(expires_ms + (place << 3)) != 0:
            if load(requests + (place << 3)) == request:
                return nth
            place += 1
        if place >= (1 << bits) + SHARD_TAIL - 1 or load(n_used) > _word(shard, SHARD_USED_MAX):
            return nth
        store(requests + (place << 3), request)
        store32(_word(shard, SHARD_BOOKING) + (place << 2), load(entry + 8))
        store(expires_ms + (place << 3), load(entry + 16))
        store32(_word(shard, SHARD_CLOCK) + (place << 2), load(entry + 24))
        store(n_used, load(n_used) + 1)
    return _word(context, N_FREED)


@kernel(nogil=False)
def expire(context: int, now_ms: int, clock: int) -> int:
    """End every booking of a clock that expires at now_ms or before; returns their number."""
    n_ended = 0
    entry = _clock(context, clock)
    _set_word(entry, _LATEST, max(_word(entry, _LATEST), now_ms))
    number = load(entry)
    while number and _word(_booking(context, number), BOOKING_EXPIRES) <= now_ms:
        end(context, number)
        n_ended += 1
        number = load(entry)
    return n_ended


@kernel(nogil=False)
def end(context: int, number: int) -> None:
    """End a booking as if it had never been made."""
    _uncount(context, number)
    _unlink(context, number)
    _delete(context, _place_of(context, _word(_booking(context, number), BOOKING_REQUEST)))
    _drop(context, number)
    _add_word(context, N_FALLS, 1)


@kernel(nogil=False)
def take_out(context: int, number: int) -> None:
    """Remove a booking that continues as an object: it stays counted, and its request id is KNOWN."""
    _unlink(context, number)
    _put(context, _word(_booking(context, number), BOOKING_REQUEST), KNOWN)
    _drop(context, number)


@kernel(nogil=False)
def copy_chain(context: int, run: int) -> int:
    """Write the blocks from the root to the end of a run to CHAIN; returns how many."""
    n_blocks, at = 0, run
    while at != 0:
        node = _word(context, RUNS) + at * (RUN_WORDS << 3)
        n_blocks += _word(node, RUN_BLOCKS)
        at = _word(node, RUN_PARENT)
    target = _word(context, CHAIN) + (n_blocks << 3)
    at = run
    while at != 0:
        node = _word(context, RUNS) + at * (RUN_WORDS << 3)
        n_own = _word(node, RUN_BLOCKS)
        target -= n_own << 3
        copy_words(target, _word(node, RUN_CHAIN), n_own)
        at = _word(node, RUN_PARENT)
    return n_blocks
