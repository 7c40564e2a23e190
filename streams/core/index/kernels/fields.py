"""Words of the context and fields of a run, as instructions.

What lives here: addressing by the format in layout. What must not: decisions. Each is an intrinsic instead of an
inlined function, since inlining small functions hundreds of times took half of the compile time of all kernels.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from streams.core.index.kernels.layout import (
    INLINE_WORDS,
    LOCAL,
    MAP_DEPTH,
    MAP_DIRECTORY,
    RUN_BYTES,
    RUN_COVERAGE,
    RUNS,
    SALT,
    SEGMENT_SHIFT,
    SEGMENT_SLOTS,
    SEGMENTS,
    SEQUENCE,
    VERSION,
    WIDE,
    WIDE_STRIDE,
)
from streams.core.kernels.words import context_word, element, mixed, word_pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def run_address(typingctx: Any, context: Any, run: Any) -> Any:
    """Address of a run's line."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        return element(builder, context_word(builder, args[0], RUNS), args[1], RUN_BYTES)

    return types.int64(types.int64, types.int64), codegen


def _field_pointer(builder: Any, args: Any) -> Any:
    line = element(builder, context_word(builder, args[0], RUNS), args[1], RUN_BYTES)
    return builder.inttoptr(builder.add(line, args[2]), _I32.as_pointer())


@intrinsic
def field(typingctx: Any, context: Any, run: Any, offset: Any) -> Any:
    """Read a field of a run."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(_field_pointer(builder, args)), _I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def set_field(typingctx: Any, context: Any, run: Any, offset: Any, value: Any) -> Any:
    """Set a field of a run."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[3], _I32), _field_pointer(builder, args))
        return compiler.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def local_at(typingctx: Any, context: Any, block: Any) -> Any:
    """Local hash of a block."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(word_pointer(builder, element(builder, context_word(builder, args[0], LOCAL), args[1], 8)))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def sequence_at(typingctx: Any, context: Any, block: Any) -> Any:
    """Sequence hash of a block."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        hashes = context_word(builder, args[0], SEQUENCE)
        return builder.load(word_pointer(builder, element(builder, hashes, args[1], 8)))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def column_word(typingctx: Any, context: Any, which: Any, column: Any) -> Any:
    """Address of a column's word in one of the arrays with one word per column."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = builder.load(word_pointer(builder, element(builder, args[0], args[1], 8)))
        return element(builder, base, args[2], 8)

    return types.int64(types.int64, types.int64, types.int64), codegen


# -- version ---------------------------------------------------------------------------------------------------------


@intrinsic
def begin_change(typingctx: Any, context: Any) -> Any:
    """Mark the tree as changing: a query that reads it from now on will notice and start again."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = word_pointer(builder, builder.add(args[0], _I64(VERSION * 8)))
        builder.store_atomic(builder.or_(builder.load(pointer), _I64(1)), pointer, "release", 8)
        builder.fence("acq_rel")
        return compiler.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def end_change(typingctx: Any, context: Any) -> Any:
    """Mark the tree as consistent again."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = word_pointer(builder, builder.add(args[0], _I64(VERSION * 8)))
        version = builder.load(pointer)
        whole = builder.add(version, builder.and_(version, _I64(1)))
        builder.store_atomic(whole, pointer, "release", 8)
        return compiler.get_dummy_value()

    return types.void(types.int64), codegen


# -- bitmaps ---------------------------------------------------------------------------------------------------------


def _bit(builder: Any, base: Any, index: Any) -> tuple[Any, Any]:
    pointer = word_pointer(builder, element(builder, base, builder.lshr(index, _I64(6)), 8))
    return pointer, builder.shl(_I64(1), builder.and_(index, _I64(63)))


@intrinsic
def set_bit(typingctx: Any, base: Any, index: Any) -> Any:
    """Set a bit of a bitmap."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, bit = _bit(builder, *args)
        builder.store(builder.or_(builder.load(pointer), bit), pointer)
        return compiler.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def unset_bit(typingctx: Any, base: Any, index: Any) -> Any:
    """Clear a bit of a bitmap."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, bit = _bit(builder, *args)
        builder.store(builder.and_(builder.load(pointer), builder.not_(bit)), pointer)
        return compiler.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def test_bit(typingctx: Any, base: Any, index: Any) -> Any:
    """Whether a bit is set."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, bit = _bit(builder, *args)
        return builder.icmp_unsigned("!=", builder.and_(builder.load(pointer), bit), _I64(0))

    return types.boolean(types.int64, types.int64), codegen


