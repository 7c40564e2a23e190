"""Hashes, byte for byte: the examples in docs/architecture.md, and the xxhash package as the reference."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core import hashing
from streams.core.hashing import (
    BASE_SEED,
    Placeholder,
    Tokens,
    content_hash,
    hash_seed,
    local_hashes,
    pack_hashes,
    pack_tokens,
    pad_value,
    request_hashes,
    salted_seed,
    sequence_hashes,
    unpack_hashes,
    with_pad_values,
)
from streams.core.ids import U32_MAX, U64_MASK, SequenceHash
from streams.core.kernels import xxh3
from streams.errors import BlockSizeMismatch, InvalidRequest
from tests.helpers.pages import block_of
from tests.helpers.reference import chain_hashes

GOLDEN_TOKENS = list(range(1, 13))
GOLDEN_LOCAL = [14643705804678351452, 16777012769546811212, 483935686894639516]
GOLDEN_SEQUENCE = [14643705804678351452, 4945711292740353085, 12583592247330656132]

#: Facts from public tests; they exist only next to the checkout in which the project is developed.
CONFORMANCE = Path(__file__).parents[3] / "shared" / "conformance" / "cases.jsonl"

INTEGER_DTYPES = ["i1", "u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8"]

u32s = st.integers(0, U32_MAX)
u64s = st.integers(0, U64_MASK)


def reference_local(tokens: list[int], block_size: int, seed: int = 1337) -> list[int]:
    """Reference for local hashes: one block at a time, by the formula."""
    blocks = [tokens[first : first + block_size] for first in range(0, len(tokens) - block_size + 1, block_size)]
    return [xxhash.xxh3_64_intdigest(struct.pack(f"<{block_size}I", *block), seed) for block in blocks]


def test_the_examples_in_the_documentation() -> None:
    """Twelve tokens in blocks of four have the hashes that NVIDIA Dynamo computes."""
    local = local_hashes(GOLDEN_TOKENS, 4)
    assert local.tolist() == GOLDEN_LOCAL
    assert sequence_hashes(local).tolist() == GOLDEN_SEQUENCE
    assert local.dtype == sequence_hashes(local).dtype == np.uint64


def test_the_page_has_the_golden_hashes() -> None:
    """The example of docs/architecture.md: its tokens and block size, and all hashes of both kinds."""
    _, _, example = block_of("docs/architecture.md", "local[i]").partition("\n\n")
    tokens, block_size, *hashes = map(int, re.findall(r"\d+", example.replace("1..", "")))
    assert (tokens, block_size) == (GOLDEN_TOKENS[-1], 4)
    assert hashes == GOLDEN_LOCAL + GOLDEN_SEQUENCE


@given(tokens=st.lists(u32s, max_size=70), block_size=st.integers(1, 17), seed=u64s)
@settings(max_examples=100, deadline=None)
def test_local_hashes_are_xxh3_of_each_full_block(tokens: list[int], block_size: int, seed: int) -> None:
    """A local hash is xxh3_64 of a block's tokens as u32 little-endian, with the seed; a partial block is dropped."""
    assert local_hashes(tokens, block_size, seed).tolist() == reference_local(tokens, block_size, seed)


