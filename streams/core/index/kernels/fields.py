"""Words of the context and fields of a run, as instructions.

What lives here: addressing by the format in layout. What must not: decisions. Each is an intrinsic instead of an
inlined function, since inlining small functions hundreds of times took half of the compile time of all kernels.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types

from streams.core.index.kernels import layout
from streams.core.kernels.instructions import instruction
from streams.core.kernels.words import context_word, element, mixed, word_pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@instruction()
def run_address(builder: Any, context: Any, run: Any) -> Any:
    """Address of a run's line."""
    return element(builder, context_word(builder, context, layout.RUNS), run, layout.RUN_BYTES)


def _field_pointer(builder: Any, context: Any, run: Any, offset: Any) -> Any:
    line = element(builder, context_word(builder, context, layout.RUNS), run, layout.RUN_BYTES)
    return builder.inttoptr(builder.add(line, offset), _I32.as_pointer())


@instruction()
def field(builder: Any, context: Any, run: Any, offset: Any) -> Any:
    """Read a field of a run."""
    return builder.sext(builder.load(_field_pointer(builder, context, run, offset)), _I64)


@instruction(types.void)
def set_field(builder: Any, context: Any, run: Any, offset: Any, value: Any) -> None:
    """Set a field of a run."""
    builder.store(builder.trunc(value, _I32), _field_pointer(builder, context, run, offset))


@instruction()
def local_at(builder: Any, context: Any, block: Any) -> Any:
    """Local hash of a block."""
    return builder.load(word_pointer(builder, element(builder, context_word(builder, context, layout.LOCAL), block, 8)))


@instruction()
def sequence_at(builder: Any, context: Any, block: Any) -> Any:
    """Sequence hash of a block."""
    hashes = context_word(builder, context, layout.SEQUENCE)
    return builder.load(word_pointer(builder, element(builder, hashes, block, 8)))


@instruction()
def column_word(builder: Any, context: Any, which: Any, column: Any) -> Any:
    """Address of a column's word in one of the arrays with one word per column."""
    base = builder.load(word_pointer(builder, element(builder, context, which, 8)))
    return element(builder, base, column, 8)


# -- version ---------------------------------------------------------------------------------------------------------


@instruction(types.void)
def begin_change(builder: Any, context: Any) -> None:
    """Mark the tree as changing: a query that reads it from now on will notice and start again."""
    pointer = word_pointer(builder, builder.add(context, _I64(layout.VERSION * 8)))
    builder.store_atomic(builder.or_(builder.load(pointer), _I64(1)), pointer, "release", 8)
    builder.fence("acq_rel")


@instruction(types.void)
def end_change(builder: Any, context: Any) -> None:
    """Mark the tree as consistent again."""
    pointer = word_pointer(builder, builder.add(context, _I64(layout.VERSION * 8)))
    version = builder.load(pointer)
    whole = builder.add(version, builder.and_(version, _I64(1)))
    builder.store_atomic(whole, pointer, "release", 8)


# -- bitmaps ---------------------------------------------------------------------------------------------------------


def _bit(builder: Any, base: Any, index: Any) -> tuple[Any, Any]:
    pointer = word_pointer(builder, element(builder, base, builder.lshr(index, _I64(6)), 8))
    return pointer, builder.shl(_I64(1), builder.and_(index, _I64(63)))


@instruction(types.void)
def set_bit(builder: Any, base: Any, index: Any) -> None:
    """Set a bit of a bitmap."""
    pointer, bit = _bit(builder, base, index)
    builder.store(builder.or_(builder.load(pointer), bit), pointer)


@instruction(types.void)
def unset_bit(builder: Any, base: Any, index: Any) -> None:
    """Clear a bit of a bitmap."""
    pointer, bit = _bit(builder, base, index)
    builder.store(builder.and_(builder.load(pointer), builder.not_(bit)), pointer)


