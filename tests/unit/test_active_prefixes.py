"""The trees of active prefixes give the same answers as sets of blocks, and are sound after every step.

There are two, which give the same answers: one in pure Python, and one in the memory of kernels.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes, unpack_hashes
from streams.core.loads.active_prefixes import ActivePrefixes
from streams.core.loads.kernels import layout
from streams.core.loads.memory import BookingMemory
from streams.core.loads.prefix_arena import PrefixArena
from streams.errors import IndexCorrupt, IndexFull
from tests.helpers.reference import chain_hashes

N_ROWS = 128

#: Bytes of a block's hash.
HASH = 8


def arena_of(n_bookings: int) -> tuple[BookingMemory, PrefixArena]:
    memory = BookingMemory(n_bookings)
    return memory, PrefixArena(memory)


def arena() -> PrefixArena:
    return arena_of(1000)[1]


both = pytest.mark.parametrize("make", [ActivePrefixes, arena], ids=["python", "kernels"])


def chain(content: list[int]) -> bytes:
    return pack_hashes(chain_hashes(content))


def shared(tree: ActivePrefixes | PrefixArena, row: int, asked: bytes) -> int:
    return sum(n_blocks for bits, n_blocks in tree.match(asked)[0] if bits >> row & 1)


@both
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_tree_says_what_sets_say(make: Callable[[], Any], seed: int) -> None:
    """Random chains over two symbols share and part everywhere, and each row's blocks count once."""
    rng = random.Random(seed)
    tree = make()
    live: list[tuple[int, bytes, Any]] = []

    def used(row: int) -> set[int]:
        return {block for at, blocks, _ in live if at == row for block in unpack_hashes(blocks).tolist()}

    for _ in range(30):
        row = rng.choice((1, 2, 70))
        if live and rng.random() < 0.45:
            row, blocks, run = live[rng.randrange(len(live))]
            before = used(row)
            live.remove((row, blocks, run))
            assert tree.remove(row, run) == len(before - used(row))
        else:
            blocks = chain([rng.choice((7, 7, 7, 8)) for _ in range(rng.randint(0, 9))])
            before = used(row)
            run, n_fresh = tree.add(row, blocks)
            live.append((row, blocks, run))
            assert n_fresh == len(used(row) - before)
        tree.check()
        asked = chain([rng.choice((7, 7, 7, 8)) for _ in range(rng.randint(0, 9))])
        for each in (1, 2, 70):
            assert shared(tree, each, asked) == len(used(each) & set(unpack_hashes(asked).tolist()))
        users = [
            {(number, at) for number, (at, blocks, _) in enumerate(live) if block in unpack_hashes(blocks).tolist()}
            for block in unpack_hashes(asked).tolist()
        ]
        _, found = tree.match(asked)
        runs = [0, *(end for end, _, _ in found)]
        assert runs == sorted(set(runs))
        assert [counts for (end, *counts), before in zip(found, runs, strict=False) for _ in range(end - before)] == [
            [len(each), len({at for _, at in each})] for each in users if each
        ]
    for row, _, run in live:
        tree.remove(row, run)
    tree.check()
    assert list(tree.nodes()) == []


@both
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 128])
@pytest.mark.parametrize("parted", [1, 2, 16, 31, 127])
def test_chains_that_part_anywhere_share_what_is_before(make: Callable[[], Any], length: int, parted: int) -> None:
    """A second chain shares the blocks before the point where it parts or ends."""
    tree = make()
    tree.add(1, chain([5] * length))
    same = min(length, parted)
    assert shared(tree, 1, chain([5] * parted)) == same
    assert shared(tree, 1, chain([5] * parted + [6] * 3)) == same
    _, n_fresh = tree.add(1, chain([5] * parted + [6] * 3))
    assert n_fresh == parted + 3 - same
    tree.check()


@both
def test_a_tree_that_was_split_is_whole_again_when_the_others_are_over(make: Callable[[], Any]) -> None:
    """Runs that were split are joined again when the requests that parted them have ended."""
    tree = make()
    tree.add(1, chain([5] * 20))
    others = [tree.add(row, chain([5] * n + [row] * 3))[0] for row, n in ((1, 4), (2, 8), (3, 12))]
    assert len(list(tree.nodes())) > 1
    for row, run in zip((1, 2, 3), others, strict=True):
        assert tree.remove(row, run) >= 3
    assert [run.n_blocks for run in tree.nodes()] == [20]
    tree.check()