@given(local=st.lists(u64s, max_size=40), cut=st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_a_chain_can_be_continued_from_a_parent(local: list[int], cut: int) -> None:
    """Sequence hashes equal the reference's, whether chained in one call or in two with the parent passed on."""
    cut = min(cut, len(local))
    whole = sequence_hashes(np.array(local, dtype=np.uint64)).tolist()
    assert whole == chain_hashes(local)
    parent = SequenceHash(whole[cut - 1]) if cut else None
    assert sequence_hashes(np.array(local[cut:], dtype=np.uint64), parent).tolist() == whole[cut:]


def test_a_first_blocks_sequence_hash_is_its_local_hash() -> None:
    """At the root, the sequence hash is the local hash; a parent of 0 is a parent, not the root."""
    local = np.array([5], dtype=np.uint64)
    assert sequence_hashes(local).tolist() == [5]
    assert sequence_hashes(local, SequenceHash(0)).tolist() == chain_hashes([5], 0) != [5]


@pytest.mark.parametrize(("n_tokens", "n_blocks"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_a_partial_last_block_is_dropped(n_tokens: int, n_blocks: int) -> None:
    """Only full blocks are hashed."""
    assert len(local_hashes(list(range(n_tokens)), 4)) == n_blocks


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_at_least_one_token(block_size: int) -> None:
    """A smaller block size raises BlockSizeMismatch."""
    with pytest.raises(BlockSizeMismatch):
        local_hashes([1, 2], block_size)


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_tokens_of_every_integer_dtype_hash_alike(dtype: str) -> None:
    """The width, byte order and strides of the caller's array do not matter."""
    tokens = np.array(GOLDEN_TOKENS, dtype=dtype)
    assert local_hashes(tokens, 4).tolist() == GOLDEN_LOCAL
    strided = np.repeat(tokens, 2)[::2]
    assert local_hashes(strided, 4).tolist() == GOLDEN_LOCAL


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_tokens_of_every_array_type_hash_alike(code: str) -> None:
    """An `array.array` of any integer type gives the same hashes."""
    assert local_hashes(array(code, GOLDEN_TOKENS), 4).tolist() == GOLDEN_LOCAL


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: range(tokens[0], tokens[-1] + 1)])
@pytest.mark.parametrize("packed", [bytes, bytearray, memoryview])
def test_tokens_in_every_container_hash_alike(kind: Any, packed: Any) -> None:
    """Lists, tuples, ranges, NumPy's integers and u32 little-endian bytes give the same hashes."""
    assert local_hashes(kind(GOLDEN_TOKENS), 4).tolist() == GOLDEN_LOCAL
    assert local_hashes(list(np.array(GOLDEN_TOKENS)), 4).tolist() == GOLDEN_LOCAL
    assert local_hashes(packed(pack_tokens(GOLDEN_TOKENS)), 4).tolist() == GOLDEN_LOCAL


@pytest.mark.parametrize("empty", [[], (), b"", np.array([], dtype=np.int64), array("I")])
def test_no_tokens_are_no_blocks(empty: Tokens) -> None:
    """Every empty container gives no hashes."""
    assert local_hashes(empty, 4).tolist() == []
    assert pack_tokens(empty) == b""


@pytest.mark.parametrize("value", [0, U32_MAX])
def test_the_ends_of_u32_are_tokens(value: int) -> None:
    """The smallest and greatest u32 are valid tokens in lists, tuples and arrays."""
    raw = value.to_bytes(4, "little")
    assert pack_tokens([value]) == pack_tokens((value,)) == pack_tokens(np.array([value])) == raw
    assert pack_tokens(np.array([value], dtype=np.uint64)) == raw


@pytest.mark.parametrize("value", [-1, U32_MAX + 1, -(1 << 63), U64_MASK, 1 << 64])
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("other", [7, np.int64(7)])
def test_a_token_outside_u32_is_named(value: int, kind: Any, other: Any) -> None:
    """The error states the position and the value of the token, whatever the other tokens are."""
    with pytest.raises(InvalidRequest, match=rf"token 2 is {value}\b"):
        local_hashes(kind([other, other, value, other]), 4)


@pytest.mark.parametrize(
    ("dtype", "value"), [("i1", -1), ("<i4", -5), ("<i8", U32_MAX + 1), ("<u8", U64_MASK), (">i8", -(1 << 63))]
)
def test_a_token_of_an_array_outside_u32_is_named(dtype: str, value: int) -> None:
    """The error states the position and the value of the token, for every dtype that can hold it."""
    tokens = np.array([1, 2, value, value], dtype=dtype)
    with pytest.raises(InvalidRequest, match=rf"token 2 is {value}\b"):
        pack_tokens(tokens)


@pytest.mark.parametrize("value", [1.5, "7", None, [1]])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_token_that_is_not_an_integer_is_named(value: Any, kind: Any) -> None:
    """The error states the position of the token and what it is."""
    with pytest.raises(InvalidRequest, match="token 1 is "):
        pack_tokens(kind([1, value, 3]))


@pytest.mark.parametrize(
    "tokens", [np.array([1.0]), np.array([[1, 2]]), np.array(["a"]), np.array([None]), array("d", [1])]
)
def test_an_array_that_is_not_one_dimension_of_integers_is_refused(tokens: Any) -> None:
    """Arrays of floats, of two dimensions, of text or of objects raise InvalidRequest."""
    with pytest.raises(InvalidRequest):
        pack_tokens(tokens)


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 5, 4095])
def test_packed_tokens_have_four_bytes_each(n_bytes: int) -> None:
    """A number of bytes that is not a multiple of four raises InvalidRequest."""
    with pytest.raises(InvalidRequest):
        local_hashes(bytes(n_bytes), 4)


