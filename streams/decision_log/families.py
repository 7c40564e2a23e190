"""Families of prompts: what a log may keep of a prompt, so that a trace can be rebuilt from it (pure).

What lives here: which of a prompt's sequence hashes are kept, and how they are salted. What must not: records.

A sequence hash identifies everything from a prompt's beginning to the end of a block. Every 512 tokens one of them is
kept: two requests with the same family begin with the same tokens up to there. Families are mixed with a key that
follows from a salt. Without the salt, nobody can check whether a prompt that they guess is in the log, or join the logs
of two scopes. The mixing is no encryption: it protects against readers of the log, not against those who also know the
salt.
"""

from __future__ import annotations

import functools
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.ids import HashArray, Int64Array

#: Tokens between two families, as in Mooncake's traces.
FAMILY_TOKENS = 512

#: Families of one prompt that are kept: 131,072 tokens. What follows counts as text that no other request shares.
FAMILIES_MAX = 256

#: Bits of a family, so that it is an exact number in JSON, and half of these numbers are left for other ids.
FAMILY_BITS = 52

#: Lengths of prompts whose positions are kept.
_LENGTHS_KEPT_MAX = 4096

_PERSON = b"kvs-family"


class FamilyKeys(NamedTuple):
    """The key of a salt."""

    before: np.uint64
    between: np.uint64


def family_keys(salt: str) -> FamilyKeys:
    """Derive the key from a salt."""
    before, between = np.frombuffer(blake2b(salt.encode(), digest_size=16, person=_PERSON).digest(), dtype="<u8")
    return FamilyKeys(np.uint64(before), np.uint64(between))


@functools.lru_cache(maxsize=_LENGTHS_KEPT_MAX)
def family_positions(n_blocks: int, block_size: int) -> Int64Array:
    """Positions of the blocks whose sequence hashes are kept: those with every 512th token, and the last one.

    n_blocks: full blocks of the prompt. Returns int64[n], n at most FAMILIES_MAX.
    """
    n = min(-(-n_blocks * block_size // FAMILY_TOKENS), FAMILIES_MAX)
    ends = np.arange(1, n + 1, dtype=np.int64) * FAMILY_TOKENS
    positions: Int64Array = np.minimum(-(-ends // block_size), n_blocks) - 1
    return positions


def family_hashes(chain: HashArray, block_size: int) -> HashArray:
    """The sequence hashes that are kept of a prompt: uint64[n]. chain: those of all its full blocks."""
    kept: HashArray = chain[family_positions(len(chain), block_size)]
    return kept


def salted(hashes: HashArray, keys: FamilyKeys) -> npt.NDArray[np.uint64]:
    """Turn sequence hashes into families: uint64[n], of FAMILY_BITS each."""
    mixed: npt.NDArray[np.uint64] = _mix(_mix(hashes ^ keys.before) ^ keys.between) >> np.uint64(64 - FAMILY_BITS)
    return mixed


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64, which changes half of the bits for each bit that changes."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
