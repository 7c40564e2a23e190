"""Blocks in use by requests under way: a radix tree of runs of sequence hashes, with the ranks that use each.

What lives here: which ranks use which prefixes, and how many blocks of a request each of them uses already. What must
not: bookings (loads). Chains are packed u64, 8 bytes a block: comparing two takes a memory comparison and no loop.

A request uses its whole chain from the root, so the ranks of a run are among those of the run before it. Ranks are
rows, small numbers, and a set of them is the bits of one int.
"""

from __future__ import annotations

from collections.abc import Iterator

from streams.errors import IndexCorrupt

_BYTES_A_BLOCK = 8


class Run:
    """Consecutive blocks that the same requests use. uses: by row, the number of requests that pass through."""

    __slots__ = ("bits", "chain", "children", "parent", "uses")

    def __init__(self, chain: bytes, parent: Run | None) -> None:
        self.chain = chain
        self.parent = parent
        self.children: dict[bytes, Run] = {}
        self.uses: dict[int, int] = {}
        self.bits = 0

    @property
    def n_blocks(self) -> int:
        """Its length."""
        return len(self.chain) // _BYTES_A_BLOCK


class ActivePrefixes:
    """The tree. Its limit is that of whoever adds: a run is there as long as a request passes through it."""

    def __init__(self) -> None:
        self._root = Run(b"", None)

    def add(self, row: int, chain: bytes) -> tuple[Run, int]:
        """A request on this row uses these blocks from the root.

        Gives the run to be handed back to `remove`, and how many of the blocks the row did not use before.
        """
        run, at, n_fresh = self._root, 0, 0
        while at < len(chain):
            child = run.children.get(chain[at : at + _BYTES_A_BLOCK])
            if child is None:
                child = run.children[chain[at : at + _BYTES_A_BLOCK]] = Run(chain[at:], run)
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
            run = child
            at += len(child.chain)
        return run, n_fresh

    def remove(self, row: int, run: Run) -> int:
        """The request that `add` gave this run for is over; gives how many blocks the row uses no more."""
        n_ended = 0
        at: Run | None = run
        while at is not None and at.parent is not None:
            above = at.parent
            if at.uses[row] > 1:
                at.uses[row] -= 1
            else:
                del at.uses[row]
                at.bits &= ~(1 << row)
                n_ended += at.n_blocks
            if not at.uses:
                del above.children[at.chain[:_BYTES_A_BLOCK]]
            elif len(at.children) == 1:
                _join_only_child(at)
            at = above
        return n_ended

    def match(self, chain: bytes) -> list[tuple[int, int]]:
        """Leading blocks of a chain that are in use: rows as bits, and the number of blocks that just they use.

        Each entry's rows are among those of the one before it.
        """
        found: list[tuple[int, int]] = []
        run, at = self._root, 0
        while at < len(chain):
            child = run.children.get(chain[at : at + _BYTES_A_BLOCK])
            if child is None:
                break
            same = _common_length(child.chain, chain, at)
            if found and found[-1][0] == child.bits:
                found[-1] = (child.bits, found[-1][1] + same // _BYTES_A_BLOCK)
            else:
                found.append((child.bits, same // _BYTES_A_BLOCK))
            if same < len(child.chain):
                break
            run = child
            at += same
        return found

    def runs(self) -> Iterator[Run]:
        """Every run, parents first; for tests and debugging."""
        todo = list(self._root.children.values())
        while todo:
            run = todo.pop()
            yield run
            todo += run.children.values()

    def check(self) -> None:
        """Raise IndexCorrupt, naming the first invariant found broken; for tests and debugging, it takes long."""
        for run in self.runs():
            if not run.chain or len(run.chain) % _BYTES_A_BLOCK or not run.uses:
                raise IndexCorrupt("a run is empty", chain=run.chain.hex())
            if run.bits != sum(1 << row for row in run.uses) or min(run.uses.values()) < 1:
                raise IndexCorrupt("a run's rows are not its uses'", bits=run.bits)
            through: dict[int, int] = {}
            for first, child in run.children.items():
                if child.parent is not run or child.chain[:_BYTES_A_BLOCK] != first:
                    raise IndexCorrupt("a run hangs where it does not belong")
                for row, uses in child.uses.items():
                    through[row] = through.get(row, 0) + uses
            if any(uses > run.uses.get(row, 0) for row, uses in through.items()):
                raise IndexCorrupt("more requests leave a run than enter it")
            if len(run.children) == 1 and through == run.uses:
                raise IndexCorrupt("two runs might be one")


def _common_length(run: bytes, chain: bytes, at: int) -> int:
    """Bytes of whole blocks that a run has in common with a chain from `at` on; the first block is known to be."""
    if chain.startswith(run, at):
        return len(run)
    low, high = 1, min(len(run), len(chain) - at) // _BYTES_A_BLOCK
    while low < high:  # the least length at which they differ is above `low`, or there is none up to `high`
        middle = (low + high + 1) // 2
        end = middle * _BYTES_A_BLOCK
        if chain.startswith(run[:end], at):
            low = middle
        else:
            high = middle - 1
    return low * _BYTES_A_BLOCK


def _split(run: Run, at: int) -> Run:
    """Put what is before `at` bytes into a run of its own, and give that; `run` goes on as what is behind, since
    requests that end there hold it."""
    head = Run(run.chain[:at], run.parent)
    head.uses = dict(run.uses)
    head.bits = run.bits
    assert run.parent is not None  # the root has no blocks to be split
    run.parent.children[head.chain[:_BYTES_A_BLOCK]] = head
    run.chain = run.chain[at:]
    run.parent = head
    head.children[run.chain[:_BYTES_A_BLOCK]] = run
    return head


def _join_only_child(run: Run) -> None:
    """Put a run into its only child if the same requests use both; none ends in it then."""
    (child,) = run.children.values()
    if child.bits == run.bits and child.uses == run.uses:
        assert run.parent is not None
        child.chain = run.chain + child.chain
        child.parent = run.parent
        run.parent.children[child.chain[:_BYTES_A_BLOCK]] = child
