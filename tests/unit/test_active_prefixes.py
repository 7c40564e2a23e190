"""The tree of active prefixes gives the same answers as sets of blocks, and is sound after every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes, unpack_hashes
from streams.core.loads.active_prefixes import ActivePrefixes
from tests.helpers.invariants import check, prefix_nodes
from tests.helpers.reference import chain_hashes

N_ROWS = 128

#: Bytes of a block's hash.
HASH = 8


def chain(content: list[int]) -> bytes:
    return pack_hashes(chain_hashes(content))


def shared(tree: ActivePrefixes, row: int, asked: bytes) -> int:
    return sum(n_blocks for bits, n_blocks in tree.match(asked)[0] if bits >> row & 1)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_tree_says_what_sets_say(seed: int) -> None:
    """Random chains over two symbols share and part everywhere, and each row's blocks count once."""
    rng = random.Random(seed)
    tree = ActivePrefixes()
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
        check(tree)
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
    check(tree)
    assert list(prefix_nodes(tree)) == []


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 128])
@pytest.mark.parametrize("parted", [1, 2, 16, 31, 127])
def test_chains_that_part_anywhere_share_what_is_before(length: int, parted: int) -> None:
    """A second chain shares the blocks before the point where it parts or ends."""
    tree = ActivePrefixes()
    tree.add(1, chain([5] * length))
    same = min(length, parted)
    assert shared(tree, 1, chain([5] * parted)) == same
    assert shared(tree, 1, chain([5] * parted + [6] * 3)) == same
    _, n_fresh = tree.add(1, chain([5] * parted + [6] * 3))
    assert n_fresh == parted + 3 - same
    check(tree)


def test_a_tree_that_was_split_is_whole_again_when_the_others_are_over() -> None:
    """Runs that were split are joined again when the requests that parted them have ended."""
    tree = ActivePrefixes()
    tree.add(1, chain([5] * 20))
    others = [tree.add(row, chain([5] * n + [row] * 3))[0] for row, n in ((1, 4), (2, 8), (3, 12))]
    assert len(list(prefix_nodes(tree))) > 1
    for row, run in zip((1, 2, 3), others, strict=True):
        assert tree.remove(row, run) >= 3
    assert [run.n_blocks for run in prefix_nodes(tree)] == [20]
    check(tree)
