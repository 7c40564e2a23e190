"""Hashes byte for byte: the goldens of DESIGN section 2, and xxhash itself as the witness."""

from __future__ import annotations

import json
import struct
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import (
    BASE_SEED,
    Tokens,
    hash_seed,
    local_hashes,
    pack_hashes,
    pack_tokens,
    sequence_hashes,
    unpack_hashes,
)
from streams.core.ids import U32_MAX, U64_MASK, SequenceHash
from streams.errors import BlockSizeMismatch, InvalidRequest
from tests.reference import chain_hashes

GOLDEN_TOKENS = list(range(1, 13))
GOLDEN_LOCAL = [14643705804678351452, 16777012769546811212, 483935686894639516]
GOLDEN_SEQUENCE = [14643705804678351452, 4945711292740353085, 12583592247330656132]

#: Facts from public tests; beside the checkout where the project is developed, nowhere else.
CONFORMANCE = Path(__file__).parents[2] / "shared" / "conformance" / "cases.jsonl"

INTEGER_DTYPES = ["i1", "u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8"]

u32s = st.integers(0, U32_MAX)
u64s = st.integers(0, U64_MASK)


def witness_local(tokens: list[int], block_size: int, seed: int = 1337) -> list[int]:
    """Block hashes, one at a time, by the formula."""
    blocks = [tokens[first : first + block_size] for first in range(0, len(tokens) - block_size + 1, block_size)]
    return [xxhash.xxh3_64_intdigest(struct.pack(f"<{block_size}I", *block), seed) for block in blocks]


def test_the_goldens_of_the_design() -> None:
    """Twelve tokens in blocks of four, as NVIDIA Dynamo hashes them."""
    local = local_hashes(GOLDEN_TOKENS, 4)
    assert local.tolist() == GOLDEN_LOCAL
    assert sequence_hashes(local).tolist() == GOLDEN_SEQUENCE
    assert local.dtype == sequence_hashes(local).dtype == np.uint64


@given(tokens=st.lists(u32s, max_size=70), block_size=st.integers(1, 17), seed=u64s)
@settings(max_examples=100, deadline=None)
def test_local_hashes_are_xxh3_of_each_full_block(tokens: list[int], block_size: int, seed: int) -> None:
    """Tokens as u32 little-endian under the seed; what is left over at the end is dropped."""
    assert local_hashes(tokens, block_size, seed).tolist() == witness_local(tokens, block_size, seed)


@given(local=st.lists(u64s, max_size=40), cut=st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_a_chain_goes_on_where_it_was_cut(local: list[int], cut: int) -> None:
    """Sequence hashes are the witness's, whole or in two parts with the parent handed over."""
    cut = min(cut, len(local))
    whole = sequence_hashes(np.array(local, dtype=np.uint64)).tolist()
    assert whole == chain_hashes(local)
    parent = SequenceHash(whole[cut - 1]) if cut else None
    assert sequence_hashes(np.array(local[cut:], dtype=np.uint64), parent).tolist() == whole[cut:]


def test_a_first_blocks_sequence_hash_is_its_local_hash() -> None:
    """At the root there is nothing to chain; a parent of 0 is a parent."""
    local = np.array([5], dtype=np.uint64)
    assert sequence_hashes(local).tolist() == [5]
    assert sequence_hashes(local, SequenceHash(0)).tolist() == chain_hashes([5], 0) != [5]


@pytest.mark.parametrize(("n_tokens", "n_blocks"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_a_partial_last_block_is_dropped(n_tokens: int, n_blocks: int) -> None:
    """Just full blocks are hashed."""
    assert len(local_hashes(list(range(n_tokens)), 4)) == n_blocks


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_at_least_one_token(block_size: int) -> None:
    """Anything less is refused."""
    with pytest.raises(BlockSizeMismatch):
        local_hashes([1, 2], block_size)


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_tokens_of_every_integer_dtype_hash_alike(dtype: str) -> None:
    """Width and byte order of the caller's array do not matter, nor whether it lies in one piece."""
    tokens = np.array(GOLDEN_TOKENS, dtype=dtype)
    assert local_hashes(tokens, 4).tolist() == GOLDEN_LOCAL
    strided = np.repeat(tokens, 2)[::2]
    assert local_hashes(strided, 4).tolist() == GOLDEN_LOCAL


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_tokens_of_every_array_type_hash_alike(code: str) -> None:
    """`array.array` of any integer type."""
    assert local_hashes(array(code, GOLDEN_TOKENS), 4).tolist() == GOLDEN_LOCAL


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: range(tokens[0], tokens[-1] + 1)])
@pytest.mark.parametrize("packed", [bytes, bytearray, memoryview])
def test_tokens_in_every_container_hash_alike(kind: Any, packed: Any) -> None:
    """Lists, tuples and ranges, of NumPy's integers too, and u32 little-endian bytes."""
    assert local_hashes(kind(GOLDEN_TOKENS), 4).tolist() == GOLDEN_LOCAL
    assert local_hashes(list(np.array(GOLDEN_TOKENS)), 4).tolist() == GOLDEN_LOCAL
    assert local_hashes(packed(pack_tokens(GOLDEN_TOKENS)), 4).tolist() == GOLDEN_LOCAL


@pytest.mark.parametrize("empty", [[], (), b"", np.array([], dtype=np.int64), array("I")])
def test_no_tokens_are_no_blocks(empty: Tokens) -> None:
    """Whatever they come in."""
    assert local_hashes(empty, 4).tolist() == []
    assert pack_tokens(empty) == b""


@pytest.mark.parametrize("value", [0, U32_MAX])
def test_the_ends_of_u32_are_tokens(value: int) -> None:
    """In a list, in a tuple and in arrays."""
    raw = value.to_bytes(4, "little")
    assert pack_tokens([value]) == pack_tokens((value,)) == pack_tokens(np.array([value])) == raw
    assert pack_tokens(np.array([value], dtype=np.uint64)) == raw


@pytest.mark.parametrize("value", [-1, U32_MAX + 1, -(1 << 63), U64_MASK, 1 << 64])
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("other", [7, np.int64(7)])
def test_a_token_outside_u32_is_named(value: int, kind: Any, other: Any) -> None:
    """With its place and its value, whichever integers are around it."""
    with pytest.raises(InvalidRequest, match=rf"token 2 is {value}\b"):
        local_hashes(kind([other, other, value, other]), 4)


@pytest.mark.parametrize(
    ("dtype", "value"), [("i1", -1), ("<i4", -5), ("<i8", U32_MAX + 1), ("<u8", U64_MASK), (">i8", -(1 << 63))]
)
def test_a_token_of_an_array_outside_u32_is_named(dtype: str, value: int) -> None:
    """With its place and its value, in any dtype that has room for it."""
    tokens = np.array([1, 2, value, value], dtype=dtype)
    with pytest.raises(InvalidRequest, match=rf"token 2 is {value}\b"):
        pack_tokens(tokens)


@pytest.mark.parametrize("value", [1.5, "7", None, [1]])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_token_that_is_no_integer_is_named(value: Any, kind: Any) -> None:
    """With its place and what it is."""
    with pytest.raises(InvalidRequest, match="token 1 is "):
        pack_tokens(kind([1, value, 3]))


@pytest.mark.parametrize(
    "tokens", [np.array([1.0]), np.array([[1, 2]]), np.array(["a"]), np.array([None]), array("d", [1])]
)
def test_an_array_that_is_no_row_of_integers_is_refused(tokens: Any) -> None:
    """Floats, two dimensions, text and objects."""
    with pytest.raises(InvalidRequest):
        pack_tokens(tokens)


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 5, 4095])
def test_packed_tokens_are_whole(n_bytes: int) -> None:
    """Bytes that are no multiple of four are refused."""
    with pytest.raises(InvalidRequest):
        local_hashes(bytes(n_bytes), 4)


