"""LMCache's hashes of chunks, translated into our sequence hashes (pure).

What lives here: the names of chunks, and the search for the chunk that a chunk follows. What must not: who holds a
chunk (pools). Owner: a bridge, one for all instances, since a chunk has the same hash in each of them.

A store has the tokens of its chunk and their position, but not what precedes them. LMCache's hash of a chunk is BLAKE3
of the preceding chunk's hash and of the chunk's tokens. So the preceding one is found by trying those that end where
the chunk begins: first the one before it in the batch, then those that were stored or accessed last. A server reports
the chunks of a prompt in order, and accesses those that it has before it stores what follows them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from streams.core.hashing import BASE_SEED, TokenArray, local_hashes, pack_tokens, salted_seed, sequence_hashes
from streams.core.ids import Int64Array, SequenceHash
from streams.core.kernels.blake3 import SCRATCH_WORDS, find_parent
from streams.errors import InvalidRequest

#: Chunks whose names are kept, 500 bytes each. Without its predecessor's name, a chunk has no name of ours either.
NAMES_MAX = 1_048_576

#: Chunks that are tried as predecessors of one chunk, 3 us each.
TRIED_MAX = 256

#: Chunks that wait for their predecessors, 1.5 kB each with 256 tokens; and those of them that begin at the same token,
#: each of which is compared with every new chunk that ends there.
WAITING_MAX = 4096
WAITING_AT_MAX = 16

#: Tokens of a chunk. LMCache's default is 256.
CHUNK_TOKENS_MAX = 65_536

#: Bytes of BLAKE3's digest. Hashes of other algorithms cannot be verified.
_DIGEST_BYTES = 32


class Unnamed(enum.StrEnum):
    """Why a chunk has no name of ours. The values are in metrics."""

    NO_TOKENS = "no_tokens"  # the store has no tokens, or no position, and no earlier one had them
    BAD_TOKENS = "bad_tokens"
    UNKNOWN_PARENT = "unknown_parent"  # no chunk is known that it follows
    CHUNK_SIZE = "chunk_size"  # its tokens are no whole number of blocks


class NameSpace(NamedTuple):
    """What our hashes depend on besides tokens. first_seed: of the first block, which depends on the cache salt."""

    first_seed: int
    block_size: int


class ChunkAddress(NamedTuple):
    """A chunk in our hashes: those of its last block and of the block before that, and the last block's position.

    parent: None if the chunk is the first block of its prompt. n_blocks: that the chunk has.
    """

    sequence: SequenceHash
    parent: SequenceHash | None
    position: int
    n_blocks: int


#: A chunk's hash, in one name space.
NameKey = tuple[bytes, NameSpace]


def name_space(salt: str, block_size: int) -> NameSpace:
    """Return the name space of a salt."""
    return NameSpace(salted_seed(BASE_SEED, salt or None), block_size)


class ChunkNames:
    """The names of chunks. added: those that got a name since the caller emptied it."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._names: OrderedDict[NameKey, ChunkAddress] = OrderedDict()
        # By the token at which they end: chunks, the most recently used one last.
        self._ending: dict[tuple[int, NameSpace], OrderedDict[bytes, None]] = {}
        # By the token at which they begin: chunks whose predecessor is unknown, with their tokens.
        self._waiting: dict[tuple[int, NameSpace], dict[bytes, TokenArray]] = {}
        self._waiting_order: deque[tuple[int, NameSpace, bytes]] = deque()
        self._n_waiting = 0
        self._scratch = np.empty(SCRATCH_WORDS, dtype=np.int64)
        self.added: list[NameKey] = []

    def __len__(self) -> int:
        return len(self._names)

    def get(self, chunk_hash: bytes, space: NameSpace) -> ChunkAddress | None:
        """Return a chunk's address if it is known."""
        return self._names.get((chunk_hash, space))

    def adopt(self, chunk_hash: bytes, space: NameSpace, address: ChunkAddress) -> None:
        """Add a chunk whose address is known from elsewhere, and those that waited for it."""
        self._add(chunk_hash, space, address)

    def used(self, chunk_hash: bytes, space: NameSpace) -> None:
        """Note that a chunk was accessed, so that what is stored next may follow it."""
        address = self._names.get((chunk_hash, space))
        if address is not None:
            self._names.move_to_end((chunk_hash, space))
            ending = self._ending.get((_end_of(address, space), space))
            if ending is not None and chunk_hash in ending:
                ending.move_to_end(chunk_hash)

    def resolve(
        self, chunk_hash: bytes, space: NameSpace, tokens: bytes, offset: int, before: bytes = b""
    ) -> ChunkAddress | Unnamed:
        """Return the address of a chunk that was stored, or why it has none.

        tokens: JSON, b"" if unknown. offset: of its first token, negative if unknown. before: the hash of the chunk
        that was stored before it, which is tried first as its predecessor; b"" for none.
        """
        known = self._names.get((chunk_hash, space))
        if known is not None:
            self.used(chunk_hash, space)
            return known
        if not tokens or offset < 0:
            return Unnamed.NO_TOKENS
        if chunk_hash in self._waiting.get((offset, space), ()):
            return Unnamed.UNKNOWN_PARENT
        try:
            words = np.frombuffer(pack_tokens(msgspec.json.decode(tokens)), dtype="<u4")
        except (msgspec.DecodeError, InvalidRequest, TypeError, ValueError):
            return Unnamed.BAD_TOKENS
        block_size = space.block_size
        if words.size % block_size or offset % block_size or not 1 <= words.size <= CHUNK_TOKENS_MAX:
            return Unnamed.CHUNK_SIZE
        if offset == 0:
            return self._add(chunk_hash, space, _address(words, space, 0, None))
        if len(chunk_hash) != _DIGEST_BYTES:
            return Unnamed.UNKNOWN_PARENT
        parent = self._parent(chunk_hash, space, words, offset, before)
        if parent is None:
            self._wait(chunk_hash, space, words, offset)
            return Unnamed.UNKNOWN_PARENT
        return self._add(chunk_hash, space, _address(words, space, offset, parent.sequence))

    def _parent(
        self, chunk_hash: bytes, space: NameSpace, words: TokenArray, offset: int, before: bytes
    ) -> ChunkAddress | None:
        """Find the chunk that one follows, by its hash."""
        ending = self._ending.get((offset, space))
        if ending is None:
            return None
        wanted, tokens = _words(chunk_hash), words.astype(np.int64)
        if before in ending and find_parent(_words(before), tokens, wanted, self._scratch) == 0:
            return self._names[before, space]
        tried = list(islice(reversed(ending), TRIED_MAX))
        found = find_parent(_words(b"".join(tried)), tokens, wanted, self._scratch)
        return None if found < 0 else self._names[tried[found], space]

    def _add(self, chunk_hash: bytes, space: NameSpace, address: ChunkAddress) -> ChunkAddress:
        """Add a name, and then those of the chunks that waited for it."""
        added = [(chunk_hash, address)]
        while added:
            parent_hash, parent = added.pop()
            end = self._put(parent_hash, space, parent)
            if len(parent_hash) != _DIGEST_BYTES:
                continue
            for waiting, words in list(self._waiting.get((end, space), {}).items()):
                if find_parent(_words(parent_hash), words.astype(np.int64), _words(waiting), self._scratch) == 0:
                    self._forget_waiting(end, space, waiting)
                    added.append((waiting, _address(words, space, end, parent.sequence)))
        return address

    def _put(self, chunk_hash: bytes, space: NameSpace, address: ChunkAddress) -> int:
        """Add one name, and return the token at which the chunk ends."""
        key, end = (chunk_hash, space), _end_of(address, space)
        self.added.append(key)
        self._names[key] = address
        self._names.move_to_end(key)
        if len(chunk_hash) == _DIGEST_BYTES:
            ending = self._ending.setdefault((end, space), OrderedDict())
            ending[chunk_hash] = None
            ending.move_to_end(chunk_hash)
        if len(self._names) > self._names_max:
            self._drop(*self._names.popitem(last=False))
        return end

    def _drop(self, key: NameKey, address: ChunkAddress) -> None:
        chunk_hash, space = key
        where = _end_of(address, space), space
        ending = self._ending.get(where)
        if ending is not None:
            ending.pop(chunk_hash, None)
            if not ending:
                del self._ending[where]

    def _wait(self, chunk_hash: bytes, space: NameSpace, words: TokenArray, offset: int) -> None:
        waiting = self._waiting.setdefault((offset, space), {})
        if len(waiting) >= WAITING_AT_MAX:
            self._forget_waiting(offset, space, next(iter(waiting)))
            waiting = self._waiting.setdefault((offset, space), {})
        waiting[chunk_hash] = words
        self._n_waiting += 1
        self._waiting_order.append((offset, space, chunk_hash))
        while self._n_waiting > WAITING_MAX or len(self._waiting_order) > 2 * WAITING_MAX:
            self._forget_waiting(*self._waiting_order.popleft())

    def _forget_waiting(self, offset: int, space: NameSpace, chunk_hash: bytes) -> None:
        waiting = self._waiting.get((offset, space))
        if waiting is not None and waiting.pop(chunk_hash, None) is not None:
            self._n_waiting -= 1
            if not waiting:
                del self._waiting[offset, space]


def _end_of(address: ChunkAddress, space: NameSpace) -> int:
    return (address.position + 1) * space.block_size


def _words(hashes: bytes) -> Int64Array:
    return np.frombuffer(hashes, dtype="<u4").astype(np.int64)


def _address(words: TokenArray, space: NameSpace, offset: int, parent: SequenceHash | None) -> ChunkAddress:
    """Return the address of a chunk with these tokens. parent: the last block before it, None at the root."""
    block_size = space.block_size
    local = local_hashes(words, block_size, first_seed=space.first_seed if parent is None else None)
    chained = sequence_hashes(local, parent)
    before = SequenceHash(int(chained[-2])) if len(chained) > 1 else parent
    return ChunkAddress(SequenceHash(int(chained[-1])), before, offset // block_size + len(chained) - 1, len(chained))