@pytest.mark.parametrize(("lora_name", "namespace"), [(None, None), ("", ""), ("", None), (None, "")])
def test_no_adapter_and_no_namespace_leave_the_seed(lora_name: str | None, namespace: str | None) -> None:
    """For adapter and namespace, None and "" both leave the seed unchanged."""
    assert hash_seed(lora_name, namespace) == BASE_SEED == 1337


def test_adapter_and_namespace_are_added_to_the_seed() -> None:
    """Each is hashed with its own seed, so an adapter is never mistaken for a namespace; the sum wraps at 2^64."""
    lora, namespace = xxhash.xxh3_64_intdigest("poet é".encode(), 0), xxhash.xxh3_64_intdigest(b"a", 1)
    assert hash_seed("poet é") == (1337 + lora) % 2**64
    assert hash_seed(None, "a") == (1337 + namespace) % 2**64
    assert hash_seed("poet é", "a") == (1337 + lora + namespace) % 2**64
    assert hash_seed("x") != hash_seed(None, "x")
    assert 1337 + lora + namespace > U64_MASK  # this pair does wrap


@given(hashes=st.lists(u64s, max_size=20))
@settings(max_examples=50, deadline=None)
def test_hashes_are_packed_little_endian(hashes: list[int]) -> None:
    """Hashes are packed in eight bytes each, and unpacked to the same values."""
    packed = pack_hashes(hashes)
    assert packed == struct.pack(f"<{len(hashes)}Q", *hashes) == pack_hashes(np.array(hashes, dtype=">u8"))
    assert unpack_hashes(packed).tolist() == hashes


@pytest.mark.parametrize("n_bytes", [1, 7, 9, 15])
def test_packed_hashes_have_eight_bytes_each(n_bytes: int) -> None:
    """A number of bytes that is not a multiple of eight raises InvalidRequest."""
    with pytest.raises(InvalidRequest):
        unpack_hashes(bytes(n_bytes))


@pytest.mark.parametrize("seed", [0, 1337, U64_MASK, random.Random(20).getrandbits(64)])
@pytest.mark.parametrize("first", range(1, 4097, 512))
def test_every_block_size_is_hashed_like_the_package_does(first: int, seed: int) -> None:
    """Two blocks and their chain agree for all lengths from 4 to 16,384 bytes, which covers every path of XXH3."""
    print(f"{seed=}")
    raw = np.random.default_rng(7).bytes(2 * 4096 * 4)
    for block_size in range(first, first + 512):
        width = block_size * 4
        local, sequence = request_hashes(raw[: 2 * width], block_size, seed)
        expected = [xxhash.xxh3_64_intdigest(raw[at : at + width], seed) for at in (0, width)]
        assert local.tolist() == expected, block_size
        assert sequence.tolist() == chain_hashes(expected), block_size