@pytest.mark.parametrize(("lora_name", "namespace"), [(None, None), ("", ""), ("", None), (None, "")])
def test_no_adapter_and_no_namespace_leave_the_seed(lora_name: str | None, namespace: str | None) -> None:
    """None and "" both mean none."""
    assert hash_seed(lora_name, namespace) == BASE_SEED == 1337


def test_adapter_and_namespace_are_added_to_the_seed() -> None:
    """Each hashed with its own seed, so that an adapter never passes for a namespace; the sum wraps at 2^64."""
    lora, namespace = xxhash.xxh3_64_intdigest("poet é".encode(), 0), xxhash.xxh3_64_intdigest(b"a", 1)
    assert hash_seed("poet é") == (1337 + lora) % 2**64
    assert hash_seed(None, "a") == (1337 + namespace) % 2**64
    assert hash_seed("poet é", "a") == (1337 + lora + namespace) % 2**64
    assert hash_seed("x") != hash_seed(None, "x")
    assert 1337 + lora + namespace > U64_MASK  # this pair does wrap


@given(hashes=st.lists(u64s, max_size=20))
@settings(max_examples=50, deadline=None)
def test_hashes_are_packed_little_endian(hashes: list[int]) -> None:
    """Eight bytes each, and back."""
    packed = pack_hashes(hashes)
    assert packed == struct.pack(f"<{len(hashes)}Q", *hashes) == pack_hashes(np.array(hashes, dtype=">u8"))
    assert unpack_hashes(packed).tolist() == hashes


@pytest.mark.parametrize("n_bytes", [1, 7, 9, 15])
def test_packed_hashes_are_whole(n_bytes: int) -> None:
    """Bytes that are no multiple of eight are refused."""
    with pytest.raises(InvalidRequest):
        unpack_hashes(bytes(n_bytes))


def conformance(kind: str) -> list[Any]:
    if not CONFORMANCE.is_file():
        return [pytest.param(None, marks=pytest.mark.skip("the conformance cases are not part of the project"))]
    cases = [json.loads(line) for line in CONFORMANCE.read_text().splitlines()]
    return [pytest.param(case, id=case["name"]) for case in cases if case["kind"] == kind]


@pytest.mark.parametrize("case", conformance("hash"))
def test_facts_from_public_tests_hold(case: dict[str, Any]) -> None:
    """Hashes and numbers of blocks that others published."""
    query = case["query"]
    if isinstance(query, list):
        counts = [len(local_hashes(list(range(each["num_tokens"])), each["block_size"])) for each in query]
        assert counts == case["expect"]
    elif "tokens" in query:
        local = local_hashes(query["tokens"], case["block_size"], query["seed"])
        assert local.tolist() == case["expect"]["local"]
        assert sequence_hashes(local).tolist() == case["expect"]["sequence"]
    else:
        # Of plain bytes the hash function itself is the fact: 9 bytes are no whole number of tokens.
        assert xxhash.xxh3_64_intdigest(query["bytes_utf8"].encode(), query["seed"]) == case["expect"]
        assert query["seed"] == BASE_SEED
