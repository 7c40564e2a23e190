"""Allocation of runs and of the spans that store their blocks.

What lives here: allocating and freeing. What must not: the contents. A span of class c holds SPAN_BLOCKS_MIN << c
blocks of three words; freed spans are kept in one list per class.
"""

from __future__ import annotations

from numba import njit

from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import copy_words, load, store
from streams.core.kernels.words import get, put
from streams.core.reducer.kernels import layout


@njit(inline="always")
def run_at(context: int, run: int) -> int:
    """Return the address of a run's words."""
    return get(context, layout.RUNS) + run * (layout.RUN_WORDS * 8)


@njit(inline="always")
def capacity_of(line: int) -> int:
    """Return how many blocks a run's span can hold."""
    return layout.SPAN_BLOCKS_MIN << ((load(line + layout.RUN_SHAPE * 8) >> layout.CLASS_SHIFT) & 255)


@njit(inline="always")
def locals_at(context: int, line: int) -> int:
    """Return the address of a run's local hashes; engine and sequence hashes follow, each one capacity further on."""
    return get(context, layout.SPANS) + (load(line + layout.RUN_SPAN * 8) << 3)


@njit(inline="always")
def engine_at(context: int, line: int, offset: int) -> int:
    """Return the address of a block's engine hash."""
    return locals_at(context, line) + ((capacity_of(line) + offset) << 3)


@njit(inline="always")
def sequence_at(context: int, line: int, offset: int) -> int:
    """Return the address of a block's sequence hash."""
    return locals_at(context, line) + ((2 * capacity_of(line) + offset) << 3)


@kernel()
def new_span(context: int, size: int) -> int:
    """Allocate a span of a class; returns the word at which it begins."""
    head = get(context, layout.FREE_SPANS + size)
    if head != 0:
        put(context, layout.FREE_SPANS + size, load(get(context, layout.SPANS) + ((head - 1) << 3)))
        return head - 1
    span = get(context, layout.N_SPAN_WORDS)
    put(context, layout.N_SPAN_WORDS, span + 3 * (layout.SPAN_BLOCKS_MIN << size))
    return span


@kernel()
def free_span(context: int, span: int, size: int) -> None:
    """Free a span."""
    store(get(context, layout.SPANS) + (span << 3), get(context, layout.FREE_SPANS + size))
    put(context, layout.FREE_SPANS + size, span + 1)


@kernel()
def widen(context: int, line: int) -> None:
    """Move a run's blocks to a span of the next class."""
    shape = load(line + layout.RUN_SHAPE * 8)
    size, length = (shape >> layout.CLASS_SHIFT) & 255, shape & layout.LENGTH_MASK
    old_span, spans = load(line + layout.RUN_SPAN * 8), get(context, layout.SPANS)
    span = new_span(context, size + 1)
    capacity = layout.SPAN_BLOCKS_MIN << size
    for part in range(3):
        copy_words(spans + ((span + 2 * part * capacity) << 3), spans + ((old_span + part * capacity) << 3), length)
    free_span(context, old_span, size)
    store(line + layout.RUN_SPAN * 8, span)
    store(line + layout.RUN_SHAPE * 8, shape + (1 << layout.CLASS_SHIFT))


@kernel()
def new_run_id(context: int) -> int:
    """Allocate a run; returns its id."""
    head = get(context, layout.FREE_RUN)
    if head != 0:
        put(context, layout.FREE_RUN, load(run_at(context, head - 1) + layout.RUN_PREVIOUS * 8))
        return head - 1
    run = get(context, layout.N_RUNS)
    put(context, layout.N_RUNS, run + 1)
    return run
