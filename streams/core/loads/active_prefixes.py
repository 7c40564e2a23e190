"""Blocks in use by requests under way: a radix tree of runs of sequence hashes, with the ranks that use each.

What lives here: which ranks use which prefixes, and how many blocks of a request each of them uses already. What must
not: bookings (loads). Chains are packed u64, 8 bytes a block: comparing two takes a memory comparison and no loop.

A request uses its whole chain from the root, so the ranks of a run are among those of the run before it. Ranks are
rows, small numbers, and a set of them is the bits of one int.
"""

from __future__ import annotations

from collections.abc import Iterator

from streams.errors import IndexCorrupt

_BYTES_PER_BLOCK = 8


class PrefixNode:
    """Consecutive blocks that the same requests use. uses: by row, the number of requests that pass through."""

    __slots__ = ("bits", "chain", "children", "parent", "uses")

    def __init__(self, chain: bytes, parent: PrefixNode | None) -> None:
        self.chain = chain
        self.parent = parent
        self.children: dict[bytes, PrefixNode] = {}
        self.uses: dict[int, int] = {}
        self.bits = 0

    @property
    def n_blocks(self) -> int:
        """Its length."""
        return len(self.chain) // _BYTES_PER_BLOCK


class ActivePrefixes:
    """The tree. Its limit is that of whoever adds: a run is there as long as a request passes through it."""

    def __init__(self) -> None:
        self._root = PrefixNode(b"", None)

    def add(self, row: int, chain: bytes) -> tuple[PrefixNode, int]:
        """A request on this row uses these blocks from the root.

        Gives the run to be handed back to `remove`, and how many of the blocks the row did not use before.
        """
        node, at, n_fresh = self._root, 0, 0
        while at < len(chain):
            child = node.children.get(chain[at : at + _BYTES_PER_BLOCK])
            if child is None:
                child = node.children[chain[at : at + _BYTES_PER_BLOCK]] = PrefixNode(chain[at:], node)
            else:
                same = _common_length(child.chain, chain, at)
                if same < len(child.chain):
                    child = _split(child, same)
            if row in child.uses:
                child.uses[row] += 1
            else:
                child.uses[row] = 1
                child.bits |= 1 << row
                n_fresh += child.n_blocks
            node = child
            at += len(child.chain)
        return node, n_fresh

    def remove(self, row: int, node: PrefixNode) -> int:
        """The request that `add` gave this run for is over; gives how many blocks the row uses no more."""
        n_ended = 0
        at: PrefixNode | None = node
        while at is not None and at.parent is not None:
            above = at.parent
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

    def match(self, chain: bytes) -> list[tuple[int, int]]:
        """Leading blocks of a chain that are in use: rows as bits, and the number of blocks that just they use.

        Each entry's rows are among those of the one before it.
        """
        found: list[tuple[int, int]] = []
        node, at = self._root, 0
        while at < len(chain):
            child = node.children.get(chain[at : at + _BYTES_PER_BLOCK])
            if child is None:
                break
            same = _common_length(child.chain, chain, at)
            if found and found[-1][0] == child.bits:
                found[-1] = (child.bits, found[-1][1] + same // _BYTES_PER_BLOCK)
            else:
                found.append((child.bits, same // _BYTES_PER_BLOCK))
            if same < len(child.chain):
                break
            node = child
            at += same
        return found

    def nodes(self) -> Iterator[PrefixNode]:
        """Every run, parents first; for tests and debugging."""
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def check(self) -> None:
        """Raise IndexCorrupt, naming the first invariant found broken; for tests and debugging, it takes long."""
        for node in self.nodes():
            if not node.chain or len(node.chain) % _BYTES_PER_BLOCK or not node.uses:
                raise IndexCorrupt("a run is empty", chain=node.chain.hex())
            if node.bits != sum(1 << row for row in node.uses) or min(node.uses.values()) < 1:
                raise IndexCorrupt("a run's rows are not its uses'", bits=node.bits)
            through: dict[int, int] = {}
            for first, child in node.children.items():
                if child.parent is not node or child.chain[:_BYTES_PER_BLOCK] != first:
                    raise IndexCorrupt("a run hangs where it does not belong")
                for row, uses in child.uses.items():
                    through[row] = through.get(row, 0) + uses
            if any(uses > node.uses.get(row, 0) for row, uses in through.items()):
                raise IndexCorrupt("more requests leave a run than enter it")
            if len(node.children) == 1 and through == node.uses:
                raise IndexCorrupt("two runs might be one")


def _common_length(node: bytes, chain: bytes, at: int) -> int:
    """Bytes of whole blocks that a run has in common with a chain from `at` on; the first block is known to be."""
    if chain.startswith(node, at):
        return len(node)
    low, high = 1, min(len(node), len(chain) - at) // _BYTES_PER_BLOCK
    while low < high:  # the least length at which they differ is above `low`, or there is none up to `high`
        middle = (low + high + 1) // 2
        end = middle * _BYTES_PER_BLOCK
        if chain.startswith(node[:end], at):
            low = middle
        else:
            high = middle - 1
    return low * _BYTES_PER_BLOCK


def _split(node: PrefixNode, at: int) -> PrefixNode:
    """Put what is before `at` bytes into a run of its own, and give that; `node` goes on as what is behind, since
    requests that end there hold it."""
    head = PrefixNode(node.chain[:at], node.parent)
    head.uses = dict(node.uses)
    head.bits = node.bits
    assert node.parent is not None  # the root has no blocks to be split
    node.parent.children[head.chain[:_BYTES_PER_BLOCK]] = head
    node.chain = node.chain[at:]
    node.parent = head
    head.children[node.chain[:_BYTES_PER_BLOCK]] = node
    return head


def _join_only_child(node: PrefixNode) -> None:
    """Put a run into its only child if the same requests use both; none ends in it then."""
    (child,) = node.children.values()
    if child.bits == node.bits and child.uses == node.uses:
        assert node.parent is not None
        child.chain = node.chain + child.chain
        child.parent = node.parent
        node.parent.children[child.chain[:_BYTES_PER_BLOCK]] = child