@pytest.mark.parametrize("n_bytes", [236, 240, 244, 1020, 1024, 1028, 2044, 2048, 2052, 16384, 16388, 1 << 20])
def test_input_around_the_rounds_of_long_digests(n_bytes: int) -> None:
    """Hashes agree around 240 bytes, where XXH3 switches algorithms, and around its rounds of 1,024 bytes."""
    raw = np.random.default_rng(n_bytes).bytes(n_bytes)
    assert local_hashes(raw, n_bytes // 4, 99).tolist() == [xxhash.xxh3_64_intdigest(raw, 99)]


@given(
    tokens=st.lists(u32s, max_size=90),
    block_size=st.one_of(st.integers(1, 20), st.just(64)),
    seed=u64s,
    eagle=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_one_pass_gives_the_same_hashes_as_two(tokens: list[int], block_size: int, seed: int, eagle: bool) -> None:
    """`request_hashes` equals `local_hashes` and `sequence_hashes`, with and without overlapping windows."""
    local, sequence = request_hashes(tokens, block_size, seed, eagle=eagle)
    assert local.tolist() == local_hashes(tokens, block_size, seed, eagle=eagle).tolist()
    assert sequence.tolist() == sequence_hashes(local).tolist() == chain_hashes(local.tolist())
    assert local.dtype == sequence.dtype == np.uint64


@given(tokens=st.lists(u32s, max_size=90), block_size=st.integers(1, 20), seed=u64s)
@settings(max_examples=100, deadline=None)
def test_eagle_windows_have_one_more_token(tokens: list[int], block_size: int, seed: int) -> None:
    """EAGLE hashes all full windows of block_size + 1 tokens, which begin block_size tokens apart."""
    windows = [tokens[at : at + block_size + 1] for at in range(0, len(tokens), block_size)]
    full = [window for window in windows if len(window) == block_size + 1]
    expected = [xxhash.xxh3_64_intdigest(struct.pack(f"<{len(window)}I", *window), seed) for window in full]
    assert local_hashes(tokens, block_size, seed, eagle=True).tolist() == expected
    assert len(expected) == max(len(tokens) - 1, 0) // block_size


@given(tokens=st.lists(u32s, max_size=70), block_size=st.integers(1, 17), eagle=st.booleans(), offset=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_every_kind_of_input_hashes_alike(tokens: list[int], block_size: int, eagle: bool, offset: int) -> None:
    """Arrays that are read-only, unaligned, strided, wider than a token or of either byte order hash alike."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    shifted = bytearray(bytes(offset) + packed)
    writable: Any = np.array(tokens, dtype=np.uint32)
    doubled: Any = np.repeat(np.frombuffer(packed, dtype=np.uint8), 2)
    kinds: list[Any] = [
        tuple(tokens),
        array("I", tokens),
        array("Q", tokens),
        writable,
        np.array(tokens, dtype=">u4"),
        np.array(tokens, dtype=np.int64),
        np.array(tokens[::-1], dtype=np.uint32)[::-1],
        np.frombuffer(packed, dtype=np.uint32),
        np.frombuffer(memoryview(shifted)[offset:], dtype=np.uint32),
        packed,
        bytearray(packed),
        memoryview(packed),
        memoryview(shifted)[offset:],
        memoryview(writable),
        memoryview(doubled)[::2],
    ]
    expected = [hashes.tolist() for hashes in request_hashes(tokens, block_size, eagle=eagle)]
    for kind in kinds:
        assert [hashes.tolist() for hashes in request_hashes(kind, block_size, eagle=eagle)] == expected
        assert pack_tokens(kind) == packed


def test_hashes_of_every_layout_chain_alike() -> None:
    """Hashes that are read-only, strided, of the other byte order or at an odd address chain alike."""
    local = np.array([1, U64_MASK, 3], dtype=np.uint64)
    expected = chain_hashes(local.tolist())
    odd = memoryview(b"x" + pack_hashes(local))[1:]
    layouts: list[Any] = [unpack_hashes(pack_hashes(local)), np.repeat(local, 2)[::2], local.astype(">u8")]
    for layout in [*layouts, np.frombuffer(odd, dtype=np.uint64), local.tolist()]:
        assert sequence_hashes(layout).tolist() == expected


def test_kernels_are_compiled_only_for_their_declared_signatures() -> None:
    """Only writable and read-only input has a signature; another one would be compiled for seconds during a request."""
    test_hashes_of_every_layout_chain_alike()
    local_hashes(np.zeros(4, dtype=np.uint32), 4)
    local_hashes(bytes(16), 4)
    compiled: list[Any] = [xxh3.hash_blocks, xxh3.chain_blocks]
    assert [len(kernel.signatures) for kernel in compiled] == [2, 2]


@given(previous=u64s, local=u64s, byte=st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_digests_for_other_kernels_equal_those_of_the_package(previous: int, local: int, byte: int) -> None:
    """One step of the chain, and the digest of a byte followed by a u64, equal the package's digests."""
    step = xxh3.chain_step(np.uint64(previous), np.uint64(local))
    assert step == xxhash.xxh3_64_intdigest(struct.pack("<QQ", previous, local), 1337)
    nine = xxh3.digest_9(np.uint8(byte), np.uint64(local))
    assert nine == xxhash.xxh3_64_intdigest(struct.pack("<BQ", byte, local), 0)


@given(tokens=st.lists(u32s, max_size=70), block_size=st.integers(1, 70), seed=u64s, parent=st.none() | u64s)
@settings(max_examples=100, deadline=None)
def test_the_package_gives_the_same_hashes_as_the_kernels(
    tokens: list[int], block_size: int, seed: int, parent: int | None
) -> None:
    """Every function with a kernel gives the same hashes without it."""

    def answers() -> list[list[int]]:
        previous = None if parent is None else SequenceHash(parent)
        given = (tokens, block_size, seed)
        whole = [*request_hashes(*given), *request_hashes(*given, eagle=True), local_hashes(*given, eagle=True)]
        return [hashes.tolist() for hashes in (*whole, sequence_hashes(local_hashes(*given), previous))]

    assert hashing.KERNELS_AVAILABLE
    compiled = answers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "KERNELS_AVAILABLE", False)
        assert answers() == compiled


def test_hashing_works_without_numba() -> None:
    """A process that does without numba sets KERNELS_AVAILABLE to False and computes the documented hashes."""
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "from streams.core.kernels.available import do_without_kernels; do_without_kernels()\n"
        "from streams.core import hashing\n"
        "print(hashing.KERNELS_AVAILABLE, *hashing.request_hashes(list(range(1, 13)), 4)[1].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", *map(str, GOLDEN_SEQUENCE)]


@pytest.mark.parametrize("call", [local_hashes, request_hashes])
def test_all_hash_functions_check_their_arguments(call: Any) -> None:
    """Every function checks block size, tokens and bytes in the same way."""
    with pytest.raises(BlockSizeMismatch):
        call([1], 0)
    with pytest.raises(InvalidRequest, match="token 1 is -1"):
        call(np.array([5, -1]), 1)
    with pytest.raises(InvalidRequest):
        call(b"123", 1)


@pytest.mark.parametrize(
    ("mm_hash", "expected"),
    [
        (0, 1_000_000),
        (1, 1_000_001),
        (2**30 - 1, 1_000_000 + 2**30 - 1),
        (2**30, 1_000_000),
        (U64_MASK, 1_000_000 + 2**30 - 1),
    ],
)
def test_a_pad_value_is_the_low_30_bits_above_a_million(mm_hash: int, expected: int) -> None:
    """Every hash gives a pad value that is a valid token."""
    assert pad_value(mm_hash) == expected <= U32_MAX


def test_placeholders_become_pad_values() -> None:
    """Pad values replace the tokens of placeholders and no others, and the caller's tokens stay unchanged."""
    tokens = np.arange(8, dtype=np.uint32)
    padded = with_pad_values(tokens, [Placeholder(1, 2, 7), (6, 2, 2**30 + 9), (0, 0, 5)])
    assert padded.tolist() == [0, 1_000_007, 1_000_007, 3, 4, 5, 1_000_009, 1_000_009]
    assert tokens.tolist() == list(range(8))
    assert with_pad_values([1, 2, 3], [(0, 3, 1), (1, 1, 2)]).tolist() == [1_000_001, 1_000_002, 1_000_001]
    assert local_hashes(padded, 4).tolist() == reference_local(padded.tolist(), 4)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (0, 5), (4, 1), (5, 0), (1 << 70, 1)])
