"""Spans of words for kernels: allocated and freed by their sizes, in classes of powers of two.

What lives here: allocating and freeing. What must not: the content of spans. A span never moves.
"""

from __future__ import annotations

from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import leading_zeros, load, store
from streams.core.loads.kernels.layout import (
    HEAP,
    HEAP_CLASS_MIN,
    HEAP_FREE,
    HEAP_MAX,
    HEAP_TOP,
    HEAP_USED,
)


@inlined
def _class_of(n_words: int) -> int:
    """The class of spans that hold so many words: its power of two."""
    if n_words <= 1 << HEAP_CLASS_MIN:
        return HEAP_CLASS_MIN
    return 64 - leading_zeros(n_words - 1)


@kernel()
def allocate(context: int, n_words: int) -> int:
    """Address of a span of at least n_words words, whose content is undefined; 0 if the heap is full."""
    size_class = _class_of(n_words)
    head = context + ((HEAP_FREE + size_class) << 3)
    span = load(head)
    size = 1 << size_class
    used = context + (HEAP_USED << 3)
    if span != 0:
        store(head, load(span))
        store(used, load(used) + size)
        return span
    top = load(context + (HEAP_TOP << 3))
    if top + size > load(context + (HEAP_MAX << 3)):
        return 0
    store(context + (HEAP_TOP << 3), top + size)
    store(used, load(used) + size)
    return load(context + (HEAP << 3)) + (top << 3)


@kernel()
def release(context: int, span: int, n_words: int) -> None:
    """Free a span that was allocated for so many words, or for as many as are in the same class."""
    size_class = _class_of(n_words)
    head = context + ((HEAP_FREE + size_class) << 3)
    store(span, load(head))
    store(head, span)
    used = context + (HEAP_USED << 3)
    store(used, load(used) - (1 << size_class))
