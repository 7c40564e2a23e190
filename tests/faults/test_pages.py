"""Pages smaller than a block whose place is not known make the rank approximate, whether or not they fill a block."""

from __future__ import annotations

from typing import Any

import pytest

from streams.core.ids import Tier
from streams.core.reducer.ordering import Health
from tests.helpers.reported_rank import BLOCK, ReportedRank, store, tokens_from
from tests.helpers.trtllm_events import block, created, pack, removed, stored, updated

pytestmark = pytest.mark.first_ring()

DIALECTS = ["sglang", "trtllm"]
SIZES = [1, 4, 8]


class PagedRank(ReportedRank):
    """A rank whose engine has pages of one size. The name of a page is 1000 and the tokens up to its end."""

    def __init__(self, dialect: str, page_size: int) -> None:
        super().__init__(dialect)
        self._is_trtllm = dialect == "trtllm"
        self._page_size = page_size

    def pages(self, first: int, end: int, medium: str = "GPU", *, parent: int | None = None) -> None:
        """Report the pages of the prompt's tokens from `first` to `end`."""
        size = min(self._page_size, end - first)
        ends = range(first + size, end + 1, size)
        before = parent if parent is not None else 1000 + first if first else None
        if self._is_trtllm:
            level = {"GPU": 0, "CPU": 1}[medium]
            blocks = [block(1000 + last, tokens_from(last - size, size), cache_level=level) for last in ends]
            self.send_payload(pack(stored(*blocks, parent=before)))
        else:
            names = [1000 + last for last in ends]
            self.send(store(names, before, tokens_from(first, end - first), block_size=size, medium=medium))

    def evict(self, first: int, end: int) -> None:
        """Report the removal of these pages."""
        names = [1000 + last for last in range(end, first, -self._page_size)]
        if self._is_trtllm:
            self.send_payload(pack(removed(*names)))
        else:
            self.send({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})

    def clear(self) -> None:
        """Report an empty cache."""
        if self._is_trtllm:
            self.send_payload(pack(created()))
        else:
            self.send({"type": "AllBlocksCleared"})


@pytest.fixture(
    params=[(dialect, size) for dialect in DIALECTS for size in SIZES], ids=lambda param: "{}-{}".format(*param)
)
def rank(request: pytest.FixtureRequest) -> PagedRank:
    """Give a rank of each engine that has pages, for each size."""
    return PagedRank(*request.param)


def test_a_block_that_began_before_a_restart_is_not_known(rank: PagedRank) -> None:
    """The bridge that restarted has not read the first half of the second block. Nothing was lost."""
    rank.pages(0, 24)
    rank.restart_bridge()
    assert rank.answer(tokens_from(0, 32)) == (1, Health.EXACT)
    rank.pages(24, 32)
    assert rank.answer(tokens_from(0, 32)) == (1, Health.APPROXIMATE)
    assert (rank.n_resyncs, rank.is_complete, set(rank.not_indexed)) == (0, True, {"unknown_parent"})
    rank.pages(32, 64)
    assert rank.answer(tokens_from(0, 64)) == (1, Health.APPROXIMATE)
    assert (rank.n_resyncs, rank.is_complete, set(rank.not_indexed)) == (0, True, {"unknown_parent"})


def test_a_block_that_begins_after_a_restart_is_exact(rank: PagedRank) -> None:
    """The pages follow the end of a block that the table has."""
    rank.pages(0, 32)
    rank.restart_bridge()
    rank.pages(32, 40)
    rank.pages(40, 64)
    assert rank.answer(tokens_from(0, 64)) == (4, Health.EXACT)
    assert not rank.not_indexed


def test_a_block_that_is_stored_again_as_a_whole_after_a_restart_is_exact(rank: PagedRank) -> None:
    """The engine repeats the pages from before, so that their places are known."""
    rank.pages(0, 24)
    rank.restart_bridge()
    rank.pages(0, 32)
    assert rank.answer(tokens_from(0, 32)) == (2, Health.EXACT)
    rank.evict(16, 32)
    assert rank.answer(tokens_from(0, 32)) == (1, Health.EXACT)


def test_the_second_half_of_a_block_that_is_evicted_and_stored_again_is_not_known(rank: PagedRank) -> None:
    """The first half is held all the time, but the bridge that restarted has not read it."""
    rank.pages(0, 32)
    rank.restart_bridge()
    rank.evict(24, 32)
    assert rank.answer(tokens_from(0, 32)) == (1, Health.EXACT)
    rank.pages(24, 32)
    assert rank.answer(tokens_from(0, 32)) == (1, Health.APPROXIMATE)