def test_a_placeholder_outside_the_tokens_is_refused(offset: int, length: int) -> None:
    """The error names the placeholder by its index."""
    with pytest.raises(InvalidRequest, match="placeholder 1 "):
        with_pad_values([1, 2, 3, 4], [(0, 4, 1), (offset, length, 1)])


def conformance(kind: str) -> list[Any]:
    if not CONFORMANCE.is_file():
        return [pytest.param(None, marks=pytest.mark.skip("the conformance cases are not part of the project"))]
    cases = [json.loads(line) for line in CONFORMANCE.read_text().splitlines()]
    return [pytest.param(case, id=case["name"]) for case in cases if case["kind"] == kind]


@pytest.mark.parametrize("case", conformance("hash"))
def test_facts_from_public_tests_hold(case: dict[str, Any]) -> None:
    """Published hashes and block counts of other projects hold."""
    query = case["query"]
    if isinstance(query, list):
        counts = [len(local_hashes(list(range(each["num_tokens"])), each["block_size"])) for each in query]
        assert counts == case["expect"]
    elif "tokens" in query:
        local = local_hashes(query["tokens"], case["block_size"], query["seed"])
        assert local.tolist() == case["expect"]["local"]
        assert sequence_hashes(local).tolist() == case["expect"]["sequence"]
    else:
        # For raw bytes, the fact is about the hash function itself: 9 bytes are not a whole number of tokens.
        assert xxhash.xxh3_64_intdigest(query["bytes_utf8"].encode(), query["seed"]) == case["expect"]
        assert query["seed"] == BASE_SEED