# -- coverage --------------------------------------------------------------------------------------------------------


def _coverage(builder: Any, context: Any, run: Any, word: Any) -> Any:
    line = element(builder, context_word(builder, context, RUNS), run, RUN_BYTES)
    near = element(builder, builder.add(line, _I64(RUN_COVERAGE)), word, 8)
    row = builder.mul(run, context_word(builder, context, WIDE_STRIDE))
    beyond = builder.sub(builder.add(row, word), _I64(INLINE_WORDS))
    far = element(builder, context_word(builder, context, WIDE), beyond, 8)
    return builder.select(builder.icmp_signed("<", word, _I64(INLINE_WORDS)), near, far)


def _column(builder: Any, args: Any) -> tuple[Any, Any]:
    address = _coverage(builder, args[0], args[1], builder.lshr(args[2], _I64(6)))
    return word_pointer(builder, address), builder.shl(_I64(1), builder.and_(args[2], _I64(63)))


@intrinsic
def coverage_address(typingctx: Any, context: Any, run: Any, word: Any) -> Any:
    """Address of one of a run's coverage words."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _coverage(builder, *args)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def covers(typingctx: Any, context: Any, run: Any, column: Any) -> Any:
    """Whether a column holds a run."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, bit = _column(builder, args)
        return builder.icmp_unsigned("!=", builder.and_(builder.load(pointer), bit), _I64(0))

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def set_cover(typingctx: Any, context: Any, run: Any, column: Any) -> Any:
    """Add a column to the holders of a run."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, bit = _column(builder, args)
        builder.store(builder.or_(builder.load(pointer), bit), pointer)
        return compiler.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def unset_cover(typingctx: Any, context: Any, run: Any, column: Any) -> Any:
    """Remove a column from the holders of a run."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, bit = _column(builder, args)
        builder.store(builder.and_(builder.load(pointer), builder.not_(bit)), pointer)
        return compiler.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


# -- maps ------------------------------------------------------------------------------------------------------------


@intrinsic
def tag_of(typingctx: Any, context: Any, key: Any) -> Any:
    """Hash a 64-bit key to 32 bits. Keys may be any numbers, including consecutive small ones.

    Each tree has its own salt, so that a client cannot choose prompts whose blocks all fall into one segment.
    """

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        return mixed(builder, builder.xor(args[1], context_word(builder, args[0], SALT)))

    return types.int64(types.int64, types.int64), codegen


def _segment(builder: Any, context: Any, which: Any, tag: Any) -> Any:
    words = element(builder, context, which, 8)
    depth = builder.load(word_pointer(builder, builder.add(words, _I64(MAP_DEPTH * 8))))
    directory = builder.load(word_pointer(builder, builder.add(words, _I64(MAP_DIRECTORY * 8))))
    index = builder.lshr(tag, builder.sub(_I64(32), depth))
    number = builder.load(builder.inttoptr(element(builder, directory, index, 4), _I32.as_pointer()))
    first = context_word(builder, context, SEGMENTS)
    return builder.add(first, builder.shl(builder.sext(number, _I64), _I64(SEGMENT_SHIFT)))


@intrinsic
def segment_of(typingctx: Any, context: Any, which: Any, tag: Any) -> Any:
    """Address of the segment to which a tag belongs."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _segment(builder, *args)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def home_address(typingctx: Any, context: Any, which: Any, tag: Any) -> Any:
    """Address of the slot at which probing for a tag begins, for prefetching."""

    def codegen(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        return element(builder, _segment(builder, *args), builder.and_(args[2], _I64(SEGMENT_SLOTS - 1)), 8)

    return types.int64(types.int64, types.int64, types.int64), codegen
