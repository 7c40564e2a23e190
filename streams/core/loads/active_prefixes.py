"""Blocks that running requests use: a radix tree of runs of sequence hashes, with the ranks that use each run.

What lives here: which ranks use which prefixes, and how many blocks of a request each of them uses already. What must
not: bookings (bookings). Chains are packed u64, 8 bytes per block, so that two of them are compared as bytes, without
a loop.

A request uses its whole chain from the root. The ranks of a run are therefore a subset of those of the run before it.
A rank is a row, which is a small number, and a set of ranks is an int with one bit per row.

State: a part of active load: the blocks of running requests.
"""

from __future__ import annotations

import numpy as np

from streams.core.ids import Int64Array

_BYTES_PER_BLOCK = 8

#: Arrays of shared blocks that are cached, by set of rows and number of blocks: the set of ranks that uses a system
#: prompt rarely changes. Beyond this limit the cache is cleared.
_SHARED_CACHED_MAX = 256


class PrefixNode:
    """A run: consecutive blocks that the same requests use.

    uses: the number of requests that use it, by row. n_requests: on all rows.
    """

    __slots__ = ("bits", "chain", "children", "n_requests", "parent", "uses")

    def __init__(self, chain: bytes, parent: PrefixNode | None) -> None:
        self.chain = chain
        self.parent = parent
        self.children: dict[bytes, PrefixNode] = {}
        self.uses: dict[int, int] = {}
        self.n_requests = 0
        self.bits = 0

    @property
    def n_blocks(self) -> int:
        """The run's length."""
        return len(self.chain) // _BYTES_PER_BLOCK