INVALID_HASHES: list[Any] = [
    np.ones(2),
    np.ones(2, dtype=np.int64),
    np.ones(2, dtype=np.uint32),
    np.ones((2, 2), dtype=np.uint64),
    np.ones(2, dtype=bool),
    [-1],
    [U64_MASK + 1],
    [1.5],
    [2, True],
    [[1, 2]],
    5,
    None,
    "12",
]
INVALID_NUMBERS: list[Any] = [-1, U64_MASK + 1, 1.0, True, "1", None]


@pytest.mark.parametrize("hashes", INVALID_HASHES, ids=str)
def test_invalid_hashes_are_not_chained(hashes: Any) -> None:
    """Invalid hashes raise InvalidRequest instead of being truncated, flattened or reinterpreted."""
    with pytest.raises(InvalidRequest):
        sequence_hashes(hashes)


@pytest.mark.parametrize("number", INVALID_NUMBERS, ids=str)
def test_an_invalid_u64_is_refused_as_parent_seed_and_content_hash(number: Any) -> None:
    """Numbers that are out of range or of another type raise InvalidRequest; only a parent may be None."""
    with pytest.raises(InvalidRequest):
        local_hashes([1, 2, 3], 2, number)
    with pytest.raises(InvalidRequest):
        pad_value(number)
    with pytest.raises(InvalidRequest):
        with_pad_values([1, 2, 3], [(0, 1, number)])
    if number is not None:
        with pytest.raises(InvalidRequest):
            sequence_hashes(np.ones(2, dtype=np.uint64), number)


