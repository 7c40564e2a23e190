"""Blocks behind blocks that were not indexed are left out for the same reason; only a gap in the numbers is a loss."""

from __future__ import annotations

from typing import Any

import pytest

from streams.core.reducer.ordering import Health
from streams.engines import ledger, left_out
from tests.helpers.reported_rank import ReportedRank, store, tokens_from

pytestmark = pytest.mark.first_ring()

EMBEDDINGS = {"extra_keys": [[b"\x01" * 32], [b"\x02" * 32]]}


def first_store(rank: ReportedRank) -> None:
    """A prompt of two blocks, so that the rank holds something that is exact."""
    rank.send(store([901, 902], None, tokens_from(9000, 32)))
    assert rank.answer(tokens_from(9000, 32)) == (2, Health.EXACT)


@pytest.mark.parametrize("dialect", ["vllm", "auto", "sglang"])
@pytest.mark.parametrize("n_stores", [1, 301])
def test_blocks_that_came_by_transfer_make_a_rank_approximate(dialect: str, n_stores: int) -> None:
    """The engine never reported their parent. No event was lost, so nothing is requested again."""
    rank = ReportedRank(dialect)
    first_store(rank)
    for number in range(n_stores):
        first = 1000 + 10 * number
        rank.send(store([first, first + 1], first - 1, tokens_from(4000, 32)))
    assert rank.answer(tokens_from(9000, 32)) == (2, Health.APPROXIMATE)
    assert (rank.n_resyncs, rank.is_complete) == (0, True)
    assert rank.not_indexed == {"unknown_parent": 2 * n_stores}


def test_blocks_behind_blocks_that_came_by_transfer_are_left_out_with_them() -> None:
    """In the same batch and in later ones; a store of theirs with a known parent is indexed."""
    rank = ReportedRank()
    first_store(rank)
    rank.send(store([39], 38, tokens_from(4000, 16)), store([40], 39, tokens_from(4016, 16)))
    rank.send(store([41], 40, tokens_from(4032, 16)))
    rank.send({"type": "BlockRemoved", "block_hashes": [41, 40], "medium": "GPU"})
    assert (rank.not_indexed, rank.n_resyncs) == ({"unknown_parent": 3}, 0)
    rank.send(store([903], 902, tokens_from(9032, 16)))
    assert rank.answer(tokens_from(9000, 48)) == (3, Health.APPROXIMATE)


