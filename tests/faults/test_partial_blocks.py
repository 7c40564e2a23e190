"""Entries for boundaries within a block say nothing about the engine's block size, and lose nothing."""

from __future__ import annotations

import pytest

from streams.core.reducer.ordering import Health
from tests.helpers.reported_rank import ReportedRank, store, tokens_from

pytestmark = pytest.mark.first_ring()


def test_entries_before_the_first_whole_block_show_no_other_block_size() -> None:
    """The first one follows a boundary that was never reported."""
    rank = ReportedRank()
    rank.send(store([8], 4, tokens_from(104, 4), block_size=4))
    rank.send(store([12], 8, tokens_from(108, 4), block_size=4))
    assert (rank.wrong_sizes, rank.health) == (set(), Health.EXACT)
    rank.send(store([16], None, tokens_from(100, 16)))
    assert rank.answer(tokens_from(100, 16)) == (1, Health.EXACT)


def test_entries_between_whole_blocks_change_nothing() -> None:
    """The whole blocks name each other as parents."""
    rank = ReportedRank()
    rank.send(store([16], None, tokens_from(100, 16)))
    rank.send(store([20], 16, tokens_from(116, 4), block_size=4))
    rank.send(store([24], 20, tokens_from(120, 4), block_size=4))
    rank.send(store([32], 16, tokens_from(116, 16)))
    assert rank.answer(tokens_from(100, 32)) == (2, Health.EXACT)
    assert (rank.wrong_sizes, rank.not_indexed, rank.n_resyncs) == (set(), {"tail": 2}, 0)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8, 15])
def test_every_boundary_of_a_prompt_may_be_reported(size: int) -> None:
    """Within each block the entries follow each other, from the last whole block on; then the whole block comes."""
    rank, n_blocks = ReportedRank(), 4
    for block in range(n_blocks):
        before = 1000 * block or None
        for end in range(size, 16, size):
            name = 1000 * block + end
            rank.send(store([name], before, tokens_from(16 * block + end - size, size), block_size=size))
            before = name
        rank.send(store([1000 * (block + 1)], 1000 * block or None, tokens_from(16 * block, 16)))
    assert rank.answer(tokens_from(0, 64)) == (n_blocks, Health.EXACT)
    assert (rank.wrong_sizes, rank.is_complete) == (set(), True)


def test_several_boundaries_may_come_with_one_event() -> None:
    """Its tokens are fewer than those of a block."""
    rank = ReportedRank()
    rank.send(store([16], None, tokens_from(0, 16)))
    rank.send(store([20, 24, 28], 16, tokens_from(16, 12), block_size=4))
    rank.send(store([32], 16, tokens_from(16, 16)))
    assert rank.answer(tokens_from(0, 32)) == (2, Health.EXACT)


def test_many_prompts_may_end_at_boundaries_of_one_block() -> None:
    """Each is another branch, so they do not follow each other."""
    rank = ReportedRank()
    for number in range(50):
        rank.send(store([100 + number], 4, tokens_from(100 * number, 4), block_size=4))
    assert (rank.wrong_sizes, rank.health) == (set(), Health.EXACT)


def test_a_removed_boundary_and_one_after_a_restart_change_nothing() -> None:
    """A bridge that restarted has not read the whole blocks, nor the entries."""
    rank = ReportedRank()
    rank.send(store([16], None, tokens_from(0, 16)), store([20], 16, tokens_from(16, 4), block_size=4))
    rank.restart_bridge()
    rank.send(store([24], 20, tokens_from(20, 4), block_size=4))
    rank.send({"type": "BlockRemoved", "block_hashes": [20, 24], "medium": "GPU"})
    rank.send(store([32], 16, tokens_from(16, 16)))
    assert rank.answer(tokens_from(0, 32)) == (2, Health.EXACT)
    assert rank.wrong_sizes == set()


@pytest.mark.parametrize("parent", [None, 77])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_an_engine_whose_every_block_is_small_has_the_wrong_size(size: int, parent: int | None) -> None:
    """Its blocks follow each other for as many tokens as the scope's block has, and no whole block comes."""
    rank = ReportedRank()
    for number in range(16 // size):
        assert rank.wrong_sizes == set()
        rank.send(store([100 + number], parent, tokens_from(size * number, size), block_size=size))
        parent = 100 + number
    assert rank.wrong_sizes == {size}


def test_a_prompt_of_small_blocks_has_the_wrong_size_at_once() -> None:
    """One event has as many tokens as a block."""
    rank = ReportedRank()
    rank.send(store([1, 2, 3, 4], None, tokens_from(0, 16), block_size=4))
    assert rank.wrong_sizes == {4}