@pytest.mark.parametrize("hashes", INVALID_HASHES, ids=str)
def test_invalid_hashes_are_not_packed(hashes: Any) -> None:
    """Negative numbers are not wrapped, and fractions are not truncated."""
    with pytest.raises(InvalidRequest):
        pack_hashes(hashes)


@pytest.mark.parametrize("packed", ["12345678", 8, None, [0] * 8, np.zeros(8, dtype=np.uint8)], ids=str)
def test_only_bytes_are_unpacked(packed: Any) -> None:
    """Anything but bytes raises InvalidRequest."""
    with pytest.raises(InvalidRequest):
        unpack_hashes(packed)


@pytest.mark.parametrize("block_size", [0, -1, 1.0, 16.5, True, "16", None, [16]], ids=str)
def test_an_invalid_block_size_is_refused(block_size: Any) -> None:
    """A block size that is not an integer of at least 1 raises BlockSizeMismatch."""
    with pytest.raises(BlockSizeMismatch):
        local_hashes([1, 2, 3], block_size)


@pytest.mark.parametrize("name", [5, b"x", ["x"], True, "\ud800"], ids=repr)
def test_an_invalid_name_gives_no_seed(name: Any) -> None:
    """A name that is not valid text raises InvalidRequest, as an adapter and as a namespace."""
    with pytest.raises(InvalidRequest):
        hash_seed(name)
    with pytest.raises(InvalidRequest):
        hash_seed(None, name)


@pytest.mark.parametrize(
    "tokens", [[True, 2], [5, False], (7, 8, True), [[1, 2], [3]], [[]], None, 5, "12", {1: 2}], ids=str
)
def test_invalid_tokens_are_refused(tokens: Any) -> None:
    """True and nested lists, among others, are not valid tokens."""
    with pytest.raises(InvalidRequest):
        local_hashes(tokens, 1)


@pytest.mark.parametrize(
    "placeholder", [(0, 1), (0, 1, 2, 3), 5, None, (0.0, 1, 2), (0, "1", 2), (True, 1, 2)], ids=str
)
def test_an_invalid_placeholder_is_refused(placeholder: Any) -> None:
    """A placeholder that is not an offset, a length and a hash, all integers, raises InvalidRequest."""
    with pytest.raises(InvalidRequest):
        with_pad_values([1, 2, 3], [placeholder])


def test_a_cache_salt_changes_the_seed_of_the_first_block_only() -> None:
    """The chain carries the salt to the others. An empty salt is none, and the same text as a namespace is not it."""
    tokens, seed = list(range(1, 13)), hash_seed("poet")
    salted = salted_seed(seed, "s")
    assert salted == (seed + xxhash.xxh3_64_intdigest(b"s", 2)) % 2**64
    assert salted_seed(seed) == salted_seed(seed, "") == seed
    plain, (local, chain) = local_hashes(tokens, 4, seed), request_hashes(tokens, 4, seed, first_seed=salted)
    first = local_hashes(tokens[:4], 4, salted)
    assert local.tolist() == local_hashes(tokens, 4, seed, first_seed=salted).tolist() == [*first, *plain[1:]]
    assert chain.tolist() == sequence_hashes(local).tolist()
    assert not set(chain.tolist()) & set(sequence_hashes(plain).tolist())
    assert salted_seed(hash_seed(), "s") != hash_seed(namespace="s")


def test_a_short_prompt_with_a_cache_salt_has_no_blocks() -> None:
    """Nothing is hashed of less than a block."""
    assert request_hashes([1, 2], 4, first_seed=5)[1].tolist() == []


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("0123456789abcdef" + "0" * 48, 0x0123456789ABCDEF),
        ("my image", xxhash.xxh3_64_intdigest(b"my image")),
        ("z" * 64, xxhash.xxh3_64_intdigest(b"z" * 64)),
    ],
)
def test_an_identifier_of_an_image_becomes_its_hash(identifier: str, expected: int) -> None:
    """A digest in hexadecimal is cut to its first 16 digits, as Dynamo does it; any other text is hashed."""
    assert content_hash(identifier) == expected