class ActivePrefixes:
    """The tree. A run exists as long as a request uses it, so that the caller's limit on requests limits the tree."""

    def __init__(self) -> None:
        self._root = PrefixNode(b"", None)
        self._cached: dict[tuple[int, int], Int64Array] = {}
        self._n_rows = 0  # of the cached arrays
        self._no_blocks = np.zeros(0, dtype=np.int64)

    def add(self, row: int, chain: bytes) -> tuple[PrefixNode, int]:
        """Add a request on this row that uses these blocks from the root.

        Returns the run at its end, which `remove` takes, and how many of the blocks the row did not use before.
        """
        node, at, n_fresh, end = self._root, 0, 0, len(chain)
        while at < end:
            first = chain[at : at + _BYTES_PER_BLOCK]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = PrefixNode(chain[at:], node)
            elif not chain.startswith(child.chain, at):
                child = _split(child, _common_length(child.chain, chain, at))
            n_bytes = len(child.chain)
            child.n_requests += 1
            if row in child.uses:
                child.uses[row] += 1
            else:
                child.uses[row] = 1
                child.bits |= 1 << row
                n_fresh += n_bytes // _BYTES_PER_BLOCK
            node = child
            at += n_bytes
        return node, n_fresh

    def remove(self, row: int, node: PrefixNode) -> int:
        """Remove a request by the run that `add` returned for it; return how many blocks the row no longer uses."""
        n_ended = 0
        at: PrefixNode | None = node
        while at is not None and at.parent is not None:
            above = at.parent
            at.n_requests -= 1
            if at.uses[row] > 1:
                at.uses[row] -= 1
            else:
                del at.uses[row]
                at.bits &= ~(1 << row)
                n_ended += at.n_blocks
            if not at.uses:
                del above.children[at.chain[:_BYTES_PER_BLOCK]]
            elif len(at.children) == 1:
                _join_only_child(at)
            at = above
        return n_ended

    def match(self, chain: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Return the leading blocks of a chain that are in use, and how many requests use them, on how many rows.

        The former are pairs of rows (bits) and number of blocks. The rows of each pair are a subset of those of the
        pair before it. The latter is (blocks, requests, rows) for each run: so many requests use the blocks up to its
        end.
        """
        found: list[tuple[int, int]] = []
        users: list[tuple[int, int, int]] = []
        node, at = self._root, 0
        while at < len(chain):
            child = node.children.get(chain[at : at + _BYTES_PER_BLOCK])
            if child is None:
                break
            same = _common_length(child.chain, chain, at)
            at += same
            bits = child.bits
            if found and found[-1][0] == bits:
                found[-1] = (bits, found[-1][1] + same // _BYTES_PER_BLOCK)
            else:
                found.append((bits, same // _BYTES_PER_BLOCK))
            users.append((at // _BYTES_PER_BLOCK, child.n_requests, len(child.uses)))
            if same < len(child.chain):
                break
            node = child
        return found, users

    def shared(self, chain: bytes, n_rows: int) -> Int64Array:
        """How many leading blocks of a chain each row has in use: int64[n_rows], read-only. n_rows: divisible by 8."""
        return self._shared(self.match(chain)[0], n_rows)

    def shared_and_users(self, chain: bytes, n_rows: int) -> tuple[Int64Array, list[tuple[int, int, int]]]:
        """The same, and how many requests use these blocks, as in `match`."""
        matched, users = self.match(chain)
        return self._shared(matched, n_rows), users

    def _shared(self, matched: list[tuple[int, int]], n_rows: int) -> Int64Array:
        if n_rows != self._n_rows:
            self._cached.clear()
            self._n_rows, self._no_blocks = n_rows, np.zeros(n_rows, dtype=np.int64)
        shared: Int64Array | None = None
        for bits, n_blocks in matched:
            if bits & (bits - 1):
                these = self._shared_by(bits, n_blocks)
                shared = these if shared is None else shared + these
            else:  # only one rank uses these blocks, as in most long matches; any that several ranks share come before
                shared = (self._no_blocks if shared is None else shared).copy()
                shared[bits.bit_length() - 1] += n_blocks
        return self._no_blocks if shared is None else shared

    def _shared_by(self, bits: int, n_blocks: int) -> Int64Array:
        """An array with n_blocks in the rows whose bit is set and 0 in all others."""
        shared = self._cached.get((bits, n_blocks))
        if shared is None:
            if len(self._cached) >= _SHARED_CACHED_MAX:
                self._cached.clear()
            packed = np.frombuffer(bits.to_bytes(self._n_rows // 8, "little"), dtype=np.uint8)
            shared = np.unpackbits(packed, bitorder="little") * np.int64(n_blocks)
            self._cached[bits, n_blocks] = shared
        return shared


def _common_length(node: bytes, chain: bytes, at: int) -> int:
    """Bytes of whole blocks that a run and a chain from `at` on have in common. Their first blocks are equal."""
    if chain.startswith(node, at):
        return len(node)
    low, high = 1, min(len(node), len(chain) - at) // _BYTES_PER_BLOCK
    while low < high:  # they are equal up to `low` blocks
        middle = (low + high + 1) // 2
        end = middle * _BYTES_PER_BLOCK
        if chain.startswith(node[:end], at):
            low = middle
        else:
            high = middle - 1
    return low * _BYTES_PER_BLOCK


def _split(node: PrefixNode, at: int) -> PrefixNode:
    """Split a run at `at` bytes and return the new run with its first part.

    `node` becomes the second part, since requests that end in the run refer to it.
    """
    head = PrefixNode(node.chain[:at], node.parent)
    head.uses = dict(node.uses)
    head.n_requests = node.n_requests
    head.bits = node.bits
    assert node.parent is not None  # the root has no blocks to be split
    node.parent.children[head.chain[:_BYTES_PER_BLOCK]] = head
    node.chain = node.chain[at:]
    node.parent = head
    head.children[node.chain[:_BYTES_PER_BLOCK]] = node
    return head


def _join_only_child(node: PrefixNode) -> None:
    """Join a run with its only child if the same requests use both, so that no request ends in the run."""
    (child,) = node.children.values()
    if child.bits == node.bits and child.uses == node.uses:
        assert node.parent is not None
        child.chain = node.chain + child.chain
        child.parent = node.parent
        node.parent.children[child.chain[:_BYTES_PER_BLOCK]] = child