@instruction(types.boolean, types.int64, types.int64)
def test_bit(builder: Any, base: Any, index: Any) -> Any:
    """Whether a bit is set."""
    pointer, bit = _bit(builder, base, index)
    return builder.icmp_unsigned("!=", builder.and_(builder.load(pointer), bit), _I64(0))


# -- coverage --------------------------------------------------------------------------------------------------------


def _coverage(builder: Any, context: Any, run: Any, word: Any) -> Any:
    line = element(builder, context_word(builder, context, layout.RUNS), run, layout.RUN_BYTES)
    near = element(builder, builder.add(line, _I64(layout.RUN_COVERAGE)), word, 8)
    row = builder.mul(run, context_word(builder, context, layout.WIDE_STRIDE))
    beyond = builder.sub(builder.add(row, word), _I64(layout.INLINE_WORDS))
    far = element(builder, context_word(builder, context, layout.WIDE), beyond, 8)
    return builder.select(builder.icmp_signed("<", word, _I64(layout.INLINE_WORDS)), near, far)


def _column(builder: Any, context: Any, run: Any, column: Any) -> tuple[Any, Any]:
    address = _coverage(builder, context, run, builder.lshr(column, _I64(6)))
    return word_pointer(builder, address), builder.shl(_I64(1), builder.and_(column, _I64(63)))


@instruction()
def coverage_address(builder: Any, context: Any, run: Any, word: Any) -> Any:
    """Address of one of a run's coverage words."""
    return _coverage(builder, context, run, word)


@instruction(types.boolean, types.int64, types.int64, types.int64)
def covers(builder: Any, context: Any, run: Any, column: Any) -> Any:
    """Whether a column holds a run."""
    pointer, bit = _column(builder, context, run, column)
    return builder.icmp_unsigned("!=", builder.and_(builder.load(pointer), bit), _I64(0))


@instruction(types.void)
def set_cover(builder: Any, context: Any, run: Any, column: Any) -> None:
    """Add a column to the holders of a run."""
    pointer, bit = _column(builder, context, run, column)
    builder.store(builder.or_(builder.load(pointer), bit), pointer)


@instruction(types.void)
def unset_cover(builder: Any, context: Any, run: Any, column: Any) -> None:
    """Remove a column from the holders of a run."""
    pointer, bit = _column(builder, context, run, column)
    builder.store(builder.and_(builder.load(pointer), builder.not_(bit)), pointer)


# -- maps ------------------------------------------------------------------------------------------------------------


@instruction()
def tag_of(builder: Any, context: Any, key: Any) -> Any:
    """Hash a 64-bit key to 32 bits. Keys may be any numbers, including consecutive small ones.

    Each tree has its own salt, so that a client cannot choose prompts whose blocks all fall into one segment.
    """
    return mixed(builder, builder.xor(key, context_word(builder, context, layout.SALT)))


def _segment(builder: Any, context: Any, which: Any, tag: Any) -> Any:
    words = element(builder, context, which, 8)
    depth = builder.load(word_pointer(builder, builder.add(words, _I64(layout.MAP_DEPTH * 8))))
    directory = builder.load(word_pointer(builder, builder.add(words, _I64(layout.MAP_DIRECTORY * 8))))
    index = builder.lshr(tag, builder.sub(_I64(32), depth))
    number = builder.load(builder.inttoptr(element(builder, directory, index, 4), _I32.as_pointer()))
    first = context_word(builder, context, layout.SEGMENTS)
    return builder.add(first, builder.shl(builder.sext(number, _I64), _I64(layout.SEGMENT_SHIFT)))


@instruction()
def segment_of(builder: Any, context: Any, which: Any, tag: Any) -> Any:
    """Address of the segment to which a tag belongs."""
    return _segment(builder, context, which, tag)


@instruction()
def home_address(builder: Any, context: Any, which: Any, tag: Any) -> Any:
    """Address of the slot at which probing for a tag begins, for prefetching."""
    return element(
        builder, _segment(builder, context, which, tag), builder.and_(tag, _I64(layout.SEGMENT_SLOTS - 1)), 8
    )