def test_a_block_of_a_lower_tier_whose_parent_does_not_come_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offloading connector may report a parent later, but not after many batches."""
    monkeypatch.setattr(ledger, "WAITING_BATCHES_MAX", 5)
    rank = ReportedRank()
    first_store(rank)
    for name in (39, 49):
        rank.send(store([name], name - 1, tokens_from(100 * name + 16, 16), medium="CPU", group_idx=0))
    for number in range(2):
        rank.send(store([910 + number], None, tokens_from(16 * number, 16)))
    assert rank.health is Health.EXACT
    rank.send(store([48], None, tokens_from(4900, 16), medium="CPU", group_idx=0))
    assert rank.answer(tokens_from(4900, 32)) == (2, Health.EXACT)
    rank.send(store([920], None, tokens_from(0, 16)))
    assert (rank.health, rank.not_indexed) == (Health.APPROXIMATE, {"unknown_parent": 1})
    assert (rank.n_resyncs, rank.is_complete) == (0, True)


def test_a_block_whose_parent_comes_later_in_its_batch_is_indexed() -> None:
    """It waits until the end of the batch."""
    rank = ReportedRank()
    rank.send(store([2], 1, tokens_from(16, 16)), store([1], None, tokens_from(0, 16)))
    assert rank.answer(tokens_from(0, 32)) == (2, Health.EXACT)


def test_a_block_that_was_left_out_is_indexed_once_the_engine_reports_it_with_its_parent() -> None:
    """The name then stands for a block with a known place."""
    rank = ReportedRank()
    rank.send(store([39], 38, tokens_from(16, 16)))
    rank.send(store([38, 39], None, tokens_from(0, 32)))
    rank.send(store([40], 39, tokens_from(32, 16)))
    assert rank.answer(tokens_from(0, 48)) == (3, Health.APPROXIMATE)
    rank.send({"type": "BlockRemoved", "block_hashes": [40, 39], "medium": "GPU"})
    assert rank.answer(tokens_from(0, 48))[0] == 1


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
@pytest.mark.parametrize("n_answers", [1, 3])
def test_the_answer_behind_prompt_embeddings_leaves_the_rank_exact(medium: str, n_answers: int) -> None:
    """No request can name the content, so no answer lacks anything."""
    rank = ReportedRank()
    first_store(rank)
    rank.send(store([1], None, tokens_from(1000, 16), extra_keys=[[b"\x01" * 32]], medium=medium))
    rank.send(store([2], 1, tokens_from(1016, 16), extra_keys=[[b"\x02" * 32]], medium=medium))
    for number in range(n_answers):
        rank.send(store([3 + number], 2 + number, tokens_from(1032 + 16 * number, 16), medium=medium))
    assert rank.answer(tokens_from(9000, 32)) == (2, Health.EXACT)
    assert rank.answer(tokens_from(1000, 48)) == (0, Health.EXACT)
    assert (rank.not_indexed, rank.n_resyncs) == ({"content_unknown": 2 + n_answers}, 0)


def test_prompt_embeddings_in_the_middle_of_a_prompt_leave_what_is_before_them() -> None:
    """The blocks before the embeddings are indexed, and those behind them are left out."""
    rank = ReportedRank()
    rank.send(store([1, 2, 3], None, tokens_from(0, 48), extra_keys=[None, None, [b"\x01" * 32]]))
    rank.send(store([4, 5], 3, tokens_from(48, 32), extra_keys=[None, None]))
    assert rank.answer(tokens_from(0, 80)) == (2, Health.EXACT)
    assert rank.not_indexed == {"content_unknown": 3}


LEFT_OUT: dict[str, dict[str, Any]] = {
    "masked": store([21], None, tokens_from(0, 32)),
    "locality": store([21], None, tokens_from(0, 16), locality="REMOTE"),
    "tail": store([21], None, tokens_from(0, 4), block_size=4),
    "duplicate_hash": store([20, 20, 21], None, tokens_from(0, 48)),
    "unplaced": store([21], None, [], block_size=0, medium="CPU"),
    "key_unknown": store([21], None, tokens_from(0, 16), extra_keys=[["poet", "a salt"]]),
}


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_blocks_behind_each_kind_of_block_that_is_left_out_are_not_lost(reason: str) -> None:
    """They are counted under the reason of the block before them."""
    rank = ReportedRank()
    first_store(rank)
    rank.send(LEFT_OUT[reason])
    before = rank.not_indexed[reason]
    rank.send(store([22, 23], 21, tokens_from(16, 32)))
    assert rank.not_indexed[reason] == before + 2
    assert (rank.health, rank.is_complete, rank.n_resyncs) == (Health.APPROXIMATE, True, 0)


def test_a_block_behind_a_lost_batch_is_a_loss() -> None:
    """The numbers show that a batch is missing, and the parent may have been in it."""
    rank = ReportedRank()
    first_store(rank)
    rank.lose_batch()
    rank.send(store([39, 40], 38, tokens_from(4000, 32)))
    assert (rank.health, rank.is_complete) == (Health.DEGRADED, False)
    assert rank.n_resyncs > 0
    rank.send({"type": "AllBlocksCleared"})
    rank.send(store([39, 40], 38, tokens_from(4000, 32)))
    assert (rank.health, rank.is_complete) == (Health.APPROXIMATE, True)


def test_a_block_behind_an_event_that_could_not_be_read_is_a_loss() -> None:
    """The event may have been its parent's store."""
    rank = ReportedRank()
    first_store(rank)
    rank.send({"type": "BlockPondered", "block_hashes": [38]})
    rank.send(store([39, 40], 38, tokens_from(4000, 32)))
    assert (rank.health, rank.is_complete) == (Health.DEGRADED, False)


def test_a_block_behind_embeddings_is_left_out_for_that_reason_also_after_a_loss() -> None:
    """What the ledger remembers explains the block; the loss explains the state of the rank."""
    rank = ReportedRank()
    rank.send(store([1, 2], None, tokens_from(1000, 32), **EMBEDDINGS))
    rank.lose_batch()
    rank.send(store([3], 2, tokens_from(1032, 16)))
    assert rank.not_indexed == {"content_unknown": 3}
    assert rank.health is Health.DEGRADED


def test_a_bridge_that_restarted_leaves_such_blocks_out_without_the_reason() -> None:
    """It remembers nothing of the earlier batches, and nothing was lost."""
    rank = ReportedRank()
    first_store(rank)
    rank.send(store([1, 2], None, tokens_from(1000, 32), **EMBEDDINGS))
    rank.restart_bridge()
    rank.send(store([3], 2, tokens_from(1032, 16)))
    assert rank.answer(tokens_from(9000, 32)) == (2, Health.APPROXIMATE)
    assert (rank.not_indexed["unknown_parent"], rank.n_resyncs) == (1, 0)


def test_the_names_that_a_ledger_remembers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten, and blocks behind them count as those of an unknown parent."""
    monkeypatch.setattr(left_out, "LEFT_OUT_NAMES_MAX", 3)
    rank = ReportedRank()
    for name in range(10, 15):
        rank.send(store([name], None, tokens_from(100 * name, 16), extra_keys=[[bytes([name])]]))
    assert rank.health is Health.EXACT
    rank.send(store([20], 14, tokens_from(0, 16)))
    assert (rank.health, rank.not_indexed["content_unknown"]) == (Health.EXACT, 6)
    rank.send(store([21], 10, tokens_from(0, 16)))
    assert (rank.health, rank.not_indexed["unknown_parent"]) == (Health.APPROXIMATE, 1)
