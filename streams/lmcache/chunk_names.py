"""LMCache's hashes of chunks, translated into our sequence hashes (pure).

What lives here: the names of chunks, and the search for the chunk that a chunk follows. What must not: who holds a
chunk (pools). Owner: a bridge, one for all instances, since a chunk has the same hash in each of them.

A store has the tokens of its chunk and their position, but not what precedes them. LMCache's hash of a chunk is BLAKE3
of the preceding chunk's hash and of the chunk's tokens. So the preceding one is found by trying those that end where
the chunk begins: first those that the same instance stored or accessed last, then those that any stored last. A server
reports the chunks of a prompt in order, and accesses those that it has before it stores what follows them, so that the
first one that is tried is nearly always the right one.

A chunk whose predecessor has no name, or is unknown, waits for it. What follows such a chunk is found in the same way,
so that a beginning that nobody knows costs a search once per prompt and not once per chunk.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from streams.core.hashing import BASE_SEED, TokenArray, salted_seed
from streams.core.ids import SequenceHash
from streams.core.kernels.blake3 import SCRATCH_WORDS, find_parent
from streams.core.kernels.json_tokens import read_tokens
from streams.core.kernels.xxh3 import chain_blocks, hash_blocks

#: Chunks whose names are kept, 500 bytes each. Without its predecessor's name, a chunk has no name of ours either.
NAMES_MAX = 1_048_576

#: Chunks that are tried as predecessors of one chunk, 2 us each: of the same instance, and then as many of all of them.
TRIED_MAX = 256

#: How many of them are tried together: at first, when the right one is nearly always among them, and then.
TRIED_FIRST, TRIED_TOGETHER = 4, 64

#: Chunks that are kept as those of an instance, 150 bytes each. Without them, the search is among those of all.
OF_INSTANCES_MAX = 1_048_576

#: Chunks that wait for their predecessors, 1.5 kB each with 256 tokens; and those of them that begin at the same token
#: and whose predecessor is unknown, each of which is compared with every new chunk that ends there.
WAITING_MAX = 4096
WAITING_AT_MAX = 16

#: Tokens of a chunk. LMCache's default is 256.
CHUNK_TOKENS_MAX = 65_536

#: Bytes of BLAKE3's digest. Hashes of other algorithms cannot be verified.
_DIGEST_BYTES = 32


class Unnamed(enum.StrEnum):
    """Why a chunk has no name of ours. The values are in metrics."""

    NO_TOKENS = "no_tokens"  # the store has no tokens, or no position, and no earlier one had them
    BAD_TOKENS = "bad_tokens"  # they are no numbers of 32 bits, or too many
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


_NOT_CHAINED = np.empty(0, dtype=np.uint64)

#: A chunk's hash, in one name space.
NameKey = tuple[bytes, NameSpace]

_Where = TypeVar("_Where", NameKey, tuple[int, NameSpace])


def name_space(salt: str, block_size: int) -> NameSpace:
    """Return the name space of a salt."""
    return NameSpace(salted_seed(BASE_SEED, salt or None), block_size)


class _Waiting(NamedTuple):
    """A chunk without a name. parent: the hash of the chunk that it follows, without a name as well; b"" if unknown."""

    offset: int
    words: TokenArray
    parent: bytes


class ChunkNames:
    """The names of chunks. added: those that got a name since the caller emptied it."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._names: OrderedDict[NameKey, ChunkAddress] = OrderedDict()
        # By the token at which they end: chunks with names, the one that was stored last at the end.
        self._ending: dict[tuple[int, NameSpace], dict[bytes, None]] = {}
        # The same of one instance, with chunks that it accessed, and with those that have no name.
        self._recent: OrderedDict[tuple[str, int, NameSpace], dict[bytes, None]] = OrderedDict()
        self._n_recent = 0
        self._waiting: OrderedDict[NameKey, _Waiting] = OrderedDict()
        # Waiting chunks: by their predecessor, and by the token at which they begin where that is unknown.
        self._followers: dict[NameKey, list[bytes]] = {}
        self._orphans: dict[tuple[int, NameSpace], list[bytes]] = {}
        self._tokens = np.empty(CHUNK_TOKENS_MAX, dtype=np.uint32)
        self._local, self._chained = np.empty((2, CHUNK_TOKENS_MAX), dtype=np.uint64)
        self._scratch = np.empty(SCRATCH_WORDS, dtype=np.int64)
        self.added: list[NameKey] = []

    def __len__(self) -> int:
        return len(self._names)

    def get(self, chunk_hash: bytes, space: NameSpace) -> ChunkAddress | None:
        """Return a chunk's address if it is known."""
        return self._names.get((chunk_hash, space))

    def adopt(self, chunk_hash: bytes, space: NameSpace, address: ChunkAddress) -> None:
        """Add a chunk whose address is known from elsewhere, and those that waited for it."""
        if (chunk_hash, space) not in self._names:
            self._add(chunk_hash, space, address)

    def used(self, instance: str, chunk_hash: bytes, space: NameSpace) -> ChunkAddress | None:
        """Note that an instance has a chunk, which what it stores next may follow. Returns its address if known."""
        key = chunk_hash, space
        address = self._names.get(key)
        if address is not None:
            self._names.move_to_end(key)
            self._note(instance, _end_of(address, space), space, chunk_hash)
        return address

    def resolve(
        self, instance: str, chunk_hash: bytes, space: NameSpace, tokens: bytes, offset: int
    ) -> ChunkAddress | Unnamed:
        """Return the address of a chunk that an instance stored, or why it has none.

        tokens: JSON, b"" if unknown. offset: of its first token, negative if unknown.
        """
        known = self.used(instance, chunk_hash, space)
        if known is not None:
            return known
        if not tokens or offset < 0:
            return Unnamed.NO_TOKENS
        n_tokens = read_tokens(_octets(tokens), self._tokens)
        if n_tokens < 0:
            return Unnamed.BAD_TOKENS
        block_size = space.block_size
        if n_tokens % block_size or offset % block_size or n_tokens == 0:
            return Unnamed.CHUNK_SIZE
        words = self._tokens[:n_tokens]
        self._note(instance, offset + n_tokens, space, chunk_hash)
        if offset == 0:
            return self._add(chunk_hash, space, self._address(words, space, 0, None))
        if len(chunk_hash) != _DIGEST_BYTES:
            return Unnamed.UNKNOWN_PARENT
        waiting = self._waiting.get((chunk_hash, space))
        if waiting is None:
            parent_hash = self._parent(instance, chunk_hash, space, words, offset)
        elif waiting.parent:
            return Unnamed.UNKNOWN_PARENT
        else:  # its predecessor may have had a name all the time, and was too far back in the search
            of_instance = self._recent.get((instance, offset, space), {})
            parent_hash = self._first_parent([*islice(reversed(of_instance), TRIED_FIRST)], words, chunk_hash)
            if not parent_hash:
                return Unnamed.UNKNOWN_PARENT
            self._forget(chunk_hash, space)
        parent = self._names.get((parent_hash, space))
        if parent is None:
            self._wait(chunk_hash, space, _Waiting(offset, words.copy(), parent_hash))
            return Unnamed.UNKNOWN_PARENT
        return self._add(chunk_hash, space, self._address(words, space, offset, parent.sequence))

    def _note(self, instance: str, end: int, space: NameSpace, chunk_hash: bytes) -> None:
        """Have a chunk tried first as the predecessor of what an instance stores."""
        if len(chunk_hash) != _DIGEST_BYTES:
            return
        recent = self._recent.get((instance, end, space))
        if recent is None:
            recent = self._recent[instance, end, space] = {}
        self._n_recent -= len(recent)
        recent.pop(chunk_hash, None)
        recent[chunk_hash] = None
        if len(recent) > TRIED_MAX:
            del recent[next(iter(recent))]
        self._n_recent += len(recent)
        if self._n_recent > OF_INSTANCES_MAX:
            self._n_recent -= len(self._recent.popitem(last=False)[1])

    def _parent(self, instance: str, chunk_hash: bytes, space: NameSpace, words: TokenArray, offset: int) -> bytes:
        """Find the chunk that one follows, by its hash; b"" if it is unknown."""
        of_instance, of_all = self._recent.get((instance, offset, space), {}), self._ending.get((offset, space), {})
        candidates = chain(islice(reversed(of_instance), TRIED_MAX), islice(reversed(of_all), TRIED_MAX))
        together = TRIED_FIRST
        while tried := list(islice(candidates, together)):
            found = self._first_parent(tried, words, chunk_hash)
            if found:
                return found
            together = TRIED_TOGETHER
        return b""

    def _first_parent(self, tried: list[bytes], words: TokenArray, chunk_hash: bytes) -> bytes:
        found = find_parent(_octets(b"".join(tried)), words, _octets(chunk_hash), self._scratch)
        return b"" if found < 0 else tried[found]

    def _add(self, chunk_hash: bytes, space: NameSpace, address: ChunkAddress) -> ChunkAddress:
        """Add a name, and then those of the chunks that waited for it."""
        self._forget(chunk_hash, space)
        end = self._put(chunk_hash, space, address)
        if not self._waiting:
            return address
        added = [(chunk_hash, end, address)]
        while added:
            parent_hash, end, parent = added.pop()
            followers = [*self._followers.get((parent_hash, space), ())]
            orphans = self._orphans.get((end, space), ()) if len(parent_hash) == _DIGEST_BYTES else ()
            followers += [
                each for each in orphans if self._first_parent([parent_hash], self._waiting[each, space].words, each)
            ]
            for follower in followers:
                waiting = self._waiting[follower, space]
                self._forget(follower, space)
                named = self._address(waiting.words, space, end, parent.sequence)
                added.append((follower, self._put(follower, space, named), named))
        return address

    def _address(self, words: TokenArray, space: NameSpace, offset: int, parent: SequenceHash | None) -> ChunkAddress:
        """Return the address of a chunk with these tokens. parent: the last block before it, None at the root."""
        block_size, n_blocks = space.block_size, words.size // space.block_size
        local, chained = self._local[:n_blocks], self._chained[:n_blocks]
        # The functions of core.hashing check what callers pass, which takes longer than the hashes of a chunk.
        hash_blocks(words, block_size, block_size, n_blocks, BASE_SEED, local, _NOT_CHAINED)
        if parent is None and space.first_seed != BASE_SEED:
            hash_blocks(words, block_size, block_size, 1, space.first_seed, local, _NOT_CHAINED)
        chain_blocks(local, parent or 0, parent is not None, chained)
        before = parent if n_blocks == 1 else SequenceHash(chained.item(n_blocks - 2))
        last = offset // block_size + n_blocks - 1
        return ChunkAddress(SequenceHash(chained.item(n_blocks - 1)), before, last, n_blocks)

    def _put(self, chunk_hash: bytes, space: NameSpace, address: ChunkAddress) -> int:
        """Add one name, and return the token at which the chunk ends."""
        key, end = (chunk_hash, space), _end_of(address, space)
        self.added.append(key)
        self._names[key] = address
        self._names.move_to_end(key)
        if len(chunk_hash) == _DIGEST_BYTES:
            ending = self._ending.setdefault((end, space), {})
            ending.pop(chunk_hash, None)
            ending[chunk_hash] = None
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

    def _wait(self, chunk_hash: bytes, space: NameSpace, waiting: _Waiting) -> None:
        if waiting.parent:
            self._followers.setdefault((waiting.parent, space), []).append(chunk_hash)
        else:
            orphans = self._orphans.setdefault((waiting.offset, space), [])
            if len(orphans) >= WAITING_AT_MAX:
                self._forget(orphans[0], space)
            self._orphans.setdefault((waiting.offset, space), []).append(chunk_hash)
        self._waiting[chunk_hash, space] = waiting
        if len(self._waiting) > WAITING_MAX:
            self._forget(*next(iter(self._waiting)))

    def _forget(self, chunk_hash: bytes, space: NameSpace) -> None:
        """Have a chunk wait no longer, if it does."""
        waiting = self._waiting.pop((chunk_hash, space), None)
        if waiting is None:
            return
        if waiting.parent:
            _remove(self._followers, (waiting.parent, space), chunk_hash)
        else:
            _remove(self._orphans, (waiting.offset, space), chunk_hash)


def _remove(lists: dict[_Where, list[bytes]], where: _Where, chunk_hash: bytes) -> None:
    """Remove a hash from a list, and the list with its last one."""
    hashes = lists[where]
    hashes.remove(chunk_hash)
    if not hashes:
        del lists[where]


def _end_of(address: ChunkAddress, space: NameSpace) -> int:
    return (address.position + 1) * space.block_size


def _octets(content: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(content, dtype=np.uint8)