def test_a_clear_makes_the_rank_exact_again(rank: PagedRank) -> None:
    """An empty cache is known, and so is what comes after it."""
    rank.pages(0, 24)
    rank.restart_bridge()
    rank.pages(24, 32)
    rank.clear()
    assert rank.answer(tokens_from(0, 32)) == (0, Health.EXACT)
    rank.pages(0, 24)
    rank.pages(24, 32)
    assert rank.answer(tokens_from(0, 32)) == (2, Health.EXACT)


def test_the_rank_stays_approximate_over_a_further_restart(rank: PagedRank) -> None:
    """The table says so."""
    rank.pages(0, 24)
    rank.restart_bridge()
    rank.pages(24, 32)
    rank.restart_bridge()
    rank.pages(16, 16 + BLOCK)
    assert rank.answer(tokens_from(0, 32)) == (2, Health.APPROXIMATE)


@pytest.mark.parametrize("n_tokens", [8, 16, 24])
def test_pages_that_came_by_transfer_make_a_rank_approximate(rank: PagedRank, n_tokens: int) -> None:
    """The engine never reported their parent; they fill no block, one block, or more."""
    rank.pages(0, 16)
    rank.pages(4000, 4000 + n_tokens, parent=77)
    assert rank.answer(tokens_from(0, 16)) == (1, Health.APPROXIMATE)
    assert (rank.n_resyncs, rank.is_complete, set(rank.not_indexed)) == (0, True, {"unknown_parent"})


def test_a_block_of_a_lower_tier_that_began_before_a_restart_is_not_known(rank: PagedRank) -> None:
    """The rank held its first half in the host tier."""
    rank.pages(0, 24, "CPU")
    rank.restart_bridge()
    rank.pages(24, 32, "CPU")
    assert rank.answer(tokens_from(0, 32)) == (1, Health.APPROXIMATE)


def test_a_page_behind_a_lost_batch_is_a_loss(rank: PagedRank) -> None:
    """The first half of the block may have been in the batch."""
    rank.pages(0, 16)
    rank.lose_batch()
    rank.pages(24, 32)
    assert (rank.health, rank.is_complete) == (Health.DEGRADED, False)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_tail", [1, 5, 8])
def test_the_tail_of_a_prompt_in_pages_of_a_whole_block_leaves_the_rank_exact(dialect: str, n_tail: int) -> None:
    """It follows a block that is held, also after a restart. Behind a block that is not held, it has no place."""
    rank = PagedRank(dialect, BLOCK)
    rank.pages(0, 32)
    rank.pages(32, 32 + n_tail)
    rank.restart_bridge()
    rank.pages(16, 16 + n_tail)
    assert rank.answer(tokens_from(0, 32)) == (2, Health.EXACT)
    rank.pages(4000, 4000 + n_tail, parent=77)
    assert rank.answer(tokens_from(0, 32)) == (2, Health.APPROXIMATE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_page_that_moves_to_another_tier_never_adds_a_block(size: int, restarts: bool) -> None:
    """TensorRT-LLM offloads the last page first, and returns it last.

    A bridge that restarted does not know that the block has other pages. The block is found in both tiers together, so
    it then counts as one of the lower tier. A page in the middle of the block is not known to it.
    """
    rank = PagedRank("trtllm", size)
    rank.pages(0, 32)
    if restarts:
        rank.restart_bridge()
    rank.send_payload(pack(updated(1032, 0, 1)))
    assert rank.answer(tokens_from(0, 32)) == ((2, Health.EXACT) if restarts else (1, Health.APPROXIMATE))
    assert rank.blocks_in(Tier.DEVICE) == 1
    rank.send_payload(pack(updated(1032, 1, 0)))
    assert rank.answer(tokens_from(0, 32)) == ((2, Health.EXACT) if restarts else (1, Health.APPROXIMATE))
    assert rank.blocks_in(Tier.HOST) == 0
    rank.send_payload(pack(updated(1032, 0, 1), updated(1032 - size, 0, 1)))
    assert rank.health is Health.APPROXIMATE
    rank.evict(16, 32)
    assert rank.answer(tokens_from(0, 32)) == (1, Health.APPROXIMATE)
    assert (rank.n_resyncs, rank.is_complete) == (0, True)


def test_pages_behind_content_that_no_request_can_name_leave_the_rank_exact() -> None:
    """TensorRT-LLM reports tokens with an extra id in the middle of a block; nothing behind them can be asked for."""
    rank = PagedRank("trtllm", 4)
    rank.pages(0, 20)
    unnamed: list[Any] = [{"type": "unique_token", "token_id": token, "token_extra_id": 9} for token in range(4)]
    rank.send_payload(pack(stored(block(1024, []) | {"tokens": unnamed}, parent=1020)))
    rank.pages(24, 32)
    assert rank.answer(tokens_from(0, 32)) == (1, Health.EXACT)
    assert (rank.not_indexed, rank.is_complete) == ({"content_unknown": 3}, True)