class Twins:
    """Both trees with the same requests. Every answer of one is compared with that of the other."""

    def __init__(self, n_bookings: int = 1000, heap_words: int | None = None) -> None:
        self.plain = ActivePrefixes()
        self.memory, self.arena = arena_of(n_bookings)
        if heap_words is not None:
            self.memory.context[layout.HEAP_MAX] = self.memory.context[layout.HEAP_TOP] + heap_words
        self.live: list[tuple[int, bytes, Any, int]] = []

    def add(self, row: int, blocks: bytes) -> None:
        run, n_fresh = self.arena.add(row, blocks)  # which changes nothing if it fails
        node, expected = self.plain.add(row, blocks)
        self.live.append((row, blocks, node, run))
        assert n_fresh == expected

    def remove(self, number: int) -> None:
        row, _, node, run = self.live.pop(number)
        assert self.arena.remove(row, run) == self.plain.remove(row, node)

    def shared(self, asked: bytes) -> list[int]:
        by_row = [0] * N_ROWS
        for bits, n_blocks in self.plain.match(asked)[0]:
            while bits:
                by_row[bits.bit_length() - 1] += n_blocks
                bits ^= 1 << bits.bit_length() - 1
        return by_row

    def compare(self, asked: bytes) -> None:
        by_row = self.shared(asked)
        assert self.arena.match(asked) == self.plain.match(asked)
        assert self.arena.shared(asked, 3).tolist() == by_row[:3]
        for tree in (self.arena, self.plain):
            assert tree.shared(asked, N_ROWS).tolist() == by_row
            found, users = tree.shared_and_users(asked, N_ROWS)
            assert found.tolist() == by_row
            assert users == self.plain.match(asked)[1]

    def some_chain(self, rng: random.Random, n_blocks_max: int = 40) -> bytes:
        """A random chain, which follows the first blocks of another request's or ends among them."""
        blocks = rng.choice(self.live)[1] if self.live and rng.random() < 0.8 else b""
        blocks = blocks[: HASH * rng.randint(0, len(blocks) // HASH)]
        if rng.random() < 0.7:
            blocks += rng.randbytes(HASH * rng.randint(0, n_blocks_max - len(blocks) // HASH))
        return blocks


@given(seed=st.integers(0, 2**32), n_rows=st.sampled_from([1, 3, 100]))
@settings(max_examples=40, deadline=None)
def test_both_trees_give_the_same_answers(seed: int, n_rows: int) -> None:
    """Runs are split, joined and freed in both at the same steps, and each row shares the same blocks."""
    rng = random.Random(seed)
    twins = Twins()
    chance_to_end = rng.choice((0.2, 0.45, 0.55))
    for _ in range(120):
        if twins.live and rng.random() < chance_to_end:
            twins.remove(rng.randrange(len(twins.live)))
        else:
            twins.add(rng.randrange(n_rows), twins.some_chain(rng))
        twins.plain.check()
        twins.arena.check()
        twins.compare(twins.some_chain(rng))
    runs = sorted((node.n_blocks, sorted(node.uses.items())) for node in twins.plain.nodes())
    assert sorted((node.n_blocks, sorted(node.uses.items())) for node in twins.arena.nodes()) == runs
    while twins.live:
        twins.remove(rng.randrange(len(twins.live)))
        twins.arena.check()
    assert list(twins.arena.nodes()) == []


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 31, 32, 33, 4096])
def test_a_run_has_any_number_of_rows(n_rows: int) -> None:
    """The rows of a run come and go in any order, up to 4,096 of them, and its memory shrinks with them."""
    rng = random.Random(n_rows)
    memory, tree = arena_of(10_000)
    empty = int(memory.context[layout.HEAP_USED])
    blocks = chain([5] * 3)
    order = list(range(n_rows))
    rng.shuffle(order)
    runs = {}
    for row in order:
        runs[row], n_fresh = tree.add(row, blocks)
        assert n_fresh == 3
    tree.check()
    assert tree.shared(blocks, n_rows).tolist() == [3] * n_rows
    assert tree.shared_and_users(blocks + blocks, 1)[1] == [(3, n_rows, n_rows)]
    rng.shuffle(order)
    for number, row in enumerate(order):
        assert tree.remove(row, runs[row]) == 3
        if number % 512 == 0:
            tree.check()
            n_words = int(memory.context[layout.HEAP_USED]) - empty
            assert n_words <= 64 + 4 or n_words <= 8 * 2 * (n_rows - number)
    tree.check()
    assert memory.context[layout.HEAP_USED] == empty


def test_the_table_of_runs_doubles() -> None:
    """All runs are found while the table grows from 1,024 places to 32,768, and while they end."""
    rng = random.Random(7)
    memory, tree = arena_of(20_000)
    places = int(memory.context[layout.CHILDREN_PLACES])
    live = []
    for number in range(12_000):
        blocks = rng.randbytes(HASH * 2)
        live.append((number % 50, blocks, tree.add(number % 50, blocks)[0]))
        if number in (511, 512, 513, 2_000):
            tree.check()
    assert memory.context[layout.CHILDREN_PLACES] == 32 * places
    tree.check()
    rng.shuffle(live)
    for row, blocks, run in live[4_000:]:
        assert tree.shared(blocks, 64).tolist() == [2 * (each == row) for each in range(64)]
        assert tree.remove(row, run) == 2
    tree.check()
    assert all(tree.shared(blocks, 64)[row] == 2 for row, blocks, _ in live[:4_000])


def test_memory_is_returned() -> None:
    """Adding and removing for a long time takes no more memory, and nothing is in use when all requests are over."""
    rng = random.Random(8)
    twins = Twins(5_000)
    context = twins.memory.context
    empty = int(context[layout.HEAP_USED])
    tops = []
    for _ in range(30):
        while len(twins.live) < 200:
            twins.add(rng.randrange(100), twins.some_chain(rng))
        for _ in range(300):
            twins.remove(rng.randrange(len(twins.live)))
            twins.add(rng.randrange(100), twins.some_chain(rng))
        twins.arena.check()
        while twins.live:
            twins.remove(rng.randrange(len(twins.live)))
        assert context[layout.HEAP_USED] == empty
        assert list(twins.arena.nodes()) == []
        tops.append((int(context[layout.HEAP_TOP]), int(context[layout.RUNS_TOP])))
    twins.arena.check()
    assert tops[-1][0] < 2 * tops[4][0]
    assert tops[-1][1] < 2 * 400


@given(seed=st.integers(0, 2**32), heap_words=st.integers(0, 1500))
@settings(max_examples=40, deadline=None)
def test_a_request_that_does_not_fit_changes_nothing(seed: int, heap_words: int) -> None:
    """If the heap is full, an add is refused as a whole, and everything else gives the same answers as before."""
    rng = random.Random(seed)
    twins = Twins(heap_words=heap_words)
    n_refused = 0
    for _ in range(150):
        if twins.live and rng.random() < 0.3:
            twins.remove(rng.randrange(len(twins.live)))
        else:
            row, blocks = rng.randrange(100), twins.some_chain(rng)
            before = list(twins.arena.nodes())
            try:
                twins.add(row, blocks)
            except IndexFull:
                n_refused += 1
                assert list(twins.arena.nodes()) == before
        # A full heap may keep runs from being joined, so the runs differ. What they say does not.
        twins.arena.check(are_joined=False)
        asked = twins.some_chain(rng)
        assert twins.arena.shared(asked, N_ROWS).tolist() == twins.shared(asked)
    while twins.live:
        twins.remove(rng.randrange(len(twins.live)))
    twins.arena.check()
    assert list(twins.arena.nodes()) == []
    assert n_refused or heap_words > 100


@pytest.mark.parametrize("heap_words", range(0, 80, 4))
def test_a_request_is_added_as_a_whole_or_not_at_all(heap_words: int) -> None:
    """Wherever memory ends while rows move to larger spans, a run is split and a run is added, nothing is half done."""
    rng = random.Random(9)
    twins = Twins()
    first, second, third, rest = (rng.randbytes(HASH * 8) for _ in range(4))
    for row in range(7):  # as many rows as fit the span of the first run, which the eighth row does not
        twins.add(row, first)
    for row in range(3):
        twins.add(row, first + second)
    twins.add(0, first + second + third)
    context = twins.memory.context
    context[layout.HEAP_MAX] = context[layout.HEAP_TOP] + heap_words
    before = list(twins.arena.nodes())
    asked = first + second + third[: HASH * 4] + rest
    try:
        twins.add(9, asked)
        added = True
    except IndexFull:
        added = False
        assert list(twins.arena.nodes()) == before
    # The new run 8 + 4, rows of the first run 32 and of the second 16, and both parts of the third 4 + 4. The rows of
    # its first part take the 8 words that those of the second run have left.
    assert added == (heap_words >= 68)
    twins.arena.check()
    twins.compare(asked)
    context[layout.HEAP_MAX] = context[layout.HEAP_TOP]
    while twins.live:
        twins.remove(0)
        twins.arena.check(are_joined=False)
        assert twins.arena.shared(asked, N_ROWS).tolist() == twins.shared(asked)


def test_runs_that_cannot_be_joined_remain() -> None:
    """If the heap is full when a run could be joined with its child, both remain, with the same answers."""
    memory, tree = arena_of(10)
    long, short = tree.add(1, chain([5] * 12))[0], tree.add(2, chain([5] * 4))[0]
    spans = [memory.context[layout.HEAP_FREE + size_class] for size_class in range(layout.HEAP_CLASSES)]
    memory.context[layout.HEAP_FREE + 4] = 0  # the span of 16 words that the split released
    memory.context[layout.HEAP_MAX] = memory.context[layout.HEAP_TOP]
    assert tree.remove(2, short) == 4
    assert [node.n_blocks for node in tree.nodes()] == [4, 8]
    assert tree.shared(chain([5] * 20), 4).tolist() == [0, 12, 0, 0]
    memory.context[layout.HEAP_FREE + 4] = spans[4]
    tree.check(are_joined=False)
    with pytest.raises(IndexCorrupt):
        tree.check()
    assert tree.remove(1, long) == 12
    tree.check()


def test_a_request_is_refused_if_no_run_is_free() -> None:
    """A memory for two bookings has five runs; a sixth one is refused, and fits when another has ended."""
    twins = Twins(n_bookings=2)
    heads = [bytes([number]) * HASH for number in range(1, 7)]
    for row in range(5):
        twins.add(row, heads[row] * 2)
    with pytest.raises(IndexFull):
        twins.add(9, heads[5])
    with pytest.raises(IndexFull):
        twins.add(9, heads[0])  # which would split a run
    twins.arena.check()
    twins.compare(heads[0] * 2)
    twins.add(9, heads[0] * 2)
    twins.remove(4)
    twins.add(9, heads[0])
    twins.arena.check()
    twins.compare(heads[0] * 2)


def test_a_full_table_refuses_a_run() -> None:
    """If the table of runs has to grow and cannot, the request is refused, and requests without a new run are not."""
    memory, tree = arena_of(1000)
    blocks = [number.to_bytes(8, "little") for number in range(513)]
    for each in blocks[:511]:
        tree.add(1, each)
    memory.context[layout.HEAP_MAX] = memory.context[layout.HEAP_TOP] + 1000
    with pytest.raises(IndexFull):
        tree.add(1, blocks[512])
    assert tree.add(1, blocks[0])[1] == 0
    tree.check()


def test_no_blocks_are_the_root() -> None:
    """A request without blocks uses no run, and removing it changes nothing."""
    tree = arena()
    assert tree.add(1, b"") == (0, 0)
    assert tree.remove(1, 0) == 0
    assert tree.shared_and_users(b"", 2)[1] == []
    assert list(tree.nodes()) == []
    tree.check()


def test_a_request_that_the_run_does_not_have_is_reported() -> None:
    """Removing a request of another row raises, and changes nothing."""
    tree = arena()
    run, _ = tree.add(5, chain([1, 2]))
    for row in (4, 6):
        with pytest.raises(IndexCorrupt):
            tree.remove(row, run)
    tree.check()
    assert tree.remove(5, run) == 2


def test_other_spans_of_the_heap_are_not_lost() -> None:
    """A span that somebody else has in use is counted by the check, and one that is forgotten is found."""
    memory, tree = arena_of(10)
    tree.add(1, chain([1, 2]))
    memory.zeroed(64)
    tree.check(64)
    with pytest.raises(IndexCorrupt):
        tree.check()


@pytest.mark.parametrize(
    "word", [layout.RUN_REQUESTS, layout.RUN_CHILDREN, layout.RUN_CHILDREN_SUM, layout.RUN_BLOCKS, layout.RUN_PARENT]
)
def test_a_wrong_number_of_a_run_is_found(word: int) -> None:
    """The check raises if any number of a run is wrong."""
    memory, tree = arena_of(10)
    run, _ = tree.add(1, chain([1, 2, 3, 4]))
    tree.add(1, chain([1, 2]))
    tree.check()
    address = int(memory.context[layout.RUNS]) + (run * layout.RUN_WORDS + word) * 8
    ctypes.c_int64.from_address(address).value += 8
    with pytest.raises(IndexCorrupt):
        tree.check()
