"""Synthetic tokens: answers and prompts as pure functions of a seed and a position.

What lives here: the tokens of answers, and the mixing functions that traces use as well. What must not: state.
"""

from __future__ import annotations

import sys
from array import array

import numpy as np
import numpy.typing as npt
import xxhash

from streams.core.ids import U64_MASK

BYTES_PER_TOKEN = 4

#: Answers are printable ASCII. With the live server's tokenizer, one token per byte, a client that appends an answer's
#: text to its next prompt therefore hits the blocks that the answer left in the cache.
ANSWER_TOKEN_FIRST = 32
ANSWER_TOKENS_DISTINCT = 95

#: Odd constants of `greedy_tokens`: the base of its polynomial (PCG's multiplier), and one that mixes its value.
_BASE = 6364136223846793005
_MIXER = 0x9E3779B97F4A7C15


def answer_tokens(output_seed: int, start: int, count: int) -> bytes:
    """Return tokens of an answer as u32 LE [count]: a pure function of the seed and the position in the sequence.

    start: position of the first token, counted from the prompt's first token. So a generation that is resumed on
    another engine, with its output so far appended to the prompt, continues with the same tokens.
    """
    positions = np.arange(start, start + count, dtype=np.uint64)
    mixed = mix64(positions + np.uint64(mix_int(output_seed)))
    return (mixed % np.uint64(ANSWER_TOKENS_DISTINCT) + np.uint64(ANSWER_TOKEN_FIRST)).astype("<u4").tobytes()


def greedy_tokens(prompt: bytes, count: int) -> bytes:
    """Return an answer as u32 LE [count] in which each token is a function of all tokens before it.

    prompt: u32 LE. So a generation that is resumed with its output so far appended to the prompt continues unchanged,
    as with greedy decoding, and a token that is wrong, missing or repeated there changes every token after it.
    """
    state = _polynomial(prompt)
    tokens = array("I")
    for _ in range(count):
        token = ANSWER_TOKEN_FIRST + (((state ^ (state >> 31)) * _MIXER & U64_MASK) >> 33) % ANSWER_TOKENS_DISTINCT
        tokens.append(token)
        state = (state * _BASE + token + 1) & U64_MASK
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _polynomial(tokens: bytes) -> int:
    """Return the tokens, each plus one, as digits of a number to the base _BASE, mod 2^64."""
    digits = np.frombuffer(tokens, dtype="<u4").astype(np.uint64) + np.uint64(1)
    powers = np.ones(len(digits), dtype=np.uint64)
    powers[1:] = np.uint64(_BASE)
    # Integer arrays wrap, which is the arithmetic mod 2^64 that is wanted.
    return int((digits * np.multiply.accumulate(powers)[::-1]).sum(dtype=np.uint64))


def unpack_tokens(tokens: bytes) -> list[int]:
    """Return packed tokens, u32 LE, as integers."""
    values: list[int] = np.frombuffer(tokens, dtype="<u4").tolist()
    return values


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble counters one to one into values that look independent. Source: splitmix64's finalizer."""
    # The arithmetic wraps on purpose. NumPy wraps arrays silently and warns only about scalars.
    mixed = values * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def mix_int(value: int) -> int:
    """Scramble one integer of any size into a u64."""
    return xxhash.xxh3_64_intdigest((value & U64_MASK).to_bytes(8, "little"))
